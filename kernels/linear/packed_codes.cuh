// 4-bit weights as packed.py lays them out: a block of 16 rows by 128 elements of K, and what its bytes mean.
//
//   w[n, k] = scale[n, g] level[n, k] + offset[n, g]      in -128..127; levels are 0 to 15
//
// A level times its scale, plus 128 + offset, is 0 to 255. So one multiplication makes four codes, in the bytes of a
// word: no byte carries into the next one. The sign bit of each byte then makes them signed.
#pragma once
#include "elements.cuh"

enum {
  LEVEL_BYTES = 1024,  // of a block; behind them the scales and offsets of its groups
  PACKED_K = 128  // elements of K of a block
};

DEVICE s64 packed_bytes(s32 groups) { return LEVEL_BYTES + 32 * groups; }

// The scales of rows r and r + 8 of a group, and 128 + offset in each byte of a word.
struct PackedGroup {
  u32 scale[2], base[2];
  DEVICE explicit PackedGroup(u32 bytes) {
    scale[0] = bytes & 255, base[0] = __byte_perm(bytes, 0, 0x1111);
    scale[1] = bytes >> 16 & 255, base[1] = __byte_perm(bytes, 0, 0x3333);
  }
};

// The codes of a word of levels: of the elements k to k + 3 in its low halves, and k + 4 to k + 7 in its high halves.
DEVICE uint2 codes_of_levels(u32 word, u32 scale, u32 base) {
  const u32 low = (word & 0x0f0f0f0fu) * scale + base, high = (word >> 4 & 0x0f0f0f0fu) * scale + base;
  return make_uint2(low ^ 0x80808080u, high ^ 0x80808080u);
}

// The levels of a lane, and its group.
struct PackedLane {
  uint4 levels[2];
  u32 group;

  // Byte of the group's scales that lane 4 r + c needs, from the start of a block.
  DEVICE static u32 group_at(u32 lane, u32 groups) { return LEVEL_BYTES + (lane % 4 * groups / 4 * 8 + lane / 4) * 4; }

  // Word `product` of row r + 8 h.
  DEVICE u32 word(int product, int h) const {
    const uint4& four = levels[product / 2];
    return product % 2 ? h ? four.w : four.z : h ? four.y : four.x;
  }
};
