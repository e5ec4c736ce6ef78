"""Proving a mirror: every fault is found and named, and old metadata is told from wrong metadata."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from kartifacts.config import Settings
from kartifacts.errors import KartifactsError, VerificationError
from kartifacts.mirror.filters import MIRROR, Filter, decode_filter, encode_filter
from kartifacts.mirror.verify import Report, verify
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import refresh_timestamp
from tests.mirror.conftest import Origin

Do = Callable[..., Any]


@pytest.fixture
def bucket(small: Origin, mirror: Do, tmp_path: Path) -> DirectoryBucket:
    made = Origin(tmp_path / "few", small.keyring, small.make)
    made.release()
    shutil.rmtree(small.path)
    shutil.copytree(made.path, small.path)
    mirror(DirectoryBucket(tmp_path / "mirror"))
    return DirectoryBucket(tmp_path / "mirror")


def found(origin: Origin, bucket: DirectoryBucket, settings: Settings) -> Report | VerificationError:
    try:
        return verify(bucket, origin.trust, None, settings)
    except VerificationError as error:
        return error


def test_damage_of_any_file_is_found(origin: Origin, bucket: DirectoryBucket, settings: Settings) -> None:
    """Flipped, cut, grown and missing, in each file but those that only tools without trust read."""
    names = sorted(path for path in bucket.root.rglob("*") if path.is_file())
    assert len(names) > 20
    for path in names:
        if path.name in ("index.json", "oci-layout", MIRROR):
            continue
        sound = path.read_bytes()
        for number, damaged in enumerate((sound[:-1] + bytes([sound[-1] ^ 1]), sound[:-1], sound + b"x", None)):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            report = found(origin, bucket, settings)
            if isinstance(report, Report):
                assert report.faults, path
                assert {fault.missing for fault in report.faults} == {damaged is None}, (path, number)
            path.write_bytes(sound)
    assert verify(bucket, origin.trust, None, settings).faults == ()


def test_all_faults_are_named_at_once(origin: Origin, bucket: DirectoryBucket, settings: Settings) -> None:
    blobs = sorted((bucket.root / "blobs/sha256").iterdir())
    lost, damaged, *_ = [path for path in blobs if not path.read_bytes().startswith(b"{")]
    lost.unlink()
    damaged.write_bytes(bytes(damaged.stat().st_size))
    faults = verify(bucket, origin.trust, None, settings).faults
    told = {fault.problem.rpartition("/")[2]: fault.missing for fault in faults}
    assert told == {lost.name: True, damaged.name: False}


def test_age_and_expiry_are_told(origin: Origin, bucket: DirectoryBucket, settings: Settings) -> None:
    online, airgap = verify(bucket, origin.trust, None, settings).freshness
    now = datetime.now(timezone.utc)
    for view, days in ((online, 7), (airgap, 400)):
        assert timedelta(0) <= view.age < timedelta(hours=1)
        assert abs(view.expires - now - timedelta(days=days)) < timedelta(hours=1)
        assert view.stale(now, timedelta(days=1)) == ""
        assert "expired on" in view.stale(now + timedelta(days=days + 1), None)


def test_metadata_that_is_older_than_allowed_is_stale_though_not_expired(
    origin: Origin, mirror: Do, settings: Settings, tmp_path: Path
) -> None:
    before = datetime.now(timezone.utc) - timedelta(days=3)
    refresh_timestamp(DirectoryBucket(origin.path), origin.keyring, clock_is_right=True, now=before)
    bucket = DirectoryBucket(tmp_path / "mirror")
    mirror(bucket)
    online = verify(bucket, origin.trust, None, settings).freshness[0]
    assert timedelta(days=2.9) < online.age < timedelta(days=3.1)
    assert online.stale(datetime.now(timezone.utc), timedelta(days=4)) == ""
    assert "3 days ago; at most 2 are allowed" in online.stale(datetime.now(timezone.utc), timedelta(days=2))


# -- mirror.json -------------------------------------------------------------------------------------------------------


def test_a_filter_survives_its_file() -> None:
    for chosen in (
        Filter(),
        Filter(libraries=("a", "b"), versions=("1.0",), channels=("x",), archs=("9.0a", "gfx942")),
    ):
        assert decode_filter(encode_filter(chosen), what="it") == chosen


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b'{"version":2,"filter":{}}',
        b'{"version":1,"filter":{"libraries":["../x"]}}',
        b'{"version":1,"filter":{"libraries":"demo"}}',
        b'{"version":1,"filter":{"archs":["sm_1"]}}',
        b'{"version":1,"filter":{"unknown":[]}}',
        b'{"version":1,"version":1,"filter":{}}',
        b'{"version":1,"filter":' + b"[" * 10_000,
    ],
)
def test_a_mirror_json_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(VerificationError):
        decode_filter(content, what="it")


@pytest.mark.parametrize(
    "bad", [{"libraries": ("A",)}, {"versions": ("..",)}, {"archs": ("9.9",)}, {"channels": ("",)}]
)
def test_a_filter_of_no_names_is_refused(bad: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(KartifactsError):
        Filter(**bad)
