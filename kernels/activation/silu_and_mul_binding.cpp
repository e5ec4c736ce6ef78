// The exported function `silu_and_mul(x, out)`.
#include "activation_binding.h"

static void silu_and_mul(kart::Call& call) { kart::gate(call); }

KART_EXPORT(silu_and_mul, "x", "out")
