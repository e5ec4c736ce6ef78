#include "rmsnorm.h"

#include "norm.cuh"

namespace kart {

struct Row {
  static constexpr bool kCentred = false;
  const Scalar* x;
  const Scalar* weight;
  Scalar* out;

  __device__ Row(const rmsnorm_args& args, unsigned r)
      : x(kart::row(args.x, r)), weight(static_cast<const Scalar*>(args.weight)), out(kart::row(args.out, r)) {}

  template <int kCount>
  __device__ kart::Vec<kCount> read(int64_t i) const {
    return kart::load<kCount>(x + i);
  }

  template <int kCount>
  __device__ void write(int64_t i, const kart::Vec<kCount>&, kart::Floats<kCount> normalised) const {
    const auto scale = kart::widen(kart::load<kCount>(weight + i));
#pragma unroll
    for (int item = 0; item < kCount; ++item) normalised.items[item] *= scale.items[item];
    kart::store(out + i, normalised);
  }
};

}  // namespace kart

KART_NORM(rmsnorm)
KART_NORM_WIDE(rmsnorm, 1, kart::kMostThreads)
KART_NORM_WIDE(rmsnorm, 2, kart::kMostThreads)
KART_NORM_WIDE(rmsnorm, 4, 2 * kart::kMostThreads)
