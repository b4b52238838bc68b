// Quantized linear for few tokens, limited by weight bandwidth: a dynamic activation scale per token.
//
//   codes, sa = dynamic range, symmetric, per token
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] weight_q[n, k])
//
// If ROWS is defined, every block quantizes all tokens itself, in one launch; else `quantized_linear_codes` does so first.
//
//   activation          [m, k] SKUDA_DATA, activation_leading elements apart
//   a_map, w_map        codes [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   scales, given       [m] f32 from the plan, and from the caller or null; the caller's is used if given
//   given_codes         [m, k] SKUDA_CODE, from the caller or null: filled
//   weight_scale, bias  [n]; bias may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
#ifndef ROWS
#include "quantized_codes.cuh"
#endif
#include "streamed.cuh"

#ifdef ROWS
STREAMED_KERNEL quantized_linear_streamed(const __grid_constant__ TensorMap w_map, const SKUDA_DATA* activation,
                                          s64 activation_leading, u8* given_codes, f32* given, s32 q_min, s32 q_max,
                                          EPILOGUE_PARAMETERS, s32 atoms, s32 stages) {
  streamed_linear(Quantized{activation, activation_leading, given_codes, given, q_min, q_max}, w_map, EPILOGUE, k, (u32)atoms,
                  (u32)stages);
}
#else
STREAMED_KERNEL quantized_linear_streamed(TENSOR_MAPS, const f32* scales, const f32* given, EPILOGUE_PARAMETERS, s32 atoms,
                                          s32 stages) {
  streamed_linear(Loaded<RowScales<f32>>{&a_map, {given ? given : scales, 0.0f}}, w_map, EPILOGUE, k, (u32)atoms, (u32)stages);
}
#endif
