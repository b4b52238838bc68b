// The elementwise ops of the affine family, one struct each, for `walk`.
//
//   q  = clamp(rne(RN_C(x / s)) + z, q_min, q_max)          Quantize
//   y  = RN_T(RN_C(C(q - z) * s))                           Dequantize; Fake, with q as above
//   dx = mask ? RN_T(RN_C(dy / s)) : 0                      Divided: the gradient of Quantize
//   dx = mask ? dy : 0                                      Passed: the gradient of Fake
//   dx = RN_T(RN_C(dy * s))                                 Scaled: the gradient of Dequantize
//
// Data: global memory -> chunks in registers -> values of the compute type -> chunks -> global memory (walk.cuh).
//
// Variants: Map has one floating input and one output; Gradient has two inputs; Quantize, and Dequantize in its source,
// have codes on one side. Every struct has a fast path, for finite chunks of segments that are not extreme, and a slow
// path for all others (quotient.cuh).
#pragma once
#include "walk.cuh"

typedef SKUDA_DATA Data;
typedef Compute<Data>::type Real;

// Blocks of 256 threads on a multiprocessor for which there must be registers: as many as possible without spills in
// nvcc and NVRTC.
#define BLOCKS (sizeof(Data) == 8 ? 3 : 4)
#define RUNS_BLOCKS (sizeof(Data) == 8 ? 2 : 4)
#define GRADIENT_BLOCKS (sizeof(Data) == 8 ? 2 : 3)
#define GRADIENT_RUNS_BLOCKS 3
#define MIXED_BLOCKS 2

// Chunks that a thread has in flight of one floating array (ONE), or of each of two (EACH): as many as registers hold
// beside the scales. The launch rule uses the same numbers.
template <Layout LAYOUT> struct InFlight {
  enum { ONE = LAYOUT == MIXED || sizeof(Data) == 8 ? 8 : 4, EACH = 4 };
};
enum { OF_MANY = 8 };  // of an array that is long enough for all multiprocessors: one setup of a scale then serves more chunks

template <class T> DEVICE bool rows_of_chunks(const T* p, s64 leading, s64 rows) {
  return aligned(p, leading * (s64)sizeof(T), rows, 16);
}

// Whether all values of some chunks are finite; 16-bit values are tested in pairs.
template <int U> DEVICE bool all_finite_chunks(const uint4 (&h)[U], Extremes<Data> found = Extremes<Data>::zero()) {
  bool finite = true;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    typename Extremes<Data>::Word words[Extremes<Data>::words];
    Extremes<Data>::split(h[u], words);
    if (sizeof(Data) == 2) {
#pragma unroll
      for (int i = 0; i < Extremes<Data>::words; ++i) found.include_magnitude(words[i]);
    } else {
      Real x[Width<Data>::count];
      Chunk<Data>::unpack(h[u], x);
      finite &= all_finite(x);
    }
  }
  return finite && found.up() < Infinity<Real>::bits();
}

// Whether all values are `divisible`; it includes words, as `Extremes` splits them.
template <class T> struct Dividends {
  bool fit;
  static DEVICE Dividends none() { return Dividends{true}; }
  DEVICE void include(T v) { fit = fit && divisible(v); }
  DEVICE bool all() const { return fit; }
};
template <class T, bool TINY> struct HalfDividends {  // TINY: whether T has numbers below 2^-100
  Extremes<T> found;
  u32 tiny;  // the highest bit of each half that was tiny
  static DEVICE HalfDividends none() { return HalfDividends{Extremes<T>::zero(), 0}; }
  DEVICE void include(u32 two) {
    found.include_magnitude(two);
    // A half is tiny if it is at least 1 but less than 0xd80, which is 2^-100. Adding what 1, or 0xd80, lacks to 0x8000
    // sets the highest bit of halves that are at least as large, and never carries.
    const u32 halves = two & 0x7fff7fffu;
    if (TINY) tiny |= (halves + 0x7fff7fffu) & ~(halves + 0x72807280u);
  }
  DEVICE bool all() const { return (tiny & 0x80008000u) == 0 && found.up() < bits_of(Divisible<f32>::limit()); }
};
template <> struct Dividends<f16> : HalfDividends<f16, false> {};
template <> struct Dividends<bf16> : HalfDividends<bf16, true> {};

template <int U> DEVICE bool all_divisible(const uint4 (&h)[U]) {
  auto dividends = Dividends<Data>::none();
#pragma unroll
  for (int u = 0; u < U; ++u) {
    typename Extremes<Data>::Word words[Extremes<Data>::words];
    Extremes<Data>::split(h[u], words);
#pragma unroll
    for (int i = 0; i < Extremes<Data>::words; ++i) dividends.include(words[i]);
  }
  return dividends.all();
}

#ifdef SKUDA_CODE
typedef Codes<SKUDA_CODE>::Place Place;

template <int IN_FLIGHT> struct Quantize {
  enum { V = Width<Data>::count, W = Codes<SKUDA_CODE>::packed ? 2 : 1, U = IN_FLIGHT };
  typedef uint4 Held;
  const Data* input;
  s64 input_leading;
  Place output;
  s64 output_leading;

  DEVICE Quantize at(s64 row, s64 column) const {
    return {input + row * input_leading + column, input_leading, output + row * output_leading + column / W, output_leading};
  }
  DEVICE Held load(s64 column) const { return read16(input + column); }
  template <int N> DEVICE bool quick(const Held (&h)[U], const Segment<Real> (&g)[N]) const {
    return all_quick(g) && all_finite_chunks(h);
  }
  template <bool QUICK, int N> DEVICE void finish(const Held& h, const Segment<Real> (&g)[N], s64 column) const {
    Real x[V];
    u32 q[V];
    Chunk<Data>::unpack(h, x);
    if (QUICK) quick_codes(x, g, q);
    else quantized(x, g, q);
    Codes<SKUDA_CODE>::store(output, column, q);
  }
  DEVICE void single(const Segment<Real> (&g)[W], int count) const {
    Real x[W];
    u32 q[W];
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] = j < count ? widen(input[j]) : (Real)0;
    quantized(x, g, q);
    if (W == 2) q[0] = (q[0] & 15u) | (count == 2 ? (q[W - 1] & 15u) << 4 : 0u);
    Codes<SKUDA_CODE>::put(output, 0, q[0]);
  }
};
#endif

// One floating input, one floating output; F::apply computes any number of elements.
template <class F, int IN_FLIGHT> struct Map {
  enum { V = Width<Data>::count, W = 1, U = IN_FLIGHT };
  typedef uint4 Held;
  const Data* input;
  s64 input_leading;
  Data* output;
  s64 output_leading;

  DEVICE Map at(s64 row, s64 column) const {
    return {input + row * input_leading + column, input_leading, output + row * output_leading + column, output_leading};
  }
  DEVICE Held load(s64 column) const { return read16(input + column); }
  template <int N> DEVICE bool quick(const Held (&h)[U], const Segment<Real> (&g)[N]) const {
    return !F::has_slow_path || (all_quick(g) && all_finite_chunks(h));
  }
  template <bool QUICK, int N> DEVICE void finish(const Held& h, const Segment<Real> (&g)[N], s64 column) const {
    Real x[V], y[V];
    Chunk<Data>::unpack(h, x);
    F::template apply<QUICK>(x, g, y);
    store16(output + column, Chunk<Data>::pack(y));
  }
  DEVICE void single(const Segment<Real> (&g)[W], int) const {
    const Real x[1] = {widen(*input)};
    Real y[1];
    F::template apply<false>(x, g, y);
    narrow(y[0], *output);
  }
};

// Two floating inputs: F::apply<QUICK>(dy, x, segments, dx), which may be quick if F::quick(dy, segments).
template <class F, int IN_FLIGHT> struct Gradient {
  enum { V = Width<Data>::count, W = 1, U = IN_FLIGHT };
  struct Held { uint4 dy, x; };
  const Data* d_output;
  s64 d_output_leading;
  const Data* input;
  s64 input_leading;
  Data* d_input;
  s64 d_input_leading;

  DEVICE Gradient at(s64 row, s64 column) const {
    return {d_output + row * d_output_leading + column, d_output_leading, input + row * input_leading + column, input_leading,
            d_input + row * d_input_leading + column,   d_input_leading};
  }
  DEVICE Held load(s64 column) const { return Held{read16(d_output + column), read16(input + column)}; }
  template <int N> DEVICE bool quick(const Held (&h)[U], const Segment<Real> (&g)[N]) const {
    uint4 dy[U];
#pragma unroll
    for (int u = 0; u < U; ++u) dy[u] = h[u].dy;
    return F::quick(dy, g);
  }
  template <bool QUICK, int N> DEVICE void finish(const Held& h, const Segment<Real> (&g)[N], s64 column) const {
    Real dy[V], x[V], dx[V];
    Chunk<Data>::unpack(h.dy, dy), Chunk<Data>::unpack(h.x, x);
    F::template apply<QUICK>(dy, x, g, dx);
    store16(d_input + column, Chunk<Data>::pack(dx));
  }
  DEVICE void single(const Segment<Real> (&g)[W], int) const {
    const Real dy[1] = {widen(*d_output)}, x[1] = {widen(*input)};
    Real dx[1];
    F::template apply<false>(dy, x, g, dx);
    narrow(dx[0], *d_input);
  }
};

struct Fake {
  enum { has_slow_path = 1 };
  template <bool QUICK, int V, int N>
  static DEVICE void apply(const Real (&x)[V], const Segment<Real> (&g)[N], Real (&y)[V]) {
    if (QUICK) quick_fake(x, g, y);
    else fake_quantized(x, g, y);
    if (sizeof(Data) != 2) return;
    bool may_vanish = false;  // whether rounding to 16 bits can give a zero, which must be +0, because the scale is so small
#pragma unroll
    for (int j = 0; j < N; ++j) may_vanish = may_vanish || !(fabs(g[j].s) > (Real)1e-7);
    if (!may_vanish) return;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      Data rounded;
      narrow(y[j], rounded);
      if (widen(rounded) == (Real)0) y[j] = (Real)0;
    }
  }
};

struct Divided {  // quantize, backward
  template <int U, int N> static DEVICE bool quick(const uint4 (&dy)[U], const Segment<Real> (&g)[N]) {
    return all_divide(g) && all_divisible(dy);
  }
  template <bool QUICK, int V, int N>
  static DEVICE void apply(const Real (&dy)[V], const Real (&x)[V], const Segment<Real> (&g)[N], Real (&dx)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Segment<Real>& own = SEGMENT_OF(j);
      if (QUICK) dx[j] = quick_inside(x[j], own) ? quotient(dy[j], own) : (Real)0;
      else dx[j] = SLOWLY(slow_inside, x[j], own) ? slow_quotient(dy[j], own.s) : (Real)0;
    }
  }
};

struct Passed {  // fake-quantize, backward
  template <int U, int N> static DEVICE bool quick(const uint4 (&)[U], const Segment<Real> (&g)[N]) { return all_quick(g); }
  template <bool QUICK, int V, int N>
  static DEVICE void apply(const Real (&dy)[V], const Real (&x)[V], const Segment<Real> (&g)[N], Real (&dx)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Segment<Real>& own = SEGMENT_OF(j);
      dx[j] = (QUICK ? quick_inside(x[j], own) : SLOWLY(slow_inside, x[j], own)) ? dy[j] : (Real)0;
    }
  }
};

struct Scaled {  // dequantize, backward
  enum { has_slow_path = 0 };
  template <bool, int V, int N>
  static DEVICE void apply(const Real (&dy)[V], const Segment<Real> (&g)[N], Real (&dx)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) dx[j] = mul_rn(dy[j], SEGMENT_OF(j).s);
  }
};

#define SEGMENTS                                                                                                   \
  const void *scale, s32 scale_is_data, Real scale_value, const s32 *zero_point, s32 zero_point_value, s32 q_min, \
      s32 q_max
#define SHAPE                                                                                                      \
  s64 rows, s64 columns, s64 inner, s64 channels, u32 parts, u32 parts_multiplier, s32 parts_shift,                \
      u32 channels_multiplier, s32 channels_shift, s32 lanes
#define SHAPE_GIVEN                                                                                                \
  Shape{rows, columns, inner, channels, Divisor{parts, parts_multiplier, parts_shift},                             \
        Divisor{(u32)channels, channels_multiplier, channels_shift}, lanes}
#define SCALES Scales<Data>{scale, scale_is_data, scale_value, zero_point, zero_point_value, q_min, q_max}

// Whether rows follow each other without a gap, so the whole shape is one row.
DEVICE bool gapless(s64 rows, s64 columns, s64 leading) { return rows <= 1 || leading == columns; }

#ifdef SKUDA_CODE
enum { CODE_BYTES = Width<Data>::count / (Codes<SKUDA_CODE>::packed ? 2 : 1) };  // of a chunk

// Never of several rows of halves, which are 2 columns apart.
DEVICE bool gapless_codes(s64 rows, s64 columns, s64 leading) {
  return gapless(rows, columns, Codes<SKUDA_CODE>::packed ? 2 * leading : leading);
}

template <Layout LAYOUT, int IN_FLIGHT = InFlight<LAYOUT>::ONE>
DEVICE void walk_quantize(const Data* input, s64 input_leading, u8* output, s64 output_leading, const Scales<Data>& scales, const Shape& v) {
  const s64 rows = v.rows, columns = v.columns;
  const bool chunks = rows_of_chunks(input, input_leading, rows) &&
                      aligned(output, output_leading, rows, CODE_BYTES) &&
                      (Halves<SKUDA_CODE>::count == 1 || columns % CODE_BYTES == 0);  // low halves are as far away
  const bool whole = gapless(rows, columns, input_leading) && gapless_codes(rows, columns, output_leading);
  walk<LAYOUT>(Quantize<IN_FLIGHT>{input, input_leading, Codes<SKUDA_CODE>::place(output, columns), output_leading}, v,
                    scales, chunks, whole);
}
#endif

template <Layout LAYOUT, class F>
DEVICE void walk_map(const Data* input, s64 input_leading, Data* output, s64 output_leading, const Scales<Data>& scales, const Shape& v) {
  const s64 rows = v.rows, columns = v.columns;
  const bool chunks = rows_of_chunks(input, input_leading, rows) && rows_of_chunks(output, output_leading, rows);
  const bool whole = gapless(rows, columns, input_leading) && gapless(rows, columns, output_leading);
  walk<LAYOUT>(Map<F, InFlight<LAYOUT>::ONE>{input, input_leading, output, output_leading}, v,
                    scales, chunks, whole);
}

template <Layout LAYOUT, class F>
DEVICE void walk_gradient(const Data* d_output, s64 d_output_leading, const Data* input, s64 input_leading, Data* d_input,
                     s64 d_input_leading, const Scales<Data>& scales, const Shape& v) {
  const s64 rows = v.rows, columns = v.columns;
  const bool chunks = rows_of_chunks(d_output, d_output_leading, rows) && rows_of_chunks(input, input_leading, rows) &&
                      rows_of_chunks(d_input, d_input_leading, rows);
  const bool whole = gapless(rows, columns, d_output_leading) && gapless(rows, columns, input_leading) &&
                     gapless(rows, columns, d_input_leading);
  walk<LAYOUT>(Gradient<F, InFlight<LAYOUT>::EACH>{d_output, d_output_leading, input, input_leading, d_input, d_input_leading},
                    v, scales, chunks, whole);
}
