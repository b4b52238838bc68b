// Dynamic-range quantization of segments that are one run of memory: range, scale and codes in one read.
#pragma once
#include "affine.cuh"

struct Range { Real lo, hi; };

DEVICE void include(Range& r, Real x) { r.lo = least(r.lo, x), r.hi = most(r.hi, x); }
DEVICE void include(Range& r, const Range& other) { include(r, other.lo), include(r, other.hi); }

DEVICE void include(Range& r, const uint4& chunk) {
  Real x[Width<Data>::count];
  Chunk<Data>::unpack(chunk, x);
#pragma unroll
  for (int j = 0; j < Width<Data>::count; ++j) include(r, x[j]);
}

DEVICE Segment<Real> segment_of(const Range& r, s32 asymmetric, s32 q_min, s32 q_max) {
  Real s = asymmetric ? divide(r.hi - r.lo, (Real)(q_max - q_min)) : divide(most(r.hi, -r.lo), (Real)q_max);
  if (s == (Real)0) s = (Real)1;
  s32 z = 0;
  if (asymmetric) {
    Real t = whole(divide(r.lo, s));
    t = t == t ? t : (Real)0;
    z = (s32)fmin(fmax((f64)q_min - (f64)t, (f64)q_min), (f64)q_max);
  }
  return Segment<Real>::make(s, z, q_min, q_max);
}

// The range over `lanes` neighbouring threads, a power of two, or over the whole block where that is more than a warp.
DEVICE Range over_lanes(Range r, int lanes) {
  for (int offset = lanes < 32 ? lanes / 2 : 16; offset > 0; offset /= 2) {
    Range other;
    other.lo = __shfl_xor_sync(0xffffffffu, r.lo, offset), other.hi = __shfl_xor_sync(0xffffffffu, r.hi, offset);
    include(r, other);
  }
  if (lanes <= 32) return r;
  __shared__ Real low[32], high[32];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  __syncthreads();  // the last use of the arrays is over
  if (threadIdx.x % 32 == 0) low[warp] = r.lo, high[warp] = r.hi;
  __syncthreads();
  for (int i = 0; i < warps; ++i) {
    Range other;
    other.lo = low[i], other.hi = high[i];
    include(r, other);
  }
  return r;
}

DEVICE void put_codes(u8* row, s64 column, const uint4& chunk, const Segment<Real>& g, bool within) {
  enum { V = Width<Data>::count };
  Real x[V];
  u32 q[V];
  const Segment<Real> own[1] = {g};
  Chunk<Data>::unpack(chunk, x);
  if (within) {
    quantized_within(x, g, q);
  } else {
    quantized(x, own, q);
  }
  Codes<SKUDA_CODE>::store(row, column, q);
}

// One segment, of `runs` in a row, per group of `lanes` threads. `codes` is 0 where a byte can hold codes of two segments: then only scales
// and zero points are written here.
template <int R>
DEVICE void by_runs(const Data* input, s64 input_leading, u8* output, s64 output_leading, Real* scale_out,
                    s32* zero_point_out, s64 columns, s64 inner, s64 segments, s32 runs, s32 lanes, s32 asymmetric, s32 q_min,
                    s32 q_max, s32 codes, s64 rows) {
  enum { V = Width<Data>::count, PACKED = Codes<SKUDA_CODE>::packed };
  const int groups = blockDim.x / lanes, lane = threadIdx.x % lanes;
  const bool whole = inner % V == 0 && columns % V == 0 && rows_of_chunks(input, input_leading, rows) &&
                     aligned(output, output_leading, rows, PACKED ? V / 2 : V);
  const s64 chunks = whole ? inner / V : 0;
  for (s64 first = (s64)blockIdx.x * groups; first < segments; first += (s64)gridDim.x * groups) {
    const s64 at = first + threadIdx.x / lanes;
    const bool mine = at < segments;
    const s64 e = mine ? at * inner : 0, row = inner > 0 ? e / columns : 0, column = e - row * columns;
    const Data* x = input + row * input_leading + column;
    u8* out = output + row * output_leading;
    Range r;
    r.lo = 0, r.hi = 0;
    uint4 held[R];
    const bool once = chunks > 0 && chunks <= (s64)R * lanes;
    if (once) {
#pragma unroll
      for (int k = 0; k < R; ++k) {
        held[k] = make_uint4(0, 0, 0, 0);  // zeros leave the range as it is
        if (mine && lane + k * lanes < chunks) held[k] = load16(x + (s64)(lane + k * lanes) * V);
      }
      if (asymmetric) {
#pragma unroll
        for (int k = 0; k < R; ++k) include(r, held[k]);
      } else {
        Peak<Data> peak = Peak<Data>::zero();
#pragma unroll
        for (int k = 0; k < R; ++k) peak.include(held[k]);
        r.hi = peak.value();
      }
    } else if (whole) {
      for (s64 c = lane; mine && c < chunks; c += lanes) include(r, *(const uint4*)(x + c * V));
    } else {
      for (s64 i = lane; mine && i < inner; i += lanes) include(r, widen(x[i]));
    }
    r = over_lanes(r, lanes);
    if (!mine) continue;  // only where groups are parts of a warp: no barrier follows
    const Segment<Real> g = segment_of(r, asymmetric, q_min, q_max);
    if (lane == 0) {
      scale_out[at] = g.s;
      if (zero_point_out != nullptr) zero_point_out[at] = inner > 0 ? g.z : 0;
    }
    if (!codes) continue;
    const bool within = !asymmetric && q_min <= -q_max;
    if (once) {
#pragma unroll
      for (int k = 0; k < R; ++k) {
        const s64 c = lane + k * lanes;
        if (c < chunks) put_codes(out, column + c * V, held[k], g, within);
      }
    } else if (whole) {
      for (s64 c = lane; c < chunks; c += lanes) put_codes(out, column + c * V, *(const uint4*)(x + c * V), g, within);
    } else {
      const int step = PACKED ? 2 : 1;
      for (s64 i = (s64)lane * step; i < inner; i += (s64)lanes * step) {
        const Segment<Real> own[1] = {g};
        const Real pair[2] = {widen(x[i]), PACKED && i + 1 < inner ? widen(x[i + 1]) : (Real)0};
        u32 q[2];
        quantized(pair, own, q);
        if (PACKED) q[0] = (q[0] & 15u) | (i + 1 < inner ? (q[1] & 15u) << 4 : 0u);
        out[(column + i) / step] = (u8)q[0];
      }
    }
  }
}
