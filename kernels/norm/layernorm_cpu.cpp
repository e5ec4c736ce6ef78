#include "layernorm.h"

#include "norm_cpu.h"

namespace {

using kart::Scalar;

struct Row {
  static constexpr bool kCentred = true;
  const Scalar* x;
  const Scalar* weight;
  const Scalar* bias;
  Scalar* out;

  float value(int64_t i) const { return kart::widen(x[i]); }
  void write(int64_t i, float normalised) const {
    out[i] = kart::narrow(normalised * kart::widen(weight[i]) + kart::widen(bias[i]));
  }
};

}  // namespace

int kart_launch(const layernorm_args* args, void*) {
  const auto* weight = static_cast<const Scalar*>(args->weight);
  const auto* bias = static_cast<const Scalar*>(args->bias);
  for (int64_t r = 0; r < args->rows; ++r) {
    const Row row{kart::row(args->x, r), weight, bias, kart::writable_row(args->out, r)};
    kart::normalise(row, args->columns, args->eps);
  }
  return 0;
}
