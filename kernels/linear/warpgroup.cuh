// The int8 product on Hopper's warpgroup instructions, persistent.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) (w[n, k] - zw[n])); sum_k a[m, k] w[n, k] is exact in s32
//
// Data: global memory -> boxes of rows of a and of w by 128 bytes of K, in a ring of stages in shared memory (TMA) ->
// wgmma, both operands from shared memory -> sums in registers -> epilogue -> a staging strip in shared memory -> global
// memory, 128 bytes of a row at a time. TMA fills elements beyond the edges with zeros.
//
// A persistent block has one producer warpgroup, which fills the ring, and two consumer warpgroups, which run the mainloop
// and the epilogue. Sums are exact, so neither tile nor order changes the bits.
//
// Variants.
//   Cooperative: both consumers work on one tile, half of its rows each. The registers of both hold the sums, so tiles of
//   128 x 256 fit, which read the fewest bytes per product. It wins at large sizes.
//   Ping-pong: each consumer works on every other tile, so that one runs its mainloop during the other's epilogue. It wins
//   if the epilogue is a large part of a tile's time: short k, small tiles.
//   Clusters: CLUSTER_M x CLUSTER_N blocks take as many neighbouring tiles. Each block loads a part of the rows of a that
//   its row of blocks shares, and of the rows of w that its column shares, and multicasts it. Clusters win if the L2 cache
//   is the limit, and lose if a cluster has blocks without work.
//   Rasterization: tiles go down bands of `band` rows of clusters, so that concurrent tiles share rows of a and w in L2.
//   Shares: with SHARES, the steps of the last tiles, which do not fill the card, are divided evenly among all clusters, and
//   the sums of a divided tile meet in memory. It wins if the last wave would be mostly idle, and costs the exchange.
//
//   Zero points: sum (a - za) (w - zw) = sum a w - za sum w - zw sum (a - za), so that the mainloop stays as it is. The sums
//   of w, where a has zero points, and of a, where w has, come from `code_sums`, a launch in front. It reads all of w once
//   more, which is little beside the product if there are hundreds of rows of a.
//
// Flags: TILE_M, TILE_N, STAGES, CLUSTER_M, CLUSTER_N, COOPERATIVE, SHARES, SKUDA_CODE, SKUDA_WEIGHT, SKUDA_OUT,
// SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a, 2: of w, 3: of both).
#pragma once
#if SKUDA_ZERO_POINTS
#include "code_sums.cuh"
#endif
#include "hopper.cuh"
#include "layer.cuh"

enum {
  STEP = 128,  // bytes of K in a stage
  EARLY = 2,   // stages that are requested before the block is ready
  A_BYTES = TILE_M * STEP,
  W_BYTES = TILE_N * STEP,
  STAGE_BYTES = A_BYTES + W_BYTES,
  GROUP_M = COOPERATIVE ? TILE_M / 2 : TILE_M,  // rows of a tile that a consumer warpgroup multiplies
  BLOCKS_M = GROUP_M / 64,
  CLUSTER = CLUSTER_M * CLUSTER_N,
  COLUMN_OF_BLOCKS = ((1 << CLUSTER) - 1) / ((1 << CLUSTER_N) - 1),  // a bit for each block of a cluster's first column
  PITCH = 144,                 // bytes between rows of 128 in staging: banks differ, 16 bytes stay aligned
  STAGING = 8 * 16 * PITCH,    // 16 rows for each consumer warp
  OF_COLUMN = 2 + A_SHIFTED + W_SHIFTED,  // scale and bias; sum of codes; zero point
  COLUMNS = 2 * OF_COLUMN * TILE_N * 4,   // for each consumer warpgroup
  SHARED = 1024 + STAGES * STAGE_BYTES + STAGING + COLUMNS + 16 * STAGES
};
static_assert(EARLY < STAGES, "the first stages are filled without waiting");

DEVICE void group_sync(int group) { threads_sync<128>(group + 1); }
// Ordered mainloops: a ping-pong consumer may wait on the ring only after the other consumer has passed its stages,
// because a barrier shows only the parity of its phase.
DEVICE void order_wait(int group) { threads_sync<256>(group + 3); }
DEVICE void order_signal(int group) { threads_arrive<256>(group + 3); }

// Signals that a warp is done with a stage.
DEVICE void release(u32 barrier, int lane, bool shares) {
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (shares) {
    barrier_arrive_at(barrier, lane);
  }
}

// Position in the ring of stages.
struct Ring {
  u32 stage, parity;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  DEVICE void skip(u32 steps) {
    const u32 at = stage + steps;
    parity ^= at / STAGES & 1, stage = at % STAGES;
  }
};

// Rasterization: tiles go down a band of `band` rows of clusters, then to the next column.
struct Raster {
  u32 rows, columns, band;
  DEVICE void at(u32 tile, u32& row, u32& column) const {
    const u32 per_band = band * columns, number = tile / per_band, first = number * band, rest = tile - number * per_band;
    const u32 height = rows - first < band ? rows - first : band;
    row = first + rest % height, column = rest / height;
  }
};

// Stores two neighbouring results at `to`.
DEVICE void put_pair(u8* to, const s32 (&v)[2], const Segment<f32>&, s32) { *(int2*)to = make_int2(v[0], v[1]); }
DEVICE void put_pair(u8* to, const f32 (&v)[2], const Segment<f32>&, f32) {
  *(uint2*)to = make_uint2(__float_as_uint(v[0]), __float_as_uint(v[1]));
}
template <class T> DEVICE void put_half(u8* to, const f32 (&v)[2]) {
  T low, high;
  narrow(v[0], low), narrow(v[1], high);
  *(u32*)to = (u32)low.bits | (u32)high.bits << 16;
}
DEVICE void put_pair(u8* to, const f32 (&v)[2], const Segment<f32>&, f16) { put_half<f16>(to, v); }
DEVICE void put_pair(u8* to, const f32 (&v)[2], const Segment<f32>&, bf16) { put_half<bf16>(to, v); }
DEVICE void put_codes(u8* to, const f32 (&v)[2], const Segment<f32>& codes) {
  u32 q[2];
  result_codes(v, codes, q);
  *(u16*)to = (u16)__byte_perm(q[0], q[1], 0x0040);
}
DEVICE void put_pair(u8* to, const f32 (&v)[2], const Segment<f32>& codes, s8) { put_codes(to, v, codes); }
DEVICE void put_pair(u8* to, const f32 (&v)[2], const Segment<f32>& codes, u8) { put_codes(to, v, codes); }

// The type in staging: results, or values if GELU or SiLU is still to be applied.
template <bool CURVED_, class T> struct Staged { typedef T type; };
template <class T> struct Staged<true, T> { typedef f32 type; };

// Applies the activation to eight neighbouring values of staging and stores them; fewer do not keep a scheduler busy
// with one warp.
template <class T> struct alignas(sizeof(T) > 1 ? 16 : 8) Eight { T of[8]; };
template <class T> DEVICE void put_curved(T* to, const uint4* from, s64 left, bool chunks, const Segment<f32>& codes) {
  f32 v[8];
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    const uint4 w = from[j / 4];
    v[j] = __uint_as_float(w.x), v[j + 1] = __uint_as_float(w.y);
    v[j + 2] = __uint_as_float(w.z), v[j + 3] = __uint_as_float(w.w);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = activated<SKUDA_OUT>(v[j], SKUDA_EPILOGUE);
  Eight<T> y;
  rounded(v, codes, y.of);
  if (chunks && left >= 8) {
    *(Eight<T>*)to = y;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < left) to[j] = y.of[j];
    }
  }
}

// What zero points need; null where they are not.
struct Shifts {
  const s32* w_zero_points;  // [n]
  const s32* w_sums;         // [n]
  const s32* a_sums;         // [m]
  s64 k;
};

// Writes 16 rows of results from a warp's registers to memory, through its staging, 128 bytes of each row at a time.
// Rows: RowScales or GivenRows.
template <class Rows>
DEVICE void write_rows(const s32 (&d)[TILE_N / 2], const Row<Rows> (&own)[2], const Epilogue& p, u8* staging,
                       const f32* columns, s64 row0, s64 column0, bool chunks, const Segment<f32>& codes) {
  typedef Staged<CURVED, SKUDA_OUT>::type Stage;
  enum { SIZE = sizeof(Stage), WIDE = 128 / SIZE, STRIP = WIDE < TILE_N ? WIDE : TILE_N, UNITS = STRIP * SIZE / 16 };
  enum { MOST = SHARES || SKUDA_EPILOGUE != IDENTITY || SKUDA_ZERO_POINTS ? 4 : 8 };  // that registers allow
  enum { BATCH = STRIP / 8 < MOST ? STRIP / 8 : MOST };  // columns / 8 read at once
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int rows = p.m - row0 < 16 ? (int)(p.m - row0) : 16, end = p.n - column0 < TILE_N ? (int)(p.n - column0) : TILE_N;
  const int r0 = lane / UNITS, c0 = lane % UNITS * (16 / SIZE);  // of the lane's first unit of a strip
  SKUDA_OUT* const to = p.output + (row0 + r0) * p.output_leading + column0 + c0;
  const s64 hop = (32 / UNITS) * p.output_leading;
#pragma unroll
  for (int strip = 0; strip < TILE_N / STRIP; ++strip) {
    // Staging may alias the columns for all that the compiler knows, so that several columns are read before any is written.
#pragma unroll
    for (int batch = 0; batch < STRIP / 8; batch += BATCH) {
      float2 sw[BATCH], bias[BATCH];
      int2 w_sum[BATCH], zw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const f32* const column = columns + strip * STRIP + 8 * (batch + i) + 2 * quad;
        sw[i] = *(const float2*)column, bias[i] = *(const float2*)(column + TILE_N);
        w_sum[i] = zw[i] = make_int2(0, 0);
        if (A_SHIFTED) w_sum[i] = *(const int2*)(column + 2 * TILE_N);
        if (W_SHIFTED) zw[i] = *(const int2*)(column + (2 + A_SHIFTED) * TILE_N);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (strip * (STRIP / 8) + batch + i) + 2 * h;
          const auto low = shifted(d[at], own[h], w_sum[i].x, zw[i].x);
          const auto high = shifted(d[at + 1], own[h], w_sum[i].y, zw[i].y);
          const Result v[2] = {finished(low, own[h].scale, sw[i].x, bias[i].x, Result()),
                               finished(high, own[h].scale, sw[i].y, bias[i].y, Result())};
          put_pair(staging + (lane / 4 + 8 * h) * PITCH + (8 * (batch + i) + 2 * quad) * SIZE, v, codes, Stage());
        }
      }
    }
    __syncwarp();
    const s64 first = column0 + strip * STRIP;
    if constexpr (CURVED != 0) {
#pragma unroll 1
      for (int i = 0; i < UNITS / 4; ++i) {
        const int pair = lane + 32 * i, r = pair / (UNITS / 2), c = pair % (UNITS / 2);
        const s64 row = row0 + r, column = first + c * 8;
        if (row < p.m && column < p.n) {
          const uint4* const from = (const uint4*)(staging + r * PITCH + c * 32);
          put_curved(p.output + row * p.output_leading + column, from, p.n - column, chunks, codes);
        }
      }
    } else if (chunks) {
      uint4 w[UNITS / 2];
#pragma unroll
      for (int i = 0; i < UNITS / 2; ++i) w[i] = *(const uint4*)(staging + (r0 + i * (32 / UNITS)) * PITCH + lane % UNITS * 16);
      SKUDA_OUT* at = to + strip * STRIP;
#pragma unroll
      for (int i = 0; i < UNITS / 2; ++i, at += hop) {
        put16_if(r0 + i * (32 / UNITS) < rows && strip * STRIP + c0 < end, at, w[i]);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
#pragma unroll 1
        for (int c = lane; c < STRIP && first + c < p.n; c += 32) {
          p.output[(row0 + r) * p.output_leading + first + c] = *(const SKUDA_OUT*)(staging + r * PITCH + c * SIZE);
        }
      }
    }
    __syncwarp();
  }
}

// What a cluster computes: with SHARES, first its share of the steps of the tiles before `shared`, then every `clusters`-th
// of the others. Each of `groups` groups of clusters divides as many of the shared tiles evenly. Cluster i is member
// i / groups of group i % groups, which has every `groups`-th tile, so that neighbouring clusters read the same steps of
// neighbouring tiles at the same time. A share begins and ends within a tile; each part of a tile is exact.
struct Work {
  u32 steps, tiles, cluster, clusters, shared, groups, next, left;

  DEVICE static Work of(u32 cluster, u32 clusters, u32 tiles, u32 steps, u32 shared, u32 groups) {
    Work work = {steps, tiles, cluster, clusters, shared, groups, cluster, 0};
    if (SHARES) {
      const u32 at = work.begin_of(cluster / groups);
      work.left = work.begin_of(cluster / groups + 1) - at;
      work.next = work.left > 0 ? at / steps * groups + cluster % groups : shared + cluster;
    }
    return work;
  }
  // The first step of a member's share, counted through all tiles of its group: units * member / members. A division of 64
  // bits would need more registers than there are.
  DEVICE u32 begin_of(u32 member) const {
    const u32 units = shared / groups * steps, members = clusters / groups, each = units / members;
    return each * member + (units - each * members) * member / members;
  }
  DEVICE bool more() const { return (SHARES && left > 0) || next < tiles; }
  // Part number `part`, in order: steps `begin` to `begin + count` of a tile.
  DEVICE bool take(u32 part, u32& tile, u32& begin, u32& count) {
    tile = next, begin = 0, count = steps;
    if (SHARES && left > 0) {
      if (part == 0) begin = begin_of(cluster / groups) % steps;  // again, since registers are scarce
      count = steps - begin < left ? steps - begin : left;
      left -= count;
      next = left > 0 ? next + groups : shared + cluster;
      return true;
    }
    next += clusters;
    return tile < tiles;
  }
};

// Sums of a part that does not begin at step 0 go to memory, from where the cluster with the first part adds them. Every
// block has one place of a tile's sums and, for each consumer warpgroup, a flag: 1 from when they are there until they are
// read. All blocks are resident, and the first part is the last of its cluster's share, so that hardly anything waits.
struct Exchange {
  u8* sums;
  u32* flags;

  DEVICE uint4* place(u32 block, int consumer) const {
    const u64 bytes = (u64)GROUP_M * TILE_N * 4;
    return (uint4*)(sums + (block * (COOPERATIVE ? 2 : 1) + (COOPERATIVE ? consumer : 0)) * bytes) + threadIdx.x % 128;
  }
  DEVICE u32* flag(u32 block, int consumer) const { return flags + 2 * block + (COOPERATIVE ? consumer : 0); }

  DEVICE void send(const s32 (&d)[BLOCKS_M][TILE_N / 2], u32 block, int consumer) const {
    uint4* const to = place(block, consumer);
#pragma unroll
    for (int i = 0; i < BLOCKS_M * TILE_N / 8; ++i) {
      const s32* const four = d[i / (TILE_N / 8)] + i % (TILE_N / 8) * 4;
      put16_if(true, to + i * 128, make_uint4((u32)four[0], (u32)four[1], (u32)four[2], (u32)four[3]));
    }
    group_sync(consumer);
    if (threadIdx.x % 128 == 0) asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag(block, consumer)) : "memory");
  }
  DEVICE void add(s32 (&d)[BLOCKS_M][TILE_N / 2], u32 block, int consumer) const {
    const uint4* const from = place(block, consumer);
    u32* const ready = flag(block, consumer);
    if (threadIdx.x % 128 == 0) {
      u32 seen = 0;
      while (seen == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
    }
    group_sync(consumer);
#pragma unroll
    for (int i = 0; i < BLOCKS_M * TILE_N / 8; ++i) {
      const uint4 four = __ldcg(from + i * 128);
      s32* const sum = d[i / (TILE_N / 8)] + i % (TILE_N / 8) * 4;
      sum[0] += (s32)four.x, sum[1] += (s32)four.y, sum[2] += (s32)four.z, sum[3] += (s32)four.w;
    }
    group_sync(consumer);
    if (threadIdx.x % 128 == 0) *ready = 0;
  }
};

// The first row or column of a tile. The last tile of a column or row of tiles begins early enough to be full, and computes
// some results a second time, with the same bits. A tile mostly beyond m or n took up to twice as long as a full one, and so did
// its neighbours: likely because it ran ahead of those that read the same, as nobody loads what is beyond. So a block of a
// cluster that would have no rows or columns at all computes the last tile, too.
template <int TILE> DEVICE s32 first_of(u32 at, s64 size) { return (s32)min(at, (u32)max(0, (s32)size - TILE)); }

// Requests the boxes of a block's tiles: of those that its cluster shares, its part, for all.
struct Loader {
  const TensorMap &a_map, &w_map;
  u32 stages, full, rank;
  s64 m, n;
  u32 offset;        // first step of the part of a tile
  s32 a_row, w_row;  // of its boxes

  DEVICE u32 row() const { return rank / CLUSTER_N; }
  DEVICE u32 column() const { return rank % CLUSTER_N; }
  DEVICE void aim(const Raster& raster, u32 tile, u32 begin) {
    u32 tile_row, tile_column;
    raster.at(tile, tile_row, tile_column);
    offset = begin;
    a_row = first_of<TILE_M>((tile_row * CLUSTER_M + row()) * TILE_M, m) + column() * (TILE_M / CLUSTER_N);
    w_row = first_of<TILE_N>((tile_column * CLUSTER_N + column()) * TILE_N, n) + row() * (TILE_N / CLUSTER_M);
  }
  DEVICE void load(u32 stage, u32 step) const {
    barrier_expect(full + 8 * stage, STAGE_BYTES);
    const u32 a = stages + stage * STAGE_BYTES + column() * (A_BYTES / CLUSTER_N);
    request<CLUSTER_N>(a_map, a, stage, step, a_row, ((1u << CLUSTER_N) - 1) << row() * CLUSTER_N);
    const u32 w = stages + stage * STAGE_BYTES + A_BYTES + row() * (W_BYTES / CLUSTER_M);
    request<CLUSTER_M>(w_map, w, stage, step, w_row, (u32)COLUMN_OF_BLOCKS << column());
  }
  // For `sharers`, a bit for each block of the cluster, SHARERS of them.
  template <int SHARERS>
  DEVICE void request(const TensorMap& map, u32 to, u32 stage, u32 step, s32 row, u32 sharers) const {
    const s32 x = (s32)((offset + step) * STEP);
    if (SHARERS == 1) load_box(to, &map, x, row, full + 8 * stage);
    else load_box_to_all(to, &map, x, row, full + 8 * stage, (u16)sharers);
  }
  static DEVICE u32 ahead(u32 steps) { return steps < EARLY ? steps : EARLY; }
  // Requests the first stages of the first part, after the previous kernel.
  DEVICE void start(const Raster& raster, Work work) {
    u32 tile, begin, steps;
    work.take(0, tile, begin, steps);
    aim(raster, tile, begin);
    wait_for_previous_kernel();
    for (u32 s = 0; s < ahead(steps); ++s) load(s, s);
  }
};

// Rows: RowScales or GivenRows.
template <class Rows>
DEVICE void warpgroup_linear(const TensorMap& a_map, const TensorMap& w_map, const Rows& rows, const Epilogue& p, s64 k,
                             u32 band, u32 shared_tiles, u32 groups, const Exchange& exchange, const Shifts& shifts) {
  typedef typename Rows::Sum Sum;
  extern __shared__ u8 unaligned[];
  u8* const shared = unaligned + (-shared_address(unaligned) & 1023);
  u8* const staging = shared + STAGES * STAGE_BYTES;
  f32* const columns = (f32*)(staging + STAGING);
  const u32 stages = shared_address(shared), full = shared_address(columns) + COLUMNS, empty = full + 8 * STAGES;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so that the compiler knows that a warp has one
  const u32 cluster_row = rank / CLUSTER_N, cluster_column = rank % CLUSTER_N;
  const Raster raster{(u32)((p.m + TILE_M * CLUSTER_M - 1) / (TILE_M * CLUSTER_M)),
                    (u32)((p.n + TILE_N * CLUSTER_N - 1) / (TILE_N * CLUSTER_N)), band};
  Work work = Work::of(blockIdx.x / CLUSTER, gridDim.x / CLUSTER, raster.rows * raster.columns, (u32)((k + STEP - 1) / STEP),
                       shared_tiles, groups);
  u32 tile, begin, steps;
  if (threadIdx.x == 0) {
    prefetch_map(&a_map), prefetch_map(&w_map);
    for (int s = 0; s < STAGES; ++s) {
      barrier_make(full + 8 * s, 1);
      barrier_make(empty + 8 * s, (CLUSTER_M + CLUSTER_N - 1) * 4 * (COOPERATIVE ? 2 : 1));
    }
    barriers_made();
    // In a cluster, the other blocks' barriers have to be made first. The loop below finds this part again: a value that
    // lives from here to there would leave the registers of a warp for those of every lane.
    if (CLUSTER == 1) Loader{a_map, w_map, stages, full, rank, p.m, p.n}.start(raster, work);
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  if (group == 0) {
    registers_down<56>();
    if (threadIdx.x == 0) {
      Loader loader = {a_map, w_map, stages, full, rank, p.m, p.n};
      Ring at{0, 0};
      if (CLUSTER > 1) wait_for_previous_kernel();
      for (u32 part = 0; work.take(part, tile, begin, steps); ++part) {
        loader.aim(raster, tile, begin);
        u32 step = 0;
        if (CLUSTER == 1 && part == 0) at.stage = step = Loader::ahead(steps);
        for (; step < steps; ++step, at.next()) {
          barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
          loader.load(at.stage, step);
        }
      }
      let_next_kernel_start();
    }
  } else {
    registers_up<224>();
    const int consumer = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    f32* const own = columns + consumer * OF_COLUMN * TILE_N;
    const bool chunks = ((u64)p.output | (u64)p.output_leading * sizeof(SKUDA_OUT) | (u64)p.n * sizeof(SKUDA_OUT)) % 16 == 0;
    Segment<f32> codes;
    if (CodeRange<SKUDA_OUT>::most != 0) codes = p.codes(CodeRange<SKUDA_OUT>::least, CodeRange<SKUDA_OUT>::most);
    // Lane i of a warp signals block i of the cluster if that block loads for this one.
    const bool shares = lane < CLUSTER && (lane / CLUSTER_N == cluster_row || lane % CLUSTER_N == cluster_column);
    Ring at{0, 0};
    u32 passed = 0;  // tiles of this block
    wait_for_previous_kernel();
    for (; work.take(passed, tile, begin, steps); ++passed) {
      if (!COOPERATIVE && passed % 2 != consumer) {
        at.skip(steps);
        continue;
      }
      s64 row0, column0;
      Row<Rows> row_of[BLOCKS_M][2];
      f32 scale_of[(TILE_N + 127) / 128], bias_of[(TILE_N + 127) / 128];
      s32 sum_of[(TILE_N + 127) / 128], zero_of[(TILE_N + 127) / 128];
      // Requests what rows and columns of the tile have. If registers allow, before the products, behind which it arrives.
      const auto request = [&] {
        u32 row, column;
        raster.at(tile, row, column);
        column0 = first_of<TILE_N>((column * CLUSTER_N + cluster_column) * TILE_N, p.n);
        row0 = first_of<TILE_M>((row * CLUSTER_M + cluster_row) * TILE_M, p.m);
        row0 += (COOPERATIVE ? consumer * GROUP_M : 0) + warp * 16;
#pragma unroll
        for (int i = 0; i < BLOCKS_M * 2; ++i) {
          const s64 at = row0 + i / 2 * 64 + lane / 4 + i % 2 * 8;
          const s32 zero_point = A_SHIFTED && at < p.m ? (s32)rows.zero_point_of(at) : 0;
          const Sum sum = W_SHIFTED && at < p.m ? shifts.a_sums[at] - (Sum)shifts.k * zero_point : 0;
          row_of[i / 2][i % 2] = Row<Rows>{rows.within(at, p.m), zero_point, sum};
        }
#pragma unroll
        for (int c = 0; c < TILE_N; c += 128) {
          const s64 at = column0 + c + thread;
          const bool inside = !IsSum<SKUDA_OUT>::value && c + thread < TILE_N && at < p.n;
          scale_of[c / 128] = inside ? real_at(p.weight_scale, p.weight_scale_is, at, 0.0f) : 0.0f;
          bias_of[c / 128] = inside && p.bias != nullptr ? real_at(p.bias, p.bias_is, at, 0.0f) : 0.0f;
          sum_of[c / 128] = A_SHIFTED && inside ? shifts.w_sums[at] : 0;
          zero_of[c / 128] = W_SHIFTED && inside ? shifts.w_zero_points[at] : 0;
        }
      };
      enum { LATE = SHARES || IsSum<SKUDA_OUT>::value };
      if (!LATE) request();
      s32 d[BLOCKS_M][TILE_N / 2];
      u32 before = 0;
      if (!COOPERATIVE && passed > 0) order_wait(consumer);
      for (u32 step = 0; step < steps; ++step, at.next()) {
        const u32 stage = stages + at.stage * STAGE_BYTES;
        barrier_wait(full + 8 * at.stage, at.parity);
        const u64 a = rows_of_128(stage + (COOPERATIVE ? consumer * GROUP_M * STEP : 0)), w = rows_of_128(stage + A_BYTES);
        products_begin();
#pragma unroll
        for (int part = 0; part < STEP / 32; ++part) {
#pragma unroll
          for (int b = 0; b < BLOCKS_M; ++b) {
            Product<TILE_N, SKUDA_CODE, SKUDA_WEIGHT>::add(d[b], a + b * (64 * STEP / 16) + part * 2, w + part * 2,
                                                           part > 0 || step > 0);
          }
        }
        products_commit();
        if (step > 0) {
          products_wait<1>();
          release(empty + 8 * before, lane, shares);
        }
        before = at.stage;
      }
      if (!COOPERATIVE && work.more()) order_signal(consumer ^ 1);
      products_wait<0>();
      release(empty + 8 * before, lane, shares);
      if (SHARES && begin > 0) {
        exchange.send(d, blockIdx.x, consumer);
        continue;
      }
      if (LATE) request();
      if (SHARES && steps < work.steps) {
        const u32 end = (tile / groups + 1) * work.steps;
        for (u32 other = blockIdx.x / CLUSTER + groups; work.begin_of(other / groups) < end; other += groups) {
          exchange.add(d, other * CLUSTER + rank, consumer);
        }
      }
      group_sync(consumer);  // the last tile's columns have been read
#pragma unroll
      for (int c = 0; c < TILE_N; c += 128) {
        if (c + thread >= TILE_N) continue;
        own[c + thread] = scale_of[c / 128], own[TILE_N + c + thread] = bias_of[c / 128];
        if (A_SHIFTED) ((s32*)own)[2 * TILE_N + c + thread] = sum_of[c / 128];
        if (W_SHIFTED) ((s32*)own)[(2 + A_SHIFTED) * TILE_N + c + thread] = zero_of[c / 128];
      }
      group_sync(consumer);
      u8* const strip = staging + (consumer * 4 + warp) * 16 * PITCH;
#pragma unroll
      for (int b = 0; b < BLOCKS_M; ++b) {
        write_rows<Rows>(d[b], row_of[b], p, strip, own, row0 + b * 64, column0, chunks, codes);
      }
    }
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while another may still signal it
}

// A cluster of one block is another launch than none: neighbouring blocks would not share a pair of multiprocessors,
// which fetches what both read from L2 once.
#if CLUSTER_M * CLUSTER_N > 1
#define WARPGROUP_KERNEL \
  extern "C" __global__ void __cluster_dims__(CLUSTER_M * CLUSTER_N, 1, 1) __launch_bounds__(384, 1)
#else
#define WARPGROUP_KERNEL extern "C" __global__ void __launch_bounds__(384, 1)
#endif
#define WARPGROUP_PARAMETERS EPILOGUE_PARAMETERS, s32 band, s32 shared_tiles, s32 groups, u8 *sums, u32 *flags, \
  const s32 *code_sums_at
#define WARPGROUP_GIVEN                                                                                              \
  EPILOGUE, k, (u32)band, (u32)shared_tiles, (u32)groups, Exchange{sums, flags},                                     \
      Shifts{weight_zero_point, code_sums_at, code_sums_at + (A_SHIFTED ? n : 0), k}
