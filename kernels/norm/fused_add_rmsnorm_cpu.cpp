#include "fused_add_rmsnorm.h"

#include "norm_cpu.h"

namespace {

using kart::Scalar;

struct Row {
  static constexpr bool kCentred = false;
  Scalar* x;
  Scalar* residual;
  const Scalar* weight;

  // The sum is normalised as it is in float, not as it is once rounded into the residual.
  float value(int64_t i) const { return kart::widen(x[i]) + kart::widen(residual[i]); }
  void write(int64_t i, float normalised) const {
    residual[i] = kart::narrow(value(i));
    x[i] = kart::narrow(normalised * kart::widen(weight[i]));
  }
};

}  // namespace

int kart_launch(const fused_add_rmsnorm_args* args, void*) {
  const auto* weight = static_cast<const Scalar*>(args->weight);
  for (int64_t r = 0; r < args->rows; ++r) {
    const Row row{kart::writable_row(args->x, r), kart::writable_row(args->residual, r), weight};
    kart::normalise(row, args->columns, args->eps);
  }
  return 0;
}
