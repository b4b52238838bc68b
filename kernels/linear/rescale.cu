// Rescale: the output of a scaled linear layer from its exact sums; the arithmetic is that of epilogue.cuh.
//
//   acc = sums - act_zero_point[m] weight_sums[n] - weight_zero_point[n] act_sums[m] + k act_zero_point[m] weight_zero_point[n]
//   y   = epilogue(act_scale[m] * weight_scale[n] * acc)
//
//   sums         [m, n] SKUDA_SUMS (s32, or s64 without zero points), sums_leading elements apart
//   act_scale    [m] (act_step 1) or [1] (act_step 0) of act_scale_is
//   act_zero_point   as many s32, or null
//   act_sums     [m] s32, or null where weight_zero_point is
//   weight_sums  [n] s32, or null where act_zero_point is
//   weight_scale, weight_zero_point, bias   [n]; the latter two may be null
//   output       [m, n] SKUDA_OUT, output_leading elements apart; output_scale, output_zero_point: one each, for codes
//
// SKUDA_EPILOGUE names the epilogue; SKUDA_ZERO_POINTS is 0 if both zero points are null. A thread keeps the scales,
// biases and zero points of V neighbouring columns and goes through rows, U at a time. `lanes` threads, a power of two,
// share a row of the block.
#include "epilogue.cuh"

typedef SKUDA_REAL Real;
typedef SKUDA_OUT Out;
typedef SKUDA_SUMS Sum;

enum { V = 4, U = SKUDA_ZERO_POINTS ? 1 : sizeof(Real) == 8 ? 2 : 4 };
// Blocks of 256 threads on a multiprocessor for which there must be registers: as many as possible without spills.
enum { BLOCKS = sizeof(Real) == 8 || sizeof(Sum) == 8 || sizeof(Out) == 1 || CURVED || SKUDA_ZERO_POINTS ? 2 : 4 };
struct alignas(sizeof(Out) * V < 16 ? sizeof(Out) * V : 16) Outputs { Out of[V]; };

DEVICE bool rows_aligned(const void* p, s64 leading_bytes, s64 rows, u64 bytes) {
  return ((u64)p | (rows > 1 ? (u64)leading_bytes : 0)) % bytes == 0;
}

template <class Out> __device__ __noinline__ f64 curved(f64 v, f32) { return curve_of(v, SKUDA_EPILOGUE); }

DEVICE void rounded(const f64 (&v)[V], const Segment<f32>&, f64 (&y)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) y[j] = v[j];
}

struct Columns {  // scales, biases, zero points and sums of codes of a thread's columns; 0 beyond the last column
  Real scale[V], bias[V];
  s32 zero_point[V], sum[V];
};
struct RowPart {  // the sums of a row in these columns, and scale, zero point and sum of codes of the row
  Sum sums[V];
  Real scale;
  s32 zero_point, sum;
};

DEVICE void load_sums(const Sum* from, bool at_once, s64 left, Sum (&sums)[V]) {
  enum { WORDS = sizeof(Sum) / 4 };
  if (at_once) {
    u32 words[4 * WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint4 four = __ldcg((const uint4*)from + i);
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = (Sum)((u64)words[WORDS * j] | (u64)words[WORDS * j + WORDS - 1] << 32);
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = j < left ? from[j] : 0;
}

DEVICE void finish(const RowPart& row, const Columns& own, const Segment<f32>& codes, s64 k, Outputs& y) {
  const s64 za = row.zero_point, a = row.sum - k * za;
  Real v[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const Real acc = SKUDA_ZERO_POINTS ? GivenRows<Real>::difference(row.sums[j] - za * own.sum[j], own.zero_point[j], a) : (Real)row.sums[j];
    v[j] = k == 0 ? (Real)0 : mul_rn(mul_rn(row.scale, own.scale[j]), acc);
    if (SKUDA_EPILOGUE != IDENTITY) v[j] = v[j] + own.bias[j];
    if (SKUDA_EPILOGUE == BIAS_RELU) v[j] = relu(v[j]);
    if (CURVED) v[j] = curved<Out>(v[j], per_unit(codes));
  }
  rounded(v, codes, y.of);
}

KERNEL(256, BLOCKS) rescale(
    const Sum* sums, s64 sums_leading, GIVEN_ROWS_PARAMETERS, const s32* act_sums, const s32* weight_sums,
    EPILOGUE_PARAMETERS, s32 lanes) {
  const Epilogue p = EPILOGUE;
  const GivenRows<Real> rows = GIVEN_ROWS(Real);
  const s64 column = ((s64)blockIdx.x * lanes + (threadIdx.x & (lanes - 1))) * V, left = n - column;
  if (left <= 0) return;
  const bool loads = left >= V && rows_aligned(sums, sums_leading * (s64)sizeof(Sum), m, 16);
  const bool stores = left >= V && rows_aligned(output, output_leading * (s64)sizeof(Out), m, alignof(Outputs));
  const Segment<f32> codes = p.codes(CodeRange<Out>::min, CodeRange<Out>::max);
  Columns own;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    own.scale[j] = j < left ? real_at(weight_scale, weight_scale_is, column + j, (Real)0) : (Real)0;
    own.bias[j] = bias && j < left ? real_at(bias, bias_is, column + j, (Real)0) : (Real)0;
    own.zero_point[j] = weight_zero_point && j < left ? weight_zero_point[column + j] : 0;
    own.sum[j] = weight_sums && j < left ? weight_sums[column + j] : 0;
  }
  const u32 at_once = blockDim.x / lanes;
  const s64 step = (s64)gridDim.y * at_once;
#pragma unroll 1
  for (s64 first = (s64)blockIdx.y * at_once + threadIdx.x / lanes; first < m; first += U * step) {
    RowPart loaded[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const s64 row = first + u * step;
      loaded[u] = RowPart{{0, 0, 0, 0}, 0, 0, 0};
      if (row >= m) continue;
      load_sums(sums + row * sums_leading + column, loads, left, loaded[u].sums);
      loaded[u].scale = rows.at(row);
      if (SKUDA_ZERO_POINTS) loaded[u].zero_point = (s32)rows.zero_point_of(row), loaded[u].sum = act_sums ? act_sums[row] : 0;
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const s64 row = first + u * step;
      if (row >= m) break;
      Outputs y;
      finish(loaded[u], own, codes, k, y);
      Out* const to = p.output + row * output_leading + column;
      if (stores) {
        *(Outputs*)to = y;
        continue;
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (j < left) to[j] = y.of[j];
      }
    }
  }
}
