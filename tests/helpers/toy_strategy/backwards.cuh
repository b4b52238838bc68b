// The int8 product with its epilogue, a toy: a thread computes one result and walks K backwards.
//
//   acc[m, n] = sum_k (a[m, k] - za) (w[n, k] - zw[n]), exact in s32; then the epilogue of epilogue.cuh
//
//   p                pointers, strides and sizes of a, w, scales, bias and output (epilogue.cuh)
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//
// Data: codes and weights: global memory -> registers, byte by byte -> sums in registers -> epilogue -> global memory.
//
// Variants: RESULTS of a block, which has as many threads. SKUDA_CODE, SKUDA_WEIGHT, SKUDA_OUT are the elements.
#pragma once
#include "epilogue.cuh"

// Rows: RowScales or GivenRows.
template <class Rows> DEVICE void linear_backwards(const Layer& p, const Rows& rows) {
  const s64 at = (s64)blockIdx.x * RESULTS + threadIdx.x, row = at / p.n, column = at % p.n;
  if (row >= p.m) return;
  const SKUDA_CODE* const a = (const SKUDA_CODE*)p.a + row * p.a_leading;
  const SKUDA_WEIGHT* const w = (const SKUDA_WEIGHT*)p.w + column * p.w_leading;
  s32 sum = 0, a_sum = 0, w_sum = 0;
  for (s64 k = p.k; k-- > 0;) sum += a[k] * w[k], a_sum += a[k], w_sum += w[k];
  if constexpr (IsSum<SKUDA_OUT>::value) {
    ((s32*)p.output)[row * p.output_leading + column] = sum;
  } else {
    const s64 za = rows.zero_point_of(row), zw = p.weight_zero_point ? p.weight_zero_point[column] : 0;
    const f32 acc = rows.difference(sum - za * w_sum, zw, a_sum - p.k * za);
    f32 v = mul_rn(mul_rn(rows.at(row), real_at(p.weight_scale, p.weight_scale_is, column, 0.0f)), acc);
    if (p.bias != nullptr) v = v + real_at(p.bias, p.bias_is, column, 0.0f);
    put(p, row * p.output_leading + column, p.output_is, activated(p, v, p.epilogue));
  }
}
