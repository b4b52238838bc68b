#pragma once
#include "deeper.cuh"
