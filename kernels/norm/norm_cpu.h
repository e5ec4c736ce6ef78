// The three norms on a CPU: statistics over a row in float, then one more pass that writes it.
#pragma once

#include <math.h>

#include "kart/scalar.h"

namespace kart {

// Sums in independent lanes, which a compiler may keep in vector registers without reordering what was written.
template <class Term>
inline float sum(int64_t count, Term term) {
  constexpr int kLanes = 32;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += term(i);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// `Row` has value(i), write(i, normalised) and kCentred: whether the mean is taken off.
template <class Row>
inline void normalise(const Row& row, int64_t columns, float eps) {
  const float mean = Row::kCentred ? sum(columns, [&](int64_t i) { return row.value(i); }) / columns : 0.0f;
  const float square = sum(columns, [&](int64_t i) {
    const float centred = row.value(i) - mean;
    return centred * centred;
  });
  const float scale = 1.0f / sqrtf(square / columns + eps);
#pragma GCC ivdep
  for (int64_t i = 0; i < columns; ++i) row.write(i, (row.value(i) - mean) * scale);
}

}  // namespace kart
