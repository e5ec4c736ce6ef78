"""What somebody planted in a repository or a killed writer left there: refused, named or removed, never waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kartifacts.errors import ConfigError, KartifactsError
from kartifacts.publish import files
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.lockfile import add_pins, read_lock
from kartifacts.publish.plan import read_plan
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository

Make = Callable[..., Any]

PLANTS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "link to itself": lambda path: os.symlink(path, path),
    "link to nothing": lambda path: os.symlink("absent", path),
}


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it was waited for")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def places(root: Path) -> dict[str, Path]:
    """One file of every kind in a repository with one release."""
    [pin] = Repository(root).pins()
    blobs = {blob.what.split(" of ")[0]: root / "blobs/sha256" / blob.digest for blob in verify_repository(root).blobs}
    bundle = next(what for what in blobs if what.startswith("bundle"))
    return {
        "pack": blobs["pack 0"],
        "table": blobs["kernel table"],
        "bundle": blobs[bundle],
        "release": blobs["release index"],
        "name": root / "targets" / pin.library / pin.version / f"{pin.sha256}.index.json",
        "index": root / "index.json",
        "layout": root / "oci-layout",
    }


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("place", ["pack", "table", "bundle", "release", "name"])
def test_what_is_planted_in_a_source_is_a_fault_and_nothing_is_sent(
    place: str, kind: str, make_repository: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    path = places(source)[place]
    path.unlink()
    PLANTS[kind](path)
    with pytest.raises(KartifactsError):
        verify_repository(source, deep=True).check("it")
    with pytest.raises(KartifactsError):
        publish(source, DirectoryBucket(tmp_path / "bucket"))
    assert not (tmp_path / "bucket").exists()


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("place", ["pack", "table", "bundle", "release", "name", "index", "layout"])
def test_what_is_planted_in_a_bucket_is_not_taken_for_what_was_sent(
    place: str, kind: str, make_repository: Make, oci_reader: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    path = tmp_path / "bucket" / places(source)[place].relative_to(source)
    path.parent.mkdir(parents=True)
    PLANTS[kind](path)
    with pytest.raises(KartifactsError):
        publish(source, DirectoryBucket(tmp_path / "bucket"))
    assert not os.path.isfile(path)
    # The claim to a version comes before its name, once all else is there.
    assert len(oci_reader(tmp_path / "bucket") if place != "index" else ()) == (place == "name")


@pytest.mark.parametrize("kind", PLANTS)
def test_what_is_planted_as_lock_or_plan_is_a_config_error(kind: str, make_repository: Make, tmp_path: Path) -> None:
    path = tmp_path / "planted"
    PLANTS[kind](path)
    pins = Repository(make_repository(tmp_path / "source")).pins()
    with pytest.raises(ConfigError, match="planted"):
        read_lock(path)
    with pytest.raises(ConfigError, match="planted"):
        read_plan(path)
    if kind != "link to nothing":  # which names where the lock is to be
        with pytest.raises(ConfigError, match=r"planted|/dev/zero"):
            add_pins(path, pins)


def test_a_lock_or_plan_without_end_costs_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    for read in (read_lock, read_plan, lambda path: add_pins(path, [])):
        with pytest.raises(ConfigError, match="larger than"):
            read(tmp_path / "huge")


# -- missing is not damaged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["pack", "table", "bundle", "release"])
def test_a_blob_that_is_not_there_is_missing_and_one_that_is_wrong_is_not(
    place: str, make_repository: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    path = places(source)[place]
    path.rename(tmp_path / "aside")
    faults = verify_repository(source, deep=True).faults
    assert [fault.missing for fault in faults] == [True]
    assert path.name in str(faults[0])
    path.write_bytes(b"other")
    assert not any(fault.missing for fault in verify_repository(source, deep=True).faults)


# -- names that steer a terminal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nerror: no", "\u202egnp", "\x9b31m"])
def test_what_a_repository_says_about_itself_cannot_steer_a_terminal(
    name: str, make_bundle: Make, tmp_path: Path
) -> None:
    descriptor = make_bundle(tmp_path / "r")
    annotations = {**descriptor.annotations, "dev.kartifacts.family": name, "dev.kartifacts.arch": name}
    named = msgspec.structs.replace(descriptor, annotations=annotations)
    make_release(tmp_path / "r", "demo", "1.0", [named])
    (tmp_path / "r" / "blobs/sha256" / descriptor.sha256).unlink()
    for fault in verify_repository(tmp_path / "r").faults:
        assert str(fault).isprintable()


# -- what killed writers leave -----------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from pathlib import Path
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
left = int(sys.argv[3])
def killed(name):
    real = getattr(os, name)
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    setattr(os, name, call)
for name in ("fsync", "link", "replace"):
    killed(name)
publish(Path(sys.argv[1]), DirectoryBucket(Path(sys.argv[2])), lock=Path(sys.argv[2]) / "kartifacts.lock")
print("done")
"""


def partials(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.name.startswith(files.PARTIAL))


def test_a_killed_publish_leaves_nothing_behind_once_the_next_has_run(make_repository: Make, tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source")
    left = 0
    for step in (0, 1, 2, 5, 40, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82):
        bucket = tmp_path / f"bucket{step}"
        command = [sys.executable, "-c", _KILLED, str(source), str(bucket), str(step)]
        subprocess.run(command, check=False, capture_output=True)
        left += len(partials(bucket))
        publish(source, DirectoryBucket(bucket), lock=bucket / "kartifacts.lock")
        assert partials(bucket) == []
    assert left > 5, "nobody was killed while writing"


def test_what_a_living_writer_writes_or_another_machine_may_still_write_stays(
    make_repository: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    bucket = DirectoryBucket(tmp_path / "bucket")
    blobs = tmp_path / "bucket" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    old, fresh = blobs / f"{files.PARTIAL}elsewhere-1", blobs / f"{files.PARTIAL}elsewhere-2"
    for path in (old, fresh):
        path.write_bytes(b"half")
    day_before = time.time() - 100_000
    os.utime(old, (day_before, day_before))
    os.mkfifo(blobs / f"{files.PARTIAL}pipe")
    with files._written(blobs, b"being written") as living:
        publish(source, bucket)
        assert os.path.exists(living)
    assert [path.name.removeprefix(files.PARTIAL) for path in partials(bucket.root)] == ["elsewhere-2", "pipe"]
