"""A small repository with everything in it: two signed releases with provenance, both views, and a second root."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kartifacts.build.blocks import PackInput
from kartifacts.build.pack import pack_bundle
from kartifacts.config import Settings
from kartifacts.errors import VerificationError
from kartifacts.mirror.contents import contents_of
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.reading import BucketSource, Reader
from kartifacts.mirror.trusting import Basis
from kartifacts.model.digest import sha256
from kartifacts.model.layout import VIEWS, View
from kartifacts.model.manifest import Synced
from kartifacts.model.materials import Content, Materials
from kartifacts.publish.attestations import Believed, check_release, index_of
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.trust.client import refresh
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keychange import renew
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.released import Released

BUILDER = "https://ci.example/builders/7"


@dataclass(frozen=True)
class Small:
    """Where it lies, whom its readers trust, and what they have seen there."""

    path: Path
    older: Path  # the same before its second release
    keyring: Keyring
    seen: Mapping[View, Synced]


def make(place: Path) -> Small:
    """Publish into `place` as a publisher does."""
    keyring = init(place / "keys", ["demo"], {}, now=datetime.now(timezone.utc))
    bucket = DirectoryBucket(place / "repository")
    publish(_built(place, "1.0"), bucket, keyring=keyring, channels=["stable"], builder_id=BUILDER)
    shutil.copytree(bucket.root, place / "older")
    renew(keyring.path, "root", now=datetime.now(timezone.utc))
    done = publish(_built(place, "1.1"), bucket, keyring=Keyring.load(keyring.path), builder_id=BUILDER)
    return Small(bucket.root, place / "older", keyring, done.seen)


def _built(place: Path, version: str) -> Path:
    """A repository of one bundle of two kernels, which says what it was made of."""
    out, chance = place / f"built-{version}", random.Random(version)
    inputs, imported = [], []
    for name in ("one", "two"):
        path = place / f"{version}-{name}.cubin"
        path.write_bytes(chance.randbytes(200))
        inputs.append(PackInput(f"norm/{name}.cubin", path, ".cubin"))
        imported.append(Content(path=f"norm/{name}.cubin", sha256=sha256(path.read_bytes()), size=200))
    about: dict[str, str] = {"library": "demo", "family": "norm", "arch": "9.0a", "abi": "none"}
    listed = Content(path="checksums.txt", sha256=sha256(version.encode()), size=3)
    materials = Materials(version=1, kind="import", files=[listed], imported=imported, **about)  # type: ignore[arg-type]
    bundle = pack_bundle(inputs, out, toolchain={}, **about)  # type: ignore[arg-type]
    make_release(out, "demo", version, [bundle], {bundle.digest: materials})
    return out


def looked_at(small: Small, settings: Settings) -> dict[str, Any]:
    """All that readers of both views come to believe, to the last byte of every kernel.

    Raises:
        KartifactsError: they believe nothing.
    """
    bucket, repository = DirectoryBucket(small.path), Repository(small.path)
    found: dict[str, Any] = {}
    releases: dict[Released, Believed] = {}
    for view in VIEWS:
        trusted = refresh(small.keyring.root(view), None, bucket.get, floor=small.seen[view])
        found[view] = trusted.seen, trusted.libraries
        library = trusted.libraries["demo"]
        believed = Believed(library.keys, library.threshold)
        releases.update(dict.fromkeys(library.releases, believed))  # nearly always the same in both views
    reader = Reader([BucketSource(bucket)], settings)
    contents = contents_of(Basis(tuple(releases)), Filter(), reader, threads=1)
    for blob in contents.blobs:
        with reader.content(blob):
            pass
    for target in contents.targets:
        if bucket.digest(target.path) != target.blob[:2]:
            raise VerificationError(f"{target.path} is damaged")
    for release, believed in releases.items():
        assert release.provenance is not None
        index = index_of(repository, release.pin, release.provenance[0])
        found[release.pin.version] = check_release(repository, release.pin, index, believed, builder_id=BUILDER)
    found["paths"] = contents.paths
    return found
