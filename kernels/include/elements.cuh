// Element types: widening, rounding, 16-byte chunks of data and the codes that go with them.
//
// A source is compiled once per SKU; its flags choose the elements: -DSKUDA_DATA=bf16 -DSKUDA_CODE=s8. No arithmetic
// may be contracted (-fmad=false): every fused multiply-add here is written as one.
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

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

// C, the type that arithmetic on data of type T happens in.
template <class T> struct Compute { typedef f32 type; };
template <> struct Compute<f64> { typedef f64 type; };

#ifndef SKUDA_HOST  // the CPU harness of the tests brings its own conversions
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

// Elements in 16 bytes: what a thread moves at once.
template <class T> struct Width { enum { count = 16 / sizeof(T) }; };

// 16 bytes of T: moved as words, unpacked to values of the compute type where they are used, packed rounding once each.
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

// The largest magnitude so far among non-negative elements of a chunk, two 16-bit ones at a time; NaN is skipped.
#ifndef SKUDA_HOST
DEVICE u32 larger(u32 a, u32 b, f16) { u32 r; asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 larger(u32 a, u32 b, bf16) { u32 r; asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
#else
template <class T> DEVICE u32 larger(u32 a, u32 b, T) {
  u32 r = 0;
  for (int i = 0; i < 32; i += 16) {
    T x, y;
    x.bits = (u16)(a >> i), y.bits = (u16)(b >> i);
    r |= (u32)(widen(x) >= widen(y) || widen(y) != widen(y) ? x : y).bits << i;
  }
  return r;
}
#endif
template <class T> struct Peak {  // f16 and bf16
  u32 two;
  static DEVICE Peak zero() { Peak p; p.two = 0; return p; }
  DEVICE void include(const uint4& w) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) two = larger(two, words[i] & 0x7fff7fffu, T());
  }
  DEVICE f32 value() const {
    T low, high;
    low.bits = (u16)two, high.bits = (u16)(two >> 16);
    return fmaxf(widen(low), widen(high));
  }
};
template <> struct Peak<f32> {
  f32 most;
  static DEVICE Peak zero() { Peak p; p.most = 0; return p; }
  DEVICE void include(const uint4& w) {
    f32 x[4];
    Chunk<f32>::unpack(w, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(x[i]));
  }
  DEVICE f32 value() const { return most; }
};
template <> struct Peak<f64> {
  f64 most;
  static DEVICE Peak zero() { Peak p; p.most = 0; return p; }
  DEVICE void include(const uint4& w) {
    f64 x[2];
    Chunk<f64>::unpack(w, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) most = fmax(most, fabs(x[i]));
  }
  DEVICE f64 value() const { return most; }
};

// Streamed: everything is touched once.
DEVICE uint4 load16(const void* p) { return __ldcs((const uint4*)p); }
DEVICE void store16(void* p, const uint4& w) { __stcs((uint4*)p, w); }

// Codes. `store` takes them as 32-bit integers whose low bits count; `fetch` reads a chunk's as they lie in memory, and
// `spread` makes integers of them where they are used.
struct Raw { u32 low, high; };
DEVICE u32 four_bytes(u32 a, u32 b, u32 c, u32 d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
template <class Q> struct Codes {  // s8 and u8
  enum { packed = 0 };
  static DEVICE void store(u8* base, s64 at, const u32 (&q)[8]) {
    __stcs((uint2*)(base + at), make_uint2(four_bytes(q[0], q[1], q[2], q[3]), four_bytes(q[4], q[5], q[6], q[7])));
  }
  static DEVICE void store(u8* base, s64 at, const u32 (&q)[4]) { __stcs((u32*)(base + at), four_bytes(q[0], q[1], q[2], q[3])); }
  static DEVICE void store(u8* base, s64 at, const u32 (&q)[2]) { __stcs((u16*)(base + at), (u16)__byte_perm(q[0], q[1], 0x0040)); }
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
