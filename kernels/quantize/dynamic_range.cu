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
// A segment that is one run of memory (token, group, first axis) is read once: `dynamic_range_R` holds it in R chunks
// for each thread, up to 8,192 in all, and reads only longer segments twice. A segment that is not contiguous (tensor,
// last axis) takes three launches: partial ranges, scales, codes. Maxima and minima do not depend on the order of
// evaluation, so every path gives the same bits.
#include "runs.cuh"

#define RUNS_PARAMETERS                                                                                              \
  const Data *input, s64 input_leading, u8 *output, s64 output_leading, Real *scale_out, s32 *zero_point_out,        \
      s64 rows, s64 columns, s64 inner, s64 segments, s32 runs, s32 lanes, s32 asymmetric, s32 q_min, s32 q_max,     \
      s32 codes

// R chunks per thread; one segment per block, or per `lanes` threads of a warp.
KERNEL(256, sizeof(Data) == 8 ? 4 : 6) dynamic_range_4(RUNS_PARAMETERS) { BY_GROUPS(4, false, Block{blockDim.x}); }
KERNEL(256, 4) dynamic_range_8(RUNS_PARAMETERS) { BY_GROUPS(8, false, Block{blockDim.x}); }
KERNEL(512, 1) dynamic_range_16(RUNS_PARAMETERS) { BY_GROUPS(16, true, Block{blockDim.x}); }
KERNEL(256, 4) dynamic_range_lanes_1(RUNS_PARAMETERS) { BY_GROUPS(1, false, Lanes{(u32)lanes}); }
KERNEL(256, 4) dynamic_range_lanes_4(RUNS_PARAMETERS) { BY_GROUPS(4, false, Lanes{(u32)lanes}); }

// Partial ranges are [parts, segments] lows, followed by as many highs.
DEVICE void put_range(Real* partial, s64 segments, s64 parts, s64 at, const Range& r) {
  partial[at] = -number_of(r.down), partial[parts * segments + at] = number_of(r.up);
}
DEVICE Range range_at(const Real* partial, s64 segments, s64 parts, s64 at) {
  return Range{bits_of(partial[parts * segments + at]), bits_of(partial[at]) ^ Sign<RealBits>::bit()};
}

// Scope tensor: the range of the elements of each block.
KERNEL(256, 2) dynamic_range_whole(const Data* input, s64 input_leading, Real* partial, s64 rows, s64 columns) {
  enum { V = Width<Data>::count, U = 4 };
  const s64 thread = (s64)blockIdx.x * blockDim.x + threadIdx.x, threads = (s64)gridDim.x * blockDim.x;
  if (gapless(rows, columns, input_leading)) columns *= rows, rows = 1;
  Extremes<Data> found = Extremes<Data>::zero();
  const bool by_chunks = columns % V == 0 && rows_of_chunks(input, input_leading, rows);
  const s64 per_row = columns / V, total = by_chunks ? per_row * rows : 0;
  for (s64 first = thread; first < total; first += threads * U) {
    HeldChunks<U> held;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const s64 chunk = first + u * threads, row = rows == 1 ? 0 : chunk / per_row;
      held.chunk[u] = make_uint4(0, 0, 0, 0);
      if (chunk < total) held.chunk[u] = *(const uint4*)(input + row * input_leading + (chunk - row * per_row) * V);
    }
    held.include_in(found, true);
  }
  Range r = Range{found.up(), found.down()};
  if (!by_chunks || has_nan(r)) {
    r = Range{0, 0};
    const s64 step = by_chunks ? V : 1;
    for (s64 e = thread * step; e < rows * columns; e += threads * step) {
      const s64 row = e / columns;
      for (s64 j = 0; j < step; ++j) include(r, widen(input[row * input_leading + e - row * columns + j]));
    }
  }
  r = Block{blockDim.x}.reduce(r, 1);
  if (threadIdx.x == 0) put_range(partial, 1, gridDim.x, blockIdx.x, r);
}

// Scope channel, last axis: block (x, y) reads 32 chunks of columns and every gridDim.y-th batch of 8 rows.
KERNEL(256, 4) dynamic_range_columns(const Data* input, s64 input_leading, Real* partial, s64 n, s64 d) {
  enum { V = Width<Data>::count, U = 4, WORDS = Extremes<Data>::words, ELEMENTS = Extremes<Data>::elements };
  __shared__ RealBits up[8][32], down[8][32];
  const int lane = threadIdx.x % 32, band = threadIdx.x / 32;
  const s64 column = ((s64)blockIdx.x * 32 + lane) * V, start = (s64)blockIdx.y * 8 + band, step = (s64)gridDim.y * 8;
  const bool by_chunks = d % V == 0 && rows_of_chunks(input, input_leading, n);
  Extremes<Data> found[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) found[i] = Extremes<Data>::zero();
  for (s64 first = start; by_chunks && column < d && first < n; first += U * step) {
    uint4 held[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      held[u] = make_uint4(0, 0, 0, 0);
      if (first + u * step < n) held[u] = *(const uint4*)(input + (first + u * step) * input_leading + column);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      typename Extremes<Data>::Word words[WORDS];
      Extremes<Data>::split(held[u], words);
#pragma unroll
      for (int i = 0; i < WORDS; ++i) found[i].include(words[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    Range r = Range{found[j / ELEMENTS].up(j % ELEMENTS), found[j / ELEMENTS].down(j % ELEMENTS)};
    if (!by_chunks || has_nan(r)) {
      r = Range{0, 0};
      for (s64 row = start; column + j < d && row < n; row += step) include(r, widen(input[row * input_leading + column + j]));
    }
    __syncthreads();
    up[band][lane] = r.up, down[band][lane] = r.down;
    __syncthreads();
    if (band == 0 && column + j < d) {
      for (int b = 1; b < 8; ++b) include(r, Range{up[b][lane], down[b][lane]});
      put_range(partial, d, gridDim.y, (s64)blockIdx.y * d + column + j, r);
    }
  }
}

// Scale and zero point from `parts` partial ranges: `per_block` segments a block, a power of two, each by several
// bands.
KERNEL(256, 2) dynamic_range_scales(const Real* partial, Real* scale_out, s32* zero_point_out, s64 parts, s64 segments,
                                    s32 per_block, s32 asymmetric, s32 q_min, s32 q_max, s32 empty) {
  __shared__ RealBits up[256], down[256];
  const u32 thread = threadIdx.x;
  const s64 at = (s64)blockIdx.x * per_block + (thread & (per_block - 1));
  Range r = Range{0, 0};
  for (s64 i = thread / per_block; at < segments && i < parts; i += 256 / per_block) {
    include(r, range_at(partial, segments, parts, i * segments + at));
  }
  up[thread] = r.up, down[thread] = r.down;
  for (u32 half = 128; half >= per_block; half /= 2) {
    __syncthreads();
    if (thread < half) {
      include(r, Range{up[thread + half], down[thread + half]});
      up[thread] = r.up, down[thread] = r.down;
    }
  }
  if (thread < per_block && at < segments) {
    const Segment<Real> g = segment_of(r, asymmetric, q_min, q_max);
    scale_out[at] = g.s, zero_point_out[at] = empty ? 0 : g.z;
  }
}

// Codes from the scales of dynamic_range_scales.
KERNEL(256, BLOCKS) dynamic_range_codes(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<WHOLE>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, BLOCKS) dynamic_range_codes_runs(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<RUNS>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}

KERNEL(256, MIXED_BLOCKS) dynamic_range_codes_mixed(
    const Data* input, s64 input_leading, u8* output, s64 output_leading, SEGMENTS, SHAPE) {
  walk_quantize<MIXED>(input, input_leading, output, output_leading, SCALES, SHAPE_GIVEN);
}
