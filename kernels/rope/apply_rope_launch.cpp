// Chooses one of the two kernels of apply_rope, and shares tokens and their heads out to blocks.
#include "apply_rope.h"
#include "kart/driver.h"
#include "kart/wide.h"

const int kart_head_dim = kart::defined("KART_HEAD_DIM");

static kart::Entry wide{"apply_rope_wide"}, narrow{"apply_rope_narrow"};

constexpr int64_t kFewTokens = 512;  // do not fill a GPU: then no thread takes a second head

static bool is_wide(const apply_rope_args& args) {
  return kart::is_wide(args.q) && kart::is_wide(args.k) && kart::is_wide(args.cache) && args.cache_stride % 4 == 0;
}

int kart_launch(const apply_rope_args* args, void* stream) {
  const bool all = is_wide(*args);
  const int heads = args->q_heads + args->k_heads, threads = kart_head_dim / 2 / (all ? kart::wide_count() / 2 : 1);
  const int at_once = kart::kRopeBlock / threads, passes = (heads + at_once - 1) / at_once;
  const int shared = (heads + passes - 1) / passes;  // heads of a token that its block takes at once, evenly
  const int tokens = kart::kRopeBlock / (threads * shared) < 64 ? kart::kRopeBlock / (threads * shared) : 64;
  const kart::Grid grid((args->tokens + tokens - 1) / tokens, args->tokens <= kFewTokens ? passes : 1);
  const kart::Block block(threads, shared, tokens);
  return (all ? wide : narrow).launch(grid, block, args->device, stream, *args);
}
