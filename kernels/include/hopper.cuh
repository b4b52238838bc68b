// Instructions that only Hopper has (sm_90a), one function each, under their PTX names: mbarriers, bulk tensor copies
// (TMA), clusters, and the integer wgmma. See PTX ISA 8.0, chapters "Data movement and conversion", "mbarrier" and
// "wgmma".
//
//   d[64, N] += a[64, 32] b[N, 32]^T, exact in s32
//
// Data: global memory -> TMA copies a box of rows of 128 bytes to shared memory and counts its bytes on an mbarrier ->
// wgmma reads both operands from shared memory -> sums in registers.
//
// Variants: TMA writes a box to one block, or multicasts it to the blocks of a cluster. N is 8 to 256: small N suits
// few tokens, large N reads the fewest bytes for each product.
#pragma once
#include "cp_async.cuh"
#include "griddepcontrol.cuh"

struct alignas(64) TensorMap { u64 words[16]; };  // CUtensorMap, made by the host

// The wgmma matrix descriptor of rows of 128 bytes with the 128-byte swizzle, at a multiple of 1,024 bytes. The swizzle
// xors the number of each 16-byte unit with the row number modulo 8.
DEVICE u64 matrix_descriptor(u32 address) {
  return (u64)((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#ifndef SKUDA_HOST  // the CPU harness of the tests defines all that follows
// An mbarrier takes 8 bytes of shared memory.
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the same mbarrier in block `rank` of the cluster.
DEVICE void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank)
      : "memory");
}
// Repeats mbarrier.try_wait until the phase of this parity has completed.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}
// Stores 16 aligned bytes to global memory if `wanted`, without a branch.
DEVICE void st_global_v4_if(bool wanted, void* to, const uint4& v) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((u32)wanted) : "memory");
}
// Stores 16 bytes to the same shared address in block `rank` of the cluster.
DEVICE void st_shared_cluster_v4(u32 to, u32 rank, const s32 (&v)[4]) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.b32 [remote], {%2, %3, %4, %5};\n}" ::"r"(to), "r"(rank), "r"(v[0]), "r"(v[1]), "r"(v[2]),
      "r"(v[3])
      : "memory");
}

DEVICE u32 cluster_ctarank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// The two halves of cluster_sync, for warps whose lanes may have diverged.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// What L2 does with what a copy reads: bytes that are read once are the first to go, so that they push nothing else out.
DEVICE u64 l2_policy(bool once) {
  u64 first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}
// Copies the box that begins at byte `x` of row `y` to shared memory. Bytes beyond the matrix become zero.
DEVICE void cp_async_bulk_tensor_2d(u32 to, const TensorMap* map, s32 x, s32 y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
DEVICE void cp_async_bulk_tensor_2d(u32 to, const TensorMap* map, s32 x, s32 y, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
// The same, to the same shared address in every block of the cluster that has a bit in `mask`.
DEVICE void cp_async_bulk_tensor_2d_multicast(u32 to, const TensorMap* map, s32 x, s32 y, u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask)
      : "memory");
}
// Copies contiguous bytes to shared memory; both addresses and the number of bytes are multiples of 16.
DEVICE void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}
DEVICE void prefetch_tensormap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

template <int N> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Makes this thread's stores to shared memory visible to TMA and wgmma.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait_group() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// d[64, N] = a[64, 32] b[N, 32]^T + (scale_d ? d : 0), s32, by a warpgroup; a and b are matrix descriptors. Thread t
// holds, for i < N / 8: d[4 i] and d[4 i + 1] in row 16 (t / 32) + t % 32 / 4 and columns 8 i + 2 (t % 4) and the next
// one; d[4 i + 2] and d[4 i + 3] eight rows below.
template <int N, class A, class B> struct Wgmma;

#define D4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define S4 "%0,%1,%2,%3"
#define S8 S4 ",%4,%5,%6,%7"
#define S16 S8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S32 S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define S64 S32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
  "%56,%57,%58,%59,%60,%61,%62,%63"
#define S128 S64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
  "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define BY_DESCRIPTOR "l"(a)
#define IN_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define WGMMA_OF(KIND, GIVEN, OPERANDS, N, A, B, LIST, X, Y, P, ...)                                                   \
  template <> struct KIND<N, A, B> {                                                                                   \
    static DEVICE void mma_async(s32 (&d)[N / 2], GIVEN, u64 b, u32 scale_d) {                                         \
      asm volatile("{\n.reg .pred scale_d;\nsetp.ne.u32 scale_d, " P ", 0;\n"                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." #A "." #B " {" LIST "}, " X ", " Y ", scale_d;\n}" \
                   : __VA_ARGS__                                                                                       \
                   : OPERANDS, "l"(b), "r"(scale_d));                                                                  \
    }                                                                                                                  \
  };
#define WGMMAS(N, A, B, LIST, X, Y, P, ...) WGMMA_OF(Wgmma, u64 a, BY_DESCRIPTOR, N, A, B, LIST, X, Y, P, __VA_ARGS__)
#define WGMMAS_OF(A, B)                                                                                           \
  WGMMAS(8, A, B, S4, "%4", "%5", "%6", D4(0))                                                                    \
  WGMMAS(16, A, B, S8, "%8", "%9", "%10", D4(0), D4(4))                                                           \
  WGMMAS(32, A, B, S16, "%16", "%17", "%18", D16(0))                                                              \
  WGMMAS(64, A, B, S32, "%32", "%33", "%34", D16(0), D16(16))                                                     \
  WGMMAS(128, A, B, S64, "%64", "%65", "%66", D64(0))                                                             \
  WGMMAS(256, A, B, S128, "%128", "%129", "%130", D64(0), D64(64))
// The same with a in registers: thread t holds, of rows 16 (t / 32) + t % 32 / 4 and eight below, bytes 4 (t % 4) and
// three more, then, of both rows, those 16 behind.
template <int N, class A, class B> struct WgmmaRegisters;
#define WGMMAS_IN(N, A, B, LIST, X, Y, P, ...) \
  WGMMA_OF(WgmmaRegisters, const u32 (&a)[4], IN_REGISTERS, N, A, B, LIST, "{" X "}", Y, P, __VA_ARGS__)
#define WGMMAS_OF_REGISTERS(A, B)                                                          \
  WGMMAS_IN(8, A, B, S4, "%4,%5,%6,%7", "%8", "%9", D4(0))                                 \
  WGMMAS_IN(16, A, B, S8, "%8,%9,%10,%11", "%12", "%13", D4(0), D4(4))                     \
  WGMMAS_IN(32, A, B, S16, "%16,%17,%18,%19", "%20", "%21", D16(0))                        \
  WGMMAS_IN(64, A, B, S32, "%32,%33,%34,%35", "%36", "%37", D16(0), D16(16))               \
  WGMMAS_IN(128, A, B, S64, "%64,%65,%66,%67", "%68", "%69", D64(0))                       \
  WGMMAS_IN(256, A, B, S128, "%128,%129,%130,%131", "%132", "%133", D64(0), D64(64))
WGMMAS_OF_REGISTERS(s8, s8)
WGMMAS_OF_REGISTERS(s8, u8)
WGMMAS_OF_REGISTERS(u8, s8)
WGMMAS_OF(s8, s8)
WGMMAS_OF(s8, u8)
WGMMAS_OF(u8, s8)
WGMMAS_OF(u8, u8)
#endif

#define TENSOR_MAPS const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map
