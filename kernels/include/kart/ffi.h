// Turns the arguments of a TVM-FFI call into checked rows, and failed checks into errors that name the argument.
//
// Written against the C interface alone: a binding compiles in a quarter of a second where the typed C++ headers take
// 2.7, and asks nothing of the C++ runtime but exceptions, so that it runs with old ones.
#pragma once

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <initializer_list>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "kart/launch.h"

namespace kart {

struct Error {
  const char* kind;  // the Python exception
  char text[512];
};

__attribute__((format(printf, 2, 3), noreturn)) inline void fail(const char* kind, const char* format, ...) {
  Error error{kind, {}};
  va_list values;
  va_start(values, format);
  vsnprintf(error.text, sizeof error.text, format, values);
  va_end(values);
  throw error;
}

struct Text {
  char chars[160];
};

// As Python writes it; `last` stands for the last dimension.
inline Text shape_text(const int64_t* shape, int ndim, int64_t last) {
  Text text{"("};
  size_t used = 1;
  for (int d = 0; d < ndim && used < sizeof text.chars - 24; ++d) {
    const long long size = d == ndim - 1 ? last : shape[d];
    used += snprintf(text.chars + used, sizeof text.chars - used, d ? ", %lld" : "%lld", size);
  }
  snprintf(text.chars + used, sizeof text.chars - used, ndim == 1 ? ",)" : ")");
  return text;
}

inline Text shape_text(const DLTensor* tensor) {
  return shape_text(tensor->shape, tensor->ndim, tensor->ndim ? tensor->shape[tensor->ndim - 1] : 0);
}

inline Text device_text(DLDevice device) {
  Text text{};
  if (device.device_type == kDLCPU) {
    snprintf(text.chars, sizeof text.chars, "cpu");
  } else if (device.device_type == kDLCUDA) {
    snprintf(text.chars, sizeof text.chars, "cuda:%d", device.device_id);
  } else {
    snprintf(text.chars, sizeof text.chars, "DLPack device type %d", (int)device.device_type);
  }
  return text;
}

inline Text dtype_text(DLDataType dtype) {
  const char* name = dtype.code == kDLFloat    ? "float"
                     : dtype.code == kDLBfloat ? "bfloat"
                     : dtype.code == kDLInt    ? "int"
                     : dtype.code == kDLUInt   ? "uint"
                     : dtype.code == kDLBool   ? "bool"
                     : dtype.code == kDLComplex ? "complex"
                                                : "DLPack type ";
  Text text{};
  snprintf(text.chars, sizeof text.chars, dtype.lanes == 1 ? "%s%d" : "%s%d x%d", name, dtype.bits, dtype.lanes);
  return text;
}

inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

inline void* data_of(const DLTensor* tensor) { return static_cast<char*>(tensor->data) + tensor->byte_offset; }

inline DLDataType launcher_dtype() {
  if (kart_dtype == KART_FLOAT32) return {kDLFloat, 32, 1};
  return {static_cast<uint8_t>(kart_dtype == KART_BFLOAT16 ? kDLBfloat : kDLFloat), 16, 1};
}

// A tensor argument as rows; a vector is one row.
struct Rows {
  int arg;
  const DLTensor* tensor;
  int64_t count;
  int64_t columns;
  kart_rows layout;

  bool empty() const { return count == 0 || columns == 0; }
};

// One call: its arguments by number, their names for messages.
class Call {
 public:
  Call(const char* op, const char* const* names, int count, const TVMFFIAny* args, int given)
      : op_(op), names_(names), args_(args) {
    if (given != count) fail("TypeError", "%s takes %d arguments, got %d", op, count, given);
  }

  const char* op() const { return op_; }

  Rows rows(int arg) { return rows(arg, element_type()); }

  Rows rows(int arg, DLDataType type) {
    const DLTensor* tensor = this->tensor(arg, {type});
    if (tensor->ndim < 1) fail("ValueError", "%s: %s must have at least one dimension", op_, names_[arg]);
    const int last = tensor->ndim - 1;
    Rows rows{arg, tensor, 1, tensor->shape[last], {data_of(tensor), 1, 0, 0}};
    for (int d = 0; d < last; ++d) rows.count *= tensor->shape[d];
    if (rows.empty()) return rows;
    if (rows.count > INT32_MAX || rows.columns > INT32_MAX) {
      fail("ValueError", "%s: %s may have %d rows and columns at most, got shape %s", op_, names_[arg], INT32_MAX,
           shape_text(tensor).chars);
    }
    if (rows.columns > 1 && stride(tensor, last) != 1) {
      fail("ValueError", "%s: the last dimension of %s must be contiguous, got stride %lld", op_, names_[arg],
           static_cast<long long>(stride(tensor, last)));
    }
    fold(rows);
    return rows;
  }

  // Rows of the shape of `model`, but of `columns` columns.
  Rows rows_like(int arg, const Rows& model, int64_t columns) {
    const Rows rows = this->rows(arg);
    expect_shape(rows, model.tensor->shape, model.tensor->ndim, columns);
    return rows;
  }

  Rows rows_like(int arg, const Rows& model) { return rows_like(arg, model, model.columns); }

  Rows vector(int arg, int64_t size) {
    const Rows rows = this->rows(arg);
    expect_shape(rows, &size, 1, size);
    return rows;
  }

  // A table of any number of rows, but of a type of its own.
  Rows table(int arg, DLDataType type, int64_t columns) {
    const Rows rows = this->rows(arg, type);
    const int64_t shape[] = {rows.tensor->shape[0], columns};
    expect_shape(rows, shape, 2, columns);
    if (rows.count == 0) fail("ValueError", "%s: %s must have at least one row", op_, names_[arg]);
    return rows;
  }

  // A contiguous tensor of one of several types.
  const DLTensor* dense(int arg, std::initializer_list<DLDataType> types, const int64_t* shape, int ndim) {
    const DLTensor* tensor = this->tensor(arg, types);
    if (tensor->ndim != ndim || memcmp(tensor->shape, shape, ndim * sizeof *shape) != 0) {
      fail("ValueError", "%s: %s must have shape %s, got %s", op_, names_[arg],
           shape_text(shape, ndim, ndim ? shape[ndim - 1] : 0).chars, shape_text(tensor).chars);
    }
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; step *= shape[d--]) {
      if (shape[d] > 1 && stride(tensor, d) != step) {
        fail("ValueError", "%s: %s must be contiguous", op_, names_[arg]);
      }
    }
    return tensor;
  }

  // Of either sign, and finite as the float that kernels compute with.
  float number(int arg) {
    const double value = any_number(arg);
    if (!is_finite(value)) fail("ValueError", "%s: %s must be finite in float32, got %g", op_, names_[arg], value);
    return static_cast<float>(value);
  }

  float epsilon(int arg) {
    const double value = any_number(arg);
    if (!(value >= 0 && is_finite(value))) {
      fail("ValueError", "%s: %s must be finite and not negative, got %g", op_, names_[arg], value);
    }
    return static_cast<float>(value);
  }

  // Bounds are allowed values too.
  int64_t integer(int arg, int64_t low = INT64_MIN, int64_t high = INT64_MAX) {
    const TVMFFIAny& given = args_[arg];
    if (given.type_index != kTVMFFIInt) fail("TypeError", "%s: %s must be an integer", op_, names_[arg]);
    if (given.v_int64 < low || given.v_int64 > high) {
      fail("ValueError", "%s: %s must be from %lld to %lld, got %lld", op_, names_[arg], static_cast<long long>(low),
           static_cast<long long>(high), static_cast<long long>(given.v_int64));
    }
    return given.v_int64;
  }

  bool flag(int arg) {
    const TVMFFIAny& given = args_[arg];
    if (given.type_index != kTVMFFIBool) fail("TypeError", "%s: %s must be True or False", op_, names_[arg]);
    return given.v_int64 != 0;
  }

  // Every element of `out` is written once, and none that another row of `in` still has to read.  `in_place` allows
  // rows that start at the same elements.
  void expect_apart(const Rows& out, const Rows& in, bool in_place = false) {
    if (out.empty() || in.empty()) return;
    const Block a = block(out), b = block(in);
    if (a.overlaps_itself) fail("ValueError", "%s: %s is written, but its rows overlap", op_, names_[out.arg]);
    if (a.low >= b.high || b.low >= a.high) return;
    const kart_rows &x = out.layout, &y = in.layout;
    const bool parallel = out.count == in.count && x.inner == y.inner && x.inner_stride == y.inner_stride &&
                          x.outer_stride == y.outer_stride;
    if (in_place && parallel && x.data == y.data) return;
    if (a.period > 0 && a.period == b.period) {  // columns of one wider tensor
      const int64_t shift = ((a.low - b.low) % a.period + a.period) % a.period;
      if (shift >= b.width && shift + a.width <= a.period) return;
    }
    fail("ValueError", "%s: %s overlaps %s in memory", op_, names_[out.arg], names_[in.arg]);
  }

  int device() const { return device_.device_id; }

  // Runs the launcher on the stream that the caller's framework has chosen.
  template <class Args>
  void launch(int (*launcher)(const Args*, void*), const Args& args) {
    const bool host = device_.device_type == kDLCPU;
    void* stream = host ? nullptr : TVMFFIEnvGetStream(device_.device_type, device_.device_id);
    const int code = launcher(&args, stream);
    if (code != 0) {
      fail("RuntimeError", "%s: the launch on %s failed: %s", op_, device_text(device_).chars, kart_error(code));
    }
  }

 private:
  // Where rows lie, in bytes: blocks of `width` bytes, one every `period` bytes (0: there is one block).
  struct Block {
    int64_t low, high, width, period;
    bool overlaps_itself;
  };

  static int64_t stride(const DLTensor* tensor, int d) {
    if (tensor->strides != nullptr) return tensor->strides[d];
    int64_t stride = 1;
    for (int i = tensor->ndim - 1; i > d; --i) stride *= tensor->shape[i];
    return stride;
  }

  DLDataType element_type() {
    if (kart_dtype == 0) fail("RuntimeError", "%s: the launch is impossible: %s", op_, kart_error(0));
    return launcher_dtype();
  }

  static bool is_finite(double value) { return fabs(value) <= __FLT_MAX__; }

  double any_number(int arg) {
    const TVMFFIAny& given = args_[arg];
    if (given.type_index == kTVMFFIInt) return static_cast<double>(given.v_int64);
    if (given.type_index != kTVMFFIFloat) fail("TypeError", "%s: %s must be a number", op_, names_[arg]);
    return given.v_float64;
  }

  // A tensor of one of these types, on the device of the first one.
  const DLTensor* tensor(int arg, std::initializer_list<DLDataType> types) {
    const TVMFFIAny& given = args_[arg];
    const DLTensor* tensor = given.type_index == kTVMFFIDLTensorPtr ? static_cast<const DLTensor*>(given.v_ptr)
                             : given.type_index == kTVMFFITensor    ? TVMFFITensorGetDLTensorPtr(given.v_obj)
                                                                    : nullptr;
    if (tensor == nullptr) fail("TypeError", "%s: %s must be a tensor", op_, names_[arg]);
    bool known = false;
    for (const DLDataType type : types) {
      // numpy has no bfloat16, so its bits may come as uint16.
      known |= same(tensor->dtype, type.code == kDLBfloat ? DLDataType{kDLUInt, 16, 1} : type);
      known |= same(tensor->dtype, type);
    }
    if (!known) {
      const Text first = dtype_text(*types.begin()), last = dtype_text(*(types.end() - 1));
      fail("TypeError", "%s: %s must be %s%s%s, got %s", op_, names_[arg], first.chars, types.size() > 1 ? " or " : "",
           types.size() > 1 ? last.chars : "", dtype_text(tensor->dtype).chars);
    }
    check_device(arg, tensor->device);
    const int bytes = tensor->dtype.bits / 8;
    if (reinterpret_cast<uintptr_t>(data_of(tensor)) % bytes != 0) {
      fail("ValueError", "%s: %s must be aligned to its elements of %d bytes", op_, names_[arg], bytes);
    }
    return tensor;
  }

  void check_device(int arg, DLDevice got) {
    if (arg == 0) {
      device_ = got;
      if (got.device_type == kart_device) return;
      fail("ValueError", "%s: this kernel runs on %s, but %s is on %s", op_, kart_device == KART_CPU ? "cpu" : "cuda",
           names_[arg], device_text(got).chars);
    }
    if (got.device_type != device_.device_type || got.device_id != device_.device_id) {
      fail("ValueError", "%s: %s must be on %s as %s is, got %s", op_, names_[arg], device_text(device_).chars,
           names_[0], device_text(got).chars);
    }
  }

  void expect_shape(const Rows& rows, const int64_t* shape, int ndim, int64_t last) {
    const DLTensor* got = rows.tensor;
    if (got->ndim != ndim || memcmp(got->shape, shape, (ndim - 1) * sizeof *shape) != 0 || rows.columns != last) {
      fail("ValueError", "%s: %s must have shape %s, got %s", op_, names_[rows.arg],
           shape_text(shape, ndim, last).chars, shape_text(got).chars);
    }
  }

  void fold(Rows& rows) {
    int levels = 0;
    int64_t next = 0;  // the stride with which the next dimension folds into the level below it
    int64_t* const strides[] = {&rows.layout.inner_stride, &rows.layout.outer_stride};
    for (int d = rows.tensor->ndim - 2; d >= 0; --d) {
      const int64_t size = rows.tensor->shape[d], step = stride(rows.tensor, d);
      if (size == 1) continue;
      if (levels == 0 || step != next) {
        if (levels == 2) {
          fail("ValueError", "%s: the strides of %s do not fold into two; make a contiguous copy", op_,
               names_[rows.arg]);
        }
        *strides[levels++] = step;
      }
      if (levels == 1) rows.layout.inner *= size;
      next = step * size;
    }
  }

  static Block block(const Rows& rows) {
    const int64_t bytes = rows.tensor->dtype.bits / 8;
    struct {
      int64_t step, count;
    } near{rows.layout.inner_stride, rows.layout.inner}, far{rows.layout.outer_stride, rows.count / rows.layout.inner};
    const int64_t start = static_cast<int64_t>(reinterpret_cast<intptr_t>(rows.layout.data));
    int64_t low = start, high = start + rows.columns * bytes;
    for (const auto& level : {near, far}) {
      const int64_t reach = level.step * (level.count - 1) * bytes;
      (reach < 0 ? low : high) += reach;
    }
    near.step = near.step < 0 ? -near.step : near.step;
    far.step = far.step < 0 ? -far.step : far.step;
    if (far.count == 1 || (near.count > 1 && near.step > far.step)) {
      const auto swapped = near;
      near = far;
      far = swapped;
    }
    const int64_t width = near.step * (near.count - 1) + rows.columns;
    const bool overlaps = (near.count > 1 && near.step < rows.columns) || (far.count > 1 && far.step < width);
    return {low, high, width * bytes, far.count > 1 ? far.step * bytes : 0, overlaps};
  }

  const char* op_;
  const char* const* names_;
  const TVMFFIAny* args_;
  DLDevice device_{};
};

template <int kCount>
int run(const char* op, const char* const (&names)[kCount], void (*body)(Call&), const TVMFFIAny* args, int given) {
  try {
    Call call(op, names, kCount, args, given);
    body(call);
    return 0;
  } catch (const Error& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind, error.text);
    return -1;
  }
}

}  // namespace kart

// Exports `function`, a void(kart::Call&), under its own name; the rest are the names of its arguments.
#define KART_EXPORT(function, ...)                                                                                  \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##function(void*, const TVMFFIAny* args,          \
                                                                             int32_t given, TVMFFIAny*) {           \
    static const char* const names[] = {__VA_ARGS__};                                                               \
    return kart::run(#function, names, function, args, given);                                                      \
  }
