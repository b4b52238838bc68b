// 4-bit weights in the layout that the linear kernels read; see packed_codes.cuh and packed.py.
//
//   w = codes * group_scale + group_offset = step * level + least, with step >= 0 and levels from 0 to 15
//   misfits = how many codes have no such level, or a w outside of -128..127, or a group that its bytes cannot hold
//
//   codes        [n, k] SKUDA_DATA, s8 of -8 to 7 or u8 of 0 to 15, codes_leading elements apart
//   group_scale, group_offset   [n, groups of a row] s32, as many elements apart as their leading strides say
//   output       [units, blocks, LEVEL_BYTES + 32 groups] u8; `groups` groups (1, 2, 4) in 128 elements of K; a row
//                that is `whole` has one scale and one offset
//   zeros        how many misfits there are, u64; 0 before and after
//   misfits      one s32
//
// Data: global memory -> registers, 64 bytes for each lane -> levels -> global memory, 16 bytes twice. A warp has a block
// of 16 rows by 128 elements.
//
// Variants: bytes are moved one by one where `output` or a row of codes does not begin at a multiple of a word.
#include "packed_codes.cuh"

typedef SKUDA_DATA Code;

enum { LEAST = (Code)-1 < 0 ? -8 : 0 };

// What a row does with the codes of a group.
struct Packing {
  u32 step, turn;  // `turn` is 15 where levels count down from the largest code, else 0
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
  // The word of levels of four elements, and of the four that are 16 behind.
  DEVICE u32 levels(const u8* from, s64 held, u32& misfits) const {
    const u32 low = load_word(from, held), high = load_word(from + 16, held - 16);
    u32 word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      word |= (level(low, b, b < held, misfits) | level(high, b, b + 16 < held, misfits) << 4) << 8 * b;
    }
    return word;
  }
};

KERNEL(256, 4) pack_weight(
    const Code* codes, s64 codes_leading, const s32* group_scale, s64 group_scale_leading, const s32* group_offset,
    s64 group_offset_leading, u8* output, u64* zeros, s64 n, s64 k, s32 groups, s32 whole) {
  const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const s64 blocks = (k + PACKED_K - 1) / PACKED_K, all = (n + 15) / 16 * blocks;
  u32 misfits = 0;
  for (s64 i = (s64)blockIdx.x * 8 + threadIdx.x / 32; i < all; i += (s64)gridDim.x * 8) {
    u32 words[8], own = 0;  // levels by product and row; the bytes of group c of rows r and r + 8
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const s64 block = i % blocks, column = block * PACKED_K + 32 * j;
      const s32 group = j * groups / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const s64 row = i / blocks * 16 + r + 8 * h, g = whole ? 0 : block * groups + group;
        words[2 * j + h] = 0;
        if (row >= n || column >= k) continue;
        const Packing packing(group_scale[row * group_scale_leading + g], group_offset[row * group_offset_leading + g]);
        const s64 at = column + 4 * c;
        words[2 * j + h] = packing.levels((const u8*)codes + row * codes_leading + at, k - at, misfits);
        if (j * groups % 4 == 0 && group == (s32)c) own |= packing.bytes() << 16 * h;
      }
    }
    u8* const to = output + i * (LEVEL_BYTES + 32 * groups);
    store_bytes(to + 16 * lane, make_uint4(words[0], words[1], words[2], words[3]));
    store_bytes(to + 512 + 16 * lane, make_uint4(words[4], words[5], words[6], words[7]));
    if ((s32)c < groups) store_word(to + LEVEL_BYTES + 4 * (r * groups + c), own);
  }
  if (misfits) atomicAdd(zeros, (u64)misfits);
}

KERNEL(1, 1) pack_weight_misfits(u64* zeros, s32* misfits) {
  *misfits = (s32)(*zeros < 0x7fffffff ? *zeros : 0x7fffffff);
  *zeros = 0;
}
