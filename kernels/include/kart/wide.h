// Whether rows may be moved 16 bytes at a time: host code, for launchers that choose between two kernels.
#pragma once

#include "kart/launch.h"

namespace kart {

constexpr int kWideBytes = 16;

inline int element_bytes() { return kart_dtype == KART_FLOAT32 ? 4 : 2; }

// Elements of the widest load.
inline int wide_count() { return kWideBytes / element_bytes(); }

inline bool is_wide(const void* data) { return reinterpret_cast<uintptr_t>(data) % kWideBytes == 0; }

inline bool is_wide(const kart_rows& rows) {
  return is_wide(rows.data) && rows.inner_stride % wide_count() == 0 && rows.outer_stride % wide_count() == 0;
}

}  // namespace kart
