// Quantized linear, plain: W8A8 with a dynamic activation scale per token, any shape, any epilogue. Two launches.
//
//   codes, sa = dynamic range, symmetric, per token (`quantized_linear_codes`)
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] (weight_q[n, k] - weight_zero_point[n]))
//
//   activation   [m, k] Data, activation_leading elements apart
//   codes, act_scale          scratch [m, k] bytes and [m] in the activation's compute type, by the plan
//   given_codes, given_scale  the same by the caller, or null; used instead
//   weight_q     [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output       [m, n] of output_is, output_leading elements apart
//
// Entries of the product say what is computed in (f32, f64) and what the codes are (s8, u8).
#include "runs.cuh"
#include "linear.cuh"

KERNEL(512, 1) quantized_linear_codes(const Data* activation, s64 activation_leading, u8* codes, u8* given_codes,
                                      Real* act_scale, Real* given_scale, s64 m, s64 k, s32 lanes, s32 q_min,
                                      s32 q_max) {
  by_runs<8>(activation, activation_leading, given_codes ? given_codes : codes, k, given_scale ? given_scale : act_scale,
             nullptr, k, k, m, 1, lanes, 0, q_min, q_max, 1, m);
}

#define PRODUCT(C, A)                                                                                              \
  linear<A, SKUDA_WEIGHT, C, Real>(LAYER(given_codes ? given_codes : codes, k, 0),                                  \
                                   given_scale ? given_scale : act_scale, (C)0)
#define CODES_AND_SCALES const u8 *codes, const u8 *given_codes, const Real *act_scale, const Real *given_scale

KERNEL(256, 2) quantized_linear_f32_s8(CODES_AND_SCALES, LAYER_TAIL) { PRODUCT(f32, s8); }
KERNEL(256, 2) quantized_linear_f32_u8(CODES_AND_SCALES, LAYER_TAIL) { PRODUCT(f32, u8); }
KERNEL(256, 2) quantized_linear_f64_s8(CODES_AND_SCALES, LAYER_TAIL) { PRODUCT(f64, s8); }
KERNEL(256, 2) quantized_linear_f64_u8(CODES_AND_SCALES, LAYER_TAIL) { PRODUCT(f64, u8); }
