#include "rmsnorm.h"

#include "norm.cuh"

namespace {

using kart::Scalar;

struct Row {
  static constexpr bool kCentred = false;
  const Scalar* x;
  const Scalar* weight;
  Scalar* out;

  __device__ Row(const rmsnorm_args& args, unsigned r)
      : x(kart::row(args.x, r)), weight(static_cast<const Scalar*>(args.weight)), out(kart::row(args.out, r)) {}

  template <int kCount>
  __device__ void read(int64_t i, float (&values)[kCount]) const {
    kart::load(x + i, values);
  }

  template <int kCount>
  __device__ void write(int64_t i, const float (&)[kCount], float (&normalised)[kCount]) const {
    float scale[kCount];
    kart::load(weight + i, scale);
#pragma unroll
    for (int item = 0; item < kCount; ++item) normalised[item] *= scale[item];
    kart::store(out + i, normalised);
  }
};

}  // namespace

int kart_launch(const rmsnorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight);
  return kart::normalise<Row>(*args, wide, stream);
}
