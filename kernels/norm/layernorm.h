// Arguments of layernorm: out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, by rows.
#pragma once

#include "kart/launch.h"

struct layernorm_args {
  kart_rows x;
  kart_rows out;
  const void* weight;
  const void* bias;
  int64_t rows;
  int64_t columns;
  float eps;
  int device;
};

KART_LAUNCHER(layernorm_args)
