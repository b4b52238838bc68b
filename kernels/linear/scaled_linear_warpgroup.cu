// Scaled linear on Hopper's wgmma: W8A8 with activation scales as an array. One launch, or two with zero points.
//
//   y = epilogue(act_scale[m] * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point[m]) (weight_q[n, k] - weight_zero_point[n]))
//   y = sum_k act_q[m, k] weight_q[n, k] if SKUDA_OUT is s32
//
//   a_map, w_map        act_q [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   act_scale           [m] (act_step 1) or [1] (act_step 0) of act_scale_is; null for sums
//   act_zero_point      as many s32, or null
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null, and all are for sums
//   output              [m, n] SKUDA_OUT, output_leading elements apart
#include "warpgroup.cuh"

WARPGROUP_KERNEL scaled_linear_warpgroup(TENSOR_MAPS, GIVEN_ROWS_PARAMETERS, WARPGROUP_PARAMETERS) {
  warpgroup_linear(a_map, w_map, GIVEN_ROWS(f32), WARPGROUP_GIVEN);
}
