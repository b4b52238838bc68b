// SmoothQuant linear for few tokens, limited by weight bandwidth: one static activation scale, no zero points.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k act_q[m, k] weight_q[n, k])
//
//   a_map, w_map        act_q [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   weight_scale, bias  [n]; bias may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
//   scratch             [m] f32 or null: filled with act_scale
#include "streamed.cuh"

STREAMED_KERNEL smoothquant_linear_streamed(TENSOR_MAPS, f32 act_scale, f32* scratch, EPILOGUE_PARAMETERS, s32 atoms, s32 stages) {
  if (scratch != nullptr) {
    wait_for_previous_kernel();
    for (s64 i = (s64)blockIdx.x * blockDim.x + threadIdx.x; i < m; i += (s64)gridDim.x * blockDim.x) scratch[i] = act_scale;
  }
  streamed_linear(Loaded<RowScales<f32>>{&a_map, {nullptr, act_scale}}, w_map, EPILOGUE, k, (u32)atoms, (u32)stages);
}
