// SmoothQuant linear on the tensor cores of any card since Ampere (mma.sync): any shape, alignment and zero point.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) (w[n, k] - weight_zero_point[n]))
//
//   act_q        [m, k] SKUDA_CODE, act_leading bytes apart
//   w            [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output       [m, n] SKUDA_OUT, output_leading elements apart; output_scale, output_zero_point: one each, for codes
//   scratch      [m] or null: filled with act_scale
//
// SKUDA_TILE names the tile (mma.cuh). SKUDA_ZERO_POINTS is 0 if act_zero_point is 0 and
// weight_zero_point is null.
#include "mma.cuh"

KERNEL(SKUDA_TILE::THREADS, SKUDA_TILE::RESIDENT) smoothquant_linear_mma(
    const u8* act_q, s64 act_leading, STATIC_ROWS_PARAMETERS(f32), LAYER_PARAMETERS) {
  if (scratch != nullptr) {
    for (s64 row = (s64)blockIdx.x * blockDim.x + threadIdx.x; row < m; row += (s64)gridDim.x * blockDim.x) {
      scratch[row] = act_scale;
    }
  }
  linear_by_mma<ACode, WCode, SKUDA_OUT, SKUDA_ZERO_POINTS, SKUDA_TILE>(
      LAYER(act_q, act_leading), STATIC_ROWS(f32));
}
