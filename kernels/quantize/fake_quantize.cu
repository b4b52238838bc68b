// Fake-quantize: quantize and dequantize without leaving floating point.
//
//   y = RN_T(RN_C(C(q - z) * s)), q = clamp(rne(RN_C(x / s)) + z, q_min, q_max); a zero result is +0
//
//   input, output   Data, rows of columns, *_leading elements apart
//   scale           C, or Data if scale_is_data; null: scale_value
//   zero_point      s32; null: zero_point_value
//   rows, columns   the view that all data arrays share; element e of it has segment (e / inner) % channels
//   parts           units in a segment, 0 if it is not whole chunks; with the multipliers that divide by both
//   lanes           threads that share a unit
//
// There are three entries, by how segments lie in 16-byte chunks: one segment for everything, chunks that each lie in
// one segment (`_runs`), and chunks that may span several segments (`_mixed`). Per tensor uses the first, the other
// granularities use the second or the third.
#include "affine.cuh"

KERNEL(256, BLOCKS) fake_quantize(
    const Data* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_map<WHOLE, Fake>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, RUNS_BLOCKS) fake_quantize_runs(
    const Data* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_map<RUNS, Fake>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) fake_quantize_mixed(
    const Data* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_map<MIXED, Fake>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
