// The int8 product on Hopper's wgmma: a persistent, warp-specialized kernel.
//
//   y[m, n] = epilogue(sa[m] sw[n] sum_k (a[m, k] - za[m]) (w[n, k] - zw[n])); sum_k a[m, k] w[n, k] is exact in s32
//
//   a_map, w_map     tensor maps of a [m, k] SKUDA_CODE and w [n, k] SKUDA_WEIGHT
//   rows             scales and zero points of the rows of a (epilogue.cuh)
//   p                scales of w, bias, output [m, n] SKUDA_OUT (epilogue.cuh)
//   band             rows of clusters in a rasterization band
//   stream_k_tiles, groups    see TileScheduler; both 0 and 1 without STREAM_K
//   fixup            partial sums and flags in global memory, for STREAM_K
//   zero_points      what zero points need (ZeroPoints)
//
// Data: global memory -> TMA loads stages of BLOCK_K bytes of K of both operands into a ring in shared memory -> wgmma
// reads both operands from there -> sums in registers -> epilogue -> staging in shared memory -> global memory, 128
// bytes of a row at a time. TMA fills elements beyond the edges with zeros.
//
// A block has one producer warpgroup, which fills the ring, and two consumer warpgroups, which run the mainloop and the
// epilogue. It takes one tile after another. Sums are exact, so neither the tile nor the order changes the bits.
//
// Variants.
//   Cooperative: both consumers work on one tile, half of its rows each. The registers of both hold the sums, so tiles
//   of 128 x 256 fit, which load the fewest bytes for each product. It wins for large products.
//   Ping-pong: each consumer takes every other tile, so one runs its mainloop during the epilogue of the other. It wins
//   if the epilogue is a large part of a tile's time: a short K, small tiles.
//   Clusters: CLUSTER_M x CLUSTER_N blocks take as many neighbouring tiles. Blocks of one row need the same rows of a,
//   blocks of one column the same rows of w: each block loads a part and multicasts it. Clusters win if L2 is the
//   limit, and lose if some of their blocks have no tile.
//   Rasterization: tiles go down a band of `band` rows of clusters, then to the next column, so that tiles that run at
//   the same time share rows of a and w in L2.
//   Stream-K (STREAM_K): the k-blocks of the last tiles, which do not fill a wave, are divided evenly among all
//   clusters. The parts of a divided tile meet in global memory (Fixup). It wins if the last wave would be mostly idle.
//   Zero points: sum (a - za) (w - zw) = sum a w - za sum w - zw sum (a - za), so the mainloop does not change.
//   `code_sums`, a launch in front, computes the sums of the codes of w, if a has zero points, and of a, if w has. It
//   reads all of w once more, which costs little if a has hundreds of rows.
//   Codes of 16 bits: a stage has both halves of a tile's rows, and a consumer has sums of two kinds: of the high halves,
//   and of products with a low half.
//
// Flags: TILE_M, TILE_N, STAGES, CLUSTER_M, CLUSTER_N, COOPERATIVE, STREAM_K, SKUDA_CODE, SKUDA_WEIGHT, SKUDA_OUT,
// SKUDA_EPILOGUE, SKUDA_ZERO_POINTS (0: none, 1: of a, 2: of w, 3: of both).
#pragma once
#if SKUDA_ZERO_POINTS
#include "code_sums.cuh"
#endif
#include "hopper.cuh"
#include "epilogue.cuh"

enum {
  BLOCK_K = 128,   // bytes of K in a stage, one k-block
  PREFETCHED = 2,  // stages that are requested before the block is ready
  A_BYTES = TILE_M * BLOCK_K,  // of one half
  W_BYTES = TILE_N * BLOCK_K,
  W_AT = A_HALVES * A_BYTES,
  STAGE_BYTES = W_AT + W_HALVES * W_BYTES,
  WARPGROUP_M = COOPERATIVE ? TILE_M / 2 : TILE_M,  // rows of a tile that a consumer warpgroup multiplies
  MMAS_M = WARPGROUP_M / 64,                        // wgmma tiles of 64 rows in them
  CLUSTER_SIZE = CLUSTER_M * CLUSTER_N,
  FIRST_COLUMN = ((1 << CLUSTER_SIZE) - 1) / ((1 << CLUSTER_N) - 1),  // a bit for each block in a cluster's first column
  STAGING_PITCH = 144,                                // bytes between staged rows of 128: other banks, still 16-byte aligned
  STAGING = 8 * 16 * STAGING_PITCH,                   // 16 rows for each consumer warp
  COLUMN_WORDS = 2 + A_ZERO_POINTS + W_ZERO_POINTS,   // scale and bias of a column; sum of its codes; its zero point
  COLUMNS = 2 * COLUMN_WORDS * TILE_N * 4,            // for both consumer warpgroups
  SHARED = 1024 + STAGES * STAGE_BYTES + STAGING + COLUMNS + 16 * STAGES
};
static_assert(PREFETCHED < STAGES, "the first stages are filled without waiting");

DEVICE void warpgroup_sync(int group) { bar_sync<128>(group + 1); }
// Ordered mainloops. An mbarrier tells only the parity of its phase, so a ping-pong consumer that ran ahead could take
// an old phase for the present one. It may wait on the ring only after the other consumer has passed its stages.
DEVICE void mainloop_order_wait(int group) { bar_sync<256>(group + 3); }
DEVICE void mainloop_order_arrive(int group) { bar_arrive<256>(group + 3); }

// Tells every block that loads for this one that a warp is done with a stage.
DEVICE void release_stage(u32 barrier, int lane, bool loads_for_us) {
  if (CLUSTER_SIZE == 1) {
    if (lane == 0) mbarrier_arrive(barrier);
  } else if (loads_for_us) {
    mbarrier_arrive_cluster(barrier, lane);
  }
}

// A position in the ring of stages, and the parity of its mbarriers' phase.
struct PipelineState {
  u32 stage, parity;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  DEVICE void advance(u32 k_blocks) {
    const u32 at = stage + k_blocks;
    parity ^= at / STAGES & 1, stage = at % STAGES;
  }
};

// Tiles of clusters in the order in which they are taken: down a band of `band` rows, then to the next column.
struct Rasterization {
  u32 rows, columns, band;
  DEVICE void at(u32 tile, u32& row, u32& column) const {
    const u32 per_band = band * columns, number = tile / per_band, first = number * band, rest = tile - number * per_band;
    const u32 height = rows - first < band ? rows - first : band;
    row = first + rest % height, column = rest / height;
  }
};

// Stores two neighbouring results to staging, at `to`.
DEVICE void stage_pair(u8* to, const s32 (&v)[2], const Segment<f32>&, s32) { *(int2*)to = make_int2(v[0], v[1]); }
DEVICE void stage_pair(u8* to, const s64 (&v)[2], const Segment<f32>&, s64) { ((s64*)to)[0] = v[0], ((s64*)to)[1] = v[1]; }
DEVICE void stage_pair(u8* to, const f32 (&v)[2], const Segment<f32>&, f32) {
  *(uint2*)to = make_uint2(__float_as_uint(v[0]), __float_as_uint(v[1]));
}
template <class T> DEVICE void stage_halves(u8* to, const f32 (&v)[2]) {
  T low, high;
  narrow(v[0], low), narrow(v[1], high);
  *(u32*)to = (u32)low.bits | (u32)high.bits << 16;
}
DEVICE void stage_pair(u8* to, const f32 (&v)[2], const Segment<f32>&, f16) { stage_halves<f16>(to, v); }
DEVICE void stage_pair(u8* to, const f32 (&v)[2], const Segment<f32>&, bf16) { stage_halves<bf16>(to, v); }
DEVICE void stage_codes(u8* to, const f32 (&v)[2], const Segment<f32>& codes) {
  u32 q[2];
  result_codes(v, codes, q);
  *(u16*)to = (u16)__byte_perm(q[0], q[1], 0x0040);
}
DEVICE void stage_pair(u8* to, const f32 (&v)[2], const Segment<f32>& codes, s8) { stage_codes(to, v, codes); }
DEVICE void stage_pair(u8* to, const f32 (&v)[2], const Segment<f32>& codes, u8) { stage_codes(to, v, codes); }

// The type in staging: results, or f32 values if GELU or SiLU is still to be applied.
template <bool CURVED_, class T> struct Staged { typedef T type; };
template <class T> struct Staged<true, T> { typedef f32 type; };

// Applies GELU or SiLU to eight neighbouring staged values and stores them. With fewer values, one warp does not keep
// its scheduler busy.
template <class T> struct alignas(sizeof(T) > 1 ? 16 : 8) Eight { T of[8]; };
template <class T> DEVICE void store_activated(T* to, const uint4* from, s64 left, bool chunks, const Segment<f32>& codes) {
  f32 v[8];
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    const uint4 w = from[j / 4];
    v[j] = __uint_as_float(w.x), v[j + 1] = __uint_as_float(w.y);
    v[j + 2] = __uint_as_float(w.z), v[j + 3] = __uint_as_float(w.w);
  }
  enum { PART = sizeof(T) == 4 ? 2 : 8 };  // curves in f64 at once, for which there are registers
#pragma unroll
  for (int i = 0; i < 8; i += PART) {
    f32 part[PART];
#pragma unroll
    for (int j = 0; j < PART; ++j) part[j] = v[i + j];
    apply_curve<SKUDA_OUT>(part, SKUDA_EPILOGUE, per_unit(codes));
#pragma unroll
    for (int j = 0; j < PART; ++j) v[i + j] = part[j];
  }
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

// What zero points need; null without them.
struct ZeroPoints {
  const s32* w_zero_points;  // [n]
  const s32* w_sums;         // [n]
  const s32* a_sums;         // [m]
  s64 k;
};

// Epilogue of 16 rows: from a warp's registers to global memory through its staging, 128 bytes of each row at a time.
// Rows: RowScales or GivenRows.
template <class Rows>
DEVICE void store_rows(const s32 (&d)[A_HALVES][TILE_N / 2], const Row<Rows> (&own)[2], const Epilogue& p, u8* staging,
                       const f32* columns, s64 row0, s64 column0, bool chunks, const Segment<f32>& codes) {
  typedef Staged<CURVED, SKUDA_OUT>::type Stage;
  enum { SIZE = sizeof(Stage), WIDE = 128 / SIZE, STRIP = WIDE < TILE_N ? WIDE : TILE_N, UNITS = STRIP * SIZE / 16 };
  enum { BATCH_MAX = STREAM_K || SKUDA_EPILOGUE != IDENTITY || SKUDA_ZERO_POINTS ? 4 : 8 };  // for which there are registers
  enum { BATCH = STRIP / 8 < BATCH_MAX ? STRIP / 8 : BATCH_MAX };  // groups of 8 columns that are read at once
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int rows = p.m - row0 < 16 ? (int)(p.m - row0) : 16, end = p.n - column0 < TILE_N ? (int)(p.n - column0) : TILE_N;
  const int r0 = lane / UNITS, c0 = lane % UNITS * (16 / SIZE);  // of the lane's first 16 bytes of a strip
  SKUDA_OUT* const to = p.output + (row0 + r0) * p.output_leading + column0 + c0;
  const s64 hop = (32 / UNITS) * p.output_leading;
#pragma unroll
  for (int strip = 0; strip < TILE_N / STRIP; ++strip) {
    // The compiler must assume that staging and columns overlap, so several columns are read before any result is
    // staged.
#pragma unroll
    for (int batch = 0; batch < STRIP / 8; batch += BATCH) {
      float2 sw[BATCH], bias[BATCH];
      int2 w_sum[BATCH], zw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const f32* const column = columns + strip * STRIP + 8 * (batch + i) + 2 * quad;
        sw[i] = *(const float2*)column, bias[i] = *(const float2*)(column + TILE_N);
        w_sum[i] = zw[i] = make_int2(0, 0);
        if (A_ZERO_POINTS) w_sum[i] = *(const int2*)(column + 2 * TILE_N);
        if (W_ZERO_POINTS) zw[i] = *(const int2*)(column + (2 + A_ZERO_POINTS) * TILE_N);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (strip * (STRIP / 8) + batch + i) + 2 * h;
          Result v[2];
          if constexpr (A_HALVES > 1) {
            v[0] = apply_epilogue(joined(d[0][at], d[1][at]), own[h].scale, sw[i].x, bias[i].x, Result());
            v[1] = apply_epilogue(joined(d[0][at + 1], d[1][at + 1]), own[h].scale, sw[i].y, bias[i].y, Result());
          } else {
            const auto low = subtract_zero_points(d[0][at], own[h], w_sum[i].x, zw[i].x);
            const auto high = subtract_zero_points(d[0][at + 1], own[h], w_sum[i].y, zw[i].y);
            v[0] = apply_epilogue(low, own[h].scale, sw[i].x, bias[i].x, Result());
            v[1] = apply_epilogue(high, own[h].scale, sw[i].y, bias[i].y, Result());
          }
          stage_pair(staging + (lane / 4 + 8 * h) * STAGING_PITCH + (8 * (batch + i) + 2 * quad) * SIZE, v, codes, Stage());
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
          const uint4* const from = (const uint4*)(staging + r * STAGING_PITCH + c * 32);
          store_activated(p.output + row * p.output_leading + column, from, p.n - column, chunks, codes);
        }
      }
    } else if (chunks) {
      uint4 w[UNITS / 2];
#pragma unroll
      for (int i = 0; i < UNITS / 2; ++i) w[i] = *(const uint4*)(staging + (r0 + i * (32 / UNITS)) * STAGING_PITCH + lane % UNITS * 16);
      SKUDA_OUT* at = to + strip * STRIP;
#pragma unroll
      for (int i = 0; i < UNITS / 2; ++i, at += hop) {
        st_global_v4_if(r0 + i * (32 / UNITS) < rows && strip * STRIP + c0 < end, at, w[i]);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
#pragma unroll 1
        for (int c = lane; c < STRIP && first + c < p.n; c += 32) {
          p.output[(row0 + r) * p.output_leading + first + c] = *(const SKUDA_OUT*)(staging + r * STAGING_PITCH + c * SIZE);
        }
      }
    }
    __syncwarp();
  }
}

// What a cluster computes: with STREAM_K, first its share of the k-blocks of the tiles before `stream_k_tiles`, then
// every `clusters`-th of the other tiles. The clusters form `groups` groups. Cluster i is member i / groups of group i
// % groups. A group divides every `groups`-th of the stream-K tiles evenly among its members, so neighbouring clusters
// load the same k-blocks of neighbouring tiles at the same time. A share may begin and end inside a tile; every part of
// a tile is exact.
struct TileScheduler {
  u32 k_blocks, tiles, cluster, clusters, stream_k_tiles, groups, next, left;

  DEVICE static TileScheduler of(u32 cluster, u32 clusters, u32 tiles, u32 k_blocks, u32 stream_k_tiles, u32 groups) {
    TileScheduler s = {k_blocks, tiles, cluster, clusters, stream_k_tiles, groups, cluster, 0};
    if (STREAM_K) {
      const u32 at = s.begin_of(cluster / groups);
      s.left = s.begin_of(cluster / groups + 1) - at;
      s.next = s.left > 0 ? at / k_blocks * groups + cluster % groups : stream_k_tiles + cluster;
    }
    return s;
  }
  // The first k-block of a member's share, counted through all tiles of its group: total * member / members, without a
  // 64-bit division, for which there are not enough registers.
  DEVICE u32 begin_of(u32 member) const {
    const u32 total = stream_k_tiles / groups * k_blocks, members = clusters / groups, each = total / members;
    return each * member + (total - each * members) * member / members;
  }
  DEVICE bool has_next() const { return (STREAM_K && left > 0) || next < tiles; }
  // Part number `part`, in ascending order: k-blocks `begin` to `begin + count` of a tile. False after the last part.
  DEVICE bool take(u32 part, u32& tile, u32& begin, u32& count) {
    tile = next, begin = 0, count = k_blocks;
    if (STREAM_K && left > 0) {
      if (part == 0) begin = begin_of(cluster / groups) % k_blocks;  // computed again, because registers are scarce
      count = k_blocks - begin < left ? k_blocks - begin : left;
      left -= count;
      next = left > 0 ? next + groups : stream_k_tiles + cluster;
      return true;
    }
    next += clusters;
    return tile < tiles;
  }
};

// Stream-K fixup. The cluster that has the first part of a tile adds the partial sums of the other parts, which it
// finds in global memory. Each block has room for the partial sums of one tile, and a flag for each consumer warpgroup:
// 1 while they wait to be read. All blocks are resident, and the first part of a tile is the last part of its cluster's
// share, so clusters rarely wait.
struct Fixup {
  u8* sums;
  u32* flags;

  DEVICE uint4* partial_sums(u32 block, int consumer) const {
    const u64 bytes = (u64)WARPGROUP_M * TILE_N * 4 * A_HALVES;
    return (uint4*)(sums + (block * (COOPERATIVE ? 2 : 1) + (COOPERATIVE ? consumer : 0)) * bytes) + threadIdx.x % 128;
  }
  DEVICE u32* flag(u32 block, int consumer) const { return flags + 2 * block + (COOPERATIVE ? consumer : 0); }

  DEVICE void store(const s32 (&d)[MMAS_M][A_HALVES][TILE_N / 2], u32 block, int consumer) const {
    uint4* const to = partial_sums(block, consumer);
#pragma unroll
    for (int i = 0; i < MMAS_M * A_HALVES * TILE_N / 8; ++i) {
      const int of = i / (TILE_N / 8);
      const s32* const four = d[of / A_HALVES][of % A_HALVES] + i % (TILE_N / 8) * 4;
      st_global_v4_if(true, to + i * 128, make_uint4((u32)four[0], (u32)four[1], (u32)four[2], (u32)four[3]));
    }
    warpgroup_sync(consumer);
    if (threadIdx.x % 128 == 0) asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag(block, consumer)) : "memory");
  }
  DEVICE void add(s32 (&d)[MMAS_M][A_HALVES][TILE_N / 2], u32 block, int consumer) const {
    const uint4* const from = partial_sums(block, consumer);
    u32* const ready = flag(block, consumer);
    if (threadIdx.x % 128 == 0) {
      u32 seen = 0;
      while (seen == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
    }
    warpgroup_sync(consumer);
#pragma unroll
    for (int i = 0; i < MMAS_M * A_HALVES * TILE_N / 8; ++i) {
      const uint4 four = __ldcg(from + i * 128);
      const int of = i / (TILE_N / 8);
      s32* const sum = d[of / A_HALVES][of % A_HALVES] + i % (TILE_N / 8) * 4;
      sum[0] += (s32)four.x, sum[1] += (s32)four.y, sum[2] += (s32)four.z, sum[3] += (s32)four.w;
    }
    warpgroup_sync(consumer);
    if (threadIdx.x % 128 == 0) *ready = 0;
  }
};

// The first row or column of a tile. The last tile begins early enough to be full: it computes some results that its
// neighbour computes, too, with the same bits. A tile mostly beyond m or n took up to twice as long as a full one, and
// delayed its neighbours: likely because it ran ahead of the blocks that share its operands. For the same reason a
// block of a cluster that would have no rows or columns computes the last tile.
template <int TILE> DEVICE s32 tile_start(u32 at, s64 size) { return (s32)min(at, (u32)max(0, (s32)size - TILE)); }

// Loads the stages of a block: of what the cluster shares it loads its part, for all blocks that need it.
struct Producer {
  const TensorMap &a_map, &w_map;
  u32 stages, full, rank;
  s64 m, n, k;
  u32 first_k_block;  // of the part of the tile
  s32 a_row, w_row;   // of its boxes

  DEVICE u32 row() const { return rank / CLUSTER_N; }
  DEVICE u32 column() const { return rank % CLUSTER_N; }
  DEVICE void set_tile(const Rasterization& raster, u32 tile, u32 begin) {
    u32 tile_row, tile_column;
    raster.at(tile, tile_row, tile_column);
    first_k_block = begin;
    a_row = tile_start<TILE_M>((tile_row * CLUSTER_M + row()) * TILE_M, m) + column() * (TILE_M / CLUSTER_N);
    w_row = tile_start<TILE_N>((tile_column * CLUSTER_N + column()) * TILE_N, n) + row() * (TILE_N / CLUSTER_M);
  }
  DEVICE void load(u32 stage, u32 k_block) const {
    mbarrier_arrive_expect_tx(full + 8 * stage, STAGE_BYTES);
    const u32 a = stages + stage * STAGE_BYTES + column() * (A_BYTES / CLUSTER_N);
    const u32 w = stages + stage * STAGE_BYTES + W_AT + row() * (W_BYTES / CLUSTER_M);
#pragma unroll
    for (int half = 0; half < A_HALVES; ++half) {
      load_operand<CLUSTER_N>(a_map, a + half * A_BYTES, half, stage, k_block, a_row, ((1u << CLUSTER_N) - 1) << row() * CLUSTER_N);
    }
#pragma unroll
    for (int half = 0; half < W_HALVES; ++half) {
      load_operand<CLUSTER_M>(w_map, w + half * W_BYTES, half, stage, k_block, w_row, (u32)FIRST_COLUMN << column());
    }
  }
  // For SHARERS blocks of the cluster, which have a bit in `sharers`.
  template <int SHARERS>
  DEVICE void load_operand(const TensorMap& map, u32 to, int half, u32 stage, u32 k_block, s32 row, u32 sharers) const {
    const s32 x = (s32)((first_k_block + k_block) * BLOCK_K) + half * (s32)k;
    if (SHARERS == 1) cp_async_bulk_tensor_2d(to, &map, x, row, full + 8 * stage);
    else cp_async_bulk_tensor_2d_multicast(to, &map, x, row, full + 8 * stage, (u16)sharers);
  }
  static DEVICE u32 prefetched(u32 k_blocks) { return k_blocks < PREFETCHED ? k_blocks : PREFETCHED; }
  // Requests the first stages of the first part, after the previous kernel has ended.
  DEVICE void prefetch(const Rasterization& raster, TileScheduler scheduler) {
    u32 tile, begin, k_blocks;
    scheduler.take(0, tile, begin, k_blocks);
    set_tile(raster, tile, begin);
    griddepcontrol_wait();
    for (u32 s = 0; s < prefetched(k_blocks); ++s) load(s, s);
  }
};

// Rows: RowScales or GivenRows.
template <class Rows>
DEVICE void warpgroup_linear(const TensorMap& a_map, const TensorMap& w_map, const Rows& rows, const Epilogue& p, s64 k,
                             u32 band, u32 stream_k_tiles, u32 groups, const Fixup& fixup, const ZeroPoints& zero_points) {
  typedef typename Rows::Sum Sum;
  extern __shared__ u8 unaligned[];
  u8* const shared = unaligned + (-shared_address(unaligned) & 1023);
  u8* const staging = shared + STAGES * STAGE_BYTES;
  f32* const columns = (f32*)(staging + STAGING);
  const u32 stages = shared_address(shared), full = shared_address(columns) + COLUMNS, empty = full + 8 * STAGES;
  const u32 rank = CLUSTER_SIZE > 1 ? cluster_ctarank() : 0;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // tells the compiler that a warp has one value
  const u32 cluster_row = rank / CLUSTER_N, cluster_column = rank % CLUSTER_N;
  const Rasterization raster{(u32)((p.m + TILE_M * CLUSTER_M - 1) / (TILE_M * CLUSTER_M)),
                             (u32)((p.n + TILE_N * CLUSTER_N - 1) / (TILE_N * CLUSTER_N)), band};
  TileScheduler scheduler = TileScheduler::of(blockIdx.x / CLUSTER_SIZE, gridDim.x / CLUSTER_SIZE, raster.rows * raster.columns,
                                              (u32)((k + BLOCK_K - 1) / BLOCK_K), stream_k_tiles, groups);
  u32 tile, begin, k_blocks;
  if (threadIdx.x == 0) {
    prefetch_tensormap(&a_map), prefetch_tensormap(&w_map);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, (CLUSTER_M + CLUSTER_N - 1) * 4 * (COOPERATIVE ? 2 : 1));
    }
    fence_mbarrier_init();
    // In a cluster, the other blocks must have initialized their mbarriers first. The loop below takes this part again:
    // a value that lived from here to there would move from the registers of a warp to those of every lane.
    if (CLUSTER_SIZE == 1) Producer{a_map, w_map, stages, full, rank, p.m, p.n, k}.prefetch(raster, scheduler);
  }
  __syncthreads();
  if (CLUSTER_SIZE > 1) cluster_sync();
  if (group == 0) {
    setmaxnreg_dec<56>();
    if (threadIdx.x == 0) {
      Producer producer = {a_map, w_map, stages, full, rank, p.m, p.n, k};
      PipelineState at{0, 0};
      if (CLUSTER_SIZE > 1) griddepcontrol_wait();
      for (u32 part = 0; scheduler.take(part, tile, begin, k_blocks); ++part) {
        producer.set_tile(raster, tile, begin);
        u32 k_block = 0;
        if (CLUSTER_SIZE == 1 && part == 0) at.stage = k_block = Producer::prefetched(k_blocks);
        for (; k_block < k_blocks; ++k_block, at.next()) {
          mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
          producer.load(at.stage, k_block);
        }
      }
      griddepcontrol_launch_dependents();
    }
  } else {
    setmaxnreg_inc<224>();
    const int consumer = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    f32* const own = columns + consumer * COLUMN_WORDS * TILE_N;
    const bool chunks = ((u64)p.output | (u64)p.output_leading * sizeof(SKUDA_OUT) | (u64)p.n * sizeof(SKUDA_OUT)) % 16 == 0;
    Segment<f32> codes;
    if (CodeRange<SKUDA_OUT>::max != 0) codes = p.codes(CodeRange<SKUDA_OUT>::min, CodeRange<SKUDA_OUT>::max);
    // Lane i of a warp signals block i of the cluster if that block loads for this one.
    const bool loads_for_us = lane < CLUSTER_SIZE && (lane / CLUSTER_N == cluster_row || lane % CLUSTER_N == cluster_column);
    PipelineState at{0, 0};
    u32 passed = 0;  // parts of this block
    griddepcontrol_wait();
    for (; scheduler.take(passed, tile, begin, k_blocks); ++passed) {
      if (!COOPERATIVE && passed % 2 != consumer) {
        at.advance(k_blocks);
        continue;
      }
      s64 row0, column0;
      Row<Rows> row_of[MMAS_M][2];
      f32 scale_of[(TILE_N + 127) / 128], bias_of[(TILE_N + 127) / 128];
      s32 sum_of[(TILE_N + 127) / 128], zero_of[(TILE_N + 127) / 128];
      // Loads the scales, biases and zero points of the tile: before the mainloop, which hides the latency, if there
      // are registers.
      const auto load_scales = [&] {
        u32 row, column;
        raster.at(tile, row, column);
        column0 = tile_start<TILE_N>((column * CLUSTER_N + cluster_column) * TILE_N, p.n);
        row0 = tile_start<TILE_M>((row * CLUSTER_M + cluster_row) * TILE_M, p.m);
        row0 += (COOPERATIVE ? consumer * WARPGROUP_M : 0) + warp * 16;
#pragma unroll
        for (int i = 0; i < MMAS_M * 2; ++i) {
          const s64 at = row0 + i / 2 * 64 + lane / 4 + i % 2 * 8;
          const s32 zero_point = A_ZERO_POINTS && at < p.m ? (s32)rows.zero_point_of(at) : 0;
          const Sum sum = W_ZERO_POINTS && at < p.m ? zero_points.a_sums[at] - (Sum)zero_points.k * zero_point : 0;
          row_of[i / 2][i % 2] = Row<Rows>{rows.within(at, p.m), zero_point, sum};
        }
#pragma unroll
        for (int c = 0; c < TILE_N; c += 128) {
          const s64 at = column0 + c + thread;
          const bool inside = !IsSum<SKUDA_OUT>::value && c + thread < TILE_N && at < p.n;
          scale_of[c / 128] = inside ? real_at(p.weight_scale, p.weight_scale_is, at, 0.0f) : 0.0f;
          bias_of[c / 128] = inside && p.bias != nullptr ? real_at(p.bias, p.bias_is, at, 0.0f) : 0.0f;
          sum_of[c / 128] = A_ZERO_POINTS && inside ? zero_points.w_sums[at] : 0;
          zero_of[c / 128] = W_ZERO_POINTS && inside ? zero_points.w_zero_points[at] : 0;
        }
      };
      enum { LATE = STREAM_K || IsSum<SKUDA_OUT>::value };
      if (!LATE) load_scales();
      s32 d[MMAS_M][A_HALVES][TILE_N / 2];
      u32 before = 0;
      if (!COOPERATIVE && passed > 0) mainloop_order_wait(consumer);
      for (u32 k_block = 0; k_block < k_blocks; ++k_block, at.next()) {
        const u32 stage = stages + at.stage * STAGE_BYTES;
        mbarrier_wait(full + 8 * at.stage, at.parity);
        const u64 a = matrix_descriptor(stage + (COOPERATIVE ? consumer * WARPGROUP_M * BLOCK_K : 0)), w = matrix_descriptor(stage + W_AT);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < BLOCK_K / 32; ++part) {
#pragma unroll
          for (int b = 0; b < MMAS_M; ++b) {
            typedef Wgmma<TILE_N, ACode, WCode> Mma;
            const u64 a_part = a + b * (64 * BLOCK_K / 16) + part * 2, w_part = w + part * 2;
            Mma::mma_async(d[b][0], a_part, w_part, part > 0 || k_block > 0);
            if (A_HALVES > 1) Mma::mma_async(d[b][A_HALVES - 1], a_part + A_BYTES / 16, w_part, part > 0 || k_block > 0);
            if (W_HALVES > 1) Mma::mma_async(d[b][A_HALVES - 1], a_part, w_part + W_BYTES / 16, 1);
          }
        }
        wgmma_commit_group();
        if (k_block > 0) {
          wgmma_wait_group<1>();
          release_stage(empty + 8 * before, lane, loads_for_us);
        }
        before = at.stage;
      }
      if (!COOPERATIVE && scheduler.has_next()) mainloop_order_arrive(consumer ^ 1);
      wgmma_wait_group<0>();
      release_stage(empty + 8 * before, lane, loads_for_us);
      if (STREAM_K && begin > 0) {
        fixup.store(d, blockIdx.x, consumer);
        continue;
      }
      if (LATE) load_scales();
      if (STREAM_K && k_blocks < scheduler.k_blocks) {
        const u32 end = (tile / groups + 1) * scheduler.k_blocks;
        for (u32 other = blockIdx.x / CLUSTER_SIZE + groups; scheduler.begin_of(other / groups) < end; other += groups) {
          fixup.add(d, other * CLUSTER_SIZE + rank, consumer);
        }
      }
      warpgroup_sync(consumer);  // everyone has read the columns of the previous tile
#pragma unroll
      for (int c = 0; c < TILE_N; c += 128) {
        if (c + thread >= TILE_N) continue;
        own[c + thread] = scale_of[c / 128], own[TILE_N + c + thread] = bias_of[c / 128];
        if (A_ZERO_POINTS) ((s32*)own)[2 * TILE_N + c + thread] = sum_of[c / 128];
        if (W_ZERO_POINTS) ((s32*)own)[(2 + A_ZERO_POINTS) * TILE_N + c + thread] = zero_of[c / 128];
      }
      warpgroup_sync(consumer);
      u8* const strip = staging + (consumer * 4 + warp) * 16 * STAGING_PITCH;
#pragma unroll
      for (int b = 0; b < MMAS_M; ++b) {
        store_rows<Rows>(d[b], row_of[b], p, strip, own, row0 + b * 64, column0, chunks, codes);
      }
    }
  }
  if (CLUSTER_SIZE > 1) cluster_sync();  // no block leaves while another may still signal it
}

// Blocks without a cluster have no cluster dimension: with one of a single block, neighbouring blocks no longer share a
// pair of multiprocessors, which fetches from L2 once what both read.
#if CLUSTER_M * CLUSTER_N > 1
#define WARPGROUP_KERNEL \
  extern "C" __global__ void __cluster_dims__(CLUSTER_M * CLUSTER_N, 1, 1) __launch_bounds__(384, 1)
#else
#define WARPGROUP_KERNEL extern "C" __global__ void __launch_bounds__(384, 1)
#endif
#define WARPGROUP_PARAMETERS EPILOGUE_PARAMETERS, s32 band, s32 stream_k_tiles, s32 groups, u8 *partial_sums, \
  u32 *flags, const s32 *code_sums_at
#define WARPGROUP_GIVEN                                                                                              \
  EPILOGUE, k, (u32)band, (u32)stream_k_tiles, (u32)groups, Fixup{partial_sums, flags},                                     \
      ZeroPoints{weight_zero_point, code_sums_at, code_sums_at + (A_ZERO_POINTS ? n : 0), k}
