// The exported function `layernorm(x, weight, bias, out, eps)`.
#include "kart/ffi.h"
#include "layernorm.h"

static void layernorm(kart::Call& call) {
  const kart::Rows x = call.rows(0);
  const kart::Rows weight = call.vector(1, x.columns);
  const kart::Rows bias = call.vector(2, x.columns);
  const kart::Rows out = call.rows_like(3, x);
  const float eps = call.epsilon(4);
  call.expect_apart(out, x, true);
  call.expect_apart(out, weight);
  call.expect_apart(out, bias);
  if (x.empty()) return;
  const layernorm_args args{x.layout, out.layout, weight.layout.data, bias.layout.data,
                            x.count,  x.columns,  eps,                call.device()};
  call.launch(kart_launch, args);
}

KART_EXPORT(layernorm, "x", "weight", "bias", "out", "eps")
