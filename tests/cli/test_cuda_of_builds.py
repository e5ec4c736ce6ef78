"""The CUDA that a build of a plan names is that of all code it makes, whichever compiler makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from kartifacts.build.library import open_library
from kartifacts.build.toolchains import Toolchain
from kartifacts.cli.flows.planned import check_toolkit_of
from kartifacts.errors import ConfigError
from kartifacts.model.arch import parse_archs
from kartifacts.model.spec import Spec
from kartifacts.publish.plan import Build
from tests.build.pythons import CUTEDSL, TRITON, write

PTXAS = {"8.0": "12.9", "9.0a": "13.4", "10.0a": "13.4"}  # as Triton 3.9 has two of them


@dataclass(frozen=True)
class Compiler:
    """A compiler that says what it is, and makes nothing."""

    kind: str
    fingerprint: Mapping[str, str]
    place: Path = Path("/compilers/one")

    def made_with(self, spec: Spec) -> dict[str, str]:
        own = {"kind": self.kind, **self.fingerprint}
        return {**own, "cuda": PTXAS[str(spec.arch)]} if (self.kind, spec.arch.kind) == ("triton", "cuda") else own


def check(root: Path, compiler: Compiler, archs: str, cuda: str, **more: Any) -> None:
    specs, skipped = open_library(root).specs([], parse_archs(archs))
    assert specs
    assert not skipped
    build = Build(name="gpus", machine="x86_64", cuda=cuda, archs=archs.split(), **more)
    [declared] = {spec.device.toolchain for spec in specs}
    check_toolkit_of(build, {declared: cast(Toolchain, compiler)}, specs)


def refused(root: Path, compiler: Compiler, archs: str, cuda: str, **more: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(root, compiler, archs, cuda, **more)
    return caught.value.message, str(caught.value.hint)


def test_code_that_triton_assembles_by_another_cuda_is_refused_with_the_build_that_would_do(tmp_path: Path) -> None:
    root, compiler = write(tmp_path / "lib", TRITON), Compiler("triton", {"version": "3.9.0"})
    check(root, compiler, "9.0a 10.0a gfx942", "13.4")
    check(root, compiler, "8.0", "12.9")
    check(root, compiler, "gfx942", "12.4")
    check(root, compiler, "8.0 9.0a", "")  # of schema 1, which names none
    for cuda in ("12.4", "13.0", "13.40"):
        message, hint = refused(root, compiler, "9.0a 10.0a gfx942", cuda)
        assert message == f"build 'gpus' is for CUDA {cuda}; what triton 3.9.0 makes for 9.0a is of CUDA 13.4"
        assert 'cuda = "13.4", archs = ["9.0a", "10.0a"], ops = ["demo/scale"]' in hint
    message, hint = refused(root, compiler, "8.0 9.0a", "13.4")
    assert "makes for 8.0 is of CUDA 12.9" in message
    assert 'cuda = "12.9", archs = ["8.0"]' in hint


def test_a_runtime_of_another_cuda_that_is_linked_in_is_refused(tmp_path: Path) -> None:
    root, compiler = write(tmp_path / "lib", CUTEDSL), Compiler("cutedsl", {"version": "4.8.1", "cudart": "13050"})
    check(root, compiler, "9.0a", "13.5")
    message, hint = refused(root, compiler, "9.0a", "12.9")
    assert message == "build 'gpus' is for CUDA 12.9; what cutedsl 4.8.1 makes for 9.0a is of CUDA 13.5"
    assert "set CUDA_HOME to the toolkit whose runtime is to be linked in" in hint


def test_code_of_which_nobody_says_the_cuda_is_refused(tmp_path: Path) -> None:
    root, compiler = write(tmp_path / "lib", CUTEDSL), Compiler("cutedsl", {"version": "4.8.1"})
    assert "is of CUDA unknown" in refused(root, compiler, "9.0a", "12.9")[0]


@pytest.mark.parametrize("kind", ["nvcc", "nvrtc"])
def test_a_toolkit_of_another_cuda_is_refused(kind: str, tmp_path: Path) -> None:
    text = CUTEDSL["demo/op.toml"].split("[op.device.cuda.kernel]")[0].replace("scale.py", "scale.cu")
    files = {"demo/op.toml": text.replace("cutedsl", kind), "demo/scale.cu": "// a kernel\n"}
    root, compiler = write(tmp_path / "lib", files), Compiler(kind, {"version": "13.0.88"})
    check(root, compiler, "9.0a", "13.0")
    message, hint = refused(root, compiler, "9.0a", "12.9")
    assert message == f"build 'gpus' is for CUDA 12.9; {kind} in /compilers/one is of CUDA 13.0.88"
    assert hint == "set CUDA_HOME"
    assert refused(root, compiler, "9.0a", "12.9", builder="old")[1] == "use the environment of builders/old"
