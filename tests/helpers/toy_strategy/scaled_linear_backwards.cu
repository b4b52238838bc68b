// Scaled linear by the toy, which walks K backwards: activation scales as an array.
//
//   y = epilogue(act_scale[m] * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point[m]) (w[n, k] - weight_zero_point[n]))
//
//   act_q        [m, k] SKUDA_CODE, act_leading bytes apart; all others are those of scaled_linear_mma.cu
#include "backwards.cuh"

KERNEL(RESULTS, 1) scaled_linear_backwards(const u8* act_q, s64 act_leading, GIVEN_ROWS_PARAMETERS, LAYER_PARAMETERS) {
  linear_backwards(LAYER(act_q, act_leading), GIVEN_ROWS(f32));
}
