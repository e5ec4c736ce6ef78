// What a binding and the launcher it is linked with agree on.
//
// Every launcher defines, for the one device and element type that it was compiled for, the symbols at the end of this
// file and `kart_launch`, which each op's own header declares.  The binding is compiled once and learns the rest here.
#pragma once

#include <stdint.h>

#define KART_CPU 1  // as DLPack numbers devices
#define KART_CUDA 2

#define KART_FLOAT16 1
#define KART_BFLOAT16 2
#define KART_FLOAT32 3

// The rows of a tensor whose last dimension is contiguous.  Its other dimensions folded into two: row r starts
// (r / inner) * outer_stride + (r % inner) * inner_stride elements after `data`.
struct kart_rows {
  void* data;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
};

#pragma GCC visibility push(hidden)  // many kernels live in one process
extern "C" {
extern const int kart_device;
extern const int kart_dtype;
const char* kart_error(int code);  // the text of what kart_launch returned, if that was not 0
}
#pragma GCC visibility pop
