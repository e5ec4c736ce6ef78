// The exported function `rmsnorm(x, weight, out, eps)`.
#include "kart/ffi.h"
#include "rmsnorm.h"

static void rmsnorm(kart::Call& call) {
  const kart::Rows x = call.rows(0);
  const kart::Rows weight = call.vector(1, x.columns);
  const kart::Rows out = call.rows_like(2, x);
  const float eps = call.epsilon(3);
  call.expect_apart(out, x, true);
  call.expect_apart(out, weight);
  if (x.empty()) return;
  const rmsnorm_args args{x.layout, out.layout, weight.layout.data, x.count, x.columns, eps, call.device()};
  call.launch(kart_launch, args);
}

KART_EXPORT(rmsnorm, "x", "weight", "out", "eps")
