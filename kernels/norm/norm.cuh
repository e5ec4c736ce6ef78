// The three norms on a GPU.  A row is read once: it stays in registers between its statistics and its result.  Rows too
// long for that are read again.
//
// Each op names its `Row`, and KART_NORM makes kernels of it; norm_launch.h chooses one.
//
// A `Row` is made of (args, r).  It moves kCount elements from i on together: read<kCount>(i) gives what is held of
// them, a Vec or Floats; write(i, held, normalised) makes the result.  kCentred: whether the mean is taken off.
#pragma once

#include "kart/reduce.cuh"
#include "kart/vec.cuh"
#include "norm.h"

namespace kart {

template <int kCount>
__device__ inline float sum(const Floats<kCount>& values) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) total += values.items[i];
  return total;
}

template <int kCount>
__device__ inline float sum_of_squares(const Floats<kCount>& values, float mean) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) total += (values.items[i] - mean) * (values.items[i] - mean);
  return total;
}

template <int kCount>
__device__ inline Floats<kCount> normalised(Floats<kCount> values, float mean, float scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values.items[i] = (values.items[i] - mean) * scale;
  return values;
}

// `total` / `count` as a division rounds it, which rows of equal elements need; but for the code that a division has for
// numbers outside of 2^-126 to 2^126.
__device__ inline float mean_of(float total, float count) {
  const float rough = __fdividef(1.0f, count);
  const float inverse = fmaf(fmaf(-count, rough, 1.0f), rough, rough);
  const float mean = total * inverse;
  return fmaf(fmaf(-count, mean, total), inverse, mean);
}

// A mean of squares needs no such care, and may be infinite.
template <class Args>
__device__ inline float scale_of(float square, const Args& args) {
  return rsqrtf(__fdividef(square, static_cast<int>(args.columns)) + args.eps);
}

// Each thread holds up to kVecs times kCount elements: those of a short row leave the last ones empty.
template <class Row, int kCount, int kVecs, class Args>
__device__ inline void normalise_held(const Args& args) {
  __shared__ float partial[2][32];
  const unsigned r = blockIdx.x * blockDim.y + threadIdx.y;
  const int columns = r < args.rows ? static_cast<int>(args.columns) : 0;
  const Row row(args, r < args.rows ? r : 0);
  const int first = threadIdx.x * kCount, step = blockDim.x * kCount;
  decltype(row.template read<kCount>(0)) held[kVecs];
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (first + vec * step >= columns) break;
    held[vec] = row.template read<kCount>(first + vec * step);
  }
  float mean = 0.0f;
  if constexpr (Row::kCentred) {
    float total = 0.0f;
#pragma unroll
    for (int vec = 0; vec < kVecs; ++vec) {
      if (first + vec * step >= columns) break;
      total += sum(widen(held[vec]));
    }
    mean = mean_of(sum_over_row(total, partial[0]), static_cast<int>(args.columns));
  }
  float square = 0.0f;
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (first + vec * step >= columns) break;
    square += sum_of_squares(widen(held[vec]), mean);
  }
  const float scale = scale_of(sum_over_row(square, partial[1]), args);
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {  // here a break would take registers, and waves of blocks with them
    const int i = first + vec * step;
    if (i < columns) row.write(i, held[vec], normalised(widen(held[vec]), mean, scale));
  }
}

// One block for each row, of any length.
template <class Row, int kCount, class Args>
__device__ inline void normalise_reread(const Args& args) {
  __shared__ float partial[2][32];
  const Row row(args, blockIdx.x);
  const int64_t first = threadIdx.x * kCount, step = blockDim.x * kCount;
  float mean = 0.0f;
  if constexpr (Row::kCentred) {
    float total = 0.0f;
    for (int64_t i = first; i < args.columns; i += step) total += sum(widen(row.template read<kCount>(i)));
    mean = mean_of(sum_over_row(total, partial[0]), static_cast<int>(args.columns));
  }
  float square = 0.0f;
  for (int64_t i = first; i < args.columns; i += step) {
    square += sum_of_squares(widen(row.template read<kCount>(i)), mean);
  }
  const float scale = scale_of(sum_over_row(square, partial[1]), args);
  for (int64_t i = first; i < args.columns; i += step) {
    const auto held = row.template read<kCount>(i);
    row.write(i, held, normalised(widen(held), mean, scale));
  }
}

}  // namespace kart

#define KART_NORM_HELD(name, suffix, count, vecs, threads)                                               \
  extern "C" __global__ void __launch_bounds__(threads) name##_held_##suffix(const name##_args args) {   \
    kart::normalise_held<kart::Row, count, vecs>(args);                                                  \
  }
#define KART_NORM_REREAD(name, suffix, count)                                                            \
  extern "C" __global__ void __launch_bounds__(1024, 1) name##_reread_##suffix(const name##_args args) { \
    kart::normalise_reread<kart::Row, count>(args);                                                      \
  }

// A kernel of the op `name` for rows that up to so many threads hold in so many wide vectors each.
#define KART_NORM_WIDE(name, vecs, threads) KART_NORM_HELD(name, vecs, kart::kWide, vecs, threads)

// Its other kernels: a thread holds one element, or a row is reread.
#define KART_NORM(name)                                      \
  KART_NORM_HELD(name, narrow, 1, 1, kart::kMostThreads)     \
  KART_NORM_REREAD(name, wide, kart::kWide)                  \
  KART_NORM_REREAD(name, narrow, 1)
