// The exported function `fused_add_rmsnorm(x, residual, weight, eps)`.
#include "fused_add_rmsnorm.h"
#include "kart/ffi.h"

static void fused_add_rmsnorm(kart::Call& call) {
  const kart::Rows x = call.rows(0);
  const kart::Rows residual = call.rows_like(1, x);
  const kart::Rows weight = call.vector(2, x.columns);
  const float eps = call.epsilon(3);
  call.expect_apart(x, residual);
  call.expect_apart(residual, x);
  call.expect_apart(x, weight);
  call.expect_apart(residual, weight);
  if (x.empty()) return;
  const fused_add_rmsnorm_args args{x.layout, residual.layout, weight.layout.data, x.count,
                                    x.columns, eps,            call.device()};
  call.launch(kart_launch, args);
}

KART_EXPORT(fused_add_rmsnorm, "x", "residual", "weight", "eps")
