"""The same inputs give the same bytes, wherever they lie, whoever compiles them, when, and in which order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tvm_ffi

from kartifacts.build import checks
from kartifacts.build.compile import compile_specs
from kartifacts.build.cubins import images_in
from kartifacts.build.library import open_library
from kartifacts.build.sections import sections_of
from kartifacts.config import Settings
from kartifacts.errors import BuildError
from kartifacts.model.arch import parse_arch

from .conftest import CPU, write_files

CAPI = """
#include <tvm/ffi/c_api.h>
#include "steady.h"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = kart_answer();
  return 0;
}
"""
# Whatever a compiler might name after where a file lies, or after the moment.
DEVICE = """
#if !defined(__CUDACC_RTC__)
#include <cassert>
#endif
#include "marked.h"
namespace {
struct Hidden { int value; };
__device__ int table[4];
__device__ __noinline__ int inside(int x) { return x * table[x & 3]; }
template <typename T> __global__ void generic(T* out) { out->value = table[1]; }
}
static __device__ float factor = 3.0f;
static __constant__ float weights[3];
static __global__ void unseen(int* out) { out[0] = table[2]; }
extern "C" __global__ void seen(int* out, float* scaled) {
  assert(out[0] > 0);
  out[1] = inside(out[2]) + MARK[out[3]] + __FILE__[out[4]];
  scaled[0] = factor * weights[out[3]];
}
"""
LAUNCH = """
#include "steady.h"
long kart_answer() {
  generic<<<1, 1>>>((Hidden*)nullptr);
  unseen<<<1, 1>>>(nullptr);
  seen<<<1, 1>>>(nullptr, nullptr);
  return (long)cudaGetLastError();
}
"""
HOST = """
#include <cassert>
#include <stdexcept>
#include "marked.h"
#include "steady.h"
namespace { struct Hidden { virtual ~Hidden() = default; int value = 1; }; Hidden hidden; int counted; }
static int count() { static int times = 0; return ++times + counted; }
long kart_answer() {
  assert(count() > 0);
  if (hidden.value < 0) throw std::runtime_error(__FILE__);
  return (long)__builtin_strlen(MARK) + __LINE__;
}
"""
FILES = {
    "include/marked.h": "#pragma once\n#define MARK __FILE__\n",
    "steady/steady.h": '#pragma once\nextern "C" long kart_answer();\n',
    "steady/binding.cpp": CAPI,
    "steady/typed.cpp": "#include <tvm/ffi/tvm_ffi.h>\n"
    '#include "steady.h"\n'
    "int answer(tvm::ffi::TensorView x, double by) { return (int)(x.ndim() + by + kart_answer()); }\n"
    "TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);\n",
    "steady/host.cpp": HOST,
    "steady/host_made.cpp.jinja": HOST + "static const char* volatile size = {{ ('\"' ~ size ~ '\"') }};\n",
    "steady/linked.cu": DEVICE + LAUNCH,
    "steady/image.cu": DEVICE,
    "steady/made.cu.jinja": DEVICE + 'extern "C" __global__ void sized_{{ size }}(int* out) { out[0] = 1; }\n',
    "steady/launch.cpp": '#include "steady.h"\nlong kart_answer() { return 0; }\n',
}


def op(name: str, device: str, declared: str, export: str = "answer") -> str:
    return (
        f'[[op]]\nname = "{name}"\nsummary = "s"\nexports = ["{export}"]\naxes.size = ["small", "large"]\n'
        f"[op.device.{device}]\n{declared}\n"
    )


SHARED = 'host_sources = ["binding.cpp", "launch.cpp"]'
OPS = {
    "host": op("host", "cpu", 'toolchain = "cxx"\nsources = ["host.cpp"]\nhost_sources = ["typed.cpp"]'),
    "host_made": op(
        "host_made", "cpu", 'toolchain = "cxx"\nsources = ["host_made.cpp.jinja"]\nhost_sources = ["binding.cpp"]'
    ),
    "linked": op("linked", "cuda", 'toolchain = "nvcc"\nsources = ["linked.cu"]\nhost_sources = ["binding.cpp"]'),
    "image": op("image", "cuda", f'toolchain = "nvcc"\noutput = "image"\nsources = ["image.cu"]\n{SHARED}'),
    "quick": op("quick", "cuda", f'toolchain = "nvrtc"\nsources = ["image.cu"]\n{SHARED}'),
    "bare": op("bare", "cuda", 'toolchain = "nvrtc"\nsources = ["image.cu"]', "seen"),
    "quick_made": op("quick_made", "cuda", f'toolchain = "nvrtc"\nsources = ["made.cu.jinja"]\n{SHARED}'),
}
AWKWARD = """work, "space" $HOME `of` 'some' (one) \\ #;&=%"""  # for a shell, and for what divides lists at commas


@dataclass
class Place:
    """One builder: where all that it has lies, and how it goes about it."""

    root: Path
    ops: tuple[str, ...]
    archs: str
    environ: dict[str, str] = field(default_factory=dict)
    umask: int = 0o022
    before: tuple[str, ...] = ()  # starts the command

    def build(self) -> Path:
        """The repository that this builder makes."""
        site = self.root / "site"
        declared = 'schema = 1\nfamily = "steady"\n' + "\n".join(OPS[name] for name in self.ops)
        write_files(site / "steady_ops/lib", {**FILES, "steady/op.toml": declared})
        meta = site / "steady-1.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: steady\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text("[kartifacts.libraries]\nsteady = steady_ops:lib\n")
        (site / "steady_ops/__init__.py").write_text("")
        for path in sorted(site.rglob("*")):
            os.utime(path, ns=(0, self.umask * 10**9))
        out = self.root / "out"
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root / "home"),
            "PYTHONPATH": str(site),
            "PYTHONDONTWRITEBYTECODE": "1",
            "KARTIFACTS_WORKSPACE": str(self.root / "work space"),
            "KARTIFACTS_GENERATED": str(self.root / "made"),
            **{name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ},
            **self.environ,
        }
        line = [*self.before, sys.executable, "-m", "kartifacts", "build", "--library", "steady", "--archs", self.archs]
        done = subprocess.run(
            [*line, "--out", str(out)], cwd=self.root, env=environ, umask=self.umask, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return out


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def explained(first: Path, second: Path) -> str:
    line = [sys.executable, "-m", "kartifacts", "diff", str(first), str(second)]
    return subprocess.run(line, capture_output=True, text=True).stdout[:4000]


@pytest.mark.parametrize(
    ("ops", "archs"),
    [
        pytest.param(("host", "host_made"), str(CPU), id="cxx"),
        pytest.param(("linked",), "9.0a 8.0+PTX", id="nvcc-object", marks=pytest.mark.nvcc),
        pytest.param(("image",), "9.0a 8.0+PTX", id="nvcc-image", marks=pytest.mark.nvcc),
        pytest.param(("quick", "bare", "quick_made"), "9.0a 8.0+PTX", id="nvrtc", marks=pytest.mark.nvrtc),
    ],
)
def test_two_builders_who_have_nothing_but_the_inputs_in_common_make_the_same_release(
    ops: tuple[str, ...], archs: str, tmp_path: Path
) -> None:
    other = tmp_path / "another, much longer way/to it"
    elsewhere = shutil.copytree(Path(tvm_ffi.__file__).parent, other / "ffi/tvm_ffi")
    clock = shutil.which("faketime")
    turned = " ".join(reversed(archs.split()))
    first = Place(tmp_path / "one", ops, archs, {"KARTIFACTS_JOBS": "1", "TZ": "UTC", "LC_ALL": "C"})
    second = Place(
        other,
        tuple(reversed(ops)),
        turned,
        {
            "KARTIFACTS_JOBS": "2",
            "TZ": "Asia/Kathmandu",
            "LC_ALL": "C.UTF-8",
            "LANG": "de_DE.UTF-8",
            "PYTHONHASHSEED": "7",
            "TMPDIR": str(other / "tmp"),
            "USER": "somebody",
            "KARTIFACTS_WORKSPACE": str(other / AWKWARD),
            "KARTIFACTS_GENERATED": str(other / f"{AWKWARD} made"),
        },
        umask=0o077,
        before=(clock, "-f", "+400d") if clock else (),
    )
    (tmp_path / "one").mkdir()
    (other / "tmp").mkdir()
    second.environ["PYTHONPATH"] = f"{other / 'site'}{os.pathsep}{elsewhere.parent}"
    outs = first.build(), second.build()
    trees = [contents(out) for out in outs]
    assert trees[0] == trees[1], explained(*outs)
    assert len(trees[0]) > 5


@pytest.mark.nvcc
def test_what_is_internal_to_a_source_is_named_after_its_path_in_the_library_and_still_differs_by_source(
    tmp_path: Path, settings: Settings
) -> None:
    names = []
    for place, source in (("one", "image.cu"), ("two/down", "image.cu"), ("three", "other.cu")):
        declared = f'schema = 1\nfamily = "steady"\n{OPS["image"].replace("image.cu", source)}'
        root = write_files(tmp_path / place, {**FILES, "steady/op.toml": declared, "steady/other.cu": DEVICE})
        spec = open_library(root).spec("image", {"size": "small"}, parse_arch("9.0a"))
        (kernel,) = compile_specs([spec], settings).kernels
        content = memoryview(kernel.path.read_bytes())
        (image,) = images_in(content, sections_of(content))
        names.append(
            {name for name in bytes(image.content).split(b"\0") if b"_INTERNAL_" in name or b"GLOBAL__N" in name}
        )
        assert str(root).encode() not in bytes(content)
    assert names[0] == names[1] != names[2]
    assert names[0]


@pytest.mark.nvrtc
def test_an_image_that_says_where_its_headers_lie_is_refused(
    tmp_path: Path, make_settings: Callable[..., Settings]
) -> None:
    """NVRTC has no flag that gives places other names, so only headers of the library may speak of themselves."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "speaking.h").write_text('#pragma once\n#define SPEAKS "%s"\n' % (outside / "speaking.h"))
    declared = f'schema = 1\nfamily = "steady"\n{OPS["quick"]}'
    source = DEVICE.replace("MARK", "SPEAKS").replace('#include "marked.h"', f'#include "{outside / "speaking.h"}"')
    root = write_files(tmp_path / "lib", {**FILES, "steady/op.toml": declared, "steady/image.cu": source})
    spec = open_library(root).spec("quick", {"size": "small"}, parse_arch("9.0a"))
    with pytest.raises(BuildError, match=r"it holds '/.*/outside/speaking\.h', a path of this machine"):
        compile_specs([spec], make_settings())
    assert checks.promise_of(spec, make_settings(KARTIFACTS_LINEINFO="1")).private == ()
