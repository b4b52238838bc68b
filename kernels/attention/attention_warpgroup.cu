// Attention over a paged int8 cache on Hopper's wgmma, for many new tokens; heads of 128 elements. attention.py defines
// the arithmetic; the bits are those of attention.cu.
//
//   z = q_scale c;  y = (q k) k_scale;  n = ceil(z max y);  e = E(z y + 512 - n);  p = e v_scale;  2^m >= max p
//   w = rne(255 p / 2^m);  S = sum w v;  L = sum rne(65536 e);  output = S 2^m (65536 / 255) / L
//
//   k_map, v_map    tensor maps of k_codes as [pages kv_heads 128, 128] and of v_codes as [pages kv_heads 128, 128]
//   tiles           how many there are
//   parameters      see attention.cuh
//
// Data: rows of q: global memory -> shared memory. Blocks of 128 keys: global memory -> TMA -> a ring of stages in shared
// memory -> wgmma -> scores in registers -> weights, packed, in registers, which are as they are the operand of the
// second product -> wgmma -> sums in registers -> sums of the chunk, in registers -> sums of all chunks, in shared
// memory, each in a place of its own thread.
//
// A block of threads has a producer warpgroup and two consumer warpgroups, and computes one tile of 128 rows: each
// consumer has 64. Products run, by halves, while the sums of the block before are added. The first warp of the producer
// requests codes, the second one copies scales.
//
// Variants: none. Only blocks with keys that some row of a warp does not see are masked.
#include "attention.cuh"
#include "hopper.cuh"
#include "quantized_rows.cuh"

enum {
  D = 128,
  WARPGROUPS = 2,                // of consumers; the sums of a third one would not fit into registers
  ROWS = 64 * WARPGROUPS,
  HALF = 64,                     // keys, and elements of a head, of one product
  STAGES = 4,
  CODES = PAGE * D,              // bytes of the codes of a block's keys, and of its values
  BLOCK_SCALES = 2 * PAGE,       // scales of a block
  WARP_SUMS = 16 * D,            // sums of a warp
  QUERIES = 64 * D,              // bytes of the codes of a warpgroup's rows
  SHARED = 1024 + STAGES * (2 * CODES + BLOCK_SCALES * 4 + 16) + WARPGROUPS * (QUERIES + 4 * WARP_SUMS * 4)
};

struct Shared {
  u8* codes;     // [STAGES][2][CODES]
  f32* scales;   // [STAGES][BLOCK_SCALES]; NaN for a key with an unusable scale
  u8* queries;   // [WARPGROUPS][QUERIES]
  float4* whole; // [4 WARPGROUPS][16][32], a place for each thread
  u32 full, empty;
};

// Of the rows of a thread: what they see, and what they have summed up.
struct Rows {
  Row row[2];
  s32 first, last;  // the keys that all rows of the warp see
  Sums part[2], total[2];
};

// d = a b^T, for all 128 bytes of K: of queries, or weights, and codes in shared memory.
DEVICE void multiply(s32 (&d)[32], u32 queries, u32 codes) {
  const u64 a = matrix_descriptor(queries), b = matrix_descriptor(codes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<HALF, s8, s8>::mma_async(d, a + 2 * k, b + 2 * k, k > 0);
  wgmma_commit_group();
}
DEVICE void multiply(s32 (&d)[32], const u32 (&w)[4][4], u32 codes) {
  const u64 b = matrix_descriptor(codes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) WgmmaRegisters<HALF, u8, s8>::mma_async(d, w[k], b + 2 * k, k > 0);
  wgmma_commit_group();
}

// What is known of a block before its weights: y, minus infinity where a row does not see a key, and the largest one of
// each row. Positive numbers are in order as integers; NaN, of an unusable scale, is above all.
struct Scores {
  f32 y[64];
  s32 top[2];
  DEVICE void start() { top[0] = top[1] = -2147483647 - 1; }
  DEVICE void count(int at) {  // of y[at] to y[at + 3]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = max(top[r], max(__float_as_int(y[at + 2 * r]), __float_as_int(y[at + 2 * r + 1])));
    }
  }
};

// Products of half of the block's keys become y.
DEVICE void score(const s32 (&acc)[32], int half, const f32* scales, Scores& to) {
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 k = *(const float2*)(scales + half * HALF + 8 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) to.y[half * 32 + 4 * t + i] = mul_rn((f32)acc[4 * t + i], i % 2 ? k.y : k.x);
    to.count(half * 32 + 4 * t);
  }
}

// The same of a block, of which the products with the last keys run until they are waited for.
DEVICE void score(const s32 (&low)[32], const s32 (&high)[32], const f32* scales, const Rows& rows, s32 block, Scores& to) {
  to.start();
  wgmma_wait_group<1>();
  score(low, 0, scales, to);
  wgmma_wait_group<0>();
  score(high, 1, scales, to);
  const s32 key = block * PAGE;
  if (__builtin_expect(key >= rows.first && key + PAGE - 1 <= rows.last, true)) return;
  to.start();
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const s32 at = key + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
    if (at < rows.row[i / 2 % 2].first || at > rows.row[i / 2 % 2].last) to.y[i] = minus_infinity();
    if (i % 4 == 3) to.count(i - 3);
  }
}

// Scores of a block become packed weights; the block's sums go to `own`.
DEVICE void weights_of(Scores& scores, const f32* scales, const Rows& rows, s32 block, Sums (&own)[2], u32 (&w)[4][4]) {
  f32(&y)[64] = scores.y;
  s32(&top)[2] = scores.top;
  if (__builtin_expect(__any_sync(~0u, top[0] < 0 || top[1] < 0), false)) {  // all negative, whose order is the other one
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      f32 most = minus_infinity();
#pragma unroll
      for (int i = 0; i < 32; ++i) most = fmaxf(most, y[i / 2 * 4 + 2 * r + i % 2]);
      if (top[r] < 0) top[r] = __float_as_int(most);
    }
  }
  f32 z[2], base[2];
  s32 most[2] = {0, 0};
  u32 weight[2] = {0, 0};
  bool bad[2], some[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    f32 n = __int_as_float(top[i]);
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      const f32 other = __shfl_xor_sync(~0u, n, lanes);
      n = n > other || n != n ? n : other;  // keeps NaN
    }
    n = ceilf(__fmul_ru(rows.row[i].z, n));
    some[i] = max(rows.row[i].first, block * PAGE) <= min(rows.row[i].last, block * PAGE + PAGE - 1);
    bad[i] = !(fabsf(n) < 8388608.0f && rows.row[i].z >= 0.0f);
    own[i].n = !some[i] ? UNSEEN : bad[i] ? 0 : (s32)n, z[i] = bad[i] ? 0.0f : rows.row[i].z;
    base[i] = bad[i] ? 512.0f : 512.0f - n;
  }
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const float2 v = *(const float2*)(scales + PAGE + 8 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f32& one = y[4 * t + i];
      const f32 e = power_of_two(fma_rn(z[i / 2], one, base[i / 2]));
      weight[i / 2] += __float_as_uint(fma_rn(e, 65536.0f, 8388608.0f));
      one = mul_rn(e, i % 2 ? v.y : v.x);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const s32* const pair = (const s32*)&y[4 * t + 2 * r];
      most[r] = max(most[r], max(pair[0], pair[1]));
    }
  }
  f32 unit[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights_unit(quad_max(__int_as_float(most[i])), own[i].m, unit[i]);
    own[i].weight = (f32)quad_sum((s32)(weight[i] - 32u * 0x4b000000u));
    if (bad[i] && some[i]) own[i].weight = __uint_as_float(0x7fc00000u);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int t = i / 4 * 4 + i % 4 / 2 * 2, r = i % 2;
    u32 code[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) code[b] = __float_as_uint(fma_rn(y[4 * (t + b / 2) + 2 * r + b % 2], unit[r], 8388608.0f));
    w[i / 4][i % 4] = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  }
}

// Adds the products of a block to the sums of half of the elements.
DEVICE void add_products(f32* sum, const s32 (&acc)[32], const f32 (&f)[2][2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = fma_rn(sum[i], f[i / 2 % 2][0], mul_rn((f32)acc[i], f[i / 2 % 2][1]));
}

// Adds the sums of a chunk and those of the chunks before, unless it is the first one.
DEVICE void add_chunk(Rows& rows, f32 (&sum)[64], const float4* whole, bool first) {
  f32 f[2][2];
  add(rows.total[0], rows.part[0], f[0]), add(rows.total[1], rows.part[1], f[1]);
  rows.part[0] = rows.part[1] = Sums::none();
  if (first) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 before = whole[32 * i];
    sum[4 * i] = fma_rn(before.x, f[0][0], mul_rn(sum[4 * i], f[0][1]));
    sum[4 * i + 1] = fma_rn(before.y, f[0][0], mul_rn(sum[4 * i + 1], f[0][1]));
    sum[4 * i + 2] = fma_rn(before.z, f[1][0], mul_rn(sum[4 * i + 2], f[1][1]));
    sum[4 * i + 3] = fma_rn(before.w, f[1][0], mul_rn(sum[4 * i + 3], f[1][1]));
  }
}

DEVICE void put_pair(u8* to, f32 low, f32 high, f32) { *(float2*)to = make_float2(low, high); }
template <class T> DEVICE void put_pair(u8* to, f32 low, f32 high, T) {
  T first, second;
  narrow(low, first), narrow(high, second);
  *(u32*)to = (u32)first.bits | (u32)second.bits << 16;
}

// Stores the results of a warp: through shared memory, so that every row is stored in units of 16 bytes.
DEVICE void store(const Attention& p, const Rows& rows, const f32 (&sum)[64], u8* staging) {
  enum { PITCH = D * sizeof(Data), UNITS = PITCH / 16 };
  const s32 lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Finish finished(rows.total[r]);
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      const s32 byte = (8 * t + 2 * c) * (s32)sizeof(Data), unit = byte / 16 ^ quad;
      put_pair(staging + (quad + 8 * r) * PITCH + unit * 16 + byte % 16, finished(sum[4 * t + 2 * r]), finished(sum[4 * t + 2 * r + 1]), Data());
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < UNITS / 2; ++i) {
    const s32 row = i * (32 / UNITS) + lane / UNITS, unit = lane % UNITS;
    const Row& given = rows.row[i * (32 / UNITS) / 8];
    const s64 at = __shfl_sync(~0u, given.at, row % 8 * 4);
    const bool valid = __shfl_sync(~0u, (s32)given.valid, row % 8 * 4);
    const uint4 values = *(const uint4*)(staging + row * PITCH + (unit ^ row % 8) * 16);
    if (valid) ((uint4*)(p.output + at * D))[unit] = values;
  }
}

DEVICE void consume(const Attention& p, const Tile& tile, s32 head, const Shared& shared) {
  const s32 warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, c = lane % 4;
  float4* const whole = shared.whole + warp * (WARP_SUMS / 4) + lane;
  Rows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.row[i] = tile.row(p, head, warp * 16 + lane / 4 + 8 * i);
    rows.part[i] = rows.total[i] = Sums::none();
  }
  rows.first = __reduce_max_sync(~0u, max(rows.row[0].first, rows.row[1].first));
  rows.last = __reduce_min_sync(~0u, min(rows.row[0].last, rows.row[1].last));
  const s32 thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128 - 1;
  u8* const queries = shared.queries + warpgroup * QUERIES;
#pragma unroll
  for (int i = 0; i < QUERIES / 16 / 128; ++i) {
    const s32 row = thread / 8 + 16 * i, unit = thread % 8;
    *(uint4*)(queries + row * D + (unit ^ row % 8) * 16) = ((const uint4*)(p.q_codes + tile.row(p, head, warpgroup * 64 + row).at * D))[unit];
  }
  fence_proxy_async();
  bar_sync<128>(warpgroup + 1);
  const u32 q = shared_address(queries);
  f32 sum[64];  // of the chunk
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
  if (tile.from < tile.blocks) {
    u32 stage = 0, parity = 0, codes = shared_address(shared.codes);
    const f32* scales = shared.scales + 2 * c;
    Scores scores;
    mbarrier_wait(shared.full, 0);
    {
      s32 low[32], high[32];
      multiply(low, q, codes);
      multiply(high, q, codes + CODES / 2);
      score(low, high, scales, rows, tile.from, scores);
    }
    for (s32 block = tile.from;; ++block) {
      Sums own[2];
      u32 w[4][4];
      weights_of(scores, scales, rows, block, own, w);
      s32 low[32], high[32], low_values[32], high_values[32];
      multiply(low_values, w, codes + CODES);
      multiply(high_values, w, codes + CODES + CODES / 2);

      f32 f[2][2];
      add(rows.part[0], own[0], f[0]), add(rows.part[1], own[1], f[1]);
      const u32 released = shared.empty + 8 * stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
      codes = shared_address(shared.codes) + stage * 2 * CODES, scales = shared.scales + stage * BLOCK_SCALES + 2 * c;
      wgmma_wait_group<1>();
      add_products(sum, low_values, f);
      if (block + 1 == tile.blocks) {
        wgmma_wait_group<0>();
        add_products(sum + 32, high_values, f);
        add_chunk(rows, sum, whole, block / CHUNK == tile.from / CHUNK);
        break;
      }
      mbarrier_wait(shared.full + 8 * stage, parity);
      wgmma_wait_group<0>();
      __syncwarp();  // all lanes have read their scales
      if (lane == 0) mbarrier_arrive(released);
      multiply(low, q, codes);
      multiply(high, q, codes + CODES / 2);
      add_products(sum + 32, high_values, f);
      if ((block + 1) % CHUNK == 0) {
        add_chunk(rows, sum, whole, block / CHUNK == tile.from / CHUNK);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          whole[32 * i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
          sum[4 * i] = sum[4 * i + 1] = sum[4 * i + 2] = sum[4 * i + 3] = 0.0f;
        }
      }
      score(low, high, scales, rows, block + 1, scores);
    }
  }
  __syncwarp();
  store(p, rows, sum, (u8*)(shared.whole + warp * (WARP_SUMS / 4)));
}

// Copies the scales of the blocks; one warp.
DEVICE void produce_scales(const Attention& p, const Tile& tile, s32 head, const Shared& shared) {
  const s32 lane = threadIdx.x % 32;
  u32 stage = 0, parity = 1;
  for (s32 block = tile.from; block < tile.blocks; ++block) {
    const s64 at = tile.page(p, head, block) * PAGE + 4 * lane;
    float4 k = *(const float4*)(p.k_scale + at), v = *(const float4*)(p.v_scale + at);
    const f32 nan = __uint_as_float(0x7fffffffu);
    k.x = usable(k.x) && usable(v.x) ? k.x : nan, k.y = usable(k.y) && usable(v.y) ? k.y : nan;
    k.z = usable(k.z) && usable(v.z) ? k.z : nan, k.w = usable(k.w) && usable(v.w) ? k.w : nan;
    v.x = k.x == k.x ? v.x : 0.0f, v.y = k.y == k.y ? v.y : 0.0f, v.z = k.z == k.z ? v.z : 0.0f, v.w = k.w == k.w ? v.w : 0.0f;
    mbarrier_wait(shared.empty + 8 * stage, parity);
    f32* const to = shared.scales + stage * BLOCK_SCALES + 4 * lane;
    *(float4*)to = k, *(float4*)(to + PAGE) = v;
    mbarrier_arrive(shared.full + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Requests the codes of the blocks; one thread.
DEVICE void produce_codes(const Attention& p, const Tile& tile, s32 head, const Shared& shared, const TensorMap& k_map,
                          const TensorMap& v_map) {
  u32 stage = 0, parity = 1;
  for (s32 block = tile.from; block < tile.blocks; ++block) {
    const s32 row = (s32)tile.page(p, head, block) * PAGE;
    const u32 barrier = shared.full + 8 * stage, codes = shared_address(shared.codes) + stage * 2 * CODES;
    mbarrier_wait(shared.empty + 8 * stage, parity);
    mbarrier_arrive_expect_tx(barrier, 2 * CODES);
    cp_async_bulk_tensor_2d(codes, &k_map, 0, row, barrier);
    cp_async_bulk_tensor_2d(codes + CODES, &v_map, 0, row, barrier);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(128 + 128 * WARPGROUPS, 1)
    attention_warpgroup(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                        ATTENTION_PARAMETERS, s32 tiles) {
  extern __shared__ u8 unaligned[];
  Shared shared;
  shared.codes = unaligned + (-shared_address(unaligned) & 1023);
  shared.whole = (float4*)(shared.codes + STAGES * 2 * CODES);
  shared.queries = (u8*)(shared.whole + 4 * WARPGROUPS * (WARP_SUMS / 4));
  shared.scales = (f32*)(shared.queries + WARPGROUPS * QUERIES);
  shared.full = shared_address(shared.scales + STAGES * BLOCK_SCALES), shared.empty = shared.full + 8 * STAGES;
  const Attention p = ATTENTION_GIVEN;
  const s32 head = (s32)(blockIdx.x % (u32)kv_heads);
  if (threadIdx.x == 0) {
    prefetch_tensormap(&k_map), prefetch_tensormap(&v_map);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared.full + 8 * s, 33);  // the request, and the lanes that copy scales
      mbarrier_init(shared.empty + 8 * s, 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __syncthreads();
  // The last tiles of a sequence see the most keys, and begin first.
  const Tile tile(p, tiles - 1 - (s64)(blockIdx.x / (u32)kv_heads), ROWS);
  if (!tile.valid()) return;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that a warp has one value
  if (warpgroup == 0) {
    setmaxnreg_dec<24>();
    if (threadIdx.x / 32 == 1) produce_scales(p, tile, head, shared);
    if (threadIdx.x == 0) produce_codes(p, tile, head, shared, k_map, v_map);
  } else {
    setmaxnreg_inc<240>();
    consume(p, tile, head, shared);
  }
}
