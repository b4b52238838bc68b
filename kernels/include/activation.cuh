// GELU (erf form) and SiLU in f64, each rounded but once of note: within 1 ulp of the true value, so an f32 result is right
// but for rare ties. Only sums, products, quotients and fused multiply-adds are used, so the bits are the same everywhere.
//
//   gelu(x) = x Phi(x),  Phi(-a) = exp(-a^2 / 2) R(a),  (a + 4) R(a) = P((a - 4) / (a + 4)) for 0 <= a <= 40
//   silu(x) = x / (1 + exp(-x))
//
// P is the polynomial through (a + 4) R(a) at 30 Chebyshev nodes, 2^-69 from it; made in 300-bit arithmetic. What carries
// weight is kept in two parts, the second being what rounding took from the first.
#pragma once
#include "quotient.cuh"

struct Two { f64 head, tail; };

DEVICE Two sum_of(f64 a, f64 b) {
  const f64 s = a + b, part = s - a;
  return {s, (a - (s - part)) + (b - part)};
}
DEVICE Two product_of(f64 a, f64 b) {
  const f64 p = a * b;
  return {p, fused(a, b, -p)};
}
DEVICE Two times(Two a, Two b) {
  const Two p = product_of(a.head, b.head);
  return sum_of(p.head, p.tail + fused(a.head, b.tail, a.tail * b.head));
}
DEVICE Two plus(Two a, Two b) {
  const Two s = sum_of(a.head, b.head);
  return sum_of(s.head, s.tail + (a.tail + b.tail));
}
DEVICE Two over(Two a, Two b) {
  const f64 q = a.head / b.head;
  return sum_of(q, (fused(-q, b.head, a.head) + fused(-q, b.tail, a.tail)) / b.head);
}

// exp(x) = 2^power of something between 0.7 and 1.5, for -2000 < x <= 0.
DEVICE Two exponential(Two x, s32& power) {
  // ln 2 in two parts; the first has so few bits that its product with the power is exact.
  const f64 k = rint(x.head * 1.4426950408889634), high = 0.693147180559663, low = 2.8235290563031577e-13;
  power = (s32)k;
  const Two lost = product_of(-k, low);
  const Two r = plus(sum_of(fused(-k, high, x.head), lost.head), {lost.tail + x.tail, 0.0});
  // 1 + r + r^2 / 2 in two parts; r^3 / 6 and what follows are less than 1/100.
  f64 series = 1.0 / 20922789888000.0;
  const f64 inverse[] = {1307674368000.0, 87178291200.0, 6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0,
                         40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0};
#pragma unroll
  for (int n = 0; n < 13; ++n) series = fused(series, r.head, 1.0 / inverse[n]);
  const Two square = product_of(r.head, r.head);
  const Two most = plus(sum_of(1.0, r.head), {0.5 * square.head, 0.5 * square.tail});
  return plus(most, {r.tail + r.head * r.tail + r.head * square.head * series, 0.0});
}

// v 2^power with one rounding, also where the result is subnormal or 0; for -1500 < power <= 0.
DEVICE f64 scaled_by(Two v, s32 power) {
  const s32 half = power / 2;
  const f64 first = __longlong_as_double((s64)(half + 1023) << 52);
  return (v.head + v.tail) * first * __longlong_as_double((s64)(power - half + 1023) << 52);
}

// (a + 4) R(a)
DEVICE Two mills(Two t) {
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
  for (int n = 1; n < 27; ++n) p = fused(p, t.head, coefficients[n]);
  Two sum = plus({0.3871374007422145, -2.8503580448579983e-18}, times(t, {p, 0.0}));
  sum = plus({-0.6078966419718921, -2.4866935773227036e-17}, times(t, sum));
  return plus({0.7552851304157515, -2.2175382864040874e-17}, times(t, sum));
}

DEVICE f64 gelu(f64 x) {
  if (!(x < 9.0) || x == 0.0) return x;  // Phi(-9) is below 2^-62; NaN too
  const f64 a = fmin(fabs(x), 40.0);
  const Two below = sum_of(a, 4.0), square = product_of(a, a);
  s32 power;
  const Two decay = exponential({-0.5 * square.head, -0.5 * square.tail}, power);
  const Two tail = over(times(decay, mills(over(sum_of(a, -4.0), below))), below);
  if (x < 0.0) return -scaled_by(times(tail, {a, 0.0}), power);
  const f64 scale = __longlong_as_double((s64)(power + 1023) << 52);
  const Two rest = plus({1.0, 0.0}, {-scale * tail.head, -scale * tail.tail});
  const Two found = times(rest, {x, 0.0});
  return found.head + found.tail;
}
DEVICE f64 silu(f64 x) {
  if (!(x < 45.0) || x == 0.0) return x;  // exp(-45) is below 2^-64; NaN too
  const f64 a = fmin(fabs(x), 800.0);
  s32 power;
  const Two decay = exponential({-a, 0.0}, power);
  const f64 scale = power < -200 ? 0.0 : __longlong_as_double((s64)(power + 1023) << 52);
  const Two below = plus({1.0, 0.0}, {scale * decay.head, scale * decay.tail});
  if (x < 0.0) return -scaled_by(over(times(decay, {a, 0.0}), below), power);
  const Two found = over({x, 0.0}, below);
  return found.head + found.tail;
}
