// y = x * scale, rows of columns. With `parts`, a second launch: total = sum of what the first one left in `partial`.
#include "toy.cuh"
#ifdef __CUDACC_RTC__
#define WHO "nvrtc"
#endif

extern "C" __global__ void scaled(const float* x, s64 x_leading, const float* scale, int scale_is, float number,
                                  float* y, s64 y_leading, s64 rows, s64 columns) {
  const float s = scale ? *scale : number;
  const s64 n = rows * columns, threads = (s64)gridDim.x * blockDim.x;
  for (s64 i = (s64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads)
    y[i / columns * y_leading + i % columns] = x[i / columns * x_leading + i % columns] * s;
}

extern "C" __global__ void partial_sums(const float* x, double* partial, s64 n, int parts) {
  double sum = 0;
  for (s64 i = (s64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (s64)gridDim.x * blockDim.x) sum += x[i];
  atomicAdd(partial + blockIdx.x % parts, sum);
}

extern "C" __global__ void total(const double* partial, float* y, int parts) {
  double sum = 0;
  for (int i = 0; i < parts; ++i) sum += partial[i];
  *y = (float)sum;
}
