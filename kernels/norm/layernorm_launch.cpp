#include "layernorm.h"
#include "norm_launch.h"

static kart::Norm norm = KART_NORM(layernorm, 4, 0);

int kart_launch(const layernorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight) &&
                    kart::is_wide(args->bias);
  return kart::normalise(norm, *args, wide, stream);
}
