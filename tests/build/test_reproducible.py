"""The same inputs give the same bytes, wherever they lie, whoever compiles them, when, and in which order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tvm_ffi

from kartifacts.build import workspace
from kartifacts.build.compile import compile_specs
from kartifacts.build.cubins import images_in
from kartifacts.build.library import open_library
from kartifacts.build.sections import sections_of
from kartifacts.build.toolchains.nvcc import Nvcc
from kartifacts.build.toolchains.nvrtc import Nvrtc
from kartifacts.config import Settings
from kartifacts.errors import BuildError
from kartifacts.model.arch import parse_arch

from .conftest import CPU, IMAGE_FILES, write_files
from .pythons import CUTEDSL, TRITON, found

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
#include <kart_spoken.h>
#include <cuda_fp16.h>
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
  out[1] = inside(out[2]) + MARK[out[3]] + __FILE__[out[4]] + SPOKEN[out[5]];
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
    "linked_made": op(
        "linked_made",
        "cuda",
        'toolchain = "nvcc"\nsources = ["made.cu.jinja"]\nhost_sources = ["binding.cpp", "launch.cpp"]',
    ),
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
    files: dict[str, str]  # of the library
    archs: str
    environ: dict[str, str] = field(default_factory=dict)
    umask: int = 0o022
    before: tuple[str, ...] = ()  # starts the command

    def build(self) -> Path:
        """The repository that this builder makes."""
        site = self.root / "site"
        write_files(site / "steady_ops/lib", self.files)
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
            **self.environ,
        }
        line = [*self.before, sys.executable, "-m", "kartifacts", "build", "--library", "steady", "--archs", self.archs]
        done = subprocess.run(
            [*line, "--out", str(out)], cwd=self.root, env=environ, umask=self.umask, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return out

    def objects(self) -> dict[str, bytes]:
        """What was compiled, by what it was made of: others link it who get it from a cache."""
        place = Path(self.environ.get("KARTIFACTS_WORKSPACE", self.root / "work space")) / "objects"
        return {path.parent.name: path.read_bytes() for path in place.glob("*/*/*") if path.suffix != ".json"}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def explained(first: Path, second: Path) -> str:
    line = [sys.executable, "-m", "kartifacts", "diff", str(first), str(second)]
    return subprocess.run(line, capture_output=True, text=True).stdout[:4000]


def library(*ops: str) -> dict[str, str]:
    return {**FILES, "steady/op.toml": 'schema = 1\nfamily = "steady"\n' + "\n".join(OPS[name] for name in ops)}


def links(real: Path, place: Path, below: int) -> None:
    """A directory of links to what is in the real one; directories so many levels below are directories too."""
    place.mkdir(parents=True)
    for path in real.iterdir():
        if below and path.is_dir():
            links(path, place / path.name, below - 1)
        else:
            (place / path.name).symlink_to(path)


def toolkit_at(place: Path, parts: dict[str, Path]) -> Path:
    """A toolkit of links to all that is in `parts`, with one header more, which says where it lies."""
    for name, real in parts.items():
        links(real, place / name, below=2 if name == "targets" else 0)
    for directory in (place / "include", *place.glob("targets/*/include")):
        (directory / "kart_spoken.h").write_text("#pragma once\n#define SPOKEN __FILE__\n")
    return place


def parts_of_toolkit(toolchain: str, make_settings: Callable[..., Settings]) -> dict[str, Path]:
    """What compiles for NVIDIA's GPUs here; skips where it is not installed."""
    environ = {name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}
    compiler = found(toolchain, make_settings(**environ, KARTIFACTS_CUDA_COMPILER="nvrtc"))
    if isinstance(compiler, Nvrtc):
        assert compiler.headers, "no CUDA headers belong to this NVRTC"
        return {"lib": compiler.library.parent, "include": compiler.headers[0]}
    if isinstance(compiler, Nvcc):
        places = {name: compiler.root / name for name in ("bin", "include", "lib", "lib64", "nvvm", "targets")}
        return {name: place for name, place in places.items() if place.is_dir()}
    return {}


@pytest.mark.parametrize(
    ("toolchain", "ops", "archs"),
    [
        pytest.param("cxx", ("host", "host_made"), str(CPU), id="cxx"),
        pytest.param("nvcc", ("linked", "linked_made"), "8.0+PTX", id="nvcc-object", marks=pytest.mark.nvcc),
        pytest.param("nvcc", ("image",), "9.0a 8.0+PTX", id="nvcc-image", marks=pytest.mark.nvcc),
        pytest.param("nvrtc", ("quick", "bare", "quick_made"), "9.0a 8.0+PTX", id="nvrtc", marks=pytest.mark.nvrtc),
        pytest.param("triton", TRITON, "8.0 9.0a gfx942", id="triton", marks=pytest.mark.triton),
        pytest.param("cutedsl", CUTEDSL, "8.0 9.0a", id="cutedsl", marks=pytest.mark.cutedsl),
    ],
)
def test_two_builders_who_have_nothing_but_the_inputs_in_common_make_the_same_release(
    toolchain: str,
    ops: tuple[str, ...] | dict[str, str],
    archs: str,
    tmp_path: Path,
    make_settings: Callable[..., Settings],
) -> None:
    toolkit = parts_of_toolkit(toolchain, make_settings)
    other = tmp_path / "another, much longer way/to it"
    elsewhere = shutil.copytree(Path(tvm_ffi.__file__).parent, other / "ffi/tvm_ffi")
    clock = None if toolchain == "nvcc" else shutil.which("faketime")  # under which a part of nvcc waits for ever
    files = ops if isinstance(ops, dict) else library(*ops)
    turned = ops if isinstance(ops, dict) else library(*reversed(ops))
    first = Place(tmp_path / "one", files, archs, {"KARTIFACTS_JOBS": "1", "TZ": "UTC", "LC_ALL": "C"})
    second = Place(
        other,
        turned,
        " ".join(reversed(archs.split())),
        {
            "KARTIFACTS_JOBS": "2",
            "TZ": "Asia/Kathmandu",
            "LC_ALL": "C.UTF-8",
            "LANG": "de_DE.UTF-8",
            "PYTHONHASHSEED": "7",
            "PYTHONPATH": f"{other / 'site'}{os.pathsep}{elsewhere.parent}",
            "TMPDIR": str(other / "tmp"),
            "USER": "somebody",
            "CPATH": str(other / "hostile"),
            "NVCC_APPEND_FLAGS": "-lineinfo",
            "LD_RUN_PATH": str(other / "tmp"),
            "KARTIFACTS_WORKSPACE": str(other / AWKWARD),
            "KARTIFACTS_GENERATED": str(other / f"{AWKWARD} made"),
        },
        umask=0o077,
        before=(clock, "-f", "+400d") if clock else (),
    )
    (tmp_path / "one").mkdir()
    (other / "tmp").mkdir()
    write_files(other / "hostile", dict.fromkeys(("stdexcept", "cuda_fp16.h"), "#error not what was asked for\n"))
    if toolkit:
        for builder in (first, second):
            builder.environ["CUDA_HOME"] = str(toolkit_at(builder.root / "toolkit, copied", toolkit))
    outs = first.build(), second.build()
    trees = [contents(out) for out in outs]
    assert trees[0] == trees[1], explained(*outs)
    assert len(trees[0]) > 5
    objects = first.objects(), second.objects()
    shared = objects[0].keys() & objects[1].keys()  # a launcher is known by the command that linked it
    assert [name for name in shared if objects[0][name] != objects[1][name]] == []
    assert len(shared) > 1


@pytest.mark.parametrize("name", ["a,b", "$HOME", 'one"two', "`of`", "with space", "ünïcode", "new\nline", AWKWARD])
def test_compilers_get_a_plain_name_for_a_directory_of_any_name(name: str, tmp_path: Path) -> None:
    """No toolchain has to know which characters the others cannot bear."""
    place = tmp_path / name
    place.mkdir()
    with workspace.plainly(place) as plain:
        assert re.fullmatch(r"[\w/.-]+", str(plain), re.ASCII)
        (plain / "made").write_text("by a compiler")
        other = f"import sys; print(open({str(plain / 'made')!r}).read(), end='')"
        read = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True)
        assert read.stdout == "by a compiler"
    assert (place / "made").read_text() == "by a compiler"
    assert not plain.exists()
    with workspace.plainly(tmp_path) as same:
        assert same == tmp_path


@pytest.mark.nvcc
def test_what_is_internal_to_a_source_is_named_after_its_path_in_the_library_and_still_differs_by_source(
    tmp_path: Path, settings: Settings
) -> None:
    names = []
    for place, source in (("one", "image.cu"), ("two/down", "image.cu"), ("three", "other.cu")):
        declared = library("image")["steady/op.toml"].replace("image.cu", source)
        text = DEVICE.replace("<kart_spoken.h>", '"marked.h"').replace("SPOKEN", "MARK")
        files = {**FILES, "steady/op.toml": declared, "steady/image.cu": text, "steady/other.cu": text}
        root = write_files(tmp_path / place, files)
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


@pytest.mark.parametrize(
    "toolchain",
    ["cxx", pytest.param("nvcc", marks=pytest.mark.nvcc), pytest.param("nvrtc", marks=pytest.mark.nvrtc)],
)
def test_a_header_from_elsewhere_that_tells_when_it_was_compiled_is_refused(
    toolchain: str, tmp_path: Path, make_settings: Callable[..., Settings]
) -> None:
    """What is in the library is refused before; see test_checks."""
    outside = tmp_path / "outside"
    write_files(outside, {"when.h": "// __TIME__ in a comment is none\n#define WHEN (__DATE__)\n"})
    source = '#include <when.h>\nextern "C" __global__ void scale(float* x, int n) { x[0] = WHEN[n]; }\n'
    root = write_files(tmp_path / "lib", {**IMAGE_FILES, "demo/scale.cu": source})
    spec = open_library(root).spec("bare", {"size": "small"}, parse_arch("9.0a"))
    flags = {"KARTIFACTS_CUDA_FLAGS": f"-I{outside}", "KARTIFACTS_CUDA_COMPILER": toolchain}
    if toolchain == "cxx":
        host = {"steady/host.cpp": "#include <when.h>\n" + HOST.replace("MARK", "WHEN")}
        root = write_files(tmp_path / "hosts", {**library("host"), **host})
        spec = open_library(root).spec("host", {"size": "small"}, CPU)
        flags = {"KARTIFACTS_CXX_FLAGS": f"-I{outside}"}
    found(toolchain, make_settings())
    with pytest.raises(BuildError, match=r"__DATE__.* (might prevent reproducible builds|makes another image)"):
        compile_specs([spec], make_settings(**flags))


@pytest.mark.slow
def test_the_script_that_builds_twice_fails_where_a_compiler_looks_at_the_home_and_says_what_differs(
    tmp_path: Path,
) -> None:
    checkout = Path(__file__).parents[2]
    real = shutil.which("g++")
    if not (checkout / ".git").exists() or real is None:
        pytest.skip("needs a git checkout and g++")
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$HOME" in *another*) set -- "$@" -O1;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    script, cpu = checkout / "ci/reproducible", str(CPU)
    for path, status in ((os.environ["PATH"], 0), (f"{tmp_path}:{os.environ['PATH']}", 1)):
        environ = {**os.environ, "PATH": path}
        done = subprocess.run([script, cpu], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == status, done.stdout
    assert "the build is not reproducible\n      section .text (code): " in done.stdout
    assert done.stdout.endswith("two builds of the same sources are not the same\n")
