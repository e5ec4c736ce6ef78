#include "activation_launch.h"

static kart::Gate gate = KART_GATE(gelu_tanh_and_mul);

int kart_launch(const activation_args* args, void* stream) { return kart::launch_gate(gate, *args, stream); }
