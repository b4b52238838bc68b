// SmoothQuant linear on Hopper's wgmma: W8A8 with one static activation scale. One launch, or two with zero points.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) (weight_q[n, k] - weight_zero_point[n]))
//
//   a_map, w_map        act_q [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
//   scratch             [m] f32 or null: filled with act_scale
#include "warpgroup.cuh"

WARPGROUP_KERNEL smoothquant_linear_warpgroup(TENSOR_MAPS, STATIC_ROWS_PARAMETERS(f32), WARPGROUP_PARAMETERS) {
  fill_array(scratch, act_scale, (u32)m);
  warpgroup_linear(a_map, w_map, STATIC_ROWS(f32), WARPGROUP_GIVEN);
}
