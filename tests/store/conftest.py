"""Stores, other processes, small file systems and another user: what the store's tests stand on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python code in a process of its own; with `user` it becomes another user once everything is imported."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, user: int | None = None) -> subprocess.Popen[str]:
        become = (
            f"import grp, os, pwd, kartifacts.store; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"
            if user
            else ""
        )
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 1 MiB."""
    yield from _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mounts something over a directory until the test ends."""
    mounted: list[Path] = []

    def over(path: Path, *arguments: str) -> None:
        _mount(path, *arguments)
        mounted.append(path)

    yield over
    for path in reversed(mounted):
        subprocess.run(["umount", path], check=True)


def _mounted(path: Path, *arguments: str) -> Iterator[Path]:
    path.mkdir()
    _mount(path, *arguments)
    yield path
    subprocess.run(["umount", path], check=True)


def _mount(path: Path, *arguments: str) -> None:
    found = subprocess.run(["mount", *arguments, path], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"mounting a file system is not allowed here: {found.stderr.strip()}")


@pytest.fixture
def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to act as two users")
