// The int8 product for few tokens and few weights, limited by latency: weights go from global memory straight to
// registers.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) (w[n, k] - zw[n])); sum_k a[m, k] w[n, k] is exact in s32
//
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//   a, w             [m, k] SKUDA_CODE, a_leading bytes apart; [n, k] SKUDA_WEIGHT, w_leading bytes apart
//   p                scales of w, bias, output [m, n] SKUDA_OUT (epilogue.cuh)
//   zero_points      [n] s32 of w, or null
//
// Data: weights and codes: global memory -> registers -> mma.sync -> sums in registers -> shared memory, where the sums
// of all warps are added up -> registers -> global memory.
//
// A block computes 8 MMAS_N rows of w by all tokens, and its warps divide K. A unit is 64 bytes of K: each thread loads
// 16 bytes of it, of one row, and uses its words as they are, since any order of K gives the same sums. A thread
// requests AHEAD units of w, and the next AHEAD units before it multiplies these. So a small w is requested all at
// once: no tensor map has to be fetched first, and nothing waits in shared memory.
//
// Variants: AHEAD is as large as the registers allow. Zero points: mma.sync with ones computes the sums of the codes of
// w, if a has zero points, and of a, if w has; they go through shared memory as one more token and one more row.
//
// `streamed.cuh` needs fewer blocks for many weights and reads the codes less often, so it wins where bandwidth counts.
//
// Flags: TOKENS (8, 16, 32), MMAS_N, WARPS (at least TOKENS MMAS_N / 16), SKUDA_CODE, SKUDA_WEIGHT, SKUDA_OUT,
// SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a, 2: of w, 3: of both).
#pragma once
#include "hopper.cuh"
#include "epilogue.cuh"
#include "mma_sync.cuh"

enum {
  THREADS = 32 * WARPS,
  UNIT = 64,                    // bytes of K of a warp's load
  TOKEN_EIGHTS = TOKENS / 8,
  MMAS_M = (TOKENS + 15) / 16,  // mma.sync has 16 tokens and 8 rows of w
  // Registers of sums, and of zero points.
  USED_REGISTERS = 4 * (MMAS_M * MMAS_N + A_ZERO_POINTS * MMAS_N + W_ZERO_POINTS * MMAS_M) + 8 * (A_ZERO_POINTS && W_ZERO_POINTS),
  AHEAD_MAX = (100 - USED_REGISTERS) / (4 * (2 * MMAS_N + TOKEN_EIGHTS)),
  AHEAD = AHEAD_MAX > 8 ? 8 : AHEAD_MAX,
  // Sums of a warp: rows of w by tokens, then sums of w as one more token, and of a as one more row of w. Rows of 8
  // MMAS_N words, and 8 more words if those are an even number of eights: pairs that are stored together lie in
  // different banks.
  PITCH = 8 * MMAS_N + (MMAS_N % 2 == 0 || W_ZERO_POINTS ? 8 : 0),
  PART = (TOKENS + A_ZERO_POINTS) * PITCH,
  QUADS = 2 * MMAS_N,           // groups of four rows of w; a thread finishes one for one token
  SIZE = sizeof(SKUDA_OUT)
};
static_assert(THREADS >= TOKENS * QUADS, "every result has a thread");
static_assert(AHEAD > 0, "sums leave no registers for operands");

// Multiplies one unit: the words of both operands are in the same order.
DEVICE void add_unit(s32 (&d)[4], const uint4& low, const uint4& high, const uint4& w) {
  const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  mma_m16n8k32<SKUDA_CODE, SKUDA_WEIGHT>(d, first, w.x, w.y);
  mma_m16n8k32<SKUDA_CODE, SKUDA_WEIGHT>(d, second, w.z, w.w);
}

DEVICE uint4 sum_of_parts(const s32* parts) {
  uint4 all = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    const uint4 one = *(const uint4*)(parts + i * PART);
    all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
  }
  return all;
}

// Rows: RowScales or GivenRows.
template <class Rows>
DEVICE void direct_linear(const Rows& rows, const SKUDA_CODE* a, s64 a_leading, const SKUDA_WEIGHT* w, s64 w_leading,
                          const Epilogue& p, const s32* zero_points, s64 k) {
  extern __shared__ uint4 held[];
  s32* const parts = (s32*)held;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const s64 row0 = (s64)blockIdx.x * (8 * MMAS_N), row = row0 + lane / 4, token = lane / 4;
  const u8* const own_w = (const u8*)w + row * w_leading;
  const u8* const own_a = (const u8*)a + token * a_leading;
  const u32 units = (u32)((k + UNIT - 1) / UNIT), hop = WARPS * AHEAD, length = (u32)k;
  const uint4 none = make_uint4(0, 0, 0, 0);

  griddepcontrol_wait();
  uint4 next[AHEAD][MMAS_N];
#pragma unroll
  for (int i = 0; i < AHEAD * MMAS_N; ++i) {
    const u32 at = (warp + i / MMAS_N * WARPS) * UNIT + lane % 4 * 16;
    const int j = i % MMAS_N;
    next[i / MMAS_N][j] = at < length && row + 8 * j < p.n ? load16(own_w + 8 * j * w_leading + at) : none;
  }
  // A thread finishes four rows of w for one token.
  const int my_token = threadIdx.x / QUADS, my_quad = threadIdx.x % QUADS;
  const s64 my_row = row0 + 4 * my_quad;
  const bool finishes = my_token < TOKENS && my_token < p.m && my_row < p.n;
  f32 sw[4], bias[4];
  s32 zw[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool is_mine = finishes && my_row + j < p.n;
    sw[j] = !IsSum<SKUDA_OUT>::value && is_mine ? real_at(p.weight_scale, p.weight_scale_is, my_row + j, 0.0f) : 0.0f;
    bias[j] = is_mine && p.bias != nullptr ? real_at(p.bias, p.bias_is, my_row + j, 0.0f) : 0.0f;
    zw[j] = W_ZERO_POINTS && is_mine ? zero_points[my_row + j] : 0;
  }
  const f32 sa = finishes ? rows.within(my_token, p.m) : 0.0f;
  const s32 za = A_ZERO_POINTS && finishes ? (s32)rows.zero_point_of(my_token) : 0;

  s32 d[MMAS_M][MMAS_N][4], w_sums[MMAS_N][4], a_sums[MMAS_M][4];
#pragma unroll
  for (int i = 0; i < 4 * MMAS_N; ++i) {
#pragma unroll
    for (int s = 0; s < MMAS_M; ++s) d[s][i / 4][i % 4] = 0;
    w_sums[i / 4][i % 4] = 0;
  }
#pragma unroll
  for (int i = 0; i < 4 * MMAS_M; ++i) a_sums[i / 4][i % 4] = 0;
  const u32 one = 0x01010101u;
  const uint4 ones = make_uint4(one, one, one, one);
#pragma unroll 1
  for (u32 first = warp; first < units; first += hop) {
    uint4 now[AHEAD][MMAS_N], codes[AHEAD][TOKEN_EIGHTS];
#pragma unroll
    for (int i = 0; i < AHEAD * TOKEN_EIGHTS; ++i) {
      const u32 at = (first + i / TOKEN_EIGHTS * WARPS) * UNIT + lane % 4 * 16;
      const int j = i % TOKEN_EIGHTS;
      codes[i / TOKEN_EIGHTS][j] = at < length && token + 8 * j < p.m ? *(const uint4*)(own_a + 8 * j * a_leading + at) : none;
    }
#pragma unroll
    for (int i = 0; i < AHEAD * MMAS_N; ++i) {
      const u32 at = (first + hop + i / MMAS_N * WARPS) * UNIT + lane % 4 * 16;
      const int j = i % MMAS_N;
      now[i / MMAS_N][j] = next[i / MMAS_N][j];
      next[i / MMAS_N][j] = at < length && row + 8 * j < p.n ? load16(own_w + 8 * j * w_leading + at) : none;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
      for (int s = 0; s < MMAS_M; ++s) {
        const uint4 low = codes[i][2 * s % TOKEN_EIGHTS], high = 2 * s + 1 < TOKEN_EIGHTS ? codes[i][(2 * s + 1) % TOKEN_EIGHTS] : none;
#pragma unroll
        for (int j = 0; j < MMAS_N; ++j) add_unit(d[s][j], low, high, now[i][j]);
        if (W_ZERO_POINTS) add_unit(a_sums[s], low, high, ones);
      }
#pragma unroll
      for (int j = 0; A_ZERO_POINTS && j < MMAS_N; ++j) add_unit(w_sums[j], ones, ones, now[i][j]);
    }
  }
  griddepcontrol_launch_dependents();

  s32* const mine = parts + warp * PART;
#pragma unroll
  for (int s = 0; s < MMAS_M; ++s) {
#pragma unroll
    for (int half = 0; half < 2 && 16 * s + 8 * half < TOKENS; ++half) {
      s32* const to = mine + (16 * s + 8 * half + lane / 4) * PITCH;
#pragma unroll
      for (int j = 0; j < MMAS_N; ++j) {
        *(int2*)(to + 8 * j + lane % 4 * 2) = make_int2(d[s][j][2 * half], d[s][j][2 * half + 1]);
      }
      if (W_ZERO_POINTS && lane % 4 == 0) to[8 * MMAS_N] = a_sums[s][2 * half];
    }
  }
#pragma unroll
  for (int j = 0; A_ZERO_POINTS && j < MMAS_N; ++j) {
    if (lane < 4) *(int2*)(mine + TOKENS * PITCH + 8 * j + lane * 2) = make_int2(w_sums[j][0], w_sums[j][1]);
  }
  __syncthreads();
  if (!finishes) return;

  const uint4 sums = sum_of_parts(parts + my_token * PITCH + 4 * my_quad);
  uint4 of_w = none;
  if (A_ZERO_POINTS) of_w = sum_of_parts(parts + TOKENS * PITCH + 4 * my_quad);
  Row<Rows> of_a = {sa, za, 0};
  if (W_ZERO_POINTS) {
    const typename Rows::Sum all_k = k;
    of_a.sum = (s32)sum_of_parts(parts + my_token * PITCH + 8 * MMAS_N).x - all_k * za;
  }
  const s32 sum[4] = {(s32)sums.x, (s32)sums.y, (s32)sums.z, (s32)sums.w};
  const s32 w_sum[4] = {(s32)of_w.x, (s32)of_w.y, (s32)of_w.z, (s32)of_w.w};
  Segment<f32> codes;
  if (CodeRange<SKUDA_OUT>::max != 0) codes = p.codes(CodeRange<SKUDA_OUT>::min, CodeRange<SKUDA_OUT>::max);
  Result v[4];
  union {
    SKUDA_OUT y[4];
    u32 word;
    uint2 two;
    uint4 four;
  } out;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = apply_epilogue(subtract_zero_points(sum[j], of_a, w_sum[j], zw[j]), sa, sw[j], bias[j], Result());
    if (CURVED) v[j] = curved<SKUDA_OUT>(v[j], per_unit(codes));
  }
  rounded(v, codes, out.y);
  SKUDA_OUT* const to = p.output + my_token * p.output_leading + my_row;
  if (my_row + 4 <= p.n && (u64)to % (4 * SIZE) == 0) {
    if (SIZE == 1) *(u32*)to = out.word;
    if (SIZE == 2) *(uint2*)to = out.two;
    if (SIZE == 4) *(uint4*)to = out.four;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (my_row + j < p.n) to[j] = out.y[j];
  }
}

#define DIRECT_PARAMETERS const SKUDA_WEIGHT *w, s64 w_leading, EPILOGUE_PARAMETERS
#define DIRECT_GIVEN w, w_leading, EPILOGUE, weight_zero_point, k
#define DIRECT_KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
