// The 8-bit codes of packed 4-bit weights, for kernels that read those; see packed_codes.cuh and packed.py.
//
//   output[n, k] = scale[n, g] level[n, k] + offset[n, g]
//
//   packed       [units, blocks, LEVEL_BYTES + 32 groups] u8; `groups` groups in 128 elements of K
//   output       [n, k] s8, output_leading elements apart
//
// Data: global memory -> registers, 16 bytes twice for each lane -> codes -> global memory. A warp has a block of 16
// rows by 128 elements.
//
// Variants: rows that begin at multiples of 16 bytes are stored in units of 16 bytes.
#pragma once
#include "packed_codes.cuh"

KERNEL(256, 4) unpack_weight(const u8* packed, s8* output, s64 output_leading, s64 n, s64 k, s32 groups) {
  const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const s64 blocks = (k + PACKED_K - 1) / PACKED_K, all = (n + 15) / 16 * blocks;
  for (s64 i = (s64)blockIdx.x * 8 + threadIdx.x / 32; i < all; i += (s64)gridDim.x * 8) {
    const u8* const from = packed + i * (LEVEL_BYTES + 32 * groups);
    PackedLane<4> own;  // a group for each product
    own.levels[0] = load_bytes(from + 16 * lane), own.levels[1] = load_bytes(from + 512 + 16 * lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) own.groups[j] = load_word(from + LEVEL_BYTES + 4 * (r * groups + j * groups / 4));
    const s64 row0 = i / blocks * 16 + r, column0 = i % blocks * PACKED_K + 4 * c;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 w[4];
      own.codes(j, w);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const s64 row = row0 + part % 2 * 8, column = column0 + 32 * j + part / 2 * 16;
        if (row < n) store_word((u8*)output + row * output_leading + column, w[part], k - column);
      }
    }
  }
}
