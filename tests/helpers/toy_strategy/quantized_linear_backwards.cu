// Quantized linear by the toy, which walks K backwards: the activation is quantized in front.
//
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] (w[n, k] - weight_zero_point[n]))
//
//   codes, given_codes      [m, k] SKUDA_CODE, scratch, and an array of the caller or null, which is then used
//   act_scale, given_scale  sa [m], in the same way; all others are those of quantized_linear_mma.cu
#include "quantized_codes.cuh"
#include "backwards.cuh"

KERNEL(RESULTS, 1) quantized_linear_backwards(const u8* codes, const u8* given_codes, const f32* act_scale,
                                              const f32* given_scale, LAYER_PARAMETERS) {
  linear_backwards(LAYER(given_codes ? given_codes : codes, k),
                   RowScales<f32>{given_scale ? given_scale : act_scale, 0.0f, 0});
}
