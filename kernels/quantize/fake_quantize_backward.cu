// Gradient of fake-quantize, straight through.
//
//   dx = q_min <= rne(RN_C(x / s)) + z <= q_max ? dy : 0
//
//   d_output, input, d_input   Data, rows of columns, *_leading elements apart
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

KERNEL(256, GRADIENT_BLOCKS) fake_quantize_backward(
    const Data* d_output, s64 d_output_leading, const Data* input, s64 input_leading, Data* d_input,
    s64 d_input_leading, SEGMENTS, SHAPE) {
  walk_gradient<WHOLE, Passed>(
      d_output, d_output_leading, input, input_leading, d_input, d_input_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, GRADIENT_RUNS_BLOCKS) fake_quantize_backward_runs(
    const Data* d_output, s64 d_output_leading, const Data* input, s64 input_leading, Data* d_input,
    s64 d_input_leading, SEGMENTS, SHAPE) {
  walk_gradient<RUNS, Passed>(
      d_output, d_output_leading, input, input_leading, d_input, d_input_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) fake_quantize_backward_mixed(
    const Data* d_output, s64 d_output_leading, const Data* input, s64 input_leading, Data* d_input,
    s64 d_input_leading, SEGMENTS, SHAPE) {
  walk_gradient<MIXED, Passed>(
      d_output, d_output_leading, input, input_leading, d_input, d_input_leading, SCALES, SHAPE_GIVEN);
}
