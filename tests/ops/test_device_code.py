"""Device code and launchers of one op agree, for the oldest GPU and the one that is tuned for, without spilling."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.build import elf
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import find
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import parse_archs
from kartifacts.model.spec import Spec

KERNELS = Path(__file__).parents[2] / "kernels"
LIBRARY = open_library(KERNELS, "kartifacts")
ARCHS = parse_archs("7.5 9.0a")
DTYPE = "bfloat16"  # the one type that is another instruction on old GPUs


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[elf.Inspection]]:
    """Op → its kernels of one element type, for each arch."""
    folder = tmp_path_factory.mktemp("device_code")
    settings = config.read(overrides={"workspace": folder / "workspace", "generated": folder / "generated"})
    try:
        find("nvrtc", settings)
    except NoCompiler as error:
        pytest.skip(f"needs NVRTC or nvcc: {error}")
    specs = [spec for spec in LIBRARY.specs((), ARCHS)[0] if ("dtype", DTYPE) in spec.axes]
    kernels = compile_specs(specs, settings).kernels
    found: dict[str, list[elf.Inspection]] = {}
    for spec, kernel in zip(specs, kernels, strict=True):
        found.setdefault(_op(spec), []).append(elf.inspect(kernel.path))
    return found


def _op(spec: Spec) -> str:
    return f"{spec.family}/{spec.op.name}"


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", LIBRARY.ops)
def test_a_launcher_names_the_kernels_of_its_image_and_no_others(
    built: dict[str, list[elf.Inspection]], op: str
) -> None:
    """A name that is wrong would be found out on a GPU, at the first row that wants that kernel."""
    family, decl = LIBRARY.find(op)
    texts = [(KERNELS / family / name).read_text() for name in decl.device["cuda"].host_sources]
    named = {name for text in texts for name in re.findall(rf'"({decl.name}_\w+)"', text)}
    assert named
    for inspected in built[op]:
        assert set(inspected.functions) == named


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", LIBRARY.ops)
def test_no_kernel_spills(built: dict[str, list[elf.Inspection]], op: str) -> None:
    for inspected in built[op]:
        for name, usage in inspected.functions.items():
            assert (usage.spills, usage.stack) == (0, 0), (name, inspected.archs)


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", LIBRARY.ops)
def test_a_launcher_runs_with_any_glibc_of_the_last_decade(built: dict[str, list[elf.Inspection]], op: str) -> None:
    for inspected in built[op]:
        floor = tuple(map(int, inspected.needs.get("glibc", "0").split(".")))
        assert floor <= (2, 17), inspected.needs
