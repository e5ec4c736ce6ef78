// The gated activations on a GPU: each thread keeps several loads in flight.
#pragma once

#include "activation.h"
#include "kart/launch.cuh"
#include "kart/vec.cuh"

namespace kart {

constexpr int kUnroll = 2;  // vectors of each half that a thread holds

// e^x; the fast form is off by a few units in the last place, which 16-bit results do not show.
__device__ inline float exponential(float x) { return sizeof(Scalar) == 2 ? __expf(x) : expf(x); }

__device__ inline float quotient(float x, float y) { return sizeof(Scalar) == 2 ? __fdividef(x, y) : x / y; }

// A block takes blockDim.y rows, and of these the columns of one of `tiles` equal parts.
template <class Activation, int kCount>
__global__ void __launch_bounds__(256) gate(const activation_args args) {
  const unsigned tile_columns = blockDim.x * kUnroll * kCount;
  const unsigned tiles = (static_cast<unsigned>(args.columns) + tile_columns - 1) / tile_columns;
  const unsigned r = blockIdx.x / tiles * blockDim.y + threadIdx.y;
  if (r >= args.rows) return;
  const Scalar* x = row(args.x, r);
  Scalar* out = row(args.out, r);
  const int64_t first = int64_t{blockIdx.x % tiles} * tile_columns + threadIdx.x * kCount;
  float values[kUnroll][kCount], factors[kUnroll][kCount];
#pragma unroll
  for (int vec = 0; vec < kUnroll; ++vec) {
    const int64_t i = first + vec * blockDim.x * kCount;
    if (i >= args.columns) continue;
    load(x + i, values[vec]);
    load(x + args.columns + i, factors[vec]);
  }
#pragma unroll
  for (int vec = 0; vec < kUnroll; ++vec) {
    const int64_t i = first + vec * blockDim.x * kCount;
    if (i >= args.columns) continue;
#pragma unroll
    for (int item = 0; item < kCount; ++item) {
      values[vec][item] = Activation::of(values[vec][item]) * factors[vec][item];
    }
    store(out + i, values[vec]);
  }
}

template <class Activation, int kCount>
int launch_gate(const activation_args& args, void* stream) {
  const int64_t steps = (args.columns / kCount + kUnroll - 1) / kUnroll;  // threads that a row needs
  const int64_t tiles = (steps + 255) / 256;
  const dim3 block = block_for((steps + tiles - 1) / tiles);
  const int64_t tile_columns = int64_t{block.x} * kUnroll * kCount;
  const int64_t used = (args.columns + tile_columns - 1) / tile_columns;
  return launch(gate<Activation, kCount>, (args.rows + block.y - 1) / block.y * used, block, args, stream);
}

template <class Activation>
int launch_gate(const activation_args& args, void* stream) {
  const bool wide = is_wide(args.x) && is_wide(args.out) && args.columns % kWide == 0;
  return wide ? launch_gate<Activation, kWide>(args, stream) : launch_gate<Activation, 1>(args, stream);
}

}  // namespace kart
