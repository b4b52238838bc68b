// Scaled linear with packed 4-bit weights on Hopper's wgmma: activation scales as an array.
//
//   y = epilogue(act_scale[m] * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point[m]) w[n, k])
//   y = sum_k act_q[m, k] w[n, k] if SKUDA_OUT is s32
//
//   a_map                  act_q [m, k] SKUDA_CODE
//   act_scale              [m] (act_step 1) or [1] (act_step 0) of act_scale_is; null for sums
//   act_zero_point         as many s32, or null
//   packed                 w (packed_codes.cuh)
//   weight_scale, bias     [n]; the latter may be null, and both are for sums
//   output                 [m, n] SKUDA_OUT, output_leading elements apart
#include "packed_streamed.cuh"

PACKED_STREAMED_KERNEL scaled_linear_packed_streamed(const __grid_constant__ TensorMap a_map, GIVEN_ROWS_PARAMETERS,
                                                       PACKED_STREAMED_PARAMETERS) {
  streamed_packed_linear(a_map, GIVEN_ROWS(f32), PACKED_STREAMED_GIVEN);
}
