// Quantized linear with packed 4-bit weights on Hopper's wgmma: a dynamic activation scale per token. Two launches.
//
//   codes, sa = dynamic range, symmetric, per token (`quantized_linear_codes`)
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] w[n, k])
//
//   a_map                  codes [m, k] SKUDA_CODE, of scratch or of the caller
//   scales, given          sa [m], scratch, and an array of the caller or null, which is then used
//   packed                 w (packed_codes.cuh)
//   weight_scale, bias     [n]; the latter may be null
//   output                 [m, n] SKUDA_OUT, output_leading elements apart
#include "quantized_codes.cuh"
#include "packed_streamed.cuh"

PACKED_STREAMED_KERNEL quantized_linear_packed_streamed(const __grid_constant__ TensorMap a_map, const f32* scales,
                                                          const f32* given, PACKED_STREAMED_PARAMETERS) {
  streamed_packed_linear(a_map, RowScales<f32>{given ? given : scales, 0.0f, 0}, PACKED_STREAMED_GIVEN);
}
