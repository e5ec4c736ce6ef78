"""What op.toml says of kernels in Python, without their compilers: every mistake is named, and imports are followed."""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import imports, python_kernels
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import packages, probe, triton
from kartifacts.errors import ConfigError, NoCompiler
from kartifacts.model.arch import parse_arch
from tests.conftest import Machine

from .conftest import write_files
from .pythons import CUTEDSL, TRITON

TOML = """
schema = 1
family = "demo"

[[op]]
name = "scale"
summary = "s"
exports = ["scale"]
axes.dtype = ["float16", "float32"]
axes.size = ["64", "128"]
axes.style = ["neox", "true"]

[op.device.KIND]
toolchain = "TOOLCHAIN"
sources = ["scale.py"]

[op.device.KIND.kernel]
function = "scale"
arguments = ARGUMENTS
"""
ARGUMENTS = {"triton": '{ x = "*dtype:16", n = "int32" }', "cutedsl": '{ x = "dtype(n)", stream = "stream" }'}


def library(root: Path, toolchain: str, more: str = "", *, kind: str = "cuda", **changed: str) -> Path:
    """A library of one op; `changed` replaces texts of its declaration."""
    text = TOML.replace("KIND", kind).replace("TOOLCHAIN", toolchain)
    text = text.replace("ARGUMENTS", changed.pop("arguments", ARGUMENTS[toolchain]))
    for old, new in changed.items():
        assert text.count(f"{old} = ") == 1, old
        line = next(line for line in text.splitlines() if line.startswith(f"{old} = "))
        text = text.replace(line, new)
    return write_files(root, {"demo/op.toml": text + more, "demo/scale.py": "import triton\n"})


def kernel(root: Path, arch: str = "9.0a", **axes: str) -> python_kernels.Kernel:
    spec = open_library(root).spec(
        "scale", {"dtype": "float16", "size": "64", "style": "neox", **axes}, parse_arch(arch)
    )
    return python_kernels.resolve(spec)


# -- what is filled in -------------------------------------------------------------------------------------------------


def test_axes_stand_for_their_values_in_arguments_constants_and_options(tmp_path: Path) -> None:
    more = (
        'constants = { SIZE = "size", STYLE = "style", HALF = 0.5, N = 3, TABLE = { size = { 64 = 1, 128 = 2 } } }\n'
        "options = { num_warps = { size = { 64 = 2, 128 = 8 } }, num_stages = 3, enable_fp_fusion = false }\n"
    )
    root = library(tmp_path / "lib", "triton", more)
    found = kernel(root, dtype="float32", size="128")
    assert found.arguments["x"] == python_kernels.Argument("pointer", "float32", 16)
    assert found.arguments["x"].text == "*float32:16"
    assert found.constants == {"SIZE": 128, "STYLE": "neox", "HALF": 0.5, "N": 3, "TABLE": 2}
    assert found.options == {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
    assert kernel(root, style="true").constants["STYLE"] is True
    assert kernel(root).options["num_warps"] == 2


def test_shapes_are_numbers_axes_and_names_of_what_is_known_later(tmp_path: Path) -> None:
    arguments = '{ x = "dtype(m, size)", y = "float32(m, n:8; s, 1):16", a = "int64", stream = "stream" }'
    found = kernel(library(tmp_path / "lib", "cutedsl", arguments=arguments)).arguments
    assert found["x"] == python_kernels.Argument("tensor", "float16", 1, (("m", 1), 64))
    assert found["y"] == python_kernels.Argument("tensor", "float32", 16, (("m", 1), ("n", 8)), (("s", 1), 1))
    assert found["a"] == python_kernels.Argument("number", "int64")
    assert found["stream"] == python_kernels.Argument("stream")


def test_a_kernel_without_host_code_gets_ours_and_one_for_amd_gets_none(tmp_path: Path) -> None:
    def host(toolchain: str, kind: str, arch: str) -> list[str]:
        root = library(tmp_path / f"{toolchain}-{kind}", toolchain, kind=kind)
        axes = {"dtype": "float16", "size": "64", "style": "neox"}
        return open_library(root).spec("scale", axes, parse_arch(arch)).device.host_sources

    assert host("triton", "cuda", "9.0a") == ["<kartifacts>/include/kart/any_launcher.cpp"]
    assert host("cutedsl", "cuda", "9.0a") == ["<kartifacts>/include/kart/cutedsl.cpp"]
    assert host("triton", "hip", "gfx942") == []


# -- mistakes ----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown type": (
        "triton",
        {"arguments": '{ x = "*float17" }'},
        "'float17' is no type; expected an axis",
    ),
    "no type": ("triton", {"arguments": '{ x = "*" }'}, "'*' is no type of an argument"),
    "no pointer": ("triton", {"arguments": '{ n = "int32" }'}, "expected a pointer among them"),
    "a tensor for Triton": ("triton", {"arguments": '{ x = "float16(n)", y = "*float16" }'}, "triton takes no tensor"),
    "a pointer for CuTe DSL": ("cutedsl", {"arguments": '{ x = "*float16" }'}, "cutedsl takes no pointer"),
    "a pointer with a shape": ("triton", {"arguments": '{ x = "*float16(n)" }'}, "takes no pointer"),
    "a stream for Triton": ("triton", {"arguments": '{ x = "*float16", s = "stream" }'}, "'stream' is no type"),
    "half a number": (
        "triton",
        {"arguments": '{ x = "*dtype", a = "float16" }'},
        "float16 cannot be passed by value",
    ),
    "a multiple of 8": ("triton", {"arguments": '{ x = "*dtype:8" }'}, "Triton knows of multiples of 16 alone"),
    "a multiple of 3": ("cutedsl", {"arguments": '{ x = "dtype(n):3" }'}, "an alignment is a power of two, got 3"),
    "a float that is a multiple": (
        "triton",
        {"arguments": '{ x = "*dtype", a = "float32:16" }'},
        "a float32 is a multiple of nothing",
    ),
    "an axis that is no size": ("cutedsl", {"arguments": '{ x = "float16(style)" }'}, "'style' is no dimension"),
    "a dimension of zero": ("cutedsl", {"arguments": '{ x = "float16(n:0)" }'}, "'n:0' is no dimension"),
    "a stride too few": ("cutedsl", {"arguments": '{ x = "float16(m, n; 1)" }'}, "has 2 dimensions and 1 strides"),
    "a parameter that is no name": ("triton", {"arguments": '{ "x y" = "*dtype" }'}, "'x y' is no name in Python"),
    "a keyword": ("triton", {"arguments": '{ if = "*dtype" }'}, "'if' is no name in Python"),
    "a function that is no name": ("triton", {"function": 'function = "a.b"'}, "'a.b' is no name in Python"),
    "two sources": ("triton", {"sources": 'sources = ["scale.py", "other.py"]'}, "takes one file in Python"),
    "a source in C++": ("triton", {"sources": 'sources = ["scale.cu"]'}, "takes one file in Python"),
    "flags": ("triton", {"sources": 'sources = ["scale.py"]\nflags = ["-O3"]'}, "flags says nothing to triton"),
    "defines": (
        "triton",
        {"sources": 'sources = ["scale.py"]\ndefines.dtype = { float16 = "A=1" }'},
        "defines says nothing to triton",
    ),
    "objects of Triton": (
        "triton",
        {"sources": 'sources = ["scale.py"]\noutput = "object"'},
        "triton makes an image, not an object",
    ),
    "images of CuTe DSL": (
        "cutedsl",
        {"sources": 'sources = ["scale.py"]\noutput = "image"'},
        "cutedsl makes an object, not an image",
    ),
    "host code of CuTe DSL": (
        "cutedsl",
        {"sources": 'sources = ["scale.py"]\nhost_sources = ["a.cpp"]'},
        "expected none: the function launches its kernels itself",
    ),
    "two exports": ("triton", {"exports": 'exports = ["scale", "other"]'}, "one kernel exports one function"),
}
MORE: dict[str, tuple[str, str, str]] = {
    "a name twice": ("triton", "constants = { x = 1 }", "'x' is an argument and a constant"),
    "a constant of no axis": ("triton", 'constants = { A = "height" }', "'height' names no axis of the op"),
    "a table of two axes": (
        "triton",
        "constants = { A = { size = { 64 = 1, 128 = 2 }, dtype = { float16 = 1 } } }",
        "expected one axis of the op, got size, dtype",
    ),
    "a table of no axis": ("triton", "constants = { A = { height = { 1 = 1 } } }", "expected one axis of the op"),
    "a table that lacks a value": ("triton", "constants = { A = { size = { 64 = 1 } } }", "says nothing for size=128"),
    "an unknown option": ("triton", "options = { warps = 4 }", "triton for cuda takes no 'warps'; it takes num_warps"),
    "an option of CuTe DSL": ("cutedsl", "options = { num_warps = 4 }", "cutedsl for cuda takes no 'num_warps'"),
    "an option of another type": ("triton", 'options = { num_warps = "style" }', "expected int, got 'neox'"),
    "a flag for a number": ("triton", "options = { num_warps = true }", "expected int, got True"),
    "three warps": ("triton", "options = { num_warps = 3 }", "expected a power of two up to 32, got 3"),
    "too many warps": ("triton", "options = { num_warps = 64 }", "expected a power of two up to 32, got 64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_the_declaration_is_named_with_its_place(tmp_path: Path, case: str) -> None:
    toolchain, changed, said = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        open_library(library(tmp_path / "lib", toolchain, **changed))
    assert said in caught.value.message
    assert "demo/op.toml" in caught.value.message
    assert "scale" in caught.value.message


@pytest.mark.parametrize("case", MORE)
def test_a_mistake_in_constants_and_options_is_named_with_its_place(tmp_path: Path, case: str) -> None:
    toolchain, more, said = MORE[case]
    with pytest.raises(ConfigError) as caught:
        open_library(library(tmp_path / "lib", toolchain, more))
    assert said in caught.value.message
    assert "demo/op.toml" in caught.value.message


def test_a_kernel_is_needed_by_these_toolchains_and_by_no_other(tmp_path: Path) -> None:
    sound = library(tmp_path / "lib", "triton")
    text = (sound / "demo/op.toml").read_text()
    (sound / "demo/op.toml").write_text(text[: text.index("[op.device.cuda.kernel]")])
    with pytest.raises(ConfigError, match="the toolchain 'triton' needs a kernel: its function and arguments"):
        open_library(sound)
    (sound / "demo/op.toml").write_text(text.replace('"triton"', '"nvrtc"'))
    with pytest.raises(ConfigError, match="the toolchain 'nvrtc' is told by flags and defines"):
        open_library(sound)


def test_host_code_for_amd_is_refused(tmp_path: Path) -> None:
    changed = {"sources": 'sources = ["scale.py"]\nhost_sources = ["a.cpp"]'}
    with pytest.raises(ConfigError, match="no launcher for AMD's GPUs is known"):
        open_library(library(tmp_path / "lib", "triton", kind="hip", **changed))


def test_a_mistake_of_one_value_among_many_axes_is_found(tmp_path: Path) -> None:
    """Not every combination of eight axes can be tried, and each value is."""
    names = [f"a{number}" for number in range(8)]
    axes = "\n".join(f'axes.{name} = ["1", "2", "three"]' for name in names)
    constants = ", ".join(f'{name.upper()} = "{name}"' for name in names)
    more = f"constants = {{ {constants}, T = {{ a7 = {{ 1 = 1, 2 = 2 }} }} }}"
    root = tmp_path / "lib"
    with pytest.raises(ConfigError, match="says nothing for a7=three"):
        open_library(library(root, "triton", more, exports=f'exports = ["scale"]\n{axes}'))


# -- without the compilers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toolchain", ["triton", "cutedsl"])
def test_a_load_that_would_compile_says_which_package_is_missing(
    tmp_path: Path, machine: Machine, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, toolchain: str
) -> None:
    def lacking(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", lacking)
    gpus("9.0")
    registry = machine.registry(libraries=[library(tmp_path / "lib", toolchain)])
    with pytest.raises(NoCompiler) as caught:
        registry.load("demo/scale", device="cuda", dtype="float16", size=64, style="neox")
    assert f"pip install 'kartifacts[{toolchain}]'" in str(caught.value)
    assert "is not installed for" in str(caught.value)


# -- what is imported --------------------------------------------------------------------------------------------------


def named(tree: ast.AST) -> set[str]:
    """What Python's own parser finds imported."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            top = "." * node.level + (node.module or "")
            inside = top if top.endswith(".") else f"{top}."
            found |= {top, *(inside + alias.name for alias in node.names if alias.name != "*")}
    return found


def test_every_import_that_python_finds_is_found_in_the_text() -> None:
    """What is overlooked would be in no key: a kernel would stay as it was when that module changes."""
    looked = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))[::3]:
        if "test" in path.parts or "site-packages" in path.parts:
            continue
        content = path.read_bytes()
        try:
            tree = ast.parse(content)
        except SyntaxError:  # some are broken on purpose
            continue
        looked += 1
        assert named(tree) <= {*imports.modules(content), "."}, path
    assert looked > 100


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a.b as c, d\n", {"a.b", "d"}),
        ("from a.b import (c, # of that\n  d as e,\n)\n", {"a.b", "a.b.c", "a.b.d"}),
        ("from . import a\nfrom ..b import c\n", {".", ".a", "..b", "..b.c"}),
        ("if x: import a; from b import c\n", {"a", "b", "b.c"}),
        ("try:\n    import a\nexcept ImportError:\n    from b import *\n", {"a", "b"}),
        ("from a import \\\n    b\n", {"a", "a.b"}),
        ("imports = 1\nfromage = 2\n", set()),
        ("from a import b\r\nimport c\r\n", {"a", "a.b", "c"}),
    ],
)
def test_modules_are_named_as_python_would(text: str, found: set[str]) -> None:
    assert {name for name in imports.modules(text.encode()) if name != "."} == found - {"."}


def test_a_kernel_reaches_what_it_imports_of_its_library_and_nothing_else(tmp_path: Path) -> None:
    files = {
        **TRITON,
        "demo/pack/__init__.py": "",
        "demo/pack/inner.py": "from . import beside\n",
        "demo/pack/beside.py": "from ..shift import shifted\n",
        "demo/pack/unused.py": "",
    }
    root = write_files(tmp_path / "lib", files)
    (root / "demo/scale.py").write_text("import pack.inner\n" + TRITON["demo/scale.py"])
    spec = open_library(root).spec("scale", {"dtype": "float16", "block": "128"}, parse_arch("gfx942"))
    assert [source.path for source in spec.sources] == [
        "demo/pack/__init__.py",
        "demo/pack/beside.py",
        "demo/pack/inner.py",
        "demo/scale.py",
        "demo/shift.py",
        "include/shared/__init__.py",
        "include/shared/bias.py",
    ]


def test_a_package_that_is_installed_counts_by_its_version_and_python_itself_does_not(tmp_path: Path) -> None:
    root = write_files(tmp_path / "lib", CUTEDSL)
    source = "import math, numpy.linalg\nfrom msgspec import json\nimport no_such_package\n"
    (root / "demo/scale.py").write_text(source + CUTEDSL["demo/scale.py"])
    spec = open_library(root).spec("scale", {"dtype": "float16"}, parse_arch("9.0a"))
    versions = {name: metadata.version(name) for name in ("msgspec", "numpy")}
    expected = [f"msgspec {versions['msgspec']}", "no_such_package", f"numpy {versions['numpy']}"]
    assert packages.imported(spec, ("cutlass",)) == ", ".join(expected)


# -- which assembler Triton takes --------------------------------------------------------------------------------------

_EARLY = "    return knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas\n"
_LATE = "    if arch < 90:\n        return knobs.nvidia.ptxas\n    return knobs.nvidia.ptxas_blackwell\n"


@pytest.mark.parametrize(("body", "first"), [(_EARLY, 100), (_LATE, 90)])
def test_the_assembler_of_a_gpu_is_the_one_that_the_installed_triton_names(
    body: str, first: int, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler.py"
    head = "import no_such_package\n\n\n@no_such_package.cached\ndef get_ptxas(arch: int) -> knobs.NvidiaTool:\n"
    compiler.write_text(head + body)
    taken = triton._assemblers(compiler)
    assert {number: taken(number) for number in (75, 89, 90, 100, 121)} == {
        number: "ptxas-blackwell" if number >= first else "ptxas" for number in (75, 89, 90, 100, 121)
    }


@pytest.mark.parametrize(
    "text", ["", "def get_ptxas(arch):\n    return nobody\n", "def (", "def get_ptxas():\n    pass\n"]
)
def test_a_triton_that_does_not_say_its_assemblers_is_not_used(text: str, tmp_path: Path) -> None:
    (tmp_path / "compiler.py").write_text(text)
    for name in ("compiler.py", "none.py"):
        with pytest.raises(probe.Silent, match="does not say which assembler it takes"):
            triton._assemblers(tmp_path / name)
