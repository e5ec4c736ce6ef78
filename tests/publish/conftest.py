"""Repositories of a few small kernels, and a bucket that fails when it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.errors import SourceError
from kartifacts.model.manifest import Descriptor
from kartifacts.publish.buckets import Stamped
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.release import make_release

ARCHS = ("8.0", "9.0a", "cpu:x86-64-v3")
MakeBundle = Callable[..., Descriptor]
MakeRelease = Callable[..., Path]


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """Packs `count` kernels of one family for one arch into a repository; equal arguments give equal bytes."""

    def make(
        out: Path,
        *,
        family: str = "norm",
        arch: str = "9.0a",
        content: int = 0,
        count: int = 4,
        library: str = "demo",
        needs: dict[str, str] | None = None,
    ) -> Descriptor:
        folder = tmp_path / "kernels" / f"{family}-{arch}-{content}"
        folder.mkdir(parents=True, exist_ok=True)
        chance = random.Random(f"{family} {arch} {content}")
        entries = []
        for number in range(count):
            path = folder / f"{number}.so"
            path.write_bytes(chance.randbytes(3000 + number))
            entries.append(PackInput(f"{family}/op{number}?dtype=half", path, ".so", needs=needs or {}))
        options: dict[str, Any] = {"abi": "tvm-ffi-0.1", "toolchain": {"kind": "nvcc"}, "pack_bytes": 7000}
        return pack_bundle(entries, out, library=library, family=family, arch=arch, block_bytes=1, **options)

    return make


@pytest.fixture
def make_repository(make_bundle: MakeBundle) -> MakeRelease:
    """A repository with one release of two families for three archs."""

    def make(out: Path, version: str = "1.0", *, content: int = 0, library: str = "demo") -> Path:
        bundles = [
            make_bundle(out, family=family, arch=arch, content=content, library=library)
            for family in ("norm", "act")
            for arch in ARCHS
        ]
        make_release(out, library, version, bundles)
        return out

    return make


class CutBucket(DirectoryBucket):
    """A real directory whose writes stop working after some of them, before or after the last took effect."""

    def __init__(self, root: Path, *, writes: int = 1 << 30, last_takes_effect: bool = False) -> None:
        super().__init__(root)
        self.left = writes
        self.last_takes_effect = last_takes_effect
        self.written: list[str] = []

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        if self.size(path) is not None:
            return super().put_if_absent(path, content)
        self._spend(path)
        answer = super().put_if_absent(path, content)
        self._stop_if_spent(path)
        return answer

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        self._spend(path)
        super().swap(path, content, before)
        self._stop_if_spent(path)

    def _spend(self, path: str) -> None:
        if self.left == 0:
            raise SourceError(f"connection lost before {path}")
        self.left -= 1
        self.written.append(path)

    def _stop_if_spent(self, path: str) -> None:
        if self.left == 0 and self.last_takes_effect:
            raise SourceError(f"connection lost after {path}")


class CorruptingBucket(CutBucket):
    """A real directory that stores one flipped bit in the n-th blob."""

    def __init__(self, root: Path, *, victim: int) -> None:
        super().__init__(root)
        self.victim = victim

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        if len(self.written) == self.victim and path.startswith("blobs/"):
            data = bytearray(content if isinstance(content, bytes) else content.read_bytes())
            data[len(data) // 2] ^= 1
            content = bytes(data)
        return super().put_if_absent(path, content)


@pytest.fixture
def cut_bucket() -> type[CutBucket]:
    return CutBucket


@pytest.fixture
def corrupting_bucket() -> type[CorruptingBucket]:
    return CorruptingBucket


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a directory with its content; files that are being written are no part of it."""
    return lambda root: {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(".partial-")
    }
