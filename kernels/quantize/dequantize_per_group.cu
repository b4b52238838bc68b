// Dequantize per group: one scale and zero point per run of `inner` elements of a row.
//
//   y = RN_T(RN_C(C(q - z) * s))
//
//   input           codes, input_leading bytes apart
//   output          Data, rows of columns, output_leading elements apart
//   scale           C, or Data where scale_is_data; null: scale_value
//   zero_point      s32; null: zero_point_value
//   rows, columns   the view that all data arrays share; element e of it has segment (e / inner) % channels
//   parts           units in a segment, 0 where it is not whole chunks; with the multipliers that divide by both
//   lanes           threads that share a unit
//
// Two entries: in the plain one a 16-byte chunk lies within one segment, in `_mixed` its elements may have several.
#include "affine.cuh"

KERNEL(256, BLOCKS) dequantize_per_group(
    const u8* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  dequantize<RUNS>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) dequantize_per_group_mixed(
    const u8* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  dequantize<MIXED>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
