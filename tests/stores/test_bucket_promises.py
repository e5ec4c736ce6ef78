"""What every kind of bucket promises, on whatever it runs: names keep their content, pointers lose no update."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kartifacts.errors import PublishConflict, SourceError, VerificationError
from kartifacts.publish.buckets import Bucket, Raced, Unlisted, update
from tests.stores.conftest import Place, S3Server
from tests.stores.servers import put_server

BYTES = os.urandom(300_000)
DIGEST = hashlib.sha256(BYTES).hexdigest()
BLOB, TARGET = f"blobs/sha256/{DIGEST}", f"targets/demo/1.0/{DIGEST}.index.json"

REAL = ("seaweedfs", "ceph", "ceph_tls", "nginx", "registry")


@pytest.fixture(params=["dir", "http", *(pytest.param(name, marks=pytest.mark.stores) for name in REAL)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "dir":

        def spoil(path: str, content: bytes) -> None:
            (tmp_path / "bucket" / path).write_bytes(content)

        yield Place(f"dir:{tmp_path}/bucket", spoil=spoil)
    elif request.param == "http":
        with put_server() as server:
            yield Place(server.url, spoil=lambda path, data: server.objects.update({f"/repository/{path}": data}))
    elif request.param == "nginx":
        url, uploads = request.getfixturevalue("nginx_uploads")
        below = f"{tmp_path.name}/it"
        yield Place(
            f"{url}/{below}",
            single_writer=True,
            spoil=lambda path, data: (uploads / below / path).write_bytes(data),
        )
    elif request.param == "registry":
        port, blobs = request.getfixturevalue("registry")

        def spoil_blob(path: str, content: bytes) -> None:  # a file's content is a blob too, here always BYTES
            (blobs / DIGEST[:2] / DIGEST / "data").write_bytes(content)

        yield Place(f"oci+http://127.0.0.1:{port}/kart/{uuid.uuid4().hex}", single_writer=True, spoil=spoil_blob)
        shutil.rmtree(blobs / DIGEST[:2] / DIGEST, ignore_errors=True)  # all its repositories share it
    else:
        running: S3Server = request.getfixturevalue(request.param)
        yield running.place()


@pytest.fixture
def bucket(place: Place) -> Bucket:
    opened = place.open()
    opened.preflight()
    return opened


def test_a_name_keeps_its_first_content(bucket: Bucket) -> None:
    assert bucket.put_if_absent("metadata/1.root.json", b"one") == "created"
    assert bucket.put_if_absent("metadata/1.root.json", b"one") == "same"
    for other in (b"two", b"longer"):
        with pytest.raises(PublishConflict, match="already holds other bytes under"):
            bucket.put_if_absent("metadata/1.root.json", other)
    assert bucket.get("metadata/1.root.json") == b"one"


def test_a_file_is_stored_as_it_is_and_read_back(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES)
    assert bucket.size(BLOB) is None
    assert bucket.put_if_absent(BLOB, tmp_path / "file") == "created"
    assert bucket.put_if_absent(BLOB, tmp_path / "file") == "same"
    assert bucket.put_if_absent(BLOB, BYTES) == "same"
    assert bucket.get(BLOB) == BYTES
    assert bucket.digest(BLOB) == (DIGEST, len(BYTES))
    assert bucket.size(BLOB) == len(BYTES)


def test_nothing_is_an_object_too(bucket: Bucket) -> None:
    assert bucket.put_if_absent("metadata/empty.json", b"") == "created"
    assert bucket.put_if_absent("metadata/empty.json", b"") == "same"
    assert bucket.get("metadata/empty.json") == b""
    assert bucket.size("metadata/empty.json") == 0


def test_what_is_a_blob_gets_its_other_name_by_a_copy(bucket: Bucket) -> None:
    with pytest.raises(SourceError) as caught:
        bucket.copy_if_absent(BLOB, TARGET)
    assert caught.value.missing
    bucket.put_if_absent(BLOB, BYTES)
    assert bucket.copy_if_absent(BLOB, TARGET) == "created"
    assert bucket.copy_if_absent(BLOB, TARGET) == "same"
    assert bucket.digest(TARGET) == (DIGEST, len(BYTES))


@pytest.mark.parametrize("size", [len(BYTES), 7])
def test_wrong_bytes_under_a_name_are_seen_and_never_taken_for_the_right_ones(
    place: Place, bucket: Bucket, size: int
) -> None:
    for path in (BLOB, TARGET):
        bucket.put_if_absent(path, BYTES)
        assert place.spoil is not None
        place.spoil(path, bytes(size))
        assert bucket.digest(path) == (hashlib.sha256(bytes(size)).hexdigest(), size)
        with pytest.raises(PublishConflict):
            bucket.put_if_absent(path, BYTES)
        with pytest.raises(PublishConflict):
            bucket.put_if_absent(path, BYTES)
    fresh = os.urandom(size)
    there = f"blobs/sha256/{hashlib.sha256(fresh).hexdigest()}"
    bucket.put_if_absent(there, fresh)
    with pytest.raises(PublishConflict):
        bucket.copy_if_absent(there, TARGET)


def test_a_pointer_is_only_replaced_in_the_state_that_was_seen(bucket: Bucket) -> None:
    pointer = "metadata/timestamp.json"
    assert bucket.read(pointer) is None
    bucket.swap(pointer, b"1", None)
    with pytest.raises(Raced):
        bucket.swap(pointer, b"2", None)
    first = bucket.read(pointer)
    assert first is not None
    assert first.content == b"1"
    bucket.swap(pointer, b"2", first)
    with pytest.raises(Raced):
        bucket.swap(pointer, b"3", first)
    assert bucket.get(pointer) == b"2"
    second = bucket.read(pointer)
    bucket.delete(pointer)
    with pytest.raises(Raced):
        bucket.swap(pointer, b"3", second)
    assert bucket.read(pointer) is None


def test_a_pointer_can_be_swapped_without_a_preflight(place: Place) -> None:
    bucket = place.open()
    for _ in range(3):
        update(bucket, "index.json", lambda before: (before or b"") + b"x")
    assert bucket.get("index.json") == b"xxx"


def test_no_update_of_another_process_is_lost(place: Place) -> None:
    if place.single_writer:
        pytest.skip("this bucket is for one writer")
    code = """
for number in range(6):
    update(bucket, "p", lambda before: (before or b"") + f"{sys.argv[1]}{number} ".encode())
"""
    writers = [place.python(code, name) for name in "abc"]
    assert [(writer.communicate(), writer.returncode)[1] for writer in writers] == [0] * 3
    assert sorted(place.open().get("p").split()) == sorted(f"{name}{n}".encode() for name in "abc" for n in range(6))


@pytest.mark.parametrize("same", [True, False])
def test_of_many_writers_of_one_name_one_creates_it(place: Place, same: bool) -> None:
    if place.single_writer:
        pytest.skip("this bucket is for one writer")
    code = """
outcomes = []
for number in range(12):
    try:
        outcomes.append(bucket.put_if_absent(f"metadata/{number}.snapshot.json", sys.argv[1].encode()))
    except PublishConflict:
        outcomes.append("conflict")
print(*outcomes)
"""
    writers = [place.python(code, "same" if same else name * 3) for name in "abc"]
    outcomes = [writer.communicate()[0].split() for writer in writers]
    other = "same" if same else "conflict"
    for number in range(12):
        assert sorted(outcome[number] for outcome in outcomes) == sorted(["created", other, other])


def test_a_listing_is_of_one_directory_and_sorted(bucket: Bucket) -> None:
    for path in ("t/b", "t/a/2", "t/a/1", "ta/x", "u"):
        bucket.put_if_absent(path, path.encode())
    try:
        found = bucket.list("t")
    except Unlisted:
        return
    assert [(entry.path, entry.size) for entry in found] == [("t/a/1", 5), ("t/a/2", 5), ("t/b", 3)]
    assert bucket.list("absent") == []
    assert bucket.list("probe") == []


def test_what_is_deleted_is_gone_and_may_be_deleted_again(bucket: Bucket) -> None:
    bucket.put_if_absent("t/a", b"x")
    bucket.delete("t/a")
    bucket.delete("t/a")
    assert bucket.size("t/a") is None
    assert bucket.put_if_absent("t/a", b"y") == "created"
    bucket.tidy()
    assert bucket.get("t/a") == b"y"


def test_what_is_not_there_is_missing_and_what_is_too_large_is_not_read(bucket: Bucket) -> None:
    for act in (bucket.get, bucket.digest):
        with pytest.raises(SourceError) as caught:
            act("metadata/7.root.json")
        assert caught.value.missing
    bucket.put_if_absent(BLOB, BYTES)
    with pytest.raises(SourceError, match=f"larger than 1000 bytes|has {len(BYTES)} bytes") as caught:
        bucket.get(BLOB, 1000)
    assert not caught.value.missing
    assert caught.value.permanent


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "x y", "a?b", "a#b", "a%2e%2e"])
def test_no_path_leads_out_of_the_bucket(bucket: Bucket, path: str) -> None:
    for act in (bucket.get, bucket.size, bucket.list, bucket.digest, bucket.read, bucket.delete):
        with pytest.raises((VerificationError, Unlisted)):
            act(path)
    with pytest.raises(VerificationError):
        bucket.put_if_absent(path, b"")
    with pytest.raises(VerificationError):
        bucket.swap(path, b"", None)


def test_a_file_that_cannot_be_read_is_named(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="absent"):
        bucket.put_if_absent(BLOB, tmp_path / "absent")
    assert bucket.size(BLOB) is None
