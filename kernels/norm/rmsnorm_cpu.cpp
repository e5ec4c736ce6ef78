#include "rmsnorm.h"

#include "norm_cpu.h"

namespace {

using kart::Scalar;

struct Row {
  static constexpr bool kCentred = false;
  const Scalar* x;
  const Scalar* weight;
  Scalar* out;

  float value(int64_t i) const { return kart::widen(x[i]); }
  void write(int64_t i, float normalised) const { out[i] = kart::narrow(normalised * kart::widen(weight[i])); }
};

}  // namespace

int kart_launch(const rmsnorm_args* args, void*) {
  const auto* weight = static_cast<const Scalar*>(args->weight);
  for (int64_t r = 0; r < args->rows; ++r) {
    kart::normalise(Row{kart::row(args->x, r), weight, kart::writable_row(args->out, r)}, args->columns, args->eps);
  }
  return 0;
}
