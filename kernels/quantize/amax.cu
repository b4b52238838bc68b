// Amax: the largest magnitude of every row.
//
//   output = max |x| over the row, a NaN being skipped or an infinity (nonfinite.cuh); +0 if there is no number
//
//   input    Data, rows of columns, input_leading elements apart
//   output   C, one per row
//
// A row belongs to some lanes of a warp, or to a block. Maxima do not depend on the order of evaluation, so every path
// gives the same bits. The headers need SKUDA_CODE, which is not used.
#include "runs.cuh"

// One row per group of threads, which keep R chunks in flight.
template <int R, bool LONG, class Group>
DEVICE void amax_by_groups(const Group group, const Data* input, s64 input_leading, Real* output, s64 rows, s64 columns) {
  enum { V = Width<Data>::count };
  const u32 lane = group.lane(), lanes = group.count, chunks = (u32)(columns / V);
  const bool by_chunks = columns % V == 0 && columns > 0 && rows_of_chunks(input, input_leading, rows);
  const s64 own = (s64)blockIdx.x * group.groups() + group.group();
  const bool mine = own < rows;
  const Data* const row = input + (mine ? own : 0) * input_leading;
  Range r = Range{0, 0};
  if (by_chunks) {
    Extremes<Data> found = Extremes<Data>::zero();
    u32 base = lane;
    do {
      HeldChunks<R> held;
      held.load(row, base, lanes, chunks);
      held.include_in(found, false);
      base += R * lanes;
    } while (LONG && base - lane < chunks);
    r = group.reduce(Range{found.up(), found.down()}, 0);
  }
  if (group.any(!by_chunks || has_nan(r))) {
    group.wait();
    r = group.reduce(slow_range(row, columns, lane, lanes, 0), 0);
  }
  if (mine && lane == 0) output[own] = largest_of(r.up);
}

KERNEL(256, 4) amax_lanes(const Data* input, s64 input_leading, Real* output, s64 rows, s64 columns, s32 lanes) {
  amax_by_groups<4, false>(Lanes{(u32)lanes}, input, input_leading, output, rows, columns);
}
KERNEL(512, 2) amax_block(const Data* input, s64 input_leading, Real* output, s64 rows, s64 columns, s32) {
  amax_by_groups<4, true>(Block{blockDim.x}, input, input_leading, output, rows, columns);
}
