// The operands of a linear layer and its epilogue: scales, zero points, bias, activation, the output's element.
//
//   acc = sum_k (a[m, k] - za) (w[n, k] - zw[n])                      exact
//   v   = RN_C(RN_C(sa[m] * sw[n]) * RN_C(acc)); + bias[n]; activation
//   y   = RN_T(v), or clamp(rne(RN_C(v / s_out)) + z_out), or acc itself
//
//   relu(v) = v <= 0 ? +0 : v, so -0 becomes +0 and NaN stays NaN
//   gelu and silu are E(v) of curves.cuh in f64, and y = RN_T(E(v)), or a code of RN_C(E(v))
//
// Data: sums in registers (for mma.cuh in shared memory) -> v in registers -> y -> global memory. Scales, zero points
// and bias come from global memory.
//
// Variants: `Layer` takes elements and epilogue at run time, so few compilations serve all of them: for kernels where
// that counts more than speed. `Epilogue` is compiled for one output element and has no branches on elements: for
// kernels where the epilogue is a visible part of the time.
#pragma once
#include "curves.cuh"
#ifdef SKUDA_UNPACKS  // a launch in front writes the 8-bit codes of a packed weight
#include "unpacked_codes.cuh"
#endif

enum EpilogueKind { IDENTITY, BIAS, BIAS_RELU, BIAS_GELU, BIAS_SILU };
enum Output { OUT_F32, OUT_F64, OUT_F16, OUT_BF16, OUT_S8, OUT_U8, OUT_S32, OUT_S64 };

// Whether the results are the exact sums, without scales; and the type of a result before it is rounded.
template <class Out> struct IsSum { enum { value = 0 }; typedef f32 type; };
template <> struct IsSum<s32> { enum { value = 1 }; typedef s32 type; };
template <> struct IsSum<s64> { enum { value = 1 }; typedef s64 type; };

// Operands with codes of 16 bits have two halves, and are multiplied half by half: each sum of products of halves fits
// in s32. The product of two low halves is left out.
#ifdef SKUDA_CODE
enum { A_HALVES = Halves<SKUDA_CODE>::count };
typedef Halves<SKUDA_CODE>::type ACode;
#else
enum { A_HALVES = 1 };
#endif
#ifdef SKUDA_WEIGHT
enum { W_HALVES = Halves<SKUDA_WEIGHT>::count };
typedef Halves<SKUDA_WEIGHT>::type WCode;
#else
enum { W_HALVES = 1 };
#endif
template <bool WIDE> struct CodeSum { typedef s32 type; };  // the type of a sum of products of codes
template <> struct CodeSum<true> { typedef s64 type; };
// The sum of products of codes, from those of the high halves, and from those with a low half.
DEVICE s64 joined(s32 high, s32 low) { return (s64)high * (1 << 8 * W_HALVES) + (s64)low * (1 << 8 * (W_HALVES - 1)); }

// Loads a scale or bias of any element: of f32, f16 and bf16 number `which` if C is f32; of f64, f32, f16 and bf16 if C
// is f64.
DEVICE f32 real_at(const void* p, s32 which, s64 i, f32) {
  if (which == 0) return ((const f32*)p)[i];
  return which == 1 ? widen(((const f16*)p)[i]) : widen(((const bf16*)p)[i]);
}
DEVICE f64 real_at(const void* p, s32 which, s64 i, f64) {
  return which == 0 ? ((const f64*)p)[i] : (f64)real_at(p, which - 1, i, 0.0f);
}

// Adds the four codes of a word to a sum.
DEVICE s32 sum_codes(u32 word, s32 sum, s8) { return __dp4a((s32)word, 0x01010101, sum); }
DEVICE s32 sum_codes(u32 word, s32 sum, u8) { return (s32)__dp4a(word, 0x01010101u, (u32)sum); }

template <class C> DEVICE C relu(C v) { return v <= (C)0 ? (C)0 : v; }

// GELU or SiLU of values that are then rounded to Out; `per_unit` is for codes, see `decides`.
template <class Out, int V> DEVICE void apply_curve(f32 (&v)[V], s32 epilogue, f32 per_unit) {
  if (epilogue == BIAS_GELU) apply_curve<GELU, Out>(v, per_unit);
  else apply_curve<SILU, Out>(v, per_unit);
}
DEVICE f64 curve_of(f64 v, s32 epilogue) { return epilogue == BIAS_GELU ? curve_f64<GELU>(v) : curve_f64<SILU>(v); }

DEVICE f32 to_odd(f32 v) { return v; }

struct Layer {
  const u8* a;  // [m, k], a_leading bytes apart
  s64 a_leading;
  const u8* w;  // [n, k], w_leading bytes apart
  s64 w_leading;
  const void* weight_scale;  // [n]
  s32 weight_scale_is;
  const s32* weight_zero_point;  // [n] or null
  const void* bias;              // [n] or null
  s32 bias_is;
  const void* output_scale;  // one C, or null: the value
  f64 output_scale_value;
  const s32* output_zero_point;
  s32 output_zero_point_value;
  void* output;  // [m, n], output_leading elements apart
  s64 output_leading;
  s64 m, n, k;
  s32 epilogue, output_is;
};

// The same number, which the compiler takes for a new one. Else it copies loops for each combination of such numbers,
// and compiles for minutes.
DEVICE s32 opaque(s32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

// GELU or SiLU for an output element that is known only at run time, by E alone. Not inlined, because the code is long.
__device__ __noinline__ f64 curved_for(s32, f64 v, s32 epilogue) { return curve_of(v, epilogue); }
__device__ __noinline__ f32 curved_for(s32 output_is, f32 v, s32 epilogue) {
  const f64 found = curve_of((f64)v, epilogue);
  return output_is == OUT_F16 || output_is == OUT_BF16 ? to_odd(found) : __double2float_rn(found);
}
template <class C> DEVICE C activated(const Layer& p, C v, s32 epilogue) {
  if (epilogue == BIAS_RELU) return relu(v);
  return epilogue > BIAS_RELU ? curved_for(p.output_is, v, epilogue) : v;
}

template <class C> DEVICE void put(const Layer& p, s64 at, s32 output_is, C v) {
  switch (output_is) {
    case OUT_F32: ((f32*)p.output)[at] = (f32)v; return;
    case OUT_F64: ((f64*)p.output)[at] = (f64)v; return;
    case OUT_F16: narrow(to_odd(v), ((f16*)p.output)[at]); return;
    case OUT_BF16: narrow(to_odd(v), ((bf16*)p.output)[at]); return;
  }
  const C s = p.output_scale ? *(const C*)p.output_scale : (C)p.output_scale_value;
  const s32 z = p.output_zero_point ? *p.output_zero_point : p.output_zero_point_value;
  const bool is_signed = output_is == OUT_S8;
  ((u8*)p.output)[at] = (u8)slow_code(v, s, z, is_signed ? -128 : 0, is_signed ? 127 : 255);
}

// Scales of the rows of a, and one zero point for all of them, within the range of the codes.
template <class S, class C = S> struct RowScales {
  typedef s32 Sum;  // of a - za over a row; smaller than the sum of products, which fits
  const S* scale;   // [m], or null: the value
  C value;
  s32 zero_point;

  DEVICE C at(s64 row) const { return scale ? (C)scale[row] : value; }
  // The same for tiles that reach beyond the last row.
  DEVICE C within(s64 row, s64 rows) const { return scale == nullptr ? value : row < rows ? (C)scale[row] : (C)0; }
  DEVICE bool has_zero_points() const { return zero_point != 0; }
  DEVICE s64 zero_point_of(s64) const { return zero_point; }
  // acc - za w. It fits in 32 bits, because K is so short that sums of u8 codes do.
  static DEVICE s32 subtract(s32 acc, s32 za, s32 w) { return (s32)((u32)acc - (u32)za * (u32)w); }
  // RN_C(sum - zw a); it fits in 64 bits.
  static DEVICE C difference(s64 sum, s64 zw, s64 a) { return (C)(sum - zw * a); }
};

// RN_C(sum - zw a) in 128 bits.
template <class C> __device__ __noinline__ C difference_128(s64 sum, s64 zw, s64 a) {
  const u64 product = (u64)zw * (u64)a;
  u64 low = (u64)sum - product;
  u64 high = (u64)(sum >> 63) - (u64)__mul64hi(zw, a) - ((u64)sum < product);
  const bool negative = (s64)high < 0;
  if (negative) low = ~low + 1, high = ~high + (low == 0);
  if (high == 0) return negative ? -(C)low : (C)low;
  // The leading 64 bits. The last of them also says whether any bit that is cut off is 1, so there is one rounding.
  const int cut = 64 - __clzll((s64)high);
  const u64 leading = high << (64 - cut) | low >> cut | (u64)(low << (64 - cut) != 0);
  const C found = (C)leading * (C)(1ull << cut);
  return negative ? -found : found;
}

// Scales and zero points of the rows of a as arrays: one element for each row, or one for all rows.
template <class C> struct GivenRows {
  typedef s64 Sum;  // of a - za over a row
  const void* scale;  // [m] or [1]; null for sums
  s32 scale_is;
  const s32* zero_point;  // as many, or null
  s64 step;               // elements from row to row: 1 or 0

  DEVICE C at(s64 row) const { return real_at(scale, scale_is, row * step, (C)0); }
  DEVICE C within(s64 row, s64 rows) const { return scale != nullptr && row < rows ? at(row) : (C)0; }
  DEVICE bool has_zero_points() const { return zero_point != nullptr; }
  DEVICE s64 zero_point_of(s64 row) const { return zero_point ? zero_point[row * step] : 0; }
  // acc - za w
  static DEVICE s64 subtract(s32 acc, s32 za, s32 w) { return acc - (s64)za * w; }
  // RN_C(sum - zw a) for |sum| < 2^62 and any zero points, for which it may need more than 64 bits.
  static DEVICE C difference(s64 sum, s64 zw, s64 a) {
    return a == (s32)a ? (C)(sum - zw * a) : difference_128<C>(sum, zw, a);
  }
};

// One scale for all rows, which the kernel also writes to `scratch` unless that is null, and one zero point.
#define STATIC_ROWS_PARAMETERS(C) C act_scale, s32 act_zero_point, C *scratch
#define STATIC_ROWS(C) RowScales<C>{nullptr, act_scale, act_zero_point}
#define GIVEN_ROWS_PARAMETERS const void *act_scale, s32 act_scale_is, const s32 *act_zero_point, s64 act_step
#define GIVEN_ROWS(C) GivenRows<C>{act_scale, act_scale_is, act_zero_point, act_step}
#define EPILOGUE_PARAMETERS                                                                                              \
  const void *weight_scale, s32 weight_scale_is, const s32 *weight_zero_point, const void *bias, s32 bias_is,       \
      const void *output_scale, f64 output_scale_value, const s32 *output_zero_point, s32 output_zero_point_value,  \
      void *output, s64 output_leading, s64 m, s64 n, s64 k
#define LAYER_PARAMETERS const u8 *w, s64 w_leading, EPILOGUE_PARAMETERS, s32 epilogue, s32 output_is
#define LAYER(a, a_leading)                                                                                       \
  Layer{a, a_leading, w, w_leading, weight_scale, weight_scale_is, weight_zero_point, bias, bias_is, output_scale,  \
        output_scale_value, output_zero_point, output_zero_point_value, output, output_leading, m, n, k, epilogue,  \
        output_is}

#ifdef SKUDA_OUT  // kernels that are compiled for one output element
// The epilogue, in f32.
struct Epilogue {
  const void* weight_scale;  // [n]
  s32 weight_scale_is;
  const void* bias;  // [n] or null
  s32 bias_is;
  const f32* output_scale;  // one, or null: the value
  f32 output_scale_value;
  const s32* output_zero_point;
  s32 output_zero_point_value;
  SKUDA_OUT* output;  // [m, n], output_leading elements apart
  s64 output_leading;
  s64 m, n;

  // Scale, zero point and bounds of an output of codes.
  DEVICE Segment<f32> codes(s32 q_min, s32 q_max) const {
    return Segment<f32>::make(output_scale ? *output_scale : output_scale_value,
                              output_zero_point ? *output_zero_point : output_zero_point_value, q_min, q_max);
  }
};
#define EPILOGUE                                                                                                       \
  Epilogue{weight_scale, weight_scale_is, bias, bias_is, (const f32*)output_scale, (f32)output_scale_value,             \
       output_zero_point, output_zero_point_value, (SKUDA_OUT*)output, output_leading, m, n}

// What `decides` needs of an output of codes.
DEVICE f32 per_unit(const Segment<f32>& codes) { return codes.quick ? codes.y : __int_as_float(0x7fffffff); }

// Bounds of the codes of an output of codes; 0 and 0 for others.
template <class T> struct CodeRange { enum { min = 0, max = 0 }; };
template <> struct CodeRange<s8> { enum { min = -128, max = 127 }; };
template <> struct CodeRange<u8> { enum { min = 0, max = 255 }; };

// Codes of results. In a source that also quantizes 16-bit data, the fast path is exact for that data only.
template <int V> DEVICE void result_codes(const f32 (&v)[V], const Segment<f32>& codes, u32 (&q)[V]) {
  const Segment<f32> g[1] = {codes};
  if (RESIDUAL_STEPS == 2) quantized(v, g, q);
#pragma unroll
  for (int j = 0; RESIDUAL_STEPS != 2 && j < V; ++j) q[j] = SLOWLY(slow_code, v[j], codes);
}

// Results as elements of the output.
template <int V> DEVICE void rounded(const s32 (&v)[V], const Segment<f32>&, s32 (&y)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) y[j] = v[j];
}
template <int V> DEVICE void rounded(const s64 (&v)[V], const Segment<f32>&, s64 (&y)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) y[j] = v[j];
}
template <int V, class T> DEVICE void rounded(const f32 (&v)[V], const Segment<f32>&, T (&y)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) narrow(v[j], y[j]);
}
template <int V, class Q> DEVICE void coded(const f32 (&v)[V], const Segment<f32>& codes, Q (&y)[V]) {
  u32 q[V];
  result_codes(v, codes, q);
#pragma unroll
  for (int j = 0; j < V; ++j) y[j] = (Q)q[j];
}
template <int V> DEVICE void rounded(const f32 (&v)[V], const Segment<f32>& codes, s8 (&y)[V]) { coded(v, codes, y); }
template <int V> DEVICE void rounded(const f32 (&v)[V], const Segment<f32>& codes, u8 (&y)[V]) { coded(v, codes, y); }

#ifdef SKUDA_EPILOGUE  // kernels that are also compiled for one epilogue, and for zero points of a (1), of w (2), of both (3) or none
enum { A_ZERO_POINTS = SKUDA_ZERO_POINTS & 1, W_ZERO_POINTS = SKUDA_ZERO_POINTS >> 1 };

// A row of a in the epilogue: its scale, its zero point, and the sum of a - za.
template <class Rows> struct Row {
  f32 scale;
  s32 zero_point;
  typename Rows::Sum sum;
};
// Returns sum (a - za) (w - zw) = sum a w - za sum w - zw sum (a - za), in s32 or s64, or rounded to f32. w_sum and zw
// belong to the column. Rows: RowScales or GivenRows.
template <class Rows> DEVICE auto subtract_zero_points(s32 acc, const Row<Rows>& row, s32 w_sum, s32 zw) {
  if constexpr (SKUDA_ZERO_POINTS == 0) return acc;
  else if constexpr (W_ZERO_POINTS == 0) return Rows::subtract(acc, row.zero_point, w_sum);
  else if constexpr (A_ZERO_POINTS == 0) return Rows::difference(acc, zw, (s32)row.sum);  // a sum of codes fits
  else return Rows::difference(Rows::subtract(acc, row.zero_point, w_sum), zw, row.sum);
}

// GELU and SiLU are too much code to unroll over registers; kernels apply them after apply_epilogue.
enum { CURVED = SKUDA_EPILOGUE == BIAS_GELU || SKUDA_EPILOGUE == BIAS_SILU };
template <class Out> __device__ __noinline__ f32 curved(f32 v, f32 per_unit) {
  f32 one[1] = {v};
  apply_curve<Out>(one, SKUDA_EPILOGUE, per_unit);
  return one[0];
}

// The result of an exact sum (s32, s64, or already rounded to f32), before GELU or SiLU and before it is rounded; for
// an s32 output the sum itself.
typedef IsSum<SKUDA_OUT>::type Result;
DEVICE s32 apply_epilogue(s32 acc, f32, f32, f32, s32) { return acc; }
DEVICE s64 apply_epilogue(s64 acc, f32, f32, f32, s64) { return acc; }
DEVICE s32 apply_epilogue(s64 acc, f32, f32, f32, s32) { return (s32)acc; }  // of codes of 8 bits, which fits
template <class Sum> DEVICE f32 apply_epilogue(Sum acc, f32 sa, f32 sw, f32 bias, f32) {
  f32 v = mul_rn(mul_rn(sa, sw), (f32)acc);
  if (SKUDA_EPILOGUE != IDENTITY) v = v + bias;
  return SKUDA_EPILOGUE == BIAS_RELU ? relu(v) : v;
}
#endif
#endif
