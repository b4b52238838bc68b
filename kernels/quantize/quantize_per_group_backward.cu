// Gradient of quantize per group, straight through: one scale and zero point per run of `inner` elements of a row.
//
//   dx = q_min <= rne(RN_C(x / s)) + z <= q_max ? RN_T(RN_C(dy / s)) : 0
//
//   d_output, input, d_input   Data, rows of columns, *_leading elements apart
//   scale           C, or Data where scale_is_data; null: scale_value
//   zero_point      s32; null: zero_point_value
//   rows, columns   the view that all data arrays share; element e of it has segment (e / inner) % channels
//   parts           units in a segment, 0 where it is not whole chunks; with the multipliers that divide by both
//   lanes           threads that share a unit
//
// Two entries: in the plain one a 16-byte chunk lies within one segment, in `_mixed` its elements may have several.
#include "affine.cuh"

KERNEL(256, DIVIDED_BLOCKS) quantize_per_group_backward(
    const Data* d_output, s64 d_output_leading, const Data* input, s64 input_leading, Data* d_input,
    s64 d_input_leading, SEGMENTS, SHAPE) {
  gradient<RUNS, Divided>(d_output, d_output_leading, input, input_leading, d_input, d_input_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) quantize_per_group_backward_mixed(
    const Data* d_output, s64 d_output_leading, const Data* input, s64 input_leading, Data* d_input,
    s64 d_input_leading, SEGMENTS, SHAPE) {
  gradient<MIXED, Divided>(d_output, d_output_leading, input, input_leading, d_input, d_input_leading, SCALES, SHAPE_GIVEN);
}
