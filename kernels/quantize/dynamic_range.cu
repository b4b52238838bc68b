// Dynamic-range quantize: scale and zero point from the range of every segment, then the codes.
//
//   lo = min(0, min x), hi = max(0, max x) over the segment, NaN skipped
//   symmetric:   s = RN_C(max(hi, -lo) / q_max), 1 if 0;          z = 0
//   asymmetric:  s = RN_C(RN_C(hi - lo) / (q_max - q_min)), 1 if 0;  z = clamp(q_min - rne(RN_C(lo / s)), q_min, q_max)
//   q = clamp(rne(RN_C(x / s)) + z, q_min, q_max)
//
//   input           Data, rows of columns, input_leading elements apart
//   output          codes, output_leading bytes apart
//   scale_out       C, one per segment
//   zero_point_out  s32, one per segment
//   partial         C, scratch: lows and highs of parts of a segment
//
// A segment that is one run (token, group, first axis) is read once: `dynamic_range_R` holds it in R chunks a thread. A
// segment that is spread (tensor, last axis) takes three launches: partial ranges, scales, codes. Maxima and minima do
// not depend on the order in which they are taken, so every road gives the same bits.
#include "runs.cuh"

#define BY_RUNS_PARAMETERS \
  const Data *input, s64 input_leading, u8 *output, s64 output_leading, Real *scale_out, s32 *zero_point_out, s64 rows, \
      s64 columns, s64 inner, s64 segments, s32 runs, s32 lanes, s32 asymmetric, s32 q_min, s32 q_max, s32 codes
#define BY_RUNS_ARGUMENTS \
  input, input_leading, output, output_leading, scale_out, zero_point_out, columns, inner, segments, runs, lanes, asymmetric, \
      q_min, q_max, codes, rows

KERNEL(256, 2) dynamic_range_1(BY_RUNS_PARAMETERS) { by_runs<1>(BY_RUNS_ARGUMENTS); }
KERNEL(256, 2) dynamic_range_2(BY_RUNS_PARAMETERS) { by_runs<2>(BY_RUNS_ARGUMENTS); }
KERNEL(512, 1) dynamic_range_4(BY_RUNS_PARAMETERS) { by_runs<4>(BY_RUNS_ARGUMENTS); }
KERNEL(512, 1) dynamic_range_8(BY_RUNS_PARAMETERS) { by_runs<8>(BY_RUNS_ARGUMENTS); }

// Scope tensor: the range of what each block sees; lows first, then highs.
KERNEL(256, 2) dynamic_range_whole(const Data* input, s64 input_leading, Real* partial, s64 rows, s64 columns) {
  enum { V = Width<Data>::count, U = 4 };
  const s64 thread = (s64)blockIdx.x * blockDim.x + threadIdx.x, threads = (s64)gridDim.x * blockDim.x;
  if (gapless(rows, columns, input_leading)) columns *= rows, rows = 1;
  Range r;
  r.lo = 0, r.hi = 0;
  if (columns % V == 0 && rows_of_chunks(input, input_leading, rows)) {
    const s64 per_row = columns / V, total = per_row * rows;
    for (s64 first = thread; first < total; first += threads * U) {
      uint4 held[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const s64 chunk = first + u * threads, row = rows == 1 ? 0 : chunk / per_row;
        held[u] = make_uint4(0, 0, 0, 0);
        if (chunk < total) held[u] = *(const uint4*)(input + row * input_leading + (chunk - row * per_row) * V);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) include(r, held[u]);
    }
  } else {
    for (s64 e = thread; e < rows * columns; e += threads) {
      const s64 row = e / columns;
      include(r, widen(input[row * input_leading + e - row * columns]));
    }
  }
  r = over_lanes(r, blockDim.x);
  if (threadIdx.x == 0) partial[blockIdx.x] = r.lo, partial[gridDim.x + blockIdx.x] = r.hi;
}

// Scope channel, last axis: block (x, y) sees 32 chunks of columns and every gridDim.y-th batch of 8 rows.
KERNEL(256, 2) dynamic_range_columns(const Data* input, s64 input_leading, Real* partial, s64 n, s64 d) {
  enum { V = Width<Data>::count };
  __shared__ Real low[8][32], high[8][32];
  const int lane = threadIdx.x % 32, band = threadIdx.x / 32;
  const bool whole = d % V == 0 && rows_of_chunks(input, input_leading, n);
  const int width = whole ? V : 1;
  const s64 column = ((s64)blockIdx.x * 32 + lane) * V;
  Range r[V];
#pragma unroll
  for (int j = 0; j < V; ++j) r[j].lo = 0, r[j].hi = 0;
  for (s64 row = (s64)blockIdx.y * 8 + band; row < n; row += (s64)gridDim.y * 8) {
    const Data* x = input + row * input_leading + column;
    if (width == V) {
      if (column < d) {
        Real v[V];
        Chunk<Data>::unpack(*(const uint4*)x, v);
#pragma unroll
        for (int j = 0; j < V; ++j) include(r[j], v[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (column + j < d) include(r[j], widen(x[j]));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    __syncthreads();
    low[band][lane] = r[j].lo, high[band][lane] = r[j].hi;
    __syncthreads();
    if (band == 0 && column + j < d) {
      for (int b = 1; b < 8; ++b) include(r[j], low[b][lane]), include(r[j], high[b][lane]);
      partial[(s64)blockIdx.y * d + column + j] = r[j].lo;
      partial[((s64)gridDim.y + blockIdx.y) * d + column + j] = r[j].hi;
    }
  }
}

// Scale and zero point of every segment from `parts` partial ranges, [parts, segments] lows and then as many highs.
KERNEL(256, 2) dynamic_range_scales(const Real* partial, Real* scale_out, s32* zero_point_out, s64 parts, s64 segments,
                                 s32 asymmetric, s32 q_min, s32 q_max, s32 empty) {
  for (s64 at = (s64)blockIdx.x * blockDim.x + threadIdx.x; at < segments; at += (s64)gridDim.x * blockDim.x) {
    Range r;
    r.lo = 0, r.hi = 0;
    for (s64 i = 0; i < parts; ++i) include(r, partial[i * segments + at]), include(r, partial[(parts + i) * segments + at]);
    const Segment<Real> g = segment_of(r, asymmetric, q_min, q_max);
    scale_out[at] = g.s, zero_point_out[at] = empty ? 0 : g.z;
  }
}

// Codes from finished scales.
KERNEL(256, BLOCKS) dynamic_range_codes(const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  quantize<RUNS>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, BLOCKS) dynamic_range_codes_whole(const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS,
                                      SHAPE) {
  quantize<WHOLE>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) dynamic_range_codes_mixed(const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS,
                                      SHAPE) {
  quantize<MIXED>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
