"""README and the pages about releases, typed into a shell as they stand there, do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CPU_ARCHS, Machine
from tests.sites import plan_text

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()
RELEASES = (CHECKOUT / "docs/howto/releases.md").read_text()
RELEASE = (CHECKOUT / "docs/howto/release.md").read_text()
REPRODUCIBLE = (CHECKOUT / "docs/howto/reproducible.md").read_text()
KEPT = Path(".config/kartifacts/kartifacts.lock")


class Shell:
    """A shell of somebody who has installed kartifacts, in a home of its own."""

    def __init__(self, machine: Machine) -> None:
        self.home = machine.home
        programs = machine.home / "bin"
        programs.mkdir()
        for name, command in (("kartifacts", f"{sys.executable} -m kartifacts"), ("python", sys.executable)):
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.environ = {**machine.environ({}), "PATH": f"{programs}:{os.environ['PATH']}"}
        del self.environ["KARTIFACTS_STORE"], self.environ["KARTIFACTS_WORKSPACE"]

    def run(self, text: str) -> str:
        command = ["bash", "-euc", text]
        done = subprocess.run(command, cwd=self.home, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pinned(self) -> str:
        """The version that the one library is pinned at."""
        [release] = json.loads((self.home / KEPT).read_bytes())["releases"]
        return str(release["version"])


@pytest.fixture
def shell(machine: Machine) -> Shell:
    return Shell(machine)


def example(name: str) -> str:
    """One of the examples of the README."""
    found = re.search(rf"<!-- example: {name} -->\n```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_the_signed_example_of_the_readme_works_when_it_is_copied(shell: Shell) -> None:
    assert "signed" in shell.run(example("publish"))
    used = shell.run(example("use"))
    assert used.splitlines()[-1] == "store"
    shell.run(example("again"))
    shell.run(example("use"))
    assert shell.pinned() == "0.2.0"


def test_the_page_about_releases_works_as_it_stands_there(shell: Shell) -> None:
    release, *blocks = re.findall(r"^```sh\n(.*?)^```$", RELEASES, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3

    def typed(text: str) -> str:
        for told, here in (
            ("s3://bucket/kernels", "./bucket"),
            ("mylib", "kartifacts"),  # which is installed here
            ("'8.0 9.0a'", f"{CPU_ARCHS.split()[-1]} --ops norm/layernorm"),
        ):
            text = text.replace(told, here)
        return shell.run(f"export KARTIFACTS_MIRRORS=$PWD/bucket; {text}")

    typed("kartifacts keys init ring --library mylib; kartifacts keys export ring ci --roles snapshot,timestamp,mylib")
    root = shell.home / KEPT.parent / "root.json"
    typed(f"mkdir -p {root.parent}; kartifacts keys root ring --out {root}")
    typed(release.replace("1.1", "1.0"))
    typed(release)
    promoted, retired, retained = blocks
    typed(promoted)
    assert shell.pinned() == "1.1"
    typed(retired)
    assert "would delete" in typed(retained)
    typed("kartifacts sync; kartifacts fetch")
    assert shell.pinned() == "1.1"


def test_a_published_release_is_built_again_and_proved_equal_as_the_page_says(shell: Shell) -> None:
    arch = CPU_ARCHS.split()[-1]
    look, again = re.findall(r"^```sh\n(.*?)^```$", REPRODUCIBLE, re.DOTALL | re.MULTILINE)

    def typed(text: str) -> str:
        for told, here in (
            ("s3://bucket/kernels", "./bucket"),
            ("mylib", "kartifacts"),
            ("'8.0 9.0a'", f"{arch} --ops norm/layernorm"),
        ):
            text = text.replace(told, here)
        return shell.run(text)

    shell.run("kartifacts keys init ring --library kartifacts; kartifacts keys root ring --out root.json")
    typed("kartifacts build --library mylib --release-version 1.1 --archs '8.0 9.0a' --out out")
    shell.run("kartifacts publish ./bucket --from out --release-version 1.1 --keys ring")
    said = typed(look)
    assert f"kartifacts 1.1: norm for {arch}: 3 kernels" in said
    assert re.search(r"^  version: (gcc|clang|Debian clang|Ubuntu clang)", said, re.MULTILINE)
    assert typed(again).splitlines()[-1] == "the same repositories"
    shell.run("rm -r rebuilt")
    with pytest.raises(AssertionError, match=r"toolchain:\n\s+overrides: is -fno-math-errno"):
        typed(f"export KARTIFACTS_CXX_FLAGS=-fno-math-errno\n{again}")


def test_the_page_about_making_a_release_works_as_it_stands_there(shell: Shell) -> None:
    dry_run, build, publish, use, measure, export = re.findall(r"^```sh\n(.*?)^```$", RELEASE, re.DOTALL | re.MULTILINE)
    assert dry_run == "ci/release --dry-run\n"  # which CI does
    part = {"archs": CPU_ARCHS.split()[-1:], "ops": ["norm/layernorm"], "shards": 2}
    plan = plan_text("kartifacts", {"name": "cpu", "machine": os.uname().machine, **part})
    (shell.home / "plan.toml").write_text(plan)

    def typed(text: str) -> str:
        for told, here in (
            ("manifests/release.toml", "plan.toml"),
            ("manifests/costs.json", "costs.json"),
            ("cuda-13.0-x86_64", "cpu"),
            ("s3://builders/shards", "./shards"),
            ("s3://bucket/kernels", "./bucket"),
            ("mylib", "kartifacts"),
        ):
            text = text.replace(told, here)
        return shell.run(f"export KARTIFACTS_MIRRORS=$PWD/bucket; {text}")

    typed("kartifacts keys init ring --library mylib")
    typed(export)
    assert len((shell.home / "release-keys").read_text()) < 48 << 10  # a secret of GitHub
    typed(f"mkdir -p {KEPT.parent}; cp root.json {KEPT.parent}")
    assert "built 0" not in typed(build)
    assert typed(build).count("built 0") == 2
    assert "is what the plan promises" in typed(publish)
    typed(use)
    assert shell.pinned() == "1.2.0"
    typed(measure)
    assert "norm/layernorm_cpu.cpp" in (shell.home / "costs.json").read_text()
