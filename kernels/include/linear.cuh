// The int8 product with its epilogue, for every shape and element: 64 x 64 outputs a block, dp4a from shared memory.
//
//   acc = sum_k (a[m, k] - za) (w[n, k] - zw[n])                      exact
//   v   = RN_C(RN_C(sa[m] * sw[n]) * RN_C(acc)); + bias[n]; activation
//   y   = RN_T(v), or clamp(rne(RN_C(v / s_out)) + z_out)
//
// Sums are kept in s32 over 32,768 elements of K at most, where 255 * 255 a term still fits, and added up in s64.
#pragma once
#include "quotient.cuh"

enum Epilogue { IDENTITY, BIAS, BIAS_RELU, BIAS_GELU, BIAS_SILU };
enum Output { OUT_F32, OUT_F64, OUT_F16, OUT_BF16, OUT_S8, OUT_U8 };

#ifdef SKUDA_HOST
template <class A, class W> DEVICE s32 dot4(u32 a, u32 w, s32 sum) {
  for (int i = 0; i < 32; i += 8) sum += (s32)(A)(a >> i) * (s32)(W)(w >> i);
  return sum;
}
#else
template <class A, class W> struct Dot;
template <> struct Dot<s8, s8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <> struct Dot<s8, u8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <> struct Dot<u8, s8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <> struct Dot<u8, u8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <class A, class W> DEVICE s32 dot4(u32 a, u32 w, s32 sum) { return Dot<A, W>::of(a, w, sum); }
#endif

// One of the elements that a scale or bias may have: f32, f16, bf16 where C is f32; f64, f32, f16, bf16 where it is f64.
DEVICE f32 real_at(const void* p, s32 which, s64 i, f32) {
  if (which == 0) return ((const f32*)p)[i];
  return which == 1 ? widen(((const f16*)p)[i]) : widen(((const bf16*)p)[i]);
}
DEVICE f64 real_at(const void* p, s32 which, s64 i, f64) {
  return which == 0 ? ((const f64*)p)[i] : (f64)real_at(p, which - 1, i, 0.0f);
}

// GELU (erf form) and SiLU: in f64, so that an f32 result is right but for rare ties, and within a few ulp of f64. The
// rounding error of the argument of erfc is put back, because erfc(z) falls like exp(-z^2).
DEVICE f64 gelu(f64 x) {
  const f64 root = 0.70710678118654757, rest = -4.8336466567264567e-17;  // 1/sqrt(2) in two parts
  const f64 z = -x * root, lost = fused(-x, root, -z) + -x * rest;
  f64 tail = erfc(z);
  if (z > 1.0) tail = fused(tail, -2.0 * z * lost, tail);
  if (x >= -36.0 || x != x) return 0.5 * x * tail;
  // Further down erfc is subnormal where the product is not yet: the first terms of the normal tail's own series.
  const f64 bounded = fmax(x, -45.0), square = bounded * bounded, below = fused(bounded, bounded, -square);
  const f64 u = 1.0 / square;
  const f64 series = 1.0 - u * (1.0 - u * (3.0 - u * (15.0 - u * (105.0 - u * (945.0 - u * 10395.0)))));
  const f64 height = 0.3989422804014327 * series;  // 1 / sqrt(2 pi)
  return -(exp(-0.5 * square) * fused(height, -0.5 * below, height));
}
DEVICE f64 silu(f64 x) {
  if (x > -700.0) return x / (1.0 + exp(-x));
  if (!(x >= -2000.0)) return x == x ? -0.0 : x;
  const f64 half = exp(0.5 * x);
  return x * half * half;
}

template <class C> DEVICE C activated(C v, s32 epilogue) {
  if (epilogue == BIAS_RELU) return v <= (C)0 ? (C)0 : v;
  if (epilogue == BIAS_GELU) return (C)gelu((f64)v);
  if (epilogue == BIAS_SILU) return (C)silu((f64)v);
  return v;
}

// f64 to 16 bits by way of f32 rounded to odd, which keeps what the second rounding needs to know.
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
  s32 act_zero_point, epilogue, output_is;
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

// A quarter of a row of 64 bytes: 16 of them from (row, k), zeros beyond the edges. Zeros add nothing to any sum.
DEVICE uint4 sixteen(const u8* base, s64 leading, s64 row, s64 rows, s64 k, s64 end) {
  if (row >= rows || k >= end) return make_uint4(0, 0, 0, 0);
  const u8* p = base + row * leading + k;
  if (k + 16 <= end && (u64)p % 16 == 0) return *(const uint4*)p;
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (k + i < end) words[i / 4] |= (u32)p[i] << 8 * (i % 4);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// act_scale: [m] of S, or null: the value.
template <class A, class W, class C, class S>
DEVICE void linear(const Layer& p, const S* act_scale, C act_scale_value) {
  enum { TILE = 64, WORDS = 16, PITCH = 17, SPAN = 512 };  // an odd pitch keeps a column of words in different banks
  __shared__ u32 as[TILE * PITCH], ws[TILE * PITCH];
  const int t = threadIdx.x, tx = t % 16, ty = t / 16;
  const s64 row0 = (s64)blockIdx.x * TILE, strips = (p.n + TILE - 1) / TILE;
  for (s64 strip = blockIdx.y; strip < strips; strip += gridDim.y) {
    const s64 column0 = strip * TILE;
    s64 total[4][4], a_total[4], w_total[4];
    s32 part[4][4], a_part[4], w_part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_total[i] = w_total[i] = 0, a_part[i] = w_part[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] = 0, part[i][j] = 0;
    }
    const bool sums = p.act_zero_point != 0 || p.weight_zero_point != nullptr;
    int steps = 0;
    for (s64 k0 = 0; k0 < p.k; k0 += 4 * WORDS) {
      const uint4 a = sixteen(p.a, p.a_leading, row0 + t / 4, p.m, k0 + t % 4 * 16, p.k);
      const uint4 w = sixteen(p.w, p.w_leading, column0 + t / 4, p.n, k0 + t % 4 * 16, p.k);
      __syncthreads();
      u32* const to_a = as + t / 4 * PITCH + t % 4 * 4;
      u32* const to_w = ws + t / 4 * PITCH + t % 4 * 4;
      to_a[0] = a.x, to_a[1] = a.y, to_a[2] = a.z, to_a[3] = a.w;
      to_w[0] = w.x, to_w[1] = w.y, to_w[2] = w.z, to_w[3] = w.w;
      __syncthreads();
#pragma unroll 4
      for (int word = 0; word < WORDS; ++word) {
        u32 x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = as[(ty + 16 * i) * PITCH + word], y[i] = ws[(tx + 16 * i) * PITCH + word];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) part[i][j] = dot4<A, W>(x[i], y[j], part[i][j]);
        }
        if (sums) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a_part[i] = dot4<A, u8>(x[i], 0x01010101u, a_part[i]);
            w_part[i] = dot4<u8, W>(0x01010101u, y[i], w_part[i]);
          }
        }
      }
      if (++steps == SPAN || k0 + 4 * WORDS >= p.k) {
        steps = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a_total[i] += a_part[i], w_total[i] += w_part[i], a_part[i] = w_part[i] = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) total[i][j] += part[i][j], part[i][j] = 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const s64 row = row0 + ty + 16 * i;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const s64 column = column0 + tx + 16 * j;
        if (row >= p.m || column >= p.n) continue;
        const s64 za = p.act_zero_point, zw = p.weight_zero_point ? p.weight_zero_point[column] : 0;
        const s64 acc = total[i][j] - za * w_total[j] - zw * (a_total[i] - p.k * za);
        const C sa = act_scale ? (C)act_scale[row] : act_scale_value;
        const C sw = real_at(p.weight_scale, p.weight_scale_is, column, (C)0);
        C v = p.k == 0 ? (C)0 : product(product(sa, sw), (C)acc);
        if (p.bias != nullptr) v = v + real_at(p.bias, p.bias_is, column, (C)0);
        put(p, row * p.output_leading + column, activated(v, p.epilogue));
      }
    }
  }
}

#define LAYER_TAIL                                                                                                 \
  const u8 *w, s64 w_leading, const void *weight_scale, s32 weight_scale_is, const s32 *weight_zero_point,          \
      const void *bias, s32 bias_is, const void *output_scale, f64 output_scale_value, const s32 *output_zero_point, \
      s32 output_zero_point_value, void *output, s64 output_leading, s64 m, s64 n, s64 k, s32 epilogue, s32 output_is
#define LAYER(a, a_leading, act_zero_point)                                                                        \
  Layer{a, a_leading, w, w_leading, weight_scale, weight_scale_is, weight_zero_point, bias, bias_is, output_scale,  \
        output_scale_value, output_zero_point, output_zero_point_value, output, output_leading, m, n, k,            \
        act_zero_point, epilogue, output_is}
