#include "activation_launch.h"

static kart::Gate gate{"gelu_tanh_and_mul_wide", "gelu_tanh_and_mul_narrow"};

int kart_launch(const activation_args* args, void* stream) { return kart::launch_gate(gate, *args, stream); }
