// Walking one shape, seen as rows of contiguous columns: whole 16-byte chunks where every array allows them, element by
// element where one does not. Data are [outer, channels, inner] in memory order; the segment of element e is
// (e / inner) % channels, so per tensor, channel, token and group differ in two numbers only.
#pragma once
#include "quotient.cuh"

// How segments lie in chunks: one for everything; each chunk within one; each element its own.
enum Layout { WHOLE, RUNS, MIXED };

// Scale and zero point of every segment: arrays, or one number each.
template <class T> struct Scales {
  typedef typename Compute<T>::type C;
  const void* scale;
  s32 scale_is_data;  // 0: an array of C; 1: an array of T, which is widened
  C scale_value;      // where there is no array
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

// n / d for n < 2^31 by a multiplication; the host works the multiplier out.
struct Divisor {
  u32 d, multiplier;
  s32 shift;
  // A multiplier of 0 stands for 2^32: d is 1.
  DEVICE u32 quotient(u32 n) const { return multiplier ? __umulhi(n, multiplier) >> shift : n; }
};

struct Shape {
  s64 rows, columns, inner, channels;
  Divisor per_segment, per_channels;  // chunks in a segment, and channels; for RUNS
  s32 together;                       // whether all chunks that a block has in flight share a segment
  DEVICE s64 segment(s64 e) const { return (e / inner) % channels; }
};

DEVICE bool aligned(const void* p, s64 leading_bytes, s64 rows, u64 bytes) {
  return ((u64)p | (rows > 1 ? (u64)leading_bytes : 0)) % bytes == 0;
}

// Op: struct with
//   V, U                                       elements per chunk, chunks in flight
//   W                                          elements that one thread must handle together (2 where packed)
//   Held load(row, column)                     read one chunk
//   void finish(held, segments, row, column)   compute and write it; one segment, or one per element
//   void single(segments, count, row, column)  handle `count` <= W elements, one by one
template <Layout LAYOUT, class T, class Op>
DEVICE void walk(const Op& op, Shape v, const Scales<T>& scales, bool chunks_allowed, bool contiguous) {
  typedef typename Compute<T>::type C;
  enum { V = Op::V, W = Op::W, U = LAYOUT == RUNS ? Op::U / 2 : Op::U, SEGMENTS_PER_CHUNK = LAYOUT == MIXED ? V : 1 };
  const s64 thread = (s64)blockIdx.x * blockDim.x + threadIdx.x, threads = (s64)gridDim.x * blockDim.x;
  if (contiguous) v.columns *= v.rows, v.rows = 1;
  const s64 chunks = v.columns / V, all_chunks = chunks * v.rows;
  bool by_chunks = chunks_allowed && v.columns % V == 0;
  if (LAYOUT == RUNS) by_chunks = by_chunks && v.per_segment.d > 0 && all_chunks < 0x7fffffffll;
  // Only where every thread comes back to its own columns, whose scales it then keeps.
  if (LAYOUT == MIXED) by_chunks = by_chunks && v.rows == 1 && v.inner == 1 && threads * V % v.channels == 0;
  if (by_chunks) {
    const bool flat = v.rows == 1;  // else a block takes a row, and the next gridDim.x further on
    // Blocks take U * blockDim.x neighbouring chunks at a time; where threads must come back to their columns, every
    // threads-th chunk instead.
    const s64 apart = LAYOUT == MIXED ? threads : blockDim.x;
    const s64 start = LAYOUT == MIXED ? thread : (flat ? (s64)blockIdx.x * blockDim.x * U : 0) + threadIdx.x;
    const s64 stride = (flat ? threads : blockDim.x) * U;
    Segment<C> g[SEGMENTS_PER_CHUNK];
    if (LAYOUT == WHOLE) g[0] = scales.at(0);
    if (LAYOUT == MIXED && thread < all_chunks) {
#pragma unroll
      for (int j = 0; j < SEGMENTS_PER_CHUNK; ++j) g[j] = scales.at((thread * V + j) % v.channels);
    }
#pragma unroll 1
    for (s64 row = flat ? 0 : blockIdx.x; row < v.rows; row += flat ? 1 : gridDim.x) {
#pragma unroll 1
      for (s64 first = start; first < chunks; first += stride) {
        typename Op::Held held[U];
        C s[U];
        s32 z[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const s64 chunk = first + u * apart;
          if (chunk < chunks) {
            held[u] = op.load(row, chunk * V);
            if (LAYOUT == RUNS && (u == 0 || !v.together)) {
              const u32 run = v.per_segment.quotient((u32)(row * chunks + chunk));
              const u32 segment = run - v.per_channels.quotient(run) * v.per_channels.d;
              s[u] = scales.scale_at(segment), z[u] = scales.zero_point_at(segment);
            }
          }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const s64 chunk = first + u * apart;
          if (chunk < chunks) {
            if (LAYOUT == RUNS && (u == 0 || !v.together)) g[0] = scales.make(s[u], z[u]);
            op.finish(held[u], g, row, chunk * V);
          }
        }
      }
    }
    return;
  }
  const s64 units = (v.columns + W - 1) / W, all_units = units * v.rows;
#pragma unroll 1
  for (s64 unit = thread; unit < all_units; unit += threads) {
    const s64 row = unit / units, column = (unit - row * units) * W;
    const int count = column + W <= v.columns ? W : 1;
    Segment<C> g[W];
#pragma unroll
    for (int j = 0; j < W; ++j) g[j] = scales.at(v.segment(row * v.columns + column + (j < count ? j : 0)));
    op.single(g, count, row, column);
  }
}
