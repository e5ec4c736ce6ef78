// What the objects of CuTe DSL lack to be linked without its runtime library of 43 MB: the one function in it that is
// neither in the archive which comes beside it nor in the CUDA runtime.  The archive's functions each jump to that of
// the CUDA runtime of the same name, which is linked in too.
#include <stdint.h>

extern "C" {
const char* cudaGetErrorName(int code);
const char* cudaGetErrorString(int code);

__attribute__((visibility("hidden"))) void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*raise)(const char* kind, const char** parts, int32_t count), int32_t code) {
  const char* parts[] = {"the launch failed: ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")"};
  raise("RuntimeError", parts, sizeof parts / sizeof *parts);
}
}

// A note as images have it (kartifacts/build/images.py): the driver must be one for this CUDA runtime.
__asm__(".pushsection .kart.launch,\"\",@progbits\n.ascii \"toolkit " KART_TOOLKIT "\\n\"\n.popsection");
