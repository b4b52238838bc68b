// SmoothQuant linear on warpgroup instructions: W8A8 with one static activation scale, no zero points. One launch.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k act_q[m, k] weight_q[n, k])
//
//   a_map, w_map        act_q [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   weight_scale, bias  [n]; bias may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
//   scratch             [m] f32 or null: filled with act_scale
#include "warpgroup.cuh"

WARPGROUP_KERNEL smoothquant_linear_warpgroup(TENSOR_MAPS, f32 act_scale, f32* scratch, WARPGROUP_PARAMETERS) {
  if (scratch != nullptr) {
    wait_for_previous_kernel();
    for (s64 i = (s64)blockIdx.x * blockDim.x + threadIdx.x; i < m; i += (s64)gridDim.x * blockDim.x) scratch[i] = act_scale;
  }
  warpgroup_linear(a_map, w_map, RowScales<f32>{nullptr, act_scale}, WARPGROUP_GIVEN);
}
