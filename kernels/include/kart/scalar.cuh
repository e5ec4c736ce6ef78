// The element type of a CUDA launcher: KART_DTYPE chooses it, arithmetic is done in float.
//
// The conversions are single instructions, so that no toolkit header is needed; they take half a launcher's compile time.
#pragma once

#include "kart/launch.h"

#ifndef KART_DTYPE
#error "KART_DTYPE must say the element type"
#endif

namespace kart {

#if KART_DTYPE == KART_FLOAT32
using Scalar = float;

__device__ inline float widen(Scalar value) { return value; }
__device__ inline Scalar narrow(float value) { return value; }

#elif KART_DTYPE == KART_BFLOAT16
using Scalar = unsigned short;

__device__ inline float widen(Scalar value) { return __uint_as_float(static_cast<unsigned>(value) << 16); }

__device__ inline Scalar narrow(float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  Scalar bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<Scalar>((isnan(value) ? bits | 0x400000 : rounded) >> 16);
#endif
}

#elif KART_DTYPE == KART_FLOAT16
using Scalar = unsigned short;

__device__ inline float widen(Scalar value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}

__device__ inline Scalar narrow(float value) {
  Scalar bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#else
#error "KART_DTYPE must be one of the types in kart/launch.h"
#endif

}  // namespace kart
