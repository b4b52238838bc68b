// Sums of the codes of rows: what zero points take from a product, in front of it.
//
//   sums[i] = sum_k w[i, k] for i < w_rows, then sum_k a[i, k] for i < a_rows      exact in s32
//
//   w            [w_rows, k] SKUDA_WEIGHT, w_leading bytes apart
//   a, given_a   [a_rows, k] SKUDA_CODE, a_leading bytes apart, from the plan, and from the caller or null; the caller's is
//                used if given
//
// Data: global memory -> registers, 16 bytes a thread -> one sum a warp -> global memory. What fits into L2 is there for
// the product, which may start during the sums, and then waits.
//
// Rows begin at multiples of 16 bytes and have whole units of them, as TMA needs for the product.
//
// Variants: none; a warp has eight units a lane in flight, so that the memory is busy whatever K is.
#pragma once
#include "hopper.cuh"
#include "layer.cuh"

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
      sum = add_bytes(x[i].x, add_bytes(x[i].y, sum, T()), T());
      sum = add_bytes(x[i].z, add_bytes(x[i].w, sum, T()), T());
    }
  }
  return sum;
}

KERNEL(256, 4) code_sums(const u8* w, s64 w_leading, s64 w_rows, const u8* a, const u8* given_a, s64 a_leading, s64 a_rows,
                         s32* sums, s64 k) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (given_a != nullptr) a = given_a;
  for (s64 row = (s64)blockIdx.x * warps + threadIdx.x / 32; row < w_rows + a_rows; row += (s64)gridDim.x * warps) {
    s32 sum = row < w_rows ? sum_of_row<SKUDA_WEIGHT>(w + row * w_leading, (u32)(k / 16), lane)
                           : sum_of_row<SKUDA_CODE>(a + (row - w_rows) * a_leading, (u32)(k / 16), lane);
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) sums[row] = sum;
  }
}
