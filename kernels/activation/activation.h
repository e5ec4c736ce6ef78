// Arguments of the gated activations: out = f(x[:columns]) * x[columns:], by rows of x that are twice as wide as those
// of out.
#pragma once

#include "kart/launch.h"

struct activation_args {
  kart_rows x;
  kart_rows out;
  int64_t rows;
  int64_t columns;  // of out
  int device;
};

KART_LAUNCHER(activation_args)

namespace kart {

constexpr int kGateBlock = 256;  // threads, at most

}  // namespace kart
