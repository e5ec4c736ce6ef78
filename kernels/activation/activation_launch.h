// Chooses one of the two kernels of a gated activation, and shares its rows out to blocks.
#pragma once

#include "activation.h"
#include "kart/driver.h"
#include "kart/wide.h"

namespace kart {

struct Gate {
  Entry wide, narrow;
};

inline int launch_gate(Gate& gate, const activation_args& args, void* stream) {
  const bool wide = is_wide(args.x) && is_wide(args.out) && args.columns % wide_count() == 0;
  const int64_t vecs = args.columns / (wide ? wide_count() : 1), tiles = (vecs + kGateBlock - 1) / kGateBlock;
  const auto threads = static_cast<unsigned>((vecs + tiles - 1) / tiles);
  const Block block(threads, kGateBlock / threads);
  const int64_t blocks = (args.rows + block.y - 1) / block.y * tiles;
  Entry& kernel = wide ? gate.wide : gate.narrow;
  return kernel.launch(blocks, block, args.device, stream, args, static_cast<unsigned>(tiles));
}

}  // namespace kart
