// The dynamic quantization in front of a product: codes and one scale for each row.
//
//   act_scale[m] = RN_C(max_k |activation[m, k]| / q_max) or 1
//   codes[m, k] = clamp(rne(RN_C(activation[m, k] / act_scale[m])), q_min, q_max)
//
//   activation   [m, k] Data, activation_leading elements apart
//   codes, act_scale          scratch: [m, k] codes, and [m] in the activation's compute type
//   given_codes, given_scale  the same arrays of the caller, or null; if given, they are used instead
//
// Data: global memory -> registers, once -> global memory (runs.cuh). The product then reads the codes from L2. On
// Hopper the product's kernel may start during the quantization, and then waits for it.
//
// Variants: `lanes` threads share a row. For short rows they are lanes of a warp: a block takes several rows, and the
// reduction needs only shuffles. For long rows they are the whole block, so that every thread has work. Any m and k.
#pragma once
#include "griddepcontrol.cuh"
#include "runs.cuh"

KERNEL(512, 1) quantized_linear_codes(const Data* activation, s64 activation_leading, u8* codes, u8* given_codes,
                                      Real* act_scale, Real* given_scale, s64 m, s64 k, s32 lanes, s32 q_min,
                                      s32 q_max) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  by_runs<8>(activation, activation_leading, given_codes ? given_codes : codes, k * Halves<SKUDA_CODE>::count,
             given_scale ? given_scale : act_scale, nullptr, k, k, m, 1, lanes, 0, q_min, q_max, 1, m);
}
