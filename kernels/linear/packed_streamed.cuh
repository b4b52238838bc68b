// The int8 product with packed 4-bit weights on Hopper: the weight comes through a ring in shared memory.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) w[n, k]); sum_k a[m, k] w[n, k] is exact in s32
//
//   a_map            tensor map of a [m, k] SKUDA_CODE
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//   packed           the weight (packed_codes.cuh)
//   p                scales of w, bias, output [m, n] SKUDA_OUT (epilogue.cuh)
//   units            units of 16 rows of w in a tile, at most one for each warp
//   stages           stages of the ring
//
// Data: levels: global memory -> bulk copies, a unit at once -> a ring in shared memory -> registers -> codes -> mma.sync
// or wgmma -> sums in registers -> staging in shared memory -> global memory. Codes of a: global memory -> TMA -> the same
// ring -> ldmatrix or wgmma.
//
// As in streamed.cuh the rows of w are the M side of a product, and the tokens are its N side, so each warp makes the
// codes of its own 16 rows, in registers. It makes them while other warps multiply, or wgmma what it made before. (Codes
// that go through shared memory, for wgmma to read there, took 1.1 to 1.4 times as long with two buffers and with three.)
//
// Variants.
//   mma.sync (ROW_WARPS > 0): as many warps have a unit each. If the block has several times as many warps, these are
//   parts that divide the K of each stage, and add their sums through shared memory: so a tile of few rows has enough.
//   wgmma (ROW_WARPS = 0): with the codes of w in registers it takes about 55 cycles, and half a cycle a token, so that
//   it is better than mma.sync from 64 tokens on.
//   Split-K (SPLIT_K > 1, wgmma): the blocks of a cluster take parts of the K of one tile and add their sums through
//   distributed shared memory, where the ring was. It wins if there are fewer tiles than multiprocessors.
//   Zero points: products with ones are the sums of the codes of w, if a has zero points.
//   Codes of 16 bits: the halves of a tile's tokens are as many columns again. K is then whole blocks, because w has any
//   codes beyond K, and what follows the high halves there are the low ones.
//   Rows beyond the tile: their warps make codes of its last unit, and nothing of that is written.
//
// Flags: TOKENS (columns: 8 to 256; mma.sync up to 64, wgmma from 32), WARPGROUPS (of consumers), ROW_WARPS, K_BLOCKS (blocks of K
// in a stage), SPLIT_K (1, 2), GROUPS, SKUDA_CODE, SKUDA_WEIGHT=s8, SKUDA_OUT, SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a;
// not with SPLIT_K > 1). The launch gives one tile for each cluster if SPLIT_K > 1.
#pragma once
#include "streamed.cuh"
#include "packed_codes.cuh"
#include "mma_sync.cuh"

enum {
  PACKED_BYTES = PackedLane<GROUPS>::BYTES,
  BY_WARPS = ROW_WARPS > 0,
  PARTS = BY_WARPS ? 4 * WARPGROUPS / (ROW_WARPS + !BY_WARPS) : 1,
  WARPS = BY_WARPS ? PARTS * ROW_WARPS : 4 * WARPGROUPS,  // that multiply
  ROW_THREADS = 32 * WARPS / PARTS,
  OWN_BLOCKS = K_BLOCKS / PARTS,  // blocks of K of a stage that a warp multiplies
  MANY = COLUMNS == 256,          // sums take so many registers that the producers give theirs away
  GROUP = MANY ? 2 : 4,           // products of wgmma whose codes are made at once
  ALL_THREADS = CONSUMERS + (MANY ? 128 : 64),
  EIGHTS = COLUMNS / 8,
  FOURS = SLABS * QUADS * A_HALVES,  // times four are a thread's sums
  SHARES = PARTS * SPLIT_K,          // of K, which add their sums
  PART_SUMS = PARTS > 1 ? (FOURS + A_ZERO_POINTS) * PARTS * ROW_THREADS * 16 : 0,
  ONES_AND_ZEROS = 3 * ATOM  // ones for a whole block of K; for the last one, which are zeros beyond K; and zeros behind it
};
static_assert(BY_WARPS || OWN_BLOCKS * 4 / GROUP % 2 == 0, "codes of two groups of products take turns");
static_assert(SPLIT_K == 1 || !BY_WARPS, "the parts of a block share its memory");

DEVICE uint4 load_shared(const u8* at) { return *(const uint4*)at; }

// Adds the products of a block of K by mma.sync; from its first element on, `left` ones are left.
DEVICE void multiply_by_warp(s32 (&d)[COLUMNS / 2], s32 (&w_sums)[4], const PackedLane<GROUPS>& levels, u32 a, u32 lane, s32 left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 x[EIGHTS][4];  // codes of a of two products
#pragma unroll
    for (int t = 0; t < EIGHTS; ++t) {
      const u32 token = t * 8 + lane % 8, unit = half * 4 + lane / 8;
      ldmatrix_x4(x[t], a + token * 128 + (unit ^ lane % 8) * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 2 * half + i;
      u32 w[4];
      levels.codes(j, w);
#pragma unroll
      for (int t = 0; t < EIGHTS; ++t) {
        s32(&sums)[4] = *(s32(*)[4])(d + 4 * t);
        mma_m16n8k32<s8, ACode>(sums, w, x[t][2 * i], x[t][2 * i + 1]);
      }
      if (A_ZERO_POINTS) {
        const u32 low = 32 * j < left ? 0x01010101u : 0, high = 32 * j + 16 < left ? 0x01010101u : 0;
        mma_m16n8k32<s8, ACode>(w_sums, w, low, high);
      }
    }
  }
}

// Adds the sums of all parts: part u % PARTS gets those of slab u, and every one the sums of the codes of w.
DEVICE void add_parts(s32 (&d)[COLUMNS / 2], s32 (&w_sums)[4], int4* sums, u32 part, u32 thread) {
  bar_sync<PARTS * ROW_THREADS>(2);  // what was exchanged before has been read
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const s32* const own = d + 4 * i;
    if (i % (SLABS * QUADS) / QUADS % PARTS != part) sums[(i * PARTS + part) * ROW_THREADS + thread] = make_int4(own[0], own[1], own[2], own[3]);
  }
  if (A_ZERO_POINTS) sums[(FOURS * PARTS + part) * ROW_THREADS + thread] = make_int4(w_sums[0], 0, w_sums[2], 0);
  bar_sync<PARTS * ROW_THREADS>(2);
#pragma unroll
  for (int i = 0; i < FOURS + A_ZERO_POINTS; ++i) {
    if (i < FOURS && i % (SLABS * QUADS) / QUADS % PARTS != part) continue;
    s32* const own = i < FOURS ? d + 4 * i : w_sums;
#pragma unroll
    for (u32 other = 0; other < PARTS; ++other) {
      if (other == part) continue;
      const int4 four = sums[(i * PARTS + other) * ROW_THREADS + thread];
      own[0] += four.x, own[1] += four.y, own[2] += four.z, own[3] += four.w;
    }
  }
}

// The same for the blocks of a cluster, which take the slabs in turn; `sums` is what they no longer need of the ring.
DEVICE void add_blocks(s32 (&d)[COLUMNS / 2], u8* sums, u32 rank) {
  cluster_arrive();  // exchange_sums waits for it: all products of the cluster are done
  exchange_sums(d, sums, rank);
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const u32 u = i % (SLABS * QUADS) / QUADS, at = i / (SLABS * QUADS) * QUADS + i % QUADS;
    if (u % SPLIT_K != rank) continue;
#pragma unroll
    for (u32 other = 0; other < SPLIT_K; ++other) {
      if (other == rank) continue;
      const u32 from = (u / SPLIT_K * SPLIT_K + other) * (QUADS * A_HALVES) + at;
      const int4 four = *(const int4*)(sums + (from * CONSUMERS + threadIdx.x) * 16);
      d[4 * i] += four.x, d[4 * i + 1] += four.y, d[4 * i + 2] += four.z, d[4 * i + 3] += four.w;
    }
  }
}

template <class Rows>
DEVICE void streamed_packed_linear(const TensorMap& a_map, const Rows& rows, const u8* packed, const Epilogue& p, s64 k,
                                 u32 units, u32 stages) {
  extern __shared__ u8 unaligned[];
  u8* const aligned = unaligned + (-shared_address(unaligned) & 1023);
  u8* const ring = aligned + A_ZERO_POINTS * ONES_AND_ZEROS;
  const u32 a_stage = K_BLOCKS * CODES_K_BLOCK, unit_stage = K_BLOCKS * PACKED_BYTES, w_stage = units * unit_stage;
  const u32 blocks = (u32)((k + PACKED_K - 1) / PACKED_K), steps = (blocks + K_BLOCKS - 1) / K_BLOCKS;
  u8* const levels = ring + stages * a_stage;
  u8* const staging = levels + stages * w_stage;
  int4* const part_sums = (int4*)(staging + STAGING);
  f32* const act_scales = (f32*)((u8*)part_sums + PART_SUMS);
  const u32 full = shared_address(act_scales) + 4 * TOKENS * (1 + A_ZERO_POINTS), empty = full + 8 * stages;
  const s64 token0 = (s64)(blockIdx.x / SPLIT_K) * TOKENS, all_units = (p.n + 15) / 16;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (u32)((all_units + units - 1) / units);
  const u32 rank = SPLIT_K > 1 ? cluster_ctarank() : 0, begin = steps * rank / SPLIT_K, end = steps * (rank + 1) / SPLIT_K;
  if (threadIdx.x == 0) {
    prefetch_tensormap(&a_map);
#pragma unroll 1
    for (u32 s = 0; s < stages; ++s) {
      mbarrier_init(full + 8 * s, 2);
      mbarrier_init(empty + 8 * s, WARPS);
    }
    fence_mbarrier_init();
  }
  for (s32 i = (s32)threadIdx.x; i < A_ZERO_POINTS * ONES_AND_ZEROS / 4; i += ALL_THREADS) {
    const u32 byte = (u32)i * 4, element = byte % 128 ^ byte / 128 % 8 * 16;  // as the swizzle has it
    const bool is_one = byte < ATOM || (byte < 2 * ATOM && (blocks - 1) * PACKED_K + element < k);
    ((u32*)aligned)[i] = is_one ? 0x01010101u : 0;
  }
  if (A_ZERO_POINTS) fence_proxy_async();
  __syncthreads();

  PipelineState at{0, 0, stages};
  if (warp >= CONSUMERS / 32) {
    if (MANY) setmaxnreg_dec<24>();
    if (warp > CONSUMERS / 32 + 1) return;
    const u64 policy = l2_policy(gridDim.x == SPLIT_K);
    griddepcontrol_wait();
    for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
      const s64 unit = (s64)tile * units;
      const u32 here = all_units - unit < units ? (u32)(all_units - unit) : units;
#pragma unroll 1
      for (u32 step = begin; step < end; ++step, at.next()) {
        const u32 barrier = full + 8 * at.stage, block = step * K_BLOCKS;
        mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        if (warp > CONSUMERS / 32) {
          if (lane != 0) continue;
          mbarrier_arrive_expect_tx(barrier, a_stage);
#pragma unroll
          for (u32 c = 0; c < K_BLOCKS; ++c) {
            const u32 to = shared_address(ring) + at.stage * a_stage + c * CODES_K_BLOCK;
            Loaded<Rows>{&a_map, rows}.load(to, block + c, token0, k, barrier);
          }
          continue;
        }
        const u32 bytes = (blocks - block < K_BLOCKS ? blocks - block : K_BLOCKS) * PACKED_BYTES;
        if (lane == 0) mbarrier_arrive_expect_tx(barrier, here * bytes);
        __syncwarp();
        if (lane < here) {
          const u32 to = shared_address(levels) + at.stage * w_stage + lane * unit_stage;
          cp_async_bulk(to, packed + ((unit + lane) * blocks + block) * PACKED_BYTES, bytes, barrier, policy);
        }
      }
    }
    griddepcontrol_launch_dependents();
    return;
  }

  if (MANY) setmaxnreg_inc<240>();
  const u32 part = warp / (ROW_THREADS / 32), row_warp = warp % (ROW_THREADS / 32);
  const u8* const own_levels = levels + (row_warp < units ? row_warp : units - 1) * unit_stage + part * (OWN_BLOCKS * PACKED_BYTES);
  const u32 own_a = shared_address(ring) + part * (OWN_BLOCKS * CODES_K_BLOCK);
  const bool in_units = ((u64)p.output | (u64)p.output_leading * SIZE | (u64)p.n * SIZE) % UNIT == 0;
  griddepcontrol_wait();
  Loaded<Rows>{&a_map, rows}.prepare(nullptr, act_scales, token0, p.m, k, 0, 0, false);
  quantizers_sync();
  Segment<f32> codes{};  // `per_unit` reads it whatever the output is
  if (CodeRange<SKUDA_OUT>::max != 0) codes = p.codes(CodeRange<SKUDA_OUT>::min, CodeRange<SKUDA_OUT>::max);
  for (u32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const s64 row0 = (s64)tile * units * 16, row_end = row0 + units * 16 < p.n ? row0 + units * 16 : p.n;
    const s64 own = row0 + row_warp * 16;
    f32 sw[2], bias[2];
    const s32 zw[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // requested now, used after the mainloop
      const s64 row = own + i * 8 + lane / 4;
      sw[i] = !IsSum<SKUDA_OUT>::value && row < row_end ? real_at(p.weight_scale, p.weight_scale_is, row, 0.0f) : 0.0f;
      bias[i] = row < row_end && p.bias != nullptr ? real_at(p.bias, p.bias_is, row, 0.0f) : 0.0f;
    }
    s32 d[COLUMNS / 2], w_sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = 0;
    u32 before = 0;
    u32 w[2][GROUP][4];  // the codes of a group of products, and those of the group before, which wgmma reads
#pragma unroll 1
    for (u32 step = begin; BY_WARPS && part < PARTS && step < end; ++step, at.next()) {
      mbarrier_wait(full + 8 * at.stage, at.parity);
      PackedLane<GROUPS> of[OWN_BLOCKS];
#pragma unroll
      for (u32 c = 0; c < OWN_BLOCKS; ++c) of[c].load(own_levels + at.stage * w_stage + c * PACKED_BYTES, lane, load_shared);
#pragma unroll
      for (u32 c = 0; c < OWN_BLOCKS; ++c) {
        const s32 left = (s32)k - (s32)(step * K_BLOCKS + part * OWN_BLOCKS + c) * PACKED_K;
        multiply_by_warp(d, w_sums, of[c], own_a + at.stage * a_stage + c * CODES_K_BLOCK, lane, left);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + 8 * at.stage);
    }
#pragma unroll 1
    for (u32 step = begin; !BY_WARPS && step < end; ++step, at.next()) {
      mbarrier_wait(full + 8 * at.stage, at.parity);
#pragma unroll
      for (u32 c = 0; c < OWN_BLOCKS; ++c) {
        PackedLane<GROUPS> of;
        of.load(own_levels + at.stage * w_stage + c * PACKED_BYTES, lane, load_shared);
        const u64 a = matrix_descriptor(own_a + at.stage * a_stage + c * CODES_K_BLOCK);
        const u32 after = step * K_BLOCKS + part * OWN_BLOCKS + c + 1;
        const u64 ones = matrix_descriptor(shared_address(aligned) + (after < blocks ? 0 : after == blocks ? ATOM : 2 * ATOM));
#pragma unroll
        for (u32 g = 0; g < 4 / GROUP; ++g) {
          u32(&now)[GROUP][4] = w[(c * (4 / GROUP) + g) % 2];
#pragma unroll
          for (int j = 0; j < GROUP; ++j) of.codes(g * GROUP + j, now[j]);
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < GROUP; ++j) {
            const int product = g * GROUP + j;
            WgmmaRegisters<COLUMNS, s8, ACode>::mma_async(d, now[j], a + 2 * product, 1);
            if (A_ZERO_POINTS) WgmmaRegisters<8, s8, ACode>::mma_async(w_sums, now[j], ones + 2 * product, 1);
          }
          wgmma_commit_group();
          wgmma_wait_group<1>();  // the codes of the group before are free
          if (c == 0 && g == 0 && step > begin && lane == 0) mbarrier_arrive(empty + 8 * before);
        }
      }
      before = at.stage;
    }
    if (!BY_WARPS) {
      wgmma_wait_group<0>();
      __syncwarp();
      if (end > begin && lane == 0) mbarrier_arrive(empty + 8 * before);
    }
    if (PARTS > 1 && part < PARTS) add_parts(d, w_sums, part_sums, part, row_warp * 32 + lane);
    if (SPLIT_K > 1) add_blocks(d, ring, rank);
#pragma unroll
    for (int u = 0; u < SLABS; ++u) {
      const s64 token = token0 + u * SLAB;
      if (own >= row_end || token >= p.m || u % SHARES != part + rank) continue;
      s32 slab[A_HALVES][4 * QUADS], none[4 * QUADS];
#pragma unroll
      for (int i = 0; i < A_HALVES * 4 * QUADS; ++i) {
        const int half = i / (4 * QUADS), in_half = i % (4 * QUADS);
        slab[half][in_half] = d[half * (TOKENS / 2) + u * SLAB / 2 + in_half], none[in_half] = 0;
      }
      store_slab<Rows>(slab, none, w_sums, p, k, staging + warp * SLAB * STAGING_PITCH, act_scales + u * SLAB, sw, bias, zw,
                       own, row_end, token, in_units, codes);
    }
  }
}

#define PACKED_STREAMED_PARAMETERS const u8 *packed, EPILOGUE_PARAMETERS, s32 units, s32 stages
#define PACKED_STREAMED_GIVEN packed, EPILOGUE, k, (u32)units, (u32)stages
#define PACKED_STREAMED_KERNEL extern "C" __global__ void __cluster_dims__(SPLIT_K, 1, 1) __launch_bounds__(ALL_THREADS, 1)
