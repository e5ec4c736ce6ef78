"""The guide for kernel authors: its files, as they stand there, are a library that works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kartifacts.build.library import open_library
from tests.conftest import Machine

GUIDE = Path(__file__).parents[2] / "docs/kernel-authors.md"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The directory of the families that the guide writes."""
    root = tmp_path / "acme_kernels/kernels"
    (root / "scale").mkdir(parents=True)
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        named = re.match(r"(?://|#) (scale/\w+\.\w+)\n", text)
        if named:
            (root / named[1]).write_text(text[named.end() :])
        elif language == "toml" and text.startswith("schema"):
            (root / "scale/op.toml").write_text(text)
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
