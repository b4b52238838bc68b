// The scale and zero point of one segment, and the quotient x / s, rounded as the contract says.
//
//   t = rne(RN_C(x / s)),  q = clamp(t + z, q_min, q_max)
//
// Data: registers -> registers. A segment's reciprocal and bounds are computed once for many chunks.
//
// Variants. The fast path multiplies instead of dividing. With y = RN(1/s), q0 = x y is within 2 ulp of x / s. A
// residual step (r = x - s q0, exact in one FMA; q1 = q0 + r y) makes it faithful. A second step, from a faithful
// value, rounds it correctly, because y is correctly rounded (Markstein). For 16-bit data one step is enough: a test
// shows it for every mantissa of f16 and bf16 with every mantissa of s. Both hold if s is well inside the range.
//
// If only t is needed, 16-bit data need less: with y + w = 1/s to twice the precision, q = RN(x y + RN(x w)). Of all
// 2^33 pairs of mantissas 16 are one ulp off. Neither these quotients nor the correct ones have fewer than 19 bits
// after the first, so none is k + 0.5 for a k below 2^18, and t is the same.
//
// The kernel clamps x, to s lo and s hi with lo = q_min - z and hi = q_max - z, both at most 2^17. Their quotients lie
// within 0.4 of lo and hi and round to them, and the order in between is kept. So no quotient is large, infinite or out
// of range.
//
// The slow path divides and then computes in f64. Chunks with a NaN or an infinity take it, and so do segments with an
// extreme scale or zero point. It is not inlined, so that the fast path has all registers.
#pragma once
#include "elements.cuh"

DEVICE f32 fma_rn(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
DEVICE f64 fma_rn(f64 a, f64 b, f64 c) { return __fma_rn(a, b, c); }
DEVICE f32 mul_rn(f32 a, f32 b) { return __fmul_rn(a, b); }
DEVICE f64 mul_rn(f64 a, f64 b) { return __dmul_rn(a, b); }
DEVICE f32 div_rn(f32 a, f32 b) { return __fdiv_rn(a, b); }
DEVICE f64 div_rn(f64 a, f64 b) { return __ddiv_rn(a, b); }
DEVICE f32 rcp_rn(f32 s) { return __frcp_rn(s); }
DEVICE f64 rcp_rn(f64 s) { return __drcp_rn(s); }
DEVICE f32 min_of(f32 a, f32 b) { return fminf(a, b); }
DEVICE f64 min_of(f64 a, f64 b) { return a < b ? a : b; }  // not fmin, which costs twice as much; b if a is NaN
DEVICE f32 max_of(f32 a, f32 b) { return fmaxf(a, b); }
DEVICE f64 max_of(f64 a, f64 b) { return a > b ? a : b; }

// Adding and subtracting this number rounds to an integer, ties to even; after the addition the low bits hold the
// integer.
template <class C> struct Magic;
template <> struct Magic<f32> {
  static DEVICE f32 value() { return 12582912.0f; }  // 1.5 * 2^23, for |q| <= 2^22
  static DEVICE u32 low(f32 v) { return __float_as_uint(v); }
};
template <> struct Magic<f64> {
  static DEVICE f64 value() { return 6755399441055744.0; }  // 1.5 * 2^52, for |q| <= 2^31
  static DEVICE u32 low(f64 v) { return (u32)__double2loint(v); }
};

// Scales for which the fast path is exact.
DEVICE bool tame(f32 s) { return fabsf(s) >= 8.7e-19f && fabsf(s) <= 1.0e12f; }
DEVICE bool tame(f64 s) { return fabs(s) >= 1e-120 && fabs(s) <= 1e120; }

template <class C> struct Segment {
  C s, y, rest;         // scale, its reciprocal, and the error of that
  C min_x, max_x;       // x clamped to these has its rounded quotient in [lo, hi]
  s32 z, q_min, q_max;  // zero point, bounds of the codes
  bool quick;           // whether the fast path is exact

  static DEVICE Segment make(C scale, s32 zero_point, s32 q_min, s32 q_max, bool known_near = false) {
    Segment g;
    g.s = scale, g.z = zero_point, g.q_min = q_min, g.q_max = q_max;
    g.quick = tame(scale) && (known_near || (near(zero_point) && near(q_min) && near(q_max)));
    const C tame_scale = g.quick ? scale : (C)1;
    g.y = rcp_rn(tame_scale);
    const C lack = fma_rn(-tame_scale, g.y, (C)1);
    g.rest = fma_rn(mul_rn(lack, lack), g.y, mul_rn(lack, g.y));
    // Unsigned, because an extreme zero point may wrap here; the fast path is then not taken.
    const C a = mul_rn(scale, (C)(s32)((u32)q_min - (u32)zero_point));
    const C b = mul_rn(scale, (C)(s32)((u32)q_max - (u32)zero_point));
    g.min_x = min_of(a, b), g.max_x = max_of(a, b);
    return g;
  }
  static DEVICE bool near(s32 v) { return (u32)v + 0x10000u < 0x20000u; }  // sums of two: 2^17 at most
};

// The slow path: for extreme segments, and for chunks with a NaN or an infinity.
template <class C> __device__ __noinline__ f64 slow_level(C x, C s, s32 z, s32 q_min, s32 q_max) {
  f64 t = (f64)rint(div_rn(x, s));
  t = t == t ? t : 0.0;
  return fmin(fmax(t, (f64)q_min - (f64)z), (f64)q_max - (f64)z);
}
template <class C> __device__ __noinline__ u32 slow_code(C x, C s, s32 z, s32 q_min, s32 q_max) {
  return (u32)(s32)(s64)(slow_level(x, s, z, q_min, q_max) + (f64)z);
}
template <class C> __device__ __noinline__ C slow_fake(C x, C s, s32 z, s32 q_min, s32 q_max) {
  return mul_rn((C)slow_level(x, s, z, q_min, q_max), s) + (C)0;
}
template <class C> __device__ __noinline__ bool slow_inside(C x, C s, s32 z, s32 q_min, s32 q_max) {
  const f64 t = (f64)rint(div_rn(x, s));
  return t >= (f64)q_min - (f64)z && t <= (f64)q_max - (f64)z;
}
template <class C> __device__ __noinline__ C slow_quotient(C x, C s) { return div_rn(x, s); }
#define SLOWLY(function, x, g) function(x, (g).s, (g).z, (g).q_min, (g).q_max)

// x / s, correctly rounded, for a bounded quotient. If s is positive, a zero keeps its sign: its residual is +0, and
// the product of that with -y is -0, which adds nothing.
#ifdef SKUDA_DATA
enum { RESIDUAL_STEPS = sizeof(SKUDA_DATA) == 2 ? 1 : 2 };
#else
enum { RESIDUAL_STEPS = 2 };
#endif
template <class C> DEVICE C quotient(C x, const Segment<C>& g) {
  C q = mul_rn(x, g.y);
#pragma unroll
  for (int step = 0; step < RESIDUAL_STEPS; ++step) q = fma_rn(fma_rn(q, g.s, -x), -g.y, q);
  return q;
}

// t for a quotient that is bounded by [lo, hi], plus the magic number.
template <class C> DEVICE C bounded_level(C x, const Segment<C>& g) {
  const C q = RESIDUAL_STEPS == 1 ? fma_rn(x, g.y, mul_rn(x, g.rest)) : quotient(x, g);
  return q + Magic<C>::value();
}

// t clamped to [lo, hi], plus the magic number.
template <class C> DEVICE C quick_level(C x, const Segment<C>& g) {
  return bounded_level(min_of(max_of(x, g.min_x), g.max_x), g);
}

// Whether every value is finite: 0 * x is 0 for those only.
template <int V, class C> DEVICE bool all_finite(const C (&x)[V]) {
  C sum = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) sum = fma_rn(x[j], (C)0, sum);
  return sum == (C)0;
}

template <int N, class C> DEVICE bool all_quick(const Segment<C> (&g)[N]) {
  bool quick = true;
#pragma unroll
  for (int j = 0; j < N; ++j) quick = quick && g[j].quick;
  return quick;
}

// Element j of a chunk belongs to g[j], or all of them to g[0].
#define SEGMENT_OF(j) g[N == 1 ? 0 : (j)]

// Codes in the low bits of integers; for finite x, on the fast path.
template <int V, int N, class C> DEVICE void quick_codes(const C (&x)[V], const Segment<C> (&g)[N], u32 (&q)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) q[j] = Magic<C>::low(quick_level(x[j], SEGMENT_OF(j)) + (C)SEGMENT_OF(j).z);
}

// The same if z is 0 and no |x| exceeds q_max s, as when s comes from the largest |x|: there is nothing to clamp.
template <int V, class C> DEVICE void quick_codes_within(const C (&x)[V], const Segment<C>& g, u32 (&q)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) q[j] = Magic<C>::low(bounded_level(x[j], g));
}

// The same for any x, on either path.
template <int V, int N, class C> DEVICE void quantized(const C (&x)[V], const Segment<C> (&g)[N], u32 (&q)[V]) {
  if (all_quick(g) && all_finite(x)) {
    quick_codes(x, g, q);
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) q[j] = SLOWLY(slow_code, x[j], SEGMENT_OF(j));
}

// RN_C(C(q - z) s): q - z is t clamped, so the zero point never enters. A zero result is +0. For finite x only.
template <int V, int N, class C> DEVICE void quick_fake(const C (&x)[V], const Segment<C> (&g)[N], C (&y)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    y[j] = mul_rn(quick_level(x[j], SEGMENT_OF(j)) - Magic<C>::value(), SEGMENT_OF(j).s) + (C)0;
  }
}

// The same for any x, on either path.
template <int V, int N, class C>
DEVICE void fake_quantized(const C (&x)[V], const Segment<C> (&g)[N], C (&y)[V]) {
  if (all_quick(g) && all_finite(x)) {
    quick_fake(x, g, y);
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) y[j] = SLOWLY(slow_fake, x[j], SEGMENT_OF(j));
}

// Whether t + z lies within [q_min, q_max], on the fast path; false for NaN.
template <class C> DEVICE bool quick_inside(C x, const Segment<C>& g) {
  // Clamping one step beyond the bounds keeps what lies outside them outside; a NaN is clamped there, too.
  const C step = fabs(g.s);
  const C t = bounded_level(min_of(max_of(x, g.min_x - step), g.max_x + step), g);
  return t >= (C)(g.q_min - g.z) + Magic<C>::value() && t <= (C)(g.q_max - g.z) + Magic<C>::value();
}

// Magnitudes from min() up to below limit() have finite quotients by a tame scale, and residuals that keep all bits.
template <class C> struct Divisible;
template <> struct Divisible<f32> {
  static DEVICE f32 min() { return 7.888609052210118e-31f; }  // 2^-100
  static DEVICE f32 limit() { return 1.4757395258967641e20f; }  // 2^67
};
template <> struct Divisible<f64> {
  static DEVICE f64 min() { return 1e-150; }
  static DEVICE f64 limit() { return 1e150; }
};
template <class C> DEVICE bool divisible(C v) {
  return (v == 0 || fabs(v) >= Divisible<C>::min()) && fabs(v) < Divisible<C>::limit();
}

// Whether `quotient` rounds correctly by these scales, and keeps the sign of a zero.
template <int N, class C> DEVICE bool all_divide(const Segment<C> (&g)[N]) {
  bool divide = all_quick(g);
#pragma unroll
  for (int j = 0; j < N; ++j) divide = divide && g[j].s > 0;
  return divide;
}

// RN_C(C(q - z) s), the difference being exact before it is rounded.
template <int V, int N, class C> DEVICE void dequantized(const s32 (&q)[V], const Segment<C> (&g)[N], C (&y)[V]) {
  bool small = true;
#pragma unroll
  for (int j = 0; j < N; ++j) small = small && (u32)g[j].z + 0x400000u < 0x800000u;
  if (small) {
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = mul_rn((C)(q[j] - SEGMENT_OF(j).z), SEGMENT_OF(j).s);
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) y[j] = mul_rn((C)((s64)q[j] - (s64)SEGMENT_OF(j).z), SEGMENT_OF(j).s);
}
