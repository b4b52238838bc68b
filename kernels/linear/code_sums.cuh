// Sums of the codes of rows, which a product with zero points needs. A launch in front of the product.
//
//   sums[i] = sum_k w[i, k] for i < w_rows, then sum_k a[i, k] for i < a_rows      exact in s32
//
//   w            [w_rows, k] SKUDA_WEIGHT, w_leading bytes apart
//   a, given_a   [a_rows, k] SKUDA_CODE, a_leading bytes apart: scratch, and an array of the caller or null, which is then used
//   sums         [w_rows + a_rows] s32
//
// Data: global memory -> registers, 16 bytes for each thread -> one sum for each warp -> global memory. What fits into
// L2 is still there for the product. The product may start during the sums, and then waits for them.
//
// Rows begin at multiples of 16 bytes and have a multiple of 16 bytes, as TMA needs for the product.
//
// Variants: none. A lane has eight loads in flight, so the memory is busy for any K.
#pragma once
#include "hopper.cuh"
#include "epilogue.cuh"

template <class T> DEVICE s32 sum_of_row(const u8* row, u32 units, u32 lane) {
  enum { AHEAD = 8 };
  s32 sum = 0;
#pragma unroll 1
  for (u32 first = lane; first < units; first += 32 * AHEAD) {
    uint4 x[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (first + 32 * i < units) x[i] = ((const uint4*)row)[first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      sum = sum_codes(x[i].x, sum_codes(x[i].y, sum, T()), T());
      sum = sum_codes(x[i].z, sum_codes(x[i].w, sum, T()), T());
    }
  }
  return sum;
}

KERNEL(256, 4) code_sums(const u8* w, s64 w_leading, s64 w_rows, const u8* a, const u8* given_a, s64 a_leading, s64 a_rows,
                         s32* sums, s64 k) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (given_a != nullptr) a = given_a;
  for (s64 row = (s64)blockIdx.x * warps + threadIdx.x / 32; row < w_rows + a_rows; row += (s64)gridDim.x * warps) {
    s32 sum = row < w_rows ? sum_of_row<SKUDA_WEIGHT>(w + row * w_leading, (u32)(k / 16), lane)
                           : sum_of_row<SKUDA_CODE>(a + (row - w_rows) * a_leading, (u32)(k / 16), lane);
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) sums[row] = sum;
  }
}
