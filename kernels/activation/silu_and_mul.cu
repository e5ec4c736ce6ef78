#include "activation.cuh"

namespace kart {

struct Silu {
  __device__ static float of(float x) { return kart::quotient(x, 1.0f + kart::exponential(-x)); }
};

}  // namespace kart

KART_GATE(silu_and_mul, kart::Silu)
