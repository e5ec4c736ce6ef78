"""Signed publishing: what is refused, what others may do meanwhile, and what a directory with metadata holds."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import ConfigError, ExpiredMetadata, PublishConflict, SourceError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import View, metadata_path
from kartifacts.model.manifest import Pin
from kartifacts.publish.buckets import Unlisted
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import commit, publish_staged, refresh_timestamp
from kartifacts.publish.editing import promoting, retiring
from kartifacts.publish.protocol import publish
from kartifacts.publish.public import read_public
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository
from kartifacts.trust.client import refresh
from kartifacts.trust.keyceremony import export, init
from kartifacts.trust.keychange import add_library, finish, remove_library, renew, rotate
from kartifacts.trust.keyfiles import Plan, replace
from kartifacts.trust.keygrants import signed_by
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.released import Released
from kartifacts.trust.signing import role_with, snapshot_of, timestamp_of

Make = Callable[..., Any]
Snapshot = Callable[[Path], dict[str, bytes]]


def now() -> datetime:
    return datetime.now(timezone.utc)


def released(bucket: DirectoryBucket, keyring: Keyring, view: View = "online") -> dict[str, tuple[str, ...]]:
    """Library and version → channels, as a new reader sees them."""
    libraries = refresh(keyring.root(view), None, bucket.get).libraries.values()
    return {
        f"{release.pin.library} {release.pin.version}": release.channels
        for library in libraries
        for release in library.releases
    }


@pytest.fixture
def bucket(tmp_path: Path) -> DirectoryBucket:
    return DirectoryBucket(tmp_path / "bucket")


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_what_was_published_is_seen_by_readers_of_both_views_and_says_so(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, oci_reader: Make
) -> None:
    keyring = make_keys()
    done = publish(tiny(), bucket, keyring=keyring, channels=["stable", "nightly"])
    assert released(bucket, keyring) == released(bucket, keyring, "airgap") == {"demo 1.0": ("nightly", "stable")}
    assert {view: seen.timestamp for view, seen in done.seen.items()} == {"online": 1, "airgap": 1}
    assert list(oci_reader(bucket.root)) == ["demo-1.0"]
    assert not (bucket.root / "gc" / "publishing").exists() or not list((bucket.root / "gc" / "publishing").iterdir())


def test_both_views_hold_the_same_bytes_of_targets_and_libraries(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    for version in ("1", "2", "3"):
        publish(tiny(version), bucket, keyring=keyring)
    names = [path.name for path in (bucket.root / "airgap").glob("*.demo.json")]
    assert len(names) == 3
    for name in ("1.targets.json", *names):
        assert (bucket.root / "airgap" / name).read_bytes() == (bucket.root / "metadata" / name).read_bytes()


def test_publishing_again_changes_nothing(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, snapshot: Snapshot
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring, channels=["stable"])
    before = snapshot(bucket.root)
    publish(tiny(), bucket, keyring=keyring, channels=["stable"])
    assert snapshot(bucket.root) == before


def test_provenance_is_listed_and_what_was_signed_first_stays(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    for content in (b"first", b"second"):
        publish(tiny(), bucket, keyring=keyring, extra_targets={"demo/1.0/provenance.json": content})
        [release] = refresh(keyring.root("online"), None, bucket.get).libraries["demo"].releases
        assert release.provenance == (sha256(b"first"), 5)
    assert bucket.get(f"targets/demo/1.0/{sha256(b'first')}.provenance.json") == b"first"
    with pytest.raises(ConfigError, match="belongs to no release"):
        publish(tiny(), bucket, keyring=keyring, extra_targets={"demo/2.0/provenance.json": b""})


def test_a_machine_that_holds_only_online_keys_leaves_the_other_view_to_the_next(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path
) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    online = export(keyring, tmp_path / "online", ["demo", "snapshot", "timestamp"], views=["online"])
    done = publish(tiny("2"), bucket, keyring=online)
    assert list(done.seen) == ["online"]
    assert set(released(bucket, keyring)) == {"demo 1", "demo 2"}
    assert set(released(bucket, keyring, "airgap")) == {"demo 1"}
    refresh_timestamp(bucket, keyring)
    assert set(released(bucket, keyring, "airgap")) == {"demo 1", "demo 2"}


def test_channels_lead_where_they_were_led_last(make_keys: Make, tiny: Make, bucket: DirectoryBucket) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring, channels=["stable", "old"])
    publish(tiny("2"), bucket, keyring=keyring, channels=["stable"])
    assert released(bucket, keyring) == {"demo 1": ("old",), "demo 2": ("stable",)}
    commit(bucket, keyring, promoting("demo", "1", "stable"))
    assert released(bucket, keyring) == {"demo 1": ("old", "stable"), "demo 2": ()}
    commit(bucket, keyring, promoting("demo", "2", "stable", also=True))
    assert released(bucket, keyring) == {"demo 1": ("old", "stable"), "demo 2": ("stable",)}
    with pytest.raises(ConfigError, match="demo 3 is not released here; there are: 1, 2"):
        commit(bucket, keyring, promoting("demo", "3", "stable"))
    with pytest.raises(ConfigError, match="bad channel name"):
        promoting("demo", "1", "../stable")


def test_a_retired_release_is_listed_nowhere_and_what_others_need_stays(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, oci_reader: Make
) -> None:
    keyring = make_keys("demo", "more")
    publish(tiny("1"), bucket, keyring=keyring, extra_targets={"demo/1/provenance.json": b"x"})
    publish(tiny("2"), bucket, keyring=keyring)
    publish(tiny("1", library="more"), bucket, keyring=keyring)
    commit(bucket, keyring, retiring("demo", "1"))
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == {"demo 2", "more 1"}
    assert list(oci_reader(bucket.root)) == ["demo-2", "more-1"]
    commit(bucket, keyring, retiring("demo", "1"))
    assert [(pin.library, pin.version) for pin in Repository(bucket.root).pins()] == [("demo", "2"), ("more", "1")]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_nothing_unsigned_gets_into_a_bucket_with_metadata(
    make_keys: Make, tiny: Make, make_bundle: Make, bucket: DirectoryBucket, snapshot: Snapshot
) -> None:
    publish(tiny("1"), bucket, keyring=make_keys())
    before = snapshot(bucket.root)
    with pytest.raises(ConfigError, match="only who signs can release there") as caught:
        publish(tiny("2"), bucket)
    assert "--keys" in str(caught.value)
    assert snapshot(bucket.root) == before
    bundle = make_bundle(bucket.root)
    with pytest.raises(ConfigError, match="only who signs can release there"):
        make_release(bucket.root, "demo", "2", [bundle])


def test_channels_without_keys_are_refused(tiny: Make, bucket: DirectoryBucket) -> None:
    with pytest.raises(ConfigError, match="signed metadata"):
        publish(tiny(), bucket, channels=["stable"])
    assert not bucket.root.exists()


def test_another_content_of_a_version_is_refused_before_anything_is_sent(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, snapshot: Snapshot
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    before = snapshot(bucket.root)
    with pytest.raises(PublishConflict, match=r"demo 1\.0 is released with another content"):
        publish(tiny(content="other"), bucket, keyring=keyring)
    assert snapshot(bucket.root) == before


def test_a_library_without_a_role_or_without_a_key_here_is_refused_before_anything_is_sent(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path
) -> None:
    keyring = make_keys("demo", "more")
    with pytest.raises(ConfigError, match="nobody may release a library 'third' here; there are: demo, more"):
        publish(tiny(library="third"), bucket, keyring=keyring)
    without = export(keyring, tmp_path / "without", ["more", "snapshot", "timestamp"])
    with pytest.raises(ConfigError, match="cannot sign for 'demo': 0 of 1 private keys are here"):
        publish(tiny(), bucket, keyring=without)
    assert not bucket.root.exists()


def test_a_bucket_of_another_root_is_left_alone(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, snapshot: Snapshot
) -> None:
    publish(tiny("1"), bucket, keyring=make_keys())
    before = snapshot(bucket.root)
    with pytest.raises(VerificationError):
        publish(tiny("2"), bucket, keyring=make_keys(name="other"))
    assert snapshot(bucket.root) == before


def test_a_first_publish_of_another_keyring_that_was_cut_is_not_taken_over(
    make_keys: Make, tiny: Make, cut_bucket: Make, bucket: DirectoryBucket
) -> None:
    first = cut_bucket(bucket.root, requests=1 << 30)
    publish(tiny("1"), first, keyring=make_keys())
    (bucket.root / "metadata" / "timestamp.json").unlink()
    (bucket.root / "airgap" / "timestamp.json").unlink()
    with pytest.raises((PublishConflict, VerificationError)):
        publish(tiny("2"), bucket, keyring=make_keys(name="other"))
    assert bucket.size("metadata/timestamp.json") is None


@pytest.mark.parametrize("many", [0, 100], ids=["listed", "one by one"])
@pytest.mark.parametrize("what", ["blobs", "targets"])
def test_what_went_missing_since_it_was_sent_is_never_made_public(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, what: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kartifacts.publish.commit._MANY", many)
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    metadata = list(bucket.root.rglob("timestamp.json"))
    before = [path.read_bytes() for path in metadata]

    class Losing(DirectoryBucket):
        """A directory that loses an object when the snapshot is written, as by hand or by a foreign collector."""

        def put_if_absent(self, path: str, content: Any) -> Any:
            if path == "metadata/2.snapshot.json":
                [lost] = Repository(source).pins()
                gone = {"blobs": f"blobs/sha256/{lost.sha256}", "targets": f"targets/demo/2/{lost.sha256}.index.json"}
                self.delete(gone[what])
            return super().put_if_absent(path, content)

    source = tiny("2")
    with pytest.raises(VerificationError, match="does not hold what is to become public"):
        publish(source, Losing(bucket.root), keyring=keyring)
    assert [path.read_bytes() for path in metadata] == before
    publish(source, bucket, keyring=keyring)
    assert set(released(bucket, keyring)) == {"demo 1", "demo 2"}


def test_what_cannot_be_listed_is_asked_for_one_by_one(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(DirectoryBucket):
        def list(self, prefix: str) -> Any:
            raise Unlisted(f"{prefix} cannot be listed")

    monkeypatch.setattr("kartifacts.publish.commit._MANY", 0)
    keyring = make_keys()
    publish(tiny("1"), Closed(bucket.root), keyring=keyring)
    assert set(released(bucket, keyring)) == {"demo 1"}


@pytest.mark.parametrize("role", ["demo", "snapshot", "targets"])
def test_metadata_that_the_bucket_damages_is_never_made_public(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, role: str
) -> None:
    class Damaging(DirectoryBucket):
        def put_if_absent(self, path: str, content: Any) -> Any:
            if path.startswith("metadata/") and path.endswith(f".{role}.json"):
                content = content.replace(b'"version":1', b'"version":7', 1)
            return super().put_if_absent(path, content)

    with pytest.raises(VerificationError):
        publish(tiny(), Damaging(bucket.root), keyring=make_keys())
    assert bucket.size("metadata/timestamp.json") is None


# -- several at once, and what the dead have left ----------------------------------------------------------------------

PUBLISHER = """
import sys
from pathlib import Path
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.signing import snapshot_of, timestamp_of
keyring = Keyring.load(Path(sys.argv[1]))
for source in sys.argv[3:]:
    publish(Path(source), DirectoryBucket(Path(sys.argv[2])), keyring=keyring)
"""


@pytest.mark.parametrize(("publishers", "each"), [(4, 2), pytest.param(8, 5, marks=pytest.mark.slow)])
def test_of_publishers_at_once_none_loses_a_release(
    make_keys: Make,
    tiny: Make,
    bucket: DirectoryBucket,
    readers: Make,
    oci_reader: Make,
    publishers: int,
    each: int,
) -> None:
    libraries = ("demo", "more", "third")
    keyring = make_keys(*libraries)
    started, wanted = [], set()
    for number in range(publishers):
        library = libraries[number % 3]
        versions = [f"{number}.{minor}" for minor in range(each)]
        sources = [tiny(version, library=library) for version in versions]
        wanted |= {f"{library} {version}" for version in versions}
        started.append(subprocess.Popen([sys.executable, "-c", PUBLISHER, keyring.path, bucket.root, *sources]))
    assert [publisher.wait() for publisher in started] == [0] * publishers
    everybody = readers(keyring)
    seen = everybody.see(bucket.root)
    assert seen["new online"] == seen["new airgap"] == wanted
    assert {tag.rpartition("-")[2] for tag in oci_reader(bucket.root)} == {name.split()[1] for name in wanted}
    assert verify_repository(bucket.root, deep=True).faults == ()


def test_who_loses_the_race_for_the_timestamp_begins_anew_with_what_won(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    others = [tiny("2"), tiny("3"), tiny("1.5")]

    class Slow(DirectoryBucket):
        """Somebody else publishes right before each of the first swaps."""

        def swap(self, path: str, content: bytes, before: Any) -> None:
            if path.startswith("metadata/") and others:
                publish(others.pop(), bucket, keyring=keyring)
            super().swap(path, content, before)

    publish(tiny("9"), Slow(bucket.root), keyring=keyring)
    for view in ("online", "airgap"):
        assert set(released(bucket, keyring, view)) == {f"demo {version}" for version in ("1", "1.5", "2", "3", "9")}


def test_of_two_contents_of_one_version_the_second_is_refused_though_it_began_first(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    other = [tiny(content="other")]

    class Slow(DirectoryBucket):
        def swap(self, path: str, content: bytes, before: Any) -> None:
            if other:
                publish(other.pop(), bucket, keyring=keyring)
            super().swap(path, content, before)

    with pytest.raises(PublishConflict, match="another content"):
        publish(tiny(), Slow(bucket.root), keyring=keyring)
    [pin] = Repository(bucket.root).pins()
    assert pin == Repository(tiny(content="other")).pins()[0]


def test_numbers_that_the_dead_have_taken_are_passed_over(make_keys: Make, tiny: Make, bucket: DirectoryBucket) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    for path in ("metadata/2.demo.json", "metadata/3.demo.json", "airgap/4.demo.json", "metadata/2.snapshot.json"):
        bucket.put_if_absent(path, b"half of something")
    publish(tiny("2"), bucket, keyring=keyring)
    assert (bucket.root / "metadata" / "5.demo.json").exists()
    assert (bucket.root / "metadata" / "3.snapshot.json").exists()
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == {"demo 1", "demo 2"}


# -- keys and time -----------------------------------------------------------------------------------------------------


def test_a_rotation_in_one_step_that_does_not_overlap_is_refused(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    rotate(keyring.path, "timestamp", now=now(), views=["online"])
    finish(keyring.path, "timestamp", now=now(), views=["online"])
    # Without the new key, what is public cannot be signed so that the last root holds.
    old = export(keyring, tmp_path / "old", ["demo", "snapshot"], views=["online"])
    with pytest.raises(ConfigError, match="cannot sign for 'timestamp'"):
        publish_staged(bucket, old)
    assert set(released(bucket, keyring)) == {"demo 1.0"}
    publish_staged(bucket, Keyring.load(keyring.path))
    assert bucket.size("metadata/3.root.json") is not None
    assert set(released(bucket, keyring)) == {"demo 1.0"}


def test_a_library_whose_key_was_exchanged_is_signed_anew_in_the_same_commit(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys("demo", "more")
    publish(tiny(), bucket, keyring=keyring)
    publish(tiny(library="more"), bucket, keyring=keyring)
    rotate(keyring.path, "demo", now=now())
    finish(keyring.path, "demo", now=now())
    seen = publish_staged(bucket, Keyring.load(keyring.path))
    assert seen["online"].targets == 3
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == {"demo 1.0", "more 1.0"}


def test_a_library_that_was_taken_out_is_read_no_more_and_the_others_go_on(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys("demo", "more")
    publish(tiny(), bucket, keyring=keyring)
    publish(tiny(library="more"), bucket, keyring=keyring)
    remove_library(keyring.path, "more", now=now())
    publish(tiny("2"), bucket, keyring=Keyring.load(keyring.path))
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == {"demo 1.0", "demo 2"}


def test_a_library_that_was_added_is_published_with_its_first_release(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    add_library(keyring.path, "more", Plan(), now=now())
    publish(tiny(library="more"), bucket, keyring=Keyring.load(keyring.path))
    assert set(released(bucket, keyring)) == {"demo 1.0", "more 1.0"}


def test_an_empty_repository_can_be_published_before_its_first_release(
    make_keys: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish_staged(bucket, keyring)
    assert released(bucket, keyring) == released(bucket, keyring, "airgap") == {}


def test_targets_that_wait_for_signatures_hold_nobody_up(tiny: Make, bucket: DirectoryBucket, tmp_path: Path) -> None:
    one = Plan(1, 1)
    plans = {"targets": Plan(2, 2), "online:root": one, "airgap:root": one}
    keyring = init(tmp_path / "keys", ["demo"], plans, now=now())
    publish(tiny("1"), bucket, keyring=keyring)
    [first, *_] = keyring.grant("targets").keys
    private = keyring.private_file(first.keyid)
    assert private is not None
    private.rename(tmp_path / "elsewhere.pem")
    [staged] = add_library(keyring.path, "more", Plan(), now=now())
    assert staged.lacks
    publish(tiny("2"), bucket, keyring=Keyring.load(keyring.path))
    assert set(released(bucket, keyring)) == {"demo 1", "demo 2"}
    assert bucket.size("metadata/2.targets.json") is None


def test_a_refresh_signs_the_timestamp_and_a_snapshot_that_is_past_half_of_its_life(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    seen = refresh_timestamp(bucket, keyring)
    assert [(each.timestamp, each.snapshot) for each in seen.values()] == [(2, 1), (2, 1)]
    seen = refresh_timestamp(bucket, keyring, ["airgap"])
    assert {view: each.timestamp for view, each in seen.items()} == {"online": 2, "airgap": 3}
    aged(bucket, keyring, snapshot=20, timestamp=3)
    seen = refresh_timestamp(bucket, keyring, ["online"])
    assert (seen["online"].timestamp, seen["online"].snapshot) == (4, 3)


def aged(bucket: DirectoryBucket, keyring: Keyring, *, snapshot: int, timestamp: int) -> None:
    """Sign the next snapshot and timestamp as of some days ago."""
    old = read_public(bucket, keyring, "online", now())
    signers = keyring.signers("snapshot")
    then = now() - timedelta(days=snapshot)
    number = old.version("snapshot") + 1
    made = snapshot_of(old.file("snapshot"), {}, version=number, signers=signers, view="online", now=then)
    bucket.put_if_absent(f"metadata/{number}.snapshot.json", made)
    signers = keyring.signers("timestamp")
    then = now() - timedelta(days=timestamp)
    number = old.version("timestamp") + 1
    stamp = timestamp_of(old.file("timestamp"), made, version=number, signers=signers, view="online", now=then)
    bucket.swap("metadata/timestamp.json", stamp, old.before)


@pytest.mark.parametrize("act", ["refresh", "publish"])
def test_expired_metadata_is_signed_anew_by_its_publisher(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, act: str
) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    aged(bucket, keyring, snapshot=50, timestamp=20)
    with pytest.raises(ExpiredMetadata):
        released(bucket, keyring)
    if act == "refresh":
        refresh_timestamp(bucket, keyring)
        assert set(released(bucket, keyring)) == {"demo 1"}
    else:
        publish(tiny("2"), bucket, keyring=keyring)
        assert set(released(bucket, keyring)) == {"demo 1", "demo 2"}


def test_what_is_signed_by_a_clock_that_is_far_behind_is_not_made_public(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    with pytest.raises(ConfigError, match="clock of this machine"):
        commit(bucket, keyring, promoting("demo", "1.0", "stable"), now=now() - timedelta(days=60))
    assert released(bucket, keyring) == {"demo 1.0": ()}


def laid(bucket: DirectoryBucket, keyring: Keyring, then: datetime, roles: dict[str, datetime]) -> None:
    """What was published `then`, with the roles of libraries of other days."""
    for view in ("online", "airgap"):
        for name, content in keyring.staged(view).items():
            bucket.put_if_absent(metadata_path(view, name), content)
        files = {"1.targets.json": keyring.targets()}
        for library, when in roles.items():
            pin = Pin(library=library, version="0", sha256=sha256(library.encode()), size=1)
            signers = keyring.signers(library)
            content = role_with(None, library, version=1, signers=signers, now=when, add=[Released(pin)])
            files[f"1.{library}.json"] = content
            bucket.put_if_absent(metadata_path(view, f"1.{library}.json"), content)
        signers = keyring.signers("snapshot", view=view)
        made = snapshot_of(None, files, version=1, signers=signers, view=view, now=then)
        bucket.put_if_absent(metadata_path(view, "1.snapshot.json"), made)
        signers = keyring.signers("timestamp", view=view)
        stamp = timestamp_of(None, made, version=1, signers=signers, view=view, now=then)
        bucket.swap(metadata_path(view, "timestamp.json"), stamp, None)


def made_then(path: Path, then: datetime, *libraries: str) -> Keyring:
    one = Plan(1, 1)
    return init(path, libraries, {"targets": one, "online:root": one, "airgap:root": one}, now=then)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


LONG_AGO = timedelta(days=2 * 365 + 30)


@pytest.mark.parametrize("act", ["refresh", "publish", "keys"])
def test_an_idle_library_that_expired_is_signed_anew_where_its_key_is(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, act: str, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = make_keys("demo", "idle", "fresh")
    laid(bucket, keyring, now(), {"idle": now() - LONG_AGO, "fresh": now()})
    with pytest.raises(ExpiredMetadata, match=r"idle\.json"):
        released(bucket, keyring)
    if act == "refresh":
        refresh_timestamp(bucket, keyring)
    elif act == "publish":
        publish(tiny(), bucket, keyring=keyring)
    else:
        publish_staged(bucket, keyring)
    wanted = {"idle 0", "fresh 0", *(["demo 1.0"] if act == "publish" else [])}
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == wanted
    assert bucket.size("metadata/2.fresh.json") is None
    assert warned(caplog) == []


@pytest.mark.parametrize("act", ["refresh", "publish", "keys"])
def test_an_idle_library_that_expired_stops_nobody_where_its_key_is_not(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path, act: str, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = make_keys("demo", "idle", "fresh")
    laid(bucket, keyring, now(), {"idle": now() - LONG_AGO, "fresh": now()})
    ci = export(keyring, tmp_path / "ci", ["demo", "fresh", "snapshot", "timestamp"])
    if act == "refresh":
        seen = refresh_timestamp(bucket, ci)
    elif act == "publish":
        seen = dict(publish(tiny(), bucket, keyring=ci).seen)
    else:
        add_library(keyring.path, "more", Plan(), now=now())
        seen = publish_staged(bucket, export(Keyring.load(keyring.path), tmp_path / "new", ["snapshot", "timestamp"]))
    assert {view: each.timestamp for view, each in seen.items()} == {"online": 2, "airgap": 2}
    [said] = warned(caplog)
    assert "'idle' expired" in said
    assert "timestamp refresh" in said
    for view in ("online", "airgap"):
        found = refresh(keyring.root(view), None, bucket.get, libraries=["fresh"]).libraries
        assert [release.pin.version for release in found["fresh"].releases] == ["0"]
        with pytest.raises(ExpiredMetadata, match=r"idle\.json"):
            released(bucket, keyring, view)


def test_a_library_in_the_last_quarter_of_its_life_is_signed_anew_and_a_younger_one_when_asked_for(
    make_keys: Make, bucket: DirectoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = make_keys("old", "young")
    laid(bucket, keyring, now(), {"old": now() - timedelta(days=560), "young": now() - timedelta(days=530)})
    without = export(keyring, tmp_path / "without", ["snapshot", "timestamp"])
    assert refresh_timestamp(bucket, without)["online"].libraries == {"old": 1, "young": 1}
    assert refresh_timestamp(bucket, keyring)["airgap"].libraries == {"old": 2, "young": 1}
    assert refresh_timestamp(bucket, keyring)["online"].libraries == {"old": 2, "young": 1}
    assert refresh_timestamp(bucket, keyring, libraries=["young"])["airgap"].libraries == {"old": 2, "young": 2}
    assert warned(caplog) == []
    with pytest.raises(ConfigError, match="cannot sign for 'young'"):
        refresh_timestamp(bucket, without, libraries=["young"])
    with pytest.raises(ConfigError, match="nobody may release a library 'none'"):
        refresh_timestamp(bucket, keyring, libraries=["none"])


@pytest.mark.parametrize("years", [2.1, 4, 12])
@pytest.mark.parametrize("act", ["keys", "publish"])
def test_what_expired_long_ago_comes_back_by_renewals_and_one_publish(
    tiny: Make, bucket: DirectoryBucket, tmp_path: Path, years: float, act: str
) -> None:
    then = now() - timedelta(days=365 * years)
    keyring = made_then(tmp_path / "keys", then, "demo", "idle")
    laid(bucket, keyring, then, {"idle": then})
    before = bucket.get("metadata/timestamp.json")
    for attempt in (refresh_timestamp, publish_staged):
        with pytest.raises(ExpiredMetadata) as caught:
            attempt(bucket, keyring)
        assert f"keys renew {keyring.path} targets" in str(caught.value)
        assert "--accept-expired" not in str(caught.value)
        assert bucket.get("metadata/timestamp.json") == before
    if years > 3:
        renew(keyring.path, "root", now=now())
    renew(keyring.path, "targets", now=now())
    if act == "keys":
        publish_staged(bucket, Keyring.load(keyring.path))
    else:
        publish(tiny(), bucket, keyring=Keyring.load(keyring.path))
    wanted = {"idle 0", *(["demo 1.0"] if act == "publish" else [])}
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == wanted


def test_what_expired_is_signed_anew_even_if_nothing_else_is_to_change(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    aged(bucket, keyring, snapshot=50, timestamp=20)
    publish(tiny(), bucket, keyring=keyring)
    assert set(released(bucket, keyring)) == {"demo 1.0"}


def test_a_name_that_was_mistyped_is_not_begun_by_who_keeps_what_is_there(
    make_keys: Make, bucket: DirectoryBucket
) -> None:
    with pytest.raises(ConfigError, match=r"nothing is signed in .* yet") as caught:
        refresh_timestamp(bucket, make_keys())
    assert "keys publish" in str(caught.value)
    assert not bucket.root.exists()


def test_an_orderly_exchange_is_signed_by_both_keys_and_alarms_nobody(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    [old] = keyring.grant("demo").keys
    rotate(keyring.path, "demo", now=now())
    publish_staged(bucket, Keyring.load(keyring.path))
    both = {key.keyid for key in Keyring.load(keyring.path).grant("demo").keys}
    assert old.keyid in both
    assert signed_by(bucket.get("metadata/2.demo.json")) == both
    finish(keyring.path, "demo", now=now())
    publish_staged(bucket, Keyring.load(keyring.path))
    assert bucket.size("metadata/3.demo.json") is None
    assert warned(caplog) == []
    assert set(released(bucket, keyring)) == set(released(bucket, keyring, "airgap")) == {"demo 1.0"}


def test_an_exchange_by_who_holds_no_key_of_the_library_waits_for_a_refresh_by_who_does(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = make_keys()
    publish(tiny(), bucket, keyring=ring)

    def offline(name: str) -> Keyring:
        return export(Keyring.load(ring.path), tmp_path / name, ["targets", "snapshot", "timestamp"])

    rotate(ring.path, "demo", now=now())
    publish_staged(bucket, offline("first"))
    refresh_timestamp(bucket, export(Keyring.load(ring.path), tmp_path / "ci", ["demo", "snapshot", "timestamp"]))
    assert len(signed_by(bucket.get("metadata/2.demo.json"))) == 2
    finish(ring.path, "demo", now=now())
    publish_staged(bucket, offline("second"))
    assert warned(caplog) == []
    assert set(released(bucket, ring)) == {"demo 1.0"}


def test_a_library_whose_keys_are_taken_away_at_once_is_to_be_looked_at(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = make_keys()
    publish(tiny(), bucket, keyring=keyring)
    rotate(keyring.path, "demo", now=now())
    finish(keyring.path, "demo", now=now())
    publish_staged(bucket, Keyring.load(keyring.path))
    [said] = warned(caplog)
    assert "look whether all its releases are yours" in said


def test_a_warning_is_given_once_by_one_command(
    tiny: Make, bucket: DirectoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = made_then(tmp_path / "keys", now(), "demo")
    publish(tiny("1"), bucket, keyring=keyring)
    signing = export(keyring, tmp_path / "signing", ["demo", "snapshot", "timestamp"])
    renew(signing.path, "targets", now=now())
    renew(signing.path, "root", now=now())
    publish(tiny("2"), bucket, keyring=Keyring.load(signing.path))
    said = warned(caplog)
    assert len(said) == len(set(said)) == 3
    assert all("stays in the keyring" in each for each in said)


def test_a_second_bucket_is_warned_of_once(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyring, other = make_keys(), DirectoryBucket(tmp_path / "other")
    publish(tiny("1"), bucket, keyring=keyring)
    ci = export(keyring, tmp_path / "ci", ["demo", "snapshot", "timestamp"])
    publish(tiny("2"), DirectoryBucket(Path(os.path.relpath(bucket.root))), keyring=keyring)
    assert warned(caplog) == []
    for ring in (keyring, ci):
        caplog.clear()
        publish(tiny("2"), other, keyring=ring)
        [said] = warned(caplog)
        assert f"dir:{bucket.root}" in said
        assert "mirror pull" in said
        publish_staged(other, ring)
        assert len(warned(caplog)) == 1


@pytest.mark.parametrize("view", ["online", "airgap"])
@pytest.mark.parametrize("act", ["refresh", "promote", "keys"])
def test_who_signs_by_a_clock_that_is_behind_changes_nothing(
    make_keys: Make, bucket: DirectoryBucket, snapshot: Snapshot, act: str, view: View
) -> None:
    keyring = make_keys()
    laid(bucket, keyring, now(), {"demo": now()})
    refresh_timestamp(bucket, keyring, [view], now=now() + timedelta(hours=2))
    before = snapshot(bucket.root)
    acts = {
        "refresh": lambda: refresh_timestamp(bucket, keyring),
        "promote": lambda: commit(bucket, keyring, promoting("demo", "0", "stable")),
        "keys": lambda: publish_staged(bucket, keyring),
    }
    with pytest.raises(ConfigError, match="clock of this machine") as caught:
        acts[act]()
    assert "--clock-is-right" in str(caught.value)
    assert snapshot(bucket.root) == before
    refresh_timestamp(bucket, keyring, clock_is_right=True)
    refresh_timestamp(bucket, keyring)
    assert set(released(bucket, keyring, view)) == {"demo 0"}


def test_clocks_that_differ_a_little_stop_nobody(make_keys: Make, bucket: DirectoryBucket) -> None:
    keyring = make_keys()
    laid(bucket, keyring, now() + timedelta(minutes=30), {"demo": now()})
    refresh_timestamp(bucket, keyring)


@pytest.mark.parametrize(
    ("fault", "view", "memory"),
    [
        ("gone", "online", "keyring"),
        ("gone", "airgap", "keyring"),
        ("older", "online", "keyring"),
        ("older", "airgap", "keyring"),
        ("gone", "online", "other view"),
    ],
)
def test_a_timestamp_that_was_lost_or_went_back_is_not_built_upon(
    make_keys: Make,
    tiny: Make,
    bucket: DirectoryBucket,
    tmp_path: Path,
    snapshot: Snapshot,
    fault: str,
    view: View,
    memory: str,
) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    path = bucket.root / metadata_path(view, "timestamp.json")
    old = path.read_bytes()
    for _ in range(3):
        refresh_timestamp(bucket, keyring)
    new = path.read_bytes()
    path.unlink()
    if fault == "older":
        path.write_bytes(old)
    if memory == "other view":
        (keyring.path / "buckets.json").unlink()
    before = snapshot(bucket.root)
    for attempt in (publish_staged, refresh_timestamp):
        with pytest.raises(VerificationError, match="nothing was changed"):
            attempt(bucket, keyring)
    with pytest.raises(VerificationError, match="nothing was changed"):
        publish(tiny("2"), bucket, keyring=keyring)
    assert snapshot(bucket.root) == before
    path.write_bytes(new)
    publish(tiny("2"), bucket, keyring=keyring)
    assert set(released(bucket, keyring, view)) == {"demo 1", "demo 2"}


def test_a_first_publish_that_was_cut_is_no_loss(make_keys: Make, tiny: Make, cut_bucket: Make, tmp_path: Path) -> None:
    keyring = make_keys()
    with pytest.raises(SourceError):
        publish(tiny(), cut_bucket(tmp_path / "bucket", writes=12), keyring=keyring)
    publish(tiny(), DirectoryBucket(tmp_path / "bucket"), keyring=keyring)
    assert set(released(DirectoryBucket(tmp_path / "bucket"), keyring)) == {"demo 1.0"}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"x":{"online":"1"}}', b'{"x":{"other":1}}', b"\xff"])
def test_a_damaged_memory_of_buckets_is_a_clear_error(make_keys: Make, bucket: DirectoryBucket, content: bytes) -> None:
    keyring = make_keys()
    (keyring.path / "buckets.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"buckets\.json"):
        publish_staged(bucket, keyring)


def test_of_two_who_note_their_first_bucket_at_once_none_fails(
    make_keys: Make, bucket: DirectoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = make_keys()

    def first(path: Path, content: bytes) -> None:
        monkeypatch.undo()
        (keyring.path / "buckets.json").write_text('{"dir:/elsewhere": {"online": 1}}')
        replace(path, content)

    monkeypatch.setattr("kartifacts.trust.keyfiles.replace", first)
    publish_staged(bucket, keyring)
    assert f"dir:{bucket.root}" in keyring.buckets()


def test_a_keyring_that_cannot_be_written_to_publishes(
    make_keys: Make, bucket: DirectoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = make_keys()

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr("kartifacts.trust.keyfiles.tempfile.mkstemp", refused)
        publish_staged(DirectoryBucket(bucket.root), keyring)
    assert keyring.buckets() == {}
    publish_staged(bucket, keyring)
    assert keyring.buckets() == {f"dir:{bucket.root}": {"online": 1, "airgap": 1}}


# -- directories with metadata -----------------------------------------------------------------------------------------


def test_a_directory_with_metadata_holds_what_that_lists(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path
) -> None:
    keyring = make_keys()
    pins = [publish(tiny(version), bucket, keyring=keyring).pins[0] for version in ("1", "2")]
    unlisted = tiny("3")
    [third] = Repository(unlisted).pins()
    name = f"targets/demo/3/{third.sha256}.index.json"
    bucket.put_if_absent(name, unlisted / name)
    assert Repository(bucket.root).pins() == pins
    assert Repository(bucket.root).holds("demo")
    assert not Repository(bucket.root).holds("more")
    assert verify_repository(bucket.root, deep=True).pins == tuple(pins)
    publish(bucket.root, DirectoryBucket(tmp_path / "plain"), version="2")
    assert Repository(tmp_path / "plain").pins() == pins[1:]
    (bucket.root / "metadata").rename(tmp_path / "moved")
    assert Repository(bucket.root).pins() == pins  # by the view that is left


@pytest.mark.parametrize("name", ["timestamp.json", "2.snapshot.json", "2.demo.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other", "twice"])
def test_metadata_that_cannot_be_read_is_a_typed_error(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, name: str, damage: str
) -> None:
    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    publish(tiny("2"), bucket, keyring=keyring)
    path = bucket.root / "metadata" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        made = {"cut": content[:-9], "other": b"{}", "twice": content.replace(b'{"', b'{"signed":{},"', 1)}
        path.write_bytes(made[damage])
    if damage == "gone" and name == "timestamp.json":
        assert len(Repository(bucket.root).pins()) == 2  # by the view that is left
        return
    with pytest.raises(VerificationError):
        Repository(bucket.root).pins()


@pytest.mark.parametrize("damage", ["file", "loop", "dangling link", "emptied", "unreadable", "pipe"])
def test_metadata_that_is_broken_at_its_beginning_is_not_taken_for_none(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tiny("1"), bucket, keyring=make_keys())
    for name in ("metadata", "airgap"):
        path = bucket.root / name
        shutil.rmtree(path)
        if damage == "file":
            path.touch()
        elif damage in ("loop", "dangling link"):
            path.symlink_to(path if damage == "loop" else "absent")
        else:
            path.mkdir(0o700 if damage == "unreadable" else 0o755)
            if damage == "pipe":
                os.mkfifo(path / "timestamp.json")
    kind = SourceError if damage in ("loop", "unreadable", "pipe") else VerificationError
    _as_somebody_else(monkeypatch, bucket.root)
    try:
        for look in (lambda: Repository(Path()).pins(), lambda: Repository(Path()).holds("demo")):
            with pytest.raises(kind, match=r"metadata") as raised:
                look()
            assert type(raised.value) is kind
    finally:
        os.seteuid(os.getuid())


@pytest.mark.parametrize("place", ["targets", "targets/demo", "targets/demo/1"])
@pytest.mark.parametrize("how", ["loop", "unreadable"])
def test_names_of_releases_that_cannot_be_read_are_not_passed_over(
    tiny: Make, place: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny("1")
    path = directory / place
    shutil.rmtree(path)
    if how == "loop":
        path.symlink_to(path)
    else:
        path.mkdir(0o700)
    _as_somebody_else(monkeypatch, directory)
    try:
        with pytest.raises(SourceError, match="targets"):
            Repository(Path()).pins()
    finally:
        os.seteuid(os.getuid())


def _as_somebody_else(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Go there and be a user who may read only what all may; as any but root, one's own modes are taken away."""
    monkeypatch.chdir(directory)
    if os.getuid() == 0:
        os.seteuid(65534)
        return
    for path in [*directory.rglob("*")]:
        if path.is_dir() and path.stat().st_mode & 0o777 == 0o700:
            path.chmod(0)


def test_a_bucket_that_stays_away_is_a_source_error(
    make_keys: Make, tiny: Make, cut_bucket: Make, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="connection lost"):
        publish(tiny(), cut_bucket(tmp_path / "bucket", requests=0), keyring=make_keys())
