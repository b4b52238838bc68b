// SmoothQuant linear for few tokens with packed 4-bit weights: one activation scale, known with the problem.
//
//   y = epilogue(act_scale * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point) w[n, k])
//
//   act_q                  [m, k] SKUDA_CODE, act_q_leading bytes apart
//   scratch                [m] f32 of the caller, or null; act_scale is written there
//   packed                 w (packed_codes.cuh)
//   weight_scale, bias     [n]; the latter may be null
//   output                 [m, n] SKUDA_OUT, output_leading elements apart
#include "packed.cuh"

PACKED_KERNEL smoothquant_linear_packed(const SKUDA_CODE* act_q, s64 act_q_leading, STATIC_ROWS_PARAMETERS(f32), PACKED_PARAMETERS) {
  fill_array(scratch, act_scale, (u32)m);
  packed_linear(STATIC_ROWS(f32), act_q, act_q_leading, PACKED_GIVEN);
}
