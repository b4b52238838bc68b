// The int8 mma.sync of a warp, on the tensor cores of any card since Ampere. See PTX ISA 7.0, "mma".
//
//   d[16, 8] += a[16, 32] w[8, 32]^T, exact in s32
//
// Data: fragments in registers -> mma.sync -> sums in registers.
//
// Variants: one for each pair of operand elements. No other shape has more products in an instruction.
//
// Lane l holds: of d rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next one; of a the same rows (a[0] and a[1],
// further along K a[2] and a[3]); of w column l / 4. Of a row it holds bytes 4 (l % 4) to 4 (l % 4) + 3, and those 16
// bytes further. Any order of K that is the same for both operands gives the same sums.
#pragma once
#include "elements.cuh"

#ifdef SKUDA_HOST
template <class A, class W> DEVICE void mma_m16n8k32(s32 (&d)[4], const u32 (&a)[4], u32 w0, u32 w1) {
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
template <class A, class W> struct MmaSync;
#define MMA_SYNC_OF(A, W)                                                                                          \
  template <> struct MmaSync<A, W> {                                                                               \
    static DEVICE void add(s32 (&d)[4], const u32 (&a)[4], u32 w0, u32 w1) {                                        \
      asm("mma.sync.aligned.m16n8k32.row.col.s32." #A "." #W                                                        \
          ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                    \
          : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(w0), "r"(w1));                                          \
    }                                                                                                               \
  };
MMA_SYNC_OF(s8, s8)
MMA_SYNC_OF(s8, u8)
MMA_SYNC_OF(u8, s8)
MMA_SYNC_OF(u8, u8)
template <class A, class W> DEVICE void mma_m16n8k32(s32 (&d)[4], const u32 (&a)[4], u32 w0, u32 w1) {
  MmaSync<A, W>::add(d, a, w0, w1);
}
#endif

// --- shared memory and ldmatrix ---------------------------------------------------------------------------------------

#ifdef SKUDA_HOST
DEVICE u8* shared_bytes() { return skuda_dynamic_shared; }
DEVICE u32 shared_start() { return 0; }
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 at) {
  for (int i = 0; i < 4; ++i) {
    const u32 row = __shfl_sync(~0u, at, threadIdx.x % 32 / 4 + 8 * i);
    memcpy(&r[i], &skuda_dynamic_shared[row + threadIdx.x % 4 * 4], 4);
  }
}
#else
DEVICE u8* shared_bytes() {
  extern __shared__ uint4 whole_block[];
  return (u8*)whole_block;
}
DEVICE u32 shared_start() { return (u32)__cvta_generic_to_shared(shared_bytes()); }

// Loads four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8, and receives bytes
// 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each matrix.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
#endif
