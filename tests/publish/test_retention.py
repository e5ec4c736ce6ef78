"""Retention: what is deleted, what never is, and that no publisher and no reader is hurt by it, whenever they come."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import KartifactsError, SourceError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.publish.buckets import Stamped, Unlisted
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import commit, refresh_timestamp
from kartifacts.publish.editing import retiring
from kartifacts.publish.leases import Busy, deleting, publishing, tombstones
from kartifacts.publish.protocol import publish
from kartifacts.publish.repository import Repository
from kartifacts.publish.retention import Retained, retain
from kartifacts.publish.verify import verify_repository
from kartifacts.trust.client import refresh
from kartifacts.trust.keyring import Keyring

Make = Callable[..., Any]
Snapshot = Callable[[Path], dict[str, bytes]]

DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def now() -> datetime:
    return datetime.now(timezone.utc)


def age(root: Path, days: float) -> None:
    """Let everything in a bucket have been written some days ago, and all tombstones have been there for as long."""
    listed = root / "gc" / "tombstones.json"
    if listed.exists():
        content = json.loads(listed.read_bytes())
        content["since"] = {
            path: (datetime.fromisoformat(since) - timedelta(days=days)).isoformat()
            for path, since in content.get("since", {}).items()
        }
        listed.write_text(json.dumps(content))
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (path.stat().st_mtime - days * 86_400,) * 2)


def blobs(root: Path) -> set[str]:
    return {path.name for path in (root / "blobs" / "sha256").iterdir()}


def needed(path: Path) -> set[str]:
    return {blob.digest for blob in verify_repository(path).blobs}


@pytest.fixture
def bucket(tmp_path: Path) -> DirectoryBucket:
    return DirectoryBucket(tmp_path / "bucket")


@pytest.fixture
def retired(make_keys: Make, tiny: Make, bucket: DirectoryBucket) -> Keyring:
    """A bucket of a release, and of one that was retired, long ago."""
    keyring: Keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    publish(tiny("2"), bucket, keyring=keyring)
    commit(bucket, keyring, retiring("demo", "1"))
    age(bucket.root, 200)
    return keyring


def test_what_was_retired_goes_after_its_grace_and_all_else_stays(
    retired: Keyring, bucket: DirectoryBucket, tiny: Make, snapshot: Snapshot, readers: Make
) -> None:
    before = snapshot(bucket.root)
    first = retain(bucket, retired)
    assert (first.deleted, first.left) == ((), 0)
    assert first.waiting > 0
    assert {path: content for path, content in snapshot(bucket.root).items() if not path.startswith("gc/")} == before
    age(bucket.root, 29)
    assert retain(bucket, retired).deleted == ()
    age(bucket.root, 2)
    second = retain(bucket, retired)
    assert len(second.deleted) == first.waiting
    assert blobs(bucket.root) == needed(tiny("2"))
    assert not (bucket.root / "targets" / "demo" / "1").exists() or not any((bucket.root / "targets/demo/1").iterdir())
    left = {path.name for place in ("metadata", "airgap") for path in (bucket.root / place).iterdir()}
    assert left == {"1.root.json", "1.targets.json", "3.demo.json", "3.snapshot.json", "timestamp.json"}
    assert readers(retired).see(bucket.root)["new airgap"] == {"demo 2"}
    assert tombstones(bucket) == type(tombstones(bucket))()
    assert retain(bucket, retired) == Retained(first.reached, 0, (), 0)


def test_a_dry_run_tells_what_would_go_and_writes_nothing(
    retired: Keyring, bucket: DirectoryBucket, snapshot: Snapshot
) -> None:
    retain(bucket, retired)
    age(bucket.root, 31)
    before = snapshot(bucket.root)
    told = retain(bucket, retired, dry_run=True)
    assert snapshot(bucket.root) == before
    assert retain(bucket, retired) == told


def test_what_others_put_there_stays(retired: Keyring, bucket: DirectoryBucket) -> None:
    """An image that another tool pushed is followed from index.json; what has no name of ours is not looked at."""
    layer, config = b"layer", b"{}"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "x/y", "digest": f"sha256:{sha256(config)}", "size": 2},
            "layers": [{"mediaType": "x/z", "digest": f"sha256:{sha256(layer)}", "size": 5}],
        }
    ).encode()
    for content in (layer, config, manifest):
        bucket.put_if_absent(f"blobs/sha256/{sha256(content)}", content)
    index = json.loads((bucket.root / "index.json").read_bytes())
    media = "application/vnd.oci.image.manifest.v1+json"
    index["manifests"].append({"mediaType": media, "digest": f"sha256:{sha256(manifest)}", "size": len(manifest)})
    index["manifests"].append({"mediaType": media, "digest": f"sha256:{'1' * 64}", "size": 3})  # which is not here
    (bucket.root / "index.json").write_text(json.dumps(index))
    others = ["blobs/sha256/README", "blobs/other/x", "targets/readme.txt", "metadata/notes.json", "www/index.html"]
    for path in others:
        bucket.put_if_absent(path, b"mine")
    age(bucket.root, 200)
    retain(bucket, retired)
    age(bucket.root, 31)
    assert retain(bucket, retired).deleted
    assert {sha256(layer), sha256(config), sha256(manifest)} <= blobs(bucket.root)
    assert [bucket.get(path) for path in others] == [b"mine"] * len(others)


def test_provenance_stays_with_its_release(make_keys: Make, tiny: Make, bucket: DirectoryBucket) -> None:
    keyring = make_keys()
    for version in ("1", "2"):
        publish(tiny(version), bucket, keyring=keyring, extra_targets={f"demo/{version}/provenance.json": b"{}"})
    commit(bucket, keyring, retiring("demo", "1"))
    age(bucket.root, 200)
    retain(bucket, keyring)
    age(bucket.root, 31)
    retain(bucket, keyring)
    assert [path.parent.name for path in bucket.root.glob("targets/demo/*/*.provenance.json")] == ["2"]


def test_a_view_that_lags_behind_keeps_what_it_lists(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, tmp_path: Path, readers: Make
) -> None:
    from kartifacts.trust.keyceremony import export

    keyring = make_keys()
    publish(tiny("1"), bucket, keyring=keyring)
    publish(tiny("2"), bucket, keyring=keyring)
    online = export(keyring, tmp_path / "online", ["demo", "snapshot", "timestamp"], views=["online"])
    commit(bucket, online, retiring("demo", "1"))
    age(bucket.root, 200)
    retain(bucket, keyring)
    age(bucket.root, 31)
    retain(bucket, keyring)
    seen = readers(keyring).see(bucket.root)
    assert (seen["new online"], seen["new airgap"]) == ({"demo 2"}, {"demo 1", "demo 2"})


def test_young_metadata_and_roots_of_any_age_stay(retired: Keyring, bucket: DirectoryBucket) -> None:
    refresh_timestamp(bucket, retired)
    bucket.put_if_absent("metadata/9.demo.json", b"of a publisher that is slow, or dead")
    bucket.put_if_absent("metadata/7.root.json", b"of somebody")
    for _ in range(2):
        retain(bucket, retired, grace=timedelta(0))
    assert bucket.size("metadata/9.demo.json")
    age(bucket.root, 91)
    for _ in range(2):
        retain(bucket, retired, grace=timedelta(0))
    assert bucket.size("metadata/9.demo.json") is None
    assert bucket.size("metadata/7.root.json")


def test_what_was_written_again_gets_a_new_grace(retired: Keyring, bucket: DirectoryBucket, tiny: Make) -> None:
    retain(bucket, retired)
    age(bucket.root, 31)
    again = next(path for path in (bucket.root / "blobs" / "sha256").iterdir() if path.name not in needed(tiny("2")))
    os.utime(again)
    assert again.name not in {entry.path.rpartition("/")[2] for entry in retain(bucket, retired).deleted}
    age(bucket.root, 31)
    assert again.name in {entry.path.rpartition("/")[2] for entry in retain(bucket, retired).deleted}


def test_a_new_release_of_old_bytes_rescues_them(
    retired: Keyring, bucket: DirectoryBucket, tiny: Make, readers: Make
) -> None:
    retain(bucket, retired)
    age(bucket.root, 31)
    publish(tiny("1"), bucket, keyring=retired)
    retain(bucket, retired)
    assert readers(retired).see(bucket.root)["new online"] == {"demo 1", "demo 2"}
    assert not [path for path in tombstones(bucket).since if path.startswith(("blobs", "targets"))]


@pytest.mark.parametrize("what", ["blob", "metadata"])
def test_nothing_is_deleted_while_what_is_public_does_not_hold(
    retired: Keyring, bucket: DirectoryBucket, tiny: Make, what: str
) -> None:
    retain(bucket, retired)
    age(bucket.root, 31)
    [pin] = Repository(bucket.root).pins()
    path = bucket.root / (f"blobs/sha256/{pin.sha256}" if what == "blob" else "metadata/3.demo.json")
    path.write_bytes(path.read_bytes().replace(b"demo", b"oops", 1))
    before = blobs(bucket.root)
    with pytest.raises(VerificationError):
        retain(bucket, retired)
    assert blobs(bucket.root) == before
    assert tombstones(bucket).deleting == ""


def test_a_bucket_that_cannot_be_listed_says_so(retired: Keyring, bucket: DirectoryBucket, snapshot: Snapshot) -> None:
    class Blind(DirectoryBucket):
        def list(self, prefix: str) -> Any:
            raise Unlisted("cannot be listed", permanent=True)

    before = snapshot(bucket.root)
    with pytest.raises(Unlisted):
        retain(Blind(bucket.root), retired)
    assert snapshot(bucket.root) == before


@pytest.mark.parametrize("content", ["", "[]", '{"since":{"x":"then"}}', '{"since":3}', '{"deleting":"now"}'])
def test_tombstones_that_cannot_be_read_are_a_typed_error(
    retired: Keyring, bucket: DirectoryBucket, tiny: Make, content: str
) -> None:
    (bucket.root / "gc").mkdir(exist_ok=True)
    (bucket.root / "gc" / "tombstones.json").write_text(content)
    for act in (lambda: retain(bucket, retired), lambda: publish(tiny("3"), bucket, keyring=retired)):
        with pytest.raises(VerificationError, match="malformed"):
            act()


# -- publishers and collectors -----------------------------------------------------------------------------------------


class Interrupted(DirectoryBucket):
    """A real directory in which somebody else does something right before the n-th request."""

    def __init__(self, root: Path, *, at: int = -1, act: Callable[[], object] = lambda: None) -> None:
        super().__init__(root)
        self.at = at
        self.act = act
        self.asked = 0

    def _step(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            self.act()

    def put_if_absent(self, path: str, content: bytes | Path) -> Any:
        self._step()
        return super().put_if_absent(path, content)

    def get(self, path: str, limit: int = 1 << 26) -> bytes:
        self._step()
        return super().get(path, limit)

    def size(self, path: str) -> int | None:
        self._step()
        return super().size(path)

    def read(self, path: str) -> Stamped | None:
        self._step()
        return super().read(path)

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        self._step()
        super().swap(path, content, before)

    def list(self, prefix: str) -> Any:
        self._step()
        return super().list(prefix)

    def delete(self, path: str) -> None:
        self._step()
        super().delete(path)


def due(make_keys: Make, tiny: Make, root: Path) -> Keyring:
    """A bucket where release 1 was retired and is to be deleted now."""
    keyring: Keyring = make_keys()
    bucket = DirectoryBucket(root)
    publish(tiny("2"), bucket, keyring=keyring)
    publish(tiny("1"), bucket, keyring=keyring)
    commit(bucket, keyring, retiring("demo", "1"))
    age(root, 200)
    retain(bucket, keyring)
    age(root, 31)
    return keyring


Outcome = tuple[str, str]


class Meeting:
    """A publisher and a collector on one bucket; what the one publishes is made of what the other would delete."""

    def __init__(self, keyring: Keyring, source: Path, start: Path, root: Path) -> None:
        self.keyring = keyring
        self.source = source
        self.start = start
        self.root = root
        self.said: dict[str, str] = {}

    def afresh(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.start, self.root)
        (self.keyring.path / "buckets.json").unlink(missing_ok=True)  # it would notice that the bucket went back
        self.said.clear()

    def publisher(self, bucket: DirectoryBucket) -> None:
        self._act("publisher", lambda: publish(self.source, bucket, keyring=self.keyring))

    def collector(self, bucket: DirectoryBucket) -> None:
        self._act("collector", lambda: retain(bucket, self.keyring))

    def _act(self, who: str, act: Callable[[], object]) -> None:
        try:
            act()
            self.said[who] = "done"
        except Busy:
            self.said[who] = "stopped"

    def check(self, everybody: Any) -> Outcome:
        """Whoever said that it was done has done it, and every release is whole."""
        seen = everybody.see(self.root)
        wanted = {"demo 1", "demo 2"} if self.said["publisher"] == "done" else {"demo 2"}
        assert seen["new online"] == seen["new airgap"] == wanted
        return self.said["publisher"], self.said["collector"]


@pytest.fixture
def meeting(make_keys: Make, tiny: Make, tmp_path: Path) -> Meeting:
    return Meeting(due(make_keys, tiny, tmp_path / "start"), tiny("1"), tmp_path / "start", tmp_path / "bucket")


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("interrupted", ["publisher", "collector"])
def test_whenever_one_does_all_of_its_work_between_two_requests_of_the_other_every_release_is_whole(
    meeting: Meeting, readers: Make, interrupted: str, every: int
) -> None:
    everybody = readers(meeting.keyring)
    slow, other = (
        (meeting.publisher, meeting.collector) if interrupted == "publisher" else (meeting.collector, meeting.publisher)
    )
    meeting.afresh()
    counting = Interrupted(meeting.root)
    slow(counting)
    assert counting.asked > 20
    met: set[Outcome] = set()
    for at in range(1, counting.asked + 1, every):
        meeting.afresh()
        slow(Interrupted(meeting.root, at=at, act=lambda: other(DirectoryBucket(meeting.root))))
        met.add(meeting.check(everybody))
    late = ("done", "stopped") if interrupted == "publisher" else ("stopped", "done")
    assert met == {("done", "done"), late}


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_however_the_requests_of_both_are_mixed_every_release_is_whole(
    meeting: Meeting, readers: Make, many: bool
) -> None:
    """One comes as far as some request, then the other as far as some of its own; then the first goes on to its end."""
    everybody = readers(meeting.keyring)
    asked = {}
    for name, act in (("publisher", meeting.publisher), ("collector", meeting.collector)):
        meeting.afresh()
        counting = Stepped(meeting.root)
        act(counting)
        asked[name] = counting.asked
    met: set[Outcome] = set()
    pairs = [*product(stops_of_publisher(asked["publisher"]), stops_of_collector(asked["collector"]))]
    if many:
        pairs += product(range(0, len(asked["publisher"]), 3), range(0, len(asked["collector"]), 2))
    for (first, second), publisher_first in product(pairs, (True, False)):
        meeting.afresh()
        publisher, collector = Stepped(meeting.root, stop=first), Stepped(meeting.root, stop=second)
        order = [(publisher, meeting.publisher), (collector, meeting.collector)]
        with ThreadPoolExecutor(2) as pool:
            runs = []
            for bucket, act in order if publisher_first else reversed(order):
                runs.append((bucket, pool.submit(act, bucket)))
                bucket.wait(runs[-1][1])
            for bucket, run in runs:
                bucket.go.set()
                run.result()
        met.add(meeting.check(everybody))
    assert met >= {("done", "done"), ("done", "stopped"), ("stopped", "done"), ("stopped", "stopped")}


class Stepped(DirectoryBucket):
    """A real directory that waits before one of its requests until it may go on."""

    def __init__(self, root: Path, *, stop: int = -1) -> None:
        super().__init__(root)
        self.stop = stop
        self.asked: builtins.list[str] = []
        self.stopped = threading.Event()
        self.go = threading.Event()

    def wait(self, run: Future[None]) -> None:
        """Until it has come to the request where it stops, or to its end."""
        run.add_done_callback(lambda _: self.stopped.set())
        self.stopped.wait()

    def _step(self, path: str) -> None:
        if len(self.asked) == self.stop:
            self.stopped.set()
            self.go.wait()
        self.asked.append(path)

    def put_if_absent(self, path: str, content: bytes | Path) -> Any:
        self._step(path)
        return super().put_if_absent(path, content)

    def get(self, path: str, limit: int = 1 << 26) -> bytes:
        self._step(path)
        return super().get(path, limit)

    def read(self, path: str) -> Stamped | None:
        self._step(path)
        return super().read(path)

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        self._step(path)
        super().swap(path, content, before)

    def list(self, prefix: str) -> Any:
        self._step(prefix)
        return super().list(prefix)

    def delete(self, path: str) -> None:
        self._step(path)
        super().delete(path)


def stops_of_publisher(asked: list[str]) -> list[int]:
    """Before it looks for a collector, before it looks at blobs, after that, and before all becomes public."""
    look = asked.index("gc/tombstones.json")
    public = max(number for number, path in enumerate(asked) if path == "metadata/timestamp.json")
    return [look, look + 1, next(number for number, path in enumerate(asked) if path.startswith("targets/")), public]


def stops_of_collector(asked: list[str]) -> list[int]:
    """Before it says that it deletes, before it looks for publishers, after that, and before it deletes."""
    look = asked.index("gc/publishing")
    return [look - 1, look, look + 1, next(number for number, path in enumerate(asked) if path.startswith("targets/"))]


def test_of_two_collectors_one_stops(make_keys: Make, tiny: Make, tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    keyring = due(make_keys, tiny, root)
    stopped = []

    def second() -> None:
        with pytest.raises(Busy):
            retain(DirectoryBucket(root), keyring)
        stopped.append(True)

    assert retain(Interrupted(root, at=8, act=second), keyring).deleted
    assert stopped


def test_a_publisher_that_was_killed_holds_a_collector_off_for_a_day(
    make_keys: Make, tiny: Make, tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    keyring = due(make_keys, tiny, root)
    bucket = DirectoryBucket(root)
    bucket.put_if_absent("gc/publishing/0123.json", b"{}")
    with pytest.raises(Busy, match="somebody publishes") as caught:
        retain(bucket, keyring)
    assert not caught.value.permanent
    assert tombstones(bucket).deleting == ""
    age(root, 1.01)
    assert retain(bucket, keyring).deleted
    assert bucket.list("gc/publishing") == []


def test_a_collector_that_was_killed_holds_publishers_off_for_an_hour(
    make_keys: Make, tiny: Make, cut_bucket: Make, tmp_path: Path
) -> None:
    root = tmp_path / "bucket"
    keyring = due(make_keys, tiny, root)
    counting = cut_bucket(root)
    with pytest.raises(SourceError, match="lost"):
        retain(cut_bucket(root, requests=12), keyring)
    assert tombstones(counting).deleting != ""
    with pytest.raises(Busy, match="are being deleted"):
        publish(tiny("3"), DirectoryBucket(root), keyring=keyring)
    assert not list((root / "gc" / "publishing").iterdir())
    listed = json.loads((root / "gc" / "tombstones.json").read_bytes())
    listed["deleting"] = (now() - timedelta(hours=1.01)).isoformat()
    (root / "gc" / "tombstones.json").write_text(json.dumps(listed))
    publish(tiny("3"), DirectoryBucket(root), keyring=keyring)
    retain(DirectoryBucket(root), keyring)


@pytest.mark.parametrize("ahead", [timedelta(hours=1.1), timedelta(days=27_000)])
def test_a_mark_from_the_future_stops_nobody_for_ever(
    make_keys: Make, tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead: timedelta
) -> None:
    root = tmp_path / "bucket"
    keyring, bucket = due(make_keys, tiny, root), DirectoryBucket(root)
    marks, lease = root / "gc" / "tombstones.json", "gc/publishing/0123.json"

    def mark() -> None:
        content = json.loads(marks.read_bytes())
        marks.write_text(json.dumps({**content, "deleting": (now() + ahead).isoformat()}))

    mark()
    publish(tiny("3"), bucket, keyring=keyring)
    assert "tombstones.json in" in caplog.text
    assert "is to come" in caplog.text
    mark()
    bucket.put_if_absent(lease, b"{}")
    os.utime(root / lease, ((now() + ahead).timestamp(),) * 2)
    caplog.clear()
    assert retain(bucket, keyring).deleted
    assert lease in caplog.text
    assert bucket.list("gc/publishing") == []
    assert tombstones(bucket).deleting == ""


@pytest.mark.parametrize("slow", [timedelta(minutes=50), timedelta(days=400)])
def test_who_has_a_slow_clock_still_sees_the_other(
    make_keys: Make, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: timedelta
) -> None:
    root = tmp_path / "bucket"
    due(make_keys, tiny, root)
    bucket = DirectoryBucket(root)
    bucket.put_if_absent("gc/publishing/0123.json", b"{}")
    with pytest.raises(Busy, match="somebody publishes"), deleting(bucket, now() - slow):
        pass
    bucket.delete("gc/publishing/0123.json")

    class Slow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - slow

    def begin() -> None:
        with publishing(bucket):
            pass

    with deleting(bucket, now()):
        monkeypatch.setattr("kartifacts.publish.leases.datetime", Slow)
        with pytest.raises(Busy, match="are being deleted"):
            begin()
    begin()


def test_a_collector_cut_after_any_write_hurts_nobody_and_the_next_completes_it(
    make_keys: Make, tiny: Make, cut_bucket: Make, tmp_path: Path, readers: Make
) -> None:
    start, root = tmp_path / "start", tmp_path / "bucket"
    keyring = due(make_keys, tiny, start)
    everybody = readers(keyring)
    everybody.remember(start)
    shutil.copytree(start, root)
    counting = cut_bucket(root)
    retain(counting, keyring)
    complete = blobs(root)
    for number, request in enumerate(counting.asked):
        for last in (False, True) if request.startswith(("delete", "swap")) else ():
            shutil.rmtree(root)
            shutil.copytree(start, root)
            with pytest.raises(SourceError, match="lost"):
                retain(cut_bucket(root, requests=number, last_takes_effect=last), keyring)
            seen = everybody.see(root)
            assert seen["old online"] == seen["new airgap"] == {"demo 2"}
            retain(DirectoryBucket(root), keyring, now=now() + timedelta(hours=2))
            assert blobs(root) == complete


def test_a_publisher_that_took_too_long_makes_nothing_public(
    make_keys: Make, tiny: Make, bucket: DirectoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publishing(bucket) as lease:
        lease.check()
        lease.since -= timedelta(hours=13)
        with pytest.raises(Busy, match="took longer"):
            lease.check()


def test_a_reader_who_is_overtaken_by_a_collector_asks_again_and_succeeds(
    make_keys: Make, tiny: Make, tmp_path: Path
) -> None:
    """Whatever it has read when a release is published, and all that was before is deleted at once."""
    start, root = tmp_path / "start", tmp_path / "bucket"
    keyring: Keyring = make_keys()
    publish(tiny("1"), DirectoryBucket(start), keyring=keyring)
    new = tiny("2")
    reads: list[str] = []

    def overtaken(at: int) -> Callable[[str, int], bytes]:
        def read(path: str, limit: int) -> bytes:
            reads.append(path)
            if len(reads) == at:
                publish(new, DirectoryBucket(root), keyring=keyring)
                age(root, 100)
                for _ in range(2):
                    retain(DirectoryBucket(root), keyring, grace=timedelta(0), now=now() + DAY)
            return DirectoryBucket(root).get(path, limit)

        return read

    shutil.copytree(start, root)
    refresh(keyring.root("online"), None, overtaken(0))
    asked = len(reads)
    retried = 0
    for at in range(1, asked + 1):
        shutil.rmtree(root)
        shutil.copytree(start, root)
        (keyring.path / "buckets.json").unlink(missing_ok=True)  # it would notice that the bucket went back
        reads.clear()
        found = refresh(keyring.root("online"), None, overtaken(at))
        retried += reads.count("metadata/timestamp.json") > 1
        versions = {release.pin.version for release in found.libraries["demo"].releases}
        assert versions in ({"1"}, {"1", "2"})
    assert retried > 0


def test_errors_of_retention_are_typed(retired: Keyring, cut_bucket: Make, bucket: DirectoryBucket) -> None:
    with pytest.raises(KartifactsError):
        retain(cut_bucket(bucket.root, requests=0), retired)
