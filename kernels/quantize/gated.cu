// Gated activation and quantize: the products of activated gates with ups, as codes.
//
//   y = RN_T(RN_C(C(a) C(up))), a = RN_T(E(gate)), E = silu, gelu or gelu_tanh in f64
//   dynamic: s = RN_C(max |y| / q_max) over the row, 1 if 0;  z = 0;  static: s and z are given
//   q = clamp(rne(RN_C(y / s)) + z, q_min, q_max)
//
//   gate            Data, rows of columns, gate_leading elements apart
//   up              the same; null: the ups of a row follow its gates
//   output          codes, output_leading bytes apart
//   product         Data: y, product_leading elements apart; null: y is not stored
//   scale_out       C, one per row; dynamic only
//   scale           C, or Data if scale_is_data; null: scale_value; static only
//   zero_point      s32; null: zero_point_value; static only
//   rows, columns   the shape of gate, up, output and product
//
// `gated_R` holds the y of a row in R chunks for each thread, up to 4,096 chunks, and reads only longer rows twice.
// `scaled_R` does not need the whole row. A source is compiled for one curve: -DSKUDA_CURVE=SILU.
#include "gated.cuh"

#define ROWS_PARAMETERS                                                                                              \
  const Data *gate, s64 gate_leading, const Data *up, s64 up_leading, u8 *output, s64 output_leading, Data *product, \
      s64 product_leading, s64 rows, s64 columns
#define ROWS_GIVEN                                                                                                   \
  GatedRows{gate, gate_leading, up, up_leading, output, output_leading, product, product_leading, rows, columns}

#define RANGED_PARAMETERS ROWS_PARAMETERS, Real *scale_out, s32 lanes, s32 q_min, s32 q_max
#define RANGED(R, LONG, GROUP) gated_ranged<R, LONG>(GROUP, ROWS_GIVEN, scale_out, q_min, q_max)

// Blocks on a multiprocessor for which there must be registers, like FEW. The launch rule also knows MOST_OF_4.
#define FEW_SHORT (sizeof(Data) == 2 ? 3 : 2)
#define MOST_OF_4 (Heavy<Data>::value ? 256 : 448)
#define BLOCKS_OF_4 (sizeof(Data) == 2 ? (Heavy<Data>::value ? 3 : 2) : 1)

KERNEL(256, FEW) gated_lanes_1(RANGED_PARAMETERS) { RANGED(1, false, Lanes{(u32)lanes}); }
KERNEL(256, FEW) gated_2(RANGED_PARAMETERS) { RANGED(2, false, Block{blockDim.x}); }
KERNEL(MOST_OF_4, BLOCKS_OF_4) gated_4(RANGED_PARAMETERS) { RANGED(4, false, Block{blockDim.x}); }
KERNEL(512, 1) gated_8(RANGED_PARAMETERS) { RANGED(8, true, Block{blockDim.x}); }

#define SCALED_PARAMETERS                                                                                        \
  ROWS_PARAMETERS, const void *scale, s32 scale_is_data, Real scale_value, const s32 *zero_point,                \
      s32 zero_point_value, s32 q_min, s32 q_max, s32 lanes
#define SCALED(R, GROUP) \
  gated_scaled<R>(GROUP, ROWS_GIVEN,     \
                  Scales<Data>{scale, scale_is_data, scale_value, zero_point, zero_point_value, q_min, q_max})

KERNEL(256, FEW_SHORT) scaled_lanes_1(SCALED_PARAMETERS) { SCALED(1, (Lanes{(u32)lanes})); }
KERNEL(256, FEW) scaled_2(SCALED_PARAMETERS) { SCALED(2, Block{blockDim.x}); }
