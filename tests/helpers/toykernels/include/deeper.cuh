#pragma once
typedef long long s64;
