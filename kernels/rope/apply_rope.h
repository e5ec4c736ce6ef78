// Arguments of apply_rope: every head of q and k, in place, by the position of its token.
#pragma once

#include "kart/launch.h"

struct apply_rope_args {
  kart_rows q;  // row token * q_heads + head
  kart_rows k;
  const void* positions;  // of the tokens: int64_t or int
  const float* cache;     // a row for each position: the cosines of all pairs, then their sines
  int64_t cache_stride;   // elements from one row to the next
  int64_t cache_rows;
  int64_t tokens;
  int q_heads;
  int k_heads;
  int position_bytes;
  int device;
};

KART_LAUNCHER(apply_rope_args)

#ifndef __CUDACC_RTC__
extern "C" __attribute__((visibility("hidden"))) const int kart_head_dim;  // that the launcher's kernels are made for
#endif

namespace kart {

constexpr int kRopeBlock = 256;  // threads, at most

}  // namespace kart
