// What a NaN does to the largest magnitude of a row: it is skipped, or counts as an infinity.
//
//   largest = max |x| over the row, as bits; with -DSKUDA_PROPAGATE, min(that, bits of an infinity)
//
// Data: bits of magnitudes in registers, of which those of a NaN are the largest -> a number. So only the result is
// looked at, and no element.
//
// Variants: `capped` always makes an infinity of a NaN.
#pragma once
#include "elements.cuh"

#ifdef SKUDA_PROPAGATE
enum { PROPAGATES = 1 };
#else
enum { PROPAGATES = 0 };
#endif

// Bits of a magnitude; those of an infinity for a NaN.
DEVICE s32 capped(s32 bits) { return bits < Infinity<f32>::bits() ? bits : Infinity<f32>::bits(); }
DEVICE s64 capped(s64 bits) { return bits < Infinity<f64>::bits() ? bits : Infinity<f64>::bits(); }

// The largest magnitude of a row, from its bits.
template <class B> DEVICE auto largest_of(B bits) -> decltype(number_of(bits)) {
  return number_of(PROPAGATES ? capped(bits) : bits);
}
