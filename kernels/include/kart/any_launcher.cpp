// A launcher for any kernel whose image says what it takes: the exported function takes the blocks in x, y and z, then
// the kernel's own arguments in their order.
//
// Compiled once per op, with the name of its function in KART_EXPORTED.  The notes about the image (see images.py and
// the workers that write them) name the kernel, its threads, its shared memory, and its arguments as op.toml has them:
// `x=*float16:16 n=int32`.
#include "kart/driver.h"
#include "kart/ffi.h"

namespace kart {
namespace {

constexpr int kMost = 120;  // arguments

struct Type {
  const char* name;
  DLDataType type;
};

constexpr Type kTypes[] = {
    {"bool", {kDLBool, 8, 1}},       {"int8", {kDLInt, 8, 1}},       {"int16", {kDLInt, 16, 1}},
    {"int32", {kDLInt, 32, 1}},      {"int64", {kDLInt, 64, 1}},     {"uint8", {kDLUInt, 8, 1}},
    {"uint16", {kDLUInt, 16, 1}},    {"uint32", {kDLUInt, 32, 1}},   {"uint64", {kDLUInt, 64, 1}},
    {"float16", {kDLFloat, 16, 1}},  {"bfloat16", {kDLBfloat, 16, 1}}, {"float32", {kDLFloat, 32, 1}},
    {"float64", {kDLFloat, 64, 1}},  {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
};

// As notes and numpy call it.
Text name_of(DLDataType type) {
  for (const Type& each : kTypes) {
    if (!same(each.type, type)) continue;
    Text text;
    snprintf(text.chars, sizeof text.chars, "%s", each.name);
    return text;
  }
  return dtype_text(type);
}

struct Argument {
  Text name;
  bool pointer;
  DLDataType type;
  int step;  // what the address or the number is a multiple of
};

// What the notes say of the kernel.
struct Signature {
  Argument arguments[kMost];
  int count = 0;
  Text entry{};
  unsigned threads = 0, shared = 0;
  int64_t scratch = 0;  // bytes that each block wants in global memory

  Signature() {
    const Part name = attached().note("entry"), text = attached().note("arguments");
    copy(entry, name);
    threads = attached().number("threads");
    shared = attached().number("shared");
    scratch = attached().number("scratch");
    for (size_t start = 0; start < text.size;) {
      const void* end = memchr(text.start + start, ' ', text.size - start);
      const size_t size = end == nullptr ? text.size - start : static_cast<const char*>(end) - (text.start + start);
      if (count == kMost || !read({text.start + start, size}, arguments[count])) {
        count = -1;
        return;
      }
      ++count;
      start += size + 1;
    }
  }

  bool usable() const { return count >= 0 && threads > 0 && entry.chars[0] != 0; }

 private:
  static void copy(Text& to, Part from) {
    snprintf(to.chars, sizeof to.chars, "%.*s", static_cast<int>(from.size), from.start == nullptr ? "" : from.start);
  }

  static bool read(Part word, Argument& out) {
    Text text;
    copy(text, word);
    char* type = strchr(text.chars, '=');
    if (type == nullptr) return false;
    *type++ = 0;
    out.pointer = *type == '*';
    type += out.pointer;
    char* step = strchr(type, ':');
    if (step != nullptr) *step++ = 0;
    out.step = step == nullptr ? 1 : 0;
    for (; step != nullptr && *step >= '0' && *step <= '9' && out.step < 1 << 20; ++step) {
      out.step = out.step * 10 + (*step - '0');
    }
    snprintf(out.name.chars, sizeof out.name.chars, "%s", text.chars);
    for (const Type& each : kTypes) {
      if (strcmp(each.name, type) == 0) {
        out.type = each.type;
        return out.step > 0;
      }
    }
    return false;
  }
};

union Value {
  void* pointer;
  int64_t integer;  // its low bytes are those of smaller ones
  float single;
  double whole;
};

// Memory in the order of a stream: free again for others as soon as the kernel has ended.
struct Memory {
  int (*take)(void** address, size_t size, void* stream);
  int (*give_back)(void* address, void* stream);

  Memory() {
    void* const file = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // is open already
    void* const functions[] = {dlsym(file, "cuMemAllocAsync"), dlsym(file, "cuMemFreeAsync")};
    memcpy(&take, &functions[0], sizeof take);
    memcpy(&give_back, &functions[1], sizeof give_back);
  }
};

// One call: turns its arguments into what the driver takes.
class Launch {
 public:
  Launch(const char* op, const Signature& signature, const TVMFFIAny* args, int given)
      : op_(op), signature_(signature), args_(args) {
    if (given != 3 + signature.count) {
      fail("TypeError", "%s takes %d arguments, the blocks in x, y and z and %d of its kernel, got %d", op,
           3 + signature.count, signature.count, given);
    }
  }

  void run() {
    const Grid grid{blocks(0, "x"), blocks(1, "y"), blocks(2, "z")};
    for (int i = 0; i < signature_.count; ++i) {
      const Argument& argument = signature_.arguments[i];
      values_[i] = argument.pointer ? address(i, argument) : number(i, argument);
      pointers_[i] = &values_[i];
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    void* stream = TVMFFIEnvGetStream(kDLCUDA, device_);
    if (launch(grid, stream) != 0) {
      fail("RuntimeError", "%s: the launch on cuda:%d failed: %s", op_, device_, kart_error(-1));
    }
  }

 private:
  int64_t blocks(int arg, const char* side) {
    const TVMFFIAny& given = args_[arg];
    if (given.type_index != kTVMFFIInt) fail("TypeError", "%s: the number of blocks in %s must be an integer", op_, side);
    if (given.v_int64 < 0) {
      fail("ValueError", "%s: the number of blocks in %s is %lld", op_, side, static_cast<long long>(given.v_int64));
    }
    return given.v_int64;
  }

  Value address(int i, const Argument& argument) {
    const TVMFFIAny& given = args_[3 + i];
    const DLTensor* tensor = given.type_index == kTVMFFIDLTensorPtr ? static_cast<const DLTensor*>(given.v_ptr)
                             : given.type_index == kTVMFFITensor    ? TVMFFITensorGetDLTensorPtr(given.v_obj)
                                                                    : nullptr;
    const char* name = argument.name.chars;
    if (tensor == nullptr) fail("TypeError", "%s: %s must be a tensor", op_, name);
    // numpy has neither bfloat16 nor floats of 8 bits, so their bits may come as unsigned integers.
    const bool bits = argument.type.code == kDLBfloat || argument.type.bits == 8;
    const DLDataType unsigned_type{kDLUInt, argument.type.bits, 1};
    if (!same(tensor->dtype, argument.type) && !(bits && same(tensor->dtype, unsigned_type))) {
      fail("TypeError", "%s: %s must be %s, got %s", op_, name, name_of(argument.type).chars,
           name_of(tensor->dtype).chars);
    }
    if (tensor->device.device_type != kDLCUDA) {
      fail("ValueError", "%s: this kernel runs on cuda, but %s is on %s", op_, name, device_text(tensor->device).chars);
    }
    if (device_ < 0) device_ = tensor->device.device_id;
    if (tensor->device.device_id != device_) {
      fail("ValueError", "%s: %s must be on cuda:%d as the tensors before it are, got %s", op_, name, device_,
           device_text(tensor->device).chars);
    }
    Value value{};
    value.pointer = data_of(tensor);
    const int step = argument.step > 1 ? argument.step : argument.type.bits / 8;
    if (value.integer % step != 0) {
      fail("ValueError", "%s: %s must lie at a multiple of %d bytes", op_, name, step);
    }
    return value;
  }

  Value number(int i, const Argument& argument) {
    const TVMFFIAny& given = args_[3 + i];
    const bool whole = given.type_index == kTVMFFIInt || given.type_index == kTVMFFIBool;
    const char* name = argument.name.chars;
    Value value{};
    if (argument.type.code == kDLFloat) {
      if (!whole && given.type_index != kTVMFFIFloat) fail("TypeError", "%s: %s must be a number", op_, name);
      const double number = whole ? static_cast<double>(given.v_int64) : given.v_float64;
      if (argument.type.bits == 64) {
        value.whole = number;
      } else {
        value.single = static_cast<float>(number);
      }
      return value;
    }
    if (!whole) fail("TypeError", "%s: %s must be an integer", op_, name);
    value.integer = given.v_int64;
    const bool is_signed = argument.type.code == kDLInt;
    const int bits = argument.type.code == kDLBool ? 1 : argument.type.bits - is_signed;
    const bool fits = bits >= 63 || (value.integer >> bits) == 0 || (is_signed && (value.integer >> bits) == -1);
    if (!fits || (!is_signed && value.integer < 0)) {
      fail("ValueError", "%s: %s must be %s, got %lld", op_, name, name_of(argument.type).chars,
           static_cast<long long>(value.integer));
    }
    if (value.integer % argument.step != 0) {
      fail("ValueError", "%s: %s must be a multiple of %d, got %lld", op_, name, argument.step,
           static_cast<long long>(value.integer));
    }
    return value;
  }

  // Kernels take, behind their own arguments, memory for their blocks and memory of a profiler, wanted or not.
  int launch(const Grid& grid, void* stream) {
    static Entry entry{signature_.entry.chars};
    void *scratch = nullptr, *profile = nullptr;
    pointers_[signature_.count] = &scratch;
    pointers_[signature_.count + 1] = &profile;
    const Block block{signature_.threads, 1, 1, signature_.shared};
    if (signature_.scratch == 0) return entry.launch_with(grid, block, device_, stream, pointers_);
    if (entry.find_now() != 0) return -1;
    const OnDevice there(device_);
    if (there.code() != 0) return driver.failed_with(there.code(), "making a context of device %d current", device_);
    static const Memory memory;
    const size_t size = static_cast<size_t>(signature_.scratch) * grid.x * grid.y * grid.z;
    if (const int code = memory.take(&scratch, size, stream)) return driver.failed_with(code, "taking memory for the blocks");
    const int launched = entry.launch_with(grid, block, device_, stream, pointers_);
    const int code = memory.give_back(scratch, stream);
    return launched != 0 || code == 0 ? launched : driver.failed_with(code, "giving back the memory of the blocks");
  }

  const char* op_;
  const Signature& signature_;
  const TVMFFIAny* args_;
  int device_ = -1;
  Value values_[kMost];
  void* pointers_[kMost + 2];
};

int call(const char* op, const TVMFFIAny* args, int given) {
  try {
    static const Signature signature;
    if (!signature.usable()) {
      const char* problem = attached().problem();
      fail("RuntimeError", "%s: the launch is impossible: %s", op,
           problem[0] != 0 ? problem : "the notes about its device code do not say how it is launched");
    }
    Launch(op, signature, args, given).run();
    return 0;
  } catch (const Error& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind, error.text);
    return -1;
  }
}

}  // namespace
}  // namespace kart

#define KART_JOINED(a, b) a##b
#define KART_SYMBOL(name) KART_JOINED(__tvm_ffi_, name)
#define KART_QUOTED(name) #name
#define KART_NAME(name) KART_QUOTED(name)

extern "C" __attribute__((visibility("default"))) int KART_SYMBOL(KART_EXPORTED)(void*, const TVMFFIAny* args,
                                                                                 int32_t given, TVMFFIAny*) {
  return kart::call(KART_NAME(KART_EXPORTED), args, given);
}
