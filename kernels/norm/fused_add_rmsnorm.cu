#include "fused_add_rmsnorm.h"

#include "norm.cuh"

namespace {

using kart::Scalar;

struct Row {
  static constexpr bool kCentred = false;
  Scalar* x;
  Scalar* residual;
  const Scalar* weight;

  __device__ Row(const fused_add_rmsnorm_args& args, unsigned r)
      : x(kart::row(args.x, r)),
        residual(kart::row(args.residual, r)),
        weight(static_cast<const Scalar*>(args.weight)) {}

  // The sum is normalised as it is in float, not as it is once rounded into the residual.
  template <int kCount>
  __device__ void read(int64_t i, float (&values)[kCount]) const {
    float added[kCount];
    kart::load(residual + i, values);
    kart::load(x + i, added);
#pragma unroll
    for (int item = 0; item < kCount; ++item) values[item] += added[item];
  }

  template <int kCount>
  __device__ void write(int64_t i, const float (&values)[kCount], float (&normalised)[kCount]) const {
    float scale[kCount];
    kart::load(weight + i, scale);
#pragma unroll
    for (int item = 0; item < kCount; ++item) normalised[item] *= scale[item];
    kart::store(residual + i, values);
    kart::store(x + i, normalised);
  }
};

}  // namespace

int kart_launch(const fused_add_rmsnorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->residual) && kart::is_wide(args->weight);
  return kart::normalise<Row>(*args, wide, stream);
}
