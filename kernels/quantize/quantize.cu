// Quantize: floating data to integer codes.
//
//   q = clamp(rne(RN_C(x / s)) + z, q_min, q_max)
//
//   input           Data, rows of columns, input_leading elements apart
//   output          codes, output_leading bytes apart
//   scale           C, or Data if scale_is_data; null: scale_value
//   zero_point      s32; null: zero_point_value
//   rows, columns   the view that all data arrays share; element e of it has segment (e / inner) % channels
//   parts           units in a segment, 0 if it is not whole chunks; with the multipliers that divide by both
//   lanes           threads that share a unit
//
// There are three kinds of entries, by how segments lie in 16-byte chunks: one segment for everything, chunks that each
// lie in one segment (`_runs`), and chunks that may span several segments (`_mixed`). Per tensor uses the first, the
// other granularities use the second or the third. The first two also exist with 8 chunks in flight (`_8`), for many
// chunks.
#include "affine.cuh"

KERNEL(256, BLOCKS) quantize(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<WHOLE>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, RUNS_BLOCKS) quantize_runs(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<RUNS>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, BLOCKS) quantize_8(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<WHOLE, OF_MANY>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, RUNS_BLOCKS) quantize_runs_8(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<RUNS, OF_MANY>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) quantize_mixed(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<MIXED>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
