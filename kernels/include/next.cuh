// Programmatic dependent launch: a kernel may start before the previous one of its stream ends, if its launch allows that.
//
//   it starts when = every block of the previous kernel has let it, or has ended
//   it waits until = the previous kernel has ended and all of its stores can be seen
//
// Data: memory, weights included, is neither read nor written before the wait -> registers or shared memory. That holds
// whoever is in front: a kernel that never lets the next one start does so when its blocks end, which is before their stores
// can be seen.
//
// Variants: none; before sm_90 nothing overlaps, and nothing happens.
#pragma once
#include "elements.cuh"

#ifndef SKUDA_HOST  // the CPU harness of the tests checks that threads wait
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif
