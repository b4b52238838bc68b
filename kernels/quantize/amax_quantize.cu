// Amax quantize: a scale from the given largest magnitude of every row, then the row's codes.
//
//   s = RN_C(amax / q_max), 1 if 0
//   q = clamp(rne(RN_C(x / s)), q_min, q_max)
//
//   input       Data, rows of columns, input_leading elements apart
//   amax        C, one per row
//   output      codes, output_leading bytes apart
//   scale_out   C, one per row
//
// A row belongs to some lanes of a warp, or to the blocks of a column of the grid; each thread computes the scale
// itself.
#include "runs.cuh"

#define PARAMETERS                                                                                                      \
  const Data *input, s64 input_leading, const Real *amax, u8 *output, s64 output_leading, Real *scale_out, s64 rows,   \
      s64 columns, s32 lanes, s32 q_min, s32 q_max
#define GIVEN input, input_leading, amax, output, output_leading, scale_out, rows, columns, q_min, q_max

template <int R, class Group>
DEVICE void quantize_rows(const Group group, const Data* input, s64 input_leading, const Real* amax, u8* output,
                          s64 output_leading, Real* scale_out, s64 rows, s64 columns, s32 q_min, s32 q_max) {
  enum { V = Width<Data>::count };
  const u32 lane = group.lane(), lanes = group.count, piece = R * lanes, chunks = (u32)(columns / V);
  const s64 own = (s64)blockIdx.x * group.groups() + group.group();
  if (own >= rows) return;
  const Data* const x = input + own * input_leading;
  const Place codes = Codes<SKUDA_CODE>::place(output, columns) + own * output_leading;
  Real s = div_rn(amax[own], (Real)q_max);
  if (s == (Real)0) s = (Real)1;
  if (lane == 0 && blockIdx.y == 0) scale_out[own] = s;
  if (columns % V != 0 || !rows_of_chunks(input, input_leading, rows) || !aligned(output, output_leading, rows, V)) {
    slow_codes(x, codes, columns, blockIdx.y * lanes + lane, gridDim.y * lanes, s, 0, q_min, q_max);
    return;
  }
  const Segment<Real> g = Segment<Real>::make(s, 0, q_min, q_max, true);
#pragma unroll 1
  for (u32 base = blockIdx.y * piece + lane; base - lane < chunks; base += gridDim.y * piece) {
    HeldChunks<R> held;
    held.load(x, base, lanes, chunks);
    if (g.quick && all_finite_chunks(held.chunk)) {
      held.template quantize<false>(codes, base, lanes, chunks, g);
      continue;
    }
#pragma unroll 1
    for (u32 at = base; at < chunks && at - base < piece; at += lanes) {
      slow_codes(x + (s64)at * V, codes + (s64)at * V, V, 0, 1, s, 0, q_min, q_max);
    }
  }
}

// Blocks on a multiprocessor for which there must be registers: as many as possible without spills.
#define ROWS_BLOCKS (sizeof(Data) == 8 && Halves<SKUDA_CODE>::count == 2 ? 3 : 4)

KERNEL(256, ROWS_BLOCKS) amax_quantize_lanes(PARAMETERS) { quantize_rows<4>(Lanes{(u32)lanes}, GIVEN); }
KERNEL(256, ROWS_BLOCKS) amax_quantize_block(PARAMETERS) { quantize_rows<4>(Block{blockDim.x}, GIVEN); }
