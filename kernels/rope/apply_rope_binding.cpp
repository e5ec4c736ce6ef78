// The exported function `apply_rope(q, k, positions, cos_sin_cache)`.
#include "apply_rope.h"
#include "kart/ffi.h"

namespace {

constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kFloat32{kDLFloat, 32, 1};

// A CPU can look at the positions before anything is written; a GPU's kernels give NaN.
void check_positions(kart::Call& call, const apply_rope_args& args) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    const long long position = args.position_bytes == 8 ? static_cast<const int64_t*>(args.positions)[token]
                                                        : static_cast<const int*>(args.positions)[token];
    if (position < 0 || position >= args.cache_rows) {
      kart::fail("ValueError", "%s: positions must be at least 0 and below %lld, the rows of cos_sin_cache, got %lld",
                 call.op(), static_cast<long long>(args.cache_rows), position);
    }
  }
}

void apply_rope(kart::Call& call) {
  const kart::Rows q = call.rows(0), k = call.rows(1);
  const int ndim = q.tensor->ndim;
  if (ndim < 3) {
    kart::fail("ValueError", "%s: q must have the shape (..., tokens, heads, head_dim), got %s", call.op(),
               kart::shape_text(q.tensor).chars);
  }
  if (q.columns != kart_head_dim) {
    kart::fail("ValueError", "%s: this kernel is for heads of %d, but q has shape %s", call.op(), kart_head_dim,
               kart::shape_text(q.tensor).chars);
  }
  const int64_t* shape = q.tensor->shape;
  if (k.tensor->ndim != ndim || k.columns != q.columns || memcmp(k.tensor->shape, shape, (ndim - 2) * sizeof *shape)) {
    kart::fail("ValueError", "%s: k must have the shape of q, but for the number of heads: q has %s, k has %s",
               call.op(), kart::shape_text(q.tensor).chars, kart::shape_text(k.tensor).chars);
  }
  const DLTensor* positions = call.dense(2, {kInt32, kInt64}, shape, ndim - 2);
  const kart::Rows cache = call.table(3, kFloat32, q.columns);
  call.expect_apart(q, k);
  call.expect_apart(k, q);
  call.expect_apart(q, cache);
  call.expect_apart(k, cache);
  if (q.empty() && k.empty()) return;
  apply_rope_args args{};
  args.q = q.layout;
  args.k = k.layout;
  args.positions = kart::data_of(positions);
  args.cache = static_cast<const float*>(cache.layout.data);
  args.cache_stride = cache.layout.inner_stride;
  args.cache_rows = cache.count;
  args.q_heads = static_cast<int>(shape[ndim - 2]);
  args.k_heads = static_cast<int>(k.tensor->shape[ndim - 2]);
  args.tokens = q.empty() ? k.count / args.k_heads : q.count / args.q_heads;
  args.position_bytes = positions->dtype.bits / 8;
  args.device = call.device();
  if (kart_device == KART_CPU) check_positions(call, args);
  call.launch(kart_launch, args);
}

}  // namespace

KART_EXPORT(apply_rope, "q", "k", "positions", "cos_sin_cache")
