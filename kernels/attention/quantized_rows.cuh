// The step behind attention that makes codes of its output: one scale for each token, over all of its heads.
//
//   output_scale[t] = RN(max |output[t, :]| / 127) or 1
//   output_codes[t, i] = clamp(rne(RN(output[t, i] / output_scale[t])), -127, 127)
//
//   output         Data, [tokens, columns], scratch: what the kernel before this one wrote
//   output_codes   s8, [tokens, columns]
//   output_scale   f32, [tokens]
//   lanes          threads of a token
//
// Data: L2 -> registers, once -> global memory (runs.cuh). It may start during the kernel before it, and waits for that.
//
// Variants: none. Every source of attention includes this, so that its launch rule can add the step.
#pragma once
#include "griddepcontrol.cuh"
#include "runs.cuh"

KERNEL(512, 1) quantized_rows(const Data* output, u8* output_codes, f32* output_scale, s64 tokens, s64 columns, s32 lanes) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  by_runs<8>(output, columns, output_codes, columns, output_scale, nullptr, columns, columns, tokens, 1, lanes, 0, -127,
             127, 1, tokens);
}
