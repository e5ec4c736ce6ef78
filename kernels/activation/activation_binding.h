// What the bindings of the gated activations share: their arguments are the same.
#pragma once

#include "activation.h"
#include "kart/ffi.h"

namespace kart {

inline void gate(Call& call) {
  const Rows x = call.rows(0);
  if (x.columns % 2 != 0) {
    fail("ValueError", "%s: the last dimension of x must be even, got shape %s", call.op(),
         shape_text(x.tensor).chars);
  }
  const Rows out = call.rows_like(1, x, x.columns / 2);
  call.expect_apart(out, x, true);
  if (x.empty()) return;
  call.launch(kart_launch, activation_args{x.layout, out.layout, x.count, out.columns, call.device()});
}

}  // namespace kart
