#include "norm_launch.h"
#include "rmsnorm.h"

static kart::Norm norm{4,
                       0,
                       "rmsnorm_reread_wide",
                       "rmsnorm_reread_narrow",
                       "rmsnorm_held_narrow",
                       {{1, kart::kMostThreads, "rmsnorm_held_1"},
                        {2, kart::kMostThreads, "rmsnorm_held_2"},
                        {4, 2 * kart::kMostThreads, "rmsnorm_held_4"}}};

int kart_launch(const rmsnorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->out) && kart::is_wide(args->weight);
  return kart::normalise(norm, *args, wide, stream);
}
