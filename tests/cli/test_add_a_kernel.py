"""The page on how to add a kernel: its files are written, its commands typed in order, and what they print compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from kartifacts.build.toolchains import find
from kartifacts.build.toolchains.nvrtc import Nvrtc
from kartifacts.errors import NoCompiler
from tests.conftest import Machine

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs/howto/add-a-kernel.md"
NAMED = re.compile(r"(?:#|//) ([\w./]+\.\w+)\n")


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The name of the file that it is; empty if it is none."""
        named = NAMED.match(self.text)
        return named[1] if named and self.language not in ("sh", "text") else ""


def blocks(told: dict[str, str]) -> list[Block]:
    """What the page shows, with what this machine has in place of what it tells of."""
    text = PAGE.read_text()
    for there, here in told.items():
        text = text.replace(there, here)
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(*block) for block in found]


def matches(shown: str, said: str) -> bool:
    """Whether a text is what was shown; `...` stands for any part of a line, or for any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + "\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, said) is not None


class Walk:
    """Somebody who follows the page, in an environment that has kartifacts, pip and pytest."""

    def __init__(self, machine: Machine) -> None:
        self.place = machine.home / "acme"
        self.place.mkdir()
        venv = machine.home / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        others = [path for path in sys.path if path.endswith("-packages")]
        (site / "others.pth").write_text("\n".join([*others, str(CHECKOUT)]))
        for name in ("kartifacts", "pip"):
            (venv / "bin" / name).write_text(f'#!/bin/sh\nexec {venv}/bin/python -m {name} "$@"\n')
            (venv / "bin" / name).chmod(0o755)
        self.environ = machine.environ({"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        self.environ |= {"PATH": f"{venv}/bin:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    def write(self, block: Block) -> None:
        path = self.place / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text.partition("\n")[2])

    def type(self, text: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=self.place, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def told(machine: Machine) -> dict[str, str]:
    """What of the page is another way on this machine; skips where there is no NVRTC."""
    try:
        compiler = find("nvrtc", machine.settings(cuda_compiler="nvrtc"))
    except NoCompiler as error:
        pytest.skip(f"needs NVRTC: {error.message}")
    assert isinstance(compiler, Nvrtc)
    isa = os.uname().machine
    return {
        "13.0": str(compiler.facts["release"]),
        "x86_64": isa,
        **({} if isa == "x86_64" else {"cpu:x86-64-v3": f"cpu:{isa}"}),
    }


@pytest.mark.nvrtc
def test_whoever_follows_the_page_has_a_kernel_that_is_released(machine: Machine) -> None:
    if find_spec("pip") is None:
        pytest.skip("needs pip in this environment")
    here = told(machine)
    walk = Walk(machine)
    compared, said = 0, None
    for block in blocks(here):
        if block.language == "sh":
            said = walk.type(block.text)
        elif block.language == "text":
            assert said is not None, f"no command prints this:\n{block.text}"
            assert matches(block.text, said), f"the page shows\n{block.text}\nand the command says\n{said}"
            compared, said = compared + 1, None
        elif block.file:
            walk.write(block)
    assert compared == 7
    kernels = sorted(path.name for path in (walk.place / "acme_kernels/kernels/scale").iterdir() if path.is_file())
    assert set(kernels) == named()


def named() -> set[str]:
    """The files of the family, as the page lists them."""
    return set(re.findall(r"scale/(\w+\.\w+)", blocks({})[0].text))


def test_the_page_shows_every_file_that_it_lists() -> None:
    shown = {Path(block.file).name for block in blocks({}) if "/scale/" in block.file}
    assert shown == named()
    assert len(shown) == 8


@pytest.mark.parametrize(
    ("shown", "said", "alike"),
    [
        ("a\n", "a\n", True),
        ("a ... c\n", "a b c\n", True),
        ("a\n...\nc\n", "a\nc\n", True),
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\nc\n", "a\nb\n", False),
        ("a...\n", "b\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_what_a_command_says_is_compared_line_by_line(shown: str, said: str, alike: bool) -> None:
    assert matches(shown, said) is alike
