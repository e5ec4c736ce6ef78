"""What a cold JIT costs: of our rmsnorm, and of the same device code as users of other tools would have it compiled.

    python bench/jit_cold.py [--runs 5] [--peers PYTHON]

PYTHON is an interpreter of an environment with torch, flashinfer-python and kartifacts; without it those two are left
out.  Each run is a process of its own with an empty workspace.  CPU is that of the process and all its
children: the figure to trust on a busy machine.  `build` is the build alone, `process` the interpreter and its imports
too.  Compilers are looked for within `build`.

Contenders:

    nvrtc           an image by NVRTC, attached to a launcher that came with the package; PATH is empty
    nvrtc, second   a further specialisation in the same process
    nvrtc, launcher the same where no launcher came along: it is compiled once per op
    nvcc            the image by nvcc
    cxx             the kernel for CPUs
    tvm_ffi         tvm_ffi.cpp.build of device code and typed binding in one file
    torch           torch.utils.cpp_extension.load of the device code, and a binding with torch/extension.h
    flashinfer      FlashInfer's own silu_and_mul, as its JIT builds it
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ARCH = "9.0a"
KERNELS = Path(__file__).resolve().parent.parent / "kernels"
PREBUILT = "KART_BENCH_PREBUILT"  # a copy of the library with launchers
OURS = ("nvrtc", "nvrtc, second", "nvrtc, launcher", "nvcc", "cxx")
PEERS = ("tvm_ffi", "torch", "flashinfer")
LIMITS = {"tvm_ffi": 0.15, "torch": 0.03, "flashinfer": 0.2}  # of nvrtc by this peer

LAUNCH = """
#include "norm/rmsnorm.cu"

int peer_launch(const rmsnorm_args* args, void* stream) {
  rmsnorm_held_1<<<args->rows, 256, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}
"""

TVM_FFI = (
    """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
"""
    + LAUNCH
    + """
static void rmsnorm(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out, double eps) {
  if (x.ndim() != 2 || out.ndim() != 2 || weight.ndim() != 1) TVM_FFI_THROW(ValueError) << "bad dimensions";
  if (x.size(1) != weight.size(0) || out.size(0) != x.size(0) || out.size(1) != x.size(1)) {
    TVM_FFI_THROW(ValueError) << "shapes differ";
  }
  if (x.dtype().code != kDLBfloat || x.dtype().bits != 16) TVM_FFI_THROW(TypeError) << "expected bfloat16";
  const DLDevice device = x.device();
  const kart_rows in{x.data_ptr(), x.size(0), 0, x.size(1)}, to{out.data_ptr(), x.size(0), 0, x.size(1)};
  const rmsnorm_args args{in, to, weight.data_ptr(), x.size(0), x.size(1), static_cast<float>(eps), device.device_id};
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (peer_launch(&args, stream) != 0) TVM_FFI_THROW(RuntimeError) << "the launch failed";
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, rmsnorm);
"""
)

TORCH = """
#include <torch/extension.h>

#include "norm/rmsnorm.h"

int peer_launch(const rmsnorm_args* args, void* stream);

static void rmsnorm(torch::Tensor x, torch::Tensor weight, torch::Tensor out, double eps) {
  TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && weight.dim() == 1, "bad dimensions");
  TORCH_CHECK(x.size(1) == weight.size(0) && out.sizes() == x.sizes(), "shapes differ");
  TORCH_CHECK(x.scalar_type() == torch::kBFloat16, "expected bfloat16");
  const kart_rows in{x.data_ptr(), x.size(0), 0, x.size(1)}, to{out.data_ptr(), x.size(0), 0, x.size(1)};
  const rmsnorm_args args{in, to, weight.data_ptr(), x.size(0), x.size(1), static_cast<float>(eps), 0};
  TORCH_CHECK(peer_launch(&args, nullptr) == 0, "the launch failed");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("rmsnorm", &rmsnorm); }
"""


# -- one run, in a process of its own ----------------------------------------------------------------------------------


def ours(contender: str, folder: Path) -> None:
    from kartifacts import config
    from kartifacts.build.jit import build_one
    from kartifacts.build.library import open_library
    from kartifacts.model.arch import parse_arch

    overrides = {"workspace": folder / "workspace", "cuda_compiler": "nvcc" if contender == "nvcc" else "nvrtc"}
    settings = config.read(overrides=overrides)
    root = KERNELS if contender == "nvrtc, launcher" else Path(os.environ[PREBUILT])
    arch = parse_arch("cpu:x86-64-v3" if contender == "cxx" else ARCH)
    if contender == "nvrtc, second":
        library = open_library(root, "kartifacts")
        build_one(library.spec("norm/rmsnorm", {"dtype": "float16"}, arch), settings)
        with measured():
            build_one(library.spec("norm/rmsnorm", {"dtype": "bfloat16"}, arch), settings)
        return
    with measured():
        spec = open_library(root, "kartifacts").spec("norm/rmsnorm", {"dtype": "bfloat16"}, arch)
        build_one(spec, settings)


def tvm_ffi(folder: Path) -> None:
    import tvm_ffi.cpp

    source = folder / "peer.cu"
    source.write_text(TVM_FFI)
    # It links with the shared CUDA runtime, which not every toolkit has; so it is given the static one.
    (folder / "libcudart.a").symlink_to(static_runtime())
    with measured():
        tvm_ffi.cpp.build(
            "rmsnorm",
            sources=str(source),
            extra_cuda_cflags=["-DKART_DTYPE=2"],
            extra_ldflags=[f"-L{folder}", "-ldl", "-lrt", "-lpthread"],
            extra_include_paths=includes(),
            build_directory=str(folder / "build"),
        )


def torch(folder: Path) -> None:
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = cuda_home()  # torch for CPUs does not look for it
    (folder / "kernel.cu").write_text(LAUNCH)
    (folder / "binding.cpp").write_text(TORCH)
    (folder / "extensions").mkdir()
    define = ["-DKART_DTYPE=2"]
    with measured():
        cpp_extension.load(
            "rmsnorm",
            [str(folder / "kernel.cu"), str(folder / "binding.cpp")],
            extra_cflags=define,
            extra_cuda_cflags=define,
            extra_include_paths=includes(),
            is_python_module=False,
        )


def flashinfer(_: Path) -> None:
    from flashinfer.jit.activation import gen_act_and_mul_module

    with measured():
        gen_act_and_mul_module("silu").build(verbose=False)


def includes() -> list[str]:
    return [str(KERNELS), str(KERNELS / "include"), str(KERNELS / "norm")]


def static_runtime() -> str:
    from kartifacts import config
    from kartifacts.build.toolchains import nvcc

    return nvcc.discover(config.read()).facts["runtime"]


def cuda_home() -> str:
    from kartifacts import config
    from kartifacts.build.toolchains import nvcc

    return str(nvcc.discover(config.read()).root)


@contextmanager
def measured() -> Iterator[None]:
    """Print the CPU and wall seconds of the body, and the CPU seconds of the process up to its end."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    yield
    found = {"cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - wall, "process": cpu_seconds()}
    print(json.dumps(found))


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# -- all runs ----------------------------------------------------------------------------------------------------------


def one_run(contender: str, python: str, shared: Path) -> dict[str, float]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KARTIFACTS_")}
    with tempfile.TemporaryDirectory() as folder:
        environ |= {
            PREBUILT: str(shared / "kernels"),
            "TVM_FFI_CUDA_ARCH_LIST": ARCH,
            "TORCH_CUDA_ARCH_LIST": ARCH,
            "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
            "FLASHINFER_CUDA_ARCH_LIST": ARCH,
            "FLASHINFER_WORKSPACE_BASE": folder,
            # Of the driver's and torch's libraries for GPUs it is enough that the linker finds them.
            "LIBRARY_PATH": str(shared / "stubs"),
            "LD_LIBRARY_PATH": str(shared / "stubs"),
        }
        if contender in ("torch", "flashinfer"):
            environ["CUDA_HOME"] = cuda_home()
        if contender.startswith("nvrtc") and contender != "nvrtc, launcher":
            environ["PATH"] = ""
        command = [python, __file__, "--one", contender, folder]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{contender} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    found: dict[str, float] = json.loads(line)
    return found


def prepare(shared: Path) -> None:
    from kartifacts import config
    from kartifacts.build.launchers import prebuild
    from kartifacts.build.library import open_library

    shutil.copytree(KERNELS, shared / "kernels")
    library = open_library(shared / "kernels", "kartifacts")
    prebuild(library, shared / "kernels", config.read(overrides={"workspace": shared / "workspace"}))
    (shared / "stubs").mkdir()
    for name in ("cuda", "c10_cuda", "torch_cuda"):
        library_file = shared / "stubs" / f"lib{name}.so"
        subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-o", str(library_file)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", metavar="PYTHON", help="of an environment with torch and flashinfer-python")
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        contender, folder = args.one[0], Path(args.one[1])
        peers = {"tvm_ffi": tvm_ffi, "torch": torch, "flashinfer": flashinfer}
        peers[contender](folder) if contender in peers else ours(contender, folder)
        return
    pythons = dict.fromkeys((*OURS, "tvm_ffi"), sys.executable)
    if args.peers:
        pythons |= {"torch": args.peers, "flashinfer": args.peers}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as shared:
        prepare(Path(shared))
        for _ in range(args.runs):  # in turns, so that whatever else the machine does meets all alike
            for name, python in pythons.items():
                runs[name].append(one_run(name, python, Path(shared)))
    table(args.runs, runs)


def table(count: int, runs: dict[str, list[dict[str, float]]]) -> None:
    medians = {
        name: {kind: statistics.median(run[kind] for run in found) for kind in found[0]} for name, found in runs.items()
    }
    print(f"cold JIT of rmsnorm bfloat16 for {ARCH}, median of {count} runs, seconds")
    print(f"{'':<18}{'CPU: build':>11}{'process':>9}{'wall':>7}{'nvrtc is':>11}{'limit':>7}")
    for name, found in medians.items():
        ratio = medians["nvrtc"]["cpu"] / found["cpu"]
        limit = f"{LIMITS[name]:7.2f}" if name in LIMITS else ""
        print(f"{name:<18}{found['cpu']:>11.2f}{found['process']:>9.2f}{found['wall']:>7.2f}{ratio:>11.3f}{limit}")


if __name__ == "__main__":
    main()
