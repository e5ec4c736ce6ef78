// Arguments of fused_add_rmsnorm, in place by rows: residual += x, then x = rmsnorm(residual).
#pragma once

#include "kart/launch.h"

struct fused_add_rmsnorm_args {
  kart_rows x;
  kart_rows residual;
  const void* weight;
  int64_t rows;
  int64_t columns;
  float eps;
  int device;
};

KART_LAUNCHER(fused_add_rmsnorm_args)
