#include "layernorm.h"

#include "norm.cuh"

namespace {

using kart::Scalar;

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
  __device__ void read(int64_t i, float (&values)[kCount]) const {
    kart::load(x + i, values);
  }

  template <int kCount>
  __device__ void write(int64_t i, const float (&)[kCount], float (&normalised)[kCount]) const {
    float scale[kCount], shift[kCount];
    kart::load(weight + i, scale);
    kart::load(bias + i, shift);
#pragma unroll
    for (int item = 0; item < kCount; ++item) normalised[item] = normalised[item] * scale[item] + shift[item];
    kart::store(out + i, normalised);
  }
};

}  // namespace

int kart_launch(const layernorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight) &&
                    kart::is_wide(args->bias);
  return kart::normalise<Row>(*args, wide, stream);
}
