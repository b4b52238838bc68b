// The kernel `unpack_weight`: the 8-bit codes of packed 4-bit weights; see unpacked_codes.cuh.
//
//   output[n, k] = scale[n, g] level[n, k] + offset[n, g]
//
//   packed       [units, blocks, LEVEL_BYTES + 32 groups] u8; `groups` groups in 128 elements of K
//   output       [n, k] s8, output_leading elements apart
#include "unpacked_codes.cuh"
