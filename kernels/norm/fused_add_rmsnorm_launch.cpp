#include "fused_add_rmsnorm.h"
#include "norm_launch.h"

static kart::Norm norm = KART_NORM(fused_add_rmsnorm, 2, 256);

int kart_launch(const fused_add_rmsnorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->residual) && kart::is_wide(args->weight);
  return kart::normalise(norm, *args, wide, stream);
}
