// Attention over a paged int8 cache on Hopper's wgmma, for many new tokens; heads of 128 elements. attention.py defines
// the arithmetic; the bits are those of attention.cu.
//
//   z = q_scale c;  y = (q k) k_scale;  n = ceil(z max y);  e = E(z y + 512 - n);  2^m >= max v_scale
//   w = rne(e 65280 v_scale / 2^m);  S = sum w v;  L = sum rne(2^22 e);  output = S 2^m (2^22 / 65280) / L
//
//   k_map, v_map    tensor maps of k_codes as [pages kv_heads 128, 128] and of v_codes as [pages kv_heads 128, 128]
//   tiles           how many there are
//   parameters      see attention.cuh
//
// Data: rows of q: global memory -> shared memory. Blocks of 128 keys: global memory -> TMA -> a ring of stages in shared
// memory -> wgmma -> scores in registers -> both bytes of weights -> shared memory -> wgmma, of the high bytes, then of the
// low ones -> sums in registers -> sums of the chunk, in registers -> sums of all chunks, in shared memory, each in a place
// of its own thread. (An operand of wgmma in registers would take 55 cycles more.)
//
// A block of threads has a producer warpgroup and two consumer warpgroups, and computes one tile of 128 rows: each
// consumer has 64. Scores of the next block are multiplied between the two products of values. The first warp of the producer
// requests codes, the second one copies scales, and makes those of the weights, which all rows that see the whole block
// share.
//
// Variants: none. Only blocks with keys that some row of a warp does not see are masked.
#include "attention.cuh"
#include "hopper.cuh"
#include "quantized_rows.cuh"

enum {
  D = 128,
  WARPGROUPS = 2,                // of consumers; the sums of a third one would not fit into registers
  ROWS = 64 * WARPGROUPS,
  STAGES = 3,
  CODES = PAGE * D,              // bytes of the codes of a block's keys, and of its values
  BLOCK_SCALES = 3 * PAGE + 8,   // scales of a block: of keys, of values, of weights; and m
  WARP_SUMS = 16 * D,            // sums of a warp
  QUERIES = 64 * D,              // bytes of the codes of a warpgroup's rows, and of its weights: high and low bytes
  SHARED = 1024 + STAGES * (2 * CODES + BLOCK_SCALES * 4 + 16) + 32 * ROWS + WARPGROUPS * (3 * QUERIES + 4 * WARP_SUMS * 4)
};

// What is rarely asked of a row.
struct Facts {
  s64 at;      // among the rows of q; -1 if there is none
  s32 first, last;
  Sums total;  // of the chunks before
};

struct Shared {
  u8* codes;     // [STAGES][2][CODES]
  f32* scales;   // [STAGES][BLOCK_SCALES]; NaN for a key with an unusable scale
  u8* queries;   // [WARPGROUPS][3][QUERIES]
  Facts* rows;   // [ROWS]
  float4* whole; // [4 WARPGROUPS][16][32], a place for each thread
  u32 full, empty;
};

// Of the rows of a thread: what they see, and what they have summed up.
struct Rows {
  Facts* facts;  // [16]
  f32 z[2];
  s32 first, last;  // the keys that all rows of the warp see
  DEVICE bool see(s32 key) const { return key >= first && key + PAGE - 1 <= last; }  // all keys of the block
  Sums part[2];
};

// d = a b^T, for all 128 bytes of K, or d + a b^T: of queries, or weights, and codes.
template <class A, int N> DEVICE void multiply(s32 (&d)[N], u32 rows, u32 codes, bool more = false) {
  const u64 a = matrix_descriptor(rows), b = matrix_descriptor(codes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) Wgmma<2 * N, A, s8>::mma_async(d, a + 2 * k, b + 2 * k, more || k > 0);
  wgmma_commit_group();
}

// The products with the low bytes are then added. The compiler must not move a shift beyond a fence of wgmma.
DEVICE void shift(s32 (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
#ifdef SKUDA_HOST
    d[i] *= 256;
#else
    asm volatile("shl.b32 %0, %0, 8;" : "+r"(d[i]));
#endif
  }
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

// Products of half of a block's keys become y.
DEVICE void score(const s32 (&acc)[32], int half, const f32* scales, Scores& to) {
#pragma unroll
  for (int t = 8 * half; t < 8 * half + 8; ++t) {
    const float2 k = *(const float2*)(scales + 8 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) to.y[4 * t + i] = mul_rn((f32)acc[4 * (t - 8 * half) + i], i % 2 ? k.y : k.x);
    to.count(4 * t);
  }
}

// Leaves out what a row does not see of a block.
DEVICE void mask(const Rows& rows, s32 first, Scores& scores) {
  if (__builtin_expect(rows.see(first), true)) return;
  scores.start();
  const s32 key = first + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const s32 from = rows.facts[8 * r].first - key, to = rows.facts[8 * r].last - key;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int own = i / 2 * 4 + 2 * r + i % 2, at = 8 * (i / 2) + i % 2;
      if (at < from || at > to) scores.y[own] = minus_infinity();
    }
  }
#pragma unroll
  for (int t = 0; t < 16; ++t) scores.count(4 * t);
}

// Where a thread stores words of weights: of rows quad and quad + 8 of its warp, whose units of 16 bytes are swizzled as
// wgmma reads them. The high bytes, and QUERIES further the low ones.
struct WeightsPlace {
  u8* at;
  u32 row;
  DEVICE void put(int row_half, int unit, u32 high, u32 low) const {
    u32* const to = (u32*)(at + row_half * 8 * D + (unit ^ row) * 16);
    to[0] = high, to[QUERIES / 4] = low;
  }
};

// Scores of a block become weights. WHOLE: all rows of the warp see all its keys.
template <bool WHOLE> DEVICE void weights_of(const f32 (&y)[64], const f32* scales, const f32 (&z)[2], const f32 (&base)[2], Sums (&own)[2], const WeightsPlace& to) {
  f32 unit[2];
  if (WHOLE) {
    own[0].m = own[1].m = __float_as_int(scales[3 * PAGE]);
  } else {
    s32 most[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const s32 v = __float_as_int(scales[PAGE + 8 * (i / 4) + i % 2]);
      most[i / 2 % 2] = max(most[i / 2 % 2], y[i] != minus_infinity() ? v : 0);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) weights_unit(quad_max(__int_as_float(most[r])), own[r].m, unit[r]);
  }
  u32 weight[2] = {0, 0};
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    u32 bits[2][4];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int t = 2 * pair + b;
      const float2 v = *(const float2*)(scales + (WHOLE ? 2 * PAGE : PAGE) + 8 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const f32 e = power_of_two(fma_rn(z[i / 2], y[4 * t + i], base[i / 2]));
        weight[i / 2] += __float_as_uint(fma_rn(e, 4194304.0f, 8388608.0f));
        // A key that is not seen may have any v_scale, but its e is 0.
        const f32 of = i % 2 ? v.y : v.x, g = WHOLE ? of : fminf(mul_rn(of, unit[i / 2]), 65280.0f);
        bits[i / 2][2 * b + i % 2] = weight_bits(e, g);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 high, low;
      weight_bytes(bits[r], high, low);
      to.put(r, pair, high, low);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) own[r].weight = (f32)quad_sum((s32)(weight[r] - 32u * 0x4b000000u));
}

// The same; the block's sums go to `own`.
DEVICE void weights_of(Scores& scores, const f32* scales, const Rows& rows, s32 key, Sums (&own)[2], const WeightsPlace& to) {
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
  bool wrong[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    f32 n = __int_as_float(top[i]);
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      const f32 other = __shfl_xor_sync(~0u, n, lanes);
      n = n > other || n != n ? n : other;  // keeps NaN
    }
    n = ceilf(__fmul_ru(rows.z[i], n));
    const Facts& row = rows.facts[8 * i];
    const bool some = max(row.first, key) <= min(row.last, key + PAGE - 1);
    const bool bad = !(fabsf(n) < 8388608.0f && rows.z[i] >= 0.0f);
    own[i].n = !some ? UNSEEN : bad ? 0 : (s32)n, z[i] = bad ? 0.0f : rows.z[i];
    base[i] = bad ? 512.0f : 512.0f - n;
    wrong[i] = bad && some;
  }
  if (__builtin_expect(rows.see(key), true)) {
    weights_of<true>(y, scales, z, base, own, to);
  } else {
    weights_of<false>(y, scales, z, base, own, to);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (wrong[i]) own[i].weight = __uint_as_float(0x7fc00000u);
  }
}

// Adds the products of a block to the sums of half of the elements.
DEVICE void add_products(f32 (&sum)[64], const s32 (&acc)[64], int half, const f32 (&f)[2][2]) {
#pragma unroll
  for (int i = 32 * half; i < 32 * half + 32; ++i) sum[i] = fma_rn(sum[i], f[i / 2 % 2][0], mul_rn((f32)acc[i], f[i / 2 % 2][1]));
}

// Adds the sums of a chunk to those of the chunks before.
DEVICE void add_chunk(Rows& rows, f32 (&sum)[64], const float4* whole) {
  f32 f[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // all lanes of a quad do the same
    Sums all = rows.facts[8 * r].total;
    add(all, rows.part[r], f[r]);
    __syncwarp();
    rows.facts[8 * r].total = all, rows.part[r] = Sums::none();
  }
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
DEVICE void store(const Attention& p, const Facts* facts, const f32 (&sum)[64], u8* staging) {
  enum { PITCH = D * sizeof(Data), UNITS = PITCH / 16 };
  const s32 lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Finish finished(facts[quad + 8 * r].total);
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
    const s64 at = facts[row].at;
    const uint4 values = *(const uint4*)(staging + row * PITCH + (unit ^ row % 8) * 16);
    if (at >= 0) ((uint4*)(p.output + at * D))[unit] = values;
  }
}

DEVICE void consume(const Attention& p, const Tile& tile, s32 head, const Shared& shared) {
  const s32 warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, c = lane % 4;
  float4* const whole = shared.whole + warp * (WARP_SUMS / 4) + lane;
  Rows rows;
  rows.facts = shared.rows + warp * 16 + lane / 4;
  s32 first = 0, last = 0x7fffffff;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Row row = tile.row(p, head, warp * 16 + lane / 4 + 8 * i);
    rows.facts[8 * i] = Facts{row.valid ? row.at : -1, row.first, row.last, Sums::none()};
    rows.z[i] = row.z, rows.part[i] = Sums::none();
    first = max(first, row.first), last = min(last, row.last);
  }
  rows.first = __reduce_max_sync(~0u, first), rows.last = __reduce_min_sync(~0u, last);
  const s32 thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128 - 1;
  u8* const queries = shared.queries + warpgroup * 3 * QUERIES;
#pragma unroll
  for (int i = 0; i < QUERIES / 16 / 128; ++i) {
    const s32 row = thread / 8 + 16 * i, unit = thread % 8;
    *(uint4*)(queries + row * D + (unit ^ row % 8) * 16) = ((const uint4*)(p.q_codes + tile.row(p, head, warpgroup * 64 + row).at * D))[unit];
  }
  fence_proxy_async();
  bar_sync<128>(warpgroup + 1);
  const u32 q = shared_address(queries), w = q + QUERIES;
  f32 sum[64];  // of the chunk
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) whole[32 * i] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
  if (tile.from < tile.blocks) {
    u32 stage = 0, parity = 0, codes = shared_address(shared.codes);
    const f32* scales = shared.scales + 2 * c;
    Scores scores;
    mbarrier_wait(shared.full, 0);
    s32 low[32], high[32];  // products with the first and the last keys of a block
    multiply<s8>(low, q, codes);
    multiply<s8>(high, q, codes + CODES / 2);
    wgmma_wait_group<0>();
    scores.start();
    score(low, 0, scales, scores), score(high, 1, scales, scores);
    s32 key = tile.from * PAGE;  // the first of a block
    mask(rows, key, scores);
    for (const s32 end = tile.blocks * PAGE;;) {
      const bool last = key + PAGE == end;
      const u32 values = codes + CODES, released = shared.empty + 8 * stage;
      Sums own[2];
      const u32 thread = own_thread() % 128, row = thread / 4 % 8;
      const WeightsPlace place{queries + QUERIES + (thread / 32 * 16 + row) * D + thread % 4 * 4, row};
      weights_of(scores, scales, rows, key, own, place);
      key += PAGE;
      fence_proxy_async();
      __syncwarp();  // wgmma reads the 16 rows of a warp for that warp
      s32 products[64];
      multiply<u8>(products, w, values);
      f32 f[2][2];
      add(rows.part[0], own[0], f[0]), add(rows.part[1], own[1], f[1]);
      if (!last) {
        if (++stage == STAGES) stage = 0, parity ^= 1;
        codes = shared_address(shared.codes) + stage * 2 * CODES, scales = shared.scales + stage * BLOCK_SCALES + 2 * c;
        mbarrier_wait(shared.full + 8 * stage, parity);
      }
      multiply<s8>(low, q, codes);  // behind the last block the same again, whose scores are not used
      wgmma_wait_group<1>();
      shift(products);
      multiply<s8>(products, w + QUERIES, values, true);
      wgmma_wait_group<1>();
      scores.start();
      score(low, 0, scales, scores);
      wgmma_wait_group<0>();
      __syncwarp();  // all lanes have read their scales
      if (lane == 0) mbarrier_arrive(released);
      add_products(sum, products, 0, f);
      multiply<s8>(high, q, codes + CODES / 2);
      add_products(sum, products, 1, f);
      if (last || key % (CHUNK * PAGE) == 0) add_chunk(rows, sum, whole);
      if (!last && key % (CHUNK * PAGE) == 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          whole[32 * i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
          sum[4 * i] = sum[4 * i + 1] = sum[4 * i + 2] = sum[4 * i + 3] = 0.0f;
        }
      }
      wgmma_wait_group<0>();
      if (last) break;
      score(high, 1, scales, scores);
      mask(rows, key, scores);
    }
  }
  __syncwarp();
  store(p, shared.rows + warp * 16, sum, (u8*)(shared.whole + warp * (WARP_SUMS / 4)));
}

// Copies the scales of the blocks; one warp.
DEVICE void produce_scales(const Attention& p, const Tile& tile, s32 head, const Shared& shared) {
  const s32 lane = threadIdx.x % 32;
  u32 stage = 0, parity = 1;
#pragma unroll 1
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
    s32 m = max(max(__float_as_int(v.x), __float_as_int(v.y)), max(__float_as_int(v.z), __float_as_int(v.w)));
    f32 unit;
    weights_unit(__int_as_float(__reduce_max_sync(~0u, m)), m, unit);
    *(float4*)(to + 2 * PAGE) = make_float4(mul_rn(v.x, unit), mul_rn(v.y, unit), mul_rn(v.z, unit), mul_rn(v.w, unit));
    if (lane < 8) to[3 * PAGE - 3 * lane] = __int_as_float(m);
    mbarrier_arrive(shared.full + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Requests the codes of the blocks; one thread.
DEVICE void produce_codes(const Attention& p, const Tile& tile, s32 head, const Shared& shared, const TensorMap& k_map,
                          const TensorMap& v_map) {
  u32 stage = 0, parity = 1;
#pragma unroll 1
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
  shared.scales = (f32*)(shared.queries + WARPGROUPS * 3 * QUERIES);
  shared.rows = (Facts*)(shared.scales + STAGES * BLOCK_SCALES);
  shared.full = shared_address(shared.rows + ROWS), shared.empty = shared.full + 8 * STAGES;
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
  static_assert(24 + WARPGROUPS * 240 <= (1 + WARPGROUPS) * 168, "with more than the block began with, warps wait forever");
  if (warpgroup == 0) {
    setmaxnreg_dec<24>();
    if (threadIdx.x / 32 == 1) produce_scales(p, tile, head, shared);
    if (threadIdx.x == 0) produce_codes(p, tile, head, shared, k_map, v_map);
  } else {
    setmaxnreg_inc<240>();
    consume(p, tile, head, shared);
  }
}
