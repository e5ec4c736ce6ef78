"""The guide for kernel authors: its files, as they stand there, are a library that works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kartifacts.build import elf
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import find
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import parse_arch
from tests.conftest import Machine

GUIDE = Path(__file__).parents[2] / "docs/kernel-authors.md"


def blocks() -> list[tuple[str, str]]:
    """Language and text of what the guide shows."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def write_library(root: Path) -> None:
    """Write the directory of the families that the guide shows."""
    (root / "scale").mkdir(parents=True)
    for language, text in blocks():
        named = re.match(r"(?://|#) (scale/\w+\.\w+)\n", text)
        if named:
            (root / named[1]).write_text(text[named.end() :])
        elif language == "toml" and text.startswith("schema"):
            (root / "scale/op.toml").write_text(text)


def link_objects(root: Path) -> None:
    """Declare the CUDA half as the guide's section on objects does."""
    (section,) = [text for language, text in blocks() if language == "toml" and text.startswith("[op.device.cuda]")]
    declared = (root / "scale/op.toml").read_text()
    (root / "scale/op.toml").write_text(declared[: declared.index("[op.device.cuda]")] + section)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "acme_kernels/kernels"
    write_library(root)
    return root


def test_the_files_of_the_guide_are_all_there_and_are_declared(library: Path) -> None:
    named = set(re.findall(r"scale/\w+\.\w+", GUIDE.read_text()))
    assert {f"scale/{path.name}" for path in (library / "scale").iterdir()} == named
    assert open_library(library).ops == ("scale/scale",)


def test_the_test_of_the_guide_passes(library: Path, machine: Machine) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(library)]
    environ = machine.environ({})
    done = subprocess.run(command, env=environ, cwd=library, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def compiled(library: Path, toolchain: str, machine: Machine, archs: str = "9.0a") -> elf.Inspection:
    settings = machine.settings()
    try:
        find(toolchain, settings)
    except NoCompiler as error:
        pytest.skip(str(error))
    spec = open_library(library).spec("scale/scale", {"dtype": "bfloat16"}, parse_arch(archs))
    assert spec.device.toolchain == toolchain
    (kernel,) = compile_specs([spec], settings).kernels
    return elf.inspect(kernel.path)


@pytest.mark.nvrtc
def test_the_image_of_the_guide_compiles(library: Path, machine: Machine) -> None:
    found = compiled(library, "nvrtc", machine)
    assert (found.exports, [str(arch) for arch in found.archs]) == (("scale",), ["9.0a"])
    assert set(found.functions) == {"scale"}
    assert ".kart.image" in found.sections


@pytest.mark.nvcc
def test_an_op_whose_object_holds_its_launcher_still_compiles(library: Path, machine: Machine) -> None:
    """As libraries of others do that were written before there were images."""
    link_objects(library)
    found = compiled(library, "nvcc", machine)
    assert (found.exports, [str(arch) for arch in found.archs]) == (("scale",), ["9.0a"])
    assert ".kart.image" not in found.sections
