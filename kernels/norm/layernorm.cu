#include "layernorm.h"

#include "norm.cuh"

namespace kart {

struct Row {
  static constexpr bool kCentred = true;
  const Scalar* x;
  const Scalar* weight;
  const Scalar* bias;
  Scalar* out;

  __device__ Row(const layernorm_args& args, unsigned r)
      : x(kart::row(args.x, r)),
        weight(static_cast<const Scalar*>(args.weight)),
        bias(static_cast<const Scalar*>(args.bias)),
        out(kart::row(args.out, r)) {}

  template <int kCount>
  __device__ kart::Vec<kCount> read(int64_t i) const {
    return kart::load<kCount>(x + i);
  }

  template <int kCount>
  __device__ void write(int64_t i, const kart::Vec<kCount>&, kart::Floats<kCount> normalised) const {
    const auto scale = kart::widen(kart::load<kCount>(weight + i));
    const auto shift = kart::widen(kart::load<kCount>(bias + i));
#pragma unroll
    for (int item = 0; item < kCount; ++item) {
      normalised.items[item] = normalised.items[item] * scale.items[item] + shift.items[item];
    }
    kart::store(out + i, normalised);
  }
};

}  // namespace kart

KART_NORM(layernorm)
KART_NORM_WIDE(layernorm, 1, kart::kMostThreads)
KART_NORM_WIDE(layernorm, 2, kart::kMostThreads)
KART_NORM_WIDE(layernorm, 4, kart::kMostThreads)
KART_NORM_WIDE(layernorm, 8, kart::kMostThreads)
