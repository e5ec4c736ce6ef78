"""A signed repository of a few small kernels, and what it takes to mirror it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from kartifacts.config import Settings
from kartifacts.mirror.contents import Contents
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.promote import Promotion
from kartifacts.mirror.pull import Trust, pull
from kartifacts.model.manifest import Descriptor
from kartifacts.model.materials import Content, Materials
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.sources.directory import DirectorySource
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keyring import Keyring
from tests.publish.conftest import CutBucket, make_bundle, make_repository, snapshot

__all__ = ["CutBucket", "make_bundle", "make_repository", "snapshot"]


def materials_of(shelf: Repository, bundle: Descriptor) -> Materials:
    """As if what is in a bundle had been imported."""
    table = shelf.table(shelf.bundle(bundle), "table")
    imported = [Content(path=kernel.uri, sha256=kernel.sha256, size=kernel.size) for kernel in table.kernels]
    about = {name: getattr(table, name) for name in ("library", "family", "arch", "abi")}
    return Materials(version=1, kind="import", files=[], imported=imported, **about)


@dataclass
class Origin:
    """Where releases are published, signed for both views."""

    path: Path
    keyring: Keyring
    make: Callable[..., Path]

    def release(
        self, version: str = "1.0", *, library: str = "demo", content: int = 0, channels: tuple[str, ...] = ()
    ) -> None:
        made = self.make(
            self.path.parent / f"made-for-{self.path.name}-{library}-{version}",
            version,
            content=content,
            library=library,
        )
        shelf = Repository(made)
        (pin,) = shelf.pins(library, version)
        bundles = shelf.release(pin).manifests
        make_release(made, library, version, bundles, {each.digest: materials_of(shelf, each) for each in bundles})
        bucket = DirectoryBucket(self.path)
        publish(made, bucket, keyring=self.keyring, channels=channels, builder_id="https://ci.example/builders/7")

    @property
    def source(self) -> DirectorySource:
        return DirectorySource(self.path, mirror=True)

    def root(self, view: str) -> bytes:
        return self.keyring.root("airgap" if view == "airgap" else "online")

    @property
    def trust(self) -> Trust:
        return Trust((self.root("online"), self.root("airgap")))

    @property
    def airgap(self) -> Trust:
        return Trust((self.root("airgap"),))


@pytest.fixture(scope="session")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return init(tmp_path_factory.mktemp("keys") / "keys", ["demo", "other"], {}, now=datetime.now(timezone.utc))


@pytest.fixture(scope="session")
def first_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs it leaves the origin as all others find it."""
    return tmp_path_factory.mktemp("first") / "origin"


@pytest.fixture
def origin(tmp_path: Path, keyring: Keyring, make_repository: Callable[..., Path], first_release: Path) -> Origin:
    made = Origin(tmp_path / "origin", keyring, make_repository)
    if not first_release.exists():
        made.release()
        shutil.copytree(made.path, first_release)
    else:
        shutil.copytree(first_release, made.path)
    return made


@pytest.fixture
def small(origin: Origin, make_bundle: Callable[..., Any]) -> Origin:
    """The same with one bundle a release from here on, for tests that do everything at each step."""

    def make(out: Path, version: str, *, content: int, library: str) -> Path:
        make_release(out, library, version, [make_bundle(out, content=content, library=library, count=1)])
        return out

    origin.make = make
    return origin


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """One transfer at a time, so that a cut falls where it is meant to."""
    return Settings(store=tmp_path / "store", workspace=tmp_path / "workspace", download_threads=1, retries=0)


Pull = Callable[..., tuple[Contents, Promotion]]


@pytest.fixture
def mirror(origin: Origin, settings: Settings) -> Pull:
    """Pulls from the origin into a bucket; what was seen is remembered, unless it is told to forget."""

    def do(bucket: Bucket, trust: Trust | None = None, *, forget: Path | None = None, **chosen: Any) -> Any:
        used = settings if forget is None else replace(settings, store=forget)
        return pull(origin.source, bucket, trust or origin.trust, Filter(**chosen), used)

    return do
