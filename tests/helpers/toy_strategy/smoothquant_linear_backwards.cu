// SmoothQuant linear by the toy, which walks K backwards: one static activation scale.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) (w[n, k] - weight_zero_point[n]))
//
//   act_q        [m, k] SKUDA_CODE, act_leading bytes apart; all others are those of smoothquant_linear_mma.cu
#include "backwards.cuh"

KERNEL(RESULTS, 1) smoothquant_linear_backwards(const u8* act_q, s64 act_leading, STATIC_ROWS_PARAMETERS(f32),
                                                LAYER_PARAMETERS) {
  for (s64 row = (s64)blockIdx.x * RESULTS + threadIdx.x; scratch != nullptr && row < m; row += (s64)gridDim.x * RESULTS) {
    scratch[row] = act_scale;
  }
  linear_backwards(LAYER(act_q, act_leading), STATIC_ROWS(f32));
}
