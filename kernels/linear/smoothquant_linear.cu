// SmoothQuant linear, plain: W8A8 with one static activation scale, any shape, any epilogue.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) (weight_q[n, k] - weight_zero_point[n]))
//
//   act_q        [m, k] s8 (`smoothquant_linear`) or u8 (`smoothquant_linear_u8`), act_leading bytes apart
//   weight_q     [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output       [m, n] of output_is, output_leading elements apart
//   scratch      [m] SKUDA_REAL or null: filled with act_scale
#include "plain.cuh"

typedef SKUDA_REAL Real;

template <class A>
DEVICE void layer(const u8* act_q, s64 act_leading, STATIC_ROWS_PARAMETERS(Real), LAYER_PARAMETERS) {
  if (scratch != nullptr && blockIdx.y == 0 && threadIdx.x < 64) {
    const s64 row = (s64)blockIdx.x * 64 + threadIdx.x;
    if (row < m) scratch[row] = act_scale;
  }
  linear<A, WCode, Real>(LAYER(act_q, act_leading), STATIC_ROWS(Real));
}

#define GIVEN                                                                                                      \
  act_q, act_leading, act_scale, act_zero_point, scratch, w, w_leading, weight_scale, weight_scale_is,              \
      weight_zero_point, bias, bias_is, output_scale, output_scale_value, output_zero_point, output_zero_point_value, \
      output, output_leading, m, n, k, epilogue, output_is

KERNEL(256, 2) smoothquant_linear(const u8* act_q, s64 act_leading, STATIC_ROWS_PARAMETERS(Real), LAYER_PARAMETERS) {
  layer<s8>(GIVEN);
}

KERNEL(256, 2) smoothquant_linear_u8(const u8* act_q, s64 act_leading, STATIC_ROWS_PARAMETERS(Real), LAYER_PARAMETERS) {
  layer<u8>(GIVEN);
}
