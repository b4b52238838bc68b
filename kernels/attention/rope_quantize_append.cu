// Rotary embedding and quantize: new q, k and v as int8, keys and values written into a paged cache.
//
//   y = RN_T(h r norm) with r = 1 / sqrt(fold(h h) / head_size + eps), or h;  h = q, k or v
//   x = a c - b s, x' = b c + a s for the pairs (a, b) of the first `rotated` y;  x = y - k_offset for keys
//   scale = max |x| / 127, 1 if 0 in q_scale, a NaN being an infinity;  codes = clamp(rne(RN(x / scale)), -127, 127)
//
//   q, k, v          Data, a row for each token, heads side by side, their leading strides apart
//   q_norm, k_norm   Data, one per element of a head, or null
//   cos_sin          f32, a row for each position: rotated / 2 cosines, then as many sines
//   k_offset         f32, one per element of a key, or null
//   block_table      s32, most_blocks pages for each sequence
//   lengths          s32, positions of each sequence, the new ones included
//   starts           s32, first row of each sequence, then the end of the last
//   k_codes          s8 [pages, kv_heads, 128, head_size]
//   k_scale          f32 [pages, kv_heads, 128]
//   v_codes          s8 [pages, kv_heads, head_size, 128]; inside 16 columns, 4 c + 2 h + b is position 8 h + 2 c + b
//   v_scale          f32 [pages, kv_heads, 128]
//   q_codes          s8 [tokens, heads, head_size]
//   q_scale          f32 [tokens, heads]
//
// Every head is read once, by head_size / 8 neighbouring threads with 8 elements each, which are requested before the
// token's place is known. A warp takes some heads of one token, one after the other, so that its place, cosines and
// sines are read once for all of them. The page is read beside the cosines: neither waits for the other. `fold` adds the
// 8 of an octet and then over the octets, in the order of norm.py. A thread has two times 4 elements, so that the partners
// of a turn are its own; where it turns halves, neighbours exchange squares to get an octet for `fold`.
//
// A value lies across its page: each of its codes is a byte of its own, 128 bytes from the next. Where sequences have
// few new tokens, `rope_quantize_append_rows` writes them so. Where they have many, `rope_quantize_append_tiles` gives
// a block 64 aligned positions of a head, which are 64 bytes in a row for each element once they are turned over in
// shared memory; so whole sectors are written. Its last blocks are those of queries and keys.
//
// A row whose place is outside of the arrays, whatever the tables hold, counts as one that belongs to no sequence. Rows
// that are not aligned, and turns of a number of elements that 16 does not divide, take the slow path: partners are
// computed again from memory.
#include "griddepcontrol.cuh"
#include "nonfinite.cuh"
#include "quotient.cuh"

typedef SKUDA_INPUT Data;
enum { PAGE = 128, TILE = 64, QUARTER = 16, OCTET = 8, MOST_LANES = 16 };
enum { V = Width<Data>::count, LOADS = OCTET / V };
static const u32 ALL = 0xffffffffu;

struct Append {
  const Data *q, *k, *v;
  s64 q_leading, k_leading, v_leading;
  const Data *q_norm, *k_norm;
  const f32 *cos_sin, *k_offset;
  const s32 *block_table, *lengths, *starts;
  s8* k_codes;
  f32* k_scale;
  s8* v_codes;
  f32* v_scale;
  s8* q_codes;
  f32* q_scale;
  f32 eps;
  s64 tokens;
  s32 heads, kv_heads, head_size, sequences, pages, most_blocks, most_positions, rotated, interleaved;

  DEVICE u32 lanes() const { return (u32)head_size / OCTET; }  // threads of a head
  DEVICE u32 shift() const { return head_size == 128 ? 4 : head_size == 64 ? 3 : 2; }  // a division would cost more
  // An absent array has the address 0.
  DEVICE bool by_octets() const {
    const u64 rows = (u64)q | (u64)k | (u64)v | (q_leading | k_leading | v_leading) * sizeof(Data);
    const u64 vectors = (u64)q_norm | (u64)k_norm | (u64)cos_sin | (u64)k_offset | rotated;
    return (rows | vectors | (u64)k_codes | (u64)v_codes | (u64)q_codes) % 16 == 0;
  }
};

#ifndef SKUDA_HOST
DEVICE f32 larger(f32 a, f32 b) { f32 r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
// What rcp_rn does for a number that is tame, without its branch.
DEVICE f32 reciprocal(f32 s) {
  f32 y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(s));
  return fma_rn(y, -fma_rn(s, y, -1.0f), y);
}
#else
DEVICE f32 larger(f32 a, f32 b) { return a != a || a >= b ? a : b; }
DEVICE f32 reciprocal(f32 s) { return rcp_rn(s); }
#endif

// --- tables ----------------------------------------------------------------------------------------------------------

// How many of 1 to `count` are `below`, which come first. A warp searches together; the result is 0 to `count` whatever
// `below` says.
template <class F> DEVICE s32 how_many(s32 count, const F& below) {
  s32 found = 0;
  while (count > 0) {
    const s32 step = (s32)(((s64)count + 31) / 32);
    const s64 at = (s64)(threadIdx.x % 32 + 1) * step;
    const s32 full = __popc(__ballot_sync(ALL, at <= count && below(found + (s32)at)));
    found += full * step, count -= full * step;
    count = count < step ? count : step - 1;
  }
  return found;
}

struct Place {
  s64 page;
  s32 slot, position;
  bool live;
  static DEVICE Place none() { return Place{0, 0, -1, false}; }
};

// The place of a position of a sequence. A position that is not negative has cosines, even if its page is wrong.
DEVICE Place place_of(const Append& p, s64 sequence, s64 position) {
  if (position < 0 || position >= (s64)p.most_blocks * PAGE || position >= p.most_positions) return Place::none();
  const s64 page = p.block_table[sequence * p.most_blocks + position / PAGE];
  return Place{page, (s32)(position % PAGE), (s32)position, page >= 0 && page < p.pages};
}

// Which of `count` shares of `all` it is if they are equally large: a search waits for memory once more.
DEVICE s32 guess(s32 count, s64 at, s64 all) {
  const s32 i = (s32)(((f32)at + 0.5f) * (f32)count * reciprocal((f32)all));
  return i < count ? i : count - 1;
}

// The place of a row, the same for all threads of a warp.
DEVICE Place place_of_row(const Append& p, s64 row) {
  if (p.sequences == 0) return Place::none();
  s32 s = guess(p.sequences, row, p.tokens);
  s32 start = p.starts[s], stop = p.starts[s + 1], length = p.lengths[s];
  if (!(start <= row && row < stop)) {
    s = how_many(p.sequences, [&](s32 i) { return p.starts[i] <= row; });
    if (s == p.sequences) return Place::none();
    stop = p.starts[s + 1], length = p.lengths[s];
  }
  return place_of(p, s, (s64)length - stop + row);
}

// The column of v_codes that holds a position of a page, and the other way round.
DEVICE s32 column_of(s32 position) { return (position & ~15) | (position & 6) << 1 | (position & 8) >> 2 | (position & 1); }
DEVICE s32 position_of(s32 column) { return (column & ~15) | (column & 12) >> 1 | (column & 2) << 2 | (column & 1); }

// --- a head ----------------------------------------------------------------------------------------------------------

// Which elements of a head a thread has: two times 4, so that the partners of a turn are in the same thread.
struct Own {
  u32 lane, low, high;  // of the head's threads; the first element of each 4
  DEVICE Own(const Append& p, bool apart) {
    lane = threadIdx.x & (p.lanes() - 1);
    const bool split = apart && !p.interleaved && lane * OCTET < (u32)p.rotated;
    low = split ? lane * 4 : lane * OCTET, high = low + (split ? (u32)p.rotated / 2 : 4);
  }
  DEVICE u32 element(int j) const { return j < 4 ? low + j : high + j - 4; }
};

// Eight elements as they lie in memory.
DEVICE void request(const Data* p, const Own& own, uint4 (&words)[LOADS]) {
  if (LOADS == 1) {
    const uint2 low = __ldcs((const uint2*)(p + own.low)), high = __ldcs((const uint2*)(p + own.high));
    words[0] = make_uint4(low.x, low.y, high.x, high.y);
  } else {
    words[0] = load16(p + own.low), words[LOADS - 1] = load16(p + own.high);
  }
}
DEVICE void request(const Data* p, uint4 (&words)[LOADS]) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) words[i] = load16(p + i * V);
}
DEVICE void unpack(const uint4 (&words)[LOADS], f32 (&x)[OCTET]) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    f32 part[V];
    Chunk<Data>::unpack(words[i], part);
#pragma unroll
    for (int j = 0; j < V; ++j) x[i * V + j] = part[j];
  }
}
DEVICE void load(const Data* p, f32 (&x)[OCTET]) {
#pragma unroll
  for (int j = 0; j < OCTET; ++j) x[j] = widen(p[j]);
}
template <bool OCTETS> DEVICE void load(const Data* p, const Own& own, f32 (&x)[OCTET]) {
  if (OCTETS) {
    uint4 words[LOADS];
    request(p, own, words);
    unpack(words, x);
  } else {
#pragma unroll
    for (int j = 0; j < OCTET; ++j) x[j] = widen(p[own.element(j)]);
  }
}
DEVICE void four_at(const f32* p, f32 (&x)[4]) { Chunk<f32>::unpack(__ldg((const uint4*)p), x); }

// How a row is normalized: by nothing, if there is no weight.
struct Normal {
  const Data* weight;
  f32 factor;
  DEVICE f32 by(f32 h, f32 element) const {
    Data y;
    narrow(mul_rn(mul_rn(h, factor), element), y);
    return widen(y);
  }
  DEVICE f32 of(f32 h, u32 element) const { return weight == nullptr ? h : by(h, widen(weight[element])); }
};

template <bool OCTETS> DEVICE f32 factor_of(const Append& p, const Own& own, const f32 (&h)[OCTET]) {
  f32 e[OCTET];
#pragma unroll
  for (int j = 0; j < OCTET; ++j) e[j] = mul_rn(h[j], h[j]);
  const u32 pairs = OCTETS && !p.interleaved ? (u32)p.rotated / (2 * OCTET) : 0;  // of threads that split two octets
  if constexpr (OCTETS) {
    if (pairs > 0) {
      const bool odd = own.lane & 1, split = own.lane < 2 * pairs;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const f32 given = __shfl_xor_sync(ALL, odd ? e[j] : e[j + 4], 1);
        e[j] = split && odd ? given : e[j], e[j + 4] = split && !odd ? given : e[j + 4];
      }
    }
  }
#pragma unroll
  for (int half = OCTET / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) e[j] = e[j] + e[j + half];
  }
  f32 sum = e[0];
  if constexpr (OCTETS) {
    if (pairs > 0) {  // the even ones have the first octets
      const u32 at = own.lane < pairs ? 2 * own.lane : own.lane < 2 * pairs ? 2 * (own.lane - pairs) + 1 : own.lane;
      sum = __shfl_sync(ALL, sum, (s32)(threadIdx.x % 32 - own.lane + at));
    }
  }
#pragma unroll
  for (u32 half = MOST_LANES / 2; half > 0; half /= 2) {
    const f32 other = __shfl_xor_sync(ALL, sum, half);
    if (half < p.lanes()) sum = sum + other;
  }
  const f32 mean = mul_rn(sum, p.head_size == 128 ? 1.0f / 128 : p.head_size == 64 ? 1.0f / 64 : 1.0f / 32);
  return rcp_rn(__fsqrt_rn(mean + p.eps));
}

// Cosines and sines of a thread's 4 pairs, the same for all heads of a token.
struct Angles {
  f32 c[4], s[4];
};

DEVICE void angles_of(const Append& p, const Own& own, s32 position, Angles& angles) {
  if (own.lane * OCTET >= (u32)p.rotated) return;
  const f32* cosines = p.cos_sin + (s64)position * p.rotated + own.lane * 4;
  four_at(cosines, angles.c), four_at(cosines + (u32)p.rotated / 2, angles.s);
}

DEVICE void turn_pair(f32 c, f32 s, f32& a, f32& b) {
  const f32 turned = mul_rn(a, c) - mul_rn(b, s);
  b = mul_rn(b, c) + mul_rn(a, s), a = turned;
}

// Turns the elements `own` of a head, which is `h` in memory.
template <bool OCTETS>
DEVICE void turn(const Append& p, const Data* h, const Normal& normal, const Angles& angles, const Own& own,
                 s32 position, f32 (&x)[OCTET]) {
  const u32 half = (u32)p.rotated / 2;
  if (OCTETS) {
    if (own.lane * OCTET >= (u32)p.rotated) return;
    if (p.interleaved) {
#pragma unroll
      for (int j = 0; j < 4; ++j) turn_pair(angles.c[j], angles.s[j], x[2 * j], x[2 * j + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) turn_pair(angles.c[j], angles.s[j], x[j], x[j + 4]);
    }
  } else {
    const f32 *cosines = p.cos_sin + (s64)position * p.rotated, *sines = cosines + half;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
      const u32 e = own.element(j);
      if (e >= (u32)p.rotated) continue;
      const bool first = p.interleaved ? e % 2 == 0 : e < half;
      const u32 distance = p.interleaved ? 1 : half, other = first ? e + distance : e - distance;
      const u32 pair = p.interleaved ? e / 2 : first ? e : other;
      const f32 product = mul_rn(normal.of(widen(h[other]), other), sines[pair]);
      x[j] = mul_rn(x[j], cosines[pair]) + (first ? -product : product);
    }
  }
}

// Codes of a part of a head; returns RN(m / 127), of all threads of the head. IS_DATA: x are Data as they were.
template <bool IS_DATA> DEVICE f32 quantize(const Append& p, const f32 (&x)[OCTET], u32 (&codes)[OCTET]) {
  f32 own = fabsf(x[0]);  // a NaN if there is one
#pragma unroll
  for (int j = 1; j < OCTET; ++j) own = larger(own, fabsf(x[j]));
  s32 most = bits_of(own);  // those of a NaN are the largest
#pragma unroll
  for (u32 half = MOST_LANES / 2; half > 0; half /= 2) {
    most = max_of(most, __shfl_xor_sync(ALL, most, half & (p.lanes() - 1)));  // at the end its own
  }
  // Rounded correctly for every mantissa, if nothing underflows; a tame scale shows that, and that all x are finite.
  const f32 part = 1.0f / 127, m = number_of(most), near = mul_rn(m, part);
  const f32 scale = fma_rn(fma_rn(near, -127.0f, m), part, near);
  if (tame(scale)) {
    // As in quotient.cuh, but the first quotient is faithful already, so that one step is enough for f32.
    const f32 y = reciprocal(scale), lack = fma_rn(-scale, y, 1.0f);
    const f32 rest = fma_rn(mul_rn(lack, lack), y, mul_rn(lack, y));
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
      f32 q = fma_rn(x[j], y, mul_rn(x[j], rest));
      if (!IS_DATA || sizeof(Data) > 2) q = fma_rn(fma_rn(q, scale, -x[j]), -y, q);
      codes[j] = Magic<f32>::low(q + Magic<f32>::value());
    }
    return scale;
  }
  const f32 extreme = div_rn(number_of(capped(most)), 127.0f);
#pragma unroll
  for (int j = 0; j < OCTET; ++j) {  // no call: what lives across one is kept in memory
    const f32 q = div_rn(x[j], extreme == 0 ? 1.0f : extreme);
    codes[j] = (u32)(s32)(q == q ? fminf(fmaxf((f32)rint(q), -127.0f), 127.0f) : 0.0f);
  }
  return extreme;
}

template <bool OCTETS> DEVICE void put_octet(s8* p, const Own& own, const u32 (&codes)[OCTET]) {
  if (OCTETS) {  // not streamed: attention reads them next
    *(u32*)(p + own.low) = four_bytes(codes[0], codes[1], codes[2], codes[3]);
    *(u32*)(p + own.high) = four_bytes(codes[4], codes[5], codes[6], codes[7]);
  } else {
#pragma unroll
    for (int j = 0; j < OCTET; ++j) p[own.element(j)] = (s8)codes[j];
  }
}

// --- rows and tiles --------------------------------------------------------------------------------------------------

// The heads that a warp takes are of one kind: queries, keys or values.
struct Kind {
  bool is_q, is_k;
  // By value: parameters that are chosen by address would lie in local memory.
  template <class T> DEVICE T of(T q, T k, T v) const {
    const T other = is_k ? k : v;
    return is_q ? q : other;
  }
};

// Normalizes, turns and shifts the elements `x` of a head, which is `h` in memory.
template <bool OCTETS>
DEVICE void prepare(const Append& p, const Kind& kind, u32 head, const Data* h, const Place& place, const Angles& angles,
                    const Own& own, f32 (&x)[OCTET]) {
  Normal normal = Normal{kind.of<const Data*>(p.q_norm, p.k_norm, nullptr), 1};
  if (normal.weight != nullptr) {
    normal.factor = factor_of<OCTETS>(p, own, x);
    f32 weights[OCTET];
    load<OCTETS>(normal.weight, own, weights);
#pragma unroll
    for (int j = 0; j < OCTET; ++j) x[j] = normal.by(x[j], weights[j]);
  }
  if (p.rotated > 0 && (kind.is_q || kind.is_k)) turn<OCTETS>(p, h, normal, angles, own, place.position, x);
  if (p.k_offset != nullptr && kind.is_k) {
    const f32* offset = p.k_offset + head * p.head_size;
#pragma unroll
    for (int i = 0; i < OCTET; i += 4) {
      f32 four[4];
      if (OCTETS) four_at(offset + own.element(i), four);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = x[i + j] - (OCTETS ? four[j] : __ldg(offset + own.element(i + j)));
    }
  }
}

// Some heads of a kind of a token for each warp: up to `turns` times as many as it has threads for. The next are
// requested before the work on those that are there. It is a loop, because a warp that runs each instruction once waits
// for instructions.
template <bool VALUES, bool OCTETS>
DEVICE void heads_of_a_row(const Append& p, u32 block, u32 q_parts, u32 kv_parts, u32 turns) {
  const Own own(p, OCTETS);
  const u32 side = 32u >> p.shift(), d = p.head_size, parts = q_parts + (VALUES ? 2 : 1) * kv_parts;
  const u32 warp = block * (blockDim.x / 32) + threadIdx.x / 32, row = warp / parts, part = warp - row * parts;
  if (row >= p.tokens) return;  // the whole warp, as in the loop below
  const bool is_q = part < q_parts, is_k = !is_q && (!VALUES || part < q_parts + kv_parts);
  const Kind kind = {is_q, is_k};
  const u32 heads = kind.of(p.heads, p.kv_heads, p.kv_heads);
  const u32 first = (part - kind.of(0u, q_parts, q_parts + kv_parts)) * turns * side;
  const u32 last = min(first + turns * side, heads);
  u32 head = first + (threadIdx.x % 32 >> p.shift());
  const Data* data = kind.of(p.q, p.k, p.v) + row * kind.of(p.q_leading, p.k_leading, p.v_leading);
  data += (u64)min(head, heads - 1) * d;
  uint4 next[LOADS] = {};
  if (OCTETS) request(data, own, next);
  Place place = place_of_row(p, row);
  Angles angles = {};
  if (OCTETS && place.position >= 0 && (is_q || is_k)) angles_of(p, own, place.position, angles);
  const u32 apart = is_q ? 1 : PAGE;
  const s64 at = is_q ? (s64)row * heads + head : (place.page * heads + head) * PAGE;
  f32* scales = kind.of(p.q_scale, p.k_scale, p.v_scale) + at + (is_q ? 0 : place.slot);
  s8* to = kind.of(p.q_codes, p.k_codes, p.v_codes) + at * d;
  to += kind.of<s64>(0, (s64)place.slot * d, column_of(place.slot));
#pragma unroll 1
  for (u32 i = first; i < last; i += side) {
    uint4 words[LOADS];
    const Data* h = data;
#pragma unroll
    for (int j = 0; j < LOADS; ++j) words[j] = next[j];
    if (head + side < heads) data += side * d;
    if (OCTETS && i + side < last) request(data, own, next);
    if (!OCTETS) place = place_of_row(p, row);  // again, or addresses of all turns would be kept in local memory
    f32 x[OCTET], scale = 0;
    u32 codes[OCTET] = {};
    if (place.live) {  // the same for the whole warp
      if (OCTETS) unpack(words, x);
      else load<false>(h, own, x);
      prepare<OCTETS>(p, kind, head < heads ? head : 0, h, place, angles, own, x);
      scale = quantize<false>(p, x, codes);
    }
    if (head < heads && (is_q || place.live)) {
      if (VALUES && !is_q && !is_k) {
#pragma unroll
        for (int j = 0; j < OCTET; ++j) to[own.element(j) * PAGE] = (s8)codes[j];
      } else {
        put_octet<OCTETS>(to, own, codes);
      }
      if (own.lane == 0) *scales = is_q && scale == 0 ? 1.0f : scale;
    }
    head += side, to += side * apart * d, scales += side * apart;
  }
}

// Where the codes of element `d` lie in shared memory, for 4 columns each: no two threads of a warp that write at once
// meet in a bank, where heads have 128 elements.
DEVICE u32 word_at(u32 d, u32 four) { return (d ^ (four & 1)) * (TILE / 4) + (four ^ (d >> 3 & 15)); }

// Values of 64 aligned positions of a head. Tiles are numbered so that sequence s has those from starts[s] / 64 + 2 s on,
// which are at least as many as its new tokens touch. A thread takes the 4 positions that are neighbours in a page, so
// that it writes whole words.
template <bool OCTETS> DEVICE void values_of_a_tile(const Append& p, u32 block, u32* tile) {
  const u32 number = block / p.kv_heads, head = block - number * p.kv_heads;
  if (p.sequences == 0) return;
  s32 s = guess(p.sequences, number, p.tokens / TILE + 2 * (s64)p.sequences);
  s64 start = p.starts[s], stop = p.starts[s + 1], end = p.lengths[s];
  const bool early = s > 0 && number < start / TILE + 2 * (s64)s;
  if (early || (s + 1 < p.sequences && number >= stop / TILE + 2 * (s64)s + 2)) {
    s = how_many(p.sequences - 1, [&](s32 i) { return (s64)p.starts[i] / TILE + 2 * (s64)i <= number; });
    start = p.starts[s], stop = p.starts[s + 1], end = p.lengths[s];
  }
  const s64 begin = end - (stop - start), first = begin > 0 ? begin : 0;  // before that is padding
  const s64 base = (first / TILE + number - start / TILE - 2 * (s64)s) * TILE;
  if (base < 0 || base >= end) return;  // the whole block, as below
  // From which position of the tile to which there are rows.
  const s64 row = base + start - begin, positions = end < p.most_positions ? end : p.most_positions;
  const s64 low = first - base > -row ? first - base : -row;
  const s64 high = positions - base < p.tokens - row ? positions - base : p.tokens - row;
  if (low >= TILE || high <= 0 || low >= high) return;
  const s32 from = low > 0 ? (s32)low : 0, to = high < TILE ? (s32)high : TILE;
  const u32 own = threadIdx.x & (p.lanes() - 1), four = threadIdx.x >> p.shift();
  const s32 slot = (s32)(four / 4 * QUARTER + four % 4 * 2);
  const Data* data = p.v + row * p.v_leading + head * p.head_size + own * OCTET;
  uint4 raw[4][LOADS] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const s32 one = slot + i / 2 * 8 + i % 2;
    if (OCTETS && one >= from && one < to) request(data + one * p.v_leading, raw[i]);
  }
  const Place place = place_of(p, s, base);
  if (!place.live) return;  // one page has all positions of the tile
  const s64 at = place.page * p.kv_heads + head;
  u32 words[OCTET];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const s32 one = slot + i / 2 * 8 + i % 2;
    f32 x[OCTET] = {};
    u32 codes[OCTET];
    if (OCTETS) unpack(raw[i], x);
    else if (one >= from && one < to) load(data + one * p.v_leading, x);
    const f32 scale = quantize<true>(p, x, codes);
    if (own == 0 && one >= from && one < to) p.v_scale[at * PAGE + place.slot + one] = scale;
#pragma unroll
    for (int j = 0; j < OCTET; ++j)
      words[j] = i == 0 ? codes[j] : __byte_perm(words[j], codes[j], i == 1 ? 0x3240 : i == 2 ? 0x3410 : 0x4210);
  }
#pragma unroll
  for (int j = 0; j < OCTET; ++j) tile[word_at(own * OCTET + j, four)] = words[j];
  __syncthreads();
  s8* page = p.v_codes + at * p.head_size * PAGE + place.slot;
  for (u32 i = threadIdx.x; i < (u32)p.head_size * (TILE / QUARTER); i += blockDim.x) {
    const u32 part = i / 4, quarter = i % 4, d = (part & (p.lanes() - 1)) * OCTET + (part >> p.shift());
    u32 some[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) some[w] = tile[word_at(d, quarter * 4 + w)];
    s8* to_write = page + d * PAGE + quarter * QUARTER;
    const s32 begins = (s32)quarter * QUARTER;
    if (begins >= from && begins + QUARTER <= to && (u64)to_write % 16 == 0) {
      *(uint4*)to_write = make_uint4(some[0], some[1], some[2], some[3]);
      continue;
    }
#pragma unroll
    for (int c = 0; c < QUARTER; c += 2) {  // two columns have neighbouring positions
      const s32 one = begins + position_of(c);
      const u32 two = some[c / 4] >> 8 * (c % 4);
      const bool first = one >= from && one < to, second = one + 1 >= from && one + 1 < to;
      if (first && second && (u64)to_write % 2 == 0) {
        *(u16*)(to_write + c) = (u16)two;
        continue;
      }
      if (first) to_write[c] = (s8)two;
      if (second) to_write[c + 1] = (s8)(two >> 8);
    }
  }
}

#define PARAMETERS                                                                                                    \
  const Data *q, s64 q_leading, const Data *k, s64 k_leading, const Data *v, s64 v_leading, const Data *q_norm,       \
      const Data *k_norm, const f32 *cos_sin, const f32 *k_offset, const s32 *block_table, const s32 *lengths,        \
      const s32 *starts, s8 *k_codes, f32 *k_scale, s8 *v_codes, f32 *v_scale, s8 *q_codes, f32 *q_scale, f32 eps,    \
      s64 tokens, s32 heads, s32 kv_heads, s32 head_size, s32 sequences, s32 pages, s32 most_blocks,                  \
      s32 most_positions, s32 rotated, s32 interleaved, s32 q_parts, s32 kv_parts, s32 turns, s32 value_blocks
#define GIVEN                                                                                                         \
  Append{q,       k,       v,       q_leading, k_leading, v_leading, q_norm,    k_norm,   cos_sin,     k_offset,      \
         block_table, lengths, starts, k_codes, k_scale,  v_codes,   v_scale,   q_codes,  q_scale,     eps,           \
         tokens,  heads,   kv_heads, head_size, sequences, pages,    most_blocks, most_positions, rotated, interleaved}

template <bool OCTETS>
DEVICE void tiles(const Append& p, u32 q_parts, u32 kv_parts, u32 turns, u32 value_blocks, u32* tile) {
  if (blockIdx.x < value_blocks) values_of_a_tile<OCTETS>(p, blockIdx.x, tile);
  else heads_of_a_row<false, OCTETS>(p, blockIdx.x - value_blocks, q_parts, kv_parts, turns);
}

KERNEL(256, sizeof(Data) == 2 ? 4 : 3) rope_quantize_append_rows(PARAMETERS) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Append p = GIVEN;
  if (p.by_octets()) heads_of_a_row<true, true>(p, blockIdx.x, q_parts, kv_parts, 1);
  else heads_of_a_row<true, false>(p, blockIdx.x, q_parts, kv_parts, 1);
}

KERNEL(256, sizeof(Data) == 2 ? 4 : 3) rope_quantize_append_tiles(PARAMETERS) {
  __shared__ u32 tile[PAGE * TILE / 4];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Append p = GIVEN;
  if (p.by_octets()) tiles<true>(p, q_parts, kv_parts, turns, (u32)value_blocks, tile);
  else tiles<false>(p, q_parts, kv_parts, turns, (u32)value_blocks, tile);
}
