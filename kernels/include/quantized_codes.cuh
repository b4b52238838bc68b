// The dynamic quantization in front of a product: codes and one scale per row, where the caller wants them or in scratch.
//
//   activation   [m, k] Data, activation_leading elements apart
//   codes, act_scale          scratch [m, k] bytes and [m] in the activation's compute type, by the plan
//   given_codes, given_scale  the same by the caller, or null; used instead
#pragma once
#include "runs.cuh"

KERNEL(512, 1) quantized_linear_codes(const Data* activation, s64 activation_leading, u8* codes, u8* given_codes,
                                      Real* act_scale, Real* given_scale, s64 m, s64 k, s32 lanes, s32 q_min,
                                      s32 q_max) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");  // the product's weights may come meanwhile
#endif
  by_runs<8>(activation, activation_leading, given_codes ? given_codes : codes, k, given_scale ? given_scale : act_scale,
             nullptr, k, k, m, 1, lanes, 0, q_min, q_max, 1, m);
}
