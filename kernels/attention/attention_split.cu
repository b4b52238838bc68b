// Attention over a paged int8 cache where sequences have few new tokens: the keys of a row are spread over warps and
// blocks. attention.py defines the arithmetic, whose bits do not depend on how they are spread.
//
//   z = q_scale c;  y = (q k) k_scale;  n = ceil(z max y);  e = E(z y + 512 - n);  p = e v_scale;  2^m >= max p
//   w = rne(255 p / 2^m);  S = sum w v;  L = sum rne(65536 e);  output = S 2^m (65536 / 255) / L
//
//   parameters          see attention.cuh; codes, k_scale and v_scale begin at multiples of 16 bytes
//   part_sums           f32 [tokens, heads, chunks, D], S of every chunk; null if gridDim.y is 1
//   part_facts          [tokens, heads, chunks], three words and an unused one for each: n, m, L
//   counters            u32 [tiles, kv_heads], 0 before and after
//   gridDim             tiles times kv_heads; the most thread blocks that share the chunks of a tile
//
// Data: a warp takes a block of 128 keys: codes in global memory -> cp.async, several steps ahead -> shared memory ->
// registers -> mma.sync -> scores in registers -> weights, packed, in registers -> mma.sync -> sums in shared memory.
// There the four warps of a thread block add the blocks of a chunk -> total of the tile in shared memory, or, if thread
// blocks share the tile -> global memory, where the last one of them adds all chunks -> output.
//
// A lane owns 32 keys: 16 c to 16 c + 15 and 64 further, for lane c of a quad. They are the columns of the first product
// whose scores the lane gets, and their weights are its part of the second one, with 16 neighbouring bytes of v_codes.
// So no lane needs a score or a weight of another. Any order of the elements of a head is right, too: a lane multiplies
// 16 neighbouring ones.
//
// Variants: one entry for each D, and for tiles of 8 and 16 rows.
#include "attention.cuh"
#include "cp_async.cuh"
#include "griddepcontrol.cuh"
#include "mma_sync.cuh"
#include "quantized_rows.cuh"

enum { THREADS = 32 * CHUNK, TILES = PAGE / 8 };  // of 8 keys

struct Parts {
  f32* sums;
  uint4* facts;
  u32* counters;
};

// Index of the thread. The compiler cannot compute what follows from it before a loop, where it would take registers.
#ifdef SKUDA_HOST
DEVICE u32 own_thread() { return threadIdx.x; }
#else
DEVICE u32 own_thread() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
#endif

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
  for (int i = 0; i < N; ++i) part.s[i] = 0.0f;
  return part;
}
template <int N> DEVICE Part<N> part_at(const Sums& sums, const f32* s) {
  Part<N> part;
  part.sums = sums;
#pragma unroll
  for (int i = 0; i < N; ++i) part.s[i] = sums.some() ? s[threadIdx.x % 32 + 32 * i] : 0.0f;
  return part;
}

// Codes on their way: steps of 1,024 bytes, which are 8 keys (D 128), 16 (64) or 32 (32), or 8 elements of 128 values.
// Sums: of the blocks of a chunk, and of the chunks before it. Rows are D + 8 apart, so that the pairs of sums that a
// warp stores are in different banks.
template <int D, int ROWS> struct Shared {
  enum { SLOTS = 64 / ROWS };
  uint4 codes[CHUNK][SLOTS][2][32];
  f32 s[CHUNK][ROWS][D + 8];
  f32 total[ROWS][D];
  Sums sums[CHUNK][ROWS], total_sums[ROWS];
  Row rows[ROWS];
  Tile at;
  s64 next[CHUNK];  // pages that the warps take next, or -1
  s32 head, chunks;  // chunks that some row sees
  bool last;
};
// The launch rule computes the size.
#define SHARED_BYTES(D, ROWS) (CHUNK * 65536 / ROWS + 4 * ROWS * (CHUNK * (D + 8) + D) + ROWS * (12 * (CHUNK + 1) + 24) + 96)

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

// A warp: the codes of its rows, and the scales of the page that it takes next.
template <int D, int ROWS> struct Warp {
  enum { HALVES = ROWS / 8, WORDS = D / 16, SLOTS = Shared<D, ROWS>::SLOTS };
  enum { STEPS = D / 8, STEP_TILES = TILES / STEPS };  // of the keys, and of the values
  Operand<s8, ROWS, WORDS> q;
  uint4 k_scale, v_scale;

  DEVICE void load_rows(const Attention& p, const Shared<D, ROWS>& shared) {
    const s32 quad = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const s8* const from = p.q_codes + shared.rows[8 * r + quad].at * D + min((int)WORDS, 4) * 4 * c;
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

  DEVICE void request_scales(const Attention& p, u32 lane, s64 page) {
    k_scale = load16(p.k_scale + page * PAGE + 4 * lane), v_scale = load16(p.v_scale + page * PAGE + 4 * lane);
  }
  // Requests a step of a page: keys, then values.
  static DEVICE void request(const Attention& p, u32 lane, int step, s64 page, uint4 (&slots)[SLOTS][2][32]) {
    const u32 octet = lane / 8, own = lane % 8;
    const u32 at = 16 * octet * D + (D == 32 ? 16 * own : own / 4 * D + 16 * (own % 4));
    const s8 *const k = p.k_codes + page * PAGE * D + at, *const v = p.v_codes + (page * D + lane / 4) * PAGE + 16 * (own % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tile = step * STEP_TILES + (D == 128 ? 0 : i * STEP_TILES / 2);
      const s8* const key = k + (64 * (tile / 8) + 2 * (tile % 8)) * D + (D == 128 ? 64 * i : 0);
      const s8* const value = v + 8 * (step - STEPS) * PAGE + 64 * i;
      cp_async_16(shared_address(&slots[step % SLOTS][i][lane]), step < STEPS ? key : value, true);
    }
  }
  // A group is made even if there is nothing to request, because groups are counted.
  static DEVICE void request_next(const Attention& p, u32 lane, int step, s64 page, s64 next, uint4 (&slots)[SLOTS][2][32]) {
    if (step + SLOTS < 2 * STEPS) request(p, lane, step + SLOTS, page, slots);
    else if (next >= 0) request(p, lane, step + SLOTS - 2 * STEPS, next, slots);
    cp_async_commit_group();
  }
  static DEVICE void arrived() {
    cp_async_wait_group<SLOTS - 1>();
    __syncwarp();
  }
  // The lane's words of tile `i` of the keys of a step.
  static DEVICE void words_of(u32 lane, const uint4 (&slot)[2][32], int i, u32 (&w)[WORDS]) {
    if (D == 32) {
      const u8* const pair = (const u8*)&slot[i / 2][lane / 8 * 8];  // of tiles, whose keys lie side by side
      const uint2 two = *(const uint2*)(pair + (i % 2 * 2 + lane / 4 % 2) * D + 8 * (lane % 4));
      w[0] = two.x, w[1] = two.y;
    } else {
#pragma unroll
      for (int j = 0; j < WORDS / 4; ++j) put(slot[D == 128 ? j : i][lane], w, 4 * j);
    }
  }
  template <int N> static DEVICE void put(const uint4& four, u32 (&w)[N], int at) {
    w[at] = four.x, w[at + 1] = four.y, w[at + 2] = four.z, w[at + 3] = four.w;
  }

  // Requests the first codes of a page.
  DEVICE void begin(const Attention& p, s64 page, Shared<D, ROWS>& shared) {
    const u32 thread = own_thread(), lane = thread % 32;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      request(p, lane, i, page, shared.codes[thread / 32]);
      cp_async_commit_group();
    }
    request_scales(p, lane, page);
  }

  // Computes the part of a block of keys that has begun, and begins the next one if there is one.
  DEVICE void take(const Attention& p, s32 block, s64 page, Shared<D, ROWS>& shared) {
    const u32 thread = own_thread(), lane = thread % 32, warp = thread / 32, quad = lane / 4, c = lane % 4;
    uint4(&slots)[SLOTS][2][32] = shared.codes[warp];

    // Scales are where sums come later. 16 are 20 apart, so that the lanes of a quad read different banks. That of a key
    // is NaN if it or that of the value is not usable.
    uint4 *const of_keys = (uint4*)shared.s[warp], *const of_values = of_keys + PAGE / 16 * 5;
    bool good = true;
    const auto checked = [&](u32 of_key, u32 of_value) {
      const bool both = usable(__uint_as_float(of_key)) && usable(__uint_as_float(of_value));
      good = good && both;
      return both ? of_key : 0x7fc00000u;
    };
    of_keys[lane + lane / 4] = make_uint4(checked(k_scale.x, v_scale.x), checked(k_scale.y, v_scale.y),
                                          checked(k_scale.z, v_scale.z), checked(k_scale.w, v_scale.w));
    of_values[lane + lane / 4] = v_scale;
    good = __all_sync(~0u, good);
    __syncwarp();

    s32 sums[TILES][2 * HALVES];  // of 8 keys, of which a lane has 2
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      arrived();
      u32 keys[STEP_TILES][WORDS];
#pragma unroll
      for (int i = 0; i < STEP_TILES; ++i) words_of(lane, slots[step % SLOTS], i, keys[i]);
      __syncwarp();
      request_next(p, lane, step, page, shared.next[own_thread() / 32], slots);
#pragma unroll
      for (int i = 0; i < STEP_TILES; ++i) q.times(keys[i], sums[step * STEP_TILES + i]);
    }
    __syncwarp();  // so that scales do not take registers before
    f32 y[TILES][2 * HALVES];
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      f32 scale[4];
      Chunk<f32>::unpack(of_keys[5 * c + 20 * (t / 8) + t % 8 / 2], scale);
#pragma unroll
      for (int i = 0; i < 4 * HALVES; ++i) {
        const int u = i / (2 * HALVES), j = i % (2 * HALVES);
        y[t + u][j] = mul_rn((f32)sums[t + u][j], scale[2 * u + j % 2]);
      }
    }

    // Of the lane's keys, in the order of their scores: which are usable, and which a row sees.
    u32 usable_keys = ~0u, counts[HALVES], unusable[HALVES];
    if (!good) {
      usable_keys = 0;
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        usable_keys |= (u32)(((const f32*)(of_keys + 5 * c + 20 * (i / 16)))[i % 16] >= 0.0f) << i;
      }
    }
    bool whole = true;
    Sums own[HALVES];
    bool some[HALVES];
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const Row& row = shared.rows[8 * r + quad];
      const s32 from = block * PAGE + 16 * c, low = row.first - from, high = row.last - from;
      some[r] = max(row.first, block * PAGE) <= min(row.last, block * PAGE + PAGE - 1);
      const u32 seen = bits_between(low, high) | bits_between(low - 64, high - 64) << 16;
      counts[r] = seen & usable_keys, unusable[r] = seen & ~usable_keys;
      whole = whole && counts[r] == ~0u;
    }
    whole = __all_sync(~0u, whole);
    if (!whole) keep(y, counts, minus_infinity());

    f32 factor[HALVES], shift[HALVES];
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      const f32 z = shared.rows[8 * r + quad].z, n = ceilf(__fmul_ru(z, quad_max(largest(y, r))));
      const s32 bad = quad_sum(unusable[r] != 0);
      const bool valid = fabsf(n) < 8388608.0f && z >= 0.0f && !bad;
      own[r].n = !some[r] ? UNSEEN : valid ? (s32)n : 0;
      factor[r] = valid ? z : 0.0f, shift[r] = valid ? 512.0f - n : 512.0f;
      own[r].weight = valid ? 0.0f : __uint_as_float(0x7fc00000u);
    }
    u32 weight[HALVES] = {};
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      f32 scale[4];
      Chunk<f32>::unpack(of_values[5 * c + 20 * (t / 8) + t % 8 / 2], scale);
#pragma unroll
      for (int i = 0; i < 4 * HALVES; ++i) {
        f32& one = y[t + i / (2 * HALVES)][i % (2 * HALVES)];
        const int r = i % (2 * HALVES) / 2;
        const f32 e = power_of_two(fma_rn(factor[r], one, shift[r]));
        weight[r] += __float_as_uint(fma_rn(e, 65536.0f, 8388608.0f));  // 0 beside 2^23 if the key does not count
        one = mul_rn(e, scale[i / (2 * HALVES) * 2 + i % 2]);
      }
    }
    if (!whole) keep(y, counts, 0.0f);
    Operand<u8, ROWS, 8> weights;  // a word has 4 keys, in the order of the columns of v_codes
#pragma unroll
    for (int r = 0; r < HALVES; ++r) {
      f32 unit;
      weights_unit(quad_max(fmaxf(largest(y, r), 0.0f)), own[r].m, unit);
      own[r].weight = own[r].weight + (f32)quad_sum((s32)(weight[r] - 32u * 0x4b000000u));
      u32 w[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        u32 code[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          code[b] = __float_as_uint(fma_rn(y[i / 4 * 8 + i % 4 + b / 2 * 4][2 * r + b % 2], unit, 8388608.0f));
        }
        w[i] = four_bytes(code[0], code[1], code[2], code[3]);
      }
      weights.set(r, w);
      if (c == 0) shared.sums[warp][8 * r + quad] = own[r];
    }

    const s64 next = shared.next[own_thread() / 32];
    if (next >= 0) request_scales(p, lane, next);
    __syncwarp();  // all lanes have read the scales
#pragma unroll
    for (int t = 0; t < STEPS; ++t) {
      arrived();
      u32 values[8];
      put(slots[(STEPS + t) % SLOTS][0][lane], values, 0), put(slots[(STEPS + t) % SLOTS][1][lane], values, 4);
      __syncwarp();
      request_next(p, lane, STEPS + t, page, next, slots);
      s32 more[2 * HALVES];
      weights.times(values, more);
#pragma unroll
      for (int r = 0; r < HALVES; ++r) {
        *(float2*)&shared.s[warp][8 * r + quad][8 * t + 2 * c] = make_float2((f32)more[2 * r], (f32)more[2 * r + 1]);
      }
    }
  }

 private:
  typedef f32 (&Scores)[TILES][2 * HALVES];
  static DEVICE void keep(Scores y, const u32 (&counts)[HALVES], f32 otherwise) {
#pragma unroll
    for (int i = 0; i < TILES * 2 * HALVES; ++i) {
      const int t = i / (2 * HALVES), j = i % (2 * HALVES);
      y[t][j] = counts[j / 2] >> (2 * t + j % 2) & 1 ? y[t][j] : otherwise;
    }
  }
  static DEVICE f32 largest(Scores y, int r) {
    f32 found = minus_infinity();
#pragma unroll
    for (int t = 0; t < TILES; ++t) found = fmaxf(found, fmaxf(y[t][2 * r], y[t][2 * r + 1]));
    return found;
  }
};

template <int D, int ROWS> DEVICE void attend(const Attention& p, const Parts& parts, Shared<D, ROWS>& shared) {
  enum { N = D / 32, LOADS = 16 };
  const s32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x % p.kv_heads, split = blockIdx.y;
  // With one sharer nothing goes through global memory.
  const auto sharers = [&] { return max(min((s32)gridDim.y, shared.chunks), 1); };
  const auto page_of = [&](const Tile& at, s32 head, s32 chunks, s32 chunk) -> s64 {
    const s32 warp = own_thread() / 32;
    const s32 block = (at.from / CHUNK + chunk) * CHUNK + warp;
    return chunk < chunks && block >= at.from && block < at.blocks ? at.page(p, head, block) : -1;
  };
  Warp<D, ROWS> own;
  {
    const Tile at(p, blockIdx.x / p.kv_heads, ROWS);
    if (!at.valid()) return;
    const s32 chunks = max((at.blocks + CHUNK - 1) / CHUNK - at.from / CHUNK, 0);
    if (split >= max(chunks, 1)) return;
    const s64 page = page_of(at, head, chunks, split);
    if (page >= 0) own.begin(p, page, shared);
    if (lane == 0) shared.next[warp] = page;
    if (threadIdx.x == 0) shared.at = at, shared.head = head, shared.chunks = chunks;
    if (threadIdx.x < ROWS) {
      shared.rows[threadIdx.x] = at.row(p, head, threadIdx.x);
      shared.total_sums[threadIdx.x] = Sums::none();
    }
  }
  __syncthreads();
  own.load_rows(p, shared);
#pragma unroll 1
  for (s32 chunk = split; chunk < shared.chunks; chunk += sharers()) {
    const u32 thread = own_thread(), lane = thread % 32, warp = thread / 32;
    const s64 page = shared.next[warp], next = page_of(shared.at, shared.head, shared.chunks, chunk + sharers());
    __syncwarp();
    if (lane == 0) shared.next[warp] = next;
    if (page >= 0) {
      own.take(p, (shared.at.from / CHUNK + chunk) * CHUNK + warp, page, shared);
    } else {
      if (next >= 0) own.begin(p, next, shared);
      if (lane < ROWS) shared.sums[warp][lane] = Sums::none();
    }
    __syncthreads();
#pragma unroll 1
    for (s32 r = warp; r < ROWS; r += CHUNK) {  // and the lane's elements of it
      if (!shared.rows[r].valid) continue;
      Part<N> sum = nothing<N>();
#pragma unroll
      for (int b = 0; b < CHUNK; ++b) sum.include(part_at<N>(shared.sums[b][r], shared.s[b][r]));
      if (sharers() > 1) {
        const s64 place = shared.rows[r].at * chunks_of(p) + chunk;
        const u32 weight = __float_as_uint(sum.sums.weight);
        if (lane == 0) parts.facts[place] = make_uint4((u32)sum.sums.n, (u32)sum.sums.m, weight, 0);
#pragma unroll
        for (int i = 0; i < N; ++i) parts.sums[place * D + lane + 32 * i] = sum.s[i];
      } else {
        Part<N> total = part_at<N>(shared.total_sums[r], shared.total[r]);
        total.include(sum);
        __syncwarp();
        if (lane == 0) shared.total_sums[r] = total.sums;
#pragma unroll
        for (int i = 0; i < N; ++i) shared.total[r][lane + 32 * i] = total.s[i];
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
  for (s32 r = warp; r < ROWS; r += CHUNK) {
    if (!shared.rows[r].valid) continue;
    const s64 row = shared.rows[r].at;
    Part<N> total = sharers() > 1 ? nothing<N>() : part_at<N>(shared.total_sums[r], shared.total[r]);
    // A lane has the facts of one of 32 chunks.
#pragma unroll 1
    for (s32 begin = 0; sharers() > 1 && begin < shared.chunks; begin += 32) {
      const f32* const sums = parts.sums + (row * chunks_of(p) + begin) * D + lane;
      const s32 count = min(shared.chunks - begin, 32);
      const uint4 facts = __ldcg(parts.facts + row * chunks_of(p) + begin + min(lane, count - 1));
#pragma unroll 1
      for (s32 from = 0; from < count; from += LOADS) {
        Part<N> loaded[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
#pragma unroll
          for (int i = 0; i < N; ++i) loaded[k].s[i] = __ldcg(sums + (s64)min(from + k, count - 1) * D + 32 * i);
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
          const s32 n = (s32)__shfl_sync(~0u, facts.x, from + k);
          loaded[k].sums.n = from + k < count ? n : UNSEEN;
          loaded[k].sums.m = (s32)__shfl_sync(~0u, facts.y, from + k);
          loaded[k].sums.weight = __uint_as_float(__shfl_sync(~0u, facts.z, from + k));
          total.include(loaded[k]);
        }
      }
    }
    const Finish finished(total.sums);
#pragma unroll
    for (int i = 0; i < N; ++i) narrow(finished(total.s[i]), p.output[row * D + lane + 32 * i]);
  }
}

#define ATTENTION_SPLIT(D, ROWS)                                                                                       \
  extern __shared__ uint4 held[];                                                                                      \
  static_assert(sizeof(Shared<D, ROWS>) == SHARED_BYTES(D, ROWS), "what the launch rule says");                        \
  Shared<D, ROWS>& shared = *(Shared<D, ROWS>*)held;                                                                   \
  griddepcontrol_launch_dependents();                                                                                  \
  griddepcontrol_wait();                                                                                               \
  const Attention p = ATTENTION_GIVEN;                                                                                 \
  attend<D, ROWS>(p, Parts{part_sums, part_facts, counters}, shared)
#define ATTENTION_SPLIT_PARAMETERS ATTENTION_PARAMETERS, f32 *part_sums, uint4 *part_facts, u32 *counters

KERNEL(THREADS, 4) attention_split_32_8(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(32, 8); }
KERNEL(THREADS, 4) attention_split_64_8(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(64, 8); }
KERNEL(THREADS, 4) attention_split_128_8(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(128, 8); }
KERNEL(THREADS, 3) attention_split_32_16(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(32, 16); }
KERNEL(THREADS, 3) attention_split_64_16(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(64, 16); }
KERNEL(THREADS, 3) attention_split_128_16(ATTENTION_SPLIT_PARAMETERS) { ATTENTION_SPLIT(128, 16); }
