// RMS norm and quantize: rows divided by their root mean square, then quantized.
//
//   h = input, or RN_T(input + residual);  r = 1 / sqrt(fold(h h) / d + eps);  y = RN_T(h r weight)
//   s = max |y| / q_max, 1 if 0, or given;  q = clamp(rne(RN_C(y / s)) + z, q_min, q_max)
//
//   input           Data, rows of columns, input_leading elements apart
//   residual        the same, or null: added to input
//   weight          Data, one per column, or null
//   bias            null: this op has none
//   output          codes, output_leading bytes apart
//   scale_out       C, one per row; null: the scale is given
//   residual_out    Data, where there is a residual: h
//   normalized_out  Data, or null: y
//   scale           C, or Data if scale_is_data; null: scale_value; with zero_point, null: zero_point_value
//   ahead           rows from a row to the one that is requested into L2 with it, 0 for none
//   lanes           threads of a row in `rms_norm_quantize_lanes`
//
// One launch that reads every row once, up to 16,384 elements of 16 bits (norm.cuh). There are entries for short rows,
// for rows in a block at two, four and eight octets of 8 elements per thread, and for longer rows. Two octets suit few
// rows, eight many.
#include "norm.cuh"

// One row per `lanes` threads of a warp; or per block, at R octets per thread.
KERNEL(256, LANES_BLOCKS) rms_norm_quantize_lanes(NORM_PARAMETERS) { NORM(false, 4, false, Lanes{(u32)lanes}); }
KERNEL(512, BLOCKS_2) rms_norm_quantize_2(NORM_PARAMETERS) { NORM(false, 2, false, Block{blockDim.x}); }
KERNEL(THREADS_4, BLOCKS_4) rms_norm_quantize_4(NORM_PARAMETERS) { NORM(false, 4, false, Block{blockDim.x}); }
KERNEL(256, BLOCKS_8) rms_norm_quantize_8(NORM_PARAMETERS) { NORM(false, OCTETS_8, false, Block{blockDim.x}); }
KERNEL(256, LONG_BLOCKS) rms_norm_quantize_long(NORM_PARAMETERS) { NORM(false, 4, true, Block{256}); }
