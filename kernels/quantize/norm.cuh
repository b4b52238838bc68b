// Normalizes, scales and quantizes rows: the code of rms_norm_quantize.cu and layer_norm_quantize.cu.
//
//   h = input, or RN_T(input + residual)
//   mu = fold(h) / d and c = h - mu if CENTRED, else c = h
//   r = 1 / sqrt(fold(c c) / d + eps),  y = RN_T(c r weight + bias), every operation rounded to C
//   s = max |y| / q_max, 1 if 0, or given;  q = clamp(rne(RN_C(y / s)) + z, q_min, q_max)
//
// fold is a sum in one fixed order (norm.py): octets of 8 elements are folded; octet o is added to lane o mod 1024, in
// ascending order; then the 1024 lanes are folded, the upper half onto the lower half.
//
// Data: global memory -> R octets for each thread in registers, requested at once, with those of the weight -> sums of
// the thread's lanes -> shared memory (Block) or shuffles (Lanes) -> y, in the same registers -> the largest magnitude,
// in the same way -> codes -> global memory. Thread t of a group of T owns the lanes t, t + T, t + 2 T, ..., so it
// begins the fold by itself. Then every warp folds the warps' partial sums after one barrier, and at last the lanes of
// a warp are folded. So the order is that of the definition for any power of two of threads.
//
// While a block computes a row, no load of it is in flight. So it also requests the row that is `ahead` rows away into
// L2, for a later block of the same multiprocessor.
//
// Variants: Lanes gives a row a power of two of neighbouring threads of a warp, Block a whole block. LONG rows, beyond
// R octets for each thread, are read again for every pass. Rows that are not whole, aligned octets, and rows with a
// NaN, an infinity or an extreme scale, take the slow path: element by element, in the same order.
#pragma once
#include "griddepcontrol.cuh"
#include "runs.cuh"

DEVICE f32 sqrt_rn(f32 a) { return __fsqrt_rn(a); }
DEVICE f64 sqrt_rn(f64 a) { return __dsqrt_rn(a); }

// --- octets ----------------------------------------------------------------------------------------------------------

enum { WORDS = 8 / Width<Data>::count };  // 16-byte words of an octet
struct Octet { uint4 word[WORDS]; };

DEVICE Octet octet_of(u32 low, u32 high) {
  Octet o;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) o.word[i] = make_uint4(low, high, low, high);
  return o;
}
DEVICE Octet no_octet() { return octet_of(0, 0); }
// An absent weight counts as 1, and an absent bias as -0: neither changes a value.
DEVICE Octet ones(f16) { return octet_of(0x3c003c00u, 0x3c003c00u); }
DEVICE Octet ones(bf16) { return octet_of(0x3f803f80u, 0x3f803f80u); }
DEVICE Octet ones(f32) { return octet_of(0x3f800000u, 0x3f800000u); }
DEVICE Octet ones(f64) { return octet_of(0, 0x3ff00000u); }
DEVICE Octet negative_zeros() {
  const u32 high = sizeof(Data) == 2 ? 0x80008000u : 0x80000000u;
  return octet_of(sizeof(Data) == 8 ? 0 : high, high);
}
DEVICE Octet octet_at(const Data* p) {
  Octet o;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) o.word[i] = load16((const uint4*)p + i);
  return o;
}
DEVICE Octet shared_octet_at(const Data* p) {  // of a weight or a bias, which all rows read
  Octet o;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) o.word[i] = __ldg((const uint4*)p + i);
  return o;
}
DEVICE void put_octet(Data* p, const Octet& o) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) store16((uint4*)p + i, o.word[i]);
}
DEVICE void unpack(const Octet& o, Real (&x)[8]) {
  enum { V = Width<Data>::count };
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    Real part[V];
    Chunk<Data>::unpack(o.word[i], part);
#pragma unroll
    for (int j = 0; j < V; ++j) x[i * V + j] = part[j];
  }
}
template <class T> DEVICE Octet pack(const Real (&x)[8], T) {
  enum { V = Width<Data>::count };
  Octet o;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    Real part[V];
#pragma unroll
    for (int j = 0; j < V; ++j) part[j] = x[i * V + j];
    o.word[i] = Chunk<Data>::pack(part);
  }
  return o;
}

#ifndef SKUDA_HOST  // one conversion of two numbers costs an eighth of two conversions of one
DEVICE u32 cvt_rn_x2(f32 low, f32 high, f16) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEVICE u32 cvt_rn_x2(f32 low, f32 high, bf16) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
template <class T> DEVICE Octet pack_pairs(const f32 (&x)[8], T type) {
  Octet o;
  o.word[0] = make_uint4(cvt_rn_x2(x[0], x[1], type), cvt_rn_x2(x[2], x[3], type), cvt_rn_x2(x[4], x[5], type), cvt_rn_x2(x[6], x[7], type));
  return o;
}
DEVICE Octet pack(const f32 (&x)[8], f16 type) { return pack_pairs(x, type); }
DEVICE Octet pack(const f32 (&x)[8], bf16 type) { return pack_pairs(x, type); }
#endif

// RN_T(RN_C(a + b)). C has more than twice the bits of a 16-bit T, so a single rounding, of two elements at once, gives
// the same.
template <class T> DEVICE Octet added(const Octet& a, const Octet& b, T type) {
  Real x[8], y[8];
  unpack(a, x), unpack(b, y);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = x[j] + y[j];
  return pack(x, type);
}
#ifndef SKUDA_HOST
// Hides from the compiler where a value comes from. So it computes values of an octet again instead of keeping them in
// registers, and keeps a quotient instead of computing it again.
DEVICE void make_opaque(f32& v) { asm volatile("" : "+f"(v)); }
DEVICE void make_opaque(f64& v) { asm volatile("" : "+d"(v)); }
DEVICE void make_opaque(Octet& o) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(o.word[i].x), "+r"(o.word[i].y), "+r"(o.word[i].z), "+r"(o.word[i].w));
}
DEVICE u32 add_rn_x2(u32 a, u32 b, f16) { u32 r; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 add_rn_x2(u32 a, u32 b, bf16) {  // a 1 + b: sm_80 has no sum of bf16
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return r;
}
template <class T> DEVICE Octet added_pairs(const Octet& a, const Octet& b, T type) {
  Octet o;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    o.word[i] = make_uint4(add_rn_x2(a.word[i].x, b.word[i].x, type), add_rn_x2(a.word[i].y, b.word[i].y, type),
                           add_rn_x2(a.word[i].z, b.word[i].z, type), add_rn_x2(a.word[i].w, b.word[i].w, type));
  }
  return o;
}
DEVICE Octet added(const Octet& a, const Octet& b, f16 type) { return added_pairs(a, b, type); }
DEVICE Octet added(const Octet& a, const Octet& b, bf16 type) { return added_pairs(a, b, type); }
#else
template <class T> DEVICE void make_opaque(T&) {}
#endif

// --- the fold --------------------------------------------------------------------------------------------------------

// Of N values, N being a power of two.
template <int N> DEVICE Real folded(const Real (&v)[N]) {
  Real half[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) half[i] = v[i] + v[i + N / 2];
  return folded(half);
}
template <> DEVICE Real folded<1>(const Real (&v)[1]) { return v[0]; }

DEVICE Real folded_lanes(Real v, u32 count) {  // of `count` neighbours, a power of two; each gets the result
#pragma unroll
  for (u32 offset = 16; offset > 0; offset /= 2) {
    if (offset < count) v = v + __shfl_xor_sync(0xffffffffu, v, offset);
  }
  return v;
}

// The partial sums of N warps in shared memory, then the lanes of a warp; warps that do not exist count as 0.
template <int N> DEVICE Real folded_warps(const Real* partial, u32 threads) {
  Real v[N];
#pragma unroll
  for (int w = 0; w < N; ++w) v[w] = w * 32 < threads ? partial[w * 32 + threadIdx.x % 32] : (Real)0;
  return folded_lanes(folded(v), 32);
}

// Of the threads of a group, each of which has folded its own lanes. Sums without a barrier between them need a
// different USE.
template <int USE> DEVICE Real folded_over(const Lanes& group, Real v) { return folded_lanes(v, group.count); }
template <int USE> DEVICE Real folded_over(const Block& group, Real v) {
  __shared__ Real partial[512];
  partial[threadIdx.x] = v;
  __syncthreads();
  return group.count > 256 ? folded_warps<16>(partial, group.count) : folded_warps<8>(partial, group.count);
}

// Requests a run of whole chunks into L2 for the block that will read it. One thread does so, on Hopper and later.
DEVICE void fetch_to_l2(const Data* run, s64 elements) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(run), "r"((u32)(elements * sizeof(Data))));
#endif
}

// --- rows ------------------------------------------------------------------------------------------------------------

struct Norm {
  const Data *input, *residual, *weight, *bias;
  s64 input_leading, residual_leading;
  u8* output;
  s64 output_leading;
  Real* scale_out;
  Data *residual_out, *normalized_out;
  s64 residual_out_leading, normalized_out_leading;
  Scales<Data> scales;
  Real eps;
  s64 rows, columns, ahead;

  // The same arrays from one row on.
  DEVICE Norm at(s64 row) const {
    Norm p = *this;
    p.input += row * input_leading, p.output += row * output_leading;
    if (residual != nullptr) p.residual += row * residual_leading, p.residual_out += row * residual_out_leading;
    if (normalized_out != nullptr) p.normalized_out += row * normalized_out_leading;
    return p;
  }
  // An absent array has address and stride 0. The stride of a single row is the length of the row.
  DEVICE bool by_octets() const {
    const u64 addresses = (u64)input | (u64)residual | (u64)residual_out | (u64)normalized_out | (u64)weight | (u64)bias;
    const u64 strides = input_leading | residual_leading | residual_out_leading | normalized_out_leading;
    return ((addresses | strides * sizeof(Data)) % 16 | ((u64)output | output_leading | columns) % 8) == 0;
  }
  // Requests the row that is `ahead` of this one; none if `ahead` is 0.
  DEVICE void fetch_ahead(s64 row) const {
    if (ahead == 0 || row + ahead >= rows) return;
    fetch_to_l2(input + ahead * input_leading, columns);
    if (residual != nullptr) fetch_to_l2(residual + ahead * residual_leading, columns);
  }
  DEVICE Real factor(Real sum) const { return div_rn((Real)1, sqrt_rn(div_rn(sum, (Real)columns) + eps)); }
  DEVICE Place codes() const { return Codes<SKUDA_CODE>::place(output, columns); }
  DEVICE bool dynamic() const { return scale_out != nullptr; }
  DEVICE Segment<Real> segment(const Range& r) const {
    return dynamic() ? segment_of(r, 0, scales.q_min, scales.q_max) : scales.at(0);
  }
};

// R octets of a row, `threads` apart, from `first` on. Those beyond the end are 0.
template <int R> struct Octets {
  u32 first, threads, count;
  Octet held[R];

  DEVICE u32 number(int k) const { return first + k * threads; }
  DEVICE bool exists(int k) const { return number(k) < count; }
  DEVICE const Data* place(const Data* row, int k) const { return row + (s64)number(k) * 8; }
  DEVICE Data* place(Data* row, int k) const { return row + (s64)number(k) * 8; }

  DEVICE void load(const Norm& p) {
    Octet more[R];
#pragma unroll
    for (int k = 0; k < R; ++k) held[k] = exists(k) ? octet_at(place(p.input, k)) : no_octet();
    if (p.residual == nullptr) return;
#pragma unroll
    for (int k = 0; k < R; ++k) more[k] = exists(k) ? octet_at(place(p.residual, k)) : no_octet();
#pragma unroll
    for (int k = 0; k < R; ++k) held[k] = added(held[k], more[k], Data());
  }
  DEVICE void make_all_opaque() {
#pragma unroll
    for (int k = 0; k < R; ++k) make_opaque(held[k]);
  }
  DEVICE Octet shared_octet(const Data* vector, int k, const Octet& absent) const {
    return vector != nullptr && exists(k) ? shared_octet_at(place(vector, k)) : absent;
  }
  DEVICE void load_shared(const Data* vector, Octet (&found)[R], const Octet& absent) const {
#pragma unroll
    for (int k = 0; k < R; ++k) found[k] = shared_octet(vector, k, absent);
  }
  DEVICE void put(Data* row) const {
    if (row == nullptr) return;
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (exists(k)) put_octet(place(row, k), held[k]);
    }
  }
  // Adds the fold of its octet to each lane: of the elements, or of the squares of their distances from the mean.
  template <bool SQUARED, bool CENTRED> DEVICE void add(Real (&lanes)[R], Real mean) const {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      Real x[8];
      unpack(held[k], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (CENTRED && SQUARED) x[j] = x[j] - mean;
        if (SQUARED) x[j] = mul_rn(x[j], x[j]);
      }
      const Real sum = folded(x);
      lanes[k] = lanes[k] + (CENTRED && SQUARED && !exists(k) ? (Real)0 : sum);
    }
  }
  // EARLY: the octets of the weight, or of the bias, are already loaded; else they are read here, one at a time.
  template <bool CENTRED, bool WEIGHT_EARLY, bool BIAS_EARLY>
  DEVICE void normalize(const Norm& p, Real mean, Real factor, const Octet (&weight)[R], const Octet (&bias)[R]) {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      Real x[8], v[8];
      unpack(held[k], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = mul_rn(CENTRED ? x[j] - mean : x[j], factor);
      unpack(WEIGHT_EARLY ? weight[k] : shared_octet(p.weight, k, ones(Data())), v);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = mul_rn(x[j], v[j]);
      if (CENTRED) {
        unpack(BIAS_EARLY ? bias[k] : shared_octet(p.bias, k, negative_zeros()), v);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = x[j] + v[j];
      }
      held[k] = CENTRED && !exists(k) ? no_octet() : pack(x, Data());
    }
  }
  DEVICE void include_in(Extremes<Data>& found) const {
#pragma unroll
    for (int k = 0; k < R; ++k) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        typename Extremes<Data>::Word words[Extremes<Data>::words];
        Extremes<Data>::split(held[k].word[i], words);
#pragma unroll
        for (int j = 0; j < Extremes<Data>::words; ++j) found.include_magnitude(words[j]);
      }
    }
  }
  template <bool WITHIN> DEVICE void quantize(Place codes, const Segment<Real>& g) const {
    const Segment<Real> own[1] = {g};
#pragma unroll
    for (int k = 0; k < R; ++k) {
      Real x[8];
      u32 q[8];
      unpack(held[k], x);
      if (WITHIN) quick_codes_within(x, g, q);
      else quick_codes(x, own, q);
      if (exists(k)) Codes<SKUDA_CODE>::store(codes, (s64)number(k) * 8, q);
    }
  }
};

// Octets of the weight, and of the bias, that a thread requests with the data, before the sums are known: as many as
// registers allow.
template <bool CENTRED> struct Early { enum { WEIGHT = sizeof(Data) == 4 ? 8 : CENTRED ? 2 : 4, BIAS = 2 }; };

// Computes one row of whole, aligned octets. Returns false if it needs the slow path, to all threads that share a
// barrier.
template <bool CENTRED, int R, bool LONG, class Group>
DEVICE bool quick_row(const Group& group, const Norm& p, s64 row, bool mine) {
  enum { WEIGHT_EARLY = !LONG && R * WORDS <= Early<CENTRED>::WEIGHT, BIAS_EARLY = !LONG && R * WORDS <= Early<CENTRED>::BIAS };
  const u32 lane = group.lane(), octets = (u32)(p.columns / 8), step = R * group.count;
  Octets<R> part;
  part.first = lane, part.threads = group.count, part.count = octets;
  Octet weight[R], bias[R];
  Real lanes[R];
  Real mean = 0;
#pragma unroll
  for (int k = 0; k < R; ++k) lanes[k] = (Real)0;
  // All that is read is on the way before anything waits for its data, which `load` does if there is a residual.
  if (WEIGHT_EARLY) part.load_shared(p.weight, weight, ones(Data()));
  if (CENTRED && BIAS_EARLY) part.load_shared(p.bias, bias, negative_zeros());
  part.load(p);
  if (!LONG && lane == 0) p.fetch_ahead(row);
  if (CENTRED) {
    do {
      if (LONG && part.first != lane) part.load(p);
      part.template add<false, CENTRED>(lanes, mean);
      part.first += step;
    } while (LONG && part.first - lane < octets);
    mean = div_rn(folded_over<0>(group, folded(lanes)), (Real)p.columns);
    make_opaque(mean);
#pragma unroll
    for (int k = 0; k < R; ++k) lanes[k] = (Real)0;
    part.first = lane;
    if (LONG && octets > step) part.load(p);
    part.make_all_opaque();
  }
  do {
    if (LONG && part.first != lane) part.load(p);
    if (mine) part.put(p.residual_out);
    part.template add<true, CENTRED>(lanes, mean);
    part.first += step;
  } while (LONG && part.first - lane < octets);
  Real factor = p.factor(folded_over<1>(group, folded(lanes)));
  make_opaque(factor);
  part.make_all_opaque();
  Extremes<Data> found = Extremes<Data>::opaque((u32)((u64)p.rows >> 63));
  part.first = lane;
  do {
    if (LONG && octets > step) part.load(p);
    part.template normalize<CENTRED, WEIGHT_EARLY, BIAS_EARLY>(p, mean, factor, weight, bias);
    if (mine) part.put(p.normalized_out);
    part.include_in(found);
    part.first += step;
  } while (LONG && part.first - lane < octets);
  const Range range = group.reduce(Range{found.up(), 0}, 0);
  const Segment<Real> g = p.segment(range);
  if (group.any(!(range.up < Infinity<Real>::bits() && g.quick))) return false;
  if (!mine) return true;
  if (p.dynamic() && lane == 0) p.scale_out[row] = g.s;
  const bool within = p.dynamic() && p.scales.q_min <= -p.scales.q_max;
  part.first = lane;
  do {
    if (LONG && octets > step) {
      part.load(p);
      part.template normalize<CENTRED, WEIGHT_EARLY, BIAS_EARLY>(p, mean, factor, weight, bias);
    }
    if (within) part.template quantize<true>(p.codes(), g);
    else part.template quantize<false>(p.codes(), g);
    part.first += step;
  } while (LONG && part.first - lane < octets);
  return true;
}

// Element `i` of a row: h, or y.
DEVICE Real data_at(const Norm& p, s64 i, Data& h) {
  h = p.input[i];
  if (p.residual != nullptr) narrow(widen(h) + widen(p.residual[i]), h);
  return widen(h);
}
template <bool CENTRED> DEVICE Real normal_at(const Norm& p, s64 i, Real mean, Real factor, Data& y) {
  Real v = data_at(p, i, y);
  v = mul_rn(CENTRED ? v - mean : v, factor);
  if (p.weight != nullptr) v = mul_rn(v, widen(p.weight[i]));
  if (CENTRED && p.bias != nullptr) v = v + widen(p.bias[i]);
  narrow(v, y);
  return widen(y);
}

// The fold of a row: of its elements, or of the squares of their distances from the mean. A thread has at most 4 lanes
// with octets; they rotate, so that they stay in registers. Their fold does not depend on which of them is the first.
template <bool SQUARED, bool CENTRED, class Group> DEVICE Real slow_fold(const Group& group, const Norm& p, Real mean) {
  Real lanes[4] = {0, 0, 0, 0};
  const s64 octets = (p.columns + 7) / 8, threads = group.count;
#pragma unroll 1
  for (s64 first = group.lane(); first < octets; first += threads) {
    Real x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const s64 i = first * 8 + j;
      Data h;
      x[j] = 0;
      if (i < p.columns) {
        x[j] = data_at(p, i, h);
        if (CENTRED && SQUARED) x[j] = x[j] - mean;
        if (SQUARED) x[j] = mul_rn(x[j], x[j]);
      }
    }
    const Real next = lanes[0] + folded(x);
    lanes[0] = lanes[1], lanes[1] = lanes[2], lanes[2] = lanes[3], lanes[3] = next;
  }
  return folded(lanes);
}

template <bool CENTRED, class Group> DEVICE void slow_row(const Group& group, const Norm& p, s64 row, bool mine) {
  const s64 lane = group.lane(), threads = group.count;
  Real mean = 0;
  if (CENTRED) mean = div_rn(folded_over<0>(group, slow_fold<false, CENTRED>(group, p, mean)), (Real)p.columns);
  const Real factor = p.factor(folded_over<1>(group, slow_fold<true, CENTRED>(group, p, mean)));
  Range r = Range{0, 0};
  Data h, y;
#pragma unroll 1
  for (s64 i = lane; i < p.columns; i += threads) {
    data_at(p, i, h);
    include(r, normal_at<CENTRED>(p, i, mean, factor, y));
    if (mine && p.residual_out != nullptr) p.residual_out[i] = h;
    if (mine && p.normalized_out != nullptr) p.normalized_out[i] = y;
  }
  r = group.reduce(Range{max_of(r.up, r.down), 0}, 0);
  if (!mine) return;
  const Segment<Real> g[1] = {p.segment(r)};
  if (p.dynamic() && lane == 0) p.scale_out[row] = g[0].s;
#pragma unroll 1
  for (s64 i = lane; i < p.columns; i += threads) {
    const Real x[1] = {normal_at<CENTRED>(p, i, mean, factor, y)};
    u32 q[1];
    quantized(x, g, q);
    Codes<SKUDA_CODE>::put(p.codes(), i, q[0]);
  }
}

template <bool CENTRED, int R, bool LONG, class Group> DEVICE void norm(const Group& group, const Norm& all) {
  if (CENTRED) griddepcontrol_launch_dependents();  // behind the wait, it makes some of these kernels spill registers
  griddepcontrol_wait();
  if (!CENTRED) griddepcontrol_launch_dependents();
  const s64 own = (s64)blockIdx.x * group.groups() + group.group();
  // Only blocks of several groups may have too many. Testing for that saves registers, except for LONG rows of f64 with
  // codes of bytes.
  enum { ASK = LONG && sizeof(Data) == 8 && Halves<SKUDA_CODE>::count == 1 };
  const bool mine = (!ASK && group.groups() == 1) || own < all.rows;
  const s64 row = mine ? own : 0;
  const Norm p = all.at(row);
  if (all.by_octets() && quick_row<CENTRED, R, LONG>(group, p, row, mine)) return;
  group.wait();  // the slow path uses the same shared memory
  slow_row<CENTRED>(group, p, row, mine);
}

#define NORM_PARAMETERS                                                                                              \
  const Data *input, s64 input_leading, const Data *residual, s64 residual_leading, const Data *weight,              \
      const Data *bias, u8 *output, s64 output_leading, Real *scale_out, Data *residual_out, s64 residual_out_leading, \
      Data *normalized_out, s64 normalized_out_leading, const void *scale, s32 scale_is_data, Real scale_value,      \
      const s32 *zero_point, s32 zero_point_value, s32 q_min, s32 q_max, Real eps, s64 rows, s64 columns, s64 ahead, s32 lanes
#define NORM(CENTRED, R, LONG, GROUP)                                                                                \
  norm<CENTRED, R, LONG>(GROUP, Norm{input, residual, weight, bias, input_leading, residual_leading, output,         \
                                     output_leading, scale_out, residual_out, normalized_out, residual_out_leading,  \
                                     normalized_out_leading,                                                         \
                                     Scales<Data>{scale, scale_is_data, scale_value, zero_point, zero_point_value,   \
                                                  q_min, q_max},                                                     \
                                     eps, rows, columns, ahead})

// Blocks of at most 256 or 512 threads on a multiprocessor for which there must be registers: as many as possible
// without spills.
#define LANES_BLOCKS (sizeof(Data) == 8 ? 1 : 2)
#define BLOCKS_2 (sizeof(Data) == 8 ? 1 : 2)
#define THREADS_4 (sizeof(Data) == 8 ? 256 : 512)
#define BLOCKS_4 (sizeof(Data) == 2 ? 2 : 1)
#define OCTETS_8 (sizeof(Data) == 2 ? 8 : 4)  // octets of a thread in the entry that ends in 8
#define BLOCKS_8 (sizeof(Data) == 2 ? 2 : 1)
#define LONG_BLOCKS (sizeof(Data) == 2 ? 3 : sizeof(Data) == 4 ? 2 : 1)
