// The gated activations on a GPU.
#pragma once

#include "activation.h"
#include "kart/launch.cuh"
#include "kart/vec.cuh"

namespace kart {

// e^x; the fast form is off by a few units in the last place, which 16-bit results do not show.
__device__ inline float exponential(float x) { return sizeof(Scalar) == 2 ? __expf(x) : expf(x); }

__device__ inline float quotient(float x, float y) { return sizeof(Scalar) == 2 ? __fdividef(x, y) : x / y; }

// A block takes blockDim.y rows, and of these the columns of one of several equal tiles: blockDim.x times kCount.
template <class Activation, int kCount>
__global__ void __launch_bounds__(256) gate(const activation_args args, unsigned tiles) {
  const unsigned r = blockIdx.x / tiles * blockDim.y + threadIdx.y;
  const int64_t i = (int64_t{blockIdx.x % tiles} * blockDim.x + threadIdx.x) * kCount;
  if (r >= args.rows || i >= args.columns) return;
  const Scalar* x = row(args.x, r) + i;
  auto values = widen(load<kCount>(x));
  const auto factors = widen(load<kCount>(x + args.columns));
#pragma unroll
  for (int item = 0; item < kCount; ++item) {
    values.items[item] = Activation::of(values.items[item]) * factors.items[item];
  }
  store(row(args.out, r) + i, values);
}

template <class Activation, int kCount>
int launch_gate(const activation_args& args, void* stream) {
  constexpr int kBlock = 256;
  const int64_t vecs = args.columns / kCount, tiles = (vecs + kBlock - 1) / kBlock;
  const auto threads = static_cast<unsigned>((vecs + tiles - 1) / tiles);
  const dim3 block(threads, kBlock / threads);
  const int64_t blocks = (args.rows + block.y - 1) / block.y * tiles;
  return launch(gate<Activation, kCount>, blocks, block, args.device, stream, args, static_cast<unsigned>(tiles));
}

template <class Activation>
int launch_gate(const activation_args& args, void* stream) {
  const bool wide = is_wide(args.x) && is_wide(args.out) && args.columns % kWide == 0;
  return wide ? launch_gate<Activation, kWide>(args, stream) : launch_gate<Activation, 1>(args, stream);
}

}  // namespace kart
