// Quantized linear on Hopper's wgmma: W8A8 with a dynamic activation scale per token. Two launches, or three
// with zero points.
//
//   codes, sa = dynamic range, symmetric, per token (`quantized_linear_codes`)
//   y = epilogue(sa[m] * weight_scale[n] * sum_k codes[m, k] (weight_q[n, k] - weight_zero_point[n]))
//
//   a_map, w_map        codes [m, k] SKUDA_CODE, weight_q [n, k] SKUDA_WEIGHT
//   scales, given       [m] f32 scratch, and an array of the caller or null, which is then used
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output              [m, n] SKUDA_OUT, output_leading elements apart
#include "quantized_codes.cuh"
#include "warpgroup.cuh"

WARPGROUP_KERNEL quantized_linear_warpgroup(TENSOR_MAPS, const f32* scales, const f32* given, WARPGROUP_PARAMETERS) {
  warpgroup_linear(a_map, w_map, RowScales<f32>{given ? given : scales, 0.0f, 0}, WARPGROUP_GIVEN);
}
