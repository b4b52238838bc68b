// Quantized linear for few tokens, limited by weight bandwidth: a dynamic activation scale per token.
//
//   codes, sa = dynamic range, symmetric, per token
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] (weight_q[n, k] - weight_zero_point[n]))
//
// If QUANTIZED_TOKENS is defined, every block quantizes all tokens itself, in one launch; else `quantized_linear_codes`
// does so first. If WARPS is defined, weights go straight to registers (direct.cuh), else through shared memory
// (streamed.cuh).
//
//   activation          [m, k] SKUDA_DATA, activation_leading elements apart
//   a_map, w_map        codes [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   scales, given       [m] f32 scratch, and an array of the caller or null, which is then used
//   given_codes         [m, k] SKUDA_CODE of the caller, or null; the kernel fills it
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
#ifndef QUANTIZED_TOKENS
#include "quantized_codes.cuh"
#endif
#ifdef WARPS
#include "direct.cuh"
#else
#include "streamed.cuh"
#endif

#ifdef WARPS
DIRECT_KERNEL quantized_linear_streamed(const SKUDA_CODE* codes, const SKUDA_CODE* given_codes, const f32* scales,
                                        const f32* given, DIRECT_PARAMETERS) {
  direct_linear(RowScales<f32>{given ? given : scales, 0.0f, 0}, given_codes ? given_codes : codes, k, DIRECT_GIVEN);
}
#elif defined(QUANTIZED_TOKENS)
STREAMED_KERNEL quantized_linear_streamed(const __grid_constant__ TensorMap w_map, const SKUDA_DATA* activation,
                                          s64 activation_leading, u8* given_codes, f32* given, s32 q_min, s32 q_max,
                                          STREAMED_PARAMETERS) {
  streamed_linear(Quantized{activation, activation_leading, given_codes, given, q_min, q_max}, w_map, STREAMED_GIVEN);
}
#else
STREAMED_KERNEL quantized_linear_streamed(TENSOR_MAPS, const f32* scales, const f32* given, STREAMED_PARAMETERS) {
  streamed_linear(Loaded<RowScales<f32>>{&a_map, {given ? given : scales, 0.0f, 0}}, w_map, STREAMED_GIVEN);
}
#endif
