"""Stores, other processes, small file systems and another user: what the store's tests stand on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts.store import Store
from tests.processes import open_path, run

__all__ = ["open_path", "run"]  # fixtures


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


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
