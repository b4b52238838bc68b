// A linear layer's operands and its epilogue: scales, bias, activation, the output's element.
//
//   acc = sum_k (a[m, k] - za) (w[n, k] - zw[n])                      exact
//   v   = RN_C(RN_C(sa[m] * sw[n]) * RN_C(acc)); + bias[n]; activation
//   y   = RN_T(v), or clamp(rne(RN_C(v / s_out)) + z_out), or acc itself
//
// Data: sums in registers (or, for mma, in shared memory) -> v in registers -> y -> global memory; scales, zero points
// and bias come from global memory.
//
// Variants: `Layer` takes elements and epilogue at run time, so that few compilations serve all of them; it wins where
// that counts more than speed. `Epilogue` is compiled for one output element, so that it has no branches on elements; it
// wins where the epilogue is a visible part of the time.
#pragma once
#include "activation.cuh"

enum EpilogueKind { IDENTITY, BIAS, BIAS_RELU, BIAS_GELU, BIAS_SILU };
enum Output { OUT_F32, OUT_F64, OUT_F16, OUT_BF16, OUT_S8, OUT_U8, OUT_S32 };

// Whether the results are the sums themselves, without scales; and the type of a result before it is rounded.
template <class Out> struct IsSum { enum { value = 0 }; typedef f32 type; };
template <> struct IsSum<s32> { enum { value = 1 }; typedef s32 type; };

// Loads a scale or bias of any element: f32, f16 or bf16 if C is f32; f64, f32, f16 or bf16 if C is f64.
DEVICE f32 real_at(const void* p, s32 which, s64 i, f32) {
  if (which == 0) return ((const f32*)p)[i];
  return which == 1 ? widen(((const f16*)p)[i]) : widen(((const bf16*)p)[i]);
}
DEVICE f64 real_at(const void* p, s32 which, s64 i, f64) {
  return which == 0 ? ((const f64*)p)[i] : (f64)real_at(p, which - 1, i, 0.0f);
}

// Adds up the codes of a word.
DEVICE s32 add_bytes(u32 word, s32 sum, s8) { return __dp4a((s32)word, 0x01010101, sum); }
DEVICE s32 add_bytes(u32 word, s32 sum, u8) { return (s32)__dp4a(word, 0x01010101u, (u32)sum); }

// The precision of GELU and SiLU depends on the output's element only, not on the kernel.
template <class Out> struct Curves {
  static DEVICE f32 gelu(f32 v) { return brief_gelu(v); }
  static DEVICE f32 silu(f32 v) { return brief_silu(v); }
};
template <> struct Curves<f32> {
  template <class C> static DEVICE C gelu(C v) { return ::gelu(v); }
  template <class C> static DEVICE C silu(C v) { return ::silu(v); }
};

template <class Out, class C> DEVICE C activated(C v, s32 epilogue) {
  if (epilogue == BIAS_RELU) return v <= (C)0 ? (C)0 : v;
  if (epilogue == BIAS_GELU) return Curves<Out>::gelu(v);
  if (epilogue == BIAS_SILU) return Curves<Out>::silu(v);
  return v;
}
// The same if the output's element is known only at run time.
DEVICE f64 activated_for(s32, f64 v, s32 epilogue) { return activated<f32>(v, epilogue); }
DEVICE f32 activated_for(s32 output_is, f32 v, s32 epilogue) {
  return output_is == OUT_F32 || output_is == OUT_F64 ? activated<f32>(v, epilogue) : activated<bf16>(v, epilogue);
}

// f64 to 16 bits through an f32 rounded to odd, which keeps the information that the second rounding needs.
DEVICE f32 to_odd(f32 v) { return v; }
DEVICE f32 to_odd(f64 v) {
  f32 near = (f32)v;
  if (!(fabs(v) <= 1.7976931348623157e308)) return near;
  u32 bits = __float_as_uint(near);
  if (fabs((f64)near) > fabs(v)) --bits;  // toward zero
  if ((f64)__uint_as_float(bits) != v) bits |= 1u;
  return __uint_as_float(bits);
}

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

template <class C> DEVICE void put(const Layer& p, s64 at, C v) {
  switch (p.output_is) {
    case OUT_F32: ((f32*)p.output)[at] = (f32)v; return;
    case OUT_F64: ((f64*)p.output)[at] = (f64)v; return;
    case OUT_F16: narrow(to_odd(v), ((f16*)p.output)[at]); return;
    case OUT_BF16: narrow(to_odd(v), ((bf16*)p.output)[at]); return;
  }
  const C s = p.output_scale ? *(const C*)p.output_scale : (C)p.output_scale_value;
  const s32 z = p.output_zero_point ? *p.output_zero_point : p.output_zero_point_value;
  const bool is_signed = p.output_is == OUT_S8;
  ((u8*)p.output)[at] = (u8)slow_code(v, s, z, is_signed ? -128 : 0, is_signed ? 127 : 255);
}

// Scales of the activation's rows where one zero point, within the range of the codes, serves all of them.
template <class S, class C = S> struct RowScales {
  typedef s32 Sum;  // of a - za over a row: less than that of products, which fits
  const S* scale;  // [m], or null: the value
  C value;
  s32 zero_point;

  DEVICE C at(s64 row) const { return scale ? (C)scale[row] : value; }
  // The same for tiles that reach beyond the last row.
  DEVICE C within(s64 row, s64 rows) const { return scale == nullptr ? value : row < rows ? (C)scale[row] : (C)0; }
  DEVICE bool shifted() const { return zero_point != 0; }
  DEVICE s64 zero_point_of(s64) const { return zero_point; }
  // acc - za w; it fits in 32 bits if K is short enough for sums of u8 codes.
  static DEVICE s32 less(s32 acc, s32 za, s32 w) { return (s32)((u32)acc - (u32)za * (u32)w); }
  // RN_C(whole - zw a); it fits in 64 bits.
  static DEVICE C difference(s64 whole, s64 zw, s64 a) { return (C)(whole - zw * a); }
};

// RN_C(whole - zw a) by way of 128 bits.
template <class C> __device__ __noinline__ C long_difference(s64 whole, s64 zw, s64 a) {
  const u64 product = (u64)zw * (u64)a;
  u64 low = (u64)whole - product;
  u64 high = (u64)(whole >> 63) - (u64)__mul64hi(zw, a) - ((u64)whole < product);
  const bool negative = (s64)high < 0;
  if (negative) low = ~low + 1, high = ~high + (low == 0);
  if (high == 0) return negative ? -(C)low : (C)low;
  // The leading 64 bits, of which the last also stands for those that are cut off: one rounding.
  const int cut = 64 - __clzll((s64)high);
  const u64 leading = high << (64 - cut) | low >> cut | (u64)(low << (64 - cut) != 0);
  const C found = (C)leading * (C)(1ull << cut);
  return negative ? -found : found;
}

// Scales and zero points of the activation's rows as arrays: one element for each row, or one for all.
template <class C> struct GivenRows {
  typedef s64 Sum;  // of a - za over a row
  const void* scale;  // [m] or [1]; null for sums
  s32 scale_is;
  const s32* zero_point;  // as many, or null
  s64 step;               // elements from row to row: 1 or 0

  DEVICE C at(s64 row) const { return real_at(scale, scale_is, row * step, (C)0); }
  DEVICE C within(s64 row, s64 rows) const { return scale != nullptr && row < rows ? at(row) : (C)0; }
  DEVICE bool shifted() const { return zero_point != nullptr; }
  DEVICE s64 zero_point_of(s64 row) const { return zero_point ? zero_point[row * step] : 0; }
  // acc - za w
  static DEVICE s64 less(s32 acc, s32 za, s32 w) { return acc - (s64)za * w; }
  // RN_C(whole - zw a) for |whole| < 2^62 and any zero points, with which it may need more than 64 bits.
  static DEVICE C difference(s64 whole, s64 zw, s64 a) {
    return a == (s32)a ? (C)(whole - zw * a) : long_difference<C>(whole, zw, a);
  }
};

// One number for all rows, which is also written to an array of the caller's, and one zero point.
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

  // The segment that converts results to codes, for outputs of codes.
  DEVICE Segment<f32> codes(s32 least, s32 most) const {
    return Segment<f32>::make(output_scale ? *output_scale : output_scale_value,
                              output_zero_point ? *output_zero_point : output_zero_point_value, least, most);
  }
};
#define EPILOGUE                                                                                                       \
  Epilogue{weight_scale, weight_scale_is, bias, bias_is, (const f32*)output_scale, (f32)output_scale_value,             \
       output_zero_point, output_zero_point_value, (SKUDA_OUT*)output, output_leading, m, n}

// Bounds of the codes, for outputs of codes.
template <class T> struct CodeRange { enum { least = 0, most = 0 }; };
template <> struct CodeRange<s8> { enum { least = -128, most = 127 }; };
template <> struct CodeRange<u8> { enum { least = 0, most = 255 }; };

// Codes of results. In a source that also quantizes 16-bit data, the fast path is exact for such data only.
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

#ifdef SKUDA_EPILOGUE  // and for one epilogue and certain zero points: 0 for none, 1 of a, 2 of w, 3 of both
enum { A_SHIFTED = SKUDA_ZERO_POINTS & 1, W_SHIFTED = SKUDA_ZERO_POINTS >> 1 };

// A row of a in the epilogue: its scale and zero point, and the sum of a - za.
template <class Rows> struct Row {
  f32 scale;
  s32 zero_point;
  typename Rows::Sum sum;
};
// sum (a - za) (w - zw) = sum a w - za sum w - zw sum (a - za), of s32 or s64, or rounded to f32; w_sum and zw are those of
// the column. Rows: RowScales or GivenRows.
template <class Rows> DEVICE auto shifted(s32 acc, const Row<Rows>& row, s32 w_sum, s32 zw) {
  if constexpr (SKUDA_ZERO_POINTS == 0) return acc;
  else if constexpr (W_SHIFTED == 0) return Rows::less(acc, row.zero_point, w_sum);
  else if constexpr (A_SHIFTED == 0) return Rows::difference(acc, zw, (s32)row.sum);  // a sum of codes is short
  else return Rows::difference(Rows::less(acc, row.zero_point, w_sum), zw, row.sum);
}

// GELU and SiLU are too much code to unroll over registers, so the kernels apply them afterwards.
enum { CURVED = SKUDA_EPILOGUE == BIAS_GELU || SKUDA_EPILOGUE == BIAS_SILU };

// A result, of an exact sum of s32 or s64 or of an f32 that it was rounded to: the sum itself for s32, else before rounding
// and before GELU or SiLU.
typedef IsSum<SKUDA_OUT>::type Result;
DEVICE s32 finished(s32 acc, f32, f32, f32, s32) { return acc; }
template <class Sum> DEVICE f32 finished(Sum acc, f32 sa, f32 sw, f32 bias, f32) {
  f32 v = product(product(sa, sw), (f32)acc);
  if (SKUDA_EPILOGUE != IDENTITY) v = v + bias;
  return CURVED ? v : activated<SKUDA_OUT>(v, SKUDA_EPILOGUE);
}
#endif
#endif
