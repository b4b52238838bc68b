// Hopper's own instructions (sm_90a): bulk tensor copies, the barriers they complete on, clusters, and the integer
// products of a warpgroup. PTX ISA 8.0, chapters "Data movement and conversion", "mbarrier" and "wgmma".
//
//   d[64, N] += a[64, 32] b[N, 32]^T, exact in s32
//
// Data: global memory -> a box of rows of 128 bytes in shared memory, by the copy engine (TMA), which counts its bytes on
// a barrier -> products read both operands from shared memory -> sums in registers.
//
// Variants: a box goes to one block, or by multicast to the blocks of a cluster, which wins if L2 traffic is the limit. N
// ranges from 8, which wastes the fewest products on few tokens, to 256, which reads the fewest bytes per product.
#pragma once
#include "elements.cuh"
#include "next.cuh"

struct alignas(64) TensorMap { u64 words[16]; };  // CUtensorMap, made by the host

// Rows of 128 bytes in shared memory, 16-byte units xored with the row's number modulo 8, 1,024-byte aligned.
DEVICE u64 rows_of_128(u32 address) {
  return (u64)((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#ifndef SKUDA_HOST  // the CPU harness of the tests brings its own of all that follows
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers of a block, in shared memory, 8 bytes each.
DEVICE void barrier_make(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same barrier of block `rank` in the cluster.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank)
      : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}
// One store of 16 aligned bytes to global memory, without a branch.
DEVICE void put16_if(bool wanted, void* to, const uint4& v) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((u32)wanted) : "memory");
}
// Stores 16 bytes at the same address in block `rank` of the cluster.
DEVICE void store16_at(u32 to, u32 rank, const s32 (&v)[4]) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.b32 [remote], {%2, %3, %4, %5};\n}" ::"r"(to), "r"(rank), "r"(v[0]), "r"(v[1]), "r"(v[2]),
      "r"(v[3])
      : "memory");
}

// Barrier `id` of the block: waits for, or only tells, THREADS threads.
template <int THREADS> DEVICE void threads_sync(u32 id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }
template <int THREADS> DEVICE void threads_arrive(u32 id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// The two halves of `cluster_sync`, for warps in any state.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Loads a box of a matrix, from byte `x` of row `y` on, into shared memory; bytes beyond the edges are zero.
DEVICE void load_box(u32 to, const TensorMap* map, s32 x, s32 y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// The same, multicast to the same address in every block of `mask`.
DEVICE void load_box_to_all(u32 to, const TensorMap* map, s32 x, s32 y, u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask)
      : "memory");
}
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

template <int N> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Shows this thread's stores into shared memory to the copy engine and to products.
DEVICE void show_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// d[64 x N] (+)= a[64 x 32] b[N x 32]^T by a warpgroup, s32. Thread t holds, for i < N / 8: d[4 i + 0, 1] at row
// 16 (t / 32) + t % 32 / 4 and columns 8 i + 2 (t % 4) + 0, 1; d[4 i + 2, 3] eight rows below.
template <int N, class A, class B> struct Product;

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
#define PRODUCT_OF(N, A, B, LIST, X, Y, P, ...)                                                                     \
  template <> struct Product<N, A, B> {                                                                             \
    static DEVICE void add(s32 (&d)[N / 2], u64 a, u64 b, u32 keep) {                                               \
      asm volatile("{\n.reg .pred keep;\nsetp.ne.u32 keep, " P ", 0;\n"                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." #A "." #B " {" LIST "}, " X ", " Y ", keep;\n}" \
                   : __VA_ARGS__                                                                                    \
                   : "l"(a), "l"(b), "r"(keep));                                                                    \
    }                                                                                                               \
  };
#define PRODUCTS_OF(A, B)                                                                                           \
  PRODUCT_OF(8, A, B, S4, "%4", "%5", "%6", D4(0))                                                                  \
  PRODUCT_OF(16, A, B, S8, "%8", "%9", "%10", D4(0), D4(4))                                                         \
  PRODUCT_OF(32, A, B, S16, "%16", "%17", "%18", D16(0))                                                            \
  PRODUCT_OF(64, A, B, S32, "%32", "%33", "%34", D16(0), D16(16))                                                   \
  PRODUCT_OF(128, A, B, S64, "%64", "%65", "%66", D64(0))                                                           \
  PRODUCT_OF(256, A, B, S128, "%128", "%129", "%130", D64(0), D64(64))
PRODUCTS_OF(s8, s8)
PRODUCTS_OF(s8, u8)
PRODUCTS_OF(u8, s8)
PRODUCTS_OF(u8, u8)
#endif

// Fills `to`, unless it is null, by all threads of the grid, after the previous kernel. It comes first in a kernel: where
// anything follows what a thread does alone, the compiler no longer knows that its values are the same for a warp. It is
// short, since its code is fetched before that of the first loads.
template <class T> DEVICE void fill(T* to, T with, u32 count) {
  if (to == nullptr) return;
  wait_for_previous_kernel();
#pragma unroll 1
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = with;
}

#define TENSOR_MAPS const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map
