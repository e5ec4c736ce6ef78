// Arguments of rmsnorm: out = x / sqrt(mean(x²) + eps) * weight, by rows.
#pragma once

#include "kart/launch.h"

struct rmsnorm_args {
  kart_rows x;
  kart_rows out;
  const void* weight;
  int64_t rows;
  int64_t columns;
  float eps;
  int device;
};

KART_LAUNCHER(rmsnorm_args)
