#include "fused_add_rmsnorm.h"
#include "norm_launch.h"

static kart::Norm norm{2,
                       256,
                       "fused_add_rmsnorm_reread_wide",
                       "fused_add_rmsnorm_reread_narrow",
                       "fused_add_rmsnorm_held_narrow",
                       {{1, kart::kMostThreads, "fused_add_rmsnorm_held_1"},
                        {2, kart::kMostThreads, "fused_add_rmsnorm_held_2"},
                        {4, kart::kMostThreads, "fused_add_rmsnorm_held_4"}}};

int kart_launch(const fused_add_rmsnorm_args* args, void* stream) {
  const bool wide = kart::is_wide(args->x) && kart::is_wide(args->residual) && kart::is_wide(args->weight);
  return kart::normalise(norm, *args, wide, stream);
}
