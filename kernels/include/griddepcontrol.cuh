// Programmatic dependent launch (griddepcontrol): a kernel may start before the previous kernel of its stream ends, if
// its launch allows that.
//
//   it starts when = every block of the previous kernel has executed griddepcontrol.launch_dependents, or has ended
//   griddepcontrol.wait ends when = the previous kernel has ended and all of its stores are visible
//
// Data: a kernel reads and writes no memory before the wait, not even weights -> registers or shared memory. That holds
// for any kernel in front: one that never executes launch_dependents does so implicitly when its blocks end, which is
// before its stores are visible. A short kernel launches its dependents right after its own wait: earlier, they would
// only take room and wait, too.
//
// Variants: none. Before sm_90 nothing overlaps, and both functions do nothing.
#pragma once
#include "elements.cuh"

#ifndef SKUDA_HOST  // the CPU harness of the tests defines both, and checks that threads wait
DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

// Fills an array, unless it is null, after the previous kernel; all threads of the grid take part. Call it first: after
// code that only one thread runs, the compiler no longer keeps values in registers that a warp shares. It is short,
// because its code is fetched before that of the first loads.
template <class T> DEVICE void fill_array(T* to, T value, u32 count) {
  if (to == nullptr) return;
  griddepcontrol_wait();
#pragma unroll 1
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = value;
}
