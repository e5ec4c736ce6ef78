from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build.toolchains import cxx, nvcc
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


def test_the_toolkit_of_a_recipe_can_build_every_arch_of_a_release(builder: dict[str, Any]) -> None:
    major, minor, _ = map(int, builder["nvcc"]["version"].split("."))
    plan = tomllib.loads((ROOT / "manifests/release.toml").read_text())
    archs = [arch for arch in parse_archs(" ".join(plan["archs"])) if arch.kind == "cuda"]
    assert archs
    for arch in archs:
        check_toolkit(arch, (major, minor))


def test_there_is_a_recipe() -> None:
    assert FOLDERS
