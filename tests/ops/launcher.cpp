// A launcher as tests want it: what kart/driver.h does, callable without tensors.
#include "kart/driver.h"
#include "kart/wide.h"

static kart::Entry first{"first"}, second{"second"}, absent{"absent"};

#define VISIBLE extern "C" __attribute__((visibility("default")))

VISIBLE int dtype() { return kart_dtype; }
VISIBLE int head_dim() { return kart::defined("KART_HEAD_DIM"); }
VISIBLE const char* error(int code) { return kart_error(code); }

VISIBLE int launch(int64_t blocks, int64_t rows, unsigned threads, unsigned shared, int device, void* stream) {
  const double value = 0.5;
  const int64_t count = 42;
  return first.launch({blocks, rows}, {threads, 1, 1, shared}, device, stream, value, count);
}

VISIBLE int launch_second(int device, void* stream) { return second.launch(1, 32, device, stream); }
VISIBLE int launch_absent(int device, void* stream) { return absent.launch(1, 32, device, stream); }
