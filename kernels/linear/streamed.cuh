// The int8 product for few tokens, limited by the bandwidth of the weights.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) (w[n, k] - zw[n])); sum_k a[m, k] w[n, k] is exact in s32
//
//   source           where the codes of a come from (Loaded, Quantized)
//   w_map            tensor map of w [n, k] SKUDA_WEIGHT
//   p                scales of w, bias, output [m, n] SKUDA_OUT (epilogue.cuh)
//   zero_points      [n] s32 of w, or null
//   atoms            rows of w in a tile, divided by 8
//   stages           stages of the ring
//
// Data: weights: global memory -> TMA loads them into a ring of stages in shared memory -> wgmma reads both operands
// from there -> sums in registers -> staging in shared memory -> global memory. Codes: global memory -> the same ring.
// Or activation: global memory -> registers -> codes of all K in shared memory.
//
// The operands are swapped: 64 rows of w are the M side of wgmma, and the tokens are its N side. A tile is 8 `atoms`
// rows of w by TOKENS tokens. The rows are divided evenly: with as many tiles as multiprocessors, each multiprocessor
// streams its part of w once, for any n. Or a tile has 64 or 128 rows and fewer blocks load the codes. wgmma rows
// beyond the tile read whatever follows it in shared memory: no other row depends on them, and they are never written.
//
// One producer warp loads w and another one the codes; one or two consumer warpgroups run wgmma. 64 KB of w in flight
// for each multiprocessor keep the memory busy if all of them load, and up to 112 KB if fewer do; more is no faster.
// The next kernel may start when the last loads of w are requested.
//
// Variants.
//   Split-K (SPLIT_K > 1): the blocks of a cluster take parts of the K of one tile and exchange their sums through
//   distributed shared memory. Sums are exact in s32, so neither the split nor the order changes the bits. It wins if w
//   has few rows and a long K.
//   Source: the codes come from memory (`Loaded`), or each block quantizes a floating activation while its first
//   weights are in flight (`Quantized`). `Quantized` gives the bits of a separate kernel without its launch. It wins
//   for one or two short tokens, where quantization ends before the first weights arrive. Zero points: wgmma with rows
//   of ones computes the sums of the codes of w, if a has zero points, and of a, if w has. It uses time in which the
//   mainloop waits for w, and each thread finds the sums that it needs in its own registers.
//   Codes of 16 bits: the halves of a tile's tokens are as many columns of wgmma again, so w is read once for both. If w
//   has them, too, its low halves are multiplied by the high halves of the codes.
//
// Flags: TOKENS (8, 16, 32, 64, 128), WARPGROUPS (of consumers, 64 rows of w each), K_BLOCKS (of 128 bytes of K in a
// stage), SPLIT_K, SKUDA_CODE, SKUDA_WEIGHT, SKUDA_OUT, SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a, 2: of w,
// 3: of both; not with SPLIT_K > 1). The launch gives 8 atoms <= 64 WARPGROUPS, and one tile for each cluster if
// SPLIT_K > 1. For `Quantized`: SKUDA_DATA, and QUANTIZED_TOKENS <= TOKENS = 8.
#pragma once
#include "hopper.cuh"
#include "epilogue.cuh"
#include "nonfinite.cuh"

enum {
  ATOM = 1024,                // the swizzle's: 8 rows of 128 bytes
  COLUMNS = TOKENS * A_HALVES,  // of wgmma
  CODES_K_BLOCK = COLUMNS * 128,
  CONSUMERS = 128 * WARPGROUPS,
#ifdef QUANTIZED_TOKENS
  QUANTIZERS = 512,           // threads that quantize: all but the warp that loads w
  THREADS = QUANTIZERS + 32,
#else
  QUANTIZERS = CONSUMERS,
  THREADS = CONSUMERS + 64,
#endif
  SIZE = sizeof(SKUDA_OUT),
  UNIT = SIZE == 1 ? 8 : 16,  // bytes of a store: 8 rows of w, or 4
  WIDTH = UNIT / SIZE,
  STAGING_PITCH = 16 * SIZE + 16,            // bytes between staged tokens, for each of which a warp has 16 rows: other banks
  SLAB = TOKENS == 8 || SIZE >= 4 ? 8 : 16,  // tokens that a warp stages at once: mostly one unit for each lane
  SLABS = TOKENS / SLAB,
  STAGING = CONSUMERS / 32 * SLAB * STAGING_PITCH,
  OWN_SLABS = (SLABS + SPLIT_K - 1) / SPLIT_K,  // slabs that a block of a cluster finishes
  QUADS = SLAB / 8,                             // 16 bytes of a thread's sums in a slab
  SUMS = SPLIT_K > 1 ? OWN_SLABS * SPLIT_K * QUADS * A_HALVES * CONSUMERS * 16 : 0,
  ONES = W_ZERO_POINTS ? 8 * ATOM : A_ZERO_POINTS ? ATOM : 0  // as many rows of ones as an operand of wgmma has
};
static_assert(SPLIT_K == 1 || SKUDA_ZERO_POINTS == 0, "the sums of codes are those of all K");

struct PipelineState {  // a position in the ring of stages, and the parity of its mbarriers' phase
  u32 stage, parity, stages;
  DEVICE void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Epilogue of a slab: a warp's 16 rows from `row` on by SLAB tokens from `token` on; the results of a token are
// contiguous. Scales, biases and zero points are those of the thread's two rows of w; sums of codes lie as wgmma with
// ones leaves them.
template <class Rows>
DEVICE void store_slab(const s32 (&d)[A_HALVES][4 * QUADS], const s32 (&a_sums)[4 * QUADS], const s32 (&w_sums)[4],
                       const Epilogue& p, s64 k, u8* staging, const f32* act_scales, const f32 (&sw)[2],
                       const f32 (&bias)[2], const s32 (&zw)[2], s64 row, s64 end, s64 token, bool units,
                       const Segment<f32>& codes) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int at = 8 * i + 2 * (lane % 4);
    const float2 sa = *(const float2*)(act_scales + at);
    int2 za = make_int2(0, 0);
    if (A_ZERO_POINTS) za = *(const int2*)(act_scales + TOKENS + at);
    Row<Rows> rows[2] = {{sa.x, za.x, 0}, {sa.y, za.y, 0}};
    if (W_ZERO_POINTS) {
      const typename Rows::Sum length = k;
      rows[0].sum = a_sums[4 * i] - length * za.x, rows[1].sum = a_sums[4 * i + 1] - length * za.y;
    }
    Result v[4];
    SKUDA_OUT y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (A_HALVES > 1) {
        v[j] = apply_epilogue(joined(d[0][4 * i + j], d[1][4 * i + j]), j % 2 ? sa.y : sa.x, sw[j / 2], bias[j / 2], Result());
      } else {
        const auto sum = subtract_zero_points(d[0][4 * i + j], rows[j % 2], w_sums[j / 2 * 2], zw[j / 2]);
        v[j] = apply_epilogue(sum, j % 2 ? sa.y : sa.x, sw[j / 2], bias[j / 2], Result());
      }
      if (CURVED) v[j] = curved<SKUDA_OUT>(v[j], per_unit(codes));
    }
    rounded(v, codes, y);
#pragma unroll
    for (int j = 0; j < 4; ++j) *(SKUDA_OUT*)(staging + (at + j % 2) * STAGING_PITCH + (lane / 4 + j / 2 * 8) * SIZE) = y[j];
  }
  __syncwarp();
  if (units) {
    const int per_token = 16 / WIDTH, c = lane % per_token * WIDTH;
#pragma unroll
    for (int first = 0; first < (SIZE == 8 ? SLAB : 1); first += 32 / per_token) {
      const int t = first + lane / per_token;
      if (t >= SLAB || token + t >= p.m || row + c >= end) continue;
      const u8* const from = staging + t * STAGING_PITCH + c * SIZE;
      SKUDA_OUT* const to = p.output + (token + t) * p.output_leading + row + c;
      if (UNIT == 16) *(uint4*)to = *(const uint4*)from;
      if (UNIT == 8) *(uint2*)to = *(const uint2*)from;
    }
  } else {
    for (int t = lane / 16; t < SLAB && token + t < p.m; t += 2) {
      const s64 column = row + lane % 16;
      const u8* const from = staging + t * STAGING_PITCH + lane % 16 * SIZE;
      if (column < end) p.output[(token + t) * p.output_leading + column] = *(const SKUDA_OUT*)from;
    }
  }
  __syncwarp();
}

// Block u % SPLIT_K of the cluster finishes slab u of a tile: every other block stores its sums there.
DEVICE void exchange_sums(const s32 (&d)[COLUMNS / 2], u8* sums, u32 rank) {
  const u32 mine = shared_address(sums) + threadIdx.x * 16;
  cluster_wait();  // every block of the cluster runs
#pragma unroll
  for (int u = 0; u < SLABS; ++u) {
#pragma unroll
    for (int i = 0; i < QUADS * A_HALVES; ++i) {
      const int at = i / QUADS * (TOKENS / 2) + u * SLAB / 2 + 4 * (i % QUADS);
      const s32 four[4] = {d[at], d[at + 1], d[at + 2], d[at + 3]};
      st_shared_cluster_v4(mine + ((u / SPLIT_K * SPLIT_K + rank) * (QUADS * A_HALVES) + i) * (CONSUMERS * 16), u % SPLIT_K, four);
    }
  }
  cluster_arrive();
  cluster_wait();
}

// The order in which a block takes the stages of its K. With many codes whose rows do not begin at lines of the cache,
// blocks begin at different stages: otherwise all of them ask L2 for the same lines at the same time, which took up to
// a tenth longer.
struct StageOrder {
  u32 first, begin, end;
  DEVICE static StageOrder of(u32 begin, u32 end, s64 k, u32 cluster, u32 clusters) {
    const bool rotates = TOKENS == 32 && SPLIT_K < 4 && gridDim.y == 1 && k % 128 != 0;
    return {rotates ? (end - begin) * cluster / clusters : 0, begin, end};
  }
  DEVICE u32 at(u32 step) const { return step + first < end ? step + first : step + first - (end - begin); }
};

DEVICE void quantizers_sync() { bar_sync<QUANTIZERS>(1); }

// A source with codes and scales in global memory.
template <class Rows_> struct Loaded {
  enum { FUSED = 0 };
  typedef Rows_ Rows;
  const TensorMap* map;  // of [m, k] codes, in boxes of TOKENS rows by 128 bytes
  Rows rows;

  DEVICE void load(u32 to, u32 k_block, s64 token0, s64 k, u32 barrier) const {
    const bool ends = A_HALVES > 1 && k_block * 128 >= k;  // what follows in the rows are the low halves
#pragma unroll
    for (int half = 0; half < A_HALVES; ++half) {
      const s32 x = ends ? 2 * (s32)k : (s32)(k_block * 128) + half * (s32)k;
      cp_async_bulk_tensor_2d(to + half * (TOKENS * 128), map, x, (s32)token0, barrier);
    }
  }
  DEVICE void prepare(u8*, f32* scales, s64 token0, s64 m, s64, u32, u32, bool) const {
    for (u32 t = threadIdx.x; t < TOKENS; t += CONSUMERS) {
      scales[t] = rows.within(token0 + t, m);
      if (A_ZERO_POINTS) ((s32*)scales)[TOKENS + t] = token0 + t < m ? (s32)rows.zero_point_of(token0 + t) : 0;
    }
  }
};

#ifdef QUANTIZED_TOKENS
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

// A source that quantizes a floating activation by dynamic range, symmetric, per token.
struct Quantized {
  enum { FUSED = 1, V = Width<Data>::count, COUNT = QUANTIZED_TOKENS, DEEP = 8 / COUNT };
  typedef RowScales<f32> Rows;
  const Data* activation;  // [m, k], leading elements apart, rows of whole 16 bytes
  s64 leading;
  u8* codes_out;   // [m, k] or null
  f32* scale_out;  // [m] or null
  s32 q_min, q_max;

  DEVICE void load(u32, u32, s64, s64, u32) const {}
  // Writes k-blocks `begin` to `end` of the codes, with the 128-byte swizzle that TMA applies.
  DEVICE void prepare(u8* codes, f32* scales, s64, s64 m, s64 k, u32 begin, u32 end, bool keep) const {
    const u32 units = (u32)(k / V), thread = threadIdx.x < CONSUMERS ? threadIdx.x : threadIdx.x - 32;
    u32* const peaks = (u32*)scales;  // the bits of floats >= 0 have the same order
    f32 peak[COUNT];
#pragma unroll
    for (int t = 0; t < COUNT; ++t) peak[t] = 0;
#pragma unroll 1
    for (u32 c = thread; c < units; c += DEEP * QUANTIZERS) {
      uint4 x[DEEP][COUNT];
#pragma unroll
      for (int i = 0; i < DEEP * COUNT; ++i) {
        const u32 at = c + i / COUNT * QUANTIZERS;
        x[i / COUNT][i % COUNT] = make_uint4(0, 0, 0, 0);
        if (i % COUNT < m && at < units) x[i / COUNT][i % COUNT] = *(const uint4*)(activation + i % COUNT * leading + at * V);
      }
#pragma unroll
      for (int i = 0; i < DEEP * COUNT; ++i) {
        f32 v[V];
        Chunk<Data>::unpack(x[i / COUNT][i % COUNT], v);
#pragma unroll
        for (int j = 0; j < V; ++j) peak[i % COUNT] = larger(peak[i % COUNT], fabsf(v[j]));
      }
    }
    if (thread < TOKENS) peaks[thread] = 0;
    quantizers_sync();
#pragma unroll
    for (int t = 0; t < COUNT; ++t) {
      const u32 over_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(peak[t]));
      if (thread % 32 == 0) atomicMax(peaks + t, over_warp);
    }
    quantizers_sync();
    f32 s[COUNT];
#pragma unroll
    for (int t = 0; t < COUNT; ++t) {
      s[t] = div_rn(largest_of(bits_of(scales[t])), (f32)q_max);
      if (s[t] == 0.0f) s[t] = 1.0f;
    }
    quantizers_sync();
#pragma unroll
    for (int t = 0; t < COUNT; ++t) {
      if (thread != t) continue;
      scales[t] = s[t];
      if (keep && scale_out != nullptr && t < m) scale_out[t] = s[t];
    }
    const u32 last = end * (128 / V) < units ? end * (128 / V) : units;
#pragma unroll 1
    for (u32 c = begin * (128 / V) + thread; c < last; c += QUANTIZERS) {
      uint4 x[COUNT];
#pragma unroll
      for (int t = 0; t < COUNT; ++t) {
        x[t] = make_uint4(0, 0, 0, 0);
        if (t < m) x[t] = *(const uint4*)(activation + t * leading + c * V);
      }
      const u32 column = c * V - begin * 128, unit = column / 16 % 8;
#pragma unroll
      for (int t = 0; t < COUNT; ++t) {
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
        put(codes + column / 128 * CODES_K_BLOCK + t * 128 + (unit ^ t) * 16 + column % 16, packed);
        if (keep && codes_out != nullptr) put(codes_out + t * k + c * V, packed);
      }
    }
    if (W_ZERO_POINTS) {  // beyond K w is 0, but ones are not
#pragma unroll 1
      for (u32 c = units + thread; c < end * (128 / V); c += QUANTIZERS) {
        const u32 column = c * V - begin * 128, unit = column / 16 % 8;
#pragma unroll
        for (int t = 0; t < COUNT; ++t) {
          put(codes + column / 128 * CODES_K_BLOCK + t * 128 + (unit ^ t) * 16 + column % 16, make_uint2(0, 0));
        }
      }
    }
    fence_proxy_async();
  }
  // Of two magnitudes; fmaxf skips a NaN.
  static DEVICE f32 larger(f32 a, f32 b) { return PROPAGATES ? number_of(max_of(bits_of(a), bits_of(b))) : fmaxf(a, b); }
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
  const u32 w_half = atoms * ATOM, w_k_block = W_HALVES * w_half, w_stage = K_BLOCKS * w_k_block, a_stage = K_BLOCKS * CODES_K_BLOCK;
  const u32 steps = (u32)((k + 128 * K_BLOCKS - 1) / (128 * K_BLOCKS));
  const u32 a_count = Source::FUSED ? (steps + SPLIT_K - 1) / SPLIT_K : stages;  // all codes of the block's K, or a ring
  u8* const staging = shared + stages * w_stage + a_count * a_stage;
  u8* const sums = staging + STAGING;
  f32* const act_scales = (f32*)(sums + SUMS);
  const u32 w_stages = shared_address(shared), a_stages = w_stages + stages * w_stage;
  const u32 full = shared_address(act_scales) + 4 * TOKENS * (1 + A_ZERO_POINTS), empty = full + 8 * stages;
  const s64 token0 = (s64)blockIdx.y * TOKENS;
  const u32 rank = SPLIT_K > 1 ? cluster_ctarank() : 0, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 first = blockIdx.x / SPLIT_K, hop = gridDim.x / SPLIT_K, tiles = (u32)((p.n + 8 * atoms - 1) / (8 * atoms));
  const u32 begin = steps * rank / SPLIT_K, end = steps * (rank + 1) / SPLIT_K;
  const StageOrder order = StageOrder::of(begin, end, k, first, hop);
  if (lane == 0) {  // one lane of each warp: lanes with different addresses are served one after another
    if (warp == CONSUMERS / 32) prefetch_tensormap(&w_map);
#pragma unroll 1
    for (u32 s = warp; s < stages; s += THREADS / 32) {
      mbarrier_init(full + 8 * s, Source::FUSED ? 1 : 2);
      mbarrier_init(empty + 8 * s, CONSUMERS / 32);
    }
  }
  fence_mbarrier_init();
  __syncthreads();
  if (SPLIT_K > 1) cluster_arrive();  // exchange_sums waits for it

  PipelineState at{0, 0, stages};
  if (warp == CONSUMERS / 32) {
    if (lane != 0) return;
    const u64 policy = l2_policy(gridDim.y == 1);
    griddepcontrol_wait();
    for (u32 tile = first; tile < tiles; tile += hop) {
#pragma unroll 1
      for (u32 step = begin; step < end; ++step, at.next()) {
        mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        mbarrier_arrive_expect_tx(full + 8 * at.stage, w_stage);
#pragma unroll
        for (u32 c = 0; c < K_BLOCKS; ++c) {
          const s32 x = (s32)((order.at(step) * K_BLOCKS + c) * 128), y = (s32)(tile * 8 * atoms);
          const u32 to = w_stages + at.stage * w_stage + c * w_k_block;
          cp_async_bulk_tensor_2d(to, &w_map, x, y, full + 8 * at.stage, policy);
          if (W_HALVES > 1) cp_async_bulk_tensor_2d(to + w_half, &w_map, x + (s32)k, y, full + 8 * at.stage, policy);
        }
      }
    }
    griddepcontrol_launch_dependents();
    return;
  }
  if (!Source::FUSED && warp > CONSUMERS / 32) {
    if (lane != 0) return;
    griddepcontrol_wait();
    for (u32 tile = first; tile < tiles; tile += hop) {
#pragma unroll 1
      for (u32 step = begin; step < end; ++step, at.next()) {
        mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        mbarrier_arrive_expect_tx(full + 8 * at.stage, a_stage);
#pragma unroll
        for (u32 c = 0; c < K_BLOCKS; ++c) {
          source.load(a_stages + at.stage * a_stage + c * CODES_K_BLOCK, order.at(step) * K_BLOCKS + c, token0, k, full + 8 * at.stage);
        }
      }
    }
    return;
  }

  const u32 group = warp / 4;
  if (ONES > 0) {
    for (int i = threadIdx.x; i < ONES / 4 && threadIdx.x < CONSUMERS; i += CONSUMERS) ((u32*)aligned)[i] = 0x01010101u;
    fence_proxy_async();
  }
  const u64 ones = matrix_descriptor(shared_address(aligned));
  const bool units = ((u64)p.output | (u64)p.output_leading * SIZE | (u64)p.n * SIZE) % UNIT == 0;
  griddepcontrol_wait();
  source.prepare(shared + stages * w_stage, act_scales, token0, p.m, k, begin * K_BLOCKS, end * K_BLOCKS, first == 0);
  quantizers_sync();
  if (warp > CONSUMERS / 32) return;
  Segment<f32> codes;
  if (CodeRange<SKUDA_OUT>::max != 0) codes = p.codes(CodeRange<SKUDA_OUT>::min, CodeRange<SKUDA_OUT>::max);
  for (u32 tile = first; tile < tiles; tile += hop) {
    const s64 row0 = (s64)tile * (8 * atoms), row_end = row0 + 8 * atoms < p.n ? row0 + 8 * atoms : p.n;
    const s64 own = row0 + group * 64 + warp % 4 * 16;
    f32 sw[2], bias[2];
    s32 zw[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // requested now, used after the mainloop
      const s64 row = own + i * 8 + lane / 4;
      sw[i] = !IsSum<SKUDA_OUT>::value && row < row_end ? real_at(p.weight_scale, p.weight_scale_is, row, 0.0f) : 0.0f;
      bias[i] = row < row_end && p.bias != nullptr ? real_at(p.bias, p.bias_is, row, 0.0f) : 0.0f;
      zw[i] = W_ZERO_POINTS && row < row_end ? zero_points[row] : 0;
    }
    s32 d[COLUMNS / 2], w_sums[4], a_sums[TOKENS / 2];  // wgmma with ones gives the same sum in every column, or row
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = a_sums[i % (TOKENS / 2)] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) w_sums[i] = 0;
    u32 before = 0;
#pragma unroll 1
    for (u32 step = begin; step < end; ++step, at.next()) {
      mbarrier_wait(full + 8 * at.stage, at.parity);
      const u64 w = matrix_descriptor(w_stages + at.stage * w_stage + group * (8 * ATOM));
      const u64 a = matrix_descriptor(a_stages + (Source::FUSED ? step - begin : at.stage) * a_stage);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < K_BLOCKS * 4; ++i) {
        const u64 w_part = w + i / 4 * (w_k_block / 16) + i % 4 * 2, a_part = a + i / 4 * (CODES_K_BLOCK / 16) + i % 4 * 2;
        Wgmma<COLUMNS, WCode, ACode>::mma_async(d, w_part, a_part, 1);
        if (W_HALVES > 1) {
          s32(&low)[TOKENS / 2] = *(s32(*)[TOKENS / 2])(d + (COLUMNS - TOKENS) / 2);
          Wgmma<TOKENS, WCode, ACode>::mma_async(low, w_part + w_half / 16, a_part, 1);
        }
        if (A_ZERO_POINTS) Wgmma<8, WCode, ACode>::mma_async(w_sums, w_part, ones, 1);
        if (W_ZERO_POINTS) Wgmma<TOKENS, WCode, ACode>::mma_async(a_sums, ones, a_part, 1);
      }
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (step > begin && lane == 0) mbarrier_arrive(empty + 8 * before);
      before = at.stage;
    }
    wgmma_wait_group<0>();
    if (end > begin && lane == 0) mbarrier_arrive(empty + 8 * before);
    if (SPLIT_K > 1) exchange_sums(d, sums, rank);
#pragma unroll
    for (int slot = 0; slot < OWN_SLABS; ++slot) {
      const u32 u = slot * SPLIT_K + rank, column = u * SLAB;
      const s64 token = token0 + column;
      if (u >= SLABS || own >= row_end || token >= p.m) continue;
      s32 slab[A_HALVES][4 * QUADS], of_tokens[4 * QUADS];
#pragma unroll
      for (int i = 0; i < A_HALVES * 4 * QUADS; ++i) {
        const int half = i / (4 * QUADS), in_half = i % (4 * QUADS);
        slab[half][in_half] = SPLIT_K > 1 ? 0 : d[half * (TOKENS / 2) + slot % SLABS * SLAB / 2 + in_half];
      }
#pragma unroll
      for (int i = 0; SPLIT_K > 1 && i < SPLIT_K * QUADS * A_HALVES; ++i) {
        const int4 four = *(const int4*)(sums + ((slot * SPLIT_K * QUADS * A_HALVES + i) * CONSUMERS + threadIdx.x) * 16);
        s32* const own = slab[i / QUADS % A_HALVES] + i % QUADS * 4;
        own[0] += four.x, own[1] += four.y, own[2] += four.z, own[3] += four.w;
      }
#pragma unroll
      for (int i = 0; i < 4 * QUADS; ++i) of_tokens[i] = a_sums[slot % SLABS * SLAB / 2 + i];
      store_slab<typename Source::Rows>(slab, of_tokens, w_sums, p, k, staging + warp * SLAB * STAGING_PITCH, act_scales + column,
                                        sw, bias, zw, own, row_end, token, units, codes);
    }
  }
}

#define STREAMED_PARAMETERS EPILOGUE_PARAMETERS, s32 atoms, s32 stages
#define STREAMED_GIVEN EPILOGUE, weight_zero_point, k, (u32)atoms, (u32)stages
// A launch with many clusters needs two blocks on a multiprocessor, so that all clusters run at once.
#define STREAMED_KERNEL extern "C" __global__ void __cluster_dims__(SPLIT_K, 1, 1) __launch_bounds__(THREADS, SPLIT_K > 1 ? 2 : 1)
