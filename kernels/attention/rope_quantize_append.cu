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
// 8 in a thread and then over the threads, in the order of norm.py. Partners of a turn are in the same thread, or come
// by a shuffle.
//
// A value lies across its page: each of its codes is a byte of its own, 128 bytes from the next. Where sequences have
// few new tokens, `rope_quantize_append_rows` writes them so. Where they have many, `rope_quantize_append_tiles` gives
// a block 32 aligned positions of a head, which are 32 bytes in a row for each element once they are turned over in
// shared memory; so whole sectors are written. Its last blocks are those of queries and keys.
//
// A row whose place is outside of the arrays, whatever the tables hold, counts as one that belongs to no sequence. Rows
// that are not aligned, and turns of a number of elements that 16 does not divide, take the slow path: partners are
// computed again from memory.
#include "griddepcontrol.cuh"
#include "nonfinite.cuh"
#include "quotient.cuh"

typedef SKUDA_INPUT Data;
enum { PAGE = 128, TILE = 32, HALF = 16, OCTET = 8 };
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
  // An absent array has the address 0.
  DEVICE bool by_octets() const {
    const u64 rows = (u64)q | (u64)k | (u64)v | (q_leading | k_leading | v_leading) * sizeof(Data);
    const u64 vectors = (u64)q_norm | (u64)k_norm | (u64)cos_sin | (u64)k_offset | rotated;
    return (rows | vectors | (u64)k_codes | (u64)v_codes | (u64)q_codes) % 16 == 0;
  }
};

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

// The place of a row, the same for all threads of a warp.
DEVICE Place place_of_row(const Append& p, s64 row) {
  if (p.sequences == 0) return Place::none();
  // First the sequence that it is if all have equally many new tokens: a search waits for memory once more.
  s32 s = (s32)(((f32)row + 0.5f) * (f32)p.sequences / (f32)p.tokens);
  s = s < p.sequences ? s : p.sequences - 1;
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

DEVICE void octet_at(const Data* p, f32 (&x)[OCTET]) {
  enum { V = Width<Data>::count };
#pragma unroll
  for (int i = 0; i < OCTET; i += V) {
    f32 part[V];
    Chunk<Data>::unpack(load16(p + i), part);
#pragma unroll
    for (int j = 0; j < V; ++j) x[i + j] = part[j];
  }
}
DEVICE void load(const Data* p, bool by_octets, f32 (&x)[OCTET]) {
  if (by_octets) {
    octet_at(p, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < OCTET; ++j) x[j] = widen(p[j]);
}
DEVICE void four_at(const f32* p, f32 (&x)[4]) { Chunk<f32>::unpack(__ldg((const uint4*)p), x); }

// How a row is normalized: by nothing, if there is no weight.
struct Normal {
  const Data* weight;
  f32 factor;
  DEVICE f32 of(f32 h, u32 element) const {
    if (weight == nullptr) return h;
    Data y;
    narrow(mul_rn(mul_rn(h, factor), widen(weight[element])), y);
    return widen(y);
  }
};

DEVICE Normal normal_of(const Append& p, const Data* weight, const f32 (&h)[OCTET]) {
  if (weight == nullptr) return Normal{nullptr, 1};
  f32 e[OCTET];
#pragma unroll
  for (int j = 0; j < OCTET; ++j) e[j] = mul_rn(h[j], h[j]);
#pragma unroll
  for (int half = OCTET / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) e[j] = e[j] + e[j + half];
  }
  f32 sum = e[0];
  for (u32 half = p.lanes() / 2; half > 0; half /= 2) sum = sum + __shfl_xor_sync(ALL, sum, half);
  return Normal{weight, div_rn(1.0f, __fsqrt_rn(div_rn(sum, (f32)p.head_size) + p.eps))};
}

// Cosines and sines of an octet, the same for all heads of a token: of 4 pairs, or of 8 elements. Those of the first
// elements have the sign that their partners have.
struct Angles {
  f32 c[OCTET], s[OCTET];
};

DEVICE void angles_of(const Append& p, u32 own, s32 position, Angles& angles) {
  const u32 half = (u32)p.rotated / 2, octets = half / OCTET;
  if (own * OCTET >= (u32)p.rotated) return;
  const bool first = own < octets;
  const u32 pair = p.interleaved ? own * 4 : (first ? own : own - octets) * OCTET;
  const f32* cosines = p.cos_sin + (s64)position * p.rotated + pair;
#pragma unroll
  for (int i = 0; i < OCTET; i += 4) {
    if (i > 0 && p.interleaved) return;
    f32 c[4], s[4];
    four_at(cosines + i, c), four_at(cosines + half + i, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) angles.c[i + j] = c[j], angles.s[i + j] = first && !p.interleaved ? -s[j] : s[j];
  }
}

// Turns the octet `own` of a head, whose `head_size` elements in memory are `h`.
DEVICE void turn(const Append& p, const Data* h, const Normal& normal, const Angles& angles, u32 own, s32 position,
                 bool by_octets, f32 (&x)[OCTET]) {
  const u32 half = (u32)p.rotated / 2;
  if (by_octets && p.interleaved) {
    if (own * OCTET >= (u32)p.rotated) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const f32 a = x[2 * j], b = x[2 * j + 1];
      x[2 * j] = mul_rn(a, angles.c[j]) - mul_rn(b, angles.s[j]);
      x[2 * j + 1] = mul_rn(b, angles.c[j]) + mul_rn(a, angles.s[j]);
    }
  } else if (by_octets) {
    const u32 octets = half / OCTET;  // of the first elements of all pairs
    const bool turns = own < 2 * octets;
    const u32 other = !turns ? own : own < octets ? own + octets : own - octets;
    const s32 from = (s32)((threadIdx.x % 32 & ~(p.lanes() - 1)) + other);
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
      const f32 partner = __shfl_sync(ALL, x[j], from);
      if (turns) x[j] = mul_rn(x[j], angles.c[j]) + mul_rn(partner, angles.s[j]);
    }
  } else {
    const f32 *cosines = p.cos_sin + (s64)position * p.rotated, *sines = cosines + half;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
      const u32 e = own * OCTET + j;
      if (e >= (u32)p.rotated) continue;
      const bool first = p.interleaved ? e % 2 == 0 : e < half;
      const u32 distance = p.interleaved ? 1 : half, other = first ? e + distance : e - distance;
      const u32 pair = p.interleaved ? e / 2 : first ? e : other;
      const f32 product = mul_rn(normal.of(widen(h[other]), other), sines[pair]);
      x[j] = mul_rn(x[j], cosines[pair]) + (first ? -product : product);
    }
  }
}

// Codes of a head's octet; returns RN(m / 127), of all threads of the head.
DEVICE f32 quantize(const Append& p, const f32 (&x)[OCTET], u32 (&codes)[OCTET]) {
  s32 most = 0;  // bits, of which those of a NaN are the largest
#pragma unroll
  for (int j = 0; j < OCTET; ++j) most = max_of(most, bits_of(fabsf(x[j])));
  for (u32 half = p.lanes() / 2; half > 0; half /= 2) most = max_of(most, __shfl_xor_sync(ALL, most, half));
  const f32 scale = div_rn(number_of(capped(most)), 127.0f);
  const Segment<f32> own[1] = {Segment<f32>::make(scale == 0 ? 1.0f : scale, 0, -127, 127, true)};
  if (all_quick(own) && all_finite(x)) quick_codes_within(x, own[0], codes);
  else quantized(x, own, codes);
  return scale;
}

DEVICE void put_octet(s8* p, bool by_octets, const u32 (&codes)[OCTET]) {
  if (by_octets) {  // not streamed: attention reads them next
    *(uint2*)p = make_uint2(four_bytes(codes[0], codes[1], codes[2], codes[3]), four_bytes(codes[4], codes[5], codes[6], codes[7]));
    return;
  }
#pragma unroll
  for (int j = 0; j < OCTET; ++j) p[j] = (s8)codes[j];
}

// --- rows and tiles --------------------------------------------------------------------------------------------------

// A head of a token: of queries, of keys or of values.
struct Head {
  const Data* data;
  u32 head;
  bool is_q, is_k;
  DEVICE Head(const Append& p, s64 row, u32 number) {
    is_q = number < (u32)p.heads, is_k = !is_q && number < (u32)(p.heads + p.kv_heads);
    head = number - (is_q ? 0 : is_k ? p.heads : p.heads + p.kv_heads);
    data = is_q ? p.q + row * p.q_leading : is_k ? p.k + row * p.k_leading : p.v + row * p.v_leading;
    data += head * p.head_size;
  }
};

// Normalizes, turns and shifts the octet `x` of a head. Every thread of a warp takes the way of all heads in it, because
// they shuffle together.
DEVICE void prepare(const Append& p, const Head& of, const Place& place, const Angles& angles, u32 own, bool by_octets,
                    f32 (&x)[OCTET]) {
  const Data* weight = of.is_q ? p.q_norm : of.is_k ? p.k_norm : nullptr;
  Normal normal = Normal{nullptr, 1};
  if (__any_sync(ALL, weight != nullptr)) {
    normal = normal_of(p, weight != nullptr ? weight : of.data, x);
    normal.weight = weight;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) x[j] = normal.of(x[j], own * OCTET + j);
  }
  if (place.position >= 0 && p.rotated > 0) {  // the same for the whole warp
    f32 turned[OCTET];
#pragma unroll
    for (int j = 0; j < OCTET; ++j) turned[j] = x[j];
    turn(p, of.data, normal, angles, own, place.position, by_octets, turned);
#pragma unroll
    for (int j = 0; j < OCTET; ++j) x[j] = of.is_q || of.is_k ? turned[j] : x[j];
  }
  if (of.is_k && p.k_offset != nullptr) {
#pragma unroll
    for (int j = 0; j < OCTET; ++j) x[j] = x[j] - __ldg(p.k_offset + of.head * p.head_size + own * OCTET + j);
  }
#pragma unroll
  for (int j = 0; j < OCTET; ++j) x[j] = place.live ? x[j] : 0;
}

DEVICE void put(const Append& p, const Head& of, s64 row, const Place& place, u32 own, bool by_octets, f32 scale,
                const u32 (&codes)[OCTET]) {
  if (of.is_q) {
    const s64 at = row * p.heads + of.head;
    put_octet(p.q_codes + at * p.head_size + own * OCTET, by_octets, codes);
    if (own == 0) p.q_scale[at] = scale == 0 ? 1.0f : scale;
    return;
  }
  if (!place.live) return;
  const s64 at = place.page * p.kv_heads + of.head;
  if (of.is_k) {
    put_octet(p.k_codes + (at * PAGE + place.slot) * p.head_size + own * OCTET, by_octets, codes);
    if (own == 0) p.k_scale[at * PAGE + place.slot] = scale;
    return;
  }
  s8* column = p.v_codes + (at * p.head_size + own * OCTET) * PAGE + column_of(place.slot);
#pragma unroll
  for (int j = 0; j < OCTET; ++j) column[j * PAGE] = (s8)codes[j];
  if (own == 0) p.v_scale[at * PAGE + place.slot] = scale;
}

// A part of a token's heads of queries, keys and, if VALUES, values for each warp: TURNS times as many as it has threads
// for. All of them are requested at once.
template <int TURNS, bool VALUES> DEVICE void heads_of_a_row(const Append& p, u32 block, u32 parts) {
  enum { V = Width<Data>::count, LOADS = OCTET / V };
  const u32 lanes = p.lanes(), own = threadIdx.x & (lanes - 1), side = 32 / lanes;
  const u32 per_row = p.heads + (VALUES ? 2 : 1) * p.kv_heads;
  const u32 part = block * (blockDim.x / 32) + threadIdx.x / 32;
  const s64 row = part / parts;
  if (row >= p.tokens) return;  // the whole warp, as in the loop below
  const u32 first = part % parts * TURNS * side, mine = first + threadIdx.x % 32 / lanes;
  const bool by_octets = p.by_octets();
  uint4 raw[TURNS][LOADS];
  if (by_octets) {
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const Data* data = Head(p, row, min(mine + i * side, per_row - 1)).data + own * OCTET;
#pragma unroll
      for (int j = 0; j < LOADS; ++j) raw[i][j] = load16(data + j * V);
    }
  }
  const Place place = place_of_row(p, row);
  Angles angles = {};
  if (by_octets && place.position >= 0 && p.rotated > 0) angles_of(p, own, place.position, angles);
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    if (first + i * side >= per_row) return;
    const u32 number = mine + i * side;
    const Head of(p, row, min(number, per_row - 1));
    f32 x[OCTET];
    u32 codes[OCTET];
    if (by_octets) {
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        f32 some[V];
        Chunk<Data>::unpack(raw[i][j], some);
#pragma unroll
        for (int e = 0; e < V; ++e) x[j * V + e] = some[e];
      }
    } else {
      load(of.data + own * OCTET, false, x);
    }
    prepare(p, of, place, angles, own, by_octets, x);
    const f32 scale = quantize(p, x, codes);
    if (number < per_row) put(p, of, row, place, own, by_octets, scale, codes);
  }
}

// Where the codes of element `d` lie in shared memory, for 4 columns each: no two threads of a warp that write at once
// meet in a bank.
DEVICE u32 word_at(u32 d, u32 four) { return (d ^ (d >> 6 & 1)) * (TILE / 4) + (four ^ (d >> 3 & 7)); }

// Values of 32 aligned positions of a head. Tiles are numbered so that sequence s has those from starts[s] / 32 + 2 s on,
// which are at least as many as its new tokens touch.
DEVICE void values_of_a_tile(const Append& p, u32 block) {
  __shared__ u32 tile[PAGE * TILE / 4];
  const s64 number = block / p.kv_heads;
  const u32 head = block % p.kv_heads, lanes = p.lanes(), own = threadIdx.x & (lanes - 1);
  if (p.sequences == 0) return;
  const s64 s = how_many(p.sequences - 1, [&](s32 i) { return (s64)p.starts[i] / TILE + 2 * (s64)i <= number; });
  const s64 start = p.starts[s], end = p.lengths[s], begin = end - (p.starts[s + 1] - start);
  const s64 first_slot = begin > 0 ? begin : 0;  // before it is padding
  const s64 base = first_slot / TILE * TILE + (number - start / TILE - 2 * s) * TILE;
  const s64 low = base > first_slot ? base : first_slot, high = base + TILE < end ? base + TILE : end;
  if (base < 0 || low >= high) return;  // the whole block
  const bool by_octets = p.by_octets();
  const u32 side = blockDim.x / lanes;  // positions at once
  f32 x[2][OCTET] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 slot = threadIdx.x / lanes + i * side;
    const s64 position = base + slot, row = start + position - begin;
    const bool inside = slot < TILE && position >= low && position < high && row >= 0 && row < p.tokens;
    if (inside) load(p.v + row * p.v_leading + head * p.head_size + own * OCTET, by_octets, x[i]);
  }
  const Place first = place_of(p, s, base);
  if (!first.live) return;  // the whole block: one page has all positions of the tile
  const s64 at = first.page * p.kv_heads + head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i * side >= TILE) break;
    const u32 slot = threadIdx.x / lanes + i * side, column = column_of(slot);
    const s64 position = base + slot, row = start + position - begin;
    u32 codes[OCTET];
    const f32 scale = quantize(p, x[i], codes);
    if (own == 0 && position >= low && position < high && row >= 0 && row < p.tokens && position < p.most_positions)
      p.v_scale[at * PAGE + first.slot + slot] = scale;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) ((s8*)&tile[word_at(own * OCTET + j, column / 4)])[column % 4] = (s8)codes[j];
  }
  const s64 most = start - begin;  // row of position 0
  const s64 last = high < p.most_positions ? high : p.most_positions;
  const s64 from = low + most < 0 ? -most : low, to = last + most > p.tokens ? p.tokens - most : last;
  __syncthreads();
  for (u32 i = threadIdx.x; i < (u32)p.head_size * (TILE / HALF); i += blockDim.x) {
    const u32 d = i / (TILE / HALF), half = i % (TILE / HALF);
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = tile[word_at(d, half * 4 + w)];
    s8* to_write = p.v_codes + (at * p.head_size + d) * PAGE + first.slot + half * HALF;
    const s64 begins = base + half * HALF;
    if (begins >= from && begins + HALF <= to && (u64)to_write % 16 == 0) {
      *(uint4*)to_write = make_uint4(words[0], words[1], words[2], words[3]);
      continue;
    }
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
      const s64 one = begins + position_of(c);
      if (one >= from && one < to) to_write[c] = (s8)(words[c / 4] >> 8 * (c % 4));
    }
  }
}

#define PARAMETERS                                                                                                    \
  const Data *q, s64 q_leading, const Data *k, s64 k_leading, const Data *v, s64 v_leading, const Data *q_norm,       \
      const Data *k_norm, const f32 *cos_sin, const f32 *k_offset, const s32 *block_table, const s32 *lengths,        \
      const s32 *starts, s8 *k_codes, f32 *k_scale, s8 *v_codes, f32 *v_scale, s8 *q_codes, f32 *q_scale, f32 eps,    \
      s64 tokens, s32 heads, s32 kv_heads, s32 head_size, s32 sequences, s32 pages, s32 most_blocks,                  \
      s32 most_positions, s32 rotated, s32 interleaved, s32 parts, s32 value_blocks
#define GIVEN                                                                                                         \
  Append{q,       k,       v,       q_leading, k_leading, v_leading, q_norm,    k_norm,   cos_sin,     k_offset,      \
         block_table, lengths, starts, k_codes, k_scale,  v_codes,   v_scale,   q_codes,  q_scale,     eps,           \
         tokens,  heads,   kv_heads, head_size, sequences, pages,    most_blocks, most_positions, rotated, interleaved}

KERNEL(256, 4) rope_quantize_append_rows(PARAMETERS) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  heads_of_a_row<1, true>(GIVEN, blockIdx.x, parts);
}

KERNEL(256, 2) rope_quantize_append_tiles(PARAMETERS) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x < (u32)value_blocks) values_of_a_tile(GIVEN, blockIdx.x);
  else heads_of_a_row<4, false>(GIVEN, blockIdx.x - value_blocks, parts);
}
