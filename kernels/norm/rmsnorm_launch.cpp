#include "norm_launch.h"
#include "rmsnorm.h"

static kart::Norm norm = KART_NORM(rmsnorm, 4, 0);

int kart_launch(const rmsnorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight);
  return kart::normalise(norm, *args, wide, stream);
}
