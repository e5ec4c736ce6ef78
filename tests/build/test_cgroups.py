"""A container with little memory: the limit is seen and kept to, and whom the kernel kills for it is tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from .conftest import CPU, Compiler

MIB = 1 << 20
TOP = Path("/sys/fs/cgroup")

BUILD = """
import json, sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.model.arch import parse_arch
specs, _ = open_library(Path(sys.argv[1])).specs([], [parse_arch(sys.argv[2])])
report = compile_specs(specs, config.read()).report
print(json.dumps([report["jobs"], report["jobs_reason"], report["kernels"]]))
"""


def own_group() -> tuple[Path, str]:
    """The group that this process is in, of the version that has the memory, and the name of a group's limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return TOP / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return TOP, "memory.max"


@pytest.fixture
def in_group() -> Iterator[Callable[[int], list[str]]]:
    """Makes a group that may take so many bytes; gives the beginning of a command line that is run in it."""
    made: list[Path] = []

    def make(most: int) -> list[str]:
        home, limit = own_group()
        if not home.is_dir():  # as in a container that sees only its own group, as the top
            home = TOP / "memory" if limit.endswith("in_bytes") else TOP
        group = home / f"kartifacts-test-{uuid.uuid4().hex}"
        try:
            group.mkdir()
            made.append(group)
            if not (group / limit).exists():
                raise OSError(f"it has no {limit}")
            (group / limit).write_text(str(most))
            with suppress(OSError):  # or the kernel writes to the disk what does not fit
                (group / "memory.swappiness").write_text("0")
            (group / "cgroup.procs").stat()
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        return ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]

    yield make
    for group in made:
        for _ in range(100):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


@pytest.fixture
def build(root: Path, tmp_path: Path, compiler: Compiler) -> Callable[..., tuple[int, str, int]]:
    def run(prefix: list[str], **environ: str) -> tuple[int, str, int]:
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "KARTIFACTS_WORKSPACE": str(tmp_path / "workspace"),
            "KARTIFACTS_CXX": str(compiler.path),
        }
        command = [*prefix, sys.executable, "-c", BUILD, str(root), str(CPU)]
        done = subprocess.run(command, env={**base, **environ}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        jobs, reason, kernels = json.loads(done.stdout)
        return jobs, reason, kernels

    return run


def test_the_memory_of_a_container_decides_how_many_compilers_run(
    in_group: Callable[[int], list[str]], build: Callable[..., tuple[int, str, int]]
) -> None:
    jobs, reason, kernels = build(in_group(1400 * MIB))  # of which 1 GiB is left to others
    assert (jobs, kernels) == (1, 2)
    assert reason.startswith("cgroup memory: 1.")


def test_a_compiler_that_the_kernel_kills_for_memory_is_tried_again_beside_fewer(
    in_group: Callable[[int], list[str]],
    build: Callable[..., tuple[int, str, int]],
    compiler: Compiler,
    tmp_path: Path,
) -> None:
    # All three at once, however busy the machine is.
    started = tmp_path / "started"
    started.mkdir()
    hog = (
        f'import os, time; open(f"{started}/{{os.getpid()}}", "x")\n'
        f'while len(os.listdir("{started}")) < 3: time.sleep(0.02)\n'
        "b = bytearray(200 << 20); time.sleep(1.5)"
    )
    compiler.misbehave(f"{sys.executable} -S -c '{hog}' || exit 137")
    jobs, reason, kernels = build(in_group(550 * MIB), KARTIFACTS_JOBS="4")
    assert jobs in (1, 2)
    assert reason.startswith("halved, since a compiler was killed; before: ")
    assert kernels == 2
    assert len(compiler.compiled) > 3
