// Fake-quantize per tensor: one scale and zero point for everything.
//
//   y = RN_T(RN_C(C(q - z) * s)), q = clamp(rne(RN_C(x / s)) + z, q_min, q_max); a zero result is +0
//
//   input, output   Data, rows of columns, *_leading elements apart
//   scale           C, or Data where scale_is_data; null: scale_value
//   zero_point      s32; null: zero_point_value
//   rows, columns   the view that all data arrays share; element e of it has segment (e / inner) % channels
//   parts           units in a segment, 0 where it is not whole chunks; with the multipliers that divide by both
//   lanes           threads that share a unit
#include "affine.cuh"

KERNEL(256, BLOCKS) fake_quantize(
    const Data* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  map<WHOLE, Fake>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
