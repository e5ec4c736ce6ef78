from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build.library import open_library
from kartifacts.build.recipes import read_builder
from kartifacts.build.toolchains import cxx, nvcc, nvrtc
from kartifacts.cli.flows.planned import recipe_file
from kartifacts.publish.plan import read_plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "manifests/release.toml"
FOLDERS = sorted((ROOT / "builders").glob("*/builder.toml"))


@pytest.fixture(params=FOLDERS, ids=lambda path: path.parent.name)
def builder(request: pytest.FixtureRequest) -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads(request.param.read_text())
    assert content["name"] == request.param.parent.name
    return content


def test_the_flags_of_a_recipe_are_those_that_the_toolchains_use(builder: dict[str, Any]) -> None:
    assert tuple(builder["cxx"]["compile"]) == cxx.COMPILE
    assert tuple(builder["cxx"]["link"]) == cxx.LINK
    assert tuple(builder["nvrtc"]["compile"]) == nvrtc.COMPILE
    if "nvcc" in builder:
        assert tuple(builder["nvcc"]["compile"]) == nvcc.COMPILE
        assert tuple(builder["nvcc"]["image"]) == nvcc.IMAGE


def test_a_recipe_pins_every_toolchain_that_a_release_declares(builder: dict[str, Any]) -> None:
    declared = {
        device.toolchain for family in open_library(ROOT / "kernels").families.values() for op in family.op
        for device in op.device.values()
    }  # fmt: skip
    assert {"cxx", "nvrtc"} <= declared
    pins = read_builder(ROOT / "builders" / builder["name"] / "builder.toml")
    assert not [toolchain for toolchain in declared if getattr(pins, toolchain) is None]


def test_what_a_recipe_says_of_itself_is_what_it_pins(builder: dict[str, Any]) -> None:
    assert builder["cxx"]["machine"] == f"{builder['machine']}-linux-gnu"
    for compiler in {"nvcc", "nvrtc"} & builder.keys():
        assert builder[compiler]["version"].split(".")[:2] == builder["cuda"].split(".")


def test_each_build_of_the_plan_has_the_recipe_of_its_machine_and_cuda() -> None:
    plan = read_plan(PLAN)
    assert {build.builder for build in plan.builds} == {path.parent.name for path in FOLDERS}, "each is used"
    for build in plan.builds:
        file = recipe_file(plan, PLAN, build)
        assert file is not None
        recipe = read_builder(file)
        assert (recipe.machine, recipe.cuda) == (build.machine, build.cuda)
        assert recipe.image
