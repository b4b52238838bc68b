// Argmax: the index of the largest logit of every row.
//
//   token = the least i with logits[i] = the largest of the row; a NaN is larger than any number
//
//   logits       Data, rows of v tokens, logits_leading elements apart; weights.cuh reads them
//   row_maxima   scratch: the largest keys of every part of a row, and where they are
//   token        s64 or s32, one per row
//
// A warp takes a row.
#include "weights.cuh"

KERNEL(32, 16) argmax(const u64* row_maxima, void* token, s32 wide, s32 parts) {
  griddepcontrol_wait();
  const u64 best = row_best(row_maxima, blockIdx.x, (u32)parts);
  if (threadIdx.x == 0) store_token(token, wide, blockIdx.x, (s32)index_in(best));
}
