"""What a cold JIT of one kernel costs, beside tvm_ffi.cpp.build of the same kernel with its binding in one source file.

    python bench/jit_cold.py [--runs 5] [--only cxx|nvcc]

Each run is a process of its own with an empty workspace.  Times are of the build alone: imports are not counted, the
search for compilers is.  CPU is that of the process and all its children: the figure to trust on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OP = "norm/rmsnorm"
AXES = {"dtype": "bfloat16"}
ARCHS = {"cxx": "cpu:x86-64-v3", "nvcc": "9.0a"}
LIMITS = {"cxx": 5.0, "nvcc": 6.0}  # CPU seconds
KERNELS = Path(__file__).resolve().parent.parent / "kernels"

BINDING = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "%(launcher)s"

static void rmsnorm(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out, double eps) {
  if (x.ndim() != 2 || out.ndim() != 2 || weight.ndim() != 1) TVM_FFI_THROW(ValueError) << "bad dimensions";
  if (x.size(1) != weight.size(0) || out.size(0) != x.size(0) || out.size(1) != x.size(1)) {
    TVM_FFI_THROW(ValueError) << "shapes differ";
  }
  if (x.dtype().code != kDLBfloat || x.dtype().bits != 16) TVM_FFI_THROW(TypeError) << "expected bfloat16";
  const DLDevice device = x.device();
  const kart_rows in{x.data_ptr(), x.size(0), 0, x.size(1)}, to{out.data_ptr(), x.size(0), 0, x.size(1)};
  const rmsnorm_args args{in, to, weight.data_ptr(), x.size(0), x.size(1), static_cast<float>(eps), device.device_id};
  void* stream = device.device_type == kDLCPU ? nullptr : TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (kart_launch(&args, stream) != 0) TVM_FFI_THROW(RuntimeError) << "the launch failed";
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, rmsnorm);
"""


def build_ours(toolchain: str, folder: Path) -> str:
    from kartifacts import config
    from kartifacts.build.jit import build_one
    from kartifacts.build.library import open_library
    from kartifacts.model.arch import parse_arch

    settings = config.read(overrides={"workspace": folder / "workspace"})
    with measured():
        spec = open_library(KERNELS).spec(OP, AXES, parse_arch(ARCHS[toolchain]))
        return str(build_one(spec, settings).path)


def build_peer(toolchain: str, folder: Path) -> str:
    import tvm_ffi.cpp

    suffix, launcher = {"cxx": ("cpp", "rmsnorm_cpu.cpp"), "nvcc": ("cu", "rmsnorm.cu")}[toolchain]
    source = folder / f"peer.{suffix}"
    source.write_text(BINDING % {"launcher": launcher})
    flags = ["-DKART_DTYPE=2", "-O3", "-march=x86-64-v3"]
    link = []
    if toolchain == "nvcc":
        # It links with the shared CUDA runtime, which not every toolkit has; so both link with the static one.
        (folder / "libcudart.a").symlink_to(static_runtime(folder))
        link = [f"-L{folder}", "-ldl", "-lrt", "-lpthread"]
    with measured():
        return str(
            tvm_ffi.cpp.build(
                "rmsnorm",
                sources=str(source),
                extra_cflags=flags,
                extra_cuda_cflags=["-DKART_DTYPE=2"],
                extra_ldflags=link,
                extra_include_paths=[str(KERNELS / "include"), str(KERNELS / "norm")],
                build_directory=str(folder / "build"),
            )
        )


def static_runtime(folder: Path) -> str:
    from kartifacts import config
    from kartifacts.build.toolchains import nvcc

    return nvcc.discover(config.read(overrides={"workspace": folder / "probes"})).facts["runtime"]


class measured:  # noqa: N801  used as a with statement
    """Prints the CPU and wall seconds of its body as JSON."""

    def __enter__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), cpu_seconds()

    def __exit__(self, *raised: object) -> None:
        print(json.dumps({"cpu": cpu_seconds() - self.cpu, "wall": time.perf_counter() - self.wall}))


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


BUILDERS = {"kartifacts": build_ours, "tvm_ffi.cpp.build": build_peer}


def one_run(builder: str, toolchain: str) -> dict[str, float]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KARTIFACTS_")}
    environ["TVM_FFI_CUDA_ARCH_LIST"] = ARCHS["nvcc"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", builder, toolchain, folder]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{builder} with {toolchain} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=sorted(ARCHS))
    parser.add_argument("--one", nargs=3, metavar=("BUILDER", "TOOLCHAIN", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        builder, toolchain, folder = args.one
        BUILDERS[builder](toolchain, Path(folder))
        return
    print(f"cold JIT of {OP} {AXES['dtype']}, median of {args.runs} runs, seconds")
    print(f"{'toolchain':<12}{'arch':<16}{'builder':<20}{'cpu':>8}{'wall':>8}{'ratio':>8}{'limit':>8}")
    for toolchain in [args.only] if args.only else sorted(ARCHS):
        # In turns, so that whatever else the machine does meets both alike.
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in BUILDERS}
        for _ in range(args.runs):
            for name in BUILDERS:
                runs[name].append(one_run(name, toolchain))
        medians = {
            name: {kind: statistics.median(run[kind] for run in found) for kind in ("cpu", "wall")}
            for name, found in runs.items()
        }
        for name, median in medians.items():
            ratio = median["cpu"] / medians["kartifacts"]["cpu"]
            limit = f"{LIMITS[toolchain]:8.1f}" if name == "kartifacts" else ""
            figures = f"{median['cpu']:8.2f}{median['wall']:8.2f}{ratio:8.2f}{limit}"
            print(f"{toolchain:<12}{ARCHS[toolchain]:<16}{name:<20}{figures}")


if __name__ == "__main__":
    main()
