#include "activation.cuh"

namespace kart {

struct GeluTanh {
  // (1 + tanh(u)) / 2 is 1 / (1 + e^(-2u)); here -2u = -2 * sqrt(2 / pi) * (x + 0.044715 x³).
  __device__ static float of(float x) {
    return kart::quotient(x, 1.0f + kart::exponential(-1.5957691216f * x * (1.0f + 0.044715f * x * x)));
  }
};

}  // namespace kart

KART_GATE(gelu_tanh_and_mul, kart::GeluTanh)
