// A gated activation and the quantization of its products, row by row.
//
//   y = RN_T(RN_C(C(a) C(up))), a = RN_T(E(gate));  q = clamp(rne(RN_C(y / s)) + z, q_min, q_max)
//   dynamic: m = max |y| over the row, s = RN_C(m / q_max) or 1, z = 0;  static: s and z are given, one for all rows
//
// Data: global memory -> R chunks of gate and of up for each thread, all requested before the first is used -> R chunks
// of y in registers -> range of the row, by shuffles (Lanes) or shared memory (Block) -> codes from the same registers
// -> global memory. The data is read once.
//
// Variants. Dynamic: Lanes gives a row a power of two of neighbouring threads of a warp, Block a whole block. A LONG
// row, beyond R chunks for each thread, is read and computed a second time for its codes. Static: there is no range, so
// several blocks may divide a row. Rows that are not whole chunks or have a NaN in y, and extreme scales, take the slow
// path: element by element, by E alone.
#pragma once
#include "curves.cuh"
#include "griddepcontrol.cuh"
#include "runs.cuh"

typedef Gate<SKUDA_CURVE, Data> Gated;

// Whether chunks need more registers than others: GELU of f16, by bounds.
template <class T> struct Heavy { enum { value = 0 }; };
template <> struct Heavy<f16> { enum { value = SKUDA_CURVE == GELU }; };
// Blocks of 256 threads on a multiprocessor for which there must be registers: as many as possible without spills.
#define FEW (sizeof(Data) == 2 ? (Heavy<Data>::value ? 3 : 4) : 2)

// Where the gates, ups, codes and (unless null) products of a row, or of a part of it, begin.
struct GatedRow {
  const Data* gate;
  const Data* up;
  Place codes;
  Data* products;
};

// The arrays. If `up` is null, the ups of a row follow its gates.
struct GatedRows {
  const Data* gate;
  s64 gate_leading;
  const Data* up;
  s64 up_leading;
  u8* output;
  s64 output_leading;
  Data* product;
  s64 product_leading, rows, columns;

  DEVICE GatedRow at(s64 row) const {
    const Data* first = gate + row * gate_leading;
    return GatedRow{first, up == nullptr ? first + columns : up + row * up_leading,
                    Codes<SKUDA_CODE>::place(output, columns) + row * output_leading,
                    product == nullptr ? nullptr : product + row * product_leading};
  }
  DEVICE Extremes<Data> nothing() const { return Extremes<Data>::opaque((u32)((u64)rows >> 63)); }
  // Whether rows are whole, aligned chunks; in one expression, because a launch of few rows waits for it.
  DEVICE bool by_chunks() const {
    enum { V = Width<Data>::count };
    const u64 apart = (u64)(gate_leading | up_leading | product_leading) * sizeof(Data), codes_apart = (u64)output_leading;
    const u64 data = (u64)gate | (u64)up | (u64)product | (rows > 1 ? apart : 0);
    const u64 codes = (u64)output | (rows > 1 ? codes_apart : 0);
    return ((data % 16) | (codes % V) | ((u64)columns % V)) == 0 && columns > 0;
  }
};

template <int R> struct GatedChunks : HeldChunks<R> {
  // Loads R chunks, `lanes` apart, and computes y. Beyond the last chunk it repeats that one.
  DEVICE void compute(const GatedRow& row, u32 first, u32 lanes, u32 chunks) {
    uint4 gate[R], up[R];
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const u32 at = first + k * lanes, own = at < chunks ? at : chunks - 1;
      gate[k] = load16((const uint4*)row.gate + own), up[k] = load16((const uint4*)row.up + own);
    }
#pragma unroll
    for (int k = 0; k < R; ++k) this->chunk[k] = Gated::chunk(gate[k], up[k]);
  }
  DEVICE void store_products(const GatedRow& row, u32 first, u32 lanes, u32 chunks) const {
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (first + k * lanes < chunks) store16((uint4*)row.products + first + k * lanes, this->chunk[k]);
    }
  }
};

// The slow path: element by element, not inlined.
__device__ __noinline__ Range slow_gated_range(const Data* gate, const Data* up, Data* products, s64 columns, u32 lane,
                                               u32 lanes) {
  Range r = Range{0, 0};
#pragma unroll 1
  for (s64 i = lane; i < columns; i += lanes) {
    const Data y = Gated::single(gate[i], up[i]);
    if (products != nullptr) products[i] = y;
    include(r, widen(y));
  }
  r.up = max_of(r.up, r.down);
  return r;
}
__device__ __noinline__ void slow_gated_codes(const Data* gate, const Data* up, Data* products, Place codes, s64 columns,
                                              u32 lane, u32 lanes, Real s, s32 z, s32 q_min, s32 q_max) {
  const Segment<Real> own[1] = {Segment<Real>::make(s, z, q_min, q_max)};
#pragma unroll 1
  for (s64 i = lane; i < columns; i += lanes) {
    const Data found = Gated::single(gate[i], up[i]);
    if (products != nullptr) products[i] = found;
    const Real y[1] = {widen(found)};
    u32 q[1];
    quantized(y, own, q);
    Codes<SKUDA_CODE>::put(codes, i, q[0]);
  }
}

// A group of threads takes one row. A row has at most R chunks for each thread, which are read once, unless LONG.
template <int R, bool LONG, class Group>
DEVICE void gated_ranged(const Group group, const GatedRows& all, Real* scale_out, s32 q_min, s32 q_max) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const u32 lane = group.lane(), lanes = group.count, piece = R * lanes, chunks = (u32)(all.columns / Width<Data>::count);
  const bool by_chunks = all.by_chunks();
  const s64 own = ((s64)blockIdx.y * gridDim.x + blockIdx.x) * group.groups() + group.group();
  const bool mine = own < all.rows;
  const GatedRow row = all.at(mine ? own : 0);
  GatedChunks<R> held;
  Range r = Range{0, 0};
  if (by_chunks) {
    Extremes<Data> found = all.nothing();
    u32 base = lane;
    do {
      held.compute(row, base, lanes, chunks);
      if (mine && row.products != nullptr) held.store_products(row, base, lanes, chunks);
      held.include_in(found, false);
      base += piece;
    } while (LONG && base - lane < chunks);
    r = group.reduce(Range{found.up(), found.down()}, 0);
  }
  bool quick = by_chunks && !has_nan(r);
  if (group.any(!quick)) {
    group.wait();
    r = group.reduce(slow_gated_range(row.gate, row.up, mine ? row.products : nullptr, all.columns, lane, lanes), 0);
  }
  if (!mine) return;
  const Segment<Real> g = segment_of(r, 0, q_min, q_max);
  quick = quick && g.quick;
  if (lane == 0) scale_out[own] = g.s;
  if (!quick) {
    slow_gated_codes(row.gate, row.up, nullptr, row.codes, all.columns, lane, lanes, g.s, 0, q_min, q_max);
    return;
  }
  const bool within = q_min <= -q_max;
  u32 base = lane;
  do {
    if (LONG && chunks > piece) held.compute(row, base, lanes, chunks);
    if (within) held.template quantize<true>(row.codes, base, lanes, chunks, g);
    else held.template quantize<false>(row.codes, base, lanes, chunks, g);
    base += piece;
  } while (LONG && base - lane < chunks);
}

// A group of threads takes one row; the blocks of a column of the grid share its parts.
template <int R, class Group>
DEVICE void gated_scaled(const Group group, const GatedRows& all, const Scales<Data>& scales) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  enum { V = Width<Data>::count };
  const u32 lane = group.lane(), lanes = group.count, piece = R * lanes, chunks = (u32)(all.columns / V);
  const s64 own = (s64)blockIdx.x * group.groups() + group.group();
  if (own >= all.rows) return;
  const GatedRow row = all.at(own);
  const Segment<Real> g = scales.at(0);
  if (!all.by_chunks()) {
    slow_gated_codes(row.gate, row.up, row.products, row.codes, all.columns, blockIdx.y * lanes + lane, gridDim.y * lanes,
                     g.s, g.z, g.q_min, g.q_max);
    return;
  }
#pragma unroll 1
  for (u32 base = blockIdx.y * piece + lane; base - lane < chunks; base += gridDim.y * piece) {
    GatedChunks<R> held;
    held.compute(row, base, lanes, chunks);
    if (g.quick && all_finite_chunks(held.chunk, all.nothing())) {
      if (row.products != nullptr) held.store_products(row, base, lanes, chunks);
      held.template quantize<false>(row.codes, base, lanes, chunks, g);
      continue;
    }
#pragma unroll 1
    for (u32 at = base; at < chunks && at - base < piece; at += lanes) {
      slow_gated_codes(row.gate + (s64)at * V, row.up + (s64)at * V,
                       row.products == nullptr ? nullptr : row.products + (s64)at * V, row.codes + (s64)at * V, V, 0, 1, g.s,
                       g.z, g.q_min, g.q_max);
    }
  }
}
