"""Mirrors on real servers: filled from a directory, proved where they are, and good to fill others from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.mirror import reading
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.pull import pull
from kartifacts.mirror.verify import verify
from kartifacts.publish.buckets import Bucket, open_bucket
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.sources import open_mirror
from tests.mirror.conftest import Origin
from tests.stores.conftest import S3Server, credentials, nginx_uploads, registry, seaweedfs

__all__ = ["credentials", "nginx_uploads", "registry", "seaweedfs"]

pytestmark = pytest.mark.stores

Snapshot = Callable[[Path], dict[str, bytes]]


@pytest.fixture(params=["seaweedfs", "registry", "nginx_uploads"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes the texts of buckets, which are those of mirrors as well."""
    given: Any = request.getfixturevalue(request.param)
    names = map(str, itertools.count())

    def make() -> str:
        if isinstance(given, S3Server):
            return given.place().text
        server, _ = given
        base = f"oci+http://127.0.0.1:{server}" if request.param == "registry" else server
        return f"{base}/{tmp_path.name.lower().strip('_')}-{next(names)}"

    return make


def opened(place: str, settings: Settings) -> Bucket:
    return open_bucket(place, settings, single_writer=place.startswith(("http:", "oci")))


def test_a_mirror_on_a_server_is_filled_proved_and_mirrored_again(
    origin: Origin,
    place: Callable[[], str],
    snapshot: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    first, second = place(), place()
    settings = config.read({"HOME": str(tmp_path), "KARTIFACTS_RETRIES": "1", "KARTIFACTS_DOWNLOAD_THREADS": "4"})
    bucket = opened(first, settings)
    for number, version in enumerate(("1.0", "2.0")):
        if number:
            origin.release(version, content=number)
        _, done = pull(origin.source, bucket, origin.trust, Filter(), settings)
        assert done.changed
        report = verify(bucket, origin.trust, None, settings)
        assert report.faults == ()
        assert len(report.contents.releases) == number + 1
    _, done = pull(origin.source, bucket, origin.trust, Filter(), settings)
    assert (done.blobs, done.changed) == (0, False)
    again, fresh = tmp_path / "again", replace(settings, store=tmp_path / "fresh")
    monkeypatch.setattr(reading, "IN_MEMORY", 0)  # all through the disk, as what is large
    pull(open_mirror(first, fresh), opened(second, fresh), origin.trust, Filter(), fresh)
    assert verify(opened(second, fresh), origin.trust, None, settings).faults == ()
    pull(open_mirror(second, fresh), DirectoryBucket(again), origin.trust, Filter(), fresh)
    here, there = snapshot(again), snapshot(origin.path)
    assert len(here) > 50
    assert all(content == there[path] for path, content in here.items() if path != "mirror.json")
