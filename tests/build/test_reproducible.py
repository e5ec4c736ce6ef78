"""The same inputs give the same bytes, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.build.closure import own_root
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.model.arch import parse_arch


@pytest.mark.parametrize("arch", ["cpu:x86-64-v3", pytest.param("9.0a", marks=pytest.mark.nvcc)])
def test_the_directory_of_the_sources_is_not_in_the_bytes(arch: str, tmp_path: Path) -> None:
    digests = set()
    for place in ("here", "a/longer/way/down"):
        root = own_root()
        assert root is not None
        library = open_library(shutil.copytree(root, tmp_path / place / "kernels"), "kartifacts")
        specs = [
            library.spec(op, {"dtype": "bfloat16"}, parse_arch(arch))
            for op in ("norm/rmsnorm", "activation/silu_and_mul")
        ]
        settings = config.read(overrides={"workspace": tmp_path / place / "workspace"})
        digests.add(tuple(kernel.sha256 for kernel in compile_specs(specs, settings).kernels))
    assert len(digests) == 1
