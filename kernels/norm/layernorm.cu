#include "layernorm.h"

#include "norm.cuh"

namespace kart {  // named, since nvcc puts the path of the source into the symbols of a nameless one

struct Row {
  static constexpr int kVecs = 4;
  static constexpr int kShort = 0;
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

int kart_launch(const layernorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight) &&
                    kart::is_wide(args->bias);
  return kart::normalise<kart::Row>(*args, wide, stream);
}
