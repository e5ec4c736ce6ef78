"""What it costs to find that nothing has changed, for a kernel that reaches 200 headers of its own.

    python bench/noop.py [--rounds 15] [--peers PYTHON]

PYTHON is an interpreter of an environment with torch and kartifacts; without it torch is left out.  The headers include
each other in ten groups of twenty.  Everybody builds the same source once; then each check is a process of its own, in
turns.  `first` is the first check of a process, after its imports, and what is printed as ratios; `further` the mean of
the next 20, as of a program with many kernels.  CPU is that of the process and its children, in milliseconds.

Contenders:

    cxx        kartifacts: the library is opened anew, and `build_one` finds the kernel for CPUs
    nvrtc      the same for an image of device code, where there is an NVRTC
    tvm_ffi    tvm_ffi.cpp.build, which starts ninja
    ninja      ninja alone, in the directory that tvm_ffi left
    torch      torch.utils.cpp_extension.load, which starts ninja and loads; it skips all further checks of a process
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
from collections.abc import Callable
from pathlib import Path

GOAL = 5.0  # milliseconds of CPU, of ours
GROUPS, MEMBERS = 10, 20
FURTHER = 20
AXES = {"dtype": "float32"}
ARCHS = {"cxx": "cpu:x86-64" if os.uname().machine == "x86_64" else "cpu:aarch64", "nvrtc": "9.0a"}

OP_TOML = """
schema = 1
family = "many"

[[op]]
name = "many"
summary = "Adds what 200 headers define."
exports = ["many"]
axes.dtype = ["float32"]

[op.device.cpu]
toolchain = "cxx"
sources = ["many.cpp"]
host_sources = ["binding.cpp"]

[op.device.cuda]
toolchain = "nvrtc"
sources = ["many.cu"]
"""
COUNT = '#include "group0/h0.h"\n{} long many_headers() {{ return MANY_0_0; }}\n'
OURS = """
#include <tvm/ffi/c_api.h>
long many_headers();
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_many(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = many_headers();
  return 0;
}
"""
TVM_FFI = "#include <tvm/ffi/function.h>\nlong many_headers();\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(many, many_headers);\n"
TORCH = """
#include <torch/extension.h>
long many_headers();
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("many", &many_headers); }
"""


def header(group: int, member: int) -> str:
    """One of the headers: it includes the next of its group, and the first of a group includes the next group's."""
    wanted = [(group, member + 1)] if member + 1 < MEMBERS else []
    if member == 0 and group + 1 < GROUPS:
        wanted.append((group + 1, 0))
    includes = "".join(f'#include "group{of}/h{number}.h"\n' for of, number in wanted)
    total = " + ".join(["1L", *(f"MANY_{of}_{number}" for of, number in wanted)])
    said = "// what a header says\n" * 100
    return f"#pragma once\n{includes}#define MANY_{group}_{member} ({total})\n{said}"


def write(root: Path) -> None:
    """Write the library, which is also where the peers find their sources."""
    files = {
        "many/op.toml": OP_TOML,
        "many/many.cpp": COUNT.format(""),
        "many/many.cu": COUNT.format('extern "C" __global__ void many() {}\n__device__'),
        "many/binding.cpp": OURS,
        "many/tvm_ffi.cpp": TVM_FFI,
        "many/torch.cpp": TORCH,
    }
    for group in range(GROUPS):
        files |= {f"include/group{group}/h{member}.h": header(group, member) for member in range(MEMBERS)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# -- one process -------------------------------------------------------------------------------------------------------


def ours(contender: str, root: Path, place: Path) -> Callable[[], object]:
    from importlib import import_module

    from kartifacts import config
    from kartifacts.build.jit import build_one
    from kartifacts.build.library import open_library
    from kartifacts.model.arch import parse_arch

    import_module(f"kartifacts.build.toolchains.{contender}")
    settings = config.read(overrides={"workspace": place})
    arch = parse_arch(ARCHS[contender])

    def check() -> object:
        return build_one(open_library(root, workspace=settings.workspace).spec("many/many", AXES, arch), settings)

    return check


def tvm_ffi(root: Path, place: Path) -> Callable[[], object]:
    import tvm_ffi.cpp

    sources = [str(root / "many" / name) for name in ("many.cpp", "tvm_ffi.cpp")]
    include = [str(root / "include")]
    return lambda: tvm_ffi.cpp.build("many", sources=sources, extra_include_paths=include, build_directory=str(place))


def ninja(_: Path, place: Path) -> Callable[[], object]:
    command = ["ninja", "-C", str(place.with_name("tvm_ffi"))]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def torch(root: Path, place: Path) -> Callable[[], object]:
    from torch.utils import cpp_extension

    place.mkdir(exist_ok=True)
    sources = [str(root / "many" / name) for name in ("many.cpp", "torch.cpp")]
    options = {"extra_include_paths": [str(root / "include")], "build_directory": str(place)}
    return lambda: cpp_extension.load("many", sources, is_python_module=False, **options)


def one(contender: str, root: Path, place: Path) -> dict[str, float]:
    """Milliseconds of the checks in this process."""
    peers = {"tvm_ffi": tvm_ffi, "ninja": ninja, "torch": torch}
    check = peers[contender](root, place) if contender in peers else ours(contender, root, place)
    first = timed(check, 1)
    further = timed(check, FURTHER)
    return {"cpu": first[0], "wall": first[1], "further": further[0], "further wall": further[1]}


def timed(check: Callable[[], object], times: int) -> tuple[float, float]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    for _ in range(times):
        check()
    return (cpu_seconds() - cpu) * 1e3 / times, (time.perf_counter() - wall) * 1e3 / times


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# -- all of them -------------------------------------------------------------------------------------------------------


def start(contender: str, python: str, scratch: Path) -> dict[str, float]:
    left_out = ("KARTIFACTS_", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    command = [python, __file__, "--one", contender, str(scratch / "library"), str(scratch / contender)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{contender} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def has_nvrtc() -> bool:
    from kartifacts import config
    from kartifacts.build.toolchains import nvrtc
    from kartifacts.errors import NoCompiler

    try:
        nvrtc.discover(config.read())
    except NoCompiler as error:
        print(f"nvrtc is left out: {error.message}", file=sys.stderr)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", metavar="PYTHON", help="of an environment with torch and kartifacts")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "LIBRARY", "PLACE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        contender, root, place = args.one
        print(json.dumps(one(contender, Path(root), Path(place))))
        return
    names = ["cxx", *(["nvrtc"] if has_nvrtc() else []), "tvm_ffi", "ninja", *(["torch"] if args.peers else [])]
    pythons = {name: args.peers if name == "torch" else sys.executable for name in names}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write(scratch / "library")
        for name, python in pythons.items():
            start(name, python, scratch)
        for _ in range(args.rounds):
            for name, python in pythons.items():
                runs[name].append(start(name, python, scratch))
    table(args.rounds, runs)


def table(rounds: int, runs: dict[str, list[dict[str, float]]]) -> None:
    medians = {
        name: {kind: statistics.median(run[kind] for run in found) for kind in found[0]} for name, found in runs.items()
    }
    print(
        f"nothing to do, {GROUPS * MEMBERS} headers; milliseconds, medians of {rounds} processes; goal: {GOAL:g} of CPU"
    )
    print(f"{'':<10}{'first: CPU':>11}{'wall':>8}{'further: CPU':>14}{'wall':>8}{'cxx is':>9}")
    for name, found in medians.items():
        ratio = statistics.median(mine["cpu"] / its["cpu"] for mine, its in zip(runs["cxx"], runs[name], strict=True))
        figures = f"{found['cpu']:>11.2f}{found['wall']:>8.2f}{found['further']:>14.2f}{found['further wall']:>8.2f}"
        print(f"{name:<10}{figures}{ratio:>9.3f}")


if __name__ == "__main__":
    main()
