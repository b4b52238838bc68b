// Fill: every element is the value.
//
//   output = RN_T(value)
//
//   output          Data, rows of columns, output_leading stored elements apart (bytes where packed)
//   value           one element on the device, or null: number
//   number          the value, already rounded to Data
//   rows, columns   the shape in elements; packed rows start at a byte, an unused high nibble is 0
#include "elements.cuh"

typedef SKUDA_DATA Data;

DEVICE u64 bits_of(f64 v, f64) { return (u64)__double_as_longlong(v); }
DEVICE u64 bits_of(f64 v, f32) { return __float_as_uint((f32)v); }
DEVICE u64 bits_of(f64 v, f16) { return f32_to_f16((f32)v); }
DEVICE u64 bits_of(f64 v, bf16) { return f32_to_bf16((f32)v); }
DEVICE u64 bits_of(f64 v, s32) { return (u32)(s32)v; }
DEVICE u64 bits_of(f64 v, s8) { return (u8)(s8)(s32)v; }
DEVICE u64 bits_of(f64 v, u8) { return (u8)(s32)v; }
DEVICE u64 bits_of(f64 v, s4) { return (u64)((s32)v & 15); }
DEVICE u64 bits_of(f64 v, u4) { return (u64)((s32)v & 15); }
template <class T> DEVICE bool is_packed(T) { return false; }
DEVICE bool is_packed(s4) { return true; }
DEVICE bool is_packed(u4) { return true; }

KERNEL(256, 5) fill(u8* output, s64 output_leading, const u8* value, f64 number, s64 rows, s64 columns) {
  const bool packed = is_packed(Data());
  const int size = sizeof(Data);
  u64 one = bits_of(number, Data());
  if (value != nullptr) {
    one = 0;
    for (int i = 0; i < size; ++i) one |= (u64)value[i] << 8 * i;
    if (packed) one &= 15;
  }
  u64 pattern = packed ? one | one << 4 : one;
  for (int filled = size; filled < 8; filled *= 2) pattern |= pattern << 8 * filled;
  s64 row_bytes = packed ? (columns + 1) / 2 : columns * size, pitch = output_leading * (packed ? 1 : size);
  const bool spare = packed && columns % 2 != 0;  // the last byte of a row holds one element
  if (!spare && row_bytes == pitch) row_bytes *= rows, rows = 1;
  const bool chunks = ((u64)output | (rows > 1 ? (u64)pitch : 0)) % 16 == 0;
  const s64 per_row = chunks ? (row_bytes + 15) / 16 : row_bytes, total = per_row * rows;
  for (s64 i = (s64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (s64)gridDim.x * blockDim.x) {
    const s64 row = i / per_row, unit = i - row * per_row;
    u8* to = output + row * pitch;
    const s64 from = chunks ? unit * 16 : unit;
    if (chunks && from + 16 < row_bytes + (spare ? 0 : 1)) {
      __stcs((uint4*)(to + from), make_uint4((u32)pattern, (u32)(pattern >> 32), (u32)pattern, (u32)(pattern >> 32)));
      continue;
    }
    const s64 end = chunks ? (from + 16 < row_bytes ? from + 16 : row_bytes) : from + 1;
    for (s64 b = from; b < end; ++b) {
      const u8 byte = (u8)(pattern >> 8 * (b % size));
      to[b] = spare && b == row_bytes - 1 ? (u8)(byte & 15) : byte;
    }
  }
}
