// GELU (erf form) and SiLU of linear layers. They use only sums, products, quotients and fused multiply-adds, so they
// have the same bits everywhere.
//
//   gelu(x) = x Phi(x),  Phi(-a) = exp(-a^2 / 2) R(a)
//   silu(x) = x / (1 + exp(-x))
//
// Data: registers -> registers.
//
// Variants, by the output's element. An activation costs as much as many products, so each is only as precise as
// needed:
//   f64            double-double arithmetic: within 1 ulp of the true value
//   f32            f64 arithmetic that is accurate to 2^-32, then one rounding: within 0.51 ulp of the true value
//   16 bits, codes f32 arithmetic within 8 ulp of f32, at half the cost of the f32 variant or less
//
// In f64, for 0 <= a <= 40, (a + 4) R(a) is P((a - 4) / (a + 4)). P is the polynomial through (a + 4) R(a) at 30
// Chebyshev nodes, at most 2^-69 from it, computed in 300-bit arithmetic. Leading terms are double-double numbers: a
// value and its rounding error.
#pragma once
#include "quotient.cuh"

struct DoubleDouble { f64 head, tail; };

DEVICE DoubleDouble two_sum(f64 a, f64 b) {
  const f64 s = a + b, part = s - a;
  return {s, (a - (s - part)) + (b - part)};
}
DEVICE DoubleDouble two_prod(f64 a, f64 b) {
  const f64 p = a * b;
  return {p, fma_rn(a, b, -p)};
}
DEVICE DoubleDouble dd_mul(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble p = two_prod(a.head, b.head);
  return two_sum(p.head, p.tail + fma_rn(a.head, b.tail, a.tail * b.head));
}
DEVICE DoubleDouble dd_add(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble s = two_sum(a.head, b.head);
  return two_sum(s.head, s.tail + (a.tail + b.tail));
}
DEVICE DoubleDouble dd_div(DoubleDouble a, DoubleDouble b) {
  const f64 q = a.head / b.head;
  return two_sum(q, (fma_rn(-q, b.head, a.head) + fma_rn(-q, b.tail, a.tail)) / b.head);
}

// exp(x) = 2^power m with m between 0.7 and 1.5, for -2000 < x <= 0.
DEVICE DoubleDouble exp_dd(DoubleDouble x, s32& power) {
  // ln 2 in two parts; the first has so few bits that its product with the power is exact.
  const f64 k = rint(x.head * 1.4426950408889634), high = 0.693147180559663, low = 2.8235290563031577e-13;
  power = (s32)k;
  const DoubleDouble lost = two_prod(-k, low);
  const DoubleDouble r = dd_add(two_sum(fma_rn(-k, high, x.head), lost.head), {lost.tail + x.tail, 0.0});
  // 1 + r + r^2 / 2 in two parts; r^3 / 6 and what follows are less than 1/100.
  f64 series = 1.0 / 20922789888000.0;
  const f64 inverse[] = {1307674368000.0, 87178291200.0, 6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0,
                         40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0};
#pragma unroll
  for (int n = 0; n < 13; ++n) series = fma_rn(series, r.head, 1.0 / inverse[n]);
  const DoubleDouble square = two_prod(r.head, r.head);
  const DoubleDouble head = dd_add(two_sum(1.0, r.head), {0.5 * square.head, 0.5 * square.tail});
  return dd_add(head, {r.tail + r.head * r.tail + r.head * square.head * series, 0.0});
}

// v 2^power with one rounding, also if the result is subnormal or 0, for -1500 < power <= 0.
DEVICE f64 ldexp_rn(DoubleDouble v, s32 power) {
  const s32 half = power / 2;
  const f64 first = __longlong_as_double((s64)(half + 1023) << 52);
  return (v.head + v.tail) * first * __longlong_as_double((s64)(power - half + 1023) << 52);
}

// (a + 4) R(a)
DEVICE DoubleDouble mills(DoubleDouble t) {
  const f64 coefficients[] = {
    -2.899079893689319e-12, -2.4952761282814275e-11, -5.3457619150028e-11, 8.767075790489559e-11,
    5.048133979353597e-10, 3.1147986108667166e-10, -1.983355896732498e-09, -4.1031916465067926e-09,
    3.337739055529747e-09, 2.237861443856259e-08, 1.2538518574850274e-08, -8.807335157921087e-08,
    -1.549297187633009e-07, 2.7341646900338456e-07, 1.0217355201757299e-06, -6.303360088841664e-07,
    -5.92028451703305e-06, 7.168345130729061e-07, 3.514471884847184e-05, -1.9082873878111045e-06,
    -0.0002310949405670398, 0.00013334431552461287, 0.0016308184580719788, -0.003479692367587764,
    -0.007540188966747303, 0.06039657489094257, -0.18652185795965698};
  f64 p = coefficients[0];
#pragma unroll
  for (int n = 1; n < 27; ++n) p = fma_rn(p, t.head, coefficients[n]);
  DoubleDouble sum = dd_add({0.3871374007422145, -2.8503580448579983e-18}, dd_mul(t, {p, 0.0}));
  sum = dd_add({-0.6078966419718921, -2.4866935773227036e-17}, dd_mul(t, sum));
  return dd_add({0.7552851304157515, -2.2175382864040874e-17}, dd_mul(t, sum));
}

DEVICE f64 gelu(f64 x) {
  if (!(x < 9.0) || x == 0.0) return x;  // Phi(-9) is below 2^-62; NaN too
  const f64 a = fmin(fabs(x), 40.0);
  const DoubleDouble below = two_sum(a, 4.0), square = two_prod(a, a);
  s32 power;
  const DoubleDouble decay = exp_dd({-0.5 * square.head, -0.5 * square.tail}, power);
  const DoubleDouble tail = dd_div(dd_mul(decay, mills(dd_div(two_sum(a, -4.0), below))), below);
  if (x < 0.0) return -ldexp_rn(dd_mul(tail, {a, 0.0}), power);
  const f64 scale = __longlong_as_double((s64)(power + 1023) << 52);
  const DoubleDouble rest = dd_add({1.0, 0.0}, {-scale * tail.head, -scale * tail.tail});
  const DoubleDouble found = dd_mul(rest, {x, 0.0});
  return found.head + found.tail;
}
DEVICE f64 silu(f64 x) {
  if (!(x < 45.0) || x == 0.0) return x;  // exp(-45) is below 2^-64; NaN too
  const f64 a = fmin(fabs(x), 800.0);
  s32 power;
  const DoubleDouble decay = exp_dd({-a, 0.0}, power);
  const f64 scale = power < -200 ? 0.0 : __longlong_as_double((s64)(power + 1023) << 52);
  const DoubleDouble below = dd_add({1.0, 0.0}, {scale * decay.head, scale * decay.tail});
  if (x < 0.0) return -ldexp_rn(dd_div(dd_mul(decay, {a, 0.0}), below), power);
  const DoubleDouble found = dd_div({x, 0.0}, below);
  return found.head + found.tail;
}

// f32 results: f64 arithmetic that is accurate to 2^-32, then one rounding, so within 0.51 ulp of the true value. A
// polynomial gives 2^f to 2^-34 for |f| <= 1/2, and a quotient of two gives R(a) to 2^-33 for 0 <= a <= 14.7; beyond
// 14.6 gelu(-a) vanishes. The f64 instructions decide the cost: 31 for GELU, 20 for SiLU.

// 2^(scale x), for scale x between -160 and 0.
DEVICE f64 exp2_to_f64(f64 x, f64 scale) {
  const f64 magic = 6755399441055744.0;  // 1.5 * 2^52: a sum with it has no fractional bits
  const f64 coefficients[] = {1.5201922641975562e-05, 0.0001546929113080106, 0.0013333922559077525, 0.009618027253711369,
                              0.055504103534532084,   0.24022651198157208,   0.6931471807284456,    0.999999999961682};
  const f64 shifted = fma_rn(x, scale, magic), f = fma_rn(x, scale, magic - shifted);
  f64 p = coefficients[0];
#pragma unroll
  for (int n = 1; n < 8; ++n) p = fma_rn(p, f, coefficients[n]);
  return __hiloint2double(__double2hiint(p) + (__double2loint(shifted) << 20), __double2loint(p));
}

// 1 / d to 2^-34, for 1 <= d < 2^40.
DEVICE f64 rcp_to_f64(f64 d) {
  f64 y = __hiloint2double(0x7FDE6238 - __double2hiint(d), 0);  // to 0.0506, by a linear function of the bits
#pragma unroll
  for (int n = 0; n < 3; ++n) y = fma_rn(fma_rn(-d, y, 1.0), y, y);
  return y;
}

DEVICE f32 gelu(f32 x) {
  const f64 over[] = {0.0008911053216036713, 0.011658310909417338, 0.0713751401156509, 0.2507284548521282,
                      0.5077121511134771,    0.4999999999575607};
  const f64 under[] = {0.00223367252140053, 0.029222867750117083, 0.18115014077583158, 0.65760743663629,
                       1.448268174118242,   1.813308854898137,    1.0};
  const f64 a = (f64)fminf(fabsf(x), 14.6f);
  f64 p = over[0], q = under[0];
#pragma unroll
  for (int n = 1; n < 6; ++n) p = fma_rn(p, a, over[n]);
#pragma unroll
  for (int n = 1; n < 7; ++n) q = fma_rn(q, a, under[n]);
  const f64 tail = exp2_to_f64(a * a, -0.7213475204444817) * (p * rcp_to_f64(q));
  const f32 found = (f32)fma_rn(-a, tail, x < 0.0f ? 0.0 : a);
  return x < 9.0f && x != 0.0f ? found : x;  // Phi(-9) is below 2^-62; NaN too
}
DEVICE f32 silu(f32 x) {
  const f64 a = (f64)fminf(fabsf(x), 110.0f), decay = exp2_to_f64(a, -1.4426950408889634);
  const f64 part = a * rcp_to_f64(1.0 + decay);
  const f32 found = (f32)(x < 0.0f ? -decay * part : part);
  return x < 90.0f && x != 0.0f ? found : x;  // exp(-90) is below 2^-129; NaN too
}

// Results of 16 bits or fewer: f32 arithmetic within 8 ulp of the true value, which changes one f16 in 2^14 and one
// bf16 in 2^17. It costs half of the above on cards whose f64 is half as fast as f32, and much less on others.

// 2^(scale (x + rest)) for exponents between -160 and 0, as a product of two numbers: the result and `other_half`.
// `scale` is given in two parts.
DEVICE f32 exp2_to_f32(f32 x, f32 rest, f32 scale, f32 scale_rest, f32& other_half) {
  const f32 magic = 12582912.0f;  // 1.5 * 2^23
  const f32 coefficients[] = {0.00015345812f, 0.0013399932f, 0.009618489f, 0.05550329f, 0.24022647f, 0.6931472f, 1.0f};
  const f32 shifted = fma_rn(x, scale, magic), back = magic - shifted;
  const f32 f = fma_rn(rest, scale, fma_rn(x, scale_rest, fma_rn(x, scale, back)));
  f32 p = coefficients[0];
#pragma unroll
  for (int n = 1; n < 7; ++n) p = fma_rn(p, f, coefficients[n]);
  const s32 power = __float_as_int(shifted) - 0x4B400000, half = power >> 1;
  other_half = __int_as_float((power - half + 127) << 23);
  return __int_as_float(__float_as_int(p) + (half << 23));
}

// 1 / d within 2 ulp, for 1 <= d < 2^60.
DEVICE f32 rcp_to_f32(f32 d) {
  f32 y = __int_as_float(0x7EF311C7 - __float_as_int(d));
#pragma unroll
  for (int n = 0; n < 3; ++n) y = fma_rn(fma_rn(-d, y, 1.0f), y, y);
  return y;
}

DEVICE f32 gelu_16(f32 x) {
  const f32 over[] = {0.0041312890f, 0.040733906f, 0.18353341f, 0.43869693f, 0.5f};
  const f32 under[] = {0.010355490f, 0.10211107f, 0.47025815f, 1.2037410f, 1.6752789f, 1.0f};
  const f32 a = fminf(fabsf(x), 14.6f), square = mul_rn(a, a);
  f32 p = over[0], q = under[0], rest;
#pragma unroll
  for (int n = 1; n < 5; ++n) p = fma_rn(p, a, over[n]);
#pragma unroll
  for (int n = 1; n < 6; ++n) q = fma_rn(q, a, under[n]);
  const f32 decay = exp2_to_f32(square, fma_rn(a, a, -square), -0.7213475f, -9.629815e-9f, rest);
  const f32 tail = mul_rn(mul_rn(mul_rn(p, rcp_to_f32(q)), decay), a);
  const f32 found = fma_rn(-tail, rest, x < 0.0f ? -0.0f : a);
  return x < 9.0f && x != 0.0f ? found : x;
}
DEVICE f32 silu_16(f32 x) {
  f32 rest;
  const f32 a = fminf(fabsf(x), 110.0f), decay = exp2_to_f32(a, 0.0f, -1.442695f, -1.925963e-8f, rest);
  const f32 part = mul_rn(a, rcp_to_f32(1.0f + mul_rn(decay, rest)));
  const f32 found = x < 0.0f ? -mul_rn(mul_rn(part, decay), rest) : part;
  return x < 90.0f && x != 0.0f ? found : x;
}
