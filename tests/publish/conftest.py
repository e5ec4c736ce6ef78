"""Repositories of a few small kernels, and a bucket that fails when it is told to."""

from __future__ import annotations

import builtins
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import pytest

from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.errors import SourceError
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import OCI_INDEX, OCI_LAYOUT, TIMESTAMP, View, metadata_path, target_path
from kartifacts.model.manifest import MEDIA_INDEX, Descriptor
from kartifacts.publish import plan as plans
from kartifacts.publish.buckets import MAX_SMALL, Listed, Stamped
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.promises import Promised, Promises, line_of
from kartifacts.publish.release import make_release
from kartifacts.testing import tiny_repository
from kartifacts.trust.client import Trusted, refresh
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keyfiles import Plan
from kartifacts.trust.keyring import Keyring

ARCHS = ("8.0", "9.0a", "cpu:x86-64-v3")
MakeBundle = Callable[..., Descriptor]
MakeRelease = Callable[..., Path]
MakeKeys = Callable[..., Keyring]


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


def promised(plan: plans.Plan, *uris: str, digest: Callable[[str], str] = lambda _: "") -> Promises:
    """That each build makes these kernels for each of its archs, but what the plan exempts."""
    lines = [
        line_of(
            build,
            [
                Promised(uri, str(arch), digest(uri))
                for uri in uris
                for arch in build.parsed
                if not plan.exempts(uri, arch)
            ],
        )
        for build in plan.builds
    ]
    return Promises(
        version=1,
        library=plan.library,
        library_version="1.0",
        plan=plan.digest,
        exempt=plan.exempt,
        builds=lines,
    )


class CutBucket(DirectoryBucket):
    """A real directory to which the connection is lost after some requests or writes, for good.

    Args:
        writes: how many writes still work; those that find the same bytes there already are not counted.
        requests: how many requests of any kind still work.
        last_takes_effect: whether the one that is cut off is carried out, and only its answer lost.
    """

    def __init__(
        self, root: Path, *, writes: int = 1 << 30, requests: int = 1 << 30, last_takes_effect: bool = False
    ) -> None:
        super().__init__(root)
        self.left = writes
        self.requests_left = requests
        self.last_takes_effect = last_takes_effect
        self.written: list[str] = []
        self.asked: list[str] = []

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        with self._asking("put", path):
            if super().size(path) is not None:
                return super().put_if_absent(path, content)
            self._spend(path)
            answer = super().put_if_absent(path, content)
            self._stop_if_spent(path)
            return answer

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        with self._asking("swap", path):
            self._spend(path)
            super().swap(path, content, before)
            self._stop_if_spent(path)

    def delete(self, path: str) -> None:
        with self._asking("delete", path):
            super().delete(path)

    def get(self, path: str, limit: int = MAX_SMALL) -> bytes:
        with self._asking("get", path):
            return super().get(path, limit)

    def digest(self, path: str) -> tuple[Digest, int]:
        with self._asking("digest", path):
            return super().digest(path)

    def size(self, path: str) -> int | None:
        with self._asking("size", path):
            return super().size(path)

    def read(self, path: str) -> Stamped | None:
        with self._asking("read", path):
            return super().read(path)

    def list(self, prefix: str) -> builtins.list[Listed]:
        with self._asking("list", prefix):
            return super().list(prefix)

    @contextmanager
    def _asking(self, verb: str, path: str) -> Iterator[None]:
        self.requests_left -= 1
        if self.requests_left < 0 and not (self.requests_left == -1 and self.last_takes_effect):
            raise SourceError(f"connection lost before {verb} {path}")
        self.asked.append(f"{verb} {path}")
        yield
        if self.requests_left < 0:
            raise SourceError(f"connection lost after {verb} {path}")

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


# -- signed buckets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_keys(tmp_path: Path) -> MakeKeys:
    """A keyring that may sign for some libraries, with one key for each role."""

    def make(*libraries: str, name: str = "keys") -> Keyring:
        one = Plan(1, 1)
        plans = {"targets": one, "online:root": one, "airgap:root": one}
        return init(tmp_path / name, libraries or ("demo",), plans, now=datetime.now(timezone.utc))

    return make


@pytest.fixture
def tiny(tmp_path: Path) -> MakeRelease:
    """A repository with one release of one kernel."""

    def make(version: str = "1.0", *, library: str = "demo", content: str = "") -> Path:
        path = tmp_path / "sources" / f"{library}-{version}-{content}"
        kernel = f"{library} {version} {content}".encode()
        return tiny_repository(path, {"norm/x?dtype=half": kernel}, library=library, version=version).path

    return make


class Readers:
    """Everybody who may read a bucket: new and old ones of both views, and tools that know only OCI."""

    def __init__(self, keyring: Keyring, state: Path) -> None:
        self.roots: dict[View, bytes] = {view: keyring.root(view) for view in ("online", "airgap")}
        self.state = state

    def remember(self, root: Path) -> None:
        """Let the old readers see a bucket as it is now."""
        for view in self.roots:
            self._refresh(view, root, self.state / view)

    def see(self, root: Path) -> dict[str, frozenset[str] | None]:
        """By reader the releases, with their channels; None if there is nothing.  Each is followed to its last byte."""
        seen: dict[str, frozenset[str] | None] = {
            "oci": frozenset(listed(root)) if (root / OCI_INDEX).exists() else None
        }
        for view in self.roots:
            with tempfile.TemporaryDirectory() as scratch:
                seen[f"new {view}"] = self._seen(view, root, None)
                if (self.state / view).exists():
                    shutil.copytree(self.state / view, Path(scratch) / "state")
                    seen[f"old {view}"] = self._seen(view, root, Path(scratch) / "state")
        return seen

    def _seen(self, view: View, root: Path, state: Path | None) -> frozenset[str] | None:
        if not (root / metadata_path(view, TIMESTAMP)).exists():
            with pytest.raises(SourceError) as caught:
                self._refresh(view, root, state)
            assert caught.value.missing
            return None
        found = set()
        for library in self._refresh(view, root, state).libraries.values():
            for release in library.releases:
                pin = release.pin
                named = root / target_path(pin.library, pin.version, Digest(pin.sha256))
                assert sha256(named.read_bytes()) == pin.sha256
                follow(root, {"mediaType": MEDIA_INDEX, "digest": pin.sha256, "size": pin.size})
                found.add(" ".join([pin.library, pin.version, *release.channels]))
        return frozenset(found)

    def _refresh(self, view: View, root: Path, state: Path | None) -> Trusted:
        return refresh(self.roots[view], state, DirectoryBucket(root).get)


@pytest.fixture
def readers(tmp_path: Path) -> Callable[[Keyring], Readers]:
    return lambda keyring: Readers(keyring, tmp_path / "readers")


def listed(root: Path) -> dict[str, str]:
    """What a tool that knows only OCI sees: tag → digest; each is followed to its last blob."""
    if not (root / OCI_INDEX).exists():
        return {}
    assert json.loads((root / OCI_LAYOUT).read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((root / OCI_INDEX).read_bytes())
    for entry in index["manifests"]:
        follow(root, entry)
    return {entry["annotations"]["org.opencontainers.image.ref.name"]: entry["digest"] for entry in index["manifests"]}


def follow(root: Path, descriptor: dict[str, Any]) -> None:
    digest = descriptor["digest"].removeprefix("sha256:")
    content = (root / "blobs" / "sha256" / digest).read_bytes()
    assert sha256(content) == digest
    assert len(content) == descriptor["size"]
    if descriptor["mediaType"].startswith("application/vnd.oci.image"):
        read = json.loads(content)
        for below in (*read.get("manifests", []), *read.get("layers", []), *filter(None, [read.get("config")])):
            follow(root, below)


@pytest.fixture
def oci_reader() -> Callable[[Path], dict[str, str]]:
    return listed
