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
    const u8* const from = packed + i * packed_bytes(groups);
    PackedLane own;
    own.levels[0] = ((const uint4*)from)[lane], own.levels[1] = ((const uint4*)from)[32 + lane];
    const PackedGroup group(*(const u32*)(from + PackedLane::group_at(lane, groups)));
    const s64 row0 = i / blocks * 16 + r, at = i % blocks * PACKED_K + 32 * c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const s64 row = row0 + 8 * h;
      if (row >= n) continue;
      u8* const to = (u8*)output + row * output_leading + at;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint2 low = codes_of_levels(own.word(2 * part, h), group.scale[h], group.base[h]);
        const uint2 high = codes_of_levels(own.word(2 * part + 1, h), group.scale[h], group.base[h]);
        if (at + 16 * part + 16 <= k && (u64)to % 16 == 0) {
          ((uint4*)to)[part] = make_uint4(low.x, low.y, high.x, high.y);
        } else {
          const u32 words[4] = {low.x, low.y, high.x, high.y};
          for (int b = 0; b < 16 && at + 16 * part + b < k; ++b) to[16 * part + b] = (u8)(words[b / 4] >> 8 * (b % 4));
        }
      }
    }
  }
}
