"""A directory as a bucket: names keep their content, pointers lose no update, faults are typed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, PublishConflict, SourceError, VerificationError
from kartifacts.publish.buckets import open_bucket, update
from kartifacts.publish.buckets.directory import DirectoryBucket

Snapshot = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def bucket(tmp_path: Path) -> DirectoryBucket:
    return DirectoryBucket(tmp_path / "bucket")


def test_a_name_keeps_its_first_content(bucket: DirectoryBucket) -> None:
    assert bucket.put_if_absent("blobs/x", b"one") == "created"
    assert bucket.put_if_absent("blobs/x", b"one") == "same"
    with pytest.raises(PublishConflict, match="already holds other bytes under 'blobs/x'"):
        bucket.put_if_absent("blobs/x", b"two")
    assert bucket.get("blobs/x") == b"one"


def test_a_file_is_stored_as_it_is(bucket: DirectoryBucket, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "file").write_bytes(content)
    assert bucket.put_if_absent("a/b/c", tmp_path / "file") == "created"
    assert bucket.put_if_absent("a/b/c", tmp_path / "file") == "same"
    assert bucket.get("a/b/c") == content
    assert bucket.digest("a/b/c") == bucket.digest("a/b/c")


def test_what_is_published_can_be_served_whatever_the_umask(bucket: DirectoryBucket) -> None:
    before = os.umask(0o077)
    try:
        bucket.put_if_absent("a/b/c", b"x")
        update(bucket, "index.json", lambda _: b"y")
    finally:
        os.umask(before)
    for path in (bucket.root, *bucket.root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


def test_an_update_that_changes_nothing_writes_nothing(bucket: DirectoryBucket) -> None:
    assert update(bucket, "p", lambda before: b"1" if before is None else before)
    first = (bucket.root / "p").stat()
    assert not update(bucket, "p", lambda before: before or b"")
    assert (bucket.root / "p").stat().st_ino == first.st_ino


def test_a_failed_update_leaves_the_pointer(bucket: DirectoryBucket, snapshot: Snapshot) -> None:
    update(bucket, "p", lambda _: b"1")

    def failing(_: bytes | None) -> bytes:
        raise VerificationError("no")

    with pytest.raises(VerificationError):
        update(bucket, "p", failing)
    assert snapshot(bucket.root) == {"p": b"1"}
    assert update(bucket, "p", lambda _: b"2")


def test_no_update_of_another_process_is_lost(bucket: DirectoryBucket) -> None:
    code = f"""
import sys
from pathlib import Path
from kartifacts.publish.buckets import update
from kartifacts.publish.buckets.directory import DirectoryBucket
bucket = DirectoryBucket(Path({str(bucket.root)!r}))
for number in range(25):
    update(bucket, "p", lambda before: (before or b"") + f"{{sys.argv[1]}}{{number}} ".encode())
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert sorted(bucket.get("p").split()) == sorted(f"{name}{n}".encode() for name in "abcd" for n in range(25))


def test_of_many_writers_of_one_name_exactly_one_creates_it(bucket: DirectoryBucket) -> None:
    code = f"""
from pathlib import Path
from kartifacts.publish.buckets.directory import DirectoryBucket
bucket = DirectoryBucket(Path({str(bucket.root)!r}))
print([bucket.put_if_absent(f"x/{{number}}", b"same") for number in range(50)].count("created"))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert sum(int(writer.communicate()[0]) for writer in writers) == 50


def test_half_written_files_are_not_listed(bucket: DirectoryBucket) -> None:
    bucket.put_if_absent("t/a/1", b"")
    bucket.put_if_absent("t/b", b"")
    (bucket.root / "t" / ".partial-x").write_bytes(b"")
    assert [listed.path for listed in bucket.list("t")] == ["t/a/1", "t/b"]
    assert bucket.list("absent") == []


def test_a_crash_while_writing_leaves_no_name(bucket: DirectoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", cut)
        with pytest.raises(SourceError, match="No space left"):
            bucket.put_if_absent("x", b"1")
        with pytest.raises(SourceError, match="No space left"):
            update(bucket, "p", lambda _: b"1")
    assert list(bucket.root.iterdir()) == []


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", ".git/x"])
def test_no_path_leads_out_of_the_bucket(bucket: DirectoryBucket, path: str) -> None:
    for act in (bucket.get, bucket.size, bucket.list, bucket.digest):
        with pytest.raises(VerificationError, match="not a safe relative path"):
            act(path)
    with pytest.raises(VerificationError):
        bucket.put_if_absent(path, b"")
    with pytest.raises(VerificationError):
        update(bucket, path, lambda _: b"")


def test_faults_of_the_file_system_are_source_errors(bucket: DirectoryBucket, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot read 'x'") as caught:
        bucket.get("x")
    assert caught.value.missing
    bucket.root.write_text("a file, not a directory")
    with pytest.raises(SourceError, match="cannot write 'x'"):
        bucket.put_if_absent("x", b"")
    with pytest.raises(SourceError, match=r"cannot (read|write) 'x'"):
        update(bucket, "x", lambda _: b"")
    with pytest.raises(SourceError):
        DirectoryBucket(tmp_path / "other").put_if_absent("x", tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "srv", "ftp://x", "dir:", "DIR:x"])
def test_an_unknown_kind_of_bucket_is_named_with_what_is_known(text: str) -> None:
    with pytest.raises(ConfigError, match="expected dir:PATH"):
        open_bucket(text, Settings())


def test_open_bucket_takes_any_path(tmp_path: Path) -> None:
    bucket = open_bucket(f"dir:{tmp_path}/with space:and colon", Settings())
    bucket.put_if_absent("x", b"1")
    assert (tmp_path / "with space:and colon" / "x").read_bytes() == b"1"
