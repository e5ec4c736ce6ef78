// Several neighbouring elements moved by one instruction.
#pragma once

#include "kart/scalar.cuh"

namespace kart {

constexpr int kWide = 16 / sizeof(Scalar);  // elements of the widest load

template <int kCount>
struct alignas(kCount * sizeof(Scalar)) Vec {
  Scalar items[kCount];
};

template <int kCount>
__device__ inline void load(const Scalar* from, float (&values)[kCount]) {
  const Vec<kCount> vec = *reinterpret_cast<const Vec<kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = widen(vec.items[i]);
}

template <int kCount>
__device__ inline void store(Scalar* to, const float (&values)[kCount]) {
  Vec<kCount> vec;
#pragma unroll
  for (int i = 0; i < kCount; ++i) vec.items[i] = narrow(values[i]);
  *reinterpret_cast<Vec<kCount>*>(to) = vec;
}

inline bool is_wide(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether every row may be moved by the widest loads.
inline bool is_wide(const kart_rows& rows) {
  return is_wide(rows.data) && rows.inner_stride % kWide == 0 && rows.outer_stride % kWide == 0;
}

__device__ inline Scalar* row(const kart_rows& rows, unsigned r) {
  const unsigned inner = static_cast<unsigned>(rows.inner);  // rows are counted up to INT32_MAX
  return static_cast<Scalar*>(rows.data) + (r / inner) * rows.outer_stride + (r % inner) * rows.inner_stride;
}

}  // namespace kart
