// The 8-bit codes of packed 4-bit weights; see packed_codes.cuh and packed.py.
//
//   output = step * level + least, of which `packed` has the level, and for each group the step and 128 + least
//
//   packed       [units, blocks, LEVEL_BYTES + 32 groups] u8; `groups` groups in 128 elements of K
//   output       [n, k] s8, output_leading elements apart
//
// Data: global memory -> registers, 16 bytes twice for each lane -> codes -> global memory. A warp has a block of 16
// rows by 128 elements.
//
// Variants: where `packed` or a row of the output does not begin at a multiple of 16 bytes, bytes are moved one by one.
#include "packed_codes.cuh"

KERNEL(256, 4) unpack_weight(const u8* packed, s8* output, s64 output_leading, s64 n, s64 k, s32 groups) {
  const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const s64 blocks = (k + BLOCK_K - 1) / BLOCK_K, all = (n + 15) / 16 * blocks;
  for (s64 i = (s64)blockIdx.x * 8 + threadIdx.x / 32; i < all; i += (s64)gridDim.x * 8) {
    const u8* const from = packed + i * packed_bytes(groups);
    PackedLane own;
    own.levels[0] = load_bytes(from + 16 * lane, 16), own.levels[1] = load_bytes(from + 512 + 16 * lane, 16);
    const PackedGroup group(load_bytes(from + PackedLane::group_at(lane, groups), 4).x);
    const s64 row0 = i / blocks * 16 + r, at = i % blocks * BLOCK_K + 32 * c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const s64 row = row0 + 8 * h;
      if (row >= n) continue;
      u8* const to = (u8*)output + row * output_leading + at;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint2 low = codes_of_levels(own.word(2 * part, h), group.scale[h], group.base[h]);
        const uint2 high = codes_of_levels(own.word(2 * part + 1, h), group.scale[h], group.base[h]);
        store_bytes(to + 16 * part, make_uint4(low.x, low.y, high.x, high.y), k - at - 16 * part);
      }
    }
  }
}
