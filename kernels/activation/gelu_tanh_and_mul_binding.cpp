// The exported function `gelu_tanh_and_mul(x, out)`.
#include "activation_binding.h"

static void gelu_tanh_and_mul(kart::Call& call) { kart::gate(call); }

KART_EXPORT(gelu_tanh_and_mul, "x", "out")
