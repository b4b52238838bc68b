// The 8-bit codes of packed 4-bit weights; see packed_codes.cuh and packed.py.
//
//   packed       [units, blocks, PackedLane<GROUPS>::BYTES] u8
//   output       [n, k] s8, output_leading elements apart
//
// Data: global memory -> registers, 16 bytes twice for each lane -> codes -> global memory. A warp has a block of 16
// rows by 128 elements.
//
// Variants: rows that begin at multiples of 4 bytes are stored in words.
//
// Flags: GROUPS (1, 2, 4) of a block.
#include "packed_codes.cuh"

DEVICE uint4 load_once(const u8* at) { return load16(at); }

KERNEL(256, 4) unpack_weight(const u8* packed, u8* output, s64 output_leading, s64 n, s64 k) {
  const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const s64 blocks = (k + BLOCK_K - 1) / BLOCK_K, all = (n + 15) / 16 * blocks;
  for (s64 i = (s64)blockIdx.x * 8 + threadIdx.x / 32; i < all; i += (s64)gridDim.x * 8) {
    PackedLane<GROUPS> own;
    own.load(packed + i * PackedLane<GROUPS>::BYTES, lane, load_once);
    const s64 row = i / blocks * 16 + r, first = i % blocks * BLOCK_K + 4 * c;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 w[4];
      own.codes(j, w);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const s64 at = first + 32 * j + part / 2 * 16;
        u8* const to = output + (row + part % 2 * 8) * output_leading + at;
        if (row + part % 2 * 8 >= n) continue;
        if (at + 4 <= k && (u64)to % 4 == 0) {
          *(u32*)to = w[part];
        } else {
          for (int b = 0; b < 4 && at + b < k; ++b) to[b] = (u8)(w[part] >> 8 * b);
        }
      }
    }
  }
}
