// Sums over the threads that share a row: those of one threadIdx.y, a power of two up to 32 or a multiple of 32.
#pragma once

namespace kart {

// Every thread of a row gets the sum.  Each call of a kernel needs a `partial` of its own: it is written only once.
__device__ inline float sum_over_row(float value, float (&partial)[32]) {
#pragma unroll
  for (unsigned offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, value, offset);
    if (offset < blockDim.x) value += other;
  }
  if (blockDim.x <= 32) return value;  // then no other warp has a part of the row
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? partial[lane] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

}  // namespace kart
