// Attention over a paged int8 cache, as attention.py defines it: the bits do not depend on how rows are spread.
//
//   z = q_scale c;  y = (q k) k_scale;  n = ceil(z max y);  e = E(z y + 512 - n);  2^m >= max v_scale
//   w = rne(e 65280 v_scale / 2^m);  S = sum w v;  L = sum rne(2^22 e);  output = S 2^m (2^22 / 65280) / L
//
//   parameters          see attention.cuh
//
// Data: q in registers. A block of 128 keys: global memory -> mma.sync -> scores in registers -> weights, as packed
// bytes in registers, which are as they are the operands of the other products -> mma.sync -> sums -> sums of the chunk, and of all
// chunks, in shared memory, each in a place of its own lane. Nothing is shared between lanes but by shuffles.
//
// Variants: one entry for each D. A warp computes a tile of 16 rows. A second step makes codes of the output, if they
// are asked for.
#include "attention.cuh"
#include "mma_sync.cuh"
#include "quantized_rows.cuh"

enum { TILES = PAGE / 8, ROWS = 16, WARPS = 2 };

// Four bytes; an array of bytes may begin anywhere.
DEVICE u32 word_at(const s8* p, bool aligned) {
  if (aligned) return *(const u32*)p;
  return (u32)(u8)p[0] | (u32)(u8)p[1] << 8 | (u32)(u8)p[2] << 16 | (u32)(u8)p[3] << 24;
}

template <int D> DEVICE void attend(const Attention& p, s64 tile, s32 head, f32* chunk, f32* whole) {
  const s32 lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
  const Tile at(p, tile, ROWS);
  if (!at.valid()) return;
  const Row row[2] = {at.row(p, head, quad), at.row(p, head, quad + 8)};
  const bool words = ((u64)p.q_codes | (u64)p.k_codes | (u64)p.v_codes) % 4 == 0;
  u32 q[D / 32][4];
#pragma unroll
  for (int k = 0; k < D / 32; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[k][i] = word_at(p.q_codes + row[i % 2].at * D + 32 * k + 16 * (i / 2) + 4 * c, words);
  }
  Sums part[2] = {Sums::none(), Sums::none()}, total[2] = {Sums::none(), Sums::none()};
#pragma unroll 4
  for (int t = 0; t < D / 2; ++t) chunk[t * 32 + lane] = 0.0f, whole[t * 32 + lane] = -0.0f;
  for (s32 block = at.from; block < at.blocks; ++block) {
    const s64 page = at.page(p, head, block);
    const s8* const k_codes = p.k_codes + page * PAGE * D;
    const s8* const v_codes = p.v_codes + page * PAGE * D;
    const f32* const k_scale = p.k_scale + page * PAGE;
    const f32* const v_scale = p.v_scale + page * PAGE;

    f32 y[TILES][4];  // minus infinity where a key does not count
    f32 top[2] = {minus_infinity(), minus_infinity()}, largest[2] = {0.0f, 0.0f};  // of y, and of v_scale
    bool bad[2] = {false, false};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      s32 acc[4] = {0, 0, 0, 0};
      const s8* const codes = k_codes + (8 * t + quad) * D + 4 * c;
#pragma unroll
      for (int k = 0; k < D / 32; ++k) {
        mma_m16n8k32<s8, s8>(acc, q[k], word_at(codes + 32 * k, words), word_at(codes + 32 * k + 16, words));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const s32 j = 8 * t + 2 * c + i % 2, key = block * PAGE + j;
        const f32 scale = k_scale[j];
        const bool seen = key >= row[i / 2].first && key <= row[i / 2].last, good = usable(scale) && usable(v_scale[j]);
        bad[i / 2] |= seen && !good;
        y[t][i] = seen && good ? mul_rn((f32)acc[i], scale) : minus_infinity();
        top[i / 2] = fmaxf(top[i / 2], y[t][i]);
        largest[i / 2] = fmaxf(largest[i / 2], seen && good ? v_scale[j] : 0.0f);
      }
    }

    Sums own[2];
    bool some[2];
    f32 z[2], base[2], unit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      some[i] = max(row[i].first, block * PAGE) <= min(row[i].last, block * PAGE + PAGE - 1);
      const f32 n = ceilf(__fmul_ru(row[i].z, quad_max(top[i])));
      const s32 unusable = quad_sum(bad[i]);
      const bool good = fabsf(n) < 8388608.0f && row[i].z >= 0.0f && !unusable;
      own[i].n = !some[i] ? UNSEEN : good ? (s32)n : 0;
      base[i] = good ? 512.0f - n : 512.0f, z[i] = good ? row[i].z : 0.0f;
      bad[i] = !good;
      weights_unit(quad_max(largest[i]), own[i].m, unit[i]);
    }
    s32 weight[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool counts = y[t][i] != minus_infinity();
        const f32 e = power_of_two(fma_rn(z[i / 2], y[t][i], base[i / 2]));
        weight[i / 2] += (s32)(__float_as_uint(fma_rn(e, 4194304.0f, 8388608.0f)) & 0x7fffffu);
        const f32 g = counts ? mul_rn(v_scale[8 * t + 2 * c + i % 2], unit[i / 2]) : 0.0f;
        y[t][i] = __uint_as_float(weight_bits(e, g));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i].weight = (f32)quad_sum(weight[i]);
      if (bad[i] && some[i]) own[i].weight = __uint_as_float(0x7fc00000u);
    }
    u32 high[4][4], low[4][4];  // of 32 keys: a row and the one 8 below, of 16 keys and of 16 more
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int t = i / 4 * 4 + i % 4 / 2 * 2, r = i % 2;
      u32 bits[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) bits[b] = __float_as_uint(y[t + b / 2][2 * r + b % 2]);
      weight_bytes(bits, high[i / 4][i % 4], low[i / 4][i % 4]);
    }

    f32 f[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) add(part[i], own[i], f[i]);
#pragma unroll 4
    for (int t = 0; t < D / 8; ++t) {
      s32 acc[4] = {0, 0, 0, 0}, more[4] = {0, 0, 0, 0};
      const s8* const value = v_codes + (8 * t + quad) * PAGE + 4 * c;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 v[2] = {word_at(value + 32 * j, words), word_at(value + 32 * j + 16, words)};
        mma_m16n8k32<u8, s8>(acc, high[j], v[0], v[1]);
        mma_m16n8k32<s8, s8>(more, low[j], v[0], v[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f32& sum = chunk[(t * 4 + i) * 32 + lane];
        sum = fma_rn(sum, f[i / 2][0], mul_rn((f32)(256 * acc[i] + more[i]), f[i / 2][1]));
      }
    }

    if ((block + 1) % CHUNK == 0 || block + 1 == at.blocks) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        add(total[i], part[i], f[i]);
        part[i] = Sums::none();
      }
#pragma unroll 4
      for (int t = 0; t < D / 8; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own = (t * 4 + i) * 32 + lane;
          whole[own] = fma_rn(whole[own], f[i / 2][0], mul_rn(chunk[own], f[i / 2][1]));
          chunk[own] = 0.0f;
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!row[i].valid) continue;
    const Finish finished(total[i]);
#pragma unroll 4
    for (int t = 0; t < D / 8 * 2; ++t) {
      narrow(finished(whole[(t / 2 * 4 + 2 * i + t % 2) * 32 + lane]), p.output[row[i].at * D + t / 2 * 8 + 2 * c + t % 2]);
    }
  }
}

#define ATTENTION(D)                                                                                                \
  __shared__ f32 sums[WARPS][2][ROWS * D];                                                                          \
  const Attention p = ATTENTION_GIVEN;                                                                              \
  griddepcontrol_launch_dependents();                                                                               \
  f32(&own)[2][ROWS * D] = sums[threadIdx.x / 32];                                                                  \
  const s64 jobs = ((s64)tokens * group / ROWS + sequences + 1) * kv_heads;                                         \
  for (s64 job = (s64)blockIdx.x * WARPS + threadIdx.x / 32; job < jobs; job += (s64)gridDim.x * WARPS)             \
    attend<D>(p, job / kv_heads, (s32)(job % kv_heads), own[0], own[1])

KERNEL(64, 4) attention_32(ATTENTION_PARAMETERS) { ATTENTION(32); }
KERNEL(64, 4) attention_64(ATTENTION_PARAMETERS) { ATTENTION(64); }
KERNEL(64, 4) attention_128(ATTENTION_PARAMETERS) { ATTENTION(128); }
