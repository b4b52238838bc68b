// 4-bit weights in the layout that the linear kernels read; see packed_codes.cuh and packed.py.
//
//   w = codes * group_scale + group_offset = step * level + least, with step >= 0 and levels from 0 to 15
//   misfits = how many codes have no such level, or a w outside of -128..127, or a group that its bytes cannot hold
//
//   codes        [n, k] SKUDA_DATA, s8 of -8 to 7 or u8 of 0 to 15, codes_leading elements apart
//   group_scale, group_offset   [n, groups of a row] s32, as many elements apart as their leading strides say
//   output       [units, blocks, LEVEL_BYTES + 32 groups] u8; `groups` groups in 128 elements of K; a row that is
//                `whole` has one scale and one offset
//   zeros        how many misfits there are, u64; 0 before and after
//   misfits      one s32
//
// Data: global memory -> registers, 16 bytes four times for each lane -> levels -> global memory. A warp has a block of
// 16 rows by 128 elements.
//
// Variants: where a row of codes or `output` does not begin at a multiple of 16 bytes, bytes are moved one by one.
#include "packed_codes.cuh"

typedef SKUDA_DATA Code;

enum { LEAST = (Code)-1 < 0 ? -8 : 0 };

// What a row does with the codes of a group.
struct Packing {
  u32 step, turn;  // levels are turned by an exclusive or, of 15 or 0
  s64 least;
  bool fits;
  DEVICE Packing(s32 scale, s32 offset) {
    step = scale < 0 ? 0u - (u32)scale : (u32)scale, turn = scale < 0 ? 15 : 0;
    least = offset + (s64)scale * (LEAST + (s32)turn);
    fits = step <= 255 && least >= -128 && least <= 127;
  }
  // Scale and 128 + offset, modulo 256.
  DEVICE u32 bytes() const { return (step & 255) | ((u32)least + 128u & 255u) << 8; }
  DEVICE u32 level(u32 word, int b, bool held, u32& misfits) const {
    const s32 index = (s32)(Code)(word >> 8 * b) - LEAST, level = turn ? 15 - index : index;
    const s32 w = fits ? (s32)least + (s32)step * level : 0;
    if (held && !(fits && index >= 0 && index <= 15 && w >= -128 && w <= 127)) ++misfits;
    return held ? (u32)level & 15 : 0;
  }
  // The word of levels of elements 0 to 3 and 4 to 7.
  DEVICE u32 levels(u32 low, u32 high, s64 held, u32& misfits) const {
    u32 word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      word |= (level(low, b, b < held, misfits) | level(high, b, b + 4 < held, misfits) << 4) << 8 * b;
    }
    return word;
  }
};

KERNEL(256, 4) pack_weight(
    const Code* codes, s64 codes_leading, const s32* group_scale, s64 group_scale_leading, const s32* group_offset,
    s64 group_offset_leading, u8* output, u64* zeros, s64 n, s64 k, s32 groups, s32 whole) {
  const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const s64 blocks = (k + BLOCK_K - 1) / BLOCK_K, all = (n + 15) / 16 * blocks;
  u32 misfits = 0;
  for (s64 i = (s64)blockIdx.x * 8 + threadIdx.x / 32; i < all; i += (s64)gridDim.x * 8) {
    const s64 row0 = i / blocks * 16 + r, at = i % blocks * BLOCK_K + 32 * c, held = k - at;
    const s64 g = whole ? 0 : i % blocks * groups + c * groups / 4;
    u32 words[8] = {0, 0, 0, 0, 0, 0, 0, 0}, group = 0;  // words by product and row, as PackedLane::word
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const s64 row = row0 + 8 * h;
      if (row >= n || held <= 0) continue;
      const Packing packing(group_scale[row * group_scale_leading + g], group_offset[row * group_offset_leading + g]);
      group |= packing.bytes() << 16 * h;
      const u8* const from = (const u8*)codes + row * codes_leading + at;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const s64 rest = held - 16 * part;
        const uint4 four = load_bytes(from + 16 * part, rest);
        words[4 * part + h] = packing.levels(four.x, four.y, rest, misfits);
        words[4 * part + 2 + h] = packing.levels(four.z, four.w, rest - 8, misfits);
      }
    }
    u8* const to = output + i * packed_bytes(groups);
    store_bytes(to + 16 * lane, make_uint4(words[0], words[1], words[2], words[3]), 16);
    store_bytes(to + 512 + 16 * lane, make_uint4(words[4], words[5], words[6], words[7]), 16);
    if (c * groups % 4 == 0) store_bytes(to + PackedLane::group_at(lane, groups), make_uint4(group, 0, 0, 0), 4);
  }
  if (misfits) atomicAdd(zeros, (u64)misfits);
}

KERNEL(1, 1) pack_weight_misfits(u64* zeros, s32* misfits) {
  *misfits = (s32)(*zeros < 0x7fffffff ? *zeros : 0x7fffffff);
  *zeros = 0;
}
