// The element type of device code: KART_DTYPE chooses it, arithmetic is done in float.
//
// The conversions are written as instructions: the toolkit's headers for them take half of a launcher's compile time.
#pragma once

#include "kart/launch.h"

#ifndef KART_DTYPE
#error "KART_DTYPE must say the element type"
#endif

namespace kart {

// A word of 32 bits holds one float or two 16-bit elements, the first of them in its low half.
#if KART_DTYPE == KART_FLOAT32
using Scalar = float;

__device__ inline void widen(unsigned word, float (&values)[1]) { values[0] = __uint_as_float(word); }
__device__ inline unsigned narrow(const float (&values)[1]) { return __float_as_uint(values[0]); }

#elif KART_DTYPE == KART_BFLOAT16
using Scalar = unsigned short;

__device__ inline void widen(unsigned word, float (&values)[2]) {
  values[0] = __uint_as_float(word << 16);
  values[1] = __uint_as_float(word & 0xffff0000);
}

__device__ inline unsigned narrow(const float (&values)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
  return word;
#else
  unsigned halves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned bits = __float_as_uint(values[i]);
    halves[i] = (isnan(values[i]) ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  return halves[0] | (halves[1] << 16);
#endif
}

#elif KART_DTYPE == KART_FLOAT16
using Scalar = unsigned short;

__device__ inline void widen(unsigned word, float (&values)[2]) {
  asm("{ .reg .f16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high; }"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(word));
}

__device__ inline unsigned narrow(const float (&values)[2]) {
  unsigned word;
  asm("{ .reg .f16 low, high;\n"
      "cvt.rn.f16.f32 low, %1;\n"
      "cvt.rn.f16.f32 high, %2;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(word)
      : "f"(values[0]), "f"(values[1]));
  return word;
}

#else
#error "KART_DTYPE must be one of the types in kart/launch.h"
#endif

}  // namespace kart
