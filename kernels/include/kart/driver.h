// Launches kernels of the image that is attached to the launcher's own file, through the CUDA driver.
//
// Host code without a header of CUDA's, included by the one source of a launcher that defines `kart_launch`.  The image
// and the notes about it are two sections of the file that nothing loads (kartifacts/build/images.py): they are found
// when the file is opened, and the image goes to the driver with the first launch.  The driver's library is opened then
// too, so that a process without a GPU can hold the launcher.
//
//   static kart::Entry scale{"scale"};  // the name of an extern "C" __global__ function
//   int kart_launch(const scale_args* args, void* stream) {
//     return scale.launch(args->rows, 256, args->device, stream, *args);
//   }
#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "kart/launch.h"

// The names of these that were there before glibc 2.34, so that a launcher made with a new glibc runs with an old one.
#if defined(__GLIBC__) && defined(__x86_64__)
#define KART_OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define KART_OLD_GLIBC "GLIBC_2.17"
#endif
#ifdef KART_OLD_GLIBC
__asm__(".symver dladdr,dladdr@" KART_OLD_GLIBC);
__asm__(".symver dlerror,dlerror@" KART_OLD_GLIBC);
__asm__(".symver dlopen,dlopen@" KART_OLD_GLIBC);
__asm__(".symver dlsym,dlsym@" KART_OLD_GLIBC);
#endif

namespace kart {
namespace {

// -- errors -----------------------------------------------------------------------------------------------------------

struct Message {
  char chars[512];
};

thread_local Message last_failure;

// Keeps the text for kart_error; gives the code that a launcher returns.
__attribute__((format(printf, 1, 2))) int failed(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_failure.chars, sizeof last_failure.chars, format, values);
  va_end(values);
  return -1;
}

// -- the image --------------------------------------------------------------------------------------------------------

struct Part {
  const char* start;
  size_t size;
};

// The two sections of this file.  It stays mapped: the driver reads the image at a time that nobody knows, and a
// destructor could run while another thread launches.
class Attached {
 public:
  Attached() { find(); }

  // Why there is no image; empty if there is one.
  const char* problem() const { return problem_.chars; }
  const char* image() const { return image_.start; }

  // What the notes say of `key`, to the end of its line; nothing if they do not name it.
  Part note(const char* key) const {
    const size_t length = strlen(key);
    for (size_t i = 0; i < notes_.size;) {
      const char* line = notes_.start + i;
      const void* end = memchr(line, '\n', notes_.size - i);
      const size_t size = end == nullptr ? notes_.size - i : static_cast<const char*>(end) - line;
      if (size > length && memcmp(line, key, length) == 0 && line[length] == ' ') {
        return {line + length + 1, size - length - 1};
      }
      i += size + 1;
    }
    return {};
  }

  // The number that the notes give for `key`; 0 if they do not name it.
  int number(const char* key) const { return digits(note(key)); }

 private:
  static const char here;

  void find() {
    Dl_info self;
    if (dladdr(&here, &self) == 0 || self.dli_fname == nullptr) {
      return complain("the file of this launcher is not known to the loader");
    }
    const int file = open(self.dli_fname, O_RDONLY | O_CLOEXEC);
    if (file < 0) return complain("%s cannot be opened: %s", self.dli_fname, strerror(errno));
    const off_t size = lseek(file, 0, SEEK_END);
    void* mapped = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    close(file);
    if (mapped == MAP_FAILED) return complain("%s cannot be mapped", self.dli_fname);
    const Part whole{static_cast<const char*>(mapped), static_cast<size_t>(size)};
    image_ = section(whole, ".kart.image");
    notes_ = section(whole, ".kart.launch");
    if (image_.size == 0 || notes_.size == 0) {
      munmap(mapped, size);
      image_ = notes_ = {};
      complain("no device code is attached to %s", self.dli_fname);
    }
  }

  __attribute__((format(printf, 2, 3))) void complain(const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(problem_.chars, sizeof problem_.chars, format, values);
    va_end(values);
  }

  // `size` bytes from `offset` on, nothing if the file ends before them.
  static Part cut(Part whole, uint64_t offset, uint64_t size) {
    if (offset > whole.size || size > whole.size - offset) return {};
    return {whole.start + offset, static_cast<size_t>(size)};
  }

  static Part section(Part file, const char* name) {
    Elf64_Ehdr header;
    if (file.size < sizeof header) return {};
    memcpy(&header, file.start, sizeof header);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64) return {};
    Elf64_Shdr names;
    if (!read_row(file, header, header.e_shstrndx, names)) return {};
    const Part texts = cut(file, names.sh_offset, names.sh_size);
    const size_t length = strlen(name) + 1;  // with the zero at its end
    for (int i = 0; i < header.e_shnum; ++i) {
      Elf64_Shdr row;
      if (!read_row(file, header, i, row)) return {};
      const Part text = cut(texts, row.sh_name, length);
      if (text.size == length && memcmp(text.start, name, length) == 0) return cut(file, row.sh_offset, row.sh_size);
    }
    return {};
  }

  static bool read_row(Part file, const Elf64_Ehdr& header, int index, Elf64_Shdr& row) {
    if (index >= header.e_shnum || header.e_shentsize != sizeof row || header.e_shoff > file.size) return false;
    const Part bytes = cut(file, header.e_shoff + uint64_t(index) * sizeof row, sizeof row);
    if (bytes.size != 0) memcpy(&row, bytes.start, sizeof row);
    return bytes.size != 0;
  }

  static int digits(Part text) {
    int value = 0;
    for (size_t i = 0; i < text.size; ++i) {
      if (text.start[i] < '0' || text.start[i] > '9' || value > 99999999) return 0;
      value = value * 10 + (text.start[i] - '0');
    }
    return value;
  }

  Part image_{};
  Part notes_{};
  Message problem_{};
};

const char Attached::here = 0;

const Attached& attached() {
  static const Attached found;
  return found;
}

// The value of a macro that the device code was compiled with; 0 if it was not.
int defined(const char* macro) {
  char key[160];
  snprintf(key, sizeof key, "define.%s", macro);
  return attached().number(key);
}

// -- the driver -------------------------------------------------------------------------------------------------------

struct Lock {
  explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Lock() { pthread_mutex_unlock(&mutex_); }
  pthread_mutex_t& mutex_;
};

pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

// The functions that are used, as cuda.h declares them; contexts, libraries and kernels are opaque.
struct Driver {
  int (*cuInit)(unsigned flags);
  int (*cuGetErrorString)(int code, const char** text);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuCtxGetDevice)(int* device);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuDevicePrimaryCtxRelease)(int device);
  int (*cuCtxPushCurrent)(void* context);
  int (*cuCtxPopCurrent)(void** context);
  int (*cuThreadExchangeStreamCaptureMode)(int* mode);
  int (*cuLibraryLoadData)(void** library, const void* image, int* options, void** values, unsigned count,
                           int* library_options, void** library_values, unsigned library_count);
  int (*cuLibraryGetKernel)(void** kernel, void* library, const char* name);
  int (*cuKernelSetAttribute)(int attribute, int value, void* kernel, int device);
  int (*cuLaunchKernel)(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** args, void** extra);
  void* library;  // of kernels: what the image became; null until it has

  // Keeps what was tried, and why it failed.
  __attribute__((format(printf, 3, 4))) int failed_with(int code, const char* format, ...) const {
    Message what;
    va_list values;
    va_start(values, format);
    vsnprintf(what.chars, sizeof what.chars, format, values);
    va_end(values);
    const char* text = nullptr;
    if (cuGetErrorString(code, &text) != 0 || text == nullptr) text = "unknown error";
    return failed("%.300s: %.150s (%d)", what.chars, text, code);
  }

  // Like `load`, called by one thread at a time.
  int open() {
    if (library != nullptr) return 0;
    if (attached().problem()[0] != 0) return failed("%s", attached().problem());
    void* const file = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) return failed("the CUDA driver cannot be opened: %s", dlerror());
    struct {
      const char* name;
      void* function;
    } const wanted[] = {{"cuInit", &cuInit},
                        {"cuGetErrorString", &cuGetErrorString},
                        {"cuDeviceGet", &cuDeviceGet},
                        {"cuCtxGetDevice", &cuCtxGetDevice},
                        {"cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain},
                        {"cuDevicePrimaryCtxRelease_v2", &cuDevicePrimaryCtxRelease},
                        {"cuCtxPushCurrent_v2", &cuCtxPushCurrent},
                        {"cuCtxPopCurrent_v2", &cuCtxPopCurrent},
                        {"cuThreadExchangeStreamCaptureMode", &cuThreadExchangeStreamCaptureMode},
                        {"cuLibraryLoadData", &cuLibraryLoadData},
                        {"cuLibraryGetKernel", &cuLibraryGetKernel},
                        {"cuKernelSetAttribute", &cuKernelSetAttribute},
                        {"cuLaunchKernel", &cuLaunchKernel}};
    for (const auto& each : wanted) {
      void* const found = dlsym(file, each.name);
      if (found == nullptr) return failed("the CUDA driver is older than 12.0: it has no %s", each.name);
      memcpy(each.function, &found, sizeof found);
    }
    const int code = cuInit(0);
    return code == 0 ? 0 : failed_with(code, "cuInit");
  }

  int load() {
    if (library != nullptr) return 0;
    const int code = cuLibraryLoadData(&library, attached().image(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    return code == 0 ? 0 : failed_with(code, "cuLibraryLoadData of the attached image");
  }
};

Driver driver{};

// While this lives, what a graph that is being captured forbids (loading, mostly) is allowed to this thread.
class Uncaptured {
 public:
  Uncaptured() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Uncaptured() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
};

// Makes a context of `device` current while it lives: its primary one, unless another of that device is.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    int current = -1;
    if (driver.cuCtxGetDevice(&current) == 0 && current == device) return;
    void* context = nullptr;
    if ((code_ = driver.cuDeviceGet(&device_, device)) != 0) return;
    if ((code_ = driver.cuDevicePrimaryCtxRetain(&context, device_)) != 0) return;
    code_ = driver.cuCtxPushCurrent(context);
    retained_ = true;
  }
  ~OnDevice() {
    if (!retained_) return;
    void* ours = nullptr;
    if (code_ == 0) driver.cuCtxPopCurrent(&ours);
    driver.cuDevicePrimaryCtxRelease(device_);  // who owns the tensors holds it as well
  }
  int code() const { return code_; }

 private:
  int code_ = 0;
  int device_ = 0;
  bool retained_ = false;
};

}  // namespace

// -- launching --------------------------------------------------------------------------------------------------------

// Blocks of a launch.
struct Grid {
  Grid(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}  // NOLINT: a number is a grid
  int64_t x, y, z;
};

// Threads of a block, and the bytes of shared memory that it has beyond what its kernel declares.
struct Block {
  Block(unsigned x, unsigned y = 1, unsigned z = 1, unsigned shared = 0) : x(x), y(y), z(z), shared(shared) {}  // NOLINT
  unsigned x, y, z, shared;
};

// One kernel of the image, by the name of its extern "C" __global__ function.
class Entry {
 public:
  constexpr Entry() = default;
  constexpr Entry(const char* name) : name_(name) {}  // NOLINT: a name is an entry

  // The arguments must have the very types that the kernel takes.
  template <class... Args>
  int launch(Grid grid, Block block, int device, void* stream, const Args&... args) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
    return launch_with(grid, block, device, stream, pointers);
  }

  // Whether there is such a kernel: 0, or what failed.
  int find_now() { return kernel_.load(std::memory_order_acquire) != nullptr || find() != nullptr ? 0 : -1; }

  // The same for arguments whose types are known when it runs: `args` points to each of them.
  __attribute__((noinline)) int launch_with(Grid grid, Block block, int device, void* stream, void** args) {
    void* kernel = kernel_.load(std::memory_order_acquire);
    if (kernel == nullptr && (kernel = find()) == nullptr) return -1;
    if (grid.x > INT32_MAX || grid.y > UINT16_MAX || grid.z > UINT16_MAX) {
      return failed("%s needs %lld × %lld × %lld blocks; a launch has at most 2147483647 × 65535 × 65535", name_,
                    static_cast<long long>(grid.x), static_cast<long long>(grid.y), static_cast<long long>(grid.z));
    }
    const OnDevice there(device);
    if (there.code() != 0) return driver.failed_with(there.code(), "making a context of device %d current", device);
    int code = 0;
    if (block.shared > kShared) {
      code = driver.cuKernelSetAttribute(8, static_cast<int>(block.shared), kernel, device);  // MAX_DYNAMIC_SHARED_SIZE
    }
    if (code == 0) {
      code = driver.cuLaunchKernel(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, block.shared, stream,
                                   args, nullptr);
    }
    if (code == 0) return 0;
    return driver.failed_with(code, "cuLaunchKernel of %s, %lld × %lld × %lld blocks of %u × %u × %u threads and %u bytes",
                              name_, static_cast<long long>(grid.x), static_cast<long long>(grid.y),
                              static_cast<long long>(grid.z), block.x, block.y, block.z, block.shared);
  }

 private:
  __attribute__((noinline)) void* find() {
    const Lock lock(loading);
    if (driver.open() != 0) return nullptr;
    const Uncaptured relaxed;
    if (driver.load() != 0) return nullptr;
    void* kernel = nullptr;
    const int code = driver.cuLibraryGetKernel(&kernel, driver.library, name_);
    if (code != 0) {
      driver.failed_with(code, "looking for the kernel %s in the attached image", name_);
      return nullptr;
    }
    kernel_.store(kernel, std::memory_order_release);
    return kernel;
  }

  static constexpr unsigned kShared = 48 << 10;  // bytes that every launch may have

  const char* name_ = nullptr;
  std::atomic<void*> kernel_{nullptr};
};

}  // namespace kart

const int kart_device = KART_CUDA;
const int kart_dtype = kart::defined("KART_DTYPE");

const char* kart_error(int code) {
  if (code != 0) return kart::last_failure.chars;
  const char* problem = kart::attached().problem();
  return problem[0] != 0 ? problem : "the notes about its device code name no element type (KART_DTYPE)";
}
