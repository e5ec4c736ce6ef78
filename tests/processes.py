"""Other processes, a place that other users can reach, and the state of a tree, for the tests of several packages."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_IMPORTS = "grp, os, pwd, ssl, tqdm, zstandard, kartifacts.config, kartifacts.fetch, kartifacts.sources.http"


_ports: Iterator[int] = iter(())


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody uses, and that no other test is about to use."""
    global _ports
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    for _ in range(2):  # once more from the beginning, where others have ended since
        for first in _ports:
            if first % count == 0 and all(map(_is_free, range(first, first + count))):
                for _ in range(count - 1):
                    next(_ports, None)
                return first
        # Below the ports that connections take, and for each worker another part.
        begin = 20_000 + int(worker.removeprefix("gw")) % 6 * 2_000
        _ports = iter(range(begin + os.getpid() % 18 * 100, begin + 1_992))
    pytest.fail("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


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
