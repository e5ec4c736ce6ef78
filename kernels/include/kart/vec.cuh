// Several neighbouring elements moved by one instruction.
#pragma once

#include "kart/scalar.cuh"

namespace kart {

constexpr int kWide = 16 / sizeof(Scalar);    // elements of the widest load
constexpr int kPerWord = 4 / sizeof(Scalar);  // elements of a word

template <int kBytes>
struct WordOf {
  using Type = unsigned;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};

// As they lie in memory; kept in this form, 16-bit elements take half the registers.
template <int kCount>
struct alignas(kCount * sizeof(Scalar)) Vec {
  static constexpr int kWords = (kCount + kPerWord - 1) / kPerWord;
  typename WordOf<kCount * sizeof(Scalar)>::Type words[kWords];
};

template <int kCount>
struct Floats {
  float items[kCount];
};

template <int kCount>
__device__ inline Vec<kCount> load(const Scalar* from) {
  return *reinterpret_cast<const Vec<kCount>*>(from);
}

template <int kCount>
__device__ inline Floats<kCount> widen(const Vec<kCount>& vec) {
  Floats<kCount> floats;
#pragma unroll
  for (int word = 0; word < vec.kWords; ++word) {
    float values[kPerWord];
    widen(vec.words[word], values);
#pragma unroll
    for (int i = 0; i < kPerWord && i < kCount; ++i) floats.items[word * kPerWord + i] = values[i];
  }
  return floats;
}

template <int kCount>
__device__ inline Floats<kCount> widen(const Floats<kCount>& floats) {
  return floats;
}

template <int kCount>
__device__ inline void store(Scalar* to, const Floats<kCount>& floats) {
  Vec<kCount> vec;
#pragma unroll
  for (int word = 0; word < vec.kWords; ++word) {
    float values[kPerWord] = {};
#pragma unroll
    for (int i = 0; i < kPerWord && i < kCount; ++i) values[i] = floats.items[word * kPerWord + i];
    vec.words[word] = narrow(values);
  }
  *reinterpret_cast<Vec<kCount>*>(to) = vec;
}

__device__ inline Scalar* row(const kart_rows& rows, unsigned r) {
  const unsigned inner = static_cast<unsigned>(rows.inner);  // rows are counted up to INT32_MAX
  return static_cast<Scalar*>(rows.data) + (r / inner) * rows.outer_stride + (r % inner) * rows.inner_stride;
}

}  // namespace kart
