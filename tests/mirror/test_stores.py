"""Mirrors on real servers: filled from a directory, proved where they are, and good to fill others from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kartifacts import config
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.pull import pull
from kartifacts.mirror.verify import verify
from kartifacts.publish.buckets import open_bucket
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.sources import open_mirror
from tests.mirror.conftest import Origin
from tests.stores.conftest import S3Server, credentials, nginx_uploads, registry, seaweedfs

__all__ = ["credentials", "nginx_uploads", "registry", "seaweedfs"]

pytestmark = pytest.mark.stores

Snapshot = Callable[[Path], dict[str, bytes]]


@pytest.fixture(params=["seaweedfs", "registry", "nginx_uploads"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The text of a bucket, which is that of a mirror as well."""
    given: Any = request.getfixturevalue(request.param)
    if isinstance(given, S3Server):
        return given.place().text
    server, _ = given
    base = f"oci+http://127.0.0.1:{server}" if request.param == "registry" else server
    return f"{base}/{tmp_path.name.lower().strip('_')}"


def test_a_mirror_on_a_server_is_filled_proved_and_mirrored_again(
    origin: Origin, place: str, snapshot: Snapshot, tmp_path: Path
) -> None:
    settings = config.read({"HOME": str(tmp_path), "KARTIFACTS_RETRIES": "1", "KARTIFACTS_DOWNLOAD_THREADS": "4"})
    bucket = open_bucket(place, settings, single_writer=place.startswith(("http:", "oci")))
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
    pull(open_mirror(place, fresh), DirectoryBucket(again), origin.trust, Filter(), fresh)
    here, there = snapshot(again), snapshot(origin.path)
    assert len(here) > 50
    assert all(content == there[path] for path, content in here.items() if path != "mirror.json")
