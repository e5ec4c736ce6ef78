// Launches a kernel that is linked with its launcher, on the device that its tensors are on, whichever one is current.
#pragma once

#include "kart/launch.h"
#include "kart/wide.h"

namespace kart {

template <class... Args>
cudaError_t launch(void (*kernel)(Args...), int64_t blocks, dim3 block, int device, void* stream, Args... args) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error != cudaSuccess) return error;
  const bool elsewhere = current != device;
  if (elsewhere && (error = cudaSetDevice(device)) != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(stream);
  error = blocks > INT32_MAX ? cudaErrorInvalidConfiguration : cudaLaunchKernelEx(&config, kernel, args...);
  if (elsewhere) cudaSetDevice(current);
  return error;
}

}  // namespace kart

const int kart_device = KART_CUDA;
const int kart_dtype = KART_DTYPE;
const char* kart_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
