// The int8 product with packed 4-bit weights on Hopper's wgmma, for more tokens than packed.cuh serves.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) w[n, k]); sum_k a[m, k] w[n, k] is exact in s32
//
//   a_map            tensor map of a [m, k] SKUDA_CODE
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//   packed           the weight (packed_codes.cuh)
//   p                scales of w, bias, output [m, n] SKUDA_OUT (epilogue.cuh)
//   units            units of 16 rows of w in a tile
//   stages           stages of the ring
//
// Data: levels: global memory -> bulk copies, a unit at once -> a ring in shared memory -> registers -> codes, which are
// as they are the operand of wgmma -> sums in registers -> staging in shared memory -> global memory. Codes of a: global
// memory -> TMA -> the same ring.
//
// As in streamed.cuh the rows of w are the M side of wgmma, and the tokens are its N side, so each warp makes the codes
// of its own 16 rows, in registers. It does so while the products of the block of K before run.
//
// Variants: wgmma with ones computes the sums of the codes of w, if a has zero points. Warps beyond the tile's units
// multiply what lies in shared memory; nothing of that is written.
//
// Flags: TOKENS (32, 64, 128, 256), WARPGROUPS (of consumers), K_BLOCKS (blocks of K in a stage), SPLIT_K=1, GROUPS,
// SKUDA_CODE, SKUDA_WEIGHT=s8, SKUDA_OUT, SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a).
#pragma once
#include "streamed.cuh"
#include "packed_codes.cuh"

enum {
  PACKED_BYTES = PackedLane<GROUPS>::BYTES,
  ONES_AND_ZEROS = 3 * ATOM  // ones for a whole block of K; for the last one, which are zeros beyond K; and zeros behind it
};

DEVICE uint4 load_shared(const u8* at) { return *(const uint4*)at; }

template <class Rows>
DEVICE void packed_by_warpgroups(const TensorMap& a_map, const Rows& rows, const u8* packed, const Epilogue& p, s64 k,
                                 u32 units, u32 stages) {
  extern __shared__ u8 unaligned[];
  u8* const aligned = unaligned + (-shared_address(unaligned) & 1023);
  u8* const ring = aligned + A_ZERO_POINTS * ONES_AND_ZEROS;
  const u32 a_stage = K_BLOCKS * CODES_K_BLOCK, unit_stage = K_BLOCKS * PACKED_BYTES, w_stage = units * unit_stage;
  const u32 blocks = (u32)((k + PACKED_K - 1) / PACKED_K), steps = (blocks + K_BLOCKS - 1) / K_BLOCKS;
  u8* const levels = ring + stages * a_stage;
  // Warps beyond the units read behind the last stage, which the launch rule makes room for.
  u8* const staging = levels + stages * w_stage + (4 * WARPGROUPS - units) * unit_stage;
  f32* const act_scales = (f32*)(staging + STAGING);
  const u32 full = shared_address(act_scales) + 4 * TOKENS * (1 + A_ZERO_POINTS), empty = full + 8 * stages;
  const s64 token0 = (s64)blockIdx.y * TOKENS, all_units = (p.n + 15) / 16;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (u32)((all_units + units - 1) / units);
  if (threadIdx.x == 0) {
    prefetch_tensormap(&a_map);
#pragma unroll 1
    for (u32 s = 0; s < stages; ++s) {
      mbarrier_init(full + 8 * s, 2);
      mbarrier_init(empty + 8 * s, CONSUMERS / 32);
    }
    fence_mbarrier_init();
  }
  for (s32 i = (s32)threadIdx.x; i < A_ZERO_POINTS * ONES_AND_ZEROS / 4; i += THREADS) {
    const u32 byte = (u32)i * 4, element = byte % 128 ^ byte / 128 % 8 * 16;  // as the swizzle has it
    const bool is_one = byte < ATOM || (byte < 2 * ATOM && (blocks - 1) * PACKED_K + element < k);
    ((u32*)aligned)[i] = is_one ? 0x01010101u : 0;
  }
  if (A_ZERO_POINTS) fence_proxy_async();
  __syncthreads();

  PipelineState at{0, 0, stages};
  if (warp >= CONSUMERS / 32) {
    griddepcontrol_wait();
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const s64 unit = (s64)tile * units;
      const u32 here = all_units - unit < units ? (u32)(all_units - unit) : units;
#pragma unroll 1
      for (u32 step = 0; step < steps; ++step, at.next()) {
        const u32 barrier = full + 8 * at.stage, block = step * K_BLOCKS;
        mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        if (warp > CONSUMERS / 32) {
          if (lane != 0) continue;
          mbarrier_arrive_expect_tx(barrier, a_stage);
#pragma unroll
          for (u32 c = 0; c < K_BLOCKS; ++c) {
            const u32 to = shared_address(ring) + at.stage * a_stage + c * CODES_K_BLOCK;
            cp_async_bulk_tensor_2d(to, &a_map, (s32)((block + c) * 128), (s32)token0, barrier);
          }
          continue;
        }
        const u32 bytes = (blocks - block < K_BLOCKS ? blocks - block : K_BLOCKS) * PACKED_BYTES;
        if (lane == 0) mbarrier_arrive_expect_tx(barrier, here * bytes);
        __syncwarp();
        if (lane < here) {
          const u32 to = shared_address(levels) + at.stage * w_stage + lane * unit_stage;
          cp_async_bulk(to, packed + ((unit + lane) * blocks + block) * PACKED_BYTES, bytes, barrier);
        }
      }
    }
    griddepcontrol_launch_dependents();
    return;
  }

  const bool in_units = ((u64)p.output | (u64)p.output_leading * SIZE | (u64)p.n * SIZE) % UNIT == 0;
  griddepcontrol_wait();
  Loaded<Rows>{&a_map, rows}.prepare(nullptr, act_scales, token0, p.m, k, 0, 0, false);
  quantizers_sync();
  Segment<f32> codes;
  if (CodeRange<SKUDA_OUT>::max != 0) codes = p.codes(CodeRange<SKUDA_OUT>::min, CodeRange<SKUDA_OUT>::max);
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const s64 row0 = (s64)tile * units * 16, row_end = row0 + units * 16 < p.n ? row0 + units * 16 : p.n;
    const s64 own = row0 + warp * 16;
    f32 sw[2], bias[2];
    const s32 zw[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // requested now, used after the mainloop
      const s64 row = own + i * 8 + lane / 4;
      sw[i] = !IsSum<SKUDA_OUT>::value && row < row_end ? real_at(p.weight_scale, p.weight_scale_is, row, 0.0f) : 0.0f;
      bias[i] = row < row_end && p.bias != nullptr ? real_at(p.bias, p.bias_is, row, 0.0f) : 0.0f;
    }
    s32 d[TOKENS / 2], w_sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) d[i] = 0;
    u32 before = 0;
    u32 w[2][4][4];  // the codes of a block, and those of the block before, which wgmma reads
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step, at.next()) {
      mbarrier_wait(full + 8 * at.stage, at.parity);
#pragma unroll
      for (u32 c = 0; c < K_BLOCKS; ++c) {
        u32(&now)[4][4] = w[c % 2];
        PackedLane<GROUPS> of;
        of.load(levels + at.stage * w_stage + warp * unit_stage + c * PACKED_BYTES, lane, load_shared);
        if (c >= 2) wgmma_wait_group<1>();
#pragma unroll
        for (int j = 0; j < 4; ++j) of.codes(j, now[j]);
        const u64 a = matrix_descriptor(shared_address(ring) + at.stage * a_stage + c * CODES_K_BLOCK);
        const u32 after = step * K_BLOCKS + c + 1;
        const u64 ones = matrix_descriptor(shared_address(aligned) + (after < blocks ? 0 : after == blocks ? ATOM : 2 * ATOM));
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          WgmmaRegisters<TOKENS, s8, SKUDA_CODE>::mma_async(d, now[j], a + 2 * j, 1);
          if (A_ZERO_POINTS) WgmmaRegisters<8, s8, SKUDA_CODE>::mma_async(w_sums, now[j], ones + 2 * j, 1);
        }
        wgmma_commit_group();
        if (c == 0) {
          wgmma_wait_group<1>();
          if (step > 0 && lane == 0) mbarrier_arrive(empty + 8 * before);
        }
      }
      before = at.stage;
    }
    wgmma_wait_group<0>();
    __syncwarp();
    if (steps > 0 && lane == 0) mbarrier_arrive(empty + 8 * before);
#pragma unroll
    for (int u = 0; u < SLABS; ++u) {
      const s64 token = token0 + u * SLAB;
      if (own >= row_end || token >= p.m) continue;
      s32 slab[4 * QUADS], none[4 * QUADS];
#pragma unroll
      for (int i = 0; i < 4 * QUADS; ++i) slab[i] = d[u * SLAB / 2 + i], none[i] = 0;
      store_slab<Rows>(slab, none, w_sums, p, k, staging + warp * SLAB * STAGING_PITCH, act_scales + u * SLAB, sw, bias, zw,
                       own, row_end, token, in_units, codes);
    }
  }
}

#define PACKED_WARPGROUP_PARAMETERS const u8 *packed, EPILOGUE_PARAMETERS, s32 units, s32 stages
#define PACKED_WARPGROUP_GIVEN packed, EPILOGUE, k, (u32)units, (u32)stages
#define PACKED_WARPGROUP_KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
