// Requantize: 32-bit sums to integer codes, by a multiplier.
//
//   output = clamp(rne(RN(f32(input) * multiplier)) + zero_point, q_min, q_max)
//
//   input           s32, rows of columns, input_leading elements apart
//   output          codes, output_leading elements apart
//   multiplier      f32; null: multiplier_value
//   zero_point      s32; null: zero_point_value
//   q_min, q_max    bounds of the codes
//   rows, columns   the shape of both
#include "elements.cuh"

typedef SKUDA_CODE Code;

KERNEL(256, 4) requantize(
    const s32* input, s64 input_leading, Code* output, s64 output_leading, const f32* multiplier, f32 multiplier_value,
    const s32* zero_point, s32 zero_point_value, s32 q_min, s32 q_max, s64 rows, s64 columns) {
  const s64 threads = (s64)gridDim.x * blockDim.x;
  const f32 factor = multiplier ? *multiplier : multiplier_value;
  const s64 shift = zero_point ? *zero_point : zero_point_value;
  for (s64 i = (s64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * columns; i += threads) {
    const f32 steps = rintf((f32)input[i / columns * input_leading + i % columns] * factor);
    const f64 t = steps == steps ? (f64)steps : 0.0;
    const f64 low = (f64)(q_min - shift), high = (f64)(q_max - shift);
    output[i / columns * output_leading + i % columns] = (Code)((s64)(t < low ? low : t > high ? high : t) + shift);
  }
}
