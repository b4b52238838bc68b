// Dequantize: integer codes to floating data.
//
//   y = RN_T(RN_C(C(q - z) * s))
//
//   input           codes, input_leading bytes apart
//   output          Data, rows of columns, output_leading elements apart
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

template <int IN_FLIGHT> struct Dequantize {
  enum { V = Width<Data>::count, W = Codes<SKUDA_CODE>::packed ? 2 : 1, U = IN_FLIGHT };
  typedef Raw Held;
  const u8* input;
  s64 input_leading;
  Data* output;
  s64 output_leading;

  DEVICE Dequantize at(s64 row, s64 column) const {
    return {input + row * input_leading + column / W, input_leading, output + row * output_leading + column, output_leading};
  }
  DEVICE Held load(s64 column) const { return Codes<SKUDA_CODE>::fetch<V>(input, column); }
  template <int N> DEVICE bool quick(const Held (&)[U], const Segment<Real> (&)[N]) const { return true; }
  template <bool QUICK, int N> DEVICE void finish(const Held& h, const Segment<Real> (&g)[N], s64 column) const {
    s32 q[V];
    Real y[V];
    Codes<SKUDA_CODE>::spread(h, q);
    dequantized(q, g, y);
    store16(output + column, Chunk<Data>::pack(y));
  }
  DEVICE void single(const Segment<Real> (&g)[W], int count) const {
    s32 q[W];
    Real y[W];
#pragma unroll
    for (int j = 0; j < W; ++j) q[j] = Codes<SKUDA_CODE>::get(input, j);
    dequantized(q, g, y);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (j < count) narrow(y[j], output[j]);
    }
  }
};

template <Layout LAYOUT>
DEVICE void walk_dequantize(const u8* input, s64 input_leading, Data* output, s64 output_leading, const Scales<Data>& scales, const Shape& v) {
  const s64 rows = v.rows, columns = v.columns;
  const bool chunks = aligned(input, input_leading, rows, CODE_BYTES) && rows_of_chunks(output, output_leading, rows);
  const bool whole = gapless(rows, columns, output_leading) && gapless_codes(rows, columns, input_leading);
  walk<LAYOUT>(Dequantize<InFlight<LAYOUT>::ONE>{input, input_leading, output, output_leading}, v,
                    scales, chunks, whole);
}

KERNEL(256, BLOCKS) dequantize(
    const u8* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_dequantize<WHOLE>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, RUNS_BLOCKS) dequantize_runs(
    const u8* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_dequantize<RUNS>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) dequantize_mixed(
    const u8* input, s64 input_leading, Data* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_dequantize<MIXED>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
