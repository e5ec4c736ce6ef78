// What a binding, the launcher it is linked with and the device code agree on.
//
// A launcher defines the symbols at the end of this file and `kart_launch`, which each op's own header declares by
// KART_LAUNCHER(its arguments): it queues the work on a stream and returns 0, or a code that kart_error explains.  One
// with its device code in it is compiled for a device and an element type; one with an image attached to its file is
// compiled once, and learns the element type there.  The binding knows neither before it asks.
#pragma once

#ifdef __CUDACC_RTC__  // has no headers of the system
using int64_t = signed long long;
#else
#include <stdint.h>
#endif

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

#ifdef __CUDACC_RTC__
#define KART_LAUNCHER(args)
#else
#define KART_LAUNCHER(args) \
  extern "C" __attribute__((visibility("hidden"))) int kart_launch(const args* arguments, void* stream);

#pragma GCC visibility push(hidden)  // many kernels live in one process
extern "C" {
extern const int kart_device;
extern const int kart_dtype;       // 0: this launcher does not know; kart_error(0) says why
const char* kart_error(int code);  // the text of what kart_launch returned, if that was not 0
}
#pragma GCC visibility pop
#endif
