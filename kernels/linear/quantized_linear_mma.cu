// Quantized linear on the tensor cores of any card since Ampere (mma.sync): any shape, alignment and zero point. Two
// launches.
//
//   codes, sa = dynamic range, symmetric, per token (`quantized_linear_codes`)
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] (w[n, k] - weight_zero_point[n]))
//
//   codes, given_codes      [m, k] SKUDA_CODE, scratch, and an array of the caller or null, which is then used
//   act_scale, given_scale  sa [m], in the same way
//   w            [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output       [m, n] SKUDA_OUT, output_leading elements apart; output_scale, output_zero_point: one each, for codes
//
// SKUDA_TILE names the tile (mma.cuh). SKUDA_ZERO_POINTS is 0 if weight_zero_point is null.
#include "quantized_codes.cuh"
#include "mma.cuh"

KERNEL(SKUDA_TILE::THREADS, SKUDA_TILE::RESIDENT) quantized_linear_mma(
    const u8* codes, const u8* given_codes, const f32* act_scale, const f32* given_scale, LAYER_PARAMETERS) {
  linear_by_mma<ACode, WCode, SKUDA_OUT, SKUDA_ZERO_POINTS, SKUDA_TILE>(
      LAYER(given_codes ? given_codes : codes, A_HALVES * k), RowScales<f32>{given_scale ? given_scale : act_scale, 0.0f, 0});
}
