// Traverses one shape as rows of contiguous columns. Data are [outer, channels, inner] in memory order:
//
//   segment(e) = (e / inner) % channels
//
// so per tensor, channel, token and group differ in two numbers only.
//
// Data: global memory -> U 16-byte chunks for each thread in registers, all requested before the first is used ->
// global memory.
//
// Variants, by how segments lie in chunks:
//   WHOLE   one segment: a thread sets its scale up once, and blocks take neighbouring chunks
//   RUNS    each chunk lies in one segment: threads share units of a segment, so one setup serves U chunks
//   MIXED   a chunk spans several segments: a thread keeps the scales of its columns and returns to the same columns
// Each wins where its condition holds, because it sets scales up the least often. Data that suits none of them, because
// an address, a stride or the end of a row is not a whole chunk, is processed element by element.
#pragma once
#include "quotient.cuh"

// Loads 16 bytes of a stream. On an H200 kernels take up to a tenth less time than with `load16`, which marks cache
// lines as the first to be evicted. Norms and gated activations take longer with it, and use `load16`.
DEVICE uint4 read16(const void* p) { return __ldcg((const uint4*)p); }

// How segments lie in chunks; see above.
enum Layout { WHOLE, RUNS, MIXED };

// Scale and zero point of every segment: arrays, or one number each.
template <class T> struct Scales {
  typedef typename Compute<T>::type C;
  const void* scale;
  s32 scale_is_data;  // 0: an array of C; 1: an array of T, which is widened
  C scale_value;      // used if there is no array
  const s32* zero_point;
  s32 zero_point_value, q_min, q_max;

  DEVICE C scale_at(s64 i) const {
    if (scale == nullptr) return scale_value;
    return scale_is_data ? widen(((const T*)scale)[i]) : ((const C*)scale)[i];
  }
  DEVICE s32 zero_point_at(s64 i) const { return zero_point ? zero_point[i] : zero_point_value; }
  DEVICE Segment<C> make(C s, s32 z) const { return Segment<C>::make(s, z, q_min, q_max); }
  DEVICE Segment<C> at(s64 i) const { return make(scale_at(i), zero_point_at(i)); }
};

// n / d for n < 2^31 as a multiplication; the host computes the multiplier.
struct Divisor {
  u32 d, multiplier;
  s32 shift;
  // A multiplier of 0 stands for 2^32: d is 1.
  DEVICE u32 quotient(u32 n) const { return multiplier ? __umulhi(n, multiplier) >> shift : n; }
};

struct Shape {
  s64 rows, columns, inner, channels;
  Divisor parts, per_channels;  // for RUNS: units in a segment, 0 if it is not whole chunks; and channels
  s32 lanes;                    // for RUNS: threads that share a unit, a power of two within a warp, or the block
  DEVICE s64 segment(s64 e) const { return (e / inner) % channels; }
};

DEVICE bool aligned(const void* p, s64 leading_bytes, s64 rows, u64 bytes) {
  return ((u64)p | (rows > 1 ? (u64)leading_bytes : 0)) % bytes == 0;
}

// Op is a struct with
//   V, U                                  elements per chunk, chunks in flight
//   W                                     elements that one thread must handle as a unit (2 where packed)
//   Op at(row, column)                    the same op from this element on, the first of a unit
//   Held load(column)                     read one chunk
//   bool quick(held[U], segments)         whether the fast path serves these chunks
//   void finish<QUICK>(held, segments, column)   compute and write one; one segment, or one per element
//   void single(segments, count)          handle the first `count` <= W elements, one by one

// Loads U of some chunks, `apart` from each other; beyond the end it repeats the last one.
template <class Op, class I>
DEVICE void load_chunks(const Op& op, typename Op::Held (&held)[Op::U], I first, I apart, I chunks) {
#pragma unroll
  for (int u = 0; u < Op::U; ++u) {
    const I chunk = first + u * apart;
    held[u] = op.load((s64)(chunk < chunks ? chunk : chunks - 1) * Op::V);
  }
}

// One decision for all U chunks, so that they overlap. On the slow path they are read again, one at a time.
template <int N, class Op, class I, class C>
DEVICE void finish_chunks(const Op& op, const typename Op::Held (&held)[Op::U], const Segment<C> (&g)[N], I first, I apart,
                          I chunks) {
  if (op.quick(held, g)) {
#pragma unroll
    for (int u = 0; u < Op::U; ++u) {
      const I chunk = first + u * apart;
      if (chunk < chunks) op.template finish<true>(held[u], g, (s64)chunk * Op::V);
    }
    return;
  }
#pragma unroll 1
  for (I chunk = first, u = 0; u < Op::U && chunk < chunks; ++u, chunk += apart) {
    const s64 column = (s64)chunk * Op::V;
    op.template finish<false>(op.load(column), g, column);
  }
}

// RUNS: threads share units of lanes * U chunks of one segment, so each sets a segment up for U chunks. Returns false
// if segments are not whole chunks, or if chunk numbers exceed 32 bits. A flat array requests its first chunks before
// any division: a 64-bit division takes half as long as a load.
template <class T, class Op> DEVICE bool walk_units(const Op& op, const Shape& v, const Scales<T>& scales) {
  enum { V = Op::V, U = Op::U };
  const bool flat = v.rows == 1, spans = !flat && v.columns < v.inner;
  const s64 length = spans ? v.columns : v.inner, total = v.rows * v.columns;  // of a run: a segment's part of a row
  if (v.parts.d == 0 || length % V != 0 || total / V >= 0x7fffffffll) return false;
  const u32 chunks = (u32)(length / V), all_chunks = (u32)(total / V);
  u32 of_row = 1, of_segment = 1;  // runs
  if (!flat && length != v.columns) {
    if (v.columns % V != 0 || (u32)(v.columns / V) % chunks != 0) return false;
    of_row = (u32)(v.columns / V) / chunks;
  }
  if (spans) {
    if (v.inner % V != 0 || (u32)(v.inner / V) % chunks != 0) return false;
    of_segment = (u32)(v.inner / V) / chunks;
  }
  const u32 lanes = v.lanes, unit_chunks = U * lanes;
  const u32 parts = spans ? (chunks + unit_chunks - 1) / unit_chunks : v.parts.d;
  const u32 shift = lanes < blockDim.x ? __ffs(lanes) - 1 : 31, groups = lanes < blockDim.x ? blockDim.x >> shift : 1;
  const u32 lane = threadIdx.x - (threadIdx.x >> shift << shift);
#pragma unroll 1
  for (u32 unit = blockIdx.x * groups + (threadIdx.x >> shift);; unit += gridDim.x * groups) {
    const u32 run = spans ? unit / parts : v.parts.quotient(unit);
    if ((u64)run * chunks >= all_chunks) return true;
    const u32 row = flat ? 0 : of_row == 1 ? run : run / of_row, origin = (run - row * of_row) * chunks;
    const u32 first = (unit - run * parts) * unit_chunks + lane;
    const Op at = op.at(row, (s64)origin * V);
    typename Op::Held held[U];
    load_chunks(at, held, first, lanes, chunks);
    const u32 counted = spans ? run / of_segment : run;
    const u32 segment = counted - v.per_channels.quotient(counted) * v.per_channels.d;
    const Segment<typename Compute<T>::type> g[1] = {scales.at(segment)};
    finish_chunks(at, held, g, first, lanes, chunks);
  }
}

template <Layout LAYOUT, class T, class Op>
DEVICE void walk(const Op& op, Shape v, const Scales<T>& scales, bool chunks_allowed, bool contiguous) {
  typedef typename Compute<T>::type C;
  enum { V = Op::V, W = Op::W, U = Op::U, SEGMENTS_PER_CHUNK = LAYOUT == MIXED ? V : 1 };
  const s64 thread = (s64)blockIdx.x * blockDim.x + threadIdx.x, threads = (s64)gridDim.x * blockDim.x;
  if (contiguous) v.columns *= v.rows, v.rows = 1;
  if (LAYOUT == RUNS && chunks_allowed && walk_units(op, v, scales)) return;
  const s64 chunks = v.columns / V;
  bool by_chunks = LAYOUT != RUNS && chunks_allowed && (LAYOUT == MIXED ? v.rows == 1 : v.columns % V == 0);
  // Only if every thread returns to elements of the same channels, whose scales it keeps, or takes a single chunk.
  if (LAYOUT == MIXED) by_chunks = by_chunks && (threads >= chunks || threads * V % (v.inner * v.channels) == 0);
  if (by_chunks) {
    const bool flat = v.rows == 1;  // else a block takes every gridDim.x-th row
    // Blocks take U * blockDim.x neighbouring chunks at a time. If threads must return to their columns, they take
    // every `threads`-th chunk instead.
    const s64 apart = LAYOUT == MIXED ? threads : blockDim.x;
    const s64 start = LAYOUT == MIXED ? thread : (flat ? (s64)blockIdx.x * blockDim.x * U : 0) + threadIdx.x;
    const s64 stride = (flat ? threads : blockDim.x) * U;
    Segment<C> g[SEGMENTS_PER_CHUNK];
    if (LAYOUT == WHOLE) g[0] = scales.at(0);
    if (LAYOUT == MIXED && thread < chunks) {
      s64 run = thread * V / v.inner, column = thread * V - run * v.inner;
      run %= v.channels;
#pragma unroll
      for (int j = 0; j < SEGMENTS_PER_CHUNK; ++j) {
        g[j] = scales.at(run);
        if (++column == v.inner) column = 0, run = run + 1 == v.channels ? 0 : run + 1;
      }
    }
#pragma unroll 1
    for (s64 row = flat ? 0 : blockIdx.x; row < v.rows; row += flat ? 1 : gridDim.x) {
      const Op at = op.at(row, 0);
#pragma unroll 1
      for (s64 first = start; first < chunks; first += stride) {
        typename Op::Held held[U];
        load_chunks(at, held, first, apart, chunks);
        finish_chunks(at, held, g, first, apart, chunks);
      }
    }
  }
  const s64 done = by_chunks ? chunks * V : 0;  // of a row; the rest is the end of a single row
  if (done == v.columns) return;
  const s64 units = (v.columns + W - 1) / W, all_units = units * v.rows;
#pragma unroll 1
  for (s64 unit = done / W + thread; unit < all_units; unit += threads) {
    const s64 row = unit / units, column = (unit - row * units) * W;
    const int count = column + W <= v.columns ? W : 1;
    Segment<C> g[W];
#pragma unroll
    for (int j = 0; j < W; ++j) g[j] = scales.at(v.segment(row * v.columns + column + (j < count ? j : 0)));
    op.at(row, column).single(g, count);
  }
}
