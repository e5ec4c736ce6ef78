"""The reference for kernel authors names what there is, and what it shows compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kartifacts.build import elf
from kartifacts.build.compile import compile_specs
from kartifacts.build.declared import TAKEN
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import KINDS, find
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import DeviceDecl, OpDecl
from tests.cli.test_add_a_kernel import blocks
from tests.conftest import Machine

CHECKOUT = Path(__file__).parents[2]
REFERENCE = (CHECKOUT / "docs/kernel-authors.md").read_text()
HEADERS = CHECKOUT / "kernels/include/kart"


def first_cells(title: str) -> list[str]:
    """What the first column of a table names, of the table with this title in its first cell."""
    table = re.search(rf"^\| {re.escape(title)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", REFERENCE, re.MULTILINE)
    assert table is not None, title
    return [name for line in table[1].splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]


@pytest.mark.parametrize(("title", "declared"), [("of an op", OpDecl), ("of a device", DeviceDecl)])
def test_every_key_of_a_declaration_stands_in_the_reference_and_no_other(title: str, declared: type) -> None:
    assert sorted(first_cells(title)) == sorted(declared.__annotations__)


def test_every_toolchain_and_every_taken_name_is_told() -> None:
    told = set(re.findall(r"`([\w.]+)`", REFERENCE))
    assert told >= {*KINDS, *TAKEN}


def test_every_header_of_ours_and_every_check_of_a_binding_is_told_and_no_other() -> None:
    assert set(first_cells("header")) == {f"kart/{path.name}" for path in HEADERS.glob("*.*h")}
    call = (HEADERS / "ffi.h").read_text().partition("class Call {")[2].partition(" private:")[0]
    public = set(re.findall(r"^  (?:[\w:*]+[ *]+)+(\w+)\(", call, re.MULTILINE)) - {"Call"}
    assert {name.partition("(")[0] for name in first_cells("of `kart::Call`")} == public
    assert len(public) == 13


def test_what_a_check_gives_is_told_as_it_is_declared() -> None:
    header = (HEADERS / "ffi.h").read_text()
    declared = {name: kind.strip() for kind, name in re.findall(r"^  (\S.*?)(\w+)\(int arg", header, re.MULTILINE)}
    told = re.findall(r"^\| `(\w+)\(int i.*? \| `([^`]*)` \|", REFERENCE, re.MULTILINE)
    assert len(told) == 9
    assert [(name, declared[name]) for name, _ in told] == told


def write_library(root: Path) -> None:
    """Write the library of the page on adding a kernel, whose CUDA half is an image; ci/gpu does so too."""
    top = "acme_kernels/kernels/"
    for block in blocks({}):
        if block.file.startswith(top):
            path = root / block.file.removeprefix(top)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def link_objects(root: Path) -> None:
    """Declare its CUDA half as the section on objects does."""
    found = dict(re.findall(r"^```(toml|cpp)\n(.*?)^```$", REFERENCE, re.DOTALL | re.MULTILINE))
    declared = (root / "scale/op.toml").read_text()
    (root / "scale/op.toml").write_text(declared[: declared.index("[op.device.cuda]")] + found["toml"])
    (root / "scale/scale_linked.cu").write_text(found["cpp"])


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "kernels"
    write_library(root)
    link_objects(root)
    return root


@pytest.mark.nvcc
def test_an_op_whose_object_holds_its_launcher_still_compiles(library: Path, machine: Machine) -> None:
    """As libraries of others do that were written before there were images."""
    settings = machine.settings()
    try:
        find("nvcc", settings)
    except NoCompiler as error:
        pytest.skip(str(error))
    spec = open_library(library).spec("scale/scale", {"dtype": "bfloat16"}, parse_arch("9.0a"))
    (kernel,) = compile_specs([spec], settings).kernels
    found = elf.inspect(kernel.path)
    assert (found.exports, [str(arch) for arch in found.archs]) == (("scale",), ["9.0a"])
    assert ".kart.image" not in found.sections
