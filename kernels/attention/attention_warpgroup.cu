// Attention over a paged int8 cache on Hopper's wgmma, for many new tokens; heads of 128 elements. The bits are those of
// attention.cu, which has the formula.
//
//   k_map, v_map    tensor maps of k_codes as [pages kv_heads 128, 128] and of v_codes as [pages kv_heads 128, 128]
//   parameters      see attention.cuh
//
// Data: q in registers. Blocks of 128 keys: global memory -> TMA -> a ring of stages in shared memory -> wgmma -> scores
// in registers -> weights, packed, in registers, which are as they are the operand of the second product -> wgmma ->
// sums in registers -> sums of the chunk, in registers -> sums of all chunks, in shared memory, each in a place of its
// own thread.
//
// A block of threads has a producer warpgroup and two consumer warpgroups, and computes one tile of 128 rows: each
// consumer has 64. One consumer multiplies while the other one computes weights, since they begin a product apart. The
// first warp of the producer requests codes, the second one copies scales and notes whether some are unusable.
//
// Variants: blocks of keys that every row of a warp sees, with usable scales, need no mask.
#include "attention.cuh"
#include "hopper.cuh"

enum {
  D = 128,
  ROWS = 128,
  STAGES = 4,
  CODES = PAGE * D,              // bytes of the codes of a block's keys, and of its values
  SCALES = 2 * PAGE,             // scales of a block
  WHOLE = 128 * (D / 2) * 4,     // bytes of the sums of a warpgroup
  SHARED = 1024 + STAGES * (2 * CODES + SCALES * 4 + 4 + 16) + 2 * WHOLE
};

#ifndef SKUDA_HOST  // the CPU harness of the tests defines it
// d[64, 128] = a[64, 32] b[128, 32]^T + (scale_d ? d : 0), as Wgmma, with the fragments of a in registers: of the rows
// of d[0] and d[2], bytes 4 (t % 4) and three more, then, of both again, 16 bytes behind these.
#define WGMMA_REGISTERS(A)                                                                                           \
  DEVICE void wgmma_registers(s32 (&d)[64], const u32 (&a)[4], u64 b, u32 scale_d, A) {                              \
    asm volatile("{\n.reg .pred scale_d;\nsetp.ne.u32 scale_d, %69, 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32." #A ".s8 {" S64 "}, {%64,%65,%66,%67}, %68, scale_d;\n}" \
                 : D64(0)                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));                                \
  }
WGMMA_REGISTERS(s8)
WGMMA_REGISTERS(u8)
#endif

struct Shared {
  u8* codes;    // [STAGES][2][CODES]
  f32* scales;  // [STAGES][SCALES]
  f32* whole;   // [2][D / 2][128]
  u32* odd;     // [STAGES]: whether a scale of the block is unusable
  u32 full, empty;
};

// Of the rows of a thread: what they see, and what they have summed up.
struct Rows {
  Row row[2];
  s32 first, last;  // the keys that all rows of the warp see
  Sums part[2], total[2];
};

// Scores of a block become packed weights; the block's sums go to `own`.
template <bool MASKED>
DEVICE void weights_of(const s32 (&acc)[64], const f32* scales, const Rows& rows, s32 block, Sums (&own)[2], u32 (&w)[4][4]) {
  const s32 c = threadIdx.x % 4;
  f32 y[64];
  f32 top[2] = {minus_infinity(), minus_infinity()};
  bool bad[2] = {false, false};
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const float2 k = *(const float2*)(scales + 8 * t + 2 * c);
    if (MASKED) {
      const float2 v = *(const float2*)(scales + PAGE + 8 * t + 2 * c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const s32 key = block * PAGE + 8 * t + 2 * c + i % 2;
        const f32 scale = i % 2 ? k.y : k.x;
        const bool seen = key >= rows.row[i / 2].first && key <= rows.row[i / 2].last;
        const bool good = usable(scale) && usable(i % 2 ? v.y : v.x);
        bad[i / 2] |= seen && !good;
        y[4 * t + i] = seen && good ? mul_rn((f32)acc[4 * t + i], scale) : minus_infinity();
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[4 * t + i] = mul_rn((f32)acc[4 * t + i], i % 2 ? k.y : k.x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], y[4 * t + i]);
  }
  f32 z[2], base[2], most[2] = {0.0f, 0.0f};
  u32 weight[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const f32 n = ceilf(__fmul_ru(rows.row[i].z, quad_max(top[i])));
    own[i].some = !MASKED || max(rows.row[i].first, block * PAGE) <= min(rows.row[i].last, block * PAGE + PAGE - 1);
    const s32 unusable = MASKED ? quad_sum(bad[i]) : 0;
    bad[i] = !(fabsf(n) < 8388608.0f && rows.row[i].z >= 0.0f && !unusable);
    own[i].n = bad[i] ? 0.0f : n, z[i] = bad[i] ? 0.0f : rows.row[i].z;
    base[i] = 512.0f - own[i].n;
  }
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const float2 v = *(const float2*)(scales + PAGE + 8 * t + 2 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f32& s = y[4 * t + i];
      const bool counts = !MASKED || s != minus_infinity();
      const f32 e = power_of_two(fma_rn(z[i / 2], s, base[i / 2]));
      const u32 q = __float_as_uint(fma_rn(e, 65536.0f, 8388608.0f));
      weight[i / 2] += counts ? q : 0x4b000000u;
      s = counts ? mul_rn(e, i % 2 ? v.y : v.x) : 0.0f;
      most[i / 2] = fmaxf(most[i / 2], s);
    }
  }
  f32 unit[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights_unit(quad_max(most[i]), own[i].m, unit[i]);
    own[i].weight = (f32)quad_sum((s32)(weight[i] - 32u * 0x4b000000u));
    if (bad[i]) own[i].weight = __uint_as_float(0x7fc00000u);
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

DEVICE void multiply_keys(s32 (&acc)[64], const u32 (&q)[4][4], u32 codes) {
  const u64 b = matrix_descriptor(codes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < D / 32; ++k) wgmma_registers(acc, q[k], b + 2 * k, k > 0, s8());
  wgmma_commit_group();
  wgmma_wait_group<0>();
}

DEVICE void multiply_values(s32 (&acc)[64], const u32 (&w)[4][4], u32 codes) {
  const u64 b = matrix_descriptor(codes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < PAGE / 32; ++k) wgmma_registers(acc, w[k], b + 2 * k, k > 0, u8());
  wgmma_commit_group();
  wgmma_wait_group<0>();
}

DEVICE void consume(const Attention& p, const Tile& tile, s32 head, const Shared& shared) {
  const s32 thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128 - 1, lane = thread % 32, c = lane % 4;
  f32* const whole = shared.whole + warpgroup * (D / 2) * 128 + thread;
  Rows rows;
  const s32 r = warpgroup * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.row[i] = tile.row(p, head, r + 8 * i);
    rows.part[i] = rows.total[i] = Sums{0.0f, 0.0f, 0, false};
  }
  rows.first = __reduce_max_sync(~0u, max(rows.row[0].first, rows.row[1].first));
  rows.last = __reduce_min_sync(~0u, min(rows.row[0].last, rows.row[1].last));
  u32 q[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[k][i] = *(const u32*)(p.q_codes + rows.row[i % 2].at * D + 32 * k + 16 * (i / 2) + 4 * c);
  }
  s32 acc[64];
  f32 sum[64];  // of the chunk
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
  u32 stage = 0, parity = 0;
  for (s32 block = tile.from; block < tile.blocks; ++block) {
    mbarrier_wait(shared.full + 8 * stage, parity);
    const u32 codes = shared_address(shared.codes) + stage * 2 * CODES;
    const f32* const scales = shared.scales + stage * SCALES;
    multiply_keys(acc, q, codes);
    Sums own[2];
    u32 w[4][4];
    const s32 key = block * PAGE;
    if (key >= rows.first && key + PAGE - 1 <= rows.last && !shared.odd[stage]) weights_of<false>(acc, scales, rows, block, own, w);
    else weights_of<true>(acc, scales, rows, block, own, w);
    multiply_values(acc, w, codes + CODES);
    if (lane == 0) mbarrier_arrive(shared.empty + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;

    // Sums are zero where there was no block before. A power is exact or zero, and no sum is -0, so a block that the row
    // does not see changes nothing.
    f32 f[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool some = rows.part[i].some;
      add(rows.part[i], own[i], f[i]);
      if (!some && own[i].some) f[i][1] = 1.0f;
    }
    if (__all_sync(~0u, f[0][0] == 1.0f && f[1][0] == 1.0f)) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fma_rn((f32)acc[i], f[i / 2 % 2][1], sum[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fma_rn(sum[i], f[i / 2 % 2][0], mul_rn((f32)acc[i], f[i / 2 % 2][1]));
    }
    if ((block + 1) % CHUNK != 0 && block + 1 < tile.blocks) continue;
    const bool first = block / CHUNK == tile.from / CHUNK;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool some = rows.total[i].some;
      add(rows.total[i], rows.part[i], f[i]);
      if (!some && rows.part[i].some) f[i][1] = 1.0f;
      rows.part[i].some = false;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const f32 before = first ? 0.0f : whole[i * 128];
      whole[i * 128] = fma_rn(before, f[i / 2 % 2][0], mul_rn(sum[i], f[i / 2 % 2][1]));
      sum[i] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.row[i].valid) continue;
    const Finish finished(rows.total[i]);
    Data* const to = p.output + rows.row[i].at * D + 2 * c;
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
      for (int b = 0; b < 2; ++b) narrow(finished(rows.total[i].some ? whole[(4 * t + 2 * i + b) * 128] : 0.0f), to[8 * t + b]);
    }
  }
}

// Copies the scales of the blocks.
DEVICE void produce_scales(const Attention& p, const Tile& tile, s32 head, const Shared& shared) {
  const s32 lane = threadIdx.x % 32;
  u32 stage = 0, parity = 1;
  for (s32 block = tile.from; block < tile.blocks; ++block) {
    const s64 at = tile.page(p, head, block) * PAGE + 4 * lane;
    const float4 k = *(const float4*)(p.k_scale + at), v = *(const float4*)(p.v_scale + at);
    const bool good = usable(k.x) && usable(k.y) && usable(k.z) && usable(k.w) && usable(v.x) && usable(v.y) &&
                      usable(v.z) && usable(v.w);
    mbarrier_wait(shared.empty + 8 * stage, parity);
    f32* const to = shared.scales + stage * SCALES + 4 * lane;
    *(float4*)to = k, *(float4*)(to + PAGE) = v;
    const u32 odd = !__all_sync(~0u, good);
    if (lane == 0) shared.odd[stage] = odd;
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

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_warpgroup(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                        ATTENTION_PARAMETERS, s32 tiles) {
  extern __shared__ u8 unaligned[];
  Shared shared;
  shared.codes = unaligned + (-shared_address(unaligned) & 1023);
  shared.whole = (f32*)(shared.codes + STAGES * 2 * CODES);
  shared.scales = shared.whole + 2 * WHOLE / 4;
  shared.full = shared_address(shared.scales + STAGES * SCALES), shared.empty = shared.full + 8 * STAGES;
  shared.odd = (u32*)(shared.scales + STAGES * SCALES) + 4 * STAGES;
  const Attention p = ATTENTION_GIVEN;
  const s32 head = (s32)(blockIdx.x % (u32)kv_heads);
  if (threadIdx.x == 0) {
    prefetch_tensormap(&k_map), prefetch_tensormap(&v_map);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared.full + 8 * s, 33);  // the request, and the lanes that copy scales
      mbarrier_init(shared.empty + 8 * s, 8);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  __syncthreads();
  // The last tiles of a sequence see the most keys, and begin first.
  const Tile tile(p, tiles - 1 - (s64)(blockIdx.x / (u32)kv_heads), ROWS);
  if (!tile.valid()) return;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that a warp has one value
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (threadIdx.x / 32 == 1) produce_scales(p, tile, head, shared);
    if (threadIdx.x == 0) produce_codes(p, tile, head, shared, k_map, v_map);
  } else {
    setmaxnreg_inc<232>();
    consume(p, tile, head, shared);
  }
}
