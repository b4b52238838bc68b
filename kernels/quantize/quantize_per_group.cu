// Quantize per group: one scale and zero point per run of `inner` elements of a row.
//
//   q = clamp(rne(RN_C(x / s)) + z, q_min, q_max)
//
//   input           Data, rows of columns, input_leading elements apart
//   output          codes, output_leading bytes apart
//   scale           C, or Data where scale_is_data; null: scale_value
//   zero_point      s32; null: zero_point_value
//   rows, columns   the view that all data arrays share; element e of it has segment (e / inner) % channels
//   parts           units in a segment, 0 where it is not whole chunks; with the multipliers that divide by both
//   lanes           threads that share a unit
//
// Two entries: in the plain one a 16-byte chunk lies within one segment, in `_mixed` its elements may have several.
#include "affine.cuh"

KERNEL(256, BLOCKS) quantize_per_group(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  quantize<RUNS>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) quantize_per_group_mixed(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  quantize<MIXED>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
