// SmoothQuant linear for few tokens, limited by weight bandwidth: one static activation scale.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) (weight_q[n, k] - weight_zero_point[n]))
//
//   a_map, w_map        act_q [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
//   scratch             [m] f32 or null: filled with act_scale
#ifdef WARPS
#include "direct.cuh"
#else
#include "streamed.cuh"
#endif

#ifdef WARPS
DIRECT_KERNEL smoothquant_linear_streamed(const SKUDA_CODE* act_q, s64 act_q_leading, STATIC_ROWS_PARAMETERS(f32),
                                          DIRECT_PARAMETERS) {
  fill_array(scratch, act_scale, (u32)m);
  direct_linear(STATIC_ROWS(f32), act_q, act_q_leading, DIRECT_GIVEN);
}
#else
STREAMED_KERNEL smoothquant_linear_streamed(TENSOR_MAPS, STATIC_ROWS_PARAMETERS(f32), STREAMED_PARAMETERS) {
  fill_array(scratch, act_scale, (u32)m);
  streamed_linear(Loaded<RowScales<f32>>{&a_map, STATIC_ROWS(f32)}, w_map, STREAMED_GIVEN);
}
#endif
