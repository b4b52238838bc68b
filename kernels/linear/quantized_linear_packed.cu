// Quantized linear for few tokens with packed 4-bit weights: a dynamic activation scale per token. Two launches.
//
//   codes, sa = dynamic range, symmetric, per token (`quantized_linear_codes`)
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] w[n, k])
//
//   codes, given_codes     [m, k] SKUDA_CODE, scratch, and an array of the caller or null, which is then used
//   scales, given          sa [m], in the same way
//   packed                 w (packed_codes.cuh)
//   weight_scale, bias     [n]; the latter may be null
//   output                 [m, n] SKUDA_OUT, output_leading elements apart
#include "quantized_codes.cuh"
#include "packed.cuh"

PACKED_KERNEL quantized_linear_packed(const SKUDA_CODE* codes, const SKUDA_CODE* given_codes, const f32* scales,
                                      const f32* given, PACKED_PARAMETERS) {
  packed_linear(RowScales<f32>{given ? given : scales, 0.0f, 0}, given_codes ? given_codes : codes, k, PACKED_GIVEN);
}
