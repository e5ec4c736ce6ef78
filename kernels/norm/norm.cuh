// The three norms on a GPU.  A row is read once: it stays in registers between its statistics and its result.  Rows too
// long for that are read again.
//
// A `Row` is made of (args, r); it has read(i, values), write(i, values, normalised), where kCount elements from i on
// are moved together, and kCentred: whether the mean is taken off.
#pragma once

#include "kart/launch.cuh"
#include "kart/reduce.cuh"
#include "kart/vec.cuh"

namespace kart {

template <int kCount>
__device__ inline float sum(const float (&values)[kCount]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) total += values[i];
  return total;
}

template <int kCount>
__device__ inline float sum_of_squares(const float (&values)[kCount], float mean) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) total += (values[i] - mean) * (values[i] - mean);
  return total;
}

template <class Row, int kCount>
__device__ inline void write(const Row& row, int i, const float (&values)[kCount], float mean, float scale) {
  float normalised[kCount];
#pragma unroll
  for (int item = 0; item < kCount; ++item) normalised[item] = (values[item] - mean) * scale;
  row.write(i, values, normalised);
}

// Each thread holds kVecs vectors of kCount elements.
template <class Row, class Args, int kCount, int kVecs>
__global__ void __launch_bounds__(1024) normalise_held(const Args args) {
  __shared__ float partial[2][32];
  const unsigned r = blockIdx.x * blockDim.y + threadIdx.y;
  const int columns = r < args.rows ? static_cast<int>(args.columns) : 0;
  const Row row(args, r < args.rows ? r : 0);
  const int first = threadIdx.x * kCount, step = blockDim.x * kCount;
  float values[kVecs][kCount];
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (first + vec * step < columns) row.read(first + vec * step, values[vec]);
  }
  float mean = 0.0f;
  if constexpr (Row::kCentred) {
    float total = 0.0f;
#pragma unroll
    for (int vec = 0; vec < kVecs; ++vec) total += first + vec * step < columns ? sum(values[vec]) : 0.0f;
    mean = sum_over_row(total, partial[0]) / args.columns;
  }
  float square = 0.0f;
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    square += first + vec * step < columns ? sum_of_squares(values[vec], mean) : 0.0f;
  }
  const float scale = rsqrtf(sum_over_row(square, partial[1]) / args.columns + args.eps);
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (first + vec * step < columns) write(row, first + vec * step, values[vec], mean, scale);
  }
}

// One block for each row, of any length.
template <class Row, class Args, int kCount>
__global__ void __launch_bounds__(1024) normalise_reread(const Args args) {
  __shared__ float partial[2][32];
  const Row row(args, blockIdx.x);
  const int64_t first = threadIdx.x * kCount, step = blockDim.x * kCount;
  float values[kCount];
  float mean = 0.0f;
  if constexpr (Row::kCentred) {
    float total = 0.0f;
    for (int64_t i = first; i < args.columns; i += step) {
      row.read(i, values);
      total += sum(values);
    }
    mean = sum_over_row(total, partial[0]) / args.columns;
  }
  float square = 0.0f;
  for (int64_t i = first; i < args.columns; i += step) {
    row.read(i, values);
    square += sum_of_squares(values, mean);
  }
  const float scale = rsqrtf(sum_over_row(square, partial[1]) / args.columns + args.eps);
  for (int64_t i = first; i < args.columns; i += step) {
    row.read(i, values);
    write(row, i, values, mean, scale);
  }
}

// `wide` says whether every pointer and stride allows the widest loads.
template <class Row, class Args>
int normalise(const Args& args, bool wide, void* stream) {
  constexpr int kMost = 1024;  // threads in a block
  if (!wide || args.columns % kWide != 0) {
    const dim3 block = block_for(args.columns < kMost ? args.columns : kMost);
    if (args.columns > kMost) return launch(normalise_reread<Row, Args, 1>, args.rows, block, args, stream);
    return launch(normalise_held<Row, Args, 1, 1>, (args.rows + block.y - 1) / block.y, block, args, stream);
  }
  const int64_t vecs = args.columns / kWide;
  if (vecs > 4 * kMost) return launch(normalise_reread<Row, Args, kWide>, args.rows, dim3(kMost), args, stream);
  const int held = vecs <= 256 ? 1 : vecs <= 1024 ? 2 : 4;
  const dim3 block = block_for((vecs + held - 1) / held);
  const int64_t blocks = (args.rows + block.y - 1) / block.y;
  if (held == 1) return launch(normalise_held<Row, Args, kWide, 1>, blocks, block, args, stream);
  if (held == 2) return launch(normalise_held<Row, Args, kWide, 2>, blocks, block, args, stream);
  return launch(normalise_held<Row, Args, kWide, 4>, blocks, block, args, stream);
}

}  // namespace kart
