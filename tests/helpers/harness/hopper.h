// Hopper's own instructions (kernels/include/hopper.cuh): barriers that count arrivals and bytes, boxes of rows that are
// there at once, products of a warpgroup whose threads each compute their own sums. The blocks of a cluster run at once.
// Included by shim.h, before the types of elements.cuh.
#pragma once

#define __grid_constant__
#define __cluster_dims__(x, y, z) __attribute__((skuda_cluster(x)))  // emulator.py finds it

void skuda_wait_change();  // until another thread says so
void skuda_changed();
void skuda_named_barrier(unsigned id, unsigned threads, bool wait);

static inline unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - skuda_dynamic_shared); }

// --- barriers --------------------------------------------------------------------------------------------------------

struct SkudaBarrier {
  unsigned short expected, pending;
  int bytes : 31;
  unsigned phase : 1;
};
static_assert(sizeof(SkudaBarrier) == 8, "as the GPU's");

static inline SkudaBarrier& skuda_barrier(unsigned at) {
  if (at % 8) skuda_fault("a misaligned barrier");
  return *(SkudaBarrier*)(skuda_dynamic_shared + at);
}
static inline void skuda_arrive(unsigned at, int arrivals, int bytes) {
  SkudaBarrier& b = skuda_barrier(at);
  if (b.pending < arrivals) skuda_fault("more arrivals than a barrier expects");
  b.pending -= arrivals, b.bytes += bytes;
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.expected, b.phase ^= 1;
  skuda_changed();
}
static inline void mbarrier_init(unsigned at, unsigned arrivals) {
  SkudaBarrier& b = skuda_barrier(at);
  b.expected = b.pending = (unsigned short)arrivals, b.bytes = 0, b.phase = 0;
}
static inline void fence_mbarrier_init() {}
static inline void mbarrier_arrive_expect_tx(unsigned at, unsigned bytes) { skuda_arrive(at, 1, (int)bytes); }
static inline void mbarrier_arrive(unsigned at) { skuda_arrive(at, 1, 0); }
static inline void mbarrier_wait(unsigned at, unsigned parity) {
  while (skuda_barrier(at).phase == parity) skuda_wait_change();
}
template <int THREADS> static void bar_sync(unsigned id) { skuda_named_barrier(id, THREADS, true); }
template <int THREADS> static void bar_arrive(unsigned id) { skuda_named_barrier(id, THREADS, false); }

template <int N> static void setmaxnreg_inc() {}
template <int N> static void setmaxnreg_dec() {}
static inline void fence_proxy_async() {}

// --- clusters --------------------------------------------------------------------------------------------------------

unsigned cluster_ctarank();
void cluster_arrive();
void cluster_wait();
static inline void cluster_sync() { cluster_arrive(), cluster_wait(); }
unsigned char* skuda_shared_of(unsigned rank);

struct SkudaIn {  // what follows has the shared memory of another block
  unsigned char* const own;
  explicit SkudaIn(unsigned rank) : own(skuda_dynamic_shared) { skuda_dynamic_shared = skuda_shared_of(rank); }
  ~SkudaIn() { skuda_dynamic_shared = own; }
};
static inline void mbarrier_arrive_cluster(unsigned at, unsigned rank) {
  const SkudaIn there(rank);
  skuda_arrive(at, 1, 0);
}
static inline void st_shared_cluster_v4(unsigned to, unsigned rank, const int (&v)[4]) {
  if (to % 16) skuda_fault("a misaligned store");
  memcpy(skuda_shared_of(rank) + to, v, sizeof v);
}
template <class Map> static void cp_async_bulk_tensor_2d(unsigned, const Map*, int, int, unsigned, unsigned long long = 0);
template <class Map>
static void cp_async_bulk_tensor_2d_multicast(unsigned to, const Map* map, int x, int y, unsigned barrier, unsigned short mask) {
  for (unsigned rank = 0; mask >> rank; ++rank) {
    if (!(mask >> rank & 1)) continue;
    const SkudaIn there(rank);
    cp_async_bulk_tensor_2d(to, map, x, y, barrier);
  }
}

// --- memory ----------------------------------------------------------------------------------------------------------

static inline void st_global_v4_if(bool wanted, void* to, const uint4& v) {
  if (wanted) skuda_touch((const uint4*)to), *(uint4*)to = v;
}

// What binding.py puts where the GPU has a CUtensorMap.
struct SkudaMap { unsigned long long address, leading, rows, columns, box_rows; };

// Where a byte of rows of 128 lies: its 16-byte unit is xored with the row's number modulo 8.
static inline unsigned skuda_swizzled(unsigned at) { return at ^ (at >> 7 & 7) << 4; }

template <class Map> static void prefetch_tensormap(const Map*) {}
template <class Map>
static void cp_async_bulk_tensor_2d(unsigned to, const Map* given, int x, int y, unsigned barrier, unsigned long long) {
  static_assert(sizeof(Map) >= sizeof(SkudaMap), "a map has room");
  skuda_touch(given);
  const SkudaMap& map = *(const SkudaMap*)given;
  if (to % 1024 || map.address % 16 || map.leading % 16 || x % 16) skuda_fault("a misaligned box");
  for (unsigned row = 0; row < map.box_rows; ++row) {
    for (unsigned unit = 0; unit < 8; ++unit) {
      unsigned char* const at = skuda_dynamic_shared + skuda_swizzled(to + row * 128 + unit * 16);
      const unsigned long long column = x + unit * 16;
      const unsigned real = y + row >= map.rows || column >= map.columns ? 0 : map.columns - column < 16 ? map.columns - column : 16;
      memset(at, 0, 16);
      memcpy(at, (const unsigned char*)map.address + (y + row) * map.leading + column, real);
    }
  }
  skuda_arrive(barrier, 0, -(int)(map.box_rows * 128));
}

static inline unsigned long long l2_policy(bool) { return 0; }
static inline void cp_async_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long) {
  if (to % 16 || (unsigned long long)from % 16 || bytes % 16) skuda_fault("a misaligned copy");
  skuda_touch((const unsigned char*)from), skuda_touch((const unsigned char*)from + bytes - 1);
  memcpy(skuda_dynamic_shared + to, from, bytes);
  skuda_arrive(barrier, 0, -(int)bytes);
}

// --- products --------------------------------------------------------------------------------------------------------

struct SkudaProduct {
  void (*compute)(int*, unsigned long long, unsigned long long, unsigned);
  int* d;
  unsigned long long a, b;
  unsigned scale_d;
};
static SkudaPending<SkudaProduct> skuda_products[SKUDA_FIBRES];
static inline void wgmma_fence() {}
static inline void wgmma_commit_group() { ++skuda_products[skuda_fibre()].group; }
// The lanes of a warp multiply together: none may release a stage that another still reads.
template <int PENDING> static void wgmma_wait_group() {
  skuda_products[skuda_fibre()].wait(PENDING, [](const SkudaProduct& p) { p.compute(p.d, p.a, p.b, p.scale_d); });
  skuda_wait_warp(~0u);
}

template <int N, class A, class B> struct Wgmma {
  template <class T> static void row(T (&to)[32], unsigned long long rows, unsigned row) {
    const unsigned start = (unsigned)(rows & 0x3fff) << 4, group = (unsigned)(rows >> 32 & 0x3fff) << 4;
    for (unsigned i = 0; i < 32; i += 16) {
      memcpy(to + i, skuda_dynamic_shared + skuda_swizzled(start + row / 8 * group + row % 8 * 128 + i), 16);
    }
  }
  static void mma_async(int (&d)[N / 2], unsigned long long a, unsigned long long b, unsigned scale_d) {
    skuda_products[skuda_fibre()].add({compute, d, a, b, scale_d});
  }
  static void compute(int* d, unsigned long long a, unsigned long long b, unsigned scale_d) {
    const unsigned thread = skuda_thread() % 128, first = thread / 32 * 16 + thread % 32 / 4;
    A x[2][32];
    for (int i = 0; i < 2; ++i) row(x[i], a, first + 8 * i);
    multiply(d, x, b, scale_d);
  }
  // The sums of the lane's two rows, with the columns of its place in a quad.
  static void multiply(int* d, const A (&x)[2][32], unsigned long long b, unsigned scale_d) {
    const unsigned column = skuda_thread() % 4 * 2;
    for (int i = 0; i < N / 4; ++i) {
      B y[32];
      row(y, b, i / 2 * 8 + column + i % 2);
      for (int j = 0; j < 2; ++j) {
        int& sum = d[i / 2 * 4 + j * 2 + i % 2];
        unsigned total = scale_d ? (unsigned)sum : 0;
        for (int k = 0; k < 32; ++k) total += (unsigned)((int)x[j][k] * (int)y[k]);
        sum = (int)total;
      }
    }
  }
};

template <int N, class A, class B> struct WgmmaRegisters {
  static void mma_async(int (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, unsigned scale_d) {
    const unsigned lane = skuda_thread() % 32;
    A x[2][32];
    for (unsigned c = 0; c < 4; ++c) {
      for (int i = 0; i < 4; ++i) {
        const unsigned word = __shfl_sync(~0u, a[i], (int)(lane / 4 * 4 + c));
        memcpy(x[i % 2] + i / 2 * 16 + c * 4, &word, 4);
      }
    }
    Wgmma<N, A, B>::multiply(d, x, b, scale_d);
  }
};
