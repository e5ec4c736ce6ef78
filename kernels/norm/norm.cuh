// The three norms on a GPU.  A row is read once: it stays in registers between its statistics and its result.  Rows too
// long for that are read again.
//
// A `Row` is made of (args, r).  It moves kCount elements from i on together: read<kCount>(i) gives what is held of
// them, a Vec or Floats; write(i, held, normalised) makes the result.  kCentred: whether the mean is taken off.  kVecs:
// how many vectors a thread should hold, but one for rows of fewer than kShort vectors.
//
// Few registers and small blocks were best on an H200, since then many rows wait for their sums independently: 4
// vectors as they lie in memory, or 2 as floats.  Where there are too few rows for that, the most threads a row were.
#pragma once

#include "kart/launch.cuh"
#include "kart/reduce.cuh"
#include "kart/vec.cuh"

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

constexpr int kMostThreads = 512;  // that share a row which is held
constexpr int kFewRows = 512;      // do not fill a GPU

// Each thread holds kVecs times kCount elements.
template <class Row, class Args, int kCount, int kVecs>
__global__ void __launch_bounds__(kMostThreads) normalise_held(const Args args) {
  __shared__ float partial[2][32];
  const unsigned r = blockIdx.x * blockDim.y + threadIdx.y;
  const int columns = r < args.rows ? static_cast<int>(args.columns) : 0;
  const Row row(args, r < args.rows ? r : 0);
  const int first = threadIdx.x * kCount, step = blockDim.x * kCount;
  decltype(row.template read<kCount>(0)) held[kVecs];
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (first + vec * step < columns) held[vec] = row.template read<kCount>(first + vec * step);
  }
  float mean = 0.0f;
  if constexpr (Row::kCentred) {
    float total = 0.0f;
#pragma unroll
    for (int vec = 0; vec < kVecs; ++vec) total += first + vec * step < columns ? sum(widen(held[vec])) : 0.0f;
    mean = sum_over_row(total, partial[0]) / args.columns;
  }
  float square = 0.0f;
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    square += first + vec * step < columns ? sum_of_squares(widen(held[vec]), mean) : 0.0f;
  }
  const float scale = rsqrtf(sum_over_row(square, partial[1]) / args.columns + args.eps);
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    const int i = first + vec * step;
    if (i < columns) row.write(i, held[vec], normalised(widen(held[vec]), mean, scale));
  }
}

// One block for each row, of any length.
template <class Row, class Args, int kCount>
__global__ void __launch_bounds__(1024, 1) normalise_reread(const Args args) {
  __shared__ float partial[2][32];
  const Row row(args, blockIdx.x);
  const int64_t first = threadIdx.x * kCount, step = blockDim.x * kCount;
  float mean = 0.0f;
  if constexpr (Row::kCentred) {
    float total = 0.0f;
    for (int64_t i = first; i < args.columns; i += step) total += sum(widen(row.template read<kCount>(i)));
    mean = sum_over_row(total, partial[0]) / args.columns;
  }
  float square = 0.0f;
  for (int64_t i = first; i < args.columns; i += step) {
    square += sum_of_squares(widen(row.template read<kCount>(i)), mean);
  }
  const float scale = rsqrtf(sum_over_row(square, partial[1]) / args.columns + args.eps);
  for (int64_t i = first; i < args.columns; i += step) {
    const auto held = row.template read<kCount>(i);
    row.write(i, held, normalised(widen(held), mean, scale));
  }
}

// Threads that share a row, and rows that share a block, as sum_over_row wants them.
inline dim3 block_for(int64_t threads_per_row) {
  constexpr int kBlock = 256;
  if (threads_per_row > 32) return dim3(static_cast<unsigned>((threads_per_row + 31) / 32 * 32));
  unsigned x = 1;
  while (x < threads_per_row) x *= 2;
  return dim3(x, kBlock / x);
}

template <class Row, int kCount, int kVecs, class Args>
int launch_held(const Args& args, void* stream) {
  const dim3 block = block_for((args.columns / kCount + kVecs - 1) / kVecs);
  const int64_t blocks = (args.rows + block.y - 1) / block.y;
  return launch(normalise_held<Row, Args, kCount, kVecs>, blocks, block, args.device, stream, args);
}

template <class Row, int kCount, class Args>
int launch_reread(const Args& args, void* stream) {
  const dim3 block = block_for(args.columns / kCount < 1024 ? args.columns / kCount : 1024);
  return launch(normalise_reread<Row, Args, kCount>, args.rows, block, args.device, stream, args);
}

// At least `least` vectors a thread, more if the threads do not suffice.
template <class Row, int kVecs, class Args>
int launch_wide(const Args& args, int least, void* stream) {
  if (kVecs >= least && args.columns / kWide <= kVecs * kMostThreads) {
    return launch_held<Row, kWide, kVecs>(args, stream);
  }
  if constexpr (kVecs < 2 * Row::kVecs) {
    return launch_wide<Row, 2 * kVecs>(args, least, stream);
  } else {
    return launch_reread<Row, kWide>(args, stream);
  }
}

// `wide` says whether every pointer and stride allows the widest loads.
template <class Row, class Args>
int normalise(const Args& args, bool wide, void* stream) {
  if (wide && args.columns % kWide == 0) {
    const bool one = args.rows <= kFewRows || args.columns / kWide < Row::kShort;
    return launch_wide<Row, 1>(args, one ? 1 : Row::kVecs, stream);
  }
  if (args.columns <= kMostThreads) return launch_held<Row, 1, 1>(args, stream);
  return launch_reread<Row, 1>(args, stream);
}

}  // namespace kart
