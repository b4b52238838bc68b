// The 8-bit codes of packed 4-bit weights, for kernels that read those; see packed_codes.cuh and packed.py.
//
//   output[n, k] = scale[n, g] level[n, k] + offset[n, g]
//
//   packed       [units, blocks, LEVEL_BYTES + 32 groups] u8; `groups` groups in 128 elements of K
//   output       [n, k] s8, output_leading elements apart
//
// Data: global memory -> registers, 16 bytes twice for each lane -> codes -> shared memory of the warp -> registers, 16
// elements of a row -> global memory. A warp has a block of 16 rows by 128 elements. In shared memory, units of 16 bytes
// of a row lie xored with its number, so that no bank is used twice.
//
// Variants: rows that begin at multiples of 16 bytes are stored in units of 16 bytes, any others in words or bytes.
#pragma once
#include "packed_codes.cuh"

KERNEL(256, 4) unpack_weight(const u8* packed, s8* output, s64 output_leading, s64 n, s64 k, s32 groups) {
  __shared__ uint4 shared[8][128];
  const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  u8* const staged = (u8*)shared[threadIdx.x / 32];
  const s64 blocks = (k + PACKED_K - 1) / PACKED_K, all = (n + 15) / 16 * blocks;
  for (s64 i = (s64)blockIdx.x * 8 + threadIdx.x / 32; i < all; i += (s64)gridDim.x * 8) {
    const u8* const from = packed + i * (LEVEL_BYTES + 32 * groups);
    PackedLane<4> own;  // a group for each product
    own.levels[0] = load_bytes(from + 16 * lane), own.levels[1] = load_bytes(from + 512 + 16 * lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) own.groups[j] = load_word(from + LEVEL_BYTES + 4 * (r * groups + j * groups / 4));
    __syncwarp();  // what was staged before has been read
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 w[4];
      own.codes(j, w);
#pragma unroll
      for (int part = 0; part < 4; ++part) *(u32*)(staged + (r + part % 2 * 8) * 128 + ((2 * j + part / 2) ^ r) * 16 + 4 * c) = w[part];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 row_in = 4 * j + lane / 8, unit = lane % 8;
      const s64 row = i / blocks * 16 + row_in, column = i % blocks * PACKED_K + 16 * unit;
      const uint4 codes = *(const uint4*)(staged + row_in * 128 + (unit ^ row_in % 8) * 16);
      if (row < n && column < k) store_bytes((u8*)output + row * output_leading + column, codes, k - column);
    }
  }
}
