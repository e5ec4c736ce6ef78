"""Other processes, a place that other users can reach, and the state of a tree, for the tests of several packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_IMPORTS = "grp, os, pwd, ssl, tqdm, zstandard, kartifacts.config, kartifacts.fetch, kartifacts.sources.http"


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python code in a process of its own; with `user` it becomes another user once everything is imported."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, user: int | None = None) -> subprocess.Popen[str]:
        become = f"import {_IMPORTS}\nos.setgroups([]); os.setgid({user}); os.setuid({user})\n" if user else ""
        process = subprocess.Popen(
            [sys.executable, "-c", become + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user can reach, which pytest's own cannot."""
    path = Path(tempfile.mkdtemp(prefix="kartifacts-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def state(root: Path) -> dict[str, tuple[int, int, int]]:
    """All that a write anywhere below would change."""
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return found
