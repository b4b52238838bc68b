// CUDA C++ for a plain C++17 compiler: the words, types and functions that the kernels use. Included before a kernel's
// source, which stays as it is. One thread of one block runs at a time; block.cpp switches between them.
#pragma once
#include <math.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Gathered in one section, so that block.cpp can fill it with a pattern before each block.
#define __shared__ static __attribute__((section("skuda_shared"), aligned(16)))
// What `extern __shared__ T name[];` is rewritten to.
#define SKUDA_DYNAMIC_SHARED(T, name) T* const name = (T*)skuda_dynamic_shared

// --- blocks and threads (block.cpp) ----------------------------------------------------------------------------------

struct dim3 { unsigned x, y, z; };
typedef dim3 uint3;
extern dim3 gridDim, blockDim, blockIdx, threadIdx;
static const int warpSize = 32;
extern unsigned char* skuda_dynamic_shared;  // of the block that runs

struct Geometry { dim3 grid, block; unsigned shared, overlaps; };
// Runs every thread of every block, `cluster` neighbours at once; returns what went wrong, or null.
const char* skuda_run(const Geometry&, unsigned cluster, void (*thread)(const void*), const void* argument);
[[noreturn]] void skuda_fault(const char* what);
void skuda_wait_block();
void skuda_wait_warp(unsigned mask);
unsigned skuda_thread();                   // linear index in the block
unsigned skuda_fibre();                    // and in the cluster
enum { SKUDA_FIBRES = 2048 };              // at most, in a cluster
extern unsigned long long* skuda_slots;    // one per thread of the block, for what threads tell each other

// Programmatic dependent launch: whether the thread that runs may have started before the previous kernel ended, and has not
// waited for that.
extern bool skuda_early;
void griddepcontrol_wait();
static inline void griddepcontrol_launch_dependents() {}

static inline void __syncthreads() { skuda_wait_block(); }
static inline void __syncwarp(unsigned mask = ~0u) { skuda_wait_warp(mask); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <class T> static T skuda_from_lane(unsigned mask, T value, unsigned lane) {
  const unsigned self = skuda_thread();
  memcpy(&skuda_slots[self], &value, sizeof value);
  skuda_wait_warp(mask);
  memcpy(&value, &skuda_slots[self / 32 * 32 + lane], sizeof value);
  skuda_wait_warp(mask);  // nobody overwrites before all have read
  return value;
}
template <class T> static T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
  return skuda_from_lane(mask, v, (skuda_thread() % 32 & ~(width - 1)) | (lane & (width - 1)));
}
template <class T> static T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  const unsigned self = skuda_thread() % 32, other = self ^ bits;
  return skuda_from_lane(mask, v, (other | (width - 1)) == (self | (width - 1)) ? other : self);
}
template <class T> static T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const unsigned self = skuda_thread() % 32;
  return skuda_from_lane(mask, v, self % width + delta < (unsigned)width ? self + delta : self);
}
template <class T> static T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const unsigned self = skuda_thread() % 32;
  return skuda_from_lane(mask, v, self % width >= delta ? self - delta : self);
}
template <class T, class F> static T skuda_over_warp(unsigned mask, T v, F combine) {
  const unsigned self = skuda_thread();
  memcpy(&skuda_slots[self], &v, sizeof v);
  skuda_wait_warp(mask);
  bool first = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    T other;
    memcpy(&other, &skuda_slots[self / 32 * 32 + lane], sizeof other);
    v = first ? other : combine(v, other), first = false;
  }
  skuda_wait_warp(mask);
  return v;
}
template <class T> static T __reduce_add_sync(unsigned m, T v) { return skuda_over_warp(m, v, [](T a, T b) { return T(a + b); }); }
template <class T> static T __reduce_max_sync(unsigned m, T v) { return skuda_over_warp(m, v, [](T a, T b) { return a > b ? a : b; }); }
template <class T> static T __reduce_min_sync(unsigned m, T v) { return skuda_over_warp(m, v, [](T a, T b) { return a < b ? a : b; }); }
template <class T> static T __reduce_or_sync(unsigned m, T v) { return skuda_over_warp(m, v, [](T a, T b) { return T(a | b); }); }
template <class T> static T __reduce_and_sync(unsigned m, T v) { return skuda_over_warp(m, v, [](T a, T b) { return T(a & b); }); }
static inline unsigned __ballot_sync(unsigned m, int p) { return __reduce_or_sync(m, p ? 1u << skuda_thread() % 32 : 0u); }
static inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
static inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == m; }
static inline int __syncthreads_count(int p) {
  skuda_slots[skuda_thread()] = p != 0;
  skuda_wait_block();
  int count = 0;
  for (unsigned i = 0; i < blockDim.x * blockDim.y * blockDim.z; ++i) count += (int)skuda_slots[i];
  skuda_wait_block();
  return count;
}
static inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
static inline int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }

// One thread at a time: an atomic operation is an operation.
#define SKUDA_ATOMIC(name, expression)                                                        \
  template <class T, class U> static T name(T* p, U given) {                                  \
    const T old = *p, value = (T)given;                                                       \
    *p = (expression);                                                                        \
    return old;                                                                               \
  }
SKUDA_ATOMIC(atomicAdd, old + value)
SKUDA_ATOMIC(atomicSub, old - value)
SKUDA_ATOMIC(atomicMax, old > value ? old : value)
SKUDA_ATOMIC(atomicMin, old < value ? old : value)
SKUDA_ATOMIC(atomicOr, old | value)
SKUDA_ATOMIC(atomicAnd, old & value)
SKUDA_ATOMIC(atomicExch, value)
SKUDA_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
template <class T> static T atomicCAS(T* p, T expected, T value) {
  const T old = *p;
  if (old == expected) *p = value;
  return old;
}

// --- vectors and memory ----------------------------------------------------------------------------------------------

#define SKUDA_VECTORS(name, T)                                                                                        \
  struct __align__(2 * sizeof(T)) name##2 { T x, y; };                                                                \
  struct __align__(sizeof(T) < 8 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                                     \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                   \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SKUDA_VECTORS(char, signed char)
SKUDA_VECTORS(uchar, unsigned char)
SKUDA_VECTORS(short, short)
SKUDA_VECTORS(ushort, unsigned short)
SKUDA_VECTORS(int, int)
SKUDA_VECTORS(uint, unsigned)
SKUDA_VECTORS(longlong, long long)
SKUDA_VECTORS(ulonglong, unsigned long long)
SKUDA_VECTORS(float, float)
SKUDA_VECTORS(double, double)

template <class T> static void skuda_touch(const T* p) {
  if ((unsigned long long)p % alignof(T)) skuda_fault("a misaligned access");
  if (skuda_early) skuda_fault("a read or write before the previous kernel has ended");
}
#define SKUDA_LOAD(name) template <class T> static T name(const T* p) { skuda_touch(p); return *p; }
#define SKUDA_STORE(name) template <class T> static void name(T* p, T value) { skuda_touch(p); *p = value; }
SKUDA_LOAD(__ldg)
SKUDA_LOAD(__ldca)
SKUDA_LOAD(__ldcg)
SKUDA_LOAD(__ldcs)
SKUDA_LOAD(__ldlu)
SKUDA_STORE(__stcg)
SKUDA_STORE(__stcs)
SKUDA_STORE(__stwb)

// --- numbers: every function rounds once, to nearest even ------------------------------------------------------------

template <class To, class From> static To skuda_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static inline unsigned __float_as_uint(float v) { return skuda_bits<unsigned>(v); }
static inline int __float_as_int(float v) { return skuda_bits<int>(v); }
static inline float __uint_as_float(unsigned v) { return skuda_bits<float>(v); }
static inline float __int_as_float(int v) { return skuda_bits<float>(v); }
static inline long long __double_as_longlong(double v) { return skuda_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return skuda_bits<double>(v); }
static inline int __double2loint(double v) { return (int)__double_as_longlong(v); }
static inline int __double2hiint(double v) { return (int)(__double_as_longlong(v) >> 32); }
static inline double __hiloint2double(int hi, int lo) {
  return skuda_bits<double>((unsigned long long)(unsigned)hi << 32 | (unsigned)lo);
}

#define SKUDA_BINARY(name, T, op) static inline T name(T a, T b) { return a op b; }
SKUDA_BINARY(__fadd_rn, float, +)
SKUDA_BINARY(__fsub_rn, float, -)
SKUDA_BINARY(__fmul_rn, float, *)
SKUDA_BINARY(__fdiv_rn, float, /)
SKUDA_BINARY(__dadd_rn, double, +)
SKUDA_BINARY(__dsub_rn, double, -)
SKUDA_BINARY(__dmul_rn, double, *)
SKUDA_BINARY(__ddiv_rn, double, /)
static inline float __fmul_ru(float a, float b) {  // upwards
  const double exact = (double)a * b;
  const float near = (float)exact;
  return near < exact ? nextafterf(near, INFINITY) : near;
}
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fsqrt_rn(float v) { return sqrtf(v); }
static inline double __dsqrt_rn(double v) { return sqrt(v); }
static inline float __frcp_rn(float v) { return 1 / v; }
static inline double __drcp_rn(double v) { return 1 / v; }

// To integers: NaN gives 0 (the least number for 64 bits), what lies outside gives the nearest end.
template <class To> static To skuda_to_integer(double v) {
  const double low = sizeof(To) == 8 ? -0x1p63 : std::is_signed<To>::value ? -0x1p31 : 0;
  const double end = sizeof(To) == 8 ? 0x1p63 : std::is_signed<To>::value ? 0x1p31 : 0x1p32;
  const To least = (To)low;
  if (v != v) return sizeof(To) == 8 ? least : 0;
  const double whole = rint(v);
  return whole < low ? least : whole >= end ? (To) ~least : (To)whole;
}
static inline int __float2int_rn(float v) { return skuda_to_integer<int>(v); }
static inline unsigned __float2uint_rn(float v) { return skuda_to_integer<unsigned>(v); }
static inline long long __float2ll_rn(float v) { return skuda_to_integer<long long>(v); }
static inline int __double2int_rn(double v) { return skuda_to_integer<int>(v); }
static inline unsigned __double2uint_rn(double v) { return skuda_to_integer<unsigned>(v); }
static inline long long __double2ll_rn(double v) { return skuda_to_integer<long long>(v); }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __uint2float_rn(unsigned v) { return (float)v; }
static inline float __ll2float_rn(long long v) { return (float)v; }
static inline double __ll2double_rn(long long v) { return (double)v; }
static inline float __double2float_rn(double v) { return (float)v; }

#define SKUDA_LEAST_MOST(T)                                       \
  static inline T min(T a, T b) { return b < a ? b : a; }         \
  static inline T max(T a, T b) { return a < b ? b : a; }
SKUDA_LEAST_MOST(int)
SKUDA_LEAST_MOST(unsigned)
SKUDA_LEAST_MOST(long long)
SKUDA_LEAST_MOST(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (nibble & 7)) & 255;
    result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
}
// Four products of bytes, A and B being the bytes' types; sums wrap.
template <class A, class B> static unsigned skuda_dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (unsigned)((int)(A)(a >> 8 * i) * (int)(B)(b >> 8 * i));
  return c;
}
static inline int __dp4a(int a, int b, int c) { return (int)skuda_dp4a<signed char, signed char>(a, b, c); }
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return skuda_dp4a<unsigned char, unsigned char>(a, b, c); }

// What elements.cuh leaves to its host: conversions that round once and keep NaN.
static inline float f16_to_f32(unsigned short bits) { return (float)skuda_bits<_Float16>(bits); }
static inline unsigned short f32_to_f16(float v) { return skuda_bits<unsigned short>((_Float16)v); }
static inline unsigned short f32_to_bf16(float v) {
  const unsigned bits = __float_as_uint(v);
  if (v != v) return (unsigned short)(bits >> 16 | 0x40);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// What curves.cuh leaves to its host: 2^t and 1 / d with errors as large as the PTX manual allows the instructions, and
// numbers below the least normal one flushed to zero. Either sign may come; a test may set the errors, in units of the
// largest.
#ifndef SKUDA_POWER_ERROR
#define SKUDA_POWER_ERROR(t) skuda_sign(t)
#endif
#ifndef SKUDA_RECIPROCAL_ERROR
#define SKUDA_RECIPROCAL_ERROR(d) skuda_sign(d)
#endif
static inline int skuda_sign(float of) { return __float_as_uint(of) * 2654435761u >> 31 ? 1 : -1; }
static inline float skuda_wrongly(double v, double error) {
  const float found = (float)(v * (1 + error));
  return fabsf(found) < 0x1p-126f ? copysignf(0, found) : found;
}
static inline float ex2_approx(float t) { return skuda_wrongly(exp2((double)t), SKUDA_POWER_ERROR(t) * 0x1.6ap-23); }
static inline float rcp_approx(float d) {
  if (fabsf(d) < 0x1p-126f) return copysignf(INFINITY, d);
  return skuda_wrongly(1 / (double)d, SKUDA_RECIPROCAL_ERROR(d) * 0x1p-23);
}

// --- what a thread asks for and does not wait for: done as late as it may be, when it waits ----------------------------

template <class T> struct SkudaPending {
  unsigned group, count;  // the group that is not committed yet
  struct {
    T what;
    unsigned group;
  } asked[256];

  void add(const T& what) {
    if (count == 256) skuda_fault("too many copies or products that nobody has waited for");
    asked[count].what = what, asked[count++].group = group;
  }
  // Does what belongs to all committed groups but the last ones.
  template <class Do> void wait(unsigned last, const Do& complete) {
    unsigned done = 0;
    for (; done < count && group - asked[done].group > last; ++done) complete(asked[done].what);
    count -= done;
    memmove(asked, asked + done, count * sizeof *asked);
  }
};

struct SkudaCopy { unsigned to; const unsigned char* from; int real; };
static SkudaPending<SkudaCopy> skuda_copies[SKUDA_FIBRES];
static inline void cp_async_16_zfill(unsigned to, const void* from, int real) {
  if (to % 16 || (real > 0 && (unsigned long long)from % 16)) skuda_fault("a misaligned copy");
  if (skuda_early) skuda_fault("a copy before the previous kernel has ended");
  skuda_copies[skuda_fibre()].add({to, (const unsigned char*)from, real});
}
static inline void cp_async_16(unsigned to, const void* from, bool real) { cp_async_16_zfill(to, from, real ? 16 : 0); }
static inline void cp_async_commit_group() { ++skuda_copies[skuda_fibre()].group; }
template <int PENDING> static void cp_async_wait_group() {
  skuda_copies[skuda_fibre()].wait(PENDING, [](const SkudaCopy& copy) {
    for (int i = 0; i < 16; ++i) skuda_dynamic_shared[copy.to + i] = i < copy.real ? copy.from[i] : 0;
  });
}

#include "hopper.h"

// --- entries: called with pointers to the arguments, as the CUDA driver is -------------------------------------------

template <class... A> struct SkudaCall {
  void (*kernel)(A...);
  void** arguments;
  template <class T> static T read(const void* from) {  // which need not be aligned as a tensor map is
    typename std::remove_cv<T>::type value;
    memcpy(&value, from, sizeof value);
    return value;
  }
  template <int... I> void with(std::integer_sequence<int, I...>) const { kernel(read<A>(arguments[I])...); }
  static void thread(const void* self) {
    ((const SkudaCall*)self)->with(std::make_integer_sequence<int, sizeof...(A)>());
    if (skuda_products[skuda_fibre()].count) skuda_fault("a product that nobody has waited for");
  }
};
template <class... A> const char* skuda_launch(void (*kernel)(A...), unsigned cluster, const Geometry* geometry, void** arguments) {
  const SkudaCall<A...> call = {kernel, arguments};
  for (auto& of : skuda_copies) of.count = 0;  // of a launch that failed
  for (auto& of : skuda_products) of.count = 0;
  return skuda_run(*geometry, cluster, SkudaCall<A...>::thread, &call);
}
// One letter per parameter: p pointer, f and d floating, i and l integers of 32 and 64 bits, m tensor map, ? anything else.
template <class T> constexpr char skuda_letter() {
  return std::is_class<T>::value            ? 'm'
         : std::is_pointer<T>::value        ? 'p'
         : std::is_floating_point<T>::value ? (sizeof(T) == 4 ? 'f' : 'd')
         : std::is_integral<T>::value       ? (sizeof(T) == 8 ? 'l' : sizeof(T) == 4 ? 'i' : '?')
                                            : '?';
}
template <class... A> const char* skuda_signature(void (*)(A...)) {
  static const char letters[] = {skuda_letter<A>()..., 0};
  return letters;
}
#define SKUDA_ENTRY(name, cluster)                                                                                      \
  extern "C" const char* launch_##name(const Geometry* g, void** args) { return skuda_launch(name, cluster, g, args); } \
  extern "C" const char* signature_##name() { return skuda_signature(name); }
