// The int8 product on the tensor cores of any card since Ampere (mma.sync), with its epilogue: sm_80 and later.
//
//   acc[m, n] = sum_k (a[m, k] - za) (w[n, k] - zw[n]), exact in s32; then the epilogue of epilogue.cuh
//
//   p                pointers, strides and sizes of a, w, scales, bias and output (epilogue.cuh)
//   scales           scales and zero points of the rows of a (epilogue.cuh)
//
// Data: global memory -> cp.async copies 16-byte "units" into a ring of stages in shared memory -> ldmatrix loads
// fragments into registers -> mma.sync -> sums in registers -> the ring's memory, from which neighbouring threads read
// neighbouring outputs -> epilogue -> global memory.
//
// Variants.
//   Operands. If both consist of whole, aligned units (DIRECT), a swizzle permutes the units of a row, so that eight
//   rows of one unit, and the units of one row, lie in different banks. Otherwise the kernel copies the aligned units
//   that contain a row's bytes to rows that are one unit longer, which avoids bank conflicts as well, and shifts the
//   bytes into place before use. That is two to three times slower, and still several times faster than the plain
//   kernel. It never reads bytes beyond a row; elements beyond an edge are zero.
//   Codes of 16 bits are whole units. Eight rows of high halves and the eight of the low halves take turns as rows of an
//   operand, so that a tile has half as many rows, and a thread both sums of a result. If w has such codes, too, it is
//   the same with its rows, and of four sums the one of low halves is left out.
//   Tiles. A block computes ROWS x COLUMNS outputs. Large tiles load the fewest bytes for each product and win if there
//   are enough of them for all multiprocessors; else small tiles win. With WARPS_K > 1, warps divide a stage (split-K
//   within the block), which hides latency in small tiles. `mma.py` predicts which tile is the fastest.
//
// K is at most 131,071 for s8 by s8, 65,793 for s8 by u8, 33,025 for u8 by u8.
#pragma once
#include "cp_async.cuh"
#include "epilogue.cuh"
#include "mma_sync.cuh"

// --- tiles -----------------------------------------------------------------------------------------------------------

// WARPS_M x WARPS_N warps divide the outputs, and each of WARPS_K such groups takes a part of every stage. RESIDENT
// blocks share a multiprocessor.
template <int M, int N, int K, int WM, int WN, int WK, int S, int B> struct Tile {
  enum { ROWS = M, COLUMNS = N, BLOCK_K = K, STAGES = S, WARPS_M = WM, WARPS_N = WN, WARPS_K = WK };
  enum { THREADS = 32 * WM * WN * WK, RESIDENT = B, WARP_ROWS = M / WM, WARP_COLUMNS = N / WN };
  enum { MMAS_M = WARP_ROWS / 16, MMAS_N = WARP_COLUMNS / 8, MMAS_K = K / 32 / WK };  // mma.sync of a warp along M, N and K
  enum { STAGE = (M + N) * K, RING = STAGE * S };
  enum { PITCH = K + 16, UNALIGNED_STAGE = (M + N) * PITCH, UNALIGNED_STAGES = RING / UNALIGNED_STAGE };  // where not DIRECT
  // Sums of codes: warps that have the same rows divide their sums, and so do warps that have the same columns.
  enum { OWN_MMAS_M = (MMAS_M + WN - 1) / WN, OWN_MMAS_N = (MMAS_N + WM - 1) / WM };
  // Sums of codes, behind the ring; only with zero points.
  enum { SUMS = WK * (M + N) * 4 };
  // Sums go through the ring's memory, in as many parts as needed.
  enum { ALL = WK * M * N * 4, PARTS = ALL <= RING ? 1 : ALL <= 2 * RING ? 2 : 4, PART_MMAS_M = MMAS_M / PARTS };
  // Fragments are prefetched if a thread has registers for two sets beside its sums and about 60 others.
  enum { REGISTERS = 65536 / (THREADS * B) < 255 ? 65536 / (THREADS * B) : 255 };
  enum { SPARE = REGISTERS - 4 * MMAS_M * MMAS_N - 2 * (4 * MMAS_M + 2 * MMAS_N) - 60, MORE = 2 * OWN_MMAS_M + OWN_MMAS_N };
  static_assert(K == 64 || K == 128, "the permutation of units");
  static_assert(WARP_ROWS % 16 == 0 && WARP_COLUMNS % 16 == 0 && K % (32 * WK) == 0, "whole instructions");
  static_assert(N % 32 == 0, "the permutation of sums");
  static_assert(UNALIGNED_STAGES > 1, "one stage is filled while another is used");
  static_assert(ALL / PARTS <= RING && MMAS_M % PARTS == 0, "sums fit into the ring");

  // Offset of unit `unit` of row `row` of an operand.
  static DEVICE u32 place(int row, int unit) {
    return (u32)(row * K + ((K == 128 ? unit ^ (row & 7) : unit ^ (row >> 1 & 3)) << 4));
  }
};

// The tiles, by rows, columns, depth and stages; `mma.py` chooses among them.
typedef Tile<256, 128, 64, 4, 2, 1, 4, 1> t256x128x64s4;
typedef Tile<128, 128, 128, 2, 4, 1, 3, 2> t128x128x128s3;
typedef Tile<128, 128, 64, 2, 2, 1, 4, 2> t128x128x64s4;
typedef Tile<128, 64, 128, 4, 2, 1, 4, 2> t128x64x128s4;
typedef Tile<64, 128, 128, 2, 4, 1, 4, 2> t64x128x128s4;
typedef Tile<64, 64, 128, 2, 2, 1, 4, 3> t64x64x128s4;
typedef Tile<64, 64, 128, 2, 2, 2, 6, 2> t64x64x128s6;
typedef Tile<64, 32, 128, 2, 1, 2, 6, 3> t64x32x128s6;
typedef Tile<32, 64, 128, 1, 2, 2, 6, 2> t32x64x128s6;
typedef Tile<32, 32, 128, 2, 1, 2, 6, 4> t32x32x128s6;
typedef Tile<16, 128, 128, 1, 4, 2, 6, 1> t16x128x128s6;
typedef Tile<16, 32, 128, 1, 2, 2, 8, 3> t16x32x128s8;

// The row of a matrix of which row `row` of an operand is a half.
template <int HALVES> DEVICE int whole_row(int row) { return HALVES > 1 ? row / 16 * 8 + row % 8 : row; }

// Loads one operand: a stage has HEIGHT rows, and a thread copies one unit of every STEP-th row.
template <int HEIGHT, int HALVES, class T> struct Operand {
  enum { UNITS = T::BLOCK_K / 16, STEP = T::THREADS / UNITS, ROUNDS = (HEIGHT + STEP - 1) / STEP };
  static_assert(STEP % 16 == 0, "a thread's units are permuted alike, and shifted alike");
  const u8* from;  // the thread's unit of its first row in the next stage
  s64 stride;      // bytes between its rows
  s32 rows;        // of the operand, from its first one on
  s32 left;        // bytes of a row from `from` on
  u32 shift;       // bytes before the row's first byte, in the unit that contains it
  bool aligned;    // every row begins and ends with a whole unit

  static DEVICE Operand make(const u8* base, s64 leading, s64 row0, s64 all_rows, s64 k) {
    const int at = threadIdx.x / UNITS, unit = threadIdx.x % UNITS, row = whole_row<HALVES>(at);
    const s64 rows = (all_rows - row0 - row) * HALVES;
    const u8* const begin = base + (row0 + row) * leading + (HALVES > 1 && at / 8 % 2 ? k : 0);
    Operand o;
    o.shift = (u32)(u64)begin % 16, o.from = begin - o.shift + 16 * unit, o.stride = STEP / HALVES * leading;
    o.rows = (s32)(rows < HEIGHT ? rows : HEIGHT), o.left = (s32)(k + o.shift - 16 * unit);
    o.aligned = (((u64)base | (all_rows > 1 ? (u64)leading : 0)) | (u64)k) % 16 == 0;
    return o;
  }
  DEVICE bool has_row(int round) const {
    return HEIGHT % STEP == 0 || (int)threadIdx.x / UNITS + round * STEP < HEIGHT;
  }

  // `to` is the address of the operand's first row in the stage.
  DEVICE void load_aligned(u32 to) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const u32 at = to + T::place(threadIdx.x / UNITS, threadIdx.x % UNITS) + i * STEP * T::BLOCK_K;
      if (has_row(i)) cp_async_16(at, from + i * stride, i * STEP < rows && left > 0);
    }
    from += T::BLOCK_K, left -= T::BLOCK_K;
  }

  // A row that is not aligned takes one unit more. Its first unit is assembled from single bytes.
  static DEVICE u32 unaligned_place() { return threadIdx.x / UNITS * T::PITCH + threadIdx.x % UNITS * 16; }
  DEVICE void load_unaligned(u32 to, bool first) {
    const int unit = threadIdx.x % UNITS;
    const bool begins = shift != 0 && first && unit == 0, ends = shift != 0 && unit == UNITS - 1;
#pragma unroll 2
    for (int i = 0; i < ROUNDS; ++i) {
      const u32 at = to + unaligned_place() + i * STEP * T::PITCH;
      const s32 real = i * STEP < rows ? left : 0;
      if (has_row(i) && !begins) cp_async_16_zfill(at, from + i * stride, real);
      if (has_row(i) && ends) cp_async_16_zfill(at + 16, from + i * stride + 16, real - 16);
    }
    if (begins) {
#pragma unroll 1
      for (int i = 0; i < ROUNDS; ++i) {
        u32 word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int b = 1; b < 16; ++b) {
          if (i * STEP < rows && b >= (int)shift && b < left) word[b / 4] |= (u32)from[i * stride + b] << 8 * (b % 4);
        }
        uint4* const at = (uint4*)(shared_bytes() + (to - shared_start()) + unaligned_place() + i * STEP * T::PITCH);
        if (has_row(i)) *at = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
    from += T::BLOCK_K, left -= T::BLOCK_K;
  }
  // Shifts the rows of a stage into place; the same warp has copied them.
  DEVICE void shift_into_place(u32 to) const {
    u8* const first = shared_bytes() + (to - shared_start()) + unaligned_place();
    const u32 pick = 0x3210u + 0x1111u * (shift & 3);
    uint4 moved[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (!has_row(i)) continue;
      const uint4* const at = (const uint4*)(first + i * STEP * T::PITCH);
      const uint4 low = at[0], high = at[1];
      u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 6; ++j) w[j] = shift & 8 ? w[j + 2] : w[j];
#pragma unroll
      for (int j = 0; j < 5; ++j) w[j] = shift & 4 ? w[j + 1] : w[j];
      moved[i] = make_uint4(__byte_perm(w[0], w[1], pick), __byte_perm(w[1], w[2], pick), __byte_perm(w[2], w[3], pick),
                            __byte_perm(w[3], w[4], pick));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (has_row(i)) *(uint4*)(first + i * STEP * T::PITCH) = moved[i];
    }
  }
};

// --- the epilogue ---------------------------------------------------------------------------------------------------

// GELU or SiLU of four values at a time, which hides latency. Not inlined, because the code is long.
template <class Out> __device__ __noinline__ float4 curved(float4 v, s32 epilogue, f32 per_unit) {
  f32 four[4] = {v.x, v.y, v.z, v.w};
  apply_curve<Out>(four, epilogue, per_unit);
  return make_float4(four[0], four[1], four[2], four[3]);
}
template <class Out> __device__ __noinline__ f32 curved(f32 v, s32 epilogue, f32 per_unit) {
  f32 one[1] = {v};
  apply_curve<Out>(one, epilogue, per_unit);
  return one[0];
}
template <class Out> DEVICE void apply_long_curve(f32 (&v)[4], s32 epilogue, f32 per_unit) {
  const float4 y = curved<Out>(make_float4(v[0], v[1], v[2], v[3]), epilogue, per_unit);
  v[0] = y.x, v[1] = y.y, v[2] = y.z, v[3] = y.w;
}
template <class Out> DEVICE void apply_long_curve(f32 (&v)[1], s32 epilogue, f32 per_unit) {
  v[0] = curved<Out>(v[0], epilogue, per_unit);
}

// Stores one value, or four neighbouring ones, as elements of the output.
template <class T> struct Sink;
template <> struct Sink<f32> {
  DEVICE Sink(const Layer&) {}
  DEVICE f32 per_unit() const { return 0.0f; }
  DEVICE void put(f32* to, const f32 (&v)[1]) const { *to = v[0]; }
  DEVICE void put(f32* to, const f32 (&v)[4]) const { store16(to, Chunk<f32>::pack(v)); }
};
template <class T> struct HalfSink {
  DEVICE HalfSink(const Layer&) {}
  DEVICE f32 per_unit() const { return 0.0f; }
  DEVICE void put(T* to, const f32 (&v)[1]) const { narrow(v[0], *to); }
  DEVICE void put(T* to, const f32 (&v)[4]) const {
    T e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) narrow(v[i], e[i]);
    __stcs((uint2*)to, make_uint2((u32)e[0].bits | (u32)e[1].bits << 16, (u32)e[2].bits | (u32)e[3].bits << 16));
  }
};
template <> struct Sink<f16> : HalfSink<f16> { using HalfSink<f16>::HalfSink; };
template <> struct Sink<bf16> : HalfSink<bf16> { using HalfSink<bf16>::HalfSink; };
template <class T> struct CodeSink {
  Segment<f32> segment;
  DEVICE CodeSink(const Layer& p) {
    const f32 scale = p.output_scale ? *(const f32*)p.output_scale : (f32)p.output_scale_value;
    const s32 zero = p.output_zero_point ? *p.output_zero_point : p.output_zero_point_value;
    segment = Segment<f32>::make(scale, zero, CodeRange<T>::min, CodeRange<T>::max);
  }
  DEVICE f32 per_unit() const { return ::per_unit(segment); }
  template <int V> DEVICE void put(T* to, const f32 (&v)[V]) const {
    u32 q[V];
    result_codes(v, segment, q);
    store(to, q);
  }
  static DEVICE void store(T* to, const u32 (&q)[1]) { *to = (T)q[0]; }
  static DEVICE void store(T* to, const u32 (&q)[4]) { __stcs((u32*)to, four_bytes(q[0], q[1], q[2], q[3])); }
};
template <> struct Sink<s8> : CodeSink<s8> { using CodeSink<s8>::CodeSink; };
template <> struct Sink<u8> : CodeSink<u8> { using CodeSink<u8>::CodeSink; };
template <> struct Sink<s64> {
  DEVICE Sink(const Layer&) {}
  template <int V> DEVICE void put(s64* to, const s64 (&v)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = v[i];
  }
};
template <> struct Sink<s32> {
  DEVICE Sink(const Layer&) {}
  DEVICE void put(s32* to, const s32 (&v)[1]) const { *to = v[0]; }
  DEVICE void put(s32* to, const s32 (&v)[4]) const { __stcs((int4*)to, make_int4(v[0], v[1], v[2], v[3])); }
};

// Where a staged sum lies: in rows of COLUMNS words, with a swizzle that puts the rows of a fragment in different
// banks.
template <class T> DEVICE int staged_at(int row, int column) { return row * T::COLUMNS + (column ^ (row & 3) << 3); }

// Sums of V neighbouring columns of a staged row, over the warps that divide K.
template <int V, class T> DEVICE void staged_sums(const s32* sums, int staged, int column, s32 (&acc)[V]) {
#pragma unroll
  for (int s = 0; s < T::WARPS_K; ++s) {
    const s32* const from = sums + s * (T::ROWS / T::PARTS) * T::COLUMNS + staged_at<T>(staged, column);
    s32 own[4];
    if (V == 4) {
      const int4 four = *(const int4*)from;
      own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
    } else {
      own[0] = *from;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) acc[j] = s == 0 ? own[j] : acc[j] + own[j];
  }
}
// Where row or column `at` of the results begins among the rows or columns of sums.
template <int HALVES> DEVICE int first_of(int at) { return HALVES > 1 ? at / 8 * 16 + at % 8 : at; }

// A thread finishes V neighbouring outputs at a time; neighbouring threads take neighbouring outputs of a row.
template <int V, class Out, bool ZERO_POINTS, class T, class Rows>
DEVICE void finish(const Layer& p, const Rows& rows, s64 row0, s64 column0, int part) {
  enum { IN_ROW = T::COLUMNS / W_HALVES / V, LANES = (int)IN_ROW < (int)T::THREADS ? IN_ROW : T::THREADS };
  enum { HEIGHT = T::ROWS / T::PARTS, RUN = 16 * T::PART_MMAS_M, STEP = T::THREADS / LANES };
  const s32* const sums = (const s32*)shared_bytes();
  const s32* const a_sums = (const s32*)(shared_bytes() + T::RING);
  const s32* const w_sums = a_sums + T::WARPS_K * T::ROWS;
  const Sink<Out> sink(p);
#pragma unroll 1
  for (int unit = threadIdx.x % LANES; unit < IN_ROW; unit += LANES) {
    const s64 column = column0 + unit * V;
    if (column >= p.n) break;
    f32 scale[V], bias[V];
    s32 zero[V], w_sum[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      scale[j] = IsSum<Out>::value ? 0.0f : real_at(p.weight_scale, p.weight_scale_is, column + j, 0.0f);
      bias[j] = p.bias ? real_at(p.bias, p.bias_is, column + j, 0.0f) : 0.0f;
      if (ZERO_POINTS) {
        zero[j] = p.weight_zero_point ? p.weight_zero_point[column + j] : 0, w_sum[j] = 0;
#pragma unroll
        for (int s = 0; s < T::WARPS_K; ++s) w_sum[j] += w_sums[s * T::COLUMNS + unit * V + j];
      }
    }
#pragma unroll 2
    for (int at = threadIdx.x / LANES; at < HEIGHT / A_HALVES; at += STEP) {
      const int staged = first_of<A_HALVES>(at), column_at = first_of<W_HALVES>(unit * V);
      const int in_tile = staged / RUN * T::WARP_ROWS + part * RUN + staged % RUN;
      const s64 row = row0 + whole_row<A_HALVES>(in_tile);
      if (row >= p.m) continue;
      typename CodeSum<(A_HALVES > 1)>::type acc[V];
      if constexpr (A_HALVES > 1) {
        s32 high[V], low[V], of_w[V];
        staged_sums<V, T>(sums, staged, column_at, high);
        staged_sums<V, T>(sums, staged + 8, column_at, low);
        if (W_HALVES > 1) staged_sums<V, T>(sums, staged, column_at + 8, of_w);
#pragma unroll
        for (int j = 0; j < V; ++j) acc[j] = joined(high[j], W_HALVES > 1 ? low[j] + of_w[j] : low[j]);
      } else {
        staged_sums<V, T>(sums, staged, column_at, acc);
      }
      if constexpr (IsSum<Out>::value) {
        sink.put((Out*)p.output + row * p.output_leading + column, acc);
      } else {
        s64 za = 0, a_sum = 0;
        if (ZERO_POINTS) {
#pragma unroll
          for (int s = 0; s < T::WARPS_K; ++s) a_sum += a_sums[s * T::ROWS + in_tile];
          za = rows.zero_point_of(row);
          a_sum -= p.k * za;
        }
        const f32 row_scale = rows.at(row);
        f32 v[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const f32 sum = ZERO_POINTS ? rows.difference(acc[j] - za * w_sum[j], zero[j], a_sum) : (f32)acc[j];
          v[j] = p.k == 0 ? 0.0f : mul_rn(mul_rn(row_scale, scale[j]), sum);
          if (p.bias) v[j] = v[j] + bias[j];
        }
        if (p.epilogue > BIAS_RELU) {
          apply_long_curve<Out>(v, p.epilogue, sink.per_unit());
        } else if (p.epilogue == BIAS_RELU) {
#pragma unroll
          for (int j = 0; j < V; ++j) v[j] = relu(v[j]);
        }
        sink.put((Out*)p.output + row * p.output_leading + column, v);
      }
    }
  }
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// A warp's fragments of 32 bytes of K. Of a: 16 rows of the first 16 bytes, then of the others, in the order of
// mma.sync. Of w: both halves of eight columns, then of eight more.
template <bool DIRECT, class T> struct Fragments {
  u32 a[T::MMAS_M][4], w[T::MMAS_N / 2][4];
  static DEVICE u32 a_place(int wm) { return place(wm * T::WARP_ROWS + threadIdx.x % 16, threadIdx.x / 16 % 2); }
  static DEVICE u32 w_place(int wn) {
    const int lane = threadIdx.x % 32;
    return place(T::ROWS + wn * T::WARP_COLUMNS + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  static DEVICE u32 place(int row, int unit) {
    return DIRECT ? T::place(row, unit) : (u32)(row * T::PITCH + unit * 16);
  }
  DEVICE void load(u32 a_at, u32 w_at, u32 cut) {
    const u32 pitch = DIRECT ? T::BLOCK_K : T::PITCH;
    a_at = DIRECT ? a_at ^ cut << 5 : a_at + (cut << 5), w_at = DIRECT ? w_at ^ cut << 5 : w_at + (cut << 5);
#pragma unroll
    for (int i = 0; i < T::MMAS_M; ++i) ldmatrix_x4(a[i], a_at + i * 16 * pitch);
#pragma unroll
    for (int j = 0; j < T::MMAS_N / 2; ++j) ldmatrix_x4(w[j], w_at + j * 16 * pitch);
  }
};

// Rasterization: tiles go down a band of 2,048 rows, then to the next columns, so that blocks that run at the same time
// share operands in L2.
template <class T> DEVICE void tile_of(s64 m, s64 n, s64& row0, s64& column0) {
  const u32 down = (u32)((m + T::ROWS - 1) / T::ROWS), across = (u32)((n + T::COLUMNS - 1) / T::COLUMNS);
  const u32 band_rows = 2048 / T::ROWS, high = down < band_rows ? down : band_rows;
  const u32 band = blockIdx.x / (high * across), inside = blockIdx.x - band * high * across;
  const u32 rest = down - band * high, own = rest < high ? rest : high;
  row0 = (s64)(band * high + inside % own) * T::ROWS, column0 = (s64)(inside / own) * T::COLUMNS;
}

// A warp's accumulators: products, and sums of the codes of its part of the rows and columns.
template <class T> struct Sums {
  s32 of[T::MMAS_M][T::MMAS_N][4], a[T::OWN_MMAS_M][2], w[T::OWN_MMAS_N];
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < T::MMAS_M; ++i) {
#pragma unroll
      for (int j = 0; j < T::MMAS_N; ++j) of[i][j][0] = of[i][j][1] = of[i][j][2] = of[i][j][3] = 0;
    }
#pragma unroll
    for (int i = 0; i < T::OWN_MMAS_M; ++i) a[i][0] = a[i][1] = 0;
#pragma unroll
    for (int j = 0; j < T::OWN_MMAS_N; ++j) w[j] = 0;
  }
  template <class A, class W, class F> DEVICE void add_products(const F& f) {
#pragma unroll
    for (int i = 0; i < T::MMAS_M; ++i) {
#pragma unroll
      for (int j = 0; j < T::MMAS_N; ++j) {
        const u32* const w = f.w[j / 2] + j % 2 * 2;
        mma_m16n8k32<A, W>(of[i][j], f.a[i], w[0], w[1]);
      }
    }
  }
  template <class A, class W, class F> DEVICE void add_codes(const F& f, int wm, int wn) {
#pragma unroll
    for (int i = 0; i < T::MMAS_M; ++i) {
      s32(&own)[2] = a[i % T::OWN_MMAS_M];
#pragma unroll
      for (int e = 0; e < 4 && i / T::OWN_MMAS_M == wn; ++e) own[e % 2] = sum_codes(f.a[i][e], own[e % 2], A());
    }
#pragma unroll
    for (int j = 0; j < T::MMAS_N; ++j) {
      s32& own = w[j % T::OWN_MMAS_N];
#pragma unroll
      for (int e = 0; e < 2 && j / T::OWN_MMAS_N == wm; ++e) own = sum_codes(f.w[j / 2][j % 2 * 2 + e], own, W());
    }
  }
};

// The mainloop for two aligned operands. It has no branches: stages beyond the last one are filled with zeros.
template <class A, class W, bool ZERO_POINTS, class T, class Rows, class Columns>
DEVICE void mainloop_aligned(Sums<T>& sums, Rows a, Columns w, int steps, int wm, int wn, int wk) {
  constexpr bool AHEAD = T::SPARE >= (ZERO_POINTS ? T::MORE : 0);
  const u32 ring = shared_start(), below = ring + T::ROWS * T::BLOCK_K;
#pragma unroll 1
  for (int s = 0; s < T::STAGES - 1; ++s) {
    a.load_aligned(ring + s * T::STAGE), w.load_aligned(below + s * T::STAGE);
    cp_async_commit_group();
  }
  cp_async_wait_group<T::STAGES - 2>();
  __syncthreads();

  typedef Fragments<true, T> F;
  const u32 a_place = ring + F::a_place(wm), w_place = ring + F::w_place(wn);
  u32 reading = 0, writing = (T::STAGES - 1) * T::STAGE;
  F now, next;
  if (AHEAD) now.load(a_place, w_place, wk * T::MMAS_K);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int cut = 0; cut < T::MMAS_K; ++cut) {
      if (!AHEAD) now.load(reading + a_place, reading + w_place, wk * T::MMAS_K + cut);
      if (cut == 0) {
        a.load_aligned(ring + writing), w.load_aligned(below + writing);
        cp_async_commit_group();
        writing = writing == T::RING - T::STAGE ? 0 : writing + T::STAGE;
      }
      if (cut == T::MMAS_K - 1) {
        reading = reading == T::RING - T::STAGE ? 0 : reading + T::STAGE;
        cp_async_wait_group<T::STAGES - 2>();
        __syncthreads();
      }
      if (AHEAD) next.load(reading + a_place, reading + w_place, wk * T::MMAS_K + (cut + 1) % T::MMAS_K);
      sums.template add_products<A, W>(now);
      if (ZERO_POINTS) sums.template add_codes<A, W>(now, wm, wn);
      if (AHEAD) now = next;
    }
  }
}

// The mainloop for operands of any alignment.
template <class A, class W, bool ZERO_POINTS, class T, class Rows, class Columns>
DEVICE void mainloop_unaligned(Sums<T>& sums, Rows a, Columns w, int steps, int wm, int wn, int wk) {
  enum { STAGE = T::UNALIGNED_STAGE, STAGES = T::UNALIGNED_STAGES, RING = STAGE * STAGES };
  const u32 ring = shared_start(), below = ring + T::ROWS * T::PITCH;
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) {
    a.load_unaligned(ring + s * STAGE, s == 0), w.load_unaligned(below + s * STAGE, s == 0);
    cp_async_commit_group();
  }
  cp_async_wait_group<STAGES - 2>();
  __syncwarp();
  a.shift_into_place(ring), w.shift_into_place(below);
  __syncthreads();

  typedef Fragments<false, T> F;
  const u32 a_place = ring + F::a_place(wm), w_place = ring + F::w_place(wn);
  u32 reading = 0, writing = (STAGES - 1) * STAGE;
  F now;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    a.load_unaligned(ring + writing, false), w.load_unaligned(below + writing, false);
    cp_async_commit_group();
    writing = writing == RING - STAGE ? 0 : writing + STAGE;
    const u32 coming = reading == RING - STAGE ? 0 : reading + STAGE;
    if (STAGES > 2) {
      cp_async_wait_group<STAGES - 2>();
      __syncwarp();
      a.shift_into_place(ring + coming), w.shift_into_place(below + coming);
    }
#pragma unroll 2
    for (int cut = 0; cut < T::MMAS_K; ++cut) {
      now.load(reading + a_place, reading + w_place, wk * T::MMAS_K + cut);
      sums.template add_products<A, W>(now);
      if (ZERO_POINTS) sums.template add_codes<A, W>(now, wm, wn);
    }
    if (STAGES == 2) {
      cp_async_wait_group<0>();
      __syncwarp();
      a.shift_into_place(ring + coming), w.shift_into_place(below + coming);
    }
    reading = coming;
    __syncthreads();
  }
}

// Scales: RowScales or GivenRows.
template <class A, class W, class Out, bool ZERO_POINTS, class T, class Scales>
DEVICE void linear_by_mma(const Layer& p, const Scales& scales) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wm = warp % T::WARPS_M, wn = warp / T::WARPS_M % T::WARPS_N, wk = warp / (T::WARPS_M * T::WARPS_N);
  s64 row0, column0;
  tile_of<T>(p.m * A_HALVES, p.n * W_HALVES, row0, column0);
  row0 /= A_HALVES, column0 /= W_HALVES;
  const auto a = Operand<T::ROWS, A_HALVES, T>::make(p.a, p.a_leading, row0, p.m, p.k);
  const auto w = Operand<T::COLUMNS, W_HALVES, T>::make(p.w, p.w_leading, column0, p.n, p.k);
  const int steps = (int)((p.k + T::BLOCK_K - 1) / T::BLOCK_K);
  Sums<T> sum;
  sum.clear();
  if (A_HALVES > 1 || (a.aligned && w.aligned)) {
    mainloop_aligned<A, W, ZERO_POINTS>(sum, a, w, steps, wm, wn, wk);
  } else {
    mainloop_unaligned<A, W, ZERO_POINTS>(sum, a, w, steps, wm, wn, wk);
  }
  cp_async_wait_group<0>();

  const int row = lane / 4, pair = lane % 4 * 2;
  if (ZERO_POINTS) {
    s32* const a_sums = (s32*)(shared_bytes() + T::RING) + wk * T::ROWS + wm * T::WARP_ROWS;
    s32* const all_w_sums = (s32*)(shared_bytes() + T::RING) + T::WARPS_K * T::ROWS;
    s32* const w_sums = all_w_sums + wk * T::COLUMNS + wn * T::WARP_COLUMNS;
#pragma unroll
    for (int i = 0; i < 2 * T::OWN_MMAS_M; ++i) {
      s32 total = sum.a[i / 2][i % 2];
      total += __shfl_xor_sync(~0u, total, 1), total += __shfl_xor_sync(~0u, total, 2);
      const int at = wn * 2 * T::OWN_MMAS_M + i;
      if (lane % 4 == 0 && at < 2 * T::MMAS_M) a_sums[8 * at + row] = total;
    }
#pragma unroll
    for (int j = 0; j < T::OWN_MMAS_N; ++j) {
      s32 total = sum.w[j];
      total += __shfl_xor_sync(~0u, total, 1), total += __shfl_xor_sync(~0u, total, 2);
      const int at = wm * T::OWN_MMAS_N + j;
      if (lane % 4 == 0 && at < T::MMAS_N) w_sums[8 * at + row] = total;
    }
  }

  s32* const sums = (s32*)shared_bytes() + wk * (T::ROWS / T::PARTS) * T::COLUMNS;
  // Four outputs at once if they exist and are aligned in every row.
  const u64 grain = (u64)p.output | (u64)p.output_leading * sizeof(Out);
  const bool wide = p.n % 4 == 0 && grain % (4 * sizeof(Out)) == 0;
#pragma unroll 1
  for (int part = 0; part < T::PARTS; ++part) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T::MMAS_M; ++i) {
      if (T::PARTS > 1 && i / T::PART_MMAS_M != part) continue;
      const int at = (wm * T::PART_MMAS_M + i % T::PART_MMAS_M) * 16 + row;
#pragma unroll
      for (int j = 0; j < T::MMAS_N; ++j) {
        const int column = wn * T::WARP_COLUMNS + j * 8 + pair;
        *(int2*)(sums + staged_at<T>(at, column)) = make_int2(sum.of[i][j][0], sum.of[i][j][1]);
        *(int2*)(sums + staged_at<T>(at + 8, column)) = make_int2(sum.of[i][j][2], sum.of[i][j][3]);
      }
    }
    __syncthreads();
    if (wide) {
      finish<4, Out, ZERO_POINTS, T>(p, scales, row0, column0, part);
    } else {
      finish<1, Out, ZERO_POINTS, T>(p, scales, row0, column0, part);
    }
  }
}
