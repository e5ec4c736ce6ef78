// The gated activations on a CPU.
#pragma once

#include "activation.h"
#include "kart/scalar.h"

namespace kart {

// e^x to about one unit in the last place, in operations that a compiler vectorises: nearly zero below -87.3, infinite
// above 88.7.
inline float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float bounded = x < -87.3f ? -87.3f : x;
  const float shifted = bounded * 1.44269504f + kRound;
  const float power = shifted - kRound;
  const float rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;  // ln 2 in two parts
  float series = 1.38145e-3f;  // minimax of (e^r - 1 - r) / r² over |r| < ln 2 / 2
  series = series * rest + 8.36875e-3f;
  series = series * rest + 4.166839e-2f;
  series = series * rest + 1.666652e-1f;
  series = series * rest + 4.9999993e-1f;
  const float mantissa = series * (rest * rest) + rest + 1.0f;
  const float value = float_of(bits_of(mantissa) + (bits_of(shifted) << 23));
  return x > 88.7f ? float_of(0x7f800000) : value;
}

template <class Activation>
inline void gate(const activation_args& args, Activation activation) {
  for (int64_t r = 0; r < args.rows; ++r) {
    const Scalar* x = row(args.x, r);
    const Scalar* factor = x + args.columns;
    Scalar* out = writable_row(args.out, r);
#pragma GCC ivdep
    for (int64_t i = 0; i < args.columns; ++i) out[i] = narrow(activation(widen(x[i])) * widen(factor[i]));
  }
}

}  // namespace kart
