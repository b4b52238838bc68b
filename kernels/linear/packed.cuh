// The int8 product for few tokens with packed 4-bit weights, limited by the bandwidth of the weights.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) w[n, k]); sum_k a[m, k] w[n, k] is exact in s32
//
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//   a                [m, k] SKUDA_CODE, a_leading bytes apart, in whole units of 16 bytes
//   packed           the weight (packed_codes.cuh)
//   p                scales of w, bias, output [m, n] SKUDA_OUT (epilogue.cuh)
//
// Data: levels: global memory -> registers -> codes -> mma.sync -> sums in registers -> sums in shared memory, which
// all warps add to -> global memory. Codes of a: L2 -> registers -> shared memory of the warp -> ldmatrix.
//
// Levels lie in memory as the lanes of a warp need them, so they pass through no shared memory, and nothing waits for
// another warp before a sum is complete. A block takes its part of the units of 16 rows, UNITS at a time, and its warps
// divide K: so a warp reads codes of a once for UNITS units. A thread requests the levels of the next UNITS blocks of 128
// elements before it multiplies the present ones; 64 KB for each multiprocessor are in flight.
//
// Sums are exact in s32, so the order in which warps add them does not change the bits.
//
// Variants: mma.sync with ones computes the sums of the codes of w, if a has zero points.
//
// Flags: TOKENS (8, 16, 32), UNITS, WARPS, RESIDENT (blocks of a multiprocessor), GROUPS (1, 2, 4; of a block of K),
// SKUDA_CODE, SKUDA_OUT, SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a).
#pragma once
#include "griddepcontrol.cuh"
#include "epilogue.cuh"
#include "mma_sync.cuh"
#include "packed_codes.cuh"

enum {
  THREADS = 32 * WARPS,
  EIGHTS = TOKENS / 8,
  COLUMNS = EIGHTS + A_ZERO_POINTS,  // products of a unit: eights of tokens, and a column of ones
  QUADS = 4 * UNITS,                 // groups of four rows; a thread finishes one for one token
  SUMS = UNITS * COLUMNS * 128,
  ALL_SUMS = 3 * SUMS,               // added to, while those before are finished and those before these are cleared
  BYTES = PackedLane<GROUPS>::BYTES,
  STAGED = TOKENS * PACKED_K,         // bytes of the codes of a that a warp stages
  SIZE = sizeof(SKUDA_OUT)
};

// Where the sum of a row of a unit and a token is: a lane's four sums of a product lie 32 words apart.
DEVICE s32 sum_at(s32 unit, s32 row, s32 token) {
  return ((unit * COLUMNS + token / 8) * 4 + row / 8 * 2 + token % 2) * 32 + row % 8 * 4 + token % 8 / 2;
}

DEVICE uint4 load_once(const u8* at) { return load16(at); }

// Finishes four rows for one token.
template <class Rows>
DEVICE void finish_four(const Rows& rows, const Epilogue& p, const Segment<f32>& codes, const s32* sums,
                        s64 first_row, s32 i, s64 token0, s64 row_end) {
  const s32 quad = i % QUADS, unit = quad / 4, in_unit = quad % 4 * 4, token = i / QUADS;
  const s64 row = first_row + 4 * quad, m = token0 + token;
  s32 sum[4], of_w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    sum[j] = sums[sum_at(unit, in_unit + j, token)];
    if (A_ZERO_POINTS) of_w[j] = sums[sum_at(unit, in_unit + j, TOKENS)];
  }
  if (m >= p.m || row >= row_end) return;
  const Row<Rows> of_a = {rows.within(m, p.m), A_ZERO_POINTS ? (s32)rows.zero_point_of(m) : 0, 0};
  Result v[4];
  union {
    SKUDA_OUT y[4];
    u32 word;
    uint2 two;
    uint4 four;
  } out;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool is_mine = row + j < row_end;
    const f32 sw = !IsSum<SKUDA_OUT>::value && is_mine ? real_at(p.weight_scale, p.weight_scale_is, row + j, 0.0f) : 0.0f;
    const f32 bias = is_mine && p.bias != nullptr ? real_at(p.bias, p.bias_is, row + j, 0.0f) : 0.0f;
    v[j] = apply_epilogue(subtract_zero_points(sum[j], of_a, of_w[j], 0), of_a.scale, sw, bias, Result());
    if (CURVED) v[j] = curved<SKUDA_OUT>(v[j], per_unit(codes));
  }
  rounded(v, codes, out.y);
  SKUDA_OUT* const to = p.output + m * p.output_leading + row;
  if (row + 4 <= row_end && (u64)to % (4 * SIZE) == 0) {
    if (SIZE == 1) *(u32*)to = out.word;
    if (SIZE == 2) *(uint2*)to = out.two;
    if (SIZE == 4) *(uint4*)to = out.four;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (row + j < row_end) to[j] = out.y[j];
  }
}

// Codes of a of a block of K: of TOKENS rows, zeros beyond the matrix. They pass through shared memory, in which units
// of 16 bytes of a row lie xored with its number, so that no bank is used twice.
struct TokenCodes {
  uint4 unit[2 * EIGHTS];
  DEVICE void load(const u8* row, s64 leading, s32 at, s32 length, s64 rows, u32 lane) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) {
      const s32 token = i * 4 + lane / 8, element = at + lane % 8 * 16;
      const bool exists = element < length && token < rows;
      unit[i] = exists ? *(const uint4*)(row + token * leading + element) : make_uint4(0, 0, 0, 0);
    }
  }
  DEVICE void stage(u8* staged, u32 lane) const {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) {
      const u32 token = i * 4 + lane / 8;
      *(uint4*)(staged + token * PACKED_K + (lane % 8 ^ token % 8) * 16) = unit[i];
    }
  }
};

// The staged codes as the other operand of four products.
struct Fragments {
  u32 x[2][EIGHTS][4];
  DEVICE void load(u32 staged, u32 lane) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) {
      const u32 token = i / 2 * 8 + lane % 8, unit = i % 2 * 4 + lane / 8;
      ldmatrix_x4(x[i % 2][i / 2], staged + token * PACKED_K + (unit ^ lane % 8) * 16);
    }
  }
};

// Adds the products of a block of K of a unit, of which `left` elements are left.
DEVICE void multiply(s32 (&d)[COLUMNS][4], const PackedLane<GROUPS>& levels, const Fragments& codes, s32 left) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 w[4];
    levels.codes(j, w);
#pragma unroll
    for (int t = 0; t < EIGHTS; ++t) {
      const u32(&x)[4] = codes.x[j / 2][t];
      mma_m16n8k32<s8, SKUDA_CODE>(d[t], w, x[j % 2 * 2], x[j % 2 * 2 + 1]);
    }
    if (A_ZERO_POINTS) {
      const u32 low = 32 * j < left ? 0x01010101u : 0, high = 32 * j + 16 < left ? 0x01010101u : 0;
      mma_m16n8k32<s8, SKUDA_CODE>(d[EIGHTS], w, low, high);
    }
  }
}

// Rows: RowScales or GivenRows.
template <class Rows>
DEVICE void packed_linear(const Rows& rows, const SKUDA_CODE* a, s64 a_leading, const u8* packed, const Epilogue& p, s64 k) {
  s32* const held = (s32*)shared_bytes();
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = 4 * ALL_SUMS + warp * STAGED;
  const s32 blocks = (s32)((k + PACKED_K - 1) / PACKED_K), length = (s32)k;
  const s64 units = (p.n + 15) / 16, pitch = (s64)blocks * BYTES, token0 = (s64)blockIdx.y * TOKENS;
  const s32 first = (s32)(units * blockIdx.x / gridDim.x), end = (s32)(units * (blockIdx.x + 1) / gridDim.x);
  const s64 row_end = (s64)end * 16 < p.n ? (s64)end * 16 : p.n;
  for (u32 i = threadIdx.x; i < ALL_SUMS; i += THREADS) held[i] = 0;
  __syncthreads();
  const u8* const own_a = (const u8*)a + token0 * a_leading;
  Segment<f32> codes;
  if (CodeRange<SKUDA_OUT>::max != 0) codes = p.codes(CodeRange<SKUDA_OUT>::min, CodeRange<SKUDA_OUT>::max);
  griddepcontrol_wait();

  // A unit's levels are requested as soon as those before are codes. What units beyond the last one hold is of no row.
  PackedLane<GROUPS> levels[UNITS];
  const auto request = [&](const u8* from, int u, bool exists) {
    if (exists) levels[u].load(from + u * pitch, lane, load_once);
  };
  const u8* at = packed + first * pitch + (s64)warp * BYTES;
#pragma unroll
  for (int u = 0; u < UNITS; ++u) levels[u].clear(), request(at, u, first + u < end && warp < blocks);
  TokenCodes x;
  x.load(own_a, a_leading, warp * PACKED_K, length, p.m - token0, lane);
  int buffer = 0;
#pragma unroll 1
  for (s32 unit = first; unit < end; unit += UNITS) {
    s32 d[UNITS][COLUMNS][4];
#pragma unroll
    for (int i = 0; i < UNITS * COLUMNS * 4; ++i) d[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = 0;
#pragma unroll 1
    for (s32 block = warp; block < blocks; block += WARPS) {
      const bool last = block + WARPS >= blocks;
      const s32 next_unit = last ? unit + UNITS : unit, next_block = last ? (s32)warp : block + WARPS;
      __syncwarp();  // all lanes have read what was staged before
      x.stage(shared_bytes() + own, lane);
      __syncwarp();
      Fragments codes_of_a;
      codes_of_a.load(shared_start() + own, lane);
      x.load(own_a, a_leading, next_block * PACKED_K, length, p.m - token0, lane);
      at = packed + next_unit * pitch + (s64)next_block * BYTES;
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        multiply(d[u], levels[u], codes_of_a, length - block * PACKED_K);
        request(at, u, next_unit + u < end);
      }
    }
    s32* const sums = held + buffer * SUMS;
#pragma unroll
    for (int i = 0; i < UNITS * COLUMNS * 4; ++i) atomicAdd(sums + i * 32 + lane, d[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4]);
    if (unit + UNITS >= end) griddepcontrol_launch_dependents();
    __syncthreads();
    buffer = buffer < 2 ? buffer + 1 : 0;
    s32* const before = held + (buffer < 2 ? buffer + 1 : 0) * SUMS;
    for (u32 i = threadIdx.x; i < SUMS; i += THREADS) before[i] = 0;
#pragma unroll 1
    for (s32 i = threadIdx.x; i < TOKENS * QUADS; i += THREADS) {
      finish_four(rows, p, codes, sums, (s64)unit * 16, i, token0, row_end);
    }
  }
}

#define PACKED_PARAMETERS const u8 *packed, EPILOGUE_PARAMETERS
#define PACKED_GIVEN packed, EPILOGUE, k
#define PACKED_KERNEL extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
