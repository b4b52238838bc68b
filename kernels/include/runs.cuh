// Dynamic-range quantization of segments that are one contiguous run of memory.
//
//   m = max |x| over the segment, s = RN_C(m / q_max) or 1, q = clamp(rne(RN_C(x / s)), q_min, q_max)
//
// and the asymmetric form of dynamic_range.cu.
//
// Data: global memory -> R chunks for each thread in registers -> range of the segment, by shuffles (Lanes) or shared
// memory (Block) -> scale -> codes from the same registers -> global memory. The data is read once.
//
// Variants: Lanes gives a segment a power of two of neighbouring threads of a warp. It wins for short segments: several
// share a block, and the reduction needs no barrier. Block gives a longer segment a whole block, so that it fits into
// registers. LONG segments, beyond R chunks for each thread, are read a second time for their codes.
#pragma once
#include "affine.cuh"
#include "nonfinite.cuh"

// The largest x and the largest -x, at least 0, as bits.
typedef Bits<Real>::type RealBits;
struct Range { RealBits up, down; };

DEVICE bool has_nan(const Range& r) { return max_of(r.up, r.down) > Infinity<Real>::bits(); }
DEVICE void include(Range& r, const Range& other) { r.up = max_of(r.up, other.up), r.down = max_of(r.down, other.down); }
DEVICE void include(Range& r, Real x) {  // see nonfinite.cuh
  if (PROPAGATES || x == x) include(r, Range{bits_of(x), bits_of(x) ^ Sign<RealBits>::bit()});
}

DEVICE Segment<Real> segment_of(const Range& r, s32 asymmetric, s32 q_min, s32 q_max) {
  const Real hi = largest_of(r.up), lo = -largest_of(r.down);
  Real s = asymmetric ? div_rn(hi - lo, (Real)(q_max - q_min)) : div_rn(max_of(hi, -lo), (Real)q_max);
  if (s == (Real)0) s = (Real)1;
  s32 z = 0;
  if (asymmetric) {
    Real t = rint(div_rn(lo, s));
    t = t == t ? t : (Real)0;
    z = q_min - (s32)t;  // |t| is below 2^17: apart from the rounding of s, lo / s is at most q_max - q_min
    z = z < q_min ? q_min : z > q_max ? q_max : z;
  }
  return Segment<Real>::make(s, z, q_min, q_max, true);
}

DEVICE s32 warp_max(s32 bits) { return (s32)__reduce_max_sync(0xffffffffu, (u32)bits); }
DEVICE s64 warp_max(s64 bits) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) bits = max_of(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
  return bits;
}

// Groups of threads, which reduce ranges. Symmetric ones are ranges of magnitudes, which are all in `up`.
struct Lanes {  // neighbours, a power of two within a warp
  u32 count;
  DEVICE u32 lane() const { return threadIdx.x & (count - 1); }
  DEVICE u32 group() const { return threadIdx.x >> (__ffs(count) - 1); }
  DEVICE u32 groups() const { return blockDim.x >> (__ffs(count) - 1); }
  DEVICE bool any(bool of_one) const { return __any_sync(0xffffffffu, of_one); }
  DEVICE void wait() const {}
  DEVICE Range reduce(Range r, s32 asymmetric) const {
#pragma unroll 1
    for (int offset = count / 2; offset > 0; offset /= 2) {
      r.up = max_of(r.up, __shfl_xor_sync(0xffffffffu, r.up, offset));
      if (asymmetric) r.down = max_of(r.down, __shfl_xor_sync(0xffffffffu, r.down, offset));
    }
    return r;
  }
};
struct Block {  // all threads of the block, whole warps
  u32 count;
  DEVICE u32 lane() const { return threadIdx.x; }
  DEVICE u32 group() const { return 0; }
  DEVICE u32 groups() const { return 1; }
  DEVICE bool any(bool of_all) const { return of_all; }
  DEVICE void wait() const { __syncthreads(); }  // between uses of `reduce`
  DEVICE Range reduce(Range r, s32 asymmetric) const {
    __shared__ RealBits up[32], down[32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    r.up = warp_max(r.up);
    if (asymmetric) r.down = warp_max(r.down);
    if (lane == 0) up[warp] = r.up, down[warp] = r.down;
    __syncthreads();
    const bool used = lane * 32 < count;
    r.up = warp_max(used ? up[lane] : 0);
    if (asymmetric) r.down = warp_max(used ? down[lane] : 0);
    return r;
  }
};

// R chunks of a thread, `lanes` apart. Beyond the last chunk it repeats that one, which does not change a range.
template <int R> struct HeldChunks {
  uint4 chunk[R];
  DEVICE void load(const Data* run, u32 first, u32 lanes, u32 chunks) {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const u32 at = first + k * lanes;
      chunk[k] = read16((const uint4*)run + (at < chunks ? at : chunks - 1));
    }
  }
  DEVICE void include_in(Extremes<Data>& e, bool asymmetric) const {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      typename Extremes<Data>::Word words[Extremes<Data>::words];
      Extremes<Data>::split(chunk[k], words);
#pragma unroll
      for (int i = 0; i < Extremes<Data>::words; ++i) asymmetric ? e.include(words[i]) : e.include_magnitude(words[i]);
    }
  }
  template <bool WITHIN> DEVICE void quantize(Place codes, u32 first, u32 lanes, u32 chunks, const Segment<Real>& g) const {
    enum { V = Width<Data>::count };
    const Segment<Real> own[1] = {g};
#pragma unroll
    for (int k = 0; k < R; ++k) {
      Real x[V];
      u32 q[V];
      Chunk<Data>::unpack(chunk[k], x);
      if (WITHIN) quick_codes_within(x, g, q);
      else quick_codes(x, own, q);
      if (first + k * lanes < chunks) Codes<SKUDA_CODE>::store(codes, (s64)(first + k * lanes) * V, q);
    }
  }
};

// The slow path, for runs that are not whole chunks, have a NaN, or have an extreme scale: element by element, not
// inlined.
__device__ __noinline__ Range slow_range(const Data* x, s64 inner, u32 lane, u32 lanes, s32 asymmetric) {
  Range r = Range{0, 0};
#pragma unroll 1
  for (s64 i = lane; i < inner; i += lanes) include(r, widen(x[i]));
  if (!asymmetric) r.up = max_of(r.up, r.down);
  return r;
}
__device__ __noinline__ void slow_codes(const Data* x, Place codes, s64 inner, u32 lane, u32 lanes, Real s, s32 z, s32 q_min,
                                        s32 q_max) {
  enum { W = Codes<SKUDA_CODE>::packed ? 2 : 1 };
  const Segment<Real> own[1] = {Segment<Real>::make(s, z, q_min, q_max)};
#pragma unroll 1
  for (s64 i = (s64)lane * W; i < inner; i += (s64)lanes * W) {
    const Real pair[2] = {widen(x[i]), W == 2 && i + 1 < inner ? widen(x[i + 1]) : (Real)0};
    u32 q[2];
    quantized(pair, own, q);
    if (W == 2) q[0] = (q[0] & 15u) | (i + 1 < inner ? (q[1] & 15u) << 4 : 0u);
    Codes<SKUDA_CODE>::put(codes, i, q[0]);
  }
}

// A group of threads takes one segment, of `runs` in a row. A segment has at most R chunks for each thread, which are
// read once, unless LONG. `codes` is 0 if a byte can hold codes of two segments: then this writes only scales and zero
// points.
template <int R, bool LONG, class Group>
DEVICE void by_groups(const Group group, const Data* input, s64 input_leading, u8* output, s64 output_leading, Real* scale_out,
                      s32* zero_point_out, s64 columns, s64 inner, s64 segments, s32 runs, s32 asymmetric, s32 q_min,
                      s32 q_max, s32 codes, s64 rows) {
  enum { V = Width<Data>::count, W = Codes<SKUDA_CODE>::packed ? 2 : 1 };
  const u32 lane = group.lane(), lanes = group.count, piece = R * lanes, chunks = (u32)(inner / V);
  const bool by_chunks = inner % V == 0 && inner > 0 && columns % V == 0 && rows_of_chunks(input, input_leading, rows) &&
                         aligned(output, output_leading, rows, V / W);
  const s64 own = ((s64)blockIdx.y * gridDim.x + blockIdx.x) * group.groups() + group.group();
  const bool mine = own < segments;
  const s64 at = mine ? own : 0;
  s64 row = at, column = 0;
  if (runs != 1) {
    const bool gapless = by_chunks && input_leading == columns && output_leading * W == columns;
    row = gapless ? 0 : at / runs, column = (at - row * runs) * inner;
  }
  const Data* x = input + row * input_leading + column;
  const Place out = Codes<SKUDA_CODE>::place(output, columns) + row * output_leading + column / W;
  HeldChunks<R> held;
  Range r = Range{0, 0};
  if (by_chunks) {
    Extremes<Data> found = Extremes<Data>::zero();
    u32 base = lane;
    do {
      held.load(x, base, lanes, chunks);
      if (asymmetric) held.include_in(found, true);
      else held.include_in(found, false);
      base += piece;
    } while (LONG && base - lane < chunks);
    r = group.reduce(Range{found.up(), found.down()}, asymmetric);
  }
  bool quick = by_chunks && !has_nan(r);
  if (group.any(!quick)) {
    group.wait();
    r = group.reduce(slow_range(x, inner, lane, lanes, asymmetric), asymmetric);
  }
  if (!mine) return;
  const Segment<Real> g = segment_of(r, asymmetric, q_min, q_max);
  quick = quick && g.quick;
  if (lane == 0) {
    scale_out[at] = g.s;
    if (zero_point_out != nullptr) zero_point_out[at] = inner > 0 ? g.z : 0;
  }
  if (!codes) return;
  if (!quick) {
    slow_codes(x, out, inner, lane, lanes, g.s, g.z, q_min, q_max);
    return;
  }
  const bool within = !asymmetric && q_min <= -q_max;
  u32 base = lane;
  do {
    if (LONG && chunks > piece) held.load(x, base, lanes, chunks);
    if (within) held.template quantize<true>(out, base, lanes, chunks, g);
    else held.template quantize<false>(out, base, lanes, chunks, g);
    base += piece;
  } while (LONG && base - lane < chunks);
}

#define BY_GROUPS(R, LONG, GROUP)                                                                                      \
  by_groups<R, LONG>(GROUP, input, input_leading, output, output_leading, scale_out, zero_point_out, columns, inner,   \
                     segments, runs, asymmetric, q_min, q_max, codes, rows)

// The same for `lanes` threads: a power of two within a warp, or the block.
template <int R>
DEVICE void by_runs(const Data* input, s64 input_leading, u8* output, s64 output_leading, Real* scale_out,
                    s32* zero_point_out, s64 columns, s64 inner, s64 segments, s32 runs, s32 lanes, s32 asymmetric, s32 q_min,
                    s32 q_max, s32 codes, s64 rows) {
  if (lanes > 32) {
    BY_GROUPS(R, true, Block{blockDim.x});
  } else {
    BY_GROUPS(R, true, (Lanes{(u32)lanes}));
  }
}
