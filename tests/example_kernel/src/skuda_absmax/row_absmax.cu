// Row absmax: the largest magnitude in every row.
//
//   output[n] = max over d of |input[n, d]|, exactly; NaN is skipped
//
//   input           Data, rows of columns, input_leading elements apart
//   output          f32, one for each row
//
// A block takes a row at a time. Magnitudes are compared as integers, which order them alike; the largest does not
// depend on who finds it, so the bits are those of the definition whatever the order is.
#include "elements.cuh"

typedef SKUDA_DATA Data;

KERNEL(256, 4) row_absmax(const Data* input, s64 input_leading, f32* output, s64 rows, s64 columns) {
  __shared__ s32 largest[256];
  for (s64 row = blockIdx.x; row < rows; row += gridDim.x) {
    s32 mine = 0;
    for (s64 column = threadIdx.x; column < columns; column += blockDim.x) {
      const f32 x = widen(input[row * input_leading + column]);
      if (x == x) mine = max(mine, bits_of(x) & 0x7fffffff);
    }
    largest[threadIdx.x] = mine;
    for (int half = 128; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) largest[threadIdx.x] = max(largest[threadIdx.x], largest[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) output[row] = number_of(largest[0]);
    __syncthreads();  // the next row's numbers go where these are still read
  }
}
