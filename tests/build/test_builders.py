from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build.library import open_library
from kartifacts.build.recipes import read_builder
from kartifacts.build.toolchains import cxx, nvcc, nvrtc
from kartifacts.model.arch import check_toolkit, parse_archs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDERS = sorted((ROOT / "builders").glob("*/builder.toml"))


@pytest.fixture(params=FOLDERS, ids=lambda path: path.parent.name)
def builder(request: pytest.FixtureRequest) -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads(request.param.read_text())
    assert content["name"] == request.param.parent.name
    return content


def test_the_flags_of_a_recipe_are_those_that_the_toolchains_use(builder: dict[str, Any]) -> None:
    assert tuple(builder["cxx"]["compile"]) == cxx.COMPILE
    assert tuple(builder["cxx"]["link"]) == cxx.LINK
    assert tuple(builder["nvcc"]["compile"]) == nvcc.COMPILE
    assert tuple(builder["nvcc"]["image"]) == nvcc.IMAGE
    assert tuple(builder["nvrtc"]["compile"]) == nvrtc.COMPILE


def test_a_recipe_pins_every_toolchain_that_a_release_declares(builder: dict[str, Any]) -> None:
    declared = {
        device.toolchain for family in open_library(ROOT / "kernels").families.values() for op in family.op
        for device in op.device.values()
    }  # fmt: skip
    assert {"cxx", "nvrtc"} <= declared
    pins = read_builder(ROOT / "builders" / builder["name"] / "builder.toml")
    assert not [toolchain for toolchain in declared if getattr(pins, toolchain) is None]


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_the_toolkit_of_a_recipe_can_build_every_arch_of_a_release(builder: dict[str, Any], compiler: str) -> None:
    major, minor, _ = map(int, builder[compiler]["version"].split("."))
    plan = tomllib.loads((ROOT / "manifests/release.toml").read_text())
    archs = [arch for arch in parse_archs(" ".join(plan["archs"])) if arch.kind == "cuda"]
    assert archs
    for arch in archs:
        check_toolkit(arch, (major, minor))


def test_there_is_a_recipe() -> None:
    assert FOLDERS
