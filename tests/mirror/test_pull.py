"""Filling a mirror: what arrives, what is left out, and what its readers see wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.verify import verify_repository
from kartifacts.trust.client import refresh
from tests.mirror.conftest import CutBucket, Origin

Snapshot = Callable[[Path], dict[str, bytes]]
Do = Callable[..., Any]

OURS = {"mirror.json"}  # what only a mirror has


def versions(root: Path, trusted: bytes) -> set[str]:
    """What a reader who starts anew finds at `root`, each proved complete to the last kernel."""
    bucket = DirectoryBucket(root)
    found = {
        release.pin.version
        for library in refresh(trusted, None, bucket.get).libraries.values()
        for release in library.releases
    }
    for version in found:
        verify_repository(root, version=version, deep=True).check(str(root))
    return found


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_a_mirror_serves_the_same_bytes_under_the_same_names(
    origin: Origin, mirror: Do, snapshot: Snapshot, tmp_path: Path
) -> None:
    mirror(DirectoryBucket(tmp_path / "mirror"))
    there, here = snapshot(origin.path), snapshot(tmp_path / "mirror")
    assert {path: data for path, data in here.items() if path not in OURS} == {
        path: data for path, data in there.items() if not path.startswith("gc/")
    }
    for view in ("online", "airgap"):
        assert versions(tmp_path / "mirror", origin.root(view)) == {"1.0"}


def test_the_second_pull_writes_nothing(origin: Origin, mirror: Do, snapshot: Snapshot, tmp_path: Path) -> None:
    mirror(DirectoryBucket(tmp_path / "mirror"))
    before = snapshot(tmp_path / "mirror")
    again = CutBucket(tmp_path / "mirror")
    _, done = mirror(again)
    assert [path for path in again.written if not path.startswith("gc/")] == []
    assert (done.blobs, done.metadata, done.changed) == (0, 0, False)
    assert snapshot(tmp_path / "mirror") == before
