// Gated activation and amax: the products of activated gates with ups, and the largest magnitude of every row of them.
//
//   y = RN_T(RN_C(C(a) C(up))), a = RN_T(E(gate)), E = silu, gelu or gelu_tanh in f64
//   amax = max |y| over the row, a NaN being skipped or an infinity (nonfinite.cuh); +0 if there is no number
//
//   gate            Data, rows of columns, gate_leading elements apart
//   up              the same; null: the ups of a row follow its gates
//   product         Data: y, product_leading elements apart
//   amax            C, one per row
//   zeros           where blocks share rows: bits of C, then u32, one of each per row; 0 before and after
//   rows, columns   the shape of gate, up and product
//   part            elements of a row that a block computes, whole chunks
//
// Data: R chunks of gate and of up for each thread, all requested before the first is used -> R chunks of y -> global
// memory; the range of the part stays in registers. The data is read once, and no chunk is kept.
//
// Variants. Lanes gives a short row some lanes of a warp, Block gives a part of a row to a block. If the grid has
// several rows of blocks, the blocks of a column share a row of the data: each raises the maximum of the row, and the
// last one to arrive writes it. Maxima do not depend on the order of evaluation, so every path gives the same bits. A
// source is compiled for one curve: -DSKUDA_CURVE=SILU. The headers need SKUDA_CODE, which is not used.
#include "gated.cuh"

#define PARAMETERS                                                                                                   \
  const Data *gate, s64 gate_leading, const Data *up, s64 up_leading, Data *product, s64 product_leading, Real *amax, \
      RealBits *zeros, s64 rows, s64 columns, s64 part, s32 lanes
#define GIVEN                                                                                                         \
  GatedRows{gate, gate_leading, up, up_leading, nullptr, 0, product, product_leading, rows, columns}, amax, zeros, part

// The bits of magnitudes have the order of the magnitudes, also as unsigned numbers. atomic_take_bits resets the
// maximum to 0.
DEVICE void atomic_max_bits(s32* maximum, s32 bits) { atomicMax(maximum, bits); }
DEVICE void atomic_max_bits(s64* maximum, s64 bits) { atomicMax((u64*)maximum, (u64)bits); }
DEVICE s32 atomic_take_bits(s32* maximum) { return atomicExch(maximum, 0); }
DEVICE s64 atomic_take_bits(s64* maximum) { return (s64)atomicExch((u64*)maximum, (u64)0); }

template <int R, class Group>
DEVICE void gated_amax(const Group group, const GatedRows& all, Real* amax, RealBits* zeros, s64 part) {
  const u32 lane = group.lane(), lanes = group.count;
  const s64 own = (s64)blockIdx.x * group.groups() + group.group();
  const bool mine = own < all.rows, by_chunks = all.by_chunks();
  const s64 first = blockIdx.y * part, rest = all.columns - first, columns = rest < part ? rest : part;
  GatedRow row = all.at(mine ? own : 0);
  row.gate += first, row.up += first, row.products += first;
  Range r = Range{0, 0};
  if (by_chunks) {
    const u32 chunks = (u32)(columns / Width<Data>::count);
    Extremes<Data> found = all.nothing();
#pragma unroll 1
    for (u32 base = lane; base - lane < chunks; base += R * lanes) {
      GatedChunks<R> held;
      held.compute(row, base, lanes, chunks);
      if (mine) held.store_products(row, base, lanes, chunks);
      held.include_in(found, false);
    }
    r = group.reduce(Range{found.up(), found.down()}, 0);
  }
  if (group.any(!by_chunks || has_nan(r))) {
    group.wait();
    r = group.reduce(slow_gated_range(row.gate, row.up, mine ? row.products : nullptr, columns, lane, lanes), 0);
  }
  if (!mine || lane != 0) return;
  if (gridDim.y > 1) {
    atomic_max_bits(zeros + own, r.up);
    __threadfence();
    if (atomicInc((u32*)(zeros + all.rows) + own, gridDim.y - 1) != gridDim.y - 1) return;
    __threadfence();
    r.up = atomic_take_bits(zeros + own);
  }
  amax[own] = largest_of(r.up);
}

KERNEL(256, FEW) gated_amax_lanes_1(PARAMETERS) { gated_amax<1>(Lanes{(u32)lanes}, GIVEN); }
KERNEL(256, FEW) gated_amax_1(PARAMETERS) { gated_amax<1>(Block{blockDim.x}, GIVEN); }
KERNEL(256, FEW) gated_amax_2(PARAMETERS) { gated_amax<2>(Block{blockDim.x}, GIVEN); }
