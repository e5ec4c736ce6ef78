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
from kartifacts.model.digest import sha256
from kartifacts.model.layout import blob_path
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.publish.referrers import PROVENANCE, index_of, refer
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.sources.directory import DirectorySource
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keyring import Keyring
from tests.publish.conftest import CutBucket, make_bundle, make_repository, snapshot

__all__ = ["CutBucket", "make_bundle", "make_repository", "snapshot"]


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
        bucket = DirectoryBucket(self.path)
        said = [
            refer(PROVENANCE, bundle, [b'{"%d": "%s"}' % (number, bundle.digest.encode()) for number in range(3)])
            for pin in Repository(made).pins(library, version)
            for bundle in Repository(made).release(pin).manifests
        ]
        index = index_of(PROVENANCE, library, version, said)
        for digest, blob in [*(each for one in said for each in one.blobs), (sha256(index), index)]:
            bucket.put_if_absent(blob_path(digest), blob)
        extra = {f"{library}/{version}/provenance.json": index}
        publish(made, bucket, keyring=self.keyring, channels=channels, extra_targets=extra)

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
