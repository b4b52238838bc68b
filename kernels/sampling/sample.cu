// Sample: a token drawn from the softmax of every row, by temperature, top-k and top-p.
//
//   token = the least i with w[0] + ... + w[i] > R, over the tokens that may be drawn;  R = floor(r S' / 2^64)
//
//   logits                     Data, rows of v tokens, logits_leading elements apart
//   temperature                f32, one per row
//   top_k, top_p               s32 and f32, one per row, or null
//   seed, sequence, position   s64, one per row: r is Philox4x32-10 of these
//   row_maxima                 scratch: the largest keys of every part of a row, and where they are
//   row_sums                   scratch: the sums of weights of every part of a row
//   token                      s64 or s32, one per row
//
// sample_all: 256 threads take a row. The sums of parts say in which part the token is; only that part is read again.
// sample_some: 1024 threads take a row. What may be drawn are the tokens above a key, and the first few of those that have
// it. Few tokens can decide which key that is, and bounds say which: at least k tokens reach the k-th largest of maxima of
// groups of tokens, and tokens whose weights are all below (S - L) / v are together below S - L. One pass collects the keys of
// the others in shared memory; where there is no such bound, or too many, every pass reads the row. The key is found digit by
// digit, from counts and sums of weights by digit in shared memory: four passes for top-k, and four for top-p. The first digit
// is of m - z, because logits differ little in their upper bits, and threads that add to one place wait for each other. Then
// one pass over the row finds the token. Rows that leave no token out do none of this.
#include "weights.cuh"

enum { BINS = 2048, LEVELS = 4, LISTED = 4096 };

struct Amount { u64 sum; u32 count; };  // of some tokens: their weights, and how many they are

// The first of `count` things at which g(amount of everything up to it) > rest. `add(first, count, amount)` adds some of them,
// shared by the threads of a warp. `before` is what lies before all of them, and then what lies before the found one. g never
// falls. All threads of the block call this.
template <class Add, class G>
DEVICE u32 first_beyond(u32 count, u64 rest, Amount& before, const Add& add, const G& g) {
  __shared__ Amount amounts[32];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  u32 first = 0;
  while (true) {
    u32 piece = (count + warps - 1) / warps;
    if (piece > 8) piece = (piece + 7) / 8 * 8;  // so that pieces begin where chunks do
    const u32 from = warp * piece < count ? warp * piece : count;
    Amount own = Amount{0, 0};
    add(first + from, piece < count - from ? piece : count - from, own);
    own = Amount{warp_sum(own.sum), warp_sum(own.count)};
    if (lane == 0) amounts[warp] = own;
    __syncthreads();
    own = lane < warps ? amounts[lane] : Amount{0, 0};
    Amount upto = own;
#pragma unroll
    for (u32 offset = 1; offset < 32; offset *= 2) {
      const u64 sum = __shfl_up_sync(EVERYONE, upto.sum, offset);
      const u32 number = __shfl_up_sync(EVERYONE, upto.count, offset);
      if (lane >= offset) upto.sum += sum, upto.count += number;
    }
    const u32 found = __ballot_sync(EVERYONE, g(Amount{before.sum + upto.sum, before.count + upto.count}) > rest);
    const u32 chosen = found ? (u32)__ffs((s32)found) - 1 : 0;
    before.sum += __shfl_sync(EVERYONE, upto.sum - own.sum, (s32)chosen);
    before.count += __shfl_sync(EVERYONE, upto.count - own.count, (s32)chosen);
    first += chosen * piece;
    count = piece < count - chosen * piece ? piece : count - chosen * piece;
    __syncthreads();
    if (piece == 1) return first;
  }
}

// A row of z with its maximum.
struct Row {
  const Data* logits;
  Temperature divisor;
  f32 m;
  u32 v;
};

// What may be drawn: the tokens above a key, and the first `left` of those that have it, each of the same weight.
struct Cut { u32 key, left; u64 each, total; };

// Two native additions: shared memory has none of 64 bits.
DEVICE void add_to(u32* low, u32* high, u64 sum) {
  const u32 old = atomicAdd(low, (u32)sum), carried = old + (u32)sum < old ? 1u : 0u;
  const u32 upper = (u32)(sum >> 32) + carried;
  if (upper != 0) atomicAdd(high, upper);
}

// Tokens that may decide where a prefix of the order of z ends: those with a key of at least `least`. The keys of all of them
// are in `keys`, unless they are more than that holds.
struct Candidates { u32 least, count; const u32* keys; };

// A key that k tokens reach: the k-th largest of the maxima of some groups of tokens; 0 if those are fewer.
DEVICE u32 least_of_first(u32 k, const u64* maxima, u32 groups, u32* shared) {
  __shared__ u32 least;
  const u32 used = groups < blockDim.x ? groups : blockDim.x, own = threadIdx.x < used ? key_in(maxima[threadIdx.x]) : 0;
  shared[threadIdx.x] = own;
  if (threadIdx.x == 0) least = 0;
  __syncthreads();
  u32 reached = 0;
  for (u32 i = 0; i < used; ++i) reached += shared[i] >= own ? 1 : 0;
  if (reached >= k) atomicMax(&least, own);
  __syncthreads();
  return least;
}

// A key below which all weights are together less than `rest`; 0 if that cannot be said so simply.
DEVICE u32 least_of_sum(u64 rest, const Row& row) {
  const u64 each = rest / row.v;
  if (each < 128) return 0;  // a weight is up to 1/2 above E
  const f32 c = (f32)(63 - __clzll((s64)each) - 40) * 0.6931472f;  // with the margin, E is below each by more than 1/2
  return key_of(row.m + (c - 0.01f) - fabsf(row.m) * 1e-6f);
}

DEVICE Candidates candidates_of(const Row& row, u32 least, u32* keys) {
  __shared__ u32 count;
  if (least == 0) return Candidates{0, LISTED + 1, keys};
  __syncthreads();  // all have read what was in `keys`
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  each_of(row.logits, row.v, threadIdx.x, blockDim.x, [&](u32, f32 x) {
    const u32 key = key_of(row.divisor.z(x));
    if (key < least) return;
    const u32 at = atomicAdd(&count, 1u);
    if (at < LISTED) keys[at] = key;
  });
  __syncthreads();
  return Candidates{least, count, keys};
}

// The prefix of the order of z that ends with the first token up to which the weights, or the tokens, are `target` or more.
DEVICE Cut cut_at(const Row& row, const Candidates& candidates, u64 target, bool by_sum) {
  __shared__ u32 counts[BINS], low[BINS], high[BINS];
  Amount before = Amount{0, 0};
  u32 coarse = 0, key = 0;
#pragma unroll 1
  for (u32 level = 0; level < LEVELS; ++level) {
    const u32 shift = level == 1 ? 21 : level == 2 ? 10 : 0, digit = level == 3 ? 1023 : BINS - 1;
    const u32 known = level == 2 ? 0xffe00000u : level == 3 ? 0xfffffc00u : 0u;
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) counts[i] = low[i] = high[i] = 0;
    __syncthreads();
    const auto take = [&](u32 own) {
      const f32 c = difference(z_of(own), row.m);
      const u32 distance = __float2uint_rn(__fmul_rn(c, -62.0f));  // at most 2046
      if (level > 0 && (distance != coarse || ((own ^ key) & known) != 0)) return;
      const u32 bin = level == 0 ? distance : ~own >> shift & digit;  // the largest first
      atomicAdd(&counts[bin], 1u);
      add_to(&low[bin], &high[bin], integer(power(c)));
    };
    if (candidates.count <= LISTED) {
      for (u32 i = threadIdx.x; i < candidates.count; i += blockDim.x) take(candidates.keys[i]);
    } else {
      each_of(row.logits, row.v, threadIdx.x, blockDim.x, [&](u32, f32 x) {
        const u32 own = key_of(row.divisor.z(x));
        if (own >= candidates.least) take(own);
      });
    }
    __syncthreads();
    const u32 bin = first_beyond(
        BINS, target - 1, before,
        [&](u32 first, u32 count, Amount& own) {
          for (u32 i = first + threadIdx.x % 32; i < first + count; i += 32)
            own.sum += (u64)high[i] << 32 | low[i], own.count += counts[i];
        },
        [&](const Amount& amount) { return by_sum ? amount.sum : (u64)amount.count; });
    if (level == 0) coarse = bin;
    else key |= (~bin & digit) << shift;
  }
  const u64 each = weight(z_of(key), row.m);
  const u32 left = by_sum ? (u32)((target - before.sum + each - 1) / each) : (u32)(target - before.count);
  return Cut{key, left, each, before.sum + left * each};
}

// L: a token stays if less than this lies before it.
DEVICE u64 limit_of(f32 p, u64 total) {
  const f64 share = p > 0.0f ? floor(__dmul_rn((f64)p, __ll2double_rn((s64)total))) : 0.0;
  return share > 1.0 ? (u64)share : 1;
}

DEVICE u64 random_of(s64 seed, s64 sequence, s64 position) {
  u32 a = (u32)position, b = (u32)((u64)position >> 32), c = (u32)sequence, d = (u32)((u64)sequence >> 32);
  u32 low = (u32)seed, high = (u32)((u64)seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 x = __umulhi(0xcd9e8d57u, c) ^ b ^ low, y = __umulhi(0xd2511f53u, a) ^ d ^ high;
    b = 0xcd9e8d57u * c, d = 0xd2511f53u * a, a = x, c = y;
    low += 0x9e3779b9u, high += 0xbb67ae85u;
  }
  return (u64)b << 32 | a;
}

// The token of a row with a distribution whose temperature is not 0.
template <bool SOME>
DEVICE u32 drawn(const Row& row, u32 at, const s32* top_k, const f32* top_p, u64 random, const u64* row_maxima,
                 const Sums* row_sums, u32 parts) {
  const Sums* const sums = row_sums + (u64)at * parts;
  Cut cut = Cut{0, 0, 0, row_total(row_sums, at, parts).weights};
  if (SOME) {
    const s32 k = top_k == nullptr ? 0 : top_k[at];
    const f32 p = top_p == nullptr ? 1.0f : top_p[at];
    const bool by_count = k > 0 && (u32)k < row.v, by_sum = p < 1.0f;
    if (by_count || by_sum) {
      __shared__ u32 keys[LISTED];
      const u32 least = by_count ? least_of_first((u32)k, row_maxima + (u64)at * parts * GROUPS, parts * GROUPS, keys)
                                 : least_of_sum(cut.total - limit_of(p, cut.total), row);
      const Candidates candidates = candidates_of(row, least, keys);
#pragma unroll 1
      for (int turn = by_count ? 0 : 1; turn <= (by_sum ? 1 : 0); ++turn)  // one copy of what follows
        cut = cut_at(row, candidates, turn == 0 ? (u64)k : limit_of(p, cut.total), turn != 0);
    }
  }
  const u64 rest = __umul64hi(random, cut.total);
  Amount before = Amount{0, 0};
  u32 first = 0, count = row.v;
  if (!SOME || cut.key == 0) {
    const u32 part = first_beyond(
        parts, rest, before,
        [&](u32 from, u32 number, Amount& own) {
          for (u32 i = from + threadIdx.x % 32; i < from + number; i += 32) own.sum += sums[i].weights;
        },
        [](const Amount& amount) { return amount.sum; });
    first = part * PART, count = row.v - first < PART ? row.v - first : (u32)PART;
  }
  return first + first_beyond(
      count, rest, before,
      [&](u32 from, u32 number, Amount& own) {
        each_of(row.logits + first + from, number, threadIdx.x % 32, 32, [&](u32, f32 x) {
          const f32 z = row.divisor.z(x);
          const u32 key = key_of(z);
          if (key > cut.key) own.sum += weight(z, row.m);
          else if (key == cut.key) ++own.count;
        });
      },
      [&](const Amount& amount) { return amount.sum + (amount.count < cut.left ? amount.count : cut.left) * cut.each; });
}

template <bool SOME>
DEVICE void sample(const Data* logits, s64 logits_leading, const f32* temperature, const s32* top_k, const f32* top_p,
                   const s64* seed, const s64* sequence, const s64* position, const u64* row_maxima, const Sums* row_sums,
                   void* token, s32 wide, s32 v, s32 parts) {
  griddepcontrol_wait();
  const u32 at = blockIdx.x;
  const u64 best = row_best(row_maxima, at, (u32)parts);
  const Temperature divisor = Temperature::of(temperature, at);
  const bool greedy = divisor.value == 0.0f, known = top_p == nullptr || top_p[at] == top_p[at];
  s32 found = -1;
  if (finite(key_in(best)) && known && greedy) found = (s32)index_in(best);
  if (finite(key_in(best)) && known && divisor.valid()) {
    const Row row = Row{logits + at * logits_leading, divisor, z_of(key_in(best)), (u32)v};
    const u64 random = random_of(seed[at], sequence[at], position[at]);
    found = (s32)drawn<SOME>(row, at, top_k, top_p, random, row_maxima, row_sums, (u32)parts);
  }
  if (threadIdx.x == 0) store_token(token, wide, at, found);
}

#define SAMPLE(SOME)                                                                                                    \
  sample<SOME>(logits, logits_leading, temperature, top_k, top_p, seed, sequence, position, row_maxima, row_sums, token, \
               wide, v, parts)

KERNEL(256, 2) sample_all(const Data* logits, s64 logits_leading, const f32* temperature, const s32* top_k, const f32* top_p,
                          const s64* seed, const s64* sequence, const s64* position, const u64* row_maxima,
                          const Sums* row_sums, void* token, s32 wide, s32 v, s32 parts) {
  SAMPLE(false);
}
KERNEL(1024, 1) sample_some(const Data* logits, s64 logits_leading, const f32* temperature, const s32* top_k, const f32* top_p,
                            const s64* seed, const s64* sequence, const s64* position, const u64* row_maxima,
                            const Sums* row_sums, void* token, s32 wide, s32 v, s32 parts) {
  SAMPLE(true);
}
