// Writes down how a CUDA driver is called, and fails where it is told to: what a machine without a GPU can show of
// kart/driver.h.  The GPU tests show the rest.
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <string>

#define VISIBLE extern "C" __attribute__((visibility("default")))

static std::mutex mutex;
static std::string log, failing;
static thread_local int current = -1, mode = 0;  // device of the current context; how strict a capture is

static int called(const char* name, const std::string& with = "") {
  const std::lock_guard<std::mutex> lock(mutex);
  log += std::string(name) + (with.empty() ? "" : " ") + with + "\n";
  return failing == name ? 700 : 0;
}

VISIBLE const char* calls() {
  static std::string said;
  const std::lock_guard<std::mutex> lock(mutex);
  said = log;
  log.clear();
  return said.c_str();
}
VISIBLE void fail(const char* name) { failing = name; }
VISIBLE void set_current(int device) { current = device; }
VISIBLE int get_current() { return current; }
VISIBLE int get_mode() { return mode; }

VISIBLE int cuInit(unsigned) { return called("cuInit"); }
VISIBLE int cuGetErrorString(int code, const char** text) {
  *text = code == 700 ? "an illegal address" : nullptr;
  return *text == nullptr;
}
VISIBLE int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 4 ? 0 : 101;
}
VISIBLE int cuCtxGetDevice(int* device) {
  *device = current;
  return current < 0 ? 201 : 0;
}
VISIBLE int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(device + 1L);
  return called("retain", std::to_string(device));
}
VISIBLE int cuDevicePrimaryCtxRelease_v2(int device) { return called("release", std::to_string(device)); }
static thread_local int below;
VISIBLE int cuCtxPushCurrent_v2(void* context) {
  below = current;
  current = static_cast<int>(reinterpret_cast<long>(context)) - 1;
  return called("push");
}
VISIBLE int cuCtxPopCurrent_v2(void**) {
  current = below;
  return called("pop");
}
VISIBLE int cuThreadExchangeStreamCaptureMode(int* other) {
  const int before = mode;
  mode = *other;
  *other = before;
  return 0;
}
VISIBLE int cuLibraryLoadData(void** library, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  *library = const_cast<void*>(image);
  return called("load", std::string(static_cast<const char*>(image), 5) + " mode " + std::to_string(mode));
}
VISIBLE int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  *kernel = const_cast<char*>(name);
  const int code = called("kernel", name);
  return strcmp(name, "absent") == 0 ? 500 : code;
}
VISIBLE int cuKernelSetAttribute(int attribute, int value, void*, int device) {
  return called("attribute", std::to_string(attribute) + " " + std::to_string(value) + " on " + std::to_string(device));
}
VISIBLE int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                           unsigned shared, void* stream, void** args, void**) {
  char text[400], given[300] = "";
  if (strcmp(static_cast<char*>(kernel), "first") == 0) {
    snprintf(given, sizeof given, " given %g %lld", *static_cast<double*>(args[0]), *static_cast<long long*>(args[1]));
  }
  int count = 0;
  if (sscanf(static_cast<char*>(kernel), "noted_%d", &count) == 1) {  // takes so many arguments of 8 bytes or fewer
    for (int i = 0, at = 0; i < count; ++i) {
      at += snprintf(given + at, sizeof given - at, " %llx", *static_cast<unsigned long long*>(args[i]));
    }
  }
  snprintf(text, sizeof text, "%s %u,%u,%u %u,%u,%u %u stream %ld on %d%s", static_cast<char*>(kernel), x, y, z, bx,
           by, bz, shared, reinterpret_cast<long>(stream), current, given);
  return called("launch", text);
}
VISIBLE int cuMemAllocAsync(void** address, size_t size, void*) {
  *address = reinterpret_cast<void*>(0xabc00L);
  return called("take", std::to_string(size));
}
VISIBLE int cuMemFreeAsync(void* address, void*) {
  return called("give back", std::to_string(reinterpret_cast<long>(address)));
}
