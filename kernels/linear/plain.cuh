// The int8 product with its epilogue, for every shape and element: a block computes 64 x 64 outputs with dp4a.
//
//   acc[m, n] = sum_k (a[m, k] - za) (w[n, k] - zw[n]), exact; then the epilogue of epilogue.cuh
//
//   p                pointers, strides and sizes of a, w, scales, bias and output (epilogue.cuh)
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//
// Data: global memory -> 16 bytes for each thread in registers -> a stage of 64 bytes of K of both operands in shared
// memory -> words in registers -> dp4a -> sums in registers -> epilogue -> global memory. There is one stage, so loads
// and products do not overlap.
//
// Variants: one. It serves what no other kernel serves: f64, any stride and alignment, any K. It adds up at most 32,768
// elements of K in s32, where terms of 255 * 255 cannot overflow, and then adds the sums in s64. Codes of 16 bits take
// two passes over K, or three if both operands have them.
#pragma once
#include "epilogue.cuh"

#ifdef SKUDA_HOST
template <class A, class W> DEVICE s32 dp4a(u32 a, u32 w, s32 sum) {
  for (int i = 0; i < 32; i += 8) sum += (s32)(A)(a >> i) * (s32)(W)(w >> i);
  return sum;
}
#else
template <class A, class W> struct Dp4a;
template <> struct Dp4a<s8, s8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <> struct Dp4a<s8, u8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <> struct Dp4a<u8, s8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <> struct Dp4a<u8, u8> {
  static DEVICE s32 of(u32 a, u32 w, s32 c) { s32 d; asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(w), "r"(c)); return d; }
};
template <class A, class W> DEVICE s32 dp4a(u32 a, u32 w, s32 sum) { return Dp4a<A, W>::of(a, w, sum); }
#endif

// Loads 16 bytes from (row, k) on, a quarter of a row of a stage. Beyond the edges they are zero, which adds nothing to
// a sum.
DEVICE uint4 load_unit(const u8* base, s64 leading, s64 row, s64 rows, s64 k, s64 end) {
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

// Rows: RowScales or GivenRows. C is s32 or s64 for sums as results.
template <class A, class W, class C, class Rows>
DEVICE void linear(const Layer& p, const Rows& rows) {
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
    const bool sums = rows.has_zero_points() || p.weight_zero_point != nullptr;
    int steps = 0;
#pragma unroll 1
    for (int pass = 0; pass < A_HALVES + W_HALVES - 1; ++pass)  // both high halves; the low one of a; the low one of w
    for (s64 k0 = 0; k0 < p.k; k0 += 4 * WORDS) {
      const u8* const own_a = p.a + (A_HALVES > 1 && pass == 1 ? p.k : 0);
      const u8* const own_w = p.w + (W_HALVES > 1 && pass == 2 ? p.k : 0);
      const uint4 a = load_unit(own_a, p.a_leading, row0 + t / 4, p.m, k0 + t % 4 * 16, p.k);
      const uint4 w = load_unit(own_w, p.w_leading, column0 + t / 4, p.n, k0 + t % 4 * 16, p.k);
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
          for (int j = 0; j < 4; ++j) part[i][j] = dp4a<A, W>(x[i], y[j], part[i][j]);
        }
        if (sums) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a_part[i] = dp4a<A, u8>(x[i], 0x01010101u, a_part[i]);
            w_part[i] = dp4a<u8, W>(0x01010101u, y[i], w_part[i]);
          }
        }
      }
      if (++steps == SPAN || k0 + 4 * WORDS >= p.k) {
        steps = 0;
        const s64 unit = 1 << 8 * (A_HALVES + W_HALVES - 2 - (pass > 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a_total[i] += a_part[i], w_total[i] += w_part[i], a_part[i] = w_part[i] = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) total[i][j] += A_HALVES > 1 ? part[i][j] * unit : part[i][j], part[i][j] = 0;
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
        if constexpr (IsSum<C>::value) {
          ((C*)p.output)[row * p.output_leading + column] = (C)total[i][j];
        } else {
          const s64 za = rows.zero_point_of(row), zw = p.weight_zero_point ? p.weight_zero_point[column] : 0;
          const C acc = rows.difference(total[i][j] - za * w_total[j], zw, a_total[i] - p.k * za);
          const C sa = rows.at(row);
          const C sw = real_at(p.weight_scale, p.weight_scale_is, column, (C)0);
          C v = p.k == 0 ? (C)0 : mul_rn(mul_rn(sa, sw), acc);
          if (p.bias != nullptr) v = v + real_at(p.bias, p.bias_is, column, (C)0);
          put(p, row * p.output_leading + column, opaque(p.output_is), activated(p, v, opaque(p.epilogue)));
        }
      }
    }
  }
}
