// SiLU and GELU: a = RN_T(E(x)), where E is the algorithm in f64 of curves.py.
//
//   silu(x) = x / (1 + exp(-x)),  gelu(x) = x Phi(x),  gelu_tanh(x) = x / (1 + exp(-w)),  w = x (c1 + c2 x^2)
//
// Data: chunks in registers -> pairs of 16-bit values, or single wider ones -> chunks in registers. For linear layers:
// f32 -> f32.
//
// Variants. E is a fixed sequence of sums, products and quotients, each rounded in f64, the same as in curves.py. f32
// and f64 data of gated ops use it directly. For 16-bit data it would take several times as long as the memory, and
// only 8 or 11 of its bits are kept. So the kernel computes the curve in f32 with ex2.approx and rcp.approx, and makes
// sure that the result is RN_T(E(x)).
//
// bf16: from -10 on, E has no value at any of the few thousand arguments that is so close to the middle between two
// bf16 numbers that the approximations could round to the wrong one. The constants were chosen for that, and a test
// shows it for every argument, with errors twice as large as PTX allows. A chunk with a gate below -10, or nearer to 0
// than 2^-100, is computed like f16.
//
// f16: the kernel also computes a bound of the error. With s, the factor of x:
//
//   |x s| (1 - e) <= |E(x)| <= |x s| (1 + e) + |x| 2^-126,  e = base + slope min(|t|, 130)
//
// t is the exponent of 2^t, whose own rounding the slope covers; 2^-126 covers factors that are flushed to zero. If
// both ends round to the same 16-bit value, so does E(x). Otherwise, for one element in some hundreds, the kernel
// computes E, in a function that is not inlined.
//
// Linear layers have f32 arguments, of which x^2 is rounded: GELU's slope is twice as large. Bounds also decide codes,
// by the quotients of both ends and the scale. f32 results, and what bounds leave, come from fused f64 operations, which
// give E to 2^-43. Where that decides no rounding either, for one f32 number in 2^18 and for subnormal ones, the kernel
// computes E.
//
// So no bit of a result depends on how a GPU approximates. A NaN may also come from a gate beyond 10^10: callers of
// chunks compute rows with a NaN again, by E.
//
// The quotients of polynomials approximate R(a) = exp(a^2 / 2) Phi(-a), with a relative error of 2^-53 for a <= 40; in
// f32 of 2^-27 for a <= 13.5, beyond which exp(-a^2 / 2) is flushed to zero; and for bf16 of 2^-16 for a <= 10.
#pragma once
#include "quotient.cuh"

enum Curve { SILU, GELU, GELU_TANH };

// --- E ---------------------------------------------------------------------------------------------------------------

// 1 / d to 2^-50, for 1 <= d < 2^160.
DEVICE f64 reciprocal(f64 d) {
  f64 y = __hiloint2double(0x7FDE6238 - __double2hiint(d), 0);  // to 0.0506, by a linear function of the bits
#pragma unroll
  for (int n = 0; n < 2; ++n) y = fma_rn(fma_rn(-d, y, 1.0), y, y);
  const f64 lack = fma_rn(-d, y, 1.0);
  return fma_rn(fma_rn(lack, lack, lack), y, y);
}

// FUSED: the same values for half the cost, but not the bits of E.
template <bool FUSED, int N> DEVICE f64 polynomial(const f64 (&coefficients)[N], f64 x) {
  f64 value = coefficients[0];
#pragma unroll
  for (int n = 1; n < N; ++n) value = FUSED ? fma_rn(value, x, coefficients[n]) : value * x + coefficients[n];
  return value;
}
// exp(r) for |r| < 0.35.
template <bool FUSED> DEVICE f64 short_exponential(f64 r) {
  const f64 coefficients[] = {2.7626371065696354e-07, 2.764019739169484e-06, 2.480150431378554e-05,
                              0.00019841170230570286, 0.001388888893251478,  0.008333333385699212,
                              0.041666666666573066,   0.16666666666554314,   0.5000000000000006,
                              1.0000000000000067,     1.0};
  return polynomial<FUSED>(coefficients, r);
}
// exp(a^2 / 2) Phi(-a) for 0 <= a <= 40.
template <bool FUSED> DEVICE f64 mills(f64 a) {
  const f64 over[] = {1.3580493278816947e-06, 3.667278381839473e-05, 0.0004843447484807866, 0.004049194030866959,
                      0.023441129036010148,   0.0971280896336162,    0.2881054757227894,    0.5923902077305884,
                      0.7737776671426358,     0.5};
  const f64 under[] = {3.4041248436214284e-06, 9.192503682660168e-05, 0.0012174763662462628, 0.010241749273141773,
                       0.05996546124313123,    0.25342997821190955,   0.7785376705230116,    1.7089816573166399,
                       2.556170696043242,      2.3454398950881328,    1.0};
  const f64 p = polynomial<FUSED>(over, a), q = polynomial<FUSED>(under, a);
  return FUSED ? p * reciprocal(q) : div_rn(p, q);
}

struct ScaledPower { f64 p; s32 k; };  // p 2^k

// p 2^k with one rounding, also where it is subnormal; for k between -1200 and 0.
DEVICE f64 ldexp_rn(ScaledPower v) {
  const s32 half = v.k >> 1;
  return v.p * __hiloint2double((half + 1023) << 20, 0) * __hiloint2double((v.k - half + 1023) << 20, 0);
}

// exp(-v + rest), for v - rest between 0 and 830.
DEVICE ScaledPower exponential(f64 v, f64 rest) {
  const f64 shifted = (v - rest) * -1.4426950408889634 + Magic<f64>::value(), k = shifted - Magic<f64>::value();
  const f64 r = (-v - k * 0.6931471805598903) + (rest - k * 5.497923018708371e-14);
  return ScaledPower{short_exponential<false>(r), __double2loint(shifted)};
}

// x / (1 + exp(-v)), where v has the sign of x, |x| = a, and exp(-|v|) is given.
DEVICE f64 times_logistic(f64 x, f64 a, ScaledPower decay) {
  const f64 quotient = div_rn(x < 0.0 ? a * decay.p : x, 1.0 + ldexp_rn(decay));
  return x < 0.0 ? -ldexp_rn(ScaledPower{quotient, decay.k}) : quotient;
}

DEVICE f64 clamped_abs(f64 x, f64 limit) {
  const f64 a = fabs(x);
  return a < limit ? a : limit;  // limit for NaN
}

// A multiple of `unit`, a power of two, next to a.
DEVICE f64 rounded_to_multiple(f64 a, f64 unit) { return (a + Magic<f64>::value() * unit) - Magic<f64>::value() * unit; }

template <int CURVE> DEVICE f64 curve_f64(f64 x) {
  if (CURVE == SILU) {
    const f64 a = clamped_abs(x, 800.0);
    return times_logistic(x, a, exponential(a, 0.0));
  }
  if (CURVE == GELU) {
    const f64 a = clamped_abs(x, 40.0), head = rounded_to_multiple(a, 3.814697265625e-06);
    const ScaledPower decay = exponential(head * head * 0.5, -((a + head) * (a - head) * 0.5));
    const f64 tail = ldexp_rn(ScaledPower{a * (mills<false>(a) * decay.p), decay.k});
    return x < 0.0 ? -tail : x - tail;
  }
  const f64 a = clamped_abs(x, 22.0), head = rounded_to_multiple(a, 0.015625), rest = a - head;
  const f64 square = head * head, cube = square * head;
  const f64 exact = 1.5957691215444356 * head + 0.07135480642318726 * cube;
  const f64 slope = 1.5957691216057308 + 0.07135481627260025 * (3.0 * square + rest * (3.0 * head + rest));
  const f64 lost = (6.129509145186187e-11 * head + 9.849412992916964e-09 * cube) + rest * slope;
  return times_logistic(x, a, exponential(exact, -lost));
}

// To f32 with the last bit set if inexact, which keeps what a second rounding, to 16 bits, needs.
DEVICE f32 to_odd(f64 v) {
  const f32 near = __double2float_rn(v);
  const f64 back = (f64)near;
  u32 bits = __float_as_uint(near);
  if (back != v && v == v) bits = (fabs(back) > fabs(v) ? bits - 1 : bits) | 1;
  return __uint_as_float(bits);
}
// RN_T(E(x)), rounded once.
DEVICE void rounded(f64 v, f64& out) { out = v; }
DEVICE void rounded(f64 v, f32& out) { out = __double2float_rn(v); }
template <class T> DEVICE void rounded(f64 v, T& out) { narrow(to_odd(v), out); }
template <int CURVE, class T> DEVICE T curve_of(T x) {
  T found;
  rounded(curve_f64<CURVE>((f64)widen(x)), found);
  return found;
}

// --- 16 bits ---------------------------------------------------------------------------------------------------------

#ifndef SKUDA_HOST  // the CPU harness of the tests defines its own, with errors as large as PTX allows
DEVICE f32 ex2_approx(f32 t) { f32 v; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(t)); return v; }
DEVICE f32 rcp_approx(f32 d) { f32 v; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(d)); return v; }
DEVICE u32 cvt_rn_x2(f32 low, f32 high, f16) {
  u32 two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
DEVICE u32 cvt_rn_x2(f32 low, f32 high, bf16) {
  u32 two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
// RN_T(RN_C(a u)) of two pairs: the product of 16-bit numbers is exact in f32, unless it is less than half of the
// smallest bf16 number.
DEVICE u32 mul_rn_x2(u32 a, u32 u, f16) {
  u32 two;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(two) : "r"(a), "r"(u));
  return two;
}
DEVICE u32 mul_rn_x2(u32 a, u32 u, bf16) {
  u32 two;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(a), "r"(u), "r"(0x80008000u));
  return two;
}
#else
template <class T> DEVICE u32 cvt_rn_x2(f32 low, f32 high, T) {
  T a, b;
  narrow(low, a), narrow(high, b);
  return (u32)a.bits | (u32)b.bits << 16;
}
template <class T> DEVICE u32 mul_rn_x2(u32 a, u32 u, T) {
  u32 two = 0;
  for (int i = 0; i < 32; i += 16) {
    T x, y, z;
    x.bits = (u16)(a >> i), y.bits = (u16)(u >> i);
    narrow(mul_rn(widen(x), widen(y)), z);
    two |= (u32)z.bits << i;
  }
  return two;
}
#endif

struct Bounds { f32 low, high; };  // E(x) lies between them; both have the sign of x, but `low` may be 0

// SQUARES says whether x^2 is exact in f32, as that of 16-bit numbers is.
template <int CURVE, bool SQUARES = true> DEVICE Bounds curve_bounds(f32 x) {
  // Relative errors in units of 2^-24: 2.9 of 2^t, 2 of 1 / d, and 1 of each other rounding. The slope has the rounding
  // of t and of its factors, times ln 2. A test with errors as large as these shows that the bounds hold for every
  // 16-bit argument.
  f32 t, s, base = 8.0f / 16777216.0f, slope = 1.0f / 16777216.0f;
  if (CURVE == GELU) {
    const f32 over[] = {0.003996612f, 0.039849035f, 0.18094353f, 0.4352559f, 0.5f};
    const f32 under[] = {0.010017879f, 0.09989405f, 0.46341097f, 1.1930716f, 1.6683966f, 1.0f};
    const f32 a = fabsf(x);
    f32 p = over[0], q = under[0];
#pragma unroll
    for (int n = 1; n < 5; ++n) p = fma_rn(p, a, over[n]);
#pragma unroll
    for (int n = 1; n < 6; ++n) q = fma_rn(q, a, under[n]);
    t = mul_rn(mul_rn(x, x), -0.72134752f);
    const f32 tail = mul_rn(mul_rn(p, rcp_approx(q)), ex2_approx(t));
    s = x < 0.0f ? tail : 1.0f - tail;
    base = 15.0f / 16777216.0f;
    if (!SQUARES) slope = 2.0f / 16777216.0f;
  } else {
    if (CURVE == SILU) {
      t = mul_rn(x, -1.442695f);
    } else {
      t = mul_rn(x, fma_rn(mul_rn(x, x), -0.10294324f, -2.3022082f));
      slope = 2.0f / 16777216.0f;
    }
    s = rcp_approx(1.0f + ex2_approx(t));
  }
  const f32 doubt = fma_rn(fminf(fabsf(t), 130.0f), slope, base), middle = mul_rn(x, s);
  return Bounds{fma_rn(-middle, doubt, middle), fma_rn(x, fma_rn(s, doubt, 1.1754944e-38f), middle)};
}

// E(x), so close that its bf16 value is right, for bf16 x from -10 on that are at least 2^-100 from 0.
template <int CURVE> DEVICE f32 curve_bf16(f32 x) {
  if (CURVE == GELU) {
    const f32 a = fabsf(x), t = mul_rn(mul_rn(x, x), -0.72134752f);
    const f32 p = fma_rn(fma_rn(0.055536628f, a, 0.2609001f), a, 0.50000405f);
    const f32 q = fma_rn(fma_rn(fma_rn(0.13880624f, a, 0.66237766f), a, 1.320032f), a, 1.0f);
    const f32 tail = mul_rn(mul_rn(p, rcp_approx(q)), ex2_approx(t));
    return fma_rn(-a, tail, fmaxf(x, 0.0f));
  }
  if (CURVE == GELU_TANH) {
    const f32 t = mul_rn(x, fma_rn(mul_rn(x, x), -0.10294324f, -2.3022082f));
    return mul_rn(x, rcp_approx(1.0f + ex2_approx(t)));
  }
  // These 7 units move the two x whose SiLU is almost a middle, 2^-7 and -2^-8, to the right side of it.
  const f32 moved = fma_rn(fabsf(x), -7.0f / 16777216.0f, x);
  return mul_rn(moved, rcp_approx(1.0f + ex2_approx(mul_rn(x, -1.442695f))));
}

// Computes the halves of a pair whose bounds round differently by E. Not inlined, because it is rare.
template <int CURVE, class T> __device__ __noinline__ u32 resolved_by_f64(u32 x, u32 found, u32 differing) {
#pragma unroll 1
  for (int shift = 0; shift < 32; shift += 16) {
    if (!(differing >> shift & 0x7fffu)) continue;
    T half;
    half.bits = (u16)(x >> shift);
    found = (found & ~(0xffffu << shift)) | (u32)curve_of<CURVE>(half).bits << shift;
  }
  return found;
}

// --- chunks ----------------------------------------------------------------------------------------------------------

// RN_T(RN_C(C(a) C(u))) with a = RN_T(E(gate)).
template <int CURVE, class T> struct Gate {
  static DEVICE T single(T gate, T up) {
    T found;
    narrow(mul_rn(widen(curve_of<CURVE>(gate)), widen(up)), found);
    return found;
  }
  static DEVICE uint4 chunk(const uint4& gate, const uint4& up) {
    typename Compute<T>::type x[Width<T>::count], u[Width<T>::count];
    Chunk<T>::unpack(gate, x), Chunk<T>::unpack(up, u);
#pragma unroll
    for (int j = 0; j < Width<T>::count; ++j) x[j] = mul_rn(curve_of<CURVE>(x[j]), u[j]);
    return Chunk<T>::pack(x);
  }
};
// RN_T(E(x)) of a pair of 16-bit gates by bounds; `differing` has bits in the halves that bounds do not decide.
template <int CURVE, class T> DEVICE u32 bounded(u32 pair, u32& differing) {
  T low, high;
  low.bits = (u16)pair, high.bits = (u16)(pair >> 16);
  const Bounds first = curve_bounds<CURVE>(widen(low)), second = curve_bounds<CURVE>(widen(high));
  const u32 found = cvt_rn_x2(first.high, second.high, T());
  differing = (found ^ cvt_rn_x2(first.low, second.low, T())) & 0x7fff7fffu;  // zeros may differ in their sign
  return found;
}
// The same for a chunk, one pair after another. Not inlined, so that it takes no registers where it is not needed.
template <int CURVE, class T> __device__ __noinline__ uint4 bounded_chunk(uint4 gate) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    u32 differing, found = bounded<CURVE, T>(gate.x, differing);
    if (differing) found = resolved_by_f64<CURVE, T>(gate.x, found, differing);
    gate = make_uint4(gate.y, gate.z, gate.w, found);
  }
  return gate;
}

// RN_T(E(gate)) of a chunk.
template <int CURVE> DEVICE uint4 activated(const uint4& gate, f16) {
  const u32 words[4] = {gate.x, gate.y, gate.z, gate.w};
  u32 found[4], differing[4], any = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) found[i] = bounded<CURVE, f16>(words[i], differing[i]), any |= differing[i];
  if (any) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (differing[i]) found[i] = resolved_by_f64<CURVE, f16>(words[i], found[i], differing[i]);
    }
  }
  return make_uint4(found[0], found[1], found[2], found[3]);
}
template <int CURVE> DEVICE uint4 activated(const uint4& gate, bf16 type) {
  const u32 small = 0x0d800d80u, lowest = 0xc120c120u;  // 2^-100 and -10, twice
  u32 words[4] = {gate.x, gate.y, gate.z, gate.w}, nearest = small, low = lowest;
  f32 x[8];
  Chunk<bf16>::unpack(gate, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    nearest = min_magnitude(nearest, words[i], type), low = min_number(low, words[i], type);
    words[i] = cvt_rn_x2(curve_bf16<CURVE>(x[2 * i]), curve_bf16<CURVE>(x[2 * i + 1]), type);
  }
  if ((nearest & 0x7fff7fffu) != small || low != lowest) return bounded_chunk<CURVE, bf16>(gate);
  return make_uint4(words[0], words[1], words[2], words[3]);
}
template <int CURVE, class T> struct HalfGate {
  static DEVICE T single(T gate, T up) {
    T found;
    narrow(mul_rn(widen(curve_of<CURVE>(gate)), widen(up)), found);
    return found;
  }
  static DEVICE uint4 chunk(const uint4& gate, const uint4& up) {
    const uint4 found = activated<CURVE>(gate, T());
    return make_uint4(mul_rn_x2(found.x, up.x, T()), mul_rn_x2(found.y, up.y, T()),
                      mul_rn_x2(found.z, up.z, T()), mul_rn_x2(found.w, up.w, T()));
  }
};
template <int CURVE> struct Gate<CURVE, f16> : HalfGate<CURVE, f16> {};
template <int CURVE> struct Gate<CURVE, bf16> : HalfGate<CURVE, bf16> {};

// --- f32 arguments ---------------------------------------------------------------------------------------------------

// RN_T(E(x)) as an f32 that rounds to it. Codes are of RN_f32(E(x)).
DEVICE f32 to_round(f64 v, f16) { return to_odd(v); }
DEVICE f32 to_round(f64 v, bf16) { return to_odd(v); }
template <class T> DEVICE f32 to_round(f64 v, T) { return __double2float_rn(v); }

// E vanishes below the first in every type but f64, and is x in f32 from the second on.
template <int CURVE> struct Reach {
  static DEVICE f32 low() { return CURVE == GELU ? -14.6f : -110.0f; }
  static DEVICE f32 high() { return CURVE == GELU ? 9.0f : 40.0f; }
};

// Whether both ends round to the same element, or code; not if one is NaN. `per_unit` is 1 / s of codes, or NaN if s is
// not tame.
template <class T> DEVICE bool decide(const Bounds& ends, T) {
  const u32 both = cvt_rn_x2(ends.low, ends.high, T());
  T low, high;
  low.bits = (u16)both, high.bits = (u16)(both >> 16);
  return widen(low) == widen(high);
}
DEVICE bool decides(const Bounds& ends, f32, f16 type) { return decide(ends, type); }
DEVICE bool decides(const Bounds& ends, f32, bf16 type) { return decide(ends, type); }
template <class Q> DEVICE bool decides(const Bounds& ends, f32 per_unit, Q) {
  const f32 q = mul_rn(ends.high, per_unit), level = (q + Magic<f32>::value()) - Magic<f32>::value();
  // Both quotients are this near to q; the last bits are those of the roundings here and of RN(v / s).
  const f32 reach = fma_rn(fabsf(q), 4.7683716e-7f, fabsf(mul_rn(ends.high - ends.low, per_unit)));
  return fabsf(q - level) < 0.5f - reach;
}

// Computes RN_T(E(x)) by bounds. Says whether they decide.
template <int CURVE, class T> DEVICE bool bounded_curve(f32 x, f32 per_unit, f32& found, T type) {
  const Bounds ends = curve_bounds<CURVE, false>(x);
  found = ends.high;
  return decides(ends, per_unit, type);
}
// E(x) to 2^-44 between the ends of Reach: the same formulas and polynomials with fused operations.
template <int CURVE> DEVICE f64 curve_fused(f32 x) {
  const f64 a = (f64)fminf(fabsf(x), -Reach<CURVE>::low()), v = CURVE == GELU ? a * a * -0.5 : -a;  // exact
  const f64 shifted = fma_rn(v, 1.4426950408889634, Magic<f64>::value()), k = shifted - Magic<f64>::value();
  const f64 power = short_exponential<true>(fma_rn(k, -0.6931471805599453, v));
  const f64 decay = __hiloint2double(__double2hiint(power) + (__double2loint(shifted) << 20), __double2loint(power));
  if (CURVE == GELU) return fma_rn(-a, decay * mills<true>(a), x < 0.0f ? 0.0 : a);
  const f64 part = a * reciprocal(1.0 + decay);
  return x < 0.0f ? -decay * part : part;
}
// Computes RN_T(E(x)) from that. Says whether it decides. Without branches: & and |.
template <int CURVE, class T> DEVICE bool fused_curve(f32 x, f32& found, T type) {
  const f64 near = curve_fused<CURVE>(x);
  const f32 normal = 1.1754944e-38f, rounded = to_round(near, type);
  const bool inside = (x > Reach<CURVE>::low()) & (x < Reach<CURVE>::high()) & (x != 0.0f);
  found = inside ? rounded : x <= Reach<CURVE>::low() ? -0.0f : x;
  // Of the last 29 bits, which f32 has not, 2^28 is the middle. Rounding to odd asks whether all are 0. 2^-43 is 2^10
  // units at most.
  const u32 edge = sizeof(T) == 2 ? 0 : 0x10000000u;
  const bool clear = ((u32)__double2loint(near) - (edge - 1024u) & 0x1fffffffu) > 2048u;
  return !inside | (clear & (fabsf(rounded) >= normal));
}
template <int CURVE> DEVICE bool bounded_curve(f32 x, f32, f32& found, f32 type) {
  return fused_curve<CURVE>(x, found, type);
}
// The same for what bounds do not decide, by E in the end. Not inlined, because it is rare.
template <int CURVE, class T> __device__ __noinline__ f32 curve_by_f64(f32 x) {
  f32 found;
  if (sizeof(T) != 4 && fused_curve<CURVE>(x, found, T())) return found;
  return to_round(curve_f64<CURVE>((f64)x), T());
}

// Whether T has numbers so small that bounds of them are rounded from the other side of a middle.
template <class T> struct Tiny { enum { value = 0 }; };
template <> struct Tiny<bf16> { enum { value = 1 }; };

// A curve of linear layers: values that round to RN_T(E(x)). `per_unit` as in `decides`.
template <int CURVE, class T, int V> DEVICE void apply_curve(f32 (&x)[V], f32 per_unit) {
  u32 doubtful = 0;
  f32 found[V];
#pragma unroll
  for (int j = 0; j < V; ++j) doubtful |= (u32)!bounded_curve<CURVE>(x[j], per_unit, found[j], T()) << j;
  if (Tiny<T>::value) {
    const f32 tiny = 7.8886091e-31f;  // 2^-100
    f32 least = tiny;
#pragma unroll
    for (int j = 0; j < V; ++j) least = fminf(least, fabsf(found[j]));
    if (least < tiny) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (x[j] <= Reach<CURVE>::low()) found[j] = -0.0f, doubtful &= ~(1u << j);
        else doubtful |= (u32)(fabsf(found[j]) < tiny && found[j] != 0.0f) << j;
      }
    }
  }
#pragma unroll 1
  for (; doubtful; doubtful &= doubtful - 1) {  // in each round every thread of the warp computes its next one
    f32 next = x[0];
#pragma unroll
    for (int j = 1; j < V; ++j) next = doubtful & ((1u << j) - 1) ? next : x[j];
    const f32 exact = curve_by_f64<CURVE, T>(next);
#pragma unroll
    for (int j = 0; j < V; ++j) found[j] = (doubtful & (2u << j) - 1) == 1u << j ? exact : found[j];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) x[j] = found[j];
}
