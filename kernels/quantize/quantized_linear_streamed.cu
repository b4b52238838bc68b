// Quantized linear for few tokens, as fast as the weights arrive: a dynamic activation scale per token.
//
//   codes, sa = dynamic range, symmetric, per token
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] weight_q[n, k])
//
// Where ROWS is given, every block makes the codes of all tokens itself: one launch. Else `quantized_linear_codes` does.
//
//   activation          [m, k] SKUDA_DATA, activation_leading elements apart
//   a_map, w_map        codes [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   scales, given       [m] f32 by the plan, and by the caller or null; the latter is used where it is given
//   given_codes         [m, k] SKUDA_CODE, by the caller or null: filled
//   weight_scale, bias  [n]; bias may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
#ifndef ROWS
#include "quantized_codes.cuh"
#endif
#include "streamed_linear.cuh"

#ifdef ROWS
STREAMED_KERNEL quantized_linear_streamed(const __grid_constant__ TensorMap w_map, const SKUDA_DATA* activation,
                                          s64 activation_leading, u8* given_codes, f32* given, s32 q_min, s32 q_max,
                                          EPILOGUE_TAIL, s32 atoms, s32 stages) {
  streamed_linear(Quantized{activation, activation_leading, given_codes, given, q_min, q_max}, w_map, TAIL, k, (u32)atoms,
                  (u32)stages);
}
#else
STREAMED_KERNEL quantized_linear_streamed(TENSOR_MAPS, const f32* scales, const f32* given, EPILOGUE_TAIL, s32 atoms,
                                          s32 stages) {
  streamed_linear(Loaded{&a_map, given ? given : scales, 0.0f}, w_map, TAIL, k, (u32)atoms, (u32)stages);
}
#endif
