// The int8 product for few tokens, limited by weight bandwidth.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) (w[n, k] - zw[n])); sum_k a[m, k] w[n, k] is exact in s32
//
// Data: weights: global memory -> a ring of stages in shared memory (TMA) -> wgmma, both operands from shared memory ->
// sums in registers -> staging in shared memory -> global memory. Codes: global memory -> the same ring; or activation:
// global memory -> registers -> codes of all K in shared memory.
//
// The operands are swapped: 64 rows of w are the M side of wgmma and the tokens its N side, so a tile is 8 `atoms` rows of
// w by all tokens. Rows are divided evenly: with as many tiles as multiprocessors, each multiprocessor streams its share
// of w once, for any n. Or tiles have 64 rows and are fewer, so that fewer blocks load the codes. Rows of a product beyond
// the tile hold whatever follows it in shared memory; no other row's sum depends on them, and they are never written.
//
// One producer warp loads w and another the codes; one or two consumer warpgroups multiply. 64 KB of w in flight per
// multiprocessor keep the memory busy if all load, and up to 112 KB if fewer do; more is no faster. The next kernel
// may start when the last loads of w are requested.
//
// Variants.
//   CLUSTER > 1: blocks of a cluster take parts of the k of one tile and send each other their sums. Sums are exact in
//   s32, so neither split nor order changes the bits. It wins if w has few rows and a long k.
//   Source: the codes come from memory (`Loaded`), or each block quantizes a floating activation while its first weights
//   are in flight (`Quantized`), which gives the bits of a separate kernel without its launch. `Quantized` wins for one or
//   two short tokens, where quantizing in every block ends before the first weights have arrived; `Loaded` wins for more.
//
//   Zero points: the sums of w, where a has zero points, and of a, where w has, are products with rows of ones. They take
//   part of the time in which the products wait for w, and each thread finds the sums that it needs in its own registers.
//
// Flags: TOKENS (8, 16, 32, 64, 128), GROUPS and TALL (consumer warpgroups, and products of 64 rows for each), CHUNKS (of
// 128 bytes of k in a stage), CLUSTER, SKUDA_CODE, SKUDA_WEIGHT, SKUDA_OUT, SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1:
// of a, 2: of w, 3: of both; not with clusters). The launch gives 8 atoms <= 64 GROUPS TALL, and one tile for each cluster
// where CLUSTER > 1. For `Quantized`: SKUDA_DATA, and ROWS <= TOKENS = 8, the most tokens.
#pragma once
#include "hopper.cuh"
#include "layer.cuh"

enum {
  ATOM = 1024,                // 8 rows of 128 bytes
  CODES_CHUNK = TOKENS * 128,
  CONSUMERS = 128 * GROUPS,
#ifdef ROWS
  QUANTIZERS = 512,           // threads that quantize: all but the warp that loads w
  THREADS = QUANTIZERS + 32,
#else
  QUANTIZERS = CONSUMERS,
  THREADS = CONSUMERS + 64,
#endif
  SIZE = sizeof(SKUDA_OUT),
  UNIT = SIZE == 1 ? 8 : 16,  // bytes of a store: 8 rows of w, or 4
  WIDTH = UNIT / SIZE,
  PITCH = 16 * SIZE + 16,     // between tokens in staging, where a warp has 16 rows: banks differ
  SLAB = TOKENS == 8 || SIZE == 4 ? 8 : 16,  // tokens that a warp stages at once: one unit per lane
  SLABS = TOKENS / SLAB,
  STAGING = CONSUMERS / 32 * SLAB * PITCH,
  SLOTS = (TALL * SLABS + CLUSTER - 1) / CLUSTER,  // slabs that a block of a cluster finishes
  QUADS = SLAB / 8,                                  // 16 bytes of a thread's sums in a slab
  SUMS = CLUSTER > 1 ? SLOTS * CLUSTER * QUADS * CONSUMERS * 16 : 0,
  SCALE_SETS = CLUSTER > 1 ? SLOTS : TALL,
  ONES = W_SHIFTED ? 8 * ATOM : A_SHIFTED ? ATOM : 0  // as w's side of a product has rows, or a's
};
static_assert(CLUSTER == 1 || SKUDA_ZERO_POINTS == 0, "sums of codes are those of all k");

struct Ring {  // position in the ring of stages
  u32 stage, parity, stages;
  DEVICE void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

__device__ __noinline__ f32 curved(f32 v) { return activated<SKUDA_OUT>(v, SKUDA_EPILOGUE); }

// Writes a slab: a warp's 16 rows from `row` by SLAB tokens from `token`, each token's results contiguous. Scales, biases
// and zero points are those of the thread's two rows of w; sums of codes lie as those of products with ones.
template <class Rows>
DEVICE void write_slab(const s32 (&d)[4 * QUADS], const s32 (&a_sums)[4 * QUADS], const s32 (&w_sums)[4],
                       const Epilogue& p, s64 k, u8* staging, const f32* act_scales, const f32 (&sw)[2],
                       const f32 (&bias)[2], const s32 (&zw)[2], s64 row, s64 end, s64 token, bool units,
                       const Segment<f32>& codes) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int at = 8 * i + 2 * (lane % 4);
    const float2 sa = *(const float2*)(act_scales + at);
    int2 za = make_int2(0, 0);
    if (A_SHIFTED) za = *(const int2*)(act_scales + TOKENS + at);
    Row<Rows> rows[2] = {{sa.x, za.x, 0}, {sa.y, za.y, 0}};
    if (W_SHIFTED) {
      const typename Rows::Sum length = k;
      rows[0].sum = a_sums[4 * i] - length * za.x, rows[1].sum = a_sums[4 * i + 1] - length * za.y;
    }
    Result v[4];
    SKUDA_OUT y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto sum = shifted(d[4 * i + j], rows[j % 2], w_sums[j / 2 * 2], zw[j / 2]);
      v[j] = finished(sum, j % 2 ? sa.y : sa.x, sw[j / 2], bias[j / 2], Result());
      if (CURVED) v[j] = curved(v[j]);
    }
    rounded(v, codes, y);
#pragma unroll
    for (int j = 0; j < 4; ++j) *(SKUDA_OUT*)(staging + (at + j % 2) * PITCH + (lane / 4 + j / 2 * 8) * SIZE) = y[j];
  }
  __syncwarp();
  if (units) {
    const int per_token = 16 / WIDTH, t = lane / per_token, c = lane % per_token * WIDTH;
    if (t < SLAB && token + t < p.m && row + c < end) {
      const u8* const from = staging + t * PITCH + c * SIZE;
      SKUDA_OUT* const to = p.output + (token + t) * p.output_leading + row + c;
      if (UNIT == 16) *(uint4*)to = *(const uint4*)from;
      if (UNIT == 8) *(uint2*)to = *(const uint2*)from;
    }
  } else {
    for (int t = lane / 16; t < SLAB && token + t < p.m; t += 2) {
      const s64 column = row + lane % 16;
      const u8* const from = staging + t * PITCH + lane % 16 * SIZE;
      if (column < end) p.output[(token + t) * p.output_leading + column] = *(const SKUDA_OUT*)from;
    }
  }
  __syncwarp();
}

// The block of rank u modulo CLUSTER finishes slab u of a tile: every other block sends it its sums.
DEVICE void exchange(const s32 (&d)[TALL][TOKENS / 2], u8* sums, u32 rank) {
  const u32 mine = shared_address(sums) + threadIdx.x * 16;
  cluster_wait();  // every block of the cluster runs
#pragma unroll
  for (int u = 0; u < TALL * SLABS; ++u) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int at = u % SLABS * SLAB / 2 + 4 * i;
      const s32 four[4] = {d[u / SLABS][at], d[u / SLABS][at + 1], d[u / SLABS][at + 2], d[u / SLABS][at + 3]};
      store16_at(mine + ((u / CLUSTER * CLUSTER + rank) * QUADS + i) * (CONSUMERS * 16), u % CLUSTER, four);
    }
  }
  cluster_arrive();
  cluster_wait();
}

// The part of k that a step has. Where there are many codes whose rows do not begin at lines of the cache, blocks begin at
// different parts: otherwise all ask L2 for the same lines of codes at the same time, which took up to a tenth longer.
struct Turn {
  u32 by, begin, end;
  DEVICE static Turn of(u32 begin, u32 end, s64 k, u32 cluster, u32 clusters) {
    const bool turns = TOKENS == 32 && CLUSTER < 4 && gridDim.y == 1 && k % 128 != 0;
    return {turns ? (end - begin) * cluster / clusters : 0, begin, end};
  }
  DEVICE u32 at(u32 step) const { return step + by < end ? step + by : step + by - (end - begin); }
};

DEVICE void quantizers_sync() { threads_sync<QUANTIZERS>(1); }

// Source with codes and scales in global memory.
template <class Rows_> struct Loaded {
  enum { FUSED = 0 };
  typedef Rows_ Rows;
  const TensorMap* map;  // of [m, k] codes, in boxes of TOKENS rows by 128 bytes
  Rows rows;

  DEVICE void load(u32 to, u32 chunk, s64 token0, u32 barrier) const {
    load_box(to, map, (s32)(chunk * 128), (s32)token0, barrier);
  }
  DEVICE void prepare(u8*, f32* scales, s64 token0, s64 m, s64, u32, u32, bool) const {
    for (u32 t = threadIdx.x; t < TOKENS; t += CONSUMERS) {
      scales[t] = rows.within(token0 + t, m);
      if (A_SHIFTED) ((s32*)scales)[TOKENS + t] = token0 + t < m ? (s32)rows.zero_point_of(token0 + t) : 0;
    }
  }
};

#ifdef ROWS
typedef SKUDA_DATA Data;
DEVICE uint2 codes_of(const u32 (&q)[8]) {
  return make_uint2(four_bytes(q[0], q[1], q[2], q[3]), four_bytes(q[4], q[5], q[6], q[7]));
}
DEVICE uint2 codes_of(const u32 (&q)[4]) { return make_uint2(four_bytes(q[0], q[1], q[2], q[3]), 0); }
__device__ __noinline__ uint2 slow_codes(uint4 chunk, f32 s, s32 q_min, s32 q_max) {
  f32 x[Width<Data>::count];
  u32 q[Width<Data>::count];
  Chunk<Data>::unpack(chunk, x);
#pragma unroll
  for (int j = 0; j < Width<Data>::count; ++j) q[j] = slow_code(x[j], s, 0, q_min, q_max);
  return codes_of(q);
}

// Source that quantizes a floating activation by dynamic range, symmetric, per token.
struct Quantized {
  enum { FUSED = 1, V = Width<Data>::count, DEEP = 8 / ROWS };
  typedef RowScales<f32> Rows;
  const Data* activation;  // [m, k], leading elements apart, rows of whole 16 bytes
  s64 leading;
  u8* codes_out;   // [m, k] or null
  f32* scale_out;  // [m] or null
  s32 q_min, q_max;

  DEVICE void load(u32, u32, s64, u32) const {}
  // Chunks of 128 codes from `begin` to `end`, each token's 16-byte units xored with its number, as TMA does.
  DEVICE void prepare(u8* codes, f32* scales, s64, s64 m, s64 k, u32 begin, u32 end, bool keep) const {
    const u32 units = (u32)(k / V), thread = threadIdx.x < CONSUMERS ? threadIdx.x : threadIdx.x - 32;
    u32* const peaks = (u32*)scales;  // the bits of floats >= 0 have the same order
    f32 peak[ROWS];
#pragma unroll
    for (int t = 0; t < ROWS; ++t) peak[t] = 0;
#pragma unroll 1
    for (u32 c = thread; c < units; c += DEEP * QUANTIZERS) {
      uint4 x[DEEP][ROWS];
#pragma unroll
      for (int i = 0; i < DEEP * ROWS; ++i) {
        const u32 at = c + i / ROWS * QUANTIZERS;
        x[i / ROWS][i % ROWS] = make_uint4(0, 0, 0, 0);
        if (i % ROWS < m && at < units) x[i / ROWS][i % ROWS] = *(const uint4*)(activation + i % ROWS * leading + at * V);
      }
#pragma unroll
      for (int i = 0; i < DEEP * ROWS; ++i) {
        f32 v[V];
        Chunk<Data>::unpack(x[i / ROWS][i % ROWS], v);
#pragma unroll
        for (int j = 0; j < V; ++j) peak[i % ROWS] = fmaxf(peak[i % ROWS], fabsf(v[j]));  // NaN is skipped
      }
    }
    if (thread < TOKENS) peaks[thread] = 0;
    quantizers_sync();
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
      const u32 over_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(peak[t]));
      if (thread % 32 == 0) atomicMax(peaks + t, over_warp);
    }
    quantizers_sync();
    f32 s[ROWS];
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
      s[t] = divide(scales[t], (f32)q_max);
      if (s[t] == 0.0f) s[t] = 1.0f;
    }
    quantizers_sync();
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
      if (thread != t) continue;
      scales[t] = s[t];
      if (keep && scale_out != nullptr && t < m) scale_out[t] = s[t];
    }
    const u32 last = end * (128 / V) < units ? end * (128 / V) : units;
#pragma unroll 1
    for (u32 c = begin * (128 / V) + thread; c < last; c += QUANTIZERS) {
      uint4 x[ROWS];
#pragma unroll
      for (int t = 0; t < ROWS; ++t) {
        x[t] = make_uint4(0, 0, 0, 0);
        if (t < m) x[t] = *(const uint4*)(activation + t * leading + c * V);
      }
      const u32 column = c * V - begin * 128, unit = column / 16 % 8;
#pragma unroll
      for (int t = 0; t < ROWS; ++t) {
        if (t >= m) continue;
        const Segment<f32> g = Segment<f32>::make(s[t], 0, q_min, q_max);
        f32 v[V];
        u32 q[V];
        Chunk<Data>::unpack(x[t], v);
        uint2 packed;
        if (g.quick && all_finite(v) && q_min <= -q_max) {
          quick_codes_within(v, g, q);
          packed = codes_of(q);
        } else {
          packed = slow_codes(x[t], s[t], q_min, q_max);
        }
        put(codes + column / 128 * CODES_CHUNK + t * 128 + (unit ^ t) * 16 + column % 16, packed);
        if (keep && codes_out != nullptr) put(codes_out + t * k + c * V, packed);
      }
    }
    if (W_SHIFTED) {  // beyond k, w is 0, but ones are not
#pragma unroll 1
      for (u32 c = units + thread; c < end * (128 / V); c += QUANTIZERS) {
        const u32 column = c * V - begin * 128, unit = column / 16 % 8;
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
          put(codes + column / 128 * CODES_CHUNK + t * 128 + (unit ^ t) * 16 + column % 16, make_uint2(0, 0));
        }
      }
    }
    show_stores();
  }
  static DEVICE void put(u8* to, const uint2& packed) {
    if (V == 8) *(uint2*)to = packed;
    if (V == 4) *(u32*)to = packed.x;
  }
};
#endif

template <class Source>
DEVICE void streamed_linear(const Source& source, const TensorMap& w_map, const Epilogue& p, const s32* zero_points, s64 k,
                            u32 atoms, u32 stages) {
  extern __shared__ u8 unaligned[];
  u8* const aligned = unaligned + (-shared_address(unaligned) & 1023);
  u8* const shared = aligned + ONES;
  const u32 w_chunk = atoms * ATOM, w_stage = CHUNKS * w_chunk, a_stage = CHUNKS * CODES_CHUNK;
  const u32 steps = (u32)((k + 128 * CHUNKS - 1) / (128 * CHUNKS));
  const u32 a_count = Source::FUSED ? (steps + CLUSTER - 1) / CLUSTER : stages;  // all codes at once, or a ring
  u8* const staging = shared + stages * w_stage + a_count * a_stage;
  u8* const sums = staging + STAGING;
  f32* const act_scales = (f32*)(sums + SUMS);
  const u32 w_stages = shared_address(shared), a_stages = w_stages + stages * w_stage;
  const u32 full = shared_address(act_scales) + 4 * TOKENS * (1 + A_SHIFTED), empty = full + 8 * stages;
  const s64 token0 = (s64)blockIdx.y * TOKENS;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 first = blockIdx.x / CLUSTER, hop = gridDim.x / CLUSTER, tiles = (u32)((p.n + 8 * atoms - 1) / (8 * atoms));
  const u32 begin = steps * rank / CLUSTER, end = steps * (rank + 1) / CLUSTER;
  const Turn turn = Turn::of(begin, end, k, first, hop);
  if (lane == 0) {  // one lane per warp, because lanes with different addresses are served one by one
    if (warp == CONSUMERS / 32) prefetch_map(&w_map);
#pragma unroll 1
    for (u32 s = warp; s < stages; s += THREADS / 32) {
      barrier_make(full + 8 * s, Source::FUSED ? 1 : 2);
      barrier_make(empty + 8 * s, CONSUMERS / 32);
    }
  }
  barriers_made();
  __syncthreads();
  if (CLUSTER > 1) cluster_arrive();  // awaited before anything is sent

  Ring at{0, 0, stages};
  if (warp == CONSUMERS / 32) {
    if (lane != 0) return;
    wait_for_previous_kernel();
    for (u32 tile = first; tile < tiles; tile += hop) {
#pragma unroll 1
      for (u32 step = begin; step < end; ++step, at.next()) {
        barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        barrier_expect(full + 8 * at.stage, w_stage);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
          load_box(w_stages + at.stage * w_stage + c * w_chunk, &w_map, (s32)((turn.at(step) * CHUNKS + c) * 128),
                   (s32)(tile * 8 * atoms), full + 8 * at.stage);
        }
      }
    }
    let_next_kernel_start();
    return;
  }
  if (!Source::FUSED && warp > CONSUMERS / 32) {
    if (lane != 0) return;
    wait_for_previous_kernel();
    for (u32 tile = first; tile < tiles; tile += hop) {
#pragma unroll 1
      for (u32 step = begin; step < end; ++step, at.next()) {
        barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        barrier_expect(full + 8 * at.stage, a_stage);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
          source.load(a_stages + at.stage * a_stage + c * CODES_CHUNK, turn.at(step) * CHUNKS + c, token0, full + 8 * at.stage);
        }
      }
    }
    return;
  }

  const u32 group = warp / 4;
  if (ONES > 0) {
    for (int i = threadIdx.x; i < ONES / 4 && threadIdx.x < CONSUMERS; i += CONSUMERS) ((u32*)aligned)[i] = 0x01010101u;
    show_stores();
  }
  const u64 ones = rows_of_128(shared_address(aligned));
  const bool units = ((u64)p.output | (u64)p.output_leading * SIZE | (u64)p.n * SIZE) % UNIT == 0;
  wait_for_previous_kernel();
  source.prepare(shared + stages * w_stage, act_scales, token0, p.m, k, begin * CHUNKS, end * CHUNKS, first == 0);
  quantizers_sync();
  if (warp > CONSUMERS / 32) return;
  Segment<f32> codes;
  if (CodeRange<SKUDA_OUT>::most != 0) codes = p.codes(CodeRange<SKUDA_OUT>::least, CodeRange<SKUDA_OUT>::most);
  for (u32 tile = first; tile < tiles; tile += hop) {
    const s64 row0 = (s64)tile * (8 * atoms), row_end = row0 + 8 * atoms < p.n ? row0 + 8 * atoms : p.n;
    const s64 own = row0 + group * TALL * 64 + warp % 4 * 16;
    f32 sw[SCALE_SETS][2], bias[SCALE_SETS][2];
    s32 zw[SCALE_SETS][2];
#pragma unroll
    for (int i = 0; i < 2 * SCALE_SETS; ++i) {  // requested now, used after the products
      const s64 row = own + (CLUSTER > 1 ? (i / 2 * CLUSTER + rank) / SLABS : i / 2) * 64 + i % 2 * 8 + lane / 4;
      sw[i / 2][i % 2] = !IsSum<SKUDA_OUT>::value && row < row_end ? real_at(p.weight_scale, p.weight_scale_is, row, 0.0f) : 0.0f;
      bias[i / 2][i % 2] = row < row_end && p.bias != nullptr ? real_at(p.bias, p.bias_is, row, 0.0f) : 0.0f;
      zw[i / 2][i % 2] = W_SHIFTED && row < row_end ? zero_points[row] : 0;
    }
    s32 d[TALL][TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TALL * TOKENS / 2; ++i) d[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0;
    s32 w_sums[TALL][4], a_sums[TOKENS / 2];  // every column, or row, of a product with ones is the same
#pragma unroll
    for (int i = 0; i < TALL * 4; ++i) w_sums[i / 4][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) a_sums[i] = 0;
    u32 before = 0;
#pragma unroll 1
    for (u32 step = begin; step < end; ++step, at.next()) {
      barrier_wait(full + 8 * at.stage, at.parity);
      const u64 w = rows_of_128(w_stages + at.stage * w_stage + group * TALL * (8 * ATOM));
      const u64 a = rows_of_128(a_stages + (Source::FUSED ? step - begin : at.stage) * a_stage);
      products_begin();
#pragma unroll
      for (int i = 0; i < CHUNKS * 4; ++i) {
#pragma unroll
        for (int b = 0; b < TALL; ++b) {
          const u64 w_part = w + i / 4 * (w_chunk / 16) + b * (8 * ATOM / 16) + i % 4 * 2;
          const u64 a_part = a + i / 4 * (CODES_CHUNK / 16) + i % 4 * 2;
          Product<TOKENS, SKUDA_WEIGHT, SKUDA_CODE>::add(d[b], w_part, a_part, 1);
          if (A_SHIFTED) Product<8, SKUDA_WEIGHT, SKUDA_CODE>::add(w_sums[b], w_part, ones, 1);
          if (W_SHIFTED && b == 0) Product<TOKENS, SKUDA_WEIGHT, SKUDA_CODE>::add(a_sums, ones, a_part, 1);
        }
      }
      products_commit();
      products_wait<1>();
      if (step > begin && lane == 0) barrier_arrive(empty + 8 * before);
      before = at.stage;
    }
    products_wait<0>();
    if (end > begin && lane == 0) barrier_arrive(empty + 8 * before);
    if (CLUSTER > 1) exchange(d, sums, rank);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const u32 u = slot * CLUSTER + rank, column = u % SLABS * SLAB;
      const s64 token = token0 + column;
      const s64 row = own + u / SLABS * 64;
      if (u >= TALL * SLABS || row >= row_end || token >= p.m) continue;
      s32 slab[4 * QUADS];
#pragma unroll
      for (int i = 0; i < 4 * QUADS; ++i) slab[i] = CLUSTER > 1 ? 0 : d[slot / SLABS % TALL][slot % SLABS * SLAB / 2 + i];
#pragma unroll
      for (int i = 0; CLUSTER > 1 && i < CLUSTER * QUADS; ++i) {
        const int4 four = *(const int4*)(sums + ((slot * CLUSTER * QUADS + i) * CONSUMERS + threadIdx.x) * 16);
        slab[i % QUADS * 4] += four.x, slab[i % QUADS * 4 + 1] += four.y;
        slab[i % QUADS * 4 + 2] += four.z, slab[i % QUADS * 4 + 3] += four.w;
      }
      s32 of_tokens[4 * QUADS];
#pragma unroll
      for (int i = 0; i < 4 * QUADS; ++i) of_tokens[i] = a_sums[slot % SLABS * SLAB / 2 + i];
      const int scale = CLUSTER > 1 ? slot : slot / SLABS;
      write_slab<typename Source::Rows>(slab, of_tokens, w_sums[slot / SLABS % TALL], p, k, staging + warp * SLAB * PITCH,
                                        act_scales + column, sw[scale], bias[scale], zw[scale], row, row_end, token, units,
                                        codes);
    }
  }
}

#define STREAMED_PARAMETERS EPILOGUE_PARAMETERS, s32 atoms, s32 stages
#define STREAMED_GIVEN EPILOGUE, weight_zero_point, k, (u32)atoms, (u32)stages
// Where a launch has many clusters, two of their blocks share a multiprocessor, so that all run at once.
#define STREAMED_KERNEL extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, CLUSTER > 1 ? 2 : 1)
