"""A tiny kernel library, settings that touch nothing outside the test's directory, a compiler that can misbehave."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm_ffi

from kartifacts import config
from kartifacts.build.library import Library, open_library
from kartifacts.build.toolchains import cxx
from kartifacts.build.toolchains import nvcc as toolkits
from kartifacts.config import Settings
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.spec import Spec

OP_TOML = """
schema = 1
family = "demo"

[[op]]
name = "answer"
summary = "Gives a number that depends on its size."
exports = ["answer"]
axes.size = ["small", "large"]

[op.device.cpu]
toolchain = "cxx"
sources = ["answer_cpu.cpp"]
host_sources = ["answer_binding.cpp"]
defines.size = { small = "KART_SIZE=1", large = "KART_SIZE=1000" }

[op.device.cuda]
toolchain = "nvcc"
sources = ["answer.cu"]
host_sources = ["answer_binding.cpp"]
min_arch = "7.5"
defines.size = { small = "KART_SIZE=1", large = "KART_SIZE=1000" }
"""

FILES = {
    "demo/op.toml": OP_TOML,
    "demo/answer.h": '#pragma once\nextern "C" long kart_answer();\n',
    "include/deep/scale.h": "#pragma once\n#define SCALE 7L\n",
    "include/scale.h": '#pragma once\n#include "deep/scale.h"\n',
    "include/unrelated.h": "#pragma once\n",
    "demo/answer_cpu.cpp": (
        '#include "answer.h"\n#include "scale.h"\nlong kart_answer() { return SCALE * KART_SIZE; }\n'
    ),
    "demo/answer.cu": (
        '#include "answer.h"\n#include "scale.h"\n'
        "__global__ void fill(long* out) { *out = SCALE * KART_SIZE; }\n"
        "long kart_answer() { fill<<<1, 1>>>(nullptr); return (long)cudaGetLastError(); }\n"
    ),
    "demo/answer_binding.cpp": (
        '#include <tvm/ffi/c_api.h>\n#include "answer.h"\n'
        'extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(\n'
        "    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {\n"
        "  result->type_index = kTVMFFIInt;\n  result->zero_padding = 0;\n  result->v_int64 = kart_answer();\n"
        "  return 0;\n}\n"
    ),
}
# Device code alone: with a launcher that is compiled once for both sizes, and without one.
IMAGE_FILES = {
    "demo/op.toml": """
schema = 1
family = "demo"

[[op]]
name = "scale"
summary = "Multiplies by a number that depends on its size."
exports = ["scale"]
axes.size = ["small", "large"]

[op.device.cuda]
toolchain = "nvrtc"
sources = ["scale.cu"]
host_sources = ["scale_binding.cpp"]
min_arch = "7.5"
defines.size = { small = "KART_SIZE=1", large = "KART_SIZE=1000" }

[[op]]
name = "bare"
summary = "The same without a launcher."
exports = ["scale"]
axes.size = ["small", "large"]

[op.device.cuda]
toolchain = "nvrtc"
sources = ["scale.cu"]
defines.size = { small = "KART_SIZE=1", large = "KART_SIZE=1000" }
""",
    "include/factor.h": "#pragma once\n#define FACTOR 3.0f\n",
    "demo/scale.cu": (
        '#include "factor.h"\n'
        'extern "C" __global__ void scale(float* x, int n) {\n'
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < n) x[i] *= FACTOR * KART_SIZE;\n"
        "}\n"
    ),
    # Without arguments it tells what the image was compiled with.
    "demo/scale_binding.cpp": (
        '#include <tvm/ffi/c_api.h>\n#include "kart/driver.h"\n'
        'static kart::Entry scale{"scale"};\n'
        'extern "C" __attribute__((visibility("default"))) int __tvm_ffi_scale(\n'
        "    void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {\n"
        "  result->type_index = kTVMFFIInt;\n  result->zero_padding = 0;\n"
        '  result->v_int64 = kart::defined("KART_SIZE");\n'
        "  if (count == 0) return 0;\n"
        "  float* x = static_cast<float*>(args[0].v_ptr);\n"
        "  const int n = static_cast<int>(args[1].v_int64);\n"
        "  if (scale.launch((n + 127) / 128, 128, 0, nullptr, x, n) == 0) return 0;\n"
        '  TVMFFIErrorSetRaisedFromCStr("RuntimeError", kart_error(-1));\n'
        "  return -1;\n}\n"
    ),
}
# The function of a kernel by itself.
SCALE = """
#include <tvm/ffi/c_api.h>
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_scale(
    void*, const TVMFFIAny*, int32_t count, TVMFFIAny*) {
  if (count != 0) TVMFFIErrorSetRaisedFromCStr("TypeError", "expected nothing");
  return 0;
}
"""
# Flags that nvcc alone knows.
ONLY_NVCC = (
    "-Xcompiler=-Wall", "-Xlinker=-s", "-Xnvlink=-v", "-Xarchive=x", "-Xcicc=x", "-ccbin=g++", "--compiler-bindir=g++",
    "-O1", "-v", "-lx", "-L/x", "-Werror=all-warnings", "-Wno-deprecated-gpu-targets", "--Wreorder", "-res-usage",
    "--resource-usage", "-src-in-ptx", "-noeh", "--expt-relaxed-constexpr", "--extended-lambda",
    "-default-stream=legacy", "-keep", "--shared", "-cudart=none", "-m64", "-ftemplate-depth=9",
    "-keep-device-functions", "--compress-mode=none", "--optimize=1", "--verbose", "-dryrun", "-x=cu",
    "-e=x", "--machine=64",
)  # fmt: skip
CPU = parse_arch("cpu:x86-64" if os.uname().machine == "x86_64" else "cpu:aarch64")


def write_library(root: Path, files: dict[str, str] | None = None) -> Path:
    return write_files(root, {**FILES, **(files or {})})


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a fresh copy of the tiny library."""
    return write_library(tmp_path / "demolib")


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """The directory of a fresh library whose kernels are images."""
    return write_files(tmp_path / "imagelib", IMAGE_FILES)


@pytest.fixture
def image_spec(image_root: Path) -> Callable[..., Spec]:
    """Reads that library anew, and gives one of its specs."""

    def make(arch: str = "9.0a", size: str = "small", op: str = "scale", where: Path = image_root) -> Spec:
        return open_library(where).spec(op, {"size": size}, parse_arch(arch))

    return make


@pytest.fixture
def demo(root: Path) -> Library:
    return open_library(root)


@pytest.fixture
def make_spec(root: Path) -> Callable[..., Spec]:
    """Reads the library anew, as another process would, and gives one of its specs."""

    def make(size: str = "small", arch: Arch = CPU, where: Path = root) -> Spec:
        return open_library(where).spec("answer", {"size": size}, arch)

    return make


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings from an environment that holds nothing but what is given."""

    def make(**environ: str) -> Settings:
        base = {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "KARTIFACTS_WORKSPACE": str(tmp_path / "workspace"),
        }
        return config.read({**base, **environ})

    return make


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


class Compiler:
    """A g++ that writes down each compilation, and does something of its own before, or instead of, compiling."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "g++"
        self.calls = folder / "calls"
        real = shutil.which("g++")
        assert real is not None, "these tests need g++"
        self.real = real
        self.misbehave("")

    def misbehave(self, shell: str, *, on: str = "-c") -> None:
        """Run `shell` when the command line holds the word `on`; $out is the output file."""
        self.path.write_text(
            "#!/bin/sh\n"
            'out=; previous=; hit=; all=" $* "\n'
            'for word in "$@"; do [ "$previous" = -o ] && out=$word; previous=$word; done\n'
            f'case "$all" in *" {on} "*) hit=1;; esac\n'
            f'case "$all" in *" -c "*) echo "$all" >> {shlex.quote(str(self.calls))};; esac\n'
            f'if [ -n "$hit" ]; then :\n{shell}\nfi\n'
            f'exec {self.real} "$@"\n'
        )
        self.path.chmod(0o755)

    @property
    def compiled(self) -> list[str]:
        """The source of each compilation so far."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line.split(" -c ", 1)[1].split()[0] for line in lines]


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    folder = tmp_path / "compiler"
    folder.mkdir()
    return Compiler(folder)


Shared = Callable[..., Path]
Cuda = Callable[..., tuple[Path, str]]


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    """Compiles and links host code as a build does, with further flags."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ on PATH")
    package = Path(tvm_ffi.__file__).parent

    def build(*flags: str, source: str = SCALE) -> Path:
        made = tmp_path / f"kernel{len(list(tmp_path.iterdir()))}.so"
        ffi = ("-isystem", str(package / "include"), f"-L{package / 'lib'}", "-ltvm_ffi")
        command = (compiler, *cxx.COMPILE, "-x", "c++", "-", "-x", "none", *cxx.LINK)
        subprocess.run([*command, "-o", str(made), *flags, *ffi], input=source.encode(), check=True, cwd=tmp_path)
        return made

    return build


@pytest.fixture
def nvcc(real_toolkit: Path, tmp_path: Path) -> Cuda:
    """Gives a file and what the compiler said."""

    def build(source: str, *flags: str) -> tuple[Path, str]:
        number = len(list(tmp_path.iterdir()))
        code, made = tmp_path / f"k{number}.cu", tmp_path / f"k{number}.out"
        code.write_text(source)
        command = [str(real_toolkit / "bin/nvcc"), str(code), "-o", str(made), *flags]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return made, said.stdout

    return build


def answer_of(path: Path) -> int:
    """What the function in a built kernel says, called in a process of its own."""
    code = f"import tvm_ffi; print(tvm_ffi.load_module({str(path)!r}).get_function('answer')())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def real_toolkit(make_settings: Callable[..., Settings]) -> Path:
    """The CUDA toolkit of this machine."""
    environ = {name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}
    try:
        return toolkits.discover(make_settings(**environ)).root
    except NoCompiler as error:
        pytest.skip(f"needs a CUDA compiler: {error.message}")
