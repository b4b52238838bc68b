// Attention over a paged int8 cache where sequences have few new tokens: the keys of a row are spread over warps and
// blocks. attention.py defines the arithmetic, whose bits do not depend on how they are spread.
//
//   z = q_scale c;  y = (q k) k_scale;  n = ceil(z max y);  e = E(z y + 512 - n);  2^m >= max v_scale
//   w = rne(e 65280 v_scale / 2^m);  S = sum w v;  L = sum rne(2^22 e);  output = S 2^m (2^22 / 65280) / L
//
//   parameters          see attention.cuh; codes, k_scale and v_scale begin at multiples of 16 bytes
//   part_sums           f32 [tokens, heads, chunks, D], S of every chunk; null if gridDim.y is 1
//   part_facts          [tokens, heads, chunks], three words and an unused one for each: n, m, L
//   counters            u32 [tiles, kv_heads], 0 before and after
//   gridDim             tiles times kv_heads; the most thread blocks that share the chunks of a tile
//
// Data: four warps, a team, take a block of 128 keys: codes in global memory -> cp.async, the whole block, and keys of
// the next one as soon as scores are known -> shared memory -> registers -> mma.sync -> scores in registers -> both bytes
// of weights in shared memory -> registers -> mma.sync -> sums in shared memory. There the teams' blocks are added to a
// chunk -> total of the tile in registers, or, if thread blocks share the tile -> global memory, where the last one of
// them adds all chunks -> output.
//
// A warp has a quarter of a block's keys, then a quarter of the elements of its values. For the former, lane c of a quad
// owns keys 16 c + 4 (warp % 2) + 64 (warp / 2) to three further, and those 8 behind. They are the columns of the first
// product whose scores the lane gets, and their weights are two words of each other one, as they lie in v_codes. The
// largest of a block, and the weights, go through shared memory. Any order of the elements of a head is right: a lane
// multiplies 16 neighbouring ones.
//
// Variants: one entry for each D, and for tiles of 8 rows, with one team or two, and of 16 rows, with two. Two teams take
// the fewest steps one after another; they win where few thread blocks have work. A D of 128 has 16 rows with one team,
// too: for cards whose shared memory two do not fit into.
#include "attention.cuh"
#include "cp_async.cuh"
#include "griddepcontrol.cuh"
#include "mma_sync.cuh"
#include "quantized_rows.cuh"

enum { TEAM = 4, TILES = 4 };  // warps; tiles of 8 keys that a warp has

struct Parts {
  f32* sums;
  uint4* facts;
  u32* counters;
};

// Chunks of a row in global memory.
DEVICE s64 chunks_of(const Attention& p) { return ((s64)p.most_blocks + CHUNK - 1) / CHUNK; }

// What the kernel knows of a row: its sums, and S of the lane's elements lane, lane + 32, ...
template <int N> struct Part {
  Sums sums;
  f32 s[N];

  DEVICE void include(const Part& more) {
    if (!more.sums.some()) return;  // then its S is not written
    f32 f[2];
    add(sums, more.sums, f);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fma_rn(s[i], f[0], mul_rn(more.s[i], f[1]));
  }
};
template <int N> DEVICE Part<N> nothing() {
  Part<N> part;
  part.sums = Sums::none();
#pragma unroll
  for (int i = 0; i < N; ++i) part.s[i] = -0.0f;
  return part;
}
template <int N> DEVICE Part<N> part_at(const Sums& sums, const f32* s) {
  Part<N> part;
  part.sums = sums;
#pragma unroll
  for (int i = 0; i < N; ++i) part.s[i] = sums.some() ? s[threadIdx.x % 32 + 32 * i] : 0.0f;
  return part;
}

// What the warps of a team tell each other about a block of keys.
template <int ROWS> struct Exchange {
  f32 scores[ROWS][TEAM], values[ROWS][TEAM];  // the largest score, NaN if a key is not usable, and v_scale
  s32 weight[ROWS][TEAM];
  u32 high[ROWS][4][8], low[ROWS][4][8];  // words of a lane of a quad: bytes of weights
};

// Codes of a block of keys, and of its values, in units of 16 bytes. Sums: of the blocks of a chunk. Rows are D + 8 apart,
// so that the pairs of sums that a warp stores are in different banks.
template <int D, int ROWS, int TEAMS> struct Shared {
  uint4 keys[TEAMS][PAGE * D / 16], values[TEAMS][PAGE * D / 16];
  f32 s[CHUNK][ROWS][D + 8];
  Exchange<ROWS> exchange[TEAMS];
  Sums sums[CHUNK][ROWS];
  Row rows[ROWS];
  Tile at;
  s32 head, chunks;  // chunks that some row sees
  bool last;
};
// The launch rule computes the size.
#define SHARED_BYTES(D, ROWS, TEAMS) \
  (TEAMS * (256 * D + 304 * ROWS) + 4 * ROWS * CHUNK * (D + 8) + ROWS * (12 * CHUNK + 24) + 64)

// Products of 8 or 16 rows with 8 columns, of WORDS words of each lane. A product has 16 rows: 8 rows have their even
// pairs of words in the upper half, the odd ones in the lower half, and take from each product the half that has met
// its own words. So their operand is as long as it is, and nothing is padded.
template <class A, int ROWS, int WORDS> struct Operand {
  enum { HALVES = ROWS / 8, STEPS = HALVES == 2 ? WORDS / 2 : (WORDS + 3) / 4 };
  u32 a[STEPS][4];

  DEVICE void set(int half, const u32 (&w)[WORDS]) {
#pragma unroll
    for (int i = 0; i < 4 * STEPS / HALVES; ++i) {
      const u32 word = i < WORDS ? w[i] : 0;
      if (HALVES == 2) a[i / 2][half + 2 * (i % 2)] = word;
      else a[i / 4][i % 4 / 2 + 2 * (i % 2)] = word;
    }
  }
  // Sums of columns 2 c and 2 c + 1, of each half of the rows.
  DEVICE void times(const u32 (&w)[WORDS], s32 (&sums)[2 * HALVES]) const {
    s32 acc[2][4] = {};
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      mma_m16n8k32<A, s8>(acc[HALVES == 2 ? 0 : i / 2 % 2], a[HALVES == 2 ? i / 2 : i / 4], w[i], w[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2 * HALVES; ++i) sums[i] = HALVES == 2 ? acc[0][i] : acc[0][i] + acc[1][i + 2];
  }
};

// Bits `low` to `high` of 16.
DEVICE u32 bits_between(s32 low, s32 high) {
  low = max(low, 0), high = min(high, 15);
  return low > high ? 0u : (2u << high) - (1u << low);
}

// A warp of a team: the codes of its rows, and the scales of the lane's keys of the next block, four and four.
template <int D, int ROWS, int TEAMS> struct Warp {
  enum { HALVES = ROWS / 8, WORDS = D / 16, UNITS = D / 16 };  // of a key
  Operand<s8, ROWS, WORDS> q;
  uint4 k_scale[2], v_scale[2];

  // The first of the lane's keys; of the warp's keys, if c is 0.
  static DEVICE u32 first_key(u32 warp, u32 c) { return warp / 2 * 64 + warp % 2 * 4 + 16 * c; }
  // The two halves of odd rows of 128 bytes are exchanged, so that two rows are in different banks.
  static DEVICE u32 place(u32 row, u32 unit, u32 units) { return row * units + (units == 8 ? unit ^ row % 2 * 4 : unit); }

  DEVICE void load_rows(const Attention& p, const Row (&rows)[HALVES]) {
    const s32 c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const s8* const from = p.q_codes + rows[r].at * D + min((int)WORDS, 4) * 4 * c;
      u32 w[WORDS];
      if (D == 32) {
        const uint2 two = __ldcs((const uint2*)from);
        w[0] = two.x, w[1] = two.y;
      } else {
#pragma unroll
        for (int i = 0; i < WORDS / 4; ++i) put(load16(from + 64 * i), w, 4 * i);
      }
      q.set(r, w);
    }
  }

  // Requests the warp's keys of a page, or its values. A group is made even without a page, because groups are counted.
  static DEVICE void request_keys(const Attention& p, u32 warp, u32 lane, s64 page, uint4* to) {
    const u8* const from = (const u8*)p.k_codes + page * PAGE * D;
#pragma unroll
    for (int i = 0; i < UNITS && page >= 0; ++i) {
      const u32 at = lane + 32 * i, key = at / UNITS, unit = at % UNITS;
      const u32 row = first_key(warp, key / 8) + key / 4 % 2 * 8 + key % 4;
      cp_async_16(shared_address(to + place(row, unit, UNITS)), from + row * D + unit * 16, true);
    }
    cp_async_commit_group();
  }
  static DEVICE void request_values(const Attention& p, u32 warp, u32 lane, s64 page, uint4* to) {
    const u8* const from = (const u8*)p.v_codes + page * PAGE * D;
#pragma unroll
    for (int i = 0; i < D / 4 * 8 / 32 && page >= 0; ++i) {
      const u32 at = warp * (D / 4 * 8) + lane + 32 * i, row = at / 8, unit = at % 8;
      cp_async_16(shared_address(to + place(row, unit, 8)), from + at * 16, true);
    }
    cp_async_commit_group();
  }
  DEVICE void request_scales(const Attention& p, u32 warp, u32 c, s64 page) {
    const s64 at = page * PAGE + first_key(warp, c);
#pragma unroll
    for (int i = 0; i < 2; ++i) k_scale[i] = load16(p.k_scale + at + 8 * i), v_scale[i] = load16(p.v_scale + at + 8 * i);
  }
  static DEVICE void arrived() {
    cp_async_wait_group<1>();
    __syncwarp();
  }
  template <int N> static DEVICE void put(const uint4& four, u32 (&w)[N], int at) {
    w[at] = four.x, w[at + 1] = four.y, w[at + 2] = four.z, w[at + 3] = four.w;
  }
  DEVICE static void wait_for_team() { bar_sync<32 * TEAM>(1 + own_thread() / (32 * TEAM)); }

  // Requests a page.
  DEVICE void begin(const Attention& p, s64 page, Shared<D, ROWS, TEAMS>& shared) {
    const u32 thread = own_thread(), lane = thread % 32, team = thread / (32 * TEAM), warp = thread / 32 % TEAM;
    request_keys(p, warp, lane, page, shared.keys[team]);
    request_values(p, warp, lane, page, shared.values[team]);
    request_scales(p, warp, lane % 4, page);
  }

  // Computes the warp's part of a block of keys that has begun, which is number `at` of its chunk, and begins the next
  // one if there is one.
  DEVICE void take(const Attention& p, s32 block, s32 at, s64 next, Shared<D, ROWS, TEAMS>& shared) {
    const u32 thread = own_thread(), lane = thread % 32, team = thread / (32 * TEAM), warp = thread / 32 % TEAM;
    const u32 quad = lane / 4, c = lane % 4;
    Exchange<ROWS>& exchange = shared.exchange[team];
    u32 usable_keys = 0;  // of the lane's keys, in the order of their scores
    f32 of_key[8], of_value[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Chunk<f32>::unpack(k_scale[i], *(f32(*)[4])(of_key + 4 * i));
      Chunk<f32>::unpack(v_scale[i], *(f32(*)[4])(of_value + 4 * i));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) usable_keys |= (u32)(usable(of_key[i]) && usable(of_value[i])) << i;

    f32 y[TILES][2 * HALVES];  // of 8 keys, of which a lane has 2
    arrived();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const u32 row = first_key(warp, quad / 2) + t / 2 * 8 + t % 2 * 2 + quad % 2;
      const uint4* const keys = shared.keys[team];
      u32 w[WORDS];
      if (D == 32) {
        const uint2 two = ((const uint2*)(keys + row * UNITS))[c];
        w[0] = two.x, w[1] = two.y;
      } else {
#pragma unroll
        for (int i = 0; i < WORDS / 4; ++i) put(keys[place(row, 4 * i + c, UNITS)], w, 4 * i);
      }
      s32 sums[2 * HALVES];
      q.times(w, sums);
#pragma unroll
      for (int j = 0; j < 2 * HALVES; ++j) y[t][j] = mul_rn((f32)sums[j], of_key[2 * t + j % 2]);
    }
    __syncwarp();  // all lanes have read the keys
    request_keys(p, warp, lane, next, shared.keys[team]);

    u32 counts[HALVES];
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const Row& row = shared.rows[8 * r + quad];
      const s32 from = block * PAGE + (s32)first_key(warp, c);
      const u32 sixteen = bits_between(row.first - from, row.last - from), seen = (sixteen & 15) | (sixteen >> 4 & 0xf0);
      counts[r] = seen & usable_keys;
      const s32 bad = quad_sum((seen & ~usable_keys) != 0);
      if (counts[r] != 0xff) keep(y, r, counts[r], minus_infinity());
      const f32 most = quad_max(largest(y, r));
      f32 most_value = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) most_value = fmaxf(most_value, counts[r] >> i & 1 ? of_value[i] : 0.0f);
      most_value = quad_max(most_value);
      if (c == 0) exchange.scores[8 * r + quad][warp] = bad ? __uint_as_float(0x7fc00000u) : most;
      if (c == 0) exchange.values[8 * r + quad][warp] = most_value;
    }
    wait_for_team();

    Sums own[HALVES];
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const Row& row = shared.rows[8 * r + quad];
      const float4 of = *(const float4*)exchange.scores[8 * r + quad], values = *(const float4*)exchange.values[8 * r + quad];
      const bool bad = of.x != of.x || of.y != of.y || of.z != of.z || of.w != of.w;
      const f32 z = row.z, n = ceilf(__fmul_ru(z, fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w))));
      const bool some = max(row.first, block * PAGE) <= min(row.last, block * PAGE + PAGE - 1);
      const bool valid = fabsf(n) < 8388608.0f && z >= 0.0f && !bad;
      own[r].n = !some ? UNSEEN : valid ? (s32)n : 0;
      const f32 factor = valid ? z : 0.0f, shift = valid ? 512.0f - n : 512.0f;
      own[r].weight = valid ? 0.0f : __uint_as_float(0x7fc00000u);
      f32 unit;
      weights_unit(fmaxf(fmaxf(values.x, values.y), fmaxf(values.z, values.w)), own[r].m, unit);
      u32 sum = 0, bits[2 * TILES];
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        const f32 e = power_of_two(fma_rn(factor, y[i / 2][2 * r + i % 2], shift));
        sum += __float_as_uint(fma_rn(e, 4194304.0f, 8388608.0f));  // 0 beside 2^23 if the key does not count
        bits[i] = weight_bits(e, fminf(mul_rn(fabsf(of_value[i]), unit), 65280.0f));  // where it is anything, e is 0
      }
      const s32 weight = quad_sum((s32)(sum - 8u * 0x4b000000u));
      if (c == 0) exchange.weight[8 * r + quad][warp] = weight;
      u32 high[2], low[2];  // a word has 4 keys, in the order of the columns of v_codes
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 four[4] = {bits[2 * i], bits[2 * i + 1], bits[2 * i + 4], bits[2 * i + 5]};
        weight_bytes(four, high[i], low[i]);
      }
      *(uint2*)(exchange.high[8 * r + quad][c] + 2 * warp) = make_uint2(high[0], high[1]);
      *(uint2*)(exchange.low[8 * r + quad][c] + 2 * warp) = make_uint2(low[0], low[1]);
    }
    if (next >= 0) request_scales(p, warp, c, next);
    wait_for_team();

    Operand<u8, ROWS, 8> high;
    Operand<s8, ROWS, 8> low;
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const uint4 *const from = (const uint4*)exchange.high[8 * r + quad][c], *const more = (const uint4*)exchange.low[8 * r + quad][c];
      u32 w[8];
      put(from[0], w, 0), put(from[1], w, 4);
      high.set(r, w);
      put(more[0], w, 0), put(more[1], w, 4);
      low.set(r, w);
      const int4 parts = *(const int4*)exchange.weight[8 * r + quad];
      own[r].weight = own[r].weight + (f32)(parts.x + parts.y + parts.z + parts.w);
      if (c == 0 && warp == 0) shared.sums[at][8 * r + quad] = own[r];
    }
    arrived();
#pragma unroll
    for (int t = 0; t < D / 32; ++t) {
      const u32 first = warp * (D / 4) + 8 * t;
      u32 w[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) put(shared.values[team][place(first + quad, 4 * i + c, 8)], w, 4 * i);
      s32 sums[2 * HALVES], more[2 * HALVES];
      high.times(w, sums);
      low.times(w, more);
#pragma unroll
      for (int i = 0; i < 2 * HALVES; ++i) sums[i] = 256 * sums[i] + more[i];
#pragma unroll
      for (int r = 0; r < HALVES; ++r) {
        *(float2*)&shared.s[at][8 * r + quad][first + 2 * c] = make_float2((f32)sums[2 * r], (f32)sums[2 * r + 1]);
      }
    }
    __syncwarp();  // all lanes have read the values
    request_values(p, warp, lane, next, shared.values[team]);
  }

 private:
  typedef f32 (&Scores)[TILES][2 * HALVES];
  static DEVICE void keep(Scores y, int r, u32 counts, f32 otherwise) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      f32& one = y[i / 2][2 * r + i % 2];
      one = counts >> i & 1 ? one : otherwise;
    }
  }
  static DEVICE f32 largest(Scores y, int r) {
    f32 found = minus_infinity();
#pragma unroll
    for (int t = 0; t < TILES; ++t) found = fmaxf(found, fmaxf(y[t][2 * r], y[t][2 * r + 1]));
    return found;
  }
};

template <int D, int ROWS, int TEAMS> DEVICE void attend(const Attention& p, const Parts& parts, Shared<D, ROWS, TEAMS>& shared) {
  enum { N = D / 32, HALVES = ROWS / 8, WARPS = TEAMS * TEAM };
  const s32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x % p.kv_heads, split = blockIdx.y;
  // With one sharer nothing goes through global memory.
  const auto sharers = [&] { return max(min((s32)gridDim.y, shared.chunks), 1); };
  const auto page_of = [&](const Tile& at, s32 head, s32 chunks, s32 chunk, s32 number) -> s64 {
    const s32 block = (at.from / CHUNK + chunk) * CHUNK + number;
    return chunk < chunks && block >= at.from && block < at.blocks ? at.page(p, head, block) : -1;
  };
  Warp<D, ROWS, TEAMS> own;
  s64 page;  // that the team takes next, or -1
  {
    const Tile at(p, blockIdx.x / p.kv_heads, ROWS);
    if (!at.valid()) return;
    const s32 chunks = max((at.blocks + CHUNK - 1) / CHUNK - at.from / CHUNK, 0);
    if (split >= max(chunks, 1)) return;
    page = page_of(at, head, chunks, split, warp / TEAM);
    Row rows[HALVES];  // which are on their way before the page is known
#pragma unroll
    for (int r = 0; r < HALVES; ++r) rows[r] = at.row(p, head, 8 * r + lane / 4);
    own.load_rows(p, rows);
    if (page >= 0) own.begin(p, page, shared);
    if (threadIdx.x == 0) shared.at = at, shared.head = head, shared.chunks = chunks;
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      if (warp == 0 && lane % 4 == 0) shared.rows[8 * r + lane / 4] = rows[r];
    }
  }
  enum { OWN = (ROWS + WARPS - 1) / WARPS };
  Part<N> totals[OWN];  // of rows warp, warp + WARPS, ...
#pragma unroll
  for (int i = 0; i < OWN; ++i) totals[i] = nothing<N>();
  __syncthreads();
#pragma unroll 1
  for (s32 chunk = split; chunk < shared.chunks; chunk += sharers()) {
#pragma unroll 1
    for (s32 number = own_thread() / (32 * TEAM); number < CHUNK; number += TEAMS) {
      const bool ends = number + TEAMS >= CHUNK;
      const s32 then = ends ? chunk + sharers() : chunk, of_then = ends ? number % TEAMS : number + TEAMS;
      const s64 next = page_of(shared.at, shared.head, shared.chunks, then, of_then);
      if (page >= 0) {
        own.take(p, (shared.at.from / CHUNK + chunk) * CHUNK + number, number, next, shared);
      } else {
        const u32 thread = own_thread() % (32 * TEAM);
        if (next >= 0) own.begin(p, next, shared);
        if (thread < ROWS) shared.sums[number][thread] = Sums::none();
      }
      page = next;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < OWN; ++i) {  // and the lane's elements of it
      const s32 r = warp + i * WARPS;
      if (!shared.rows[r].valid) continue;
      Part<N> sum = nothing<N>();
#pragma unroll 1
      for (int b = 0; b < CHUNK; ++b) sum.include(part_at<N>(shared.sums[b][r], shared.s[b][r]));
      if (sharers() > 1) {
        const s64 place = shared.rows[r].at * chunks_of(p) + chunk;
        const u32 weight = __float_as_uint(sum.sums.weight);
        if (lane == 0) parts.facts[place] = make_uint4((u32)sum.sums.n, (u32)sum.sums.m, weight, 0);
#pragma unroll
        for (int j = 0; j < N; ++j) parts.sums[place * D + lane + 32 * j] = sum.s[j];
      } else {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
          if (i == j) totals[j].include(sum);
        }
      }
    }
    __syncthreads();
  }

  if (sharers() > 1) {
    __threadfence();
    __syncthreads();
    const u32 others = (u32)sharers() - 1;
    if (threadIdx.x == 0) shared.last = atomicInc(parts.counters + blockIdx.x, others) == others;
    __syncthreads();
    if (!shared.last) return;
    __threadfence();
  }
#pragma unroll 1
  for (int i = 0; i < OWN; ++i) {
    const s32 r = warp + i * WARPS;
    if (!shared.rows[r].valid) continue;
    const s64 row = shared.rows[r].at;
    Part<N> total = totals[0];
#pragma unroll
    for (int j = 1; j < OWN; ++j) {
      if (i == j) total = totals[j];
    }
    // The sums of chunks come through the warp's part of the codes; lane k has the facts of the k-th of them. Loops are
    // not unrolled: the code of a block that comes last would be fetched from memory.
    u8* const held = (u8*)shared.keys + warp * (64 * D);
#pragma unroll 1
    for (s32 begin = 0; sharers() > 1 && begin < shared.chunks; begin += 16) {
      const s64 first = row * chunks_of(p) + begin;
      const s32 count = min(shared.chunks - begin, 16);
      const uint4 facts = __ldcg(parts.facts + first + min(lane, count - 1));
#pragma unroll 1
      for (s32 at = 16 * lane; at < 4 * D * count; at += 512) cp_async_16(shared_address(held + at), (const u8*)(parts.sums + first * D) + at, true);
      cp_async_commit_group();
      cp_async_wait_group<0>();
      __syncwarp();
#pragma unroll 1
      for (s32 k = 0; k < count; ++k) {
        Part<N> part;
        part.sums.n = (s32)__shfl_sync(~0u, facts.x, k), part.sums.m = (s32)__shfl_sync(~0u, facts.y, k);
        part.sums.weight = __uint_as_float(__shfl_sync(~0u, facts.z, k));
#pragma unroll
        for (int i = 0; i < N; ++i) part.s[i] = ((const f32*)held)[k * D + lane + 32 * i];
        total.include(part);
      }
      __syncwarp();
    }
    const Finish finished(total.sums);
#pragma unroll
    for (int i = 0; i < N; ++i) narrow(finished(total.s[i]), p.output[row * D + lane + 32 * i]);
  }
}

#define ATTENTION_SPLIT(D, ROWS, TEAMS)                                                                                \
  extern __shared__ uint4 held[];                                                                                      \
  static_assert(sizeof(Shared<D, ROWS, TEAMS>) == SHARED_BYTES(D, ROWS, TEAMS), "what the launch rule says");          \
  Shared<D, ROWS, TEAMS>& shared = *(Shared<D, ROWS, TEAMS>*)held;                                                     \
  griddepcontrol_wait();                                                                                               \
  griddepcontrol_launch_dependents();                                                                                  \
  const Attention p = ATTENTION_GIVEN;                                                                                 \
  attend<D, ROWS, TEAMS>(p, Parts{part_sums, part_facts, counters}, shared)
#define ATTENTION_SPLIT_PARAMETERS ATTENTION_PARAMETERS, f32 *part_sums, uint4 *part_facts, u32 *counters

KERNEL(128, 4) attention_split_32_8_1(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(32, 8, 1); }
KERNEL(128, 4) attention_split_64_8_1(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(64, 8, 1); }
KERNEL(128, 4) attention_split_128_8_1(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(128, 8, 1); }
KERNEL(256, 2) attention_split_32_8_2(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(32, 8, 2); }
KERNEL(256, 2) attention_split_64_8_2(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(64, 8, 2); }
KERNEL(256, 2) attention_split_128_8_2(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(128, 8, 2); }
KERNEL(128, 2) attention_split_128_16_1(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(128, 16, 1); }
KERNEL(256, 2) attention_split_32_16_2(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(32, 16, 2); }
KERNEL(256, 2) attention_split_64_16_2(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(64, 16, 2); }
KERNEL(256, 2) attention_split_128_16_2(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(128, 16, 2); }
