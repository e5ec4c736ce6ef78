"""Filling a mirror: what arrives, what is left out, and what its readers see wherever it is cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from kartifacts.config import Settings
from kartifacts.errors import (
    ArtifactUnavailable,
    ConfigError,
    KartifactsError,
    PublishConflict,
    SourceError,
    VerificationError,
)
from kartifacts.mirror.carry import export
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.pull import Trust, pull
from kartifacts.mirror.verify import verify
from kartifacts.model.layout import metadata_path
from kartifacts.model.manifest import Lock
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import publish_staged
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository
from kartifacts.sources.directory import DirectorySource
from kartifacts.trust.client import refresh
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keychange import renew
from kartifacts.trust.keyring import Keyring
from tests.mirror.conftest import CutBucket, Origin
from tests.publish.conftest import CorruptingBucket

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


def test_a_later_release_sends_only_what_is_new(origin: Origin, mirror: Do, tmp_path: Path) -> None:
    mirror(DirectoryBucket(tmp_path / "mirror"))
    origin.release("1.1")
    bucket = CutBucket(tmp_path / "mirror")
    mirror(bucket)
    written = [path for path in bucket.written if path.startswith("blobs/")]
    assert len(written) == 2, "the release index, and the index of what is said about it"
    assert versions(tmp_path / "mirror", origin.root("online")) == {"1.0", "1.1"}


def test_roots_older_than_the_one_that_was_given_are_served_too(
    origin: Origin, settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    """For a client that began long ago: every root from the first is part of the chain that it follows."""
    shutil.copytree(keyring.path, tmp_path / "ring")
    for _ in range(2):
        renew(tmp_path / "ring", "root", now=datetime.now(timezone.utc))
        publish_staged(DirectoryBucket(origin.path), Keyring.load(tmp_path / "ring"))
    newest = (origin.path / metadata_path("online", "3.root.json")).read_bytes()
    bucket = DirectoryBucket(tmp_path / "mirror")
    pull(origin.source, bucket, Trust((newest,)), Filter(), settings)
    for root in (origin.root("online"), newest):
        assert versions(bucket.root, root) == {"1.0"}
    first = origin.path / metadata_path("online", "1.root.json")
    first.write_bytes((origin.path / metadata_path("airgap", "1.root.json")).read_bytes())
    with pytest.raises(VerificationError, match=r"2\.root\.json"):
        pull(origin.source, DirectoryBucket(tmp_path / "other"), Trust((newest,)), Filter(), settings)
    assert not list((tmp_path / "other").rglob("*.json"))


def test_a_lock_mirrors_exactly_what_it_pins(
    make_repository: Do, settings: Settings, snapshot: Snapshot, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source", "1.0")
    make_repository(source, "2.0", content=1)
    pin = next(pin for pin in Repository(source).pins() if pin.version == "2.0")
    trust = Trust(lock=Lock(version=1, releases=[pin]))
    bucket = DirectoryBucket(tmp_path / "mirror")
    contents, _ = pull(DirectorySource(source), bucket, trust, Filter(), settings)
    assert [found.version for found in Repository(bucket.root).pins()] == ["2.0"]
    verify_repository(bucket.root, deep=True).check("mirror")
    held = {path for path in snapshot(bucket.root) if path.startswith("blobs/")}
    assert held == {path for path in contents.paths if path.startswith("blobs/")} < set(snapshot(source))
    assert not verify(bucket, trust, None, settings).faults


def test_nothing_is_mirrored_on_nobodys_word(tmp_path: Path) -> None:
    for roots, lock in (((), None), ((b"{}",), Lock(version=1, releases=[]))):
        with pytest.raises(ConfigError) as caught:
            Trust(roots, lock)
        assert "--root" in str(caught.value)
        assert "--lock" in str(caught.value)


# -- what is left out --------------------------------------------------------------------------------------------------


@pytest.fixture
def many(origin: Origin) -> Origin:
    origin.release("2.0", content=1, channels=("stable",))
    origin.release("1.0", library="other", content=2)
    return origin


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"demo 1.0", "demo 2.0", "other 1.0"}),
        ({"libraries": ("other",)}, {"other 1.0"}),
        ({"versions": ("1.0",)}, {"demo 1.0", "other 1.0"}),
        ({"libraries": ("demo",), "versions": ("2.0",)}, {"demo 2.0"}),
        ({"channels": ("stable",)}, {"demo 2.0"}),
    ],
)
def test_only_what_was_chosen_is_mirrored_and_promised(
    many: Origin, mirror: Do, settings: Settings, tmp_path: Path, chosen: dict[str, Any], expected: set[str]
) -> None:
    bucket = DirectoryBucket(tmp_path / "mirror")
    mirror(bucket, **chosen)
    named = {path.parent.relative_to(bucket.root / "targets") for path in bucket.root.glob("targets/*/*/*.index.json")}
    assert {" ".join(name.parts) for name in named} == expected
    report = verify(bucket, many.trust, None, settings)
    assert (report.faults, len(report.contents.releases)) == ((), len(expected))
    if len(expected) < 3:  # metadata is whole, so that a reader sees what else there is, elsewhere
        assert [fault for fault in verify(bucket, many.trust, Filter(), settings).faults if fault.missing]
    assert set(refresh(many.root("online"), None, bucket.get).libraries) == {"demo", "other"}


@pytest.mark.parametrize(
    ("archs", "expected"),
    [
        (("9.0",), {"9.0a"}),
        (("8.6",), {"8.0"}),
        (("cpu:x86-64-v4",), {"cpu:x86-64-v3"}),
        (("8.0", "cpu:x86-64-v3"), {"8.0", "cpu:x86-64-v3"}),
    ],
)
def test_bundles_that_no_chosen_machine_runs_are_left_out(
    origin: Origin, mirror: Do, settings: Settings, tmp_path: Path, archs: tuple[str, ...], expected: set[str]
) -> None:
    bucket = DirectoryBucket(tmp_path / "mirror")
    contents, _ = mirror(bucket, archs=archs)
    held = [
        descriptor.note("arch")
        for pin in Repository(bucket.root).pins()
        for descriptor in Repository(bucket.root).release(pin).manifests
        if bucket.size(f"blobs/sha256/{descriptor.sha256}") is not None
    ]
    assert set(held) == expected
    assert contents.size == sum(path.stat().st_size for path in (bucket.root / "blobs/sha256").iterdir())
    assert not verify(bucket, origin.trust, None, settings).faults


@pytest.mark.parametrize(
    "chosen",
    [{"libraries": ("dmeo",)}, {"versions": ("1",)}, {"channels": ("stable",)}, {"archs": ("12.0", "cpu:aarch64")}],
)
def test_a_misspelt_choice_is_no_empty_mirror(
    origin: Origin, mirror: Do, tmp_path: Path, chosen: dict[str, Any]
) -> None:
    bucket = CutBucket(tmp_path / "mirror")
    with pytest.raises(ArtifactUnavailable):
        mirror(bucket, **chosen)
    assert bucket.written == []


@pytest.mark.parametrize("before", [{}, {"versions": ("1.0", "2.0")}, {"archs": ("9.0", "8.0")}])
def test_a_mirror_comes_to_hold_less_only_if_somebody_says_so(
    many: Origin, mirror: Do, snapshot: Snapshot, settings: Settings, tmp_path: Path, before: dict[str, Any]
) -> None:
    bucket = DirectoryBucket(tmp_path / "mirror")
    mirror(bucket, **before)
    held = snapshot(bucket.root)
    less = {"versions": ("2.0",), "archs": ("9.0",)}
    with pytest.raises(ConfigError, match=r"would hold less.*--release-version 2\.0 --archs '9\.0'"):
        mirror(bucket, **less)
    assert snapshot(bucket.root) == held
    mirror(bucket)  # more is no loss
    with pytest.raises(ConfigError, match="holds everything, and would hold less"):
        mirror(bucket, **before, libraries=("demo",))
    pull(many.source, bucket, many.trust, Filter(**less), settings, refilter=True)
    assert [each.pin.version for each in verify(bucket, many.trust, None, settings).contents.releases] == ["2.0"]


def test_a_bucket_that_somebody_publishes_into_is_not_made_a_part(many: Origin, mirror: Do, tmp_path: Path) -> None:
    shutil.copytree(many.path, tmp_path / "copy")
    with pytest.raises(ConfigError, match="holds everything"):
        mirror(DirectoryBucket(tmp_path / "copy"), versions=("2.0",))


@pytest.mark.parametrize("chosen", [{"versions": ("1.0",)}, {"archs": ("9.0", "8.6")}])
def test_what_a_source_lacks_because_it_is_a_part_is_explained_by_its_filter(
    many: Origin, mirror: Do, settings: Settings, tmp_path: Path, chosen: dict[str, Any]
) -> None:
    """And nothing is left out because a source says that it is a part."""
    mirror(DirectoryBucket(tmp_path / "part"), **chosen)
    part = DirectorySource(tmp_path / "part", mirror=True)
    for do in (
        lambda held: pull(part, DirectoryBucket(tmp_path / "next"), many.trust, held, settings),
        lambda held: export(part, tmp_path / "x.tar", many.trust, held, settings),
    ):
        with pytest.raises(SourceError) as caught:
            do(Filter())
        assert f"give {Filter(**chosen)} here" in str(caught.value.hint)
        assert caught.value.message.startswith(("release index of", "manifest of", "bundle", "demo", "other"))
        do(Filter(**chosen))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_any_flipped_byte_of_the_source_changes_nothing_for_readers(
    small: Origin, mirror: Do, snapshot: Snapshot, tmp_path: Path
) -> None:
    """One in every file that is mirrored, at both ends and in the middle."""
    mirror(DirectoryBucket(tmp_path / "before"))
    small.release("2.0", content=1)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    mirror(DirectoryBucket(tmp_path / "after"), forget=tmp_path / "other store")
    before, after = snapshot(tmp_path / "before"), snapshot(tmp_path / "after")
    checked = 0
    for path in sorted(set(after) - OURS - {"index.json", "oci-layout"}):
        if before.get(path) == after[path]:
            continue
        sound = after[path]
        at = (0, len(sound) // 2, len(sound) - 1)[checked % 3]
        (small.path / path).write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        root = tmp_path / f"mirror{checked}"
        shutil.copytree(tmp_path / "before", root)
        try:
            mirror(DirectoryBucket(root), forget=tmp_path / f"store{checked}")
        except (VerificationError, SourceError):
            now = snapshot(root)
            assert {name: now.get(name) for name in before} == before, path
            assert all(now[name] == after[name] for name in set(now) - set(before) - OURS), path
        else:
            assert path.startswith("targets/"), path  # a copy of a blob, which was made of the blob
            assert snapshot(root) == after
        (small.path / path).write_bytes(sound)
        shutil.rmtree(root)
        checked += 1
    assert checked > 12


def test_a_source_that_went_back_is_refused(origin: Origin, mirror: Do, snapshot: Snapshot, tmp_path: Path) -> None:
    """By what the mirror holds, and by what this machine has seen, each alone."""
    shutil.copytree(origin.path, tmp_path / "old")
    origin.release("2.0", content=1)
    mirror(DirectoryBucket(tmp_path / "mirror"))
    before = snapshot(tmp_path / "mirror")
    shutil.rmtree(origin.path)
    (tmp_path / "old").rename(origin.path)
    with pytest.raises(VerificationError):
        mirror(DirectoryBucket(tmp_path / "mirror"), forget=tmp_path / "other store")
    with pytest.raises(VerificationError):
        mirror(DirectoryBucket(tmp_path / "new"))
    assert snapshot(tmp_path / "mirror") == before
    assert not (tmp_path / "new").exists() or snapshot(tmp_path / "new") == {}


def test_a_mirror_of_another_repository_is_not_taken_over(
    origin: Origin, mirror: Do, make_repository: Do, snapshot: Snapshot, tmp_path: Path
) -> None:
    keys = init(tmp_path / "keys", ["demo"], {}, now=datetime.now(timezone.utc))
    other = Origin(tmp_path / "others", keys, make_repository)
    other.release("3.0")
    mirror(DirectoryBucket(tmp_path / "mirror"))
    before = snapshot(tmp_path / "mirror")
    with pytest.raises(VerificationError, match="holds already is not what the root signs"):
        pull(other.source, DirectoryBucket(tmp_path / "mirror"), other.trust, Filter(), Settings(store=tmp_path / "s"))
    assert snapshot(tmp_path / "mirror") == before


@pytest.mark.parametrize("directory", ["blobs", "targets", "metadata", "airgap"])
def test_what_is_damaged_in_the_mirror_is_called_damage(
    origin: Origin, mirror: Do, tmp_path: Path, directory: str
) -> None:
    """Not that somebody else was there, which would be over if it were run again."""
    bucket = DirectoryBucket(tmp_path / "mirror")
    mirror(bucket)
    victims = [path for path in (bucket.root / directory).rglob("*") if path.is_file() and "timestamp" not in path.name]
    for victim in sorted(victims)[::5]:
        sound = victim.read_bytes()
        victim.write_bytes(sound + b"x")
        with pytest.raises(VerificationError) as caught:
            mirror(bucket)
        assert victim.name in str(caught.value)
        victim.unlink()
        mirror(bucket)
        assert victim.read_bytes() == sound


@pytest.mark.parametrize("last", ["index.json", "airgap/timestamp.json"])
def test_who_fails_after_readers_see_the_new_state_says_so(
    origin: Origin, settings: Settings, tmp_path: Path, last: str
) -> None:
    class Stubborn(DirectoryBucket):
        def swap(self, path: str, *rest: Any) -> None:
            if path == last:
                raise SourceError(f"cannot write {path!r}")
            super().swap(path, *rest)

    with pytest.raises(SourceError, match=r"online.* view see the new state already"):
        pull(origin.source, Stubborn(tmp_path / "mirror"), origin.trust, Filter(), settings)
    report = verify(DirectoryBucket(tmp_path / "mirror"), Trust((origin.root("online"),)), None, settings)
    assert (report.faults, len(report.contents.releases)) == ((), 1)


def test_a_destination_that_damages_any_one_upload_shows_nothing_new(
    origin: Origin, settings: Settings, tmp_path: Path
) -> None:
    counting = CutBucket(tmp_path / "whole")
    pull(origin.source, counting, origin.trust, Filter(), settings)
    victims = [number for number, path in enumerate(counting.written) if path.startswith("blobs/")]
    for victim in victims[::4]:
        root = tmp_path / f"mirror{victim}"
        with pytest.raises(VerificationError, match="gives back other bytes than were sent"):
            pull(origin.source, CorruptingBucket(root, victim=victim), origin.trust, Filter(), settings)
        assert not (root / "metadata").exists()


# -- cut anywhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_takes_effect", [False, True])
def test_a_pull_that_is_cut_leaves_the_old_state_or_the_new_and_can_go_on(
    small: Origin, mirror: Do, snapshot: Snapshot, settings: Settings, tmp_path: Path, last_takes_effect: bool
) -> None:
    mirror(DirectoryBucket(tmp_path / "before"))
    small.release("2.0", content=1)
    shutil.copytree(tmp_path / "before", tmp_path / "complete")
    counting = CutBucket(tmp_path / "complete")
    mirror(counting)
    complete, steps = snapshot(tmp_path / "complete"), len(counting.written)
    assert steps > 15
    seen = set()
    for step in range(steps):
        root = tmp_path / f"cut{step}"
        shutil.copytree(tmp_path / "before", root)
        with pytest.raises(SourceError, match="connection lost"):
            mirror(
                CutBucket(root, writes=step + last_takes_effect, last_takes_effect=last_takes_effect),
                forget=tmp_path / "cut store",
            )
        for view in ("online", "airgap"):
            bucket = DirectoryBucket(root)
            report = verify(bucket, Trust((small.root(view),)), None, settings)
            assert not report.faults
            found = frozenset(release.pin.version for release in report.contents.releases)
            assert found in ({"1.0"}, {"1.0", "2.0"})
            seen.add((view, found))
        if not last_takes_effect:
            shutil.rmtree(root / "gc", ignore_errors=True)
            mirror(DirectoryBucket(root))
            assert snapshot(root) == complete
        shutil.rmtree(root)
    assert len(seen) == 4


def test_a_process_that_is_killed_while_it_pulls_leaves_the_old_state(
    small: Origin, mirror: Do, snapshot: Snapshot, tmp_path: Path
) -> None:
    mirror(DirectoryBucket(tmp_path / "mirror"))
    before = snapshot(tmp_path / "mirror")
    small.release("2.0", content=1)
    (tmp_path / "root.json").write_bytes(small.root("online"))
    code = """
import os, signal
from kartifacts.cli import main
left = [9]
fsync = os.fsync
def killed(descriptor):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = killed
main()
"""
    command = [sys.executable, "-c", code, "mirror", "pull", str(small.path), f"dir:{tmp_path / 'mirror'}"]
    environ = {"PATH": os.defpath, "HOME": str(tmp_path), "KARTIFACTS_STORE": str(tmp_path / "killed")}
    done = subprocess.run([*command, "--root", str(tmp_path / "root.json")], env=environ, check=False)
    assert done.returncode == -signal.SIGKILL
    after = snapshot(tmp_path / "mirror")
    assert {path: after.get(path) for path in before} == before
    assert versions(tmp_path / "mirror", small.root("online")) == {"1.0"}
    mirror(DirectoryBucket(tmp_path / "mirror"))
    assert versions(tmp_path / "mirror", small.root("online")) == {"1.0", "2.0"}
    assert not list((tmp_path / "mirror").rglob(".partial-*"))


def test_two_who_fill_one_mirror_do_not_lead_it_back(origin: Origin, mirror: Do, tmp_path: Path) -> None:
    """The slower one has verified an older state, and finds that the timestamp is not what it was."""
    root = tmp_path / "mirror"
    mirror(DirectoryBucket(root))
    shutil.copytree(origin.path, tmp_path / "old")
    origin.release("2.0", content=1)

    class Overtaken(DirectoryBucket):
        def swap(self, path: str, *rest: Any) -> None:
            if path == metadata_path("online", "timestamp.json"):
                origin.release("3.0", content=2)
                mirror(DirectoryBucket(root), forget=tmp_path / "faster")
            super().swap(path, *rest)

    with pytest.raises(PublishConflict):
        mirror(Overtaken(root))
    assert versions(root, origin.root("online")) == {"1.0", "2.0", "3.0"}


def test_a_mirror_that_lost_metadata_is_healed(origin: Origin, mirror: Do, snapshot: Snapshot, tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    mirror(DirectoryBucket(root))
    before = snapshot(root)
    for path in [*root.glob("metadata/*"), *root.glob("airgap/*"), *sorted(root.glob("blobs/sha256/*"))[::7]]:
        content = path.read_bytes()
        path.unlink()
        mirror(DirectoryBucket(root))
        assert path.read_bytes() == content
    assert snapshot(root) == before


def test_only_errors_of_ours_come_out_of_a_strange_source(origin: Origin, mirror: Do, tmp_path: Path) -> None:
    path = origin.path / metadata_path("online", "timestamp.json")
    for number, content in enumerate((b"", b"{}", b"[" * 100_000, b"\xff", b'{"signed": 1}', b"null")):
        path.write_bytes(content)
        with pytest.raises(KartifactsError):
            mirror(DirectoryBucket(tmp_path / f"mirror{number}"))
