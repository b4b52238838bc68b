// Attention over a paged int8 cache, as attention.py defines it: the bits do not depend on how rows are spread.
//
//   z = q_scale c;  y = (q k) k_scale;  n = ceil(z max y);  e = E(z y + 512 - n);  p = e v_scale;  2^m >= max p
//   w = rne(255 p / 2^m);  S = sum w v;  L = sum rne(65536 e);  output = S 2^m (65536 / 255) / L
//
//   q_codes, q_scale    rows of codes and their scales, [tokens, heads, D] and [tokens, heads]
//   k_codes, k_scale    [pages, kv_heads, 128, D] and [pages, kv_heads, 128]
//   v_codes, v_scale    [pages, kv_heads, D, 128], columns in the order of cache.py, and [pages, kv_heads, 128]
//   block_table         pages of the sequences, [sequences, most_blocks]
//   lengths, starts     keys of the sequences; their first rows, and the end of the last
//   output              Data, [tokens, heads, D]
//   c                   scale log2(e)
//   group               heads of q for each of the kv_heads
//   causal, window      whether rows see only keys up to their own; how many of those, 0 for all
//
// Data: q in registers. A block of 128 keys: global memory -> mma.sync -> scores in registers -> weights, packed, in
// registers, which are as they are the operand of the second product -> mma.sync -> sums -> sums of the chunk, and of all
// chunks, in shared memory, each in a place of its own lane. Nothing is shared between lanes but by shuffles.
//
// Variants: one entry for each D. A warp computes 16 rows of one head of keys: tokens of one sequence times the heads
// that share the keys. Tiles of sequence s are numbered from starts[s] group / 16 + s on, which leaves enough for each;
// rows of no sequence come last. Tables that are wrong are clamped, so that nothing outside of the arrays is touched.
#include "mma_sync.cuh"
#include "quotient.cuh"

typedef SKUDA_DATA Data;

enum { PAGE = 128, TILES = PAGE / 8, CHUNK = 4, ROWS = 16, WARPS = 2, NOTHING = -512 };

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

// Four bytes; an array of bytes may begin anywhere.
DEVICE u32 word_at(const s8* p, bool aligned) {
  if (aligned) return *(const u32*)p;
  return (u32)(u8)p[0] | (u32)(u8)p[1] << 8 | (u32)(u8)p[2] << 16 | (u32)(u8)p[3] << 24;
}

DEVICE f32 minus_infinity() { return __uint_as_float(0xff800000u); }
DEVICE bool usable(f32 scale) { return scale >= 0.0f && scale < 8.112963841460668e31f; }  // 2^106
DEVICE s32 clamped(s32 v, s32 most) { return min(max(v, 0), most); }

// T(d).
DEVICE f32 power(s32 d) { return d < -126 ? 0.0f : __uint_as_float((u32)(d + 127) << 23); }

// E(u). The 15 low bits of u are its fraction. Shifted by 8, the others are h - 512 in the place of an exponent,
// because the bits of 512 are shifted out.
DEVICE f32 power_of_two(f32 u) {
  u = fmaxf(u, 387.0f);
  const u32 h = __float_as_uint(u) & 0xffff8000u;
  const f32 f = u - __uint_as_float(h);
  f32 v = fma_rn(f, __uint_as_float(0x3d9dd520u), __uint_as_float(0x3e691be1u));
  v = fma_rn(f, v, __uint_as_float(0x3f31f32bu));
  v = fma_rn(f, v, 1.0f);
  return __uint_as_float(__float_as_uint(v) + (h << 8));
}

// What a row has summed up, without S.
struct Sums {
  f32 n, weight;
  s32 m;
  bool some;
};

// Adds `two` to `one`; the sums S are multiplied by `f[0]` and `f[1]`.
DEVICE void add(Sums& one, const Sums& two, f32 (&f)[2]) {
  f[0] = 1.0f, f[1] = 0.0f;
  if (!two.some) return;
  if (!one.some) {
    one = two;
    return;
  }
  const f32 n = fmaxf(one.n, two.n);
  const s32 d0 = (s32)fmaxf(one.n - n, (f32)NOTHING), d1 = (s32)fmaxf(two.n - n, (f32)NOTHING);
  const s32 m0 = one.m + d0, m1 = two.m + d1, m = max(m0, m1);
  f[0] = power(m0 - m), f[1] = power(m1 - m);
  one.weight = fma_rn(one.weight, power(d0), mul_rn(two.weight, power(d1)));
  one.n = n, one.m = m;
}

// One row of a lane: where it is, and what it sees.
struct Row {
  s64 at;  // index among the rows of q
  bool valid;
  s32 first, last;
  f32 z;
};

DEVICE f32 quad_max(f32 v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
DEVICE s32 quad_sum(s32 v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

template <int D> DEVICE void attend(const Attention& p, s64 tile, s32 head, f32* chunk, f32* whole) {
  const s32 lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
  // The last sequence whose first tile is not behind this one; `sequences` stands for the rows of none.
  s32 s = 0, end = p.sequences;
  while (s < end) {
    const s32 middle = s + (end - s + 1) / 2;
    const s64 base = (s64)clamped(p.starts[middle], p.tokens) * p.group / ROWS + middle;
    if (base <= tile) s = middle;
    else end = middle - 1;
  }
  const bool none = s == p.sequences;
  const s32 start = clamped(p.starts[s], p.tokens), stop = none ? p.tokens : clamped(p.starts[s + 1], p.tokens);
  const s64 row0 = (tile - ((s64)start * p.group / ROWS + s)) * ROWS, rows = (s64)(stop - start) * p.group;
  if (row0 < 0 || row0 >= rows) return;
  const s32 length = none || !p.pages ? 0 : (s32)min((s64)max(p.lengths[s], 0), (s64)p.most_blocks * PAGE);

  Row row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const s64 r = row0 + quad + 8 * i;
    row[i].valid = r < rows;
    const s32 token = (s32)((row[i].valid ? r : row0) / p.group) + start;
    row[i].at = ((s64)token * p.kv_heads + head) * p.group + (row[i].valid ? r : row0) % p.group;
    const s32 position = length - stop + token;
    row[i].last = p.causal ? position : length - 1;
    row[i].first = p.window ? max(position - p.window + 1, 0) : 0;
    row[i].z = mul_rn(p.q_scale[row[i].at], p.c);
  }
  const bool words = ((u64)p.q_codes | (u64)p.k_codes | (u64)p.v_codes) % 4 == 0;
  u32 q[D / 32][4];
#pragma unroll
  for (int k = 0; k < D / 32; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[k][i] = word_at(p.q_codes + row[i % 2].at * D + 32 * k + 16 * (i / 2) + 4 * c, words);
  }
  // Rows ascend, so the first and the last one say which blocks are seen.
  const s32 lowest = length - stop + start + (s32)(row0 / p.group);
  const s32 highest = length - stop + start + (s32)(min(row0 + ROWS - 1, rows - 1) / p.group);
  const s32 from = p.window ? max(lowest - p.window + 1, 0) / PAGE : 0;
  const s32 blocks = (p.causal ? highest : length - 1) >= 0 ? (p.causal ? highest : length - 1) / PAGE + 1 : 0;

  Sums part[2], total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    part[i].n = total[i].n = part[i].weight = total[i].weight = 0.0f;
    part[i].m = total[i].m = 0;
    part[i].some = total[i].some = false;
  }
  for (s32 block = from; block < blocks; ++block) {
    const s64 page = (s64)clamped(p.block_table[(s64)s * p.most_blocks + block], p.pages - 1) * p.kv_heads + head;
    const s8* const k_codes = p.k_codes + page * PAGE * D;
    const s8* const v_codes = p.v_codes + page * PAGE * D;
    const f32* const k_scale = p.k_scale + page * PAGE;
    const f32* const v_scale = p.v_scale + page * PAGE;

    f32 y[TILES][4];  // minus infinity where a key does not count
    f32 top[2] = {minus_infinity(), minus_infinity()};
    bool bad[2] = {false, false};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      s32 acc[4] = {0, 0, 0, 0};
      const s8* const key = k_codes + (8 * t + quad) * D + 4 * c;
#pragma unroll
      for (int k = 0; k < D / 32; ++k) {
        mma_m16n8k32<s8, s8>(acc, q[k], word_at(key + 32 * k, words), word_at(key + 32 * k + 16, words));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const s32 j = 8 * t + 2 * c + i % 2, at = block * PAGE + j;
        const f32 scale = k_scale[j];
        const bool seen = at >= row[i / 2].first && at <= row[i / 2].last, good = usable(scale) && usable(v_scale[j]);
        bad[i / 2] |= seen && !good;
        y[t][i] = seen && good ? mul_rn((f32)acc[i], scale) : minus_infinity();
        top[i / 2] = fmaxf(top[i / 2], y[t][i]);
      }
    }

    Sums own[2];
    f32 z[2], most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i].some = max(row[i].first, block * PAGE) <= min(row[i].last, block * PAGE + PAGE - 1);
      const f32 n = ceilf(__fmul_ru(row[i].z, quad_max(top[i])));
      const s32 unusable = quad_sum(bad[i]);
      const bool good = fabsf(n) < 8388608.0f && row[i].z >= 0.0f && !unusable;
      own[i].n = good ? n : 0.0f, z[i] = good ? row[i].z : 0.0f;
      bad[i] = !good;
    }
    s32 weight[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool counts = y[t][i] != minus_infinity();
        const f32 e = power_of_two(fma_rn(z[i / 2], y[t][i], 512.0f - own[i / 2].n));
        weight[i / 2] += counts ? (s32)(__float_as_uint(fma_rn(e, 65536.0f, 8388608.0f)) & 0x7fffffu) : 0;
        y[t][i] = counts ? mul_rn(e, v_scale[8 * t + 2 * c + i % 2]) : 0.0f;
        most[i / 2] = fmaxf(most[i / 2], y[t][i]);
      }
    }
    f32 unit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const f32 largest = quad_max(most[i]);
      const u32 bits = __float_as_uint(largest);
      const bool small = largest < power(-118);
      own[i].m = small ? NOTHING : (s32)(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
      unit[i] = small ? 0.0f : mul_rn(255.0f, power(-own[i].m));
      own[i].weight = (f32)quad_sum(weight[i]);
      if (bad[i]) own[i].weight = __uint_as_float(0x7fc00000u);
    }
    u32 w[4][4];  // of 32 keys: a row and the one 8 below, of 16 keys and of 16 more
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int t = i / 4 * 4 + i % 4 / 2 * 2, r = i % 2;
      w[i / 4][i % 4] = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const u32 code = __float_as_uint(fma_rn(y[t + b / 2][2 * r + b % 2], unit[r], 8388608.0f)) & 255u;
        w[i / 4][i % 4] |= code << 8 * b;
      }
    }

    f32 f[2][2];
    bool first[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = !part[i].some;
      add(part[i], own[i], f[i]);
    }
#pragma unroll 4
    for (int t = 0; t < D / 8; ++t) {
      s32 acc[4] = {0, 0, 0, 0};
      const s8* const value = v_codes + (8 * t + quad) * PAGE + 4 * c;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mma_m16n8k32<u8, s8>(acc, w[j], word_at(value + 32 * j, words), word_at(value + 32 * j + 16, words));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f32& sum = chunk[(t * 4 + i) * 32 + lane];
        const f32 more = (f32)acc[i];
        if (own[i / 2].some) sum = first[i / 2] ? more : fma_rn(sum, f[i / 2][0], mul_rn(more, f[i / 2][1]));
      }
    }

    if ((block + 1) % CHUNK == 0 || block + 1 == blocks) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        first[i] = !total[i].some;
        add(total[i], part[i], f[i]);
      }
#pragma unroll 4
      for (int t = 0; t < D / 8; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (t * 4 + i) * 32 + lane;
          if (part[i / 2].some)
            whole[at] = first[i / 2] ? chunk[at] : fma_rn(whole[at], f[i / 2][0], mul_rn(chunk[at], f[i / 2][1]));
        }
      }
      part[0].some = part[1].some = false;
    }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!row[i].valid) continue;
    const f32 h = div_rn(65536.0f / 255.0f, total[i].weight), scale = power(total[i].m);
#pragma unroll 4
    for (int t = 0; t < D / 8 * 2; ++t) {
      const f32 sum = total[i].some ? whole[(t / 2 * 4 + 2 * i + t % 2) * 32 + lane] : 0.0f;
      narrow(total[i].some ? mul_rn(mul_rn(sum, h), scale) : 0.0f, p.output[row[i].at * D + t / 2 * 8 + 2 * c + t % 2]);
    }
  }
}

#define ATTENTION_PARAMETERS                                                                                        \
  const s8 *q_codes, const f32 *q_scale, const s8 *k_codes, const f32 *k_scale, const s8 *v_codes, const f32 *v_scale, \
      const s32 *block_table, const s32 *lengths, const s32 *starts, Data *output, f32 c, s32 tokens, s32 group,     \
      s32 kv_heads, s32 sequences, s32 pages, s32 most_blocks, s32 causal, s32 window
#define ATTENTION(D)                                                                                                \
  __shared__ f32 sums[WARPS][2][ROWS * D];                                                                          \
  const Attention p = {q_codes, q_scale, k_codes, k_scale, v_codes, v_scale, block_table, lengths, starts, output,  \
                       c, tokens, group, kv_heads, sequences, pages, most_blocks, causal, window};                  \
  f32(&own)[2][ROWS * D] = sums[threadIdx.x / 32];                                                                  \
  const s64 jobs = ((s64)tokens * group / ROWS + sequences + 1) * kv_heads;                                         \
  for (s64 job = (s64)blockIdx.x * WARPS + threadIdx.x / 32; job < jobs; job += (s64)gridDim.x * WARPS)             \
    attend<D>(p, job / kv_heads, (s32)(job % kv_heads), own[0], own[1])

KERNEL(64, 4) attention_32(ATTENTION_PARAMETERS) { ATTENTION(32); }
KERNEL(64, 4) attention_64(ATTENTION_PARAMETERS) { ATTENTION(64); }
KERNEL(64, 4) attention_128(ATTENTION_PARAMETERS) { ATTENTION(128); }
