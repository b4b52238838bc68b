// Quantized linear, plain: W8A8 with a dynamic activation scale per token, any shape, any epilogue. Two launches.
//
//   codes, sa = dynamic range, symmetric, per token (`quantized_linear_codes`)
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] (weight_q[n, k] - weight_zero_point[n]))
//
//   activation   [m, k] Data, activation_leading elements apart
//   codes, act_scale          scratch: [m, k] bytes, and [m] in the activation's compute type
//   given_codes, given_scale  the same arrays of the caller, or null; if given, they are used instead
//   weight_q     [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output       [m, n] of output_is, output_leading elements apart
//
// The names of the product's entries give the compute type (f32, f64) and the element of the codes (s8, u8).
#include "quantized_codes.cuh"
#include "plain.cuh"

#define PRODUCT(C, A)                                                                                              \
  linear<A, WCode, C>(LAYER(given_codes ? given_codes : codes, A_HALVES * k),                                        \
                             RowScales<Real, C>{given_scale ? given_scale : act_scale, (C)0, 0})
#define CODES_AND_SCALES const u8 *codes, const u8 *given_codes, const Real *act_scale, const Real *given_scale

KERNEL(256, 2) quantized_linear_f32_s8(CODES_AND_SCALES, LAYER_PARAMETERS) { PRODUCT(f32, s8); }
KERNEL(256, 2) quantized_linear_f32_u8(CODES_AND_SCALES, LAYER_PARAMETERS) { PRODUCT(f32, u8); }
KERNEL(256, 2) quantized_linear_f64_s8(CODES_AND_SCALES, LAYER_PARAMETERS) { PRODUCT(f64, s8); }
KERNEL(256, 2) quantized_linear_f64_u8(CODES_AND_SCALES, LAYER_PARAMETERS) { PRODUCT(f64, u8); }
