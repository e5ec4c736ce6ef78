// The element type of a CPU launcher: KART_DTYPE chooses it, arithmetic is done in float.
//
// The conversions are selects on integers, without branches or instruction sets, so that any compiler vectorises them.
// They round to nearest, ties to even, and keep infinities, NaN and subnormals.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kart/launch.h"

#ifndef KART_DTYPE
#error "KART_DTYPE must say the element type"
#endif

namespace kart {

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

#if KART_DTYPE == KART_FLOAT32
using Scalar = float;

inline float widen(Scalar value) { return value; }
inline Scalar narrow(float value) { return value; }

#elif KART_DTYPE == KART_BFLOAT16
using Scalar = uint16_t;

inline float widen(Scalar value) { return float_of(uint32_t{value} << 16); }

inline Scalar narrow(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const uint32_t quiet = bits | 0x400000;
  return static_cast<Scalar>(((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded) >> 16);
}

#elif KART_DTYPE == KART_FLOAT16
using Scalar = uint16_t;

inline float widen(Scalar value) {
  const int32_t low = value & 0x7fff;
  const uint32_t normal = (static_cast<uint32_t>(low) << 13) + (112u << 23);
  const uint32_t special = normal + (112u << 23);  // infinity and NaN
  const uint32_t subnormal = bits_of(static_cast<float>(low) * 0x1p-24f);
  const uint32_t magnitude = low < 0x400 ? subnormal : low < 0x7c00 ? normal : special;
  return float_of(magnitude | (static_cast<uint32_t>(value & 0x8000) << 16));
}

inline Scalar narrow(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t low = bits & 0x7fffffff;
  const uint32_t normal = (low - (112u << 23) + 0xfff + ((low >> 13) & 1)) >> 13;
  const uint32_t subnormal = bits_of(float_of(low) + 0.5f) - bits_of(0.5f);  // 0.5f has steps of 2^-24, as they have
  const uint32_t finite = low < 0x38800000 ? subnormal : normal;
  const uint32_t special = low > 0x7f800000 ? 0x7e00 : 0x7c00;
  return static_cast<Scalar>((low >= 0x477ff000 ? special : finite) | ((bits >> 16) & 0x8000));
}

#else
#error "KART_DTYPE must be one of the types in kart/launch.h"
#endif

inline const Scalar* row(const kart_rows& rows, int64_t r) {
  return static_cast<const Scalar*>(rows.data) + (r / rows.inner) * rows.outer_stride +
         (r % rows.inner) * rows.inner_stride;
}

inline Scalar* writable_row(const kart_rows& rows, int64_t r) { return const_cast<Scalar*>(row(rows, r)); }

}  // namespace kart

const int kart_device = KART_CPU;
const int kart_dtype = KART_DTYPE;
const char* kart_error(int) { return ""; }  // no CPU launch fails
