// Integer weights of logits, and what the kernels of a row share: maxima and sums of its parts.
//
//   z = RN(x / temperature), d = RN(z - m), E = 2^40 exp(max(d, -33)) by a fixed sequence in f32, w = rne(E)
//   row_maxima = the largest key of an eighth of a part and where it is;  row_sums = the sums of w, and of rne(-d E), of a part
//
// weights.py says what every step means. Keys are u32 in the order of z: minus zero is plus zero, and a NaN is above
// everything. Maxima and sums of integers are exact in any order.
//
// Data: global memory, in chunks of 16 bytes where a part begins at one -> registers -> shuffles, then shared memory ->
// a maximum for each warp of a part, and two sums for each part in global memory, which later steps read again.
//
// Variants: none. A part has 4096 tokens, so that even one row is spread over tens of blocks. Logits were just written,
// and every step reads them: they come from L2, unless the rows do not fit there.
#pragma once
#include "elements.cuh"
#include "griddepcontrol.cuh"

typedef SKUDA_DATA Data;
enum { PART = 4096, THREADS = 256, GROUPS = THREADS / 32 };
const u32 EVERYONE = 0xffffffffu;

// Calls f(i, x[i]) for all i < count; `threads` threads share them.
template <class F> DEVICE void each_of(const Data* x, u32 count, u32 thread, u32 threads, const F& f) {
  enum { V = Width<Data>::count };
  u32 done = 0;
  if ((u64)x % 16 == 0) {
    const u32 chunks = count / V;
#pragma unroll 4
    for (u32 i = thread; i < chunks; i += threads) {
      f32 values[V];
      Chunk<Data>::unpack(__ldca((const uint4*)x + i), values);
#pragma unroll
      for (u32 j = 0; j < V; ++j) f(i * V + j, values[j]);
    }
    done = chunks * V;
  }
#pragma unroll 1
  for (u32 i = done + thread; i < count; i += threads) f(i, widen(x[i]));
}

// The z of a row, and whether its temperature is one that divides.
struct Temperature {
  f32 value;
  bool divides;
  static DEVICE Temperature of(const f32* temperature, u32 row) {
    const f32 value = temperature == nullptr ? 1.0f : temperature[row];
    return Temperature{value, value != 1.0f && value != 0.0f};
  }
  DEVICE f32 z(f32 x) const { return (divides ? __fdiv_rn(x, value) : x) + 0.0f; }  // minus zero becomes plus zero
  DEVICE bool valid() const { return value > 0.0f && value < __uint_as_float(0x7f800000u); }
};

DEVICE u32 key_of(f32 z) {
  const u32 bits = __float_as_uint(z);
  return z != z ? 0xffffffffu : bits ^ ((u32)((s32)bits >> 31) | 0x80000000u);
}
DEVICE f32 z_of(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }
// Whether a row whose largest key this is has a distribution: z is finite. Without tokens the key is 0.
DEVICE bool finite(u32 key) { return key > 0x007fffffu && key < 0xff800000u; }

// A key and where it is: the larger one has the larger key, and of equal keys the lower index.
DEVICE u64 ranked(u32 key, u32 index) { return (u64)key << 32 | (u32)~index; }
DEVICE u32 key_in(u64 best) { return (u32)(best >> 32); }
DEVICE u32 index_in(u64 best) { return ~(u32)best; }

// max(d, -33), and E of it.
DEVICE f32 difference(f32 z, f32 m) { return fmaxf(__fsub_rn(z, m), -33.0f); }
DEVICE f32 power(f32 c) {
  const f32 magic = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction, and k in its low bits
  const f32 shifted = __fadd_rn(__fmul_rn(c, 0x1.715476p+0f), magic), k = __fsub_rn(shifted, magic);
  const f32 f = __fmaf_rn(c, 0x1.4ae0c0p-26f, __fmaf_rn(c, 0x1.715476p+0f, -k));
  f32 p = 0x1.5bda40p-10f;
  p = __fmaf_rn(p, f, 0x1.3ce8acp-7f);
  p = __fmaf_rn(p, f, 0x1.c6b6d8p-5f);
  p = __fmaf_rn(p, f, 0x1.ebf9c2p-3f);
  p = __fmaf_rn(p, f, 0x1.62e42ap-1f);
  p = __fmaf_rn(p, f, 1.0f);
  return __uint_as_float(__float_as_uint(p) + ((__float_as_uint(shifted) - __float_as_uint(magic) + 40u) << 23));
}
DEVICE u64 integer(f32 v) { return (u64)__float2ll_rn(v); }
DEVICE u64 weight(f32 z, f32 m) { return integer(power(difference(z, m))); }

DEVICE u64 warp_max(u64 v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v = max_of(v, __shfl_xor_sync(EVERYONE, v, offset));
  return v;
}
template <class T> DEVICE T warp_sum(T v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(EVERYONE, v, offset);
  return v;
}

// The maximum of a row, and the sums of its parts; every warp computes them for itself.
DEVICE u64 row_best(const u64* row_maxima, u32 row, u32 parts) {
  const u64* const own = row_maxima + (u64)row * parts * GROUPS;
  u64 best = 0;
#pragma unroll 4
  for (u32 i = threadIdx.x % 32; i < parts * GROUPS; i += 32) best = max_of(best, own[i]);
  return warp_max(best);
}
struct Sums { u64 weights, rest; };
DEVICE Sums row_total(const Sums* row_sums, u32 row, u32 parts) {
  Sums sums = Sums{0, 0};
  for (u32 i = threadIdx.x % 32; i < parts; i += 32) {
    const Sums own = row_sums[(u64)row * parts + i];
    sums.weights += own.weights, sums.rest += own.rest;
  }
  return Sums{warp_sum(sums.weights), warp_sum(sums.rest)};
}

DEVICE void store_token(void* tokens, s32 wide, u32 at, s32 token) {
  if (wide) ((s64*)tokens)[at] = token;
  else ((s32*)tokens)[at] = token;
}

struct Part {
  u32 row, first, count;
  static DEVICE Part of(u32 block, u32 v, u32 parts) {
    const u32 row = block / parts, first = (block - row * parts) * PART;
    return Part{row, first, v - first < PART ? v - first : (u32)PART};
  }
};

KERNEL(THREADS, 4) row_maxima(const Data* logits, s64 logits_leading, const f32* temperature, u64* row_maxima, s32 v, s32 parts) {
  griddepcontrol_wait();
  const Part part = Part::of(blockIdx.x, (u32)v, (u32)parts);
  const Temperature divisor = Temperature::of(temperature, part.row);
  u64 best = 0;
  each_of(logits + part.row * logits_leading + part.first, part.count, threadIdx.x, THREADS, [&](u32 i, f32 x) {
    best = max_of(best, ranked(key_of(divisor.z(x)), part.first + i));
  });
  best = warp_max(best);
  if (threadIdx.x % 32 == 0) row_maxima[(u64)blockIdx.x * GROUPS + threadIdx.x / 32] = best;
}

KERNEL(THREADS, 4) row_sums(const Data* logits, s64 logits_leading, const f32* temperature, const u64* row_maxima, Sums* row_sums,
                            s32 v, s32 parts) {
  __shared__ Sums shared[GROUPS];
  griddepcontrol_wait();
  const Part part = Part::of(blockIdx.x, (u32)v, (u32)parts);
  const Temperature divisor = Temperature::of(temperature, part.row);
  const u32 key = key_in(row_best(row_maxima, part.row, (u32)parts));
  Sums sums = Sums{0, 0};
  if (finite(key)) {
    const f32 m = z_of(key);
    each_of(logits + part.row * logits_leading + part.first, part.count, threadIdx.x, THREADS, [&](u32, f32 x) {
      const f32 c = difference(divisor.z(x), m), e = power(c);
      sums.weights += integer(e), sums.rest += integer(__fmul_rn(-c, e));
    });
  }
  sums = Sums{warp_sum(sums.weights), warp_sum(sums.rest)};
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 i = 1; i < GROUPS; ++i) sums.weights += shared[i].weights, sums.rest += shared[i].rest;
  row_sums[blockIdx.x] = sums;
}
