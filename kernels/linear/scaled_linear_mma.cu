// Scaled linear on the tensor cores of any card since Ampere (mma.sync): any shape, alignment and zero points.
//
//   y = epilogue(act_scale[m] * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point[m]) (w[n, k] - weight_zero_point[n]))
//   y = sum_k act_q[m, k] w[n, k] if SKUDA_OUT is s32
//
//   act_q        [m, k] SKUDA_CODE, act_leading bytes apart
//   act_scale    [m] (act_step 1) or [1] (act_step 0) of act_scale_is; null for sums
//   act_zero_point   as many s32, or null
//   w            [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null, and all are for sums
//   output       [m, n] SKUDA_OUT, output_leading elements apart; output_scale, output_zero_point: one each, for codes
//
// SKUDA_TILE names the tile (mma.cuh). SKUDA_ZERO_POINTS is 0 if both zero points are null.
#include "mma.cuh"

KERNEL(SKUDA_TILE::THREADS, SKUDA_TILE::RESIDENT) scaled_linear_mma(
    const u8* act_q, s64 act_leading, GIVEN_ROWS_PARAMETERS, LAYER_PARAMETERS) {
  linear_by_mma<ACode, WCode, SKUDA_OUT, SKUDA_ZERO_POINTS, SKUDA_TILE>(LAYER(act_q, act_leading),
                                                                                    GIVEN_ROWS(f32));
}
