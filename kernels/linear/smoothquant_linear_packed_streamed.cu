// SmoothQuant linear with packed 4-bit weights on Hopper's wgmma: one activation scale, known with the problem.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) w[n, k])
//
//   a_map                  act_q [m, k] SKUDA_CODE
//   scratch                [m] f32 of the caller, or null; act_scale is written there
//   packed                 w (packed_codes.cuh)
//   weight_scale, bias     [n]; the latter may be null
//   output                 [m, n] SKUDA_OUT, output_leading elements apart
#include "packed_streamed.cuh"

PACKED_STREAMED_KERNEL smoothquant_linear_packed_streamed(const __grid_constant__ TensorMap a_map,
                                                            STATIC_ROWS_PARAMETERS(f32), PACKED_STREAMED_PARAMETERS) {
  fill_array(scratch, act_scale, (u32)m);
  streamed_packed_linear(a_map, STATIC_ROWS(f32), PACKED_STREAMED_GIVEN);
}
