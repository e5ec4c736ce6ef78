#include "fused_add_rmsnorm.h"

#include "norm.cuh"

namespace kart {

struct Row {
  static constexpr bool kCentred = false;
  Scalar* x;
  Scalar* residual;
  const Scalar* weight;

  __device__ Row(const fused_add_rmsnorm_args& args, unsigned r)
      : x(kart::row(args.x, r)),
        residual(kart::row(args.residual, r)),
        weight(static_cast<const Scalar*>(args.weight)) {}

  // The sum is held as it is in float, not as it is once rounded into the residual.
  template <int kCount>
  __device__ kart::Floats<kCount> read(int64_t i) const {
    auto total = kart::widen(kart::load<kCount>(residual + i));
    const auto added = kart::widen(kart::load<kCount>(x + i));
#pragma unroll
    for (int item = 0; item < kCount; ++item) total.items[item] += added.items[item];
    return total;
  }

  template <int kCount>
  __device__ void write(int64_t i, const kart::Floats<kCount>& total, kart::Floats<kCount> normalised) const {
    const auto scale = kart::widen(kart::load<kCount>(weight + i));
#pragma unroll
    for (int item = 0; item < kCount; ++item) normalised.items[item] *= scale.items[item];
    kart::store(residual + i, total);
    kart::store(x + i, normalised);
  }
};

}  // namespace kart

KART_NORM(fused_add_rmsnorm)
KART_NORM_WIDE(fused_add_rmsnorm, 1, kart::kMostThreads)
KART_NORM_WIDE(fused_add_rmsnorm, 2, kart::kMostThreads)
KART_NORM_WIDE(fused_add_rmsnorm, 4, kart::kMostThreads)
