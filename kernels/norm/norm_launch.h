// Chooses among the kernels that norm.cuh makes of a norm, and shares its rows out to blocks.
//
// Few registers and small blocks were best on an H200, since then many rows wait for their sums independently: 4
// vectors as they lie in memory, or 2 as floats.  Where there are too few rows for that, the most threads a row were.
#pragma once

#include "kart/driver.h"
#include "kart/wide.h"
#include "norm.h"

namespace kart {

constexpr int kFewRows = 512;  // do not fill a GPU

// A kernel whose threads, at most so many, hold so many vectors of a row each, if not fewer.
struct Held {
  int vecs, threads;
  Entry kernel;
};

// The kernels of one norm.  A thread should hold one vector in rows of fewer than `few`, else `vecs`; more if the
// threads do not suffice.
struct Norm {
  int vecs, few;
  Entry reread_wide, reread_narrow, held_narrow;
  Held held[4];  // fewer vectors first
};

// Threads that share a row, and rows that share a block, as sum_over_row wants them.
inline Block block_for(int64_t threads_per_row) {
  constexpr unsigned kBlock = 256;
  if (threads_per_row > 32) return static_cast<unsigned>((threads_per_row + 31) / 32 * 32);
  unsigned x = 1;
  while (x < threads_per_row) x *= 2;
  return {x, kBlock / x};
}

template <class Args>
int launch_held(Entry& kernel, int64_t threads_per_row, const Args& args, void* stream) {
  const Block block = block_for(threads_per_row);
  return kernel.launch((args.rows + block.y - 1) / block.y, block, args.device, stream, args);
}

template <class Args>
int launch_reread(Entry& kernel, int64_t vecs, const Args& args, void* stream) {
  return kernel.launch(args.rows, block_for(vecs < 1024 ? vecs : 1024), args.device, stream, args);
}

// `wide` says whether every pointer and stride allows the widest loads.
template <class Args>
int normalise(Norm& norm, const Args& args, bool wide, void* stream) {
  if (!wide || args.columns % wide_count() != 0) {
    if (args.columns <= kMostThreads) return launch_held(norm.held_narrow, args.columns, args, stream);
    return launch_reread(norm.reread_narrow, args.columns, args, stream);
  }
  const int64_t vecs = args.columns / wide_count();
  const int least = args.rows <= kFewRows || vecs < norm.few ? 1 : norm.vecs;
  for (Held& held : norm.held) {
    if (held.vecs >= least && vecs <= int64_t{held.vecs} * held.threads) {
      return launch_held(held.kernel, (vecs + held.vecs - 1) / held.vecs, args, stream);
    }
  }
  return launch_reread(norm.reread_wide, vecs, args, stream);
}

}  // namespace kart
