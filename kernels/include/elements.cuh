// Element types: widening, rounding, and 16-byte chunks of data with their codes.
//
//   x = widen(t), exact;  t = RN_T(x), one rounding to nearest, ties to even
//
// Data: global memory -> one 16-byte chunk for each thread, in four registers -> values of the compute type where they
// are used -> packed again, each rounded once -> global memory. A chunk is the widest access of a thread, so
// memory-bound kernels need the fewest instructions for each byte. Loads and stores are marked as streamed, because all
// data is accessed once.
//
// Variants: f32 and f64 are words as they are; f16 and bf16 are two to a word; s8 and u8 codes are four to a word, s4
// and u4 eight. Extremes and finite checks of 16-bit data work on two elements in an instruction, which halves their
// cost.
//
// A source is compiled once for each SKU. Its flags choose the elements: -DSKUDA_DATA=bf16 -DSKUDA_CODE=s8. No
// arithmetic may be contracted (-fmad=false): every fused multiply-add is written as one (fma_rn).
#pragma once

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int s32;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct s4 { u8 pair; };  // two to a byte, low nibble first, every row starting at a byte
struct u4 { u8 pair; };
struct s16 { u16 bits; };  // in two bytes of a row, 256 high + low: all high halves, then all low ones, which are s8

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

// What is multiplied of codes of type Q, and how many of it make a code.
template <class Q> struct Halves { typedef Q type; enum { count = 1 }; };
template <> struct Halves<s16> { typedef s8 type; enum { count = 2 }; };

// C, the compute type of data of type T.
template <class T> struct Compute { typedef f32 type; };
template <> struct Compute<f64> { typedef f64 type; };

#ifndef SKUDA_HOST  // the CPU harness of the tests defines its own conversions
DEVICE f32 f16_to_f32(u16 h) { f32 v; asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h)); return v; }
DEVICE u16 f32_to_f16(f32 v) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v)); return h; }
DEVICE u16 f32_to_bf16(f32 v) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v)); return h; }
#endif

DEVICE f32 widen(f32 v) { return v; }
DEVICE f64 widen(f64 v) { return v; }
DEVICE f32 widen(f16 v) { return f16_to_f32(v.bits); }
DEVICE f32 widen(bf16 v) { return __uint_as_float((u32)v.bits << 16); }

DEVICE void narrow(f32 v, f32& out) { out = v; }
DEVICE void narrow(f64 v, f64& out) { out = v; }
DEVICE void narrow(f32 v, f16& out) { out.bits = f32_to_f16(v); }
DEVICE void narrow(f32 v, bf16& out) { out.bits = f32_to_bf16(v); }

// Elements in 16 bytes, the widest access of a thread.
template <class T> struct Width { enum { count = 16 / sizeof(T) }; };

// 16 bytes of T: moved as words, unpacked to the compute type where they are used, and packed with one rounding for
// each element.
template <class T> struct Chunk;
template <> struct Chunk<f32> {
  static DEVICE void unpack(const uint4& w, f32 (&x)[4]) {
    x[0] = __uint_as_float(w.x), x[1] = __uint_as_float(w.y), x[2] = __uint_as_float(w.z), x[3] = __uint_as_float(w.w);
  }
  static DEVICE uint4 pack(const f32 (&x)[4]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
};
template <> struct Chunk<f64> {
  static DEVICE void unpack(const uint4& w, f64 (&x)[2]) {
    x[0] = __hiloint2double((s32)w.y, (s32)w.x), x[1] = __hiloint2double((s32)w.w, (s32)w.z);
  }
  static DEVICE uint4 pack(const f64 (&x)[2]) {
    return make_uint4((u32)__double2loint(x[0]), (u32)__double2hiint(x[0]), (u32)__double2loint(x[1]),
                      (u32)__double2hiint(x[1]));
  }
};
template <class T> struct HalfChunk {
  static DEVICE void unpack(const uint4& w, f32 (&x)[8]) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T low, high;
      low.bits = (u16)words[i], high.bits = (u16)(words[i] >> 16);
      x[2 * i] = widen(low), x[2 * i + 1] = widen(high);
    }
  }
  static DEVICE uint4 pack(const f32 (&x)[8]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T low, high;
      narrow(x[2 * i], low), narrow(x[2 * i + 1], high);
      words[i] = (u32)low.bits | (u32)high.bits << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};
template <> struct Chunk<f16> : HalfChunk<f16> {};
template <> struct Chunk<bf16> : HalfChunk<bf16> {};

// The bits of a number as an integer. Numbers >= 0 are ordered like their bits; infinity is above them, and NaN above
// infinity.
template <class C> struct Bits { typedef s32 type; };
template <> struct Bits<f64> { typedef s64 type; };
DEVICE s32 bits_of(f32 v) { return (s32)__float_as_uint(v); }
DEVICE s64 bits_of(f64 v) { return __double_as_longlong(v); }
template <class C> struct Infinity;
template <> struct Infinity<f32> { static DEVICE s32 bits() { return 0x7f800000; } };
template <> struct Infinity<f64> { static DEVICE s64 bits() { return 0x7ff0000000000000ll; } };
DEVICE f32 number_of(s32 bits) { return __uint_as_float((u32)bits); }
DEVICE f64 number_of(s64 bits) { return __longlong_as_double(bits); }
template <class B> struct Sign { static DEVICE B bit() { return (B)((u64)1 << (8 * sizeof(B) - 1)); } };
template <class B> DEVICE B max_of(B a, B b) { return a > b ? a : b; }

// Two 16-bit elements at a time. `max_nan` and `max_nan_magnitude` keep a NaN; `min_number` and `min_magnitude` drop
// one. Those of magnitudes leave any sign.
#ifndef SKUDA_HOST
#define PAIRWISE(name, instruction, T) \
  DEVICE u32 name(u32 a, u32 b, T) { u32 r; asm(instruction "." #T "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
#define PAIRWISE_NAN(T)                                                                                      \
  PAIRWISE(max_nan, "max.NaN", T) PAIRWISE(min_number, "min", T)                                            \
  DEVICE u32 max_nan_magnitude(u32 a, u32 b, T) { return max_nan(a & 0x7fff7fffu, b & 0x7fff7fffu, T()); } \
  DEVICE u32 min_magnitude(u32 a, u32 b, T) { return min_number(a & 0x7fff7fffu, b & 0x7fff7fffu, T()); }
#if __CUDA_ARCH__ >= 860
#undef PAIRWISE_NAN
#define PAIRWISE_NAN(T) \
  PAIRWISE(max_nan, "max.NaN", T) PAIRWISE(min_number, "min", T)                                   \
  PAIRWISE(max_nan_magnitude, "max.NaN.xorsign.abs", T) PAIRWISE(min_magnitude, "min.xorsign.abs", T)
#endif
PAIRWISE_NAN(f16)
PAIRWISE_NAN(bf16)
#else
template <class T, class F> DEVICE u32 pairwise(u32 a, u32 b, T, F takes_first) {
  u32 r = 0;
  for (int i = 0; i < 32; i += 16) {
    T x, y;
    x.bits = (u16)(a >> i), y.bits = (u16)(b >> i);
    r |= (u32)(takes_first(widen(x), widen(y)) ? x : y).bits << i;
  }
  return r;
}
template <class T> DEVICE u32 max_nan(u32 a, u32 b, T) {
  return pairwise(a, b, T(), [](f32 x, f32 y) { return x != x || x >= y; });
}
template <class T> DEVICE u32 min_number(u32 a, u32 b, T) {
  return pairwise(a, b, T(), [](f32 x, f32 y) { return y != y || x <= y; });
}
template <class T> DEVICE u32 max_nan_magnitude(u32 a, u32 b, T) { return max_nan(a & 0x7fff7fffu, b & 0x7fff7fffu, T()); }
template <class T> DEVICE u32 min_magnitude(u32 a, u32 b, T) { return min_number(a & 0x7fff7fffu, b & 0x7fff7fffu, T()); }
#endif
// The largest x and the largest -x of the words of some chunks, at least 0, as bits; a NaN stays in one of them. A word
// is one element, or two 16-bit ones, whose results can be read one by one.
template <class T> struct Extremes {
  typedef typename Bits<T>::type B;
  typedef T Word;
  enum { words = Width<T>::count, elements = 1 };  // in a chunk, in a word
  B high, low;
  static DEVICE Extremes zero() { return Extremes{0, 0}; }
  static DEVICE Extremes opaque(u32 zero) { return Extremes{(B)zero, (B)zero}; }
  static DEVICE void split(const uint4& w, Word (&words)[Width<T>::count]) { Chunk<T>::unpack(w, words); }
  DEVICE void include(Word x) { high = max_of(high, bits_of(x)), low = max_of(low, bits_of(x) ^ Sign<B>::bit()); }
  DEVICE void include_magnitude(Word x) { high = max_of(high, bits_of(x) & ~Sign<B>::bit()); }  // the larger of both
  DEVICE B up(int) const { return high; }
  DEVICE B down(int) const { return low; }
  DEVICE B up() const { return high; }
  DEVICE B down() const { return low; }
};

template <class T> struct HalfExtremes {
  typedef s32 B;
  typedef u32 Word;
  enum { words = 4, elements = 2 };
  u32 high, low;
  static DEVICE void split(const uint4& w, Word (&words)[4]) { words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w; }
  DEVICE void include(Word two) { high = max_nan(high, two, T()), low = min_number(low, two, T()); }
  DEVICE void include_magnitude(Word two) { high = max_nan_magnitude(high, two, T()); }
  static DEVICE s32 magnitude_of(u32 half) {
    T one;
    one.bits = (u16)(half & 0x7fffu);
    return bits_of(widen(one)) & ~Sign<s32>::bit();
  }
  DEVICE s32 up(int i) const { return magnitude_of(high >> 16 * i); }
  DEVICE s32 down(int i) const { return magnitude_of(low >> 16 * i); }
  DEVICE s32 up() const { return magnitude_of(max_of(high & 0x7fffu, high >> 16 & 0x7fffu)); }
  DEVICE s32 down() const { return magnitude_of(max_of(low & 0x7fffu, low >> 16 & 0x7fffu)); }
};
// `opaque` is `zero` made from a 0 that the compiler cannot know. Computed values must be included in such a one: ptxas
// 13.0 replaces max(|0|, |a b|) by max(0, a b), for which there is an instruction, and loses negative products.
template <> struct Extremes<f16> : HalfExtremes<f16> {
  static DEVICE Extremes zero() { return opaque(0); }
  static DEVICE Extremes opaque(u32 zero) { Extremes e; e.high = e.low = zero; return e; }
};
template <> struct Extremes<bf16> : HalfExtremes<bf16> {
  static DEVICE Extremes zero() { return opaque(0); }
  static DEVICE Extremes opaque(u32 zero) { Extremes e; e.high = e.low = zero; return e; }
};

// Streamed, because all data is accessed once.
DEVICE uint4 load16(const void* p) { return __ldcs((const uint4*)p); }
DEVICE void store16(void* p, const uint4& w) { __stcs((uint4*)p, w); }

// Codes. `Place` is where a row of codes, or a part of it, begins. `store` takes 32-bit integers and uses their low bits;
// `put` takes one, or where codes are packed the byte of two. `fetch` reads the codes of a chunk as they lie in memory,
// and `spread` converts them to integers where they are used.
struct Raw { u32 low, high; };
template <int BYTE = 0> DEVICE u32 two_bytes(u32 a, u32 b) { return __byte_perm(a, b, 0x0040 + 0x0011 * BYTE); }
template <int BYTE = 0> DEVICE u32 four_bytes(u32 a, u32 b, u32 c, u32 d) {
  return __byte_perm(two_bytes<BYTE>(a, b), two_bytes<BYTE>(c, d), 0x5410);
}
template <int BYTE> DEVICE void store_bytes(u8* p, const u32 (&q)[8]) {
  __stcs((uint2*)p, make_uint2(four_bytes<BYTE>(q[0], q[1], q[2], q[3]), four_bytes<BYTE>(q[4], q[5], q[6], q[7])));
}
template <int BYTE> DEVICE void store_bytes(u8* p, const u32 (&q)[4]) {
  __stcs((u32*)p, four_bytes<BYTE>(q[0], q[1], q[2], q[3]));
}
template <int BYTE> DEVICE void store_bytes(u8* p, const u32 (&q)[2]) { __stcs((u16*)p, (u16)two_bytes<BYTE>(q[0], q[1])); }
template <class Q> struct Codes {  // s8 and u8
  enum { packed = 0 };
  typedef u8* Place;
  static DEVICE Place place(u8* row, s64) { return row; }
  template <int N> static DEVICE void store(u8* base, s64 at, const u32 (&q)[N]) { store_bytes<0>(base + at, q); }
  static DEVICE void put(u8* base, s64 at, u32 q) { base[at] = (u8)q; }
  template <int N> static DEVICE Raw fetch(const u8* base, s64 at) {
    if (N == 8) {
      const uint2 w = __ldcs((const uint2*)(base + at));
      return Raw{w.x, w.y};
    }
    return Raw{N == 4 ? __ldcs((const u32*)(base + at)) : (u32)__ldcs((const u16*)(base + at)), 0};
  }
  template <int N> static DEVICE void spread(const Raw& raw, s32 (&q)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) q[i] = (s32)(Q)((i < 4 ? raw.low : raw.high) >> 8 * (i & 3));
  }
  static DEVICE s32 get(const u8* row, s64 column) { return (s32)(Q)row[column]; }
};
template <class Q> struct NibbleCodes {  // s4 and u4
  enum { packed = 1 };
  typedef u8* Place;
  static DEVICE Place place(u8* row, s64) { return row; }
  static DEVICE void put(u8* base, s64 at, u32 pair) { base[at / 2] = (u8)pair; }
  template <int N> static DEVICE u32 word(const u32 (&q)[N]) {
    u32 w = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) w |= (q[i] & 15u) << 4 * i;
    return w;
  }
  static DEVICE void store(u8* base, s64 at, const u32 (&q)[8]) { __stcs((u32*)(base + at / 2), word(q)); }
  static DEVICE void store(u8* base, s64 at, const u32 (&q)[4]) { __stcs((u16*)(base + at / 2), (u16)word(q)); }
  static DEVICE void store(u8* base, s64 at, const u32 (&q)[2]) { __stcs(base + at / 2, (u8)word(q)); }
  static DEVICE s32 one(u32 nibble, s4) { return (s32)((nibble & 15u) ^ 8u) - 8; }
  static DEVICE s32 one(u32 nibble, u4) { return (s32)(nibble & 15u); }
  template <int N> static DEVICE Raw fetch(const u8* base, s64 at) {
    const u8* p = base + at / 2;
    if (N == 8) return Raw{__ldcs((const u32*)p), 0};
    return Raw{N == 4 ? (u32)__ldcs((const u16*)p) : (u32)__ldcs(p), 0};
  }
  template <int N> static DEVICE void spread(const Raw& raw, s32 (&q)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) q[i] = one(raw.low >> 4 * i, Q());
  }
  static DEVICE s32 get(const u8* row, s64 column) { return one(row[column / 2] >> (column & 1 ? 4 : 0), Q()); }
};
template <> struct Codes<s4> : NibbleCodes<s4> {};
template <> struct Codes<u4> : NibbleCodes<u4> {};
template <> struct Codes<s16> {  // `columns` are those of the whole row, multiples of N where N codes are stored at once
  enum { packed = 0 };
  struct Place {
    u8* high;
    s64 columns;
    DEVICE Place operator+(s64 count) const { return Place{high + count, columns}; }
  };
  static DEVICE Place place(u8* row, s64 columns) { return Place{row, columns}; }
  template <int N> static DEVICE void store(const Place& base, s64 at, const u32 (&q)[N]) {
    u32 above[N];  // the second byte is (q + 128) >> 8
#pragma unroll
    for (int i = 0; i < N; ++i) above[i] = q[i] + 128u;
    store_bytes<1>(base.high + at, above), store_bytes<0>(base.high + base.columns + at, q);
  }
  static DEVICE void put(const Place& base, s64 at, u32 q) {
    base.high[at] = (u8)(q + 128u >> 8), base.high[base.columns + at] = (u8)q;
  }
};
