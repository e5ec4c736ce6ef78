"""Publishing: what is refused before anything is sent, and what a reader sees wherever it is cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import ConfigError, KartifactsError, PublishConflict, SourceError, VerificationError
from kartifacts.model.manifest import decode_lock
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository

Snapshot = Callable[[Path], dict[str, bytes]]
Make = Callable[..., Any]
OciReader = Callable[[Path], dict[str, str]]


def readable(root: Path) -> set[str]:
    """The versions that a reader finds by name, each proved complete to the last kernel."""
    if not (root / "targets").exists():
        return set()
    verify_repository(root, deep=True).check(str(root))
    return {pin.version for pin in Repository(root).pins()}


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_a_published_release_is_complete_and_pinned(
    oci_reader: OciReader, make_repository: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    pins = publish(source, DirectoryBucket(tmp_path / "bucket"), lock=tmp_path / "kartifacts.lock").pins
    assert readable(tmp_path / "bucket") == {"1.0"}
    assert pins == Repository(tmp_path / "bucket").pins()
    assert decode_lock((tmp_path / "kartifacts.lock").read_bytes()).releases == pins
    assert oci_reader(tmp_path / "bucket") == {"demo-1.0": f"sha256:{pins[0].sha256}"}


def test_the_second_run_sends_nothing(
    make_repository: Make, cut_bucket: Make, snapshot: Snapshot, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    pins = publish(source, DirectoryBucket(tmp_path / "bucket")).pins
    before = snapshot(tmp_path / "bucket")
    again = cut_bucket(tmp_path / "bucket")
    assert publish(source, again).pins == pins
    assert again.written == []
    assert snapshot(tmp_path / "bucket") == before


def test_nothing_but_what_the_release_needs_is_sent(make_repository: Make, snapshot: Snapshot, tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source")
    (source / "blobs" / "sha256" / ("0" * 64)).write_text("left over")
    (source / "blobs" / "sha256" / ".partial-1").write_text("left over")
    publish(source, DirectoryBucket(tmp_path / "bucket"))
    assert f"blobs/sha256/{'0' * 64}" not in snapshot(tmp_path / "bucket")


def test_several_releases_stand_side_by_side(oci_reader: OciReader, make_repository: Make, tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path / "bucket")
    publish(make_repository(tmp_path / "a", "1.0"), bucket)
    publish(make_repository(tmp_path / "b", "1.1+cu13", content=1), bucket)
    publish(make_repository(tmp_path / "c", "1.0", library="other"), bucket)
    assert list(oci_reader(bucket.root)) == ["demo-1.0", "demo-1.1_cu13", "other-1.0"]
    assert len(verify_repository(bucket.root, deep=True).pins) == 3
    publish(bucket.root, DirectoryBucket(tmp_path / "mirror"), library="demo", version="1.1+cu13")
    assert list(oci_reader(tmp_path / "mirror")) == ["demo-1.1_cu13"]


def test_an_upgrade_sends_only_what_changed(make_bundle: Make, cut_bucket: Make, tmp_path: Path) -> None:
    bucket = cut_bucket(tmp_path / "bucket")
    source = tmp_path / "source"
    norm, act = make_bundle(source, family="norm"), make_bundle(source, family="act")
    make_release(source, "demo", "1", [norm, act])
    publish(source, bucket, version="1")
    bucket.written.clear()
    make_release(source, "demo", "2", [norm, make_bundle(source, family="act", content=1)])
    publish(source, bucket, version="2")
    # Two packs, the table and the manifest of `act`, the release index, its name, and the pointer; nothing of `norm`.
    assert len(bucket.written) == 7


def test_what_other_tools_put_into_the_index_stays(make_repository: Make, tmp_path: Path) -> None:
    foreign = {"mediaType": "application/x", "digest": "sha256:" + "1" * 64, "size": 3}
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [foreign]}, indent=1))
    (tmp_path / "bucket" / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
    publish(make_repository(tmp_path / "source"), DirectoryBucket(tmp_path / "bucket"))
    index = json.loads((tmp_path / "bucket" / "index.json").read_bytes())
    assert foreign in index["manifests"]
    assert len(index["manifests"]) == 2


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"manifests": 3}', '{"manifests": [1]}', '{"a":1,"a":2}'])
def test_an_index_that_cannot_be_read_is_not_overwritten(make_repository: Make, tmp_path: Path, damage: str) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "index.json").write_text(damage)
    with pytest.raises(VerificationError, match="malformed"):
        publish(make_repository(tmp_path / "source"), DirectoryBucket(tmp_path / "bucket"))
    assert (tmp_path / "bucket" / "index.json").read_text() == damage


def test_two_publishers_at_once_are_both_oci_reader(
    oci_reader: OciReader, make_repository: Make, tmp_path: Path
) -> None:
    code = """
import sys
from pathlib import Path
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
publish(Path(sys.argv[1]), DirectoryBucket(Path(sys.argv[2])))
"""
    sources = [make_repository(tmp_path / f"s{n}", f"{n}.0", content=n % 2) for n in range(4)]
    publishers = [subprocess.Popen([sys.executable, "-c", code, s, tmp_path / "bucket"]) for s in sources]
    assert [publisher.wait() for publisher in publishers] == [0] * 4
    assert list(oci_reader(tmp_path / "bucket")) == [f"demo-{n}.0" for n in range(4)]
    assert readable(tmp_path / "bucket") == {f"{n}.0" for n in range(4)}


def test_of_two_contents_of_one_version_published_at_once_one_is_refused(
    oci_reader: OciReader, make_repository: Make, tmp_path: Path
) -> None:
    code = """
import sys
from pathlib import Path
from kartifacts.errors import PublishConflict
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
try:
    publish(Path(sys.argv[1]), DirectoryBucket(Path(sys.argv[2])))
except PublishConflict:
    sys.exit(10)
"""
    sources = [make_repository(tmp_path / f"s{n}", "1.0", content=n) for n in range(3)]
    publishers = [subprocess.Popen([sys.executable, "-c", code, s, tmp_path / "bucket"]) for s in sources]
    assert sorted(publisher.wait() for publisher in publishers) == [0, 10, 10]
    assert readable(tmp_path / "bucket") == {"1.0"}
    assert len(oci_reader(tmp_path / "bucket")) == 1


def test_however_the_names_of_two_contents_are_put_the_claim_decides(
    make_repository: Make, cut_bucket: Make, snapshot: Snapshot, tmp_path: Path
) -> None:
    """As on a bucket where a publisher died between the claim to a version and its name."""
    first = make_repository(tmp_path / "first", "1.0")
    counting = cut_bucket(tmp_path / "complete")
    publish(first, counting)
    with pytest.raises(SourceError, match="connection lost before targets"):
        publish(first, cut_bucket(tmp_path / "bucket", writes=len(counting.written) - 1))
    assert readable(tmp_path / "bucket") == set()
    before = snapshot(tmp_path / "bucket")
    with pytest.raises(PublishConflict, match=r"another content of demo 1\.0"):
        publish(make_repository(tmp_path / "second", "1.0", content=1), DirectoryBucket(tmp_path / "bucket"))
    assert snapshot(tmp_path / "bucket") == before
    publish(first, DirectoryBucket(tmp_path / "bucket"))
    assert readable(tmp_path / "bucket") == {"1.0"}


# -- wherever it is cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_takes_effect", [False, True])
def test_cut_anywhere_a_reader_sees_the_old_state_or_the_new_and_a_second_run_completes_it(
    oci_reader: OciReader,
    make_repository: Make,
    cut_bucket: Make,
    snapshot: Snapshot,
    tmp_path: Path,
    last_takes_effect: bool,
) -> None:
    publish(make_repository(tmp_path / "old", "1.0"), DirectoryBucket(tmp_path / "before"))
    source = make_repository(tmp_path / "new", "2.0", content=1)
    shutil.copytree(tmp_path / "before", tmp_path / "complete")
    counting = cut_bucket(tmp_path / "complete")
    publish(source, counting)
    complete, steps = snapshot(tmp_path / "complete"), len(counting.written)
    assert steps > 20
    seen = set()
    for step in range(steps):
        root = tmp_path / f"cut{step}"
        shutil.copytree(tmp_path / "before", root)
        cut = cut_bucket(root, writes=step + last_takes_effect, last_takes_effect=last_takes_effect)
        with pytest.raises(SourceError, match="connection lost"):
            publish(source, cut)
        versions = readable(root)
        assert versions in ({"1.0"}, {"1.0", "2.0"})
        # The claim to a version comes before its name, so who reads index.json may see the new state first.
        tags = {tag.removeprefix("demo-") for tag in oci_reader(root)}
        assert versions <= tags <= {"1.0", "2.0"}
        seen.add((frozenset(versions), frozenset(tags)))
        again = cut_bucket(root)
        publish(source, again)
        assert snapshot(root) == complete
        assert cut.written + again.written == counting.written
        shutil.rmtree(root)
    assert len(seen) == 2 + last_takes_effect


def test_a_first_publish_cut_anywhere_shows_nothing_or_all(
    oci_reader: OciReader, make_repository: Make, cut_bucket: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    counting = cut_bucket(tmp_path / "complete")
    publish(source, counting)
    for step in range(len(counting.written)):
        root = tmp_path / f"cut{step}"
        with pytest.raises(SourceError):
            publish(source, cut_bucket(root, writes=step))
        assert readable(root) in (set(), {"1.0"})
        assert len(oci_reader(root)) == (step == len(counting.written) - 1)


def test_whatever_names_a_blob_is_sent_after_it(make_repository: Make, cut_bucket: Make, tmp_path: Path) -> None:
    bucket = cut_bucket(tmp_path / "bucket")
    source = make_repository(tmp_path / "source")
    publish(source, bucket)
    contents = [(path, (bucket.root / path).read_bytes()) for path in bucket.written]
    for number, (path, content) in enumerate(contents):
        for later, _ in contents[number + 1 :]:
            if later.startswith("blobs/"):
                assert later.rpartition("/")[2].encode() not in content, f"{path} names {later}, which came after it"
    assert [path.partition("/")[0] for path in bucket.written[-3:]] == ["oci-layout", "index.json", "targets"]


def test_a_process_killed_while_publishing_leaves_the_old_state(make_repository: Make, tmp_path: Path) -> None:
    publish(make_repository(tmp_path / "old", "1.0"), DirectoryBucket(tmp_path / "bucket"))
    source = make_repository(tmp_path / "new", "2.0", content=1)
    code = """
import os, signal, sys
from pathlib import Path
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
writes = []
fsync = os.fsync
def killed(descriptor):
    writes.append(descriptor)
    if len(writes) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = killed
publish(Path(sys.argv[1]), DirectoryBucket(Path(sys.argv[2])))
"""
    done = subprocess.run([sys.executable, "-c", code, source, tmp_path / "bucket"], check=False)
    assert done.returncode == -9
    assert readable(tmp_path / "bucket") == {"1.0"}
    publish(source, DirectoryBucket(tmp_path / "bucket"))
    assert readable(tmp_path / "bucket") == {"1.0", "2.0"}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "directory"])
def test_a_source_with_any_bad_blob_is_refused_before_anything_is_sent(
    make_repository: Make, cut_bucket: Make, tmp_path: Path, damage: str
) -> None:
    source = make_repository(tmp_path / "source")
    for blob in verify_repository(source).blobs:
        path = source / "blobs" / "sha256" / blob.digest
        sound = path.read_bytes()
        if damage == "flip":
            path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        elif damage == "cut":
            path.write_bytes(sound[:-1])
        elif damage == "grow":
            path.write_bytes(sound + b"\0")
        else:
            path.unlink()
            if damage == "directory":
                path.mkdir()
        bucket = cut_bucket(tmp_path / "bucket")
        with pytest.raises(VerificationError, match="incomplete or damaged"):
            publish(source, bucket)
        assert bucket.written == []
        if damage == "directory":
            path.rmdir()
        path.write_bytes(sound)
    publish(source, DirectoryBucket(tmp_path / "bucket"))


def test_what_is_damaged_is_named(make_repository: Make, tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source")
    report = verify_repository(source)
    for blob in report.blobs:
        if blob.what.startswith("pack 0"):
            (source / "blobs" / "sha256" / blob.digest).unlink()
    with pytest.raises(VerificationError) as caught:
        publish(source, DirectoryBucket(tmp_path / "bucket"))
    assert "6 faults" in caught.value.message
    assert "pack 0 of bundle norm for 9.0a: missing" in caught.value.message


def test_another_content_of_a_version_is_refused_and_nothing_changes(
    make_repository: Make, cut_bucket: Make, snapshot: Snapshot, tmp_path: Path
) -> None:
    bucket = cut_bucket(tmp_path / "bucket")
    publish(make_repository(tmp_path / "a", "1.0"), bucket, lock=tmp_path / "lock")
    before, lock = snapshot(bucket.root), (tmp_path / "lock").read_bytes()
    with pytest.raises(PublishConflict, match=r"another content of demo 1\.0"):
        publish(make_repository(tmp_path / "b", "1.0", content=1), bucket, lock=tmp_path / "lock")
    assert snapshot(bucket.root) == before
    assert (tmp_path / "lock").read_bytes() == lock


def test_a_damaged_blob_in_the_bucket_is_not_taken_for_a_good_one(make_repository: Make, tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path / "bucket")
    source = make_repository(tmp_path / "source")
    blob = verify_repository(source).blobs[0]
    (bucket.root / "blobs" / "sha256").mkdir(parents=True)
    (bucket.root / "blobs" / "sha256" / blob.digest).write_bytes(bytes(blob.size))
    with pytest.raises(PublishConflict, match="already holds other bytes"):
        publish(source, bucket)
    assert readable(bucket.root) == set()


def test_a_store_that_damages_any_one_upload_is_caught_before_the_release_is_public(
    make_repository: Make, corrupting_bucket: Make, tmp_path: Path
) -> None:
    source = make_repository(tmp_path / "source")
    blobs = verify_repository(source).blobs
    for victim in range(len(blobs)):
        root = tmp_path / f"bucket{victim}"
        with pytest.raises(VerificationError, match="gives back other bytes than were sent"):
            publish(source, corrupting_bucket(root, victim=victim))
        assert not (root / "index.json").exists()
        assert not (root / "targets").exists()


def test_a_blob_beyond_the_size_budget_is_refused_with_the_largest_oci_reader(
    oci_reader: OciReader, make_repository: Make, cut_bucket: Make, tmp_path: Path
) -> None:
    bucket = cut_bucket(tmp_path / "bucket")
    source = make_repository(tmp_path / "source")
    with pytest.raises(ConfigError, match="larger than 5,000 bytes") as caught:
        publish(source, bucket, max_blob=5000)
    assert caught.value.message.count("bytes: pack") == 10
    assert bucket.written == []


def test_a_directory_without_releases_is_refused(tmp_path: Path, make_repository: Make) -> None:
    bucket = DirectoryBucket(tmp_path / "bucket")
    with pytest.raises(ConfigError, match="no such directory"):
        publish(tmp_path / "absent", bucket)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no release"):
        publish(tmp_path / "empty", bucket)
    source = make_repository(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"holds no demo 9; releases there: demo 1\.0"):
        publish(source, bucket, library="demo", version="9")
    assert not bucket.root.exists()


def test_a_bucket_that_cannot_be_written_is_an_error_and_pins_nothing(make_repository: Make, tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("a file")
    with pytest.raises(KartifactsError):
        publish(make_repository(tmp_path / "source"), DirectoryBucket(tmp_path / "bucket"), lock=tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_progress_ends_at_the_total(make_repository: Make, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    source = make_repository(tmp_path / "source")
    publish(source, DirectoryBucket(tmp_path / "bucket"), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (verify_repository(source).size,) * 2
    assert told == sorted(told)
