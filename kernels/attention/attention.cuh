// What the kernels of attention share: parameters, which row sees which keys, the exponential, and sums of parts.
// attention.py defines the arithmetic.
//
//   q_codes, q_scale    rows of codes and their scales, [tokens, heads, D] and [tokens, heads]
//   k_codes, k_scale    [pages, kv_heads, 128, D] and [pages, kv_heads, 128]
//   v_codes, v_scale    [pages, kv_heads, D, 128], columns in the order of cache.py, and [pages, kv_heads, 128]
//   block_table         pages of the sequences, [sequences, most_blocks]
//   lengths, starts     keys of the sequences; their first rows, and the end of the last
//   output              Data, [tokens, heads, D]
//   c                   scale log2(e), rounded to f64, then to f32
//   group               heads of q for each of the kv_heads
//   causal, window      whether rows see only keys up to their own; how many of those, 0 for all
//
//   e = E(u), about 2^(u - 512);  S = S1 T(d1) + S2 T(d2), and the same of L
//
// Data: tables in global memory -> the rows of a tile and the blocks of keys that they see, in registers.
//
// Variants: none. A tile is up to ROWS rows of one head of keys: tokens of one sequence times the heads that share the
// keys. Tiles of sequence s are numbered from starts[s] group / ROWS + s on, which leaves enough for each, or from
// starts[s] on, if a tile holds all heads of a token and there are fewer tokens than such tiles; rows of no sequence come
// last. Tables that are wrong are clamped, so that nothing outside of the arrays is touched.
#pragma once
#include "quotient.cuh"

typedef SKUDA_DATA Data;

enum { PAGE = 128, CHUNK = 4, NOTHING = -512, UNSEEN = -(1 << 24) };

struct Attention {
  const s8* q_codes;
  const f32* q_scale;
  const s8* k_codes;
  const f32* k_scale;
  const s8* v_codes;
  const f32* v_scale;
  const s32 *block_table, *lengths, *starts;
  Data* output;
  f32 c;
  s32 tokens, group, kv_heads, sequences, pages, most_blocks, causal, window;
};

#define ATTENTION_PARAMETERS                                                                                        \
  const s8 *q_codes, const f32 *q_scale, const s8 *k_codes, const f32 *k_scale, const s8 *v_codes, const f32 *v_scale, \
      const s32 *block_table, const s32 *lengths, const s32 *starts, Data *output, f32 c, s32 tokens, s32 group,     \
      s32 kv_heads, s32 sequences, s32 pages, s32 most_blocks, s32 causal, s32 window
#define ATTENTION_GIVEN                                                                                              \
  Attention{q_codes, q_scale, k_codes, k_scale, v_codes, v_scale, block_table, lengths, starts, output,              \
            c, tokens, group, kv_heads, sequences, pages, most_blocks, causal, window}

// Index of the thread. The compiler cannot compute what follows from it before a loop, where it would take registers.
#ifdef SKUDA_HOST
DEVICE u32 own_thread() { return threadIdx.x; }
#else
DEVICE u32 own_thread() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
#endif

DEVICE f32 minus_infinity() { return __uint_as_float(0xff800000u); }
DEVICE bool usable(f32 scale) { return scale >= 0.0f && scale < 8.112963841460668e31f; }  // 2^106
DEVICE s32 clamped(s32 v, s32 most) { return min(max(v, 0), most); }

// T(d); d is at most 127.
DEVICE f32 power(s32 d) { return __uint_as_float((u32)max(d + 127, 0) << 23); }

// a + 256 b in one instruction: the compiler would move the factor into what b was made of.
DEVICE u32 plus_shifted(u32 a, u32 b) {
#ifdef SKUDA_HOST
  return a + (b << 8);
#else
  u32 sum;
  asm("mad.lo.u32 %0, %1, 256, %2;" : "=r"(sum) : "r"(b), "r"(a));
  return sum;
#endif
}

// E(u). The 15 low bits of u are its fraction. Shifted by 8, the others are h - 512 in the place of an exponent,
// because the bits of 512 are shifted out.
DEVICE f32 power_of_two(f32 u) {
  u = fmaxf(u, 385.0f);
  const u32 h = __float_as_uint(u) & 0xffff8000u;
  const f32 f = u - __uint_as_float(h);
  f32 v = fma_rn(f, __uint_as_float(0x3d9dd520u), __uint_as_float(0x3e691be1u));
  v = fma_rn(f, v, __uint_as_float(0x3f31f32bu));
  v = fma_rn(f, v, 1.0f);
  return __uint_as_float(plus_shifted(__float_as_uint(v), h));
}

// m of the largest v_scale of a block, and 65280 / 2^m.
DEVICE void weights_unit(f32 largest, s32& m, f32& unit) {
  const u32 bits = __float_as_uint(largest);
  const bool small = largest < power(-110);
  m = small ? NOTHING : (s32)(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
  unit = small ? 0.0f : mul_rn(65280.0f, power(-m));
}

// w + 128 in the low bits: in bits 8 to 15 h of w = 256 h + l, and below l + 128.
DEVICE u32 weight_bits(f32 e, f32 g) { return __float_as_uint(fma_rn(e, g, 8388736.0f)); }
// The bytes h and l of four weights.
DEVICE void weight_bytes(const u32 (&bits)[4], u32& high, u32& low) {
  const u32 first = __byte_perm(bits[0], bits[1], 0x5140), second = __byte_perm(bits[2], bits[3], 0x5140);
  high = __byte_perm(first, second, 0x7632), low = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
}

// What a row has summed up, without S. At first, and where it sees no key, n is less than any other by more than powers
// reach, and S is zero: so adding that to something changes nothing, without a branch. The sign of zeros counts: chunks are
// added to -0, because one may be -0.
struct Sums {
  s32 n, m;
  f32 weight;
  DEVICE static Sums none() { return Sums{UNSEEN, NOTHING, 0.0f}; }
  DEVICE bool some() const { return n != UNSEEN; }
};

// Adds `two` to `one`; the sums S are multiplied by `f[0]` and `f[1]`.
DEVICE void add(Sums& one, const Sums& two, f32 (&f)[2]) {
  const s32 n = max(one.n, two.n), d0 = max(one.n - n, (s32)NOTHING), d1 = max(two.n - n, (s32)NOTHING);
  const s32 m0 = one.m + d0, m1 = two.m + d1, m = max(m0, m1);
  f[0] = power(m0 - m), f[1] = two.some() ? power(m1 - m) : -0.0f;
  one.weight = fma_rn(one.weight, power(d0), mul_rn(two.weight, power(d1)));
  one.n = n, one.m = m;
}

// A result, from the sums of all keys.
struct Finish {
  f32 h, scale;
  bool some;
  DEVICE explicit Finish(const Sums& sums)
      : h(div_rn(4194304.0f / 65280.0f, sums.weight)), scale(power(sums.m)), some(sums.some()) {}
  DEVICE f32 operator()(f32 total) const { return some ? mul_rn(mul_rn(total, h), scale) : 0.0f; }
};

// One row of a tile: where it is, and what it sees.
struct Row {
  s64 at;  // index among the rows of q
  bool valid;
  s32 first, last;
  f32 z;
};

// a / b. A division of 64 bits takes several times as long as one of 32.
DEVICE u64 quotient(u64 a, u64 b) { return (a | b) >> 32 ? a / b : (u32)a / (u32)b; }

struct Tile {
  s32 sequence, start, stop, length;  // rows of the sequence, as tokens; its keys
  s64 row0, rows;                     // the tile's first row, and how many the sequence has
  s32 from, blocks;                   // blocks that some row sees: [from, blocks)

  DEVICE bool valid() const { return row0 >= 0 && row0 < rows; }

  DEVICE Tile(const Attention& p, s64 number, s32 tile_rows) {
    // The last sequence whose first tile is not behind this one; `sequences` stands for the rows of none. First the one
    // that it is if all have equally many new tokens: a search takes a load from memory for each of its steps.
    const u64 spread = (u64)tile_rows * p.sequences;
    const u64 all = by_tokens(p, tile_rows) ? (u64)p.tokens * tile_rows : (u64)p.tokens * p.group + spread;
    const u64 below = quotient(((u64)number + 1) * spread + all - 1, all);
    look_at(p, below > 0 ? (s32)min(below - 1, (u64)p.sequences) : 0);
    if (base(p, sequence, start, tile_rows) > number || (sequence < p.sequences && base(p, sequence + 1, stop, tile_rows) <= number)) {
      s32 s = 0, end = p.sequences;
      while (s < end) {
        const s32 middle = s + (end - s + 1) / 2;
        if (base(p, middle, clamped(p.starts[middle], p.tokens), tile_rows) <= number) s = middle;
        else end = middle - 1;
      }
      look_at(p, s);
    }
    row0 = (number - base(p, sequence, start, tile_rows)) * tile_rows, rows = (s64)(stop - start) * p.group;
    // Rows ascend, so the first and the last one say which blocks are seen.
    if (!valid()) return;
    const s32 lowest = length - stop + start + (s32)quotient(row0, p.group);
    const s32 highest = length - stop + start + (s32)quotient(min(row0 + tile_rows - 1, rows - 1), p.group);
    const s32 last = p.causal ? highest : length - 1;
    from = p.window ? max(lowest - p.window + 1, 0) / PAGE : 0;
    blocks = last >= 0 ? last / PAGE + 1 : 0;
  }

  // The first tile of a sequence that begins at a token.
  static DEVICE s64 base(const Attention& p, s32 s, s32 begins, s32 tile_rows) {
    return by_tokens(p, tile_rows) ? begins : (s64)quotient((u64)begins * p.group, tile_rows) + s;
  }
  // Whether the first tile of a sequence has the number of its first token; the launch rule decides as this does.
  static DEVICE bool by_tokens(const Attention& p, s32 tile_rows) {
    const s64 fewer = (s64)p.tokens - p.sequences - 1;
    return p.group <= tile_rows && fewer * tile_rows <= (s64)p.tokens * p.group;
  }
  // Takes a sequence; the loads do not wait for each other.
  DEVICE void look_at(const Attention& p, s32 s) {
    const bool some = s < p.sequences;
    const s32 first = p.starts[s], next = some ? p.starts[s + 1] : p.tokens, keys = some ? p.lengths[s] : 0;
    sequence = s, start = clamped(first, p.tokens), stop = some ? clamped(next, p.tokens) : p.tokens;
    length = p.pages ? (s32)min((s64)max(keys, 0), (s64)p.most_blocks * PAGE) : 0;
  }

  // Row `r` of the tile, which is like the first one if it is not valid.
  DEVICE Row row(const Attention& p, s32 head, s32 r) const {
    Row row;
    row.valid = row0 + r < rows;
    const s64 own = row.valid ? row0 + r : row0;
    const s32 token = (s32)quotient(own, p.group), position = length - stop + start + token;
    row.at = ((s64)(start + token) * p.kv_heads + head) * p.group + (own - (s64)token * p.group);
    row.last = position < 0 ? -1 : p.causal ? position : length - 1;
    row.first = p.window ? max(position - p.window + 1, 0) : 0;
    row.z = mul_rn(p.q_scale[row.at], p.c);
    return row;
  }

  // The page of a block, as a multiple of 128 rows of a head's keys.
  DEVICE s64 page(const Attention& p, s32 head, s32 block) const {
    return (s64)clamped(p.block_table[(s64)sequence * p.most_blocks + block], p.pages - 1) * p.kv_heads + head;
  }
};

DEVICE f32 quad_max(f32 v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
DEVICE s32 quad_sum(s32 v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
