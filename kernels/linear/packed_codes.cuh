// 4-bit weights as packed.py lays them out: a block of 16 rows by 128 elements of K, and what its bytes mean.
//
//   w[n, k] = scale[n, g] level[n, k] + offset[n, g]      in -128..127; levels are 0 to 15
//
// A level times its scale, plus 128 + offset, is 0 to 255. So one multiplication makes four codes, in the bytes of a
// word: no byte carries into the next one. The sign bit of each byte then makes them signed.
//
// Data: global memory -> registers, 16 bytes of levels twice for each lane, and the scales of its rows -> codes, four in
// a word, as the fragments of tensor cores hold them.
//
// Variants: `load_bytes`, `load_word` and their stores take any address, and go by bytes where it is not aligned.
#pragma once
#include "elements.cuh"

enum { LEVEL_BYTES = 1024, PACKED_K = 128 };  // of a block; behind the levels lie the scales and offsets of its groups

// A word at any address: bytes from `held` on are 0, and are not stored.
DEVICE u32 load_word(const u8* from, s64 held = 4) {
  if (held >= 4 && (u64)from % 4 == 0) return *(const u32*)from;
  u32 word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) word |= b < held ? (u32)from[b] << 8 * b : 0u;
  return word;
}
DEVICE void store_word(u8* to, u32 word, s64 held = 4) {
  if (held >= 4 && (u64)to % 4 == 0) {
    *(u32*)to = word;
    return;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b < held) to[b] = (u8)(word >> 8 * b);
  }
}

// 16 bytes at any address; of a store, bytes from `held` on are left as they are.
DEVICE uint4 load_bytes(const u8* from) {
  if ((u64)from % 16 == 0) return load16(from);
  return make_uint4(load_word(from), load_word(from + 4), load_word(from + 8), load_word(from + 12));
}
DEVICE void store_bytes(u8* to, const uint4& bytes, s64 held = 16) {
  if (held >= 16 && (u64)to % 16 == 0) {
    store16(to, bytes);
    return;
  }
  store_word(to, bytes.x, held), store_word(to + 4, bytes.y, held - 4);
  store_word(to + 8, bytes.z, held - 8), store_word(to + 12, bytes.w, held - 12);
}

// The codes of a word of levels: of the elements k to k + 3 in its low halves, and k + 16 to k + 19 in its high halves.
DEVICE uint2 codes_of_levels(u32 word, u32 scale, u32 base) {
  const u32 low = (word & 0x0f0f0f0fu) * scale + base, high = (word >> 4 & 0x0f0f0f0fu) * scale + base;
  return make_uint2(low ^ 0x80808080u, high ^ 0x80808080u);
}

// What lane 4 r + c has of a block: levels of rows r and r + 8, and the scales of their groups.
template <int COUNT> struct PackedLane {
  enum { BYTES = LEVEL_BYTES + 32 * COUNT };  // of a block; it has COUNT groups
  uint4 levels[2];
  u32 groups[COUNT];

  // From a block in memory; `Load` loads 16 bytes that are used once.
  template <class Load> DEVICE void load(const u8* block, u32 lane, Load load16_once) {
    levels[0] = load16_once(block + 16 * lane), levels[1] = load16_once(block + 512 + 16 * lane);
    const u32* const from = (const u32*)(block + LEVEL_BYTES) + lane / 4 * COUNT;
    if (COUNT == 1) groups[0] = *from;
    if (COUNT == 2) *(uint2*)groups = *(const uint2*)from;
    if (COUNT == 4) *(uint4*)groups = *(const uint4*)from;
  }
  DEVICE void clear() {
    levels[0] = levels[1] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int g = 0; g < COUNT; ++g) groups[g] = 0;
  }

  // The codes of product j, as tensor cores want them: of row r at 32 j + 4 c, of row r + 8, then of both 16 behind.
  DEVICE void codes(int j, u32 (&w)[4]) const {
    const uint4& four = levels[j / 2];
    const u32 bytes = groups[j * COUNT / 4];
    const uint2 upper = codes_of_levels(j % 2 ? four.z : four.x, bytes & 255, __byte_perm(bytes, 0, 0x1111));
    const uint2 lower = codes_of_levels(j % 2 ? four.w : four.y, bytes >> 16 & 255, __byte_perm(bytes, 0, 0x3333));
    w[0] = upper.x, w[1] = lower.x, w[2] = upper.y, w[3] = lower.y;
  }
};
