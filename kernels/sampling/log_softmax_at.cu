// Log-softmax at given tokens: their log-probabilities, and the entropy of every row.
//
//   logprob = RN_f32((z[token] - m) - l), entropy = RN_f32(l + A / S), l = ln(S / 2^40)
//
//   logits        Data, rows of v tokens, logits_leading elements apart
//   temperature   f32, one per row, or null
//   tokens        s64 or s32, rows of t, tokens_leading elements apart
//   row_maxima    scratch: the largest keys of every part of a row, and where they are
//   row_sums      scratch: S and A of every part of a row
//   logprob       f32, rows of t, logprob_leading elements apart
//   entropy       f32, one per row
//
// A block takes a row. Every thread computes l, which costs less than a barrier. The sequence is that of `logarithm` in
// weights.py, in f64 without FMA.
#include "weights.cuh"

DEVICE f64 logarithm(u64 total) {
  const s64 bits = __double_as_longlong(__ll2double_rn((s64)total)) - (40ll << 52);
  const s64 k = (bits - 0x3fe6a09e667f3bcdll) >> 52;
  const f64 g = __longlong_as_double(bits - (s64)((u64)k << 52));
  const f64 s = __ddiv_rn(__dadd_rn(g, -1.0), __dadd_rn(g, 1.0)), q = __dmul_rn(s, s), two = __dadd_rn(s, s);
  f64 series = 1.0 / 21;
#pragma unroll
  for (int n = 19; n > 2; n -= 2) series = __dadd_rn(__dmul_rn(series, q), 1.0 / n);
  const f64 exponent = (f64)(s32)k;
  const f64 rest = __dadd_rn(__dmul_rn(__dmul_rn(two, q), series), __dmul_rn(exponent, 5.497923018708371e-14));
  return __dadd_rn(__dmul_rn(exponent, 0.6931471805598903), __dadd_rn(two, rest));
}

KERNEL(256, 2) log_softmax_at(const Data* logits, s64 logits_leading, const f32* temperature, const void* tokens,
                              s64 tokens_leading, s32 wide, const u64* row_maxima, const Sums* row_sums, f32* logprob,
                              s64 logprob_leading, f32* entropy, s32 v, s32 parts, s32 t) {
  griddepcontrol_wait();
  const u32 row = blockIdx.x, key = key_in(row_best(row_maxima, row, (u32)parts));
  const Temperature divisor = Temperature::of(temperature, row);
  const bool has = finite(key) && divisor.valid();
  const Sums sums = row_total(row_sums, row, (u32)parts);
  const f32 nan = __uint_as_float(0x7fc00000u);
  const f64 m = (f64)z_of(key), l = has ? logarithm(sums.weights) : 0.0;
  for (s32 i = (s32)threadIdx.x; i < t; i += (s32)blockDim.x) {
    const s64 at = row * tokens_leading + i;
    const s64 token = wide ? ((const s64*)tokens)[at] : (s64)((const s32*)tokens)[at];
    f32 found = nan;
    if (has && token >= 0 && token < v) {
      const f64 z = (f64)divisor.z(widen(logits[row * logits_leading + token]));
      found = __double2float_rn(__dadd_rn(__dadd_rn(z, -m), -l));
    }
    logprob[row * logprob_leading + i] = found;
  }
  if (threadIdx.x != 0) return;
  const f64 mean = __ddiv_rn(__ll2double_rn((s64)sums.rest), __ll2double_rn((s64)sums.weights));
  entropy[row] = has ? __double2float_rn(__dadd_rn(l, mean)) : nan;
}
