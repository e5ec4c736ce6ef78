#include "layernorm.h"
#include "norm_launch.h"

static kart::Norm norm{4,
                       0,
                       "layernorm_reread_wide",
                       "layernorm_reread_narrow",
                       "layernorm_held_narrow",
                       {{1, kart::kMostThreads, "layernorm_held_1"},
                        {2, kart::kMostThreads, "layernorm_held_2"},
                        {4, kart::kMostThreads, "layernorm_held_4"},
                        {8, kart::kMostThreads, "layernorm_held_8"}}};

int kart_launch(const layernorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight) &&
                    kart::is_wide(args->bias);
  return kart::normalise(norm, *args, wide, stream);
}
