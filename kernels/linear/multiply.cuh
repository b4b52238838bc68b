// The int8 product of a warp on the tensor cores of any card since Ampere: mma.sync, PTX ISA 7.0.
//
//   d[16 x 8] += a[16 x 32] w[8 x 32]^T, exact in s32
//
// Data: fragments in registers -> products -> sums in registers.
//
// Variants: one for each pair of elements of the operands; another shape would hold no more products in an instruction.
//
// Lane l holds rows l / 4 and l / 4 + 8 (of a: a[0] and a[1], further on a[2] and a[3]), columns 2 (l % 4) + 0, 1 of d, and
// column l / 4 of w. Of a row it holds bytes 4 (l % 4) .. + 3, and those 16 further on. Any order of k serves that is the
// same for both operands.
#pragma once
#include "elements.cuh"

#ifdef SKUDA_HOST
template <class A, class W> DEVICE void multiply_add(s32 (&d)[4], const u32 (&a)[4], u32 w0, u32 w1) {
  const int lane = threadIdx.x % 32;
  for (int q = 0; q < 4; ++q) {
    u32 x[4], y[2][2];
    for (int i = 0; i < 4; ++i) x[i] = __shfl_sync(~0u, a[i], (lane & ~3) + q);
    for (int j = 0; j < 2; ++j) {
      const int from = (lane % 4 * 2 + j) * 4 + q;
      y[j][0] = __shfl_sync(~0u, w0, from), y[j][1] = __shfl_sync(~0u, w1, from);
    }
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        const u32 word = x[i / 2 + 2 * half], other = y[i % 2][half];
        for (int bit = 0; bit < 32; bit += 8) d[i] += (s32)(A)(word >> bit) * (s32)(W)(other >> bit);
      }
    }
  }
}
#else
template <class A, class W> struct Multiply;
#define MULTIPLY_OF(A, W)                                                                                          \
  template <> struct Multiply<A, W> {                                                                               \
    static DEVICE void add(s32 (&d)[4], const u32 (&a)[4], u32 w0, u32 w1) {                                        \
      asm("mma.sync.aligned.m16n8k32.row.col.s32." #A "." #W                                                        \
          ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                    \
          : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(w0), "r"(w1));                                          \
    }                                                                                                               \
  };
MULTIPLY_OF(s8, s8)
MULTIPLY_OF(s8, u8)
MULTIPLY_OF(u8, s8)
MULTIPLY_OF(u8, u8)
template <class A, class W> DEVICE void multiply_add(s32 (&d)[4], const u32 (&a)[4], u32 w0, u32 w1) {
  Multiply<A, W>::add(d, a, w0, w1);
}
#endif
