// Scaled linear, plain: W8A8 with scales and zero points as arrays, any shape, any epilogue; or the exact sums.
//
//   y = epilogue(act_scale[m] * weight_scale[n] * sum_k (act_q[m, k] - act_zero_point[m]) (weight_q[n, k] - weight_zero_point[n]))
//   y = sum_k act_q[m, k] weight_q[n, k] for sums, in s32, or in s64 for codes of 16 bits
//
//   act_q        [m, k] s8, or u8 for the entries that end in _u8, act_leading bytes apart
//   act_scale    [m] (act_step 1) or [1] (act_step 0) of act_scale_is; null for sums
//   act_zero_point   as many s32, or null
//   weight_q     [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null, and all are for sums
//   output       [m, n] of output_is, output_leading elements apart; s32 or s64 for sums
#include "plain.cuh"

typedef SKUDA_REAL Real;

#define PRODUCT(C, A) linear<A, WCode, C>(LAYER(act_q, act_leading), GIVEN_ROWS(Real))
#define PARAMETERS const u8 *act_q, s64 act_leading, GIVEN_ROWS_PARAMETERS, LAYER_PARAMETERS

KERNEL(256, 2) scaled_linear(PARAMETERS) { PRODUCT(Real, s8); }
KERNEL(256, 2) scaled_linear_u8(PARAMETERS) { PRODUCT(Real, u8); }
KERNEL(256, 2) scaled_linear_sums(PARAMETERS) { PRODUCT(CodeSum<(A_HALVES > 1)>::type, s8); }
KERNEL(256, 2) scaled_linear_sums_u8(PARAMETERS) { PRODUCT(s32, u8); }
