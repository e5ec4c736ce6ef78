// The gated activations on a GPU; activation_launch.h chooses one of an op's two kernels.
#pragma once

#include "activation.h"
#include "kart/vec.cuh"

namespace kart {

// e^x; the fast form is off by a few units in the last place, which 16-bit results do not show.
__device__ inline float exponential(float x) { return sizeof(Scalar) == 2 ? __expf(x) : expf(x); }

__device__ inline float quotient(float x, float y) { return sizeof(Scalar) == 2 ? __fdividef(x, y) : x / y; }

// A block takes blockDim.y rows, and of these the columns of one of several equal tiles: blockDim.x times kCount.
template <class Activation, int kCount>
__device__ inline void gate(const activation_args& args, unsigned tiles) {
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

}  // namespace kart

#define KART_GATE_OF(name, suffix, activation, count)                                                          \
  extern "C" __global__ void __launch_bounds__(kart::kGateBlock)                                               \
      name##_##suffix(const activation_args args, unsigned tiles) {                                            \
    kart::gate<activation, count>(args, tiles);                                                                \
  }

// The kernels of the op `name`.
#define KART_GATE(name, activation)                 \
  KART_GATE_OF(name, wide, activation, kart::kWide) \
  KART_GATE_OF(name, narrow, activation, 1)
