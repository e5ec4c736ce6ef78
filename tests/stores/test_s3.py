"""S3 on real servers: outcomes that are not known, rights that are missing, uploads that were killed, and TLS."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import ConfigError, PublishConflict, SourceError
from kartifacts.model.digest import Digest
from kartifacts.publish.buckets import Raced, open_bucket, update
from kartifacts.publish.buckets import s3 as s3_bucket
from kartifacts.publish.protocol import publish
from kartifacts.remote import s3
from kartifacts.sources import from_settings
from kartifacts.sources.http import HttpSource
from kartifacts.testing import tiny_repository
from tests.stores.conftest import Place, S3Server
from tests.stores.servers import Relay

pytestmark = pytest.mark.stores

POINTER = "metadata/timestamp.json"
SECRET = "kartsecretkart"


@pytest.fixture(params=["seaweedfs", "ceph", "ceph_tls"])
def server(request: pytest.FixtureRequest) -> S3Server:
    running: S3Server = request.getfixturevalue(request.param)
    return running


@pytest.fixture(params=["seaweedfs", "ceph"])
def plain(request: pytest.FixtureRequest) -> S3Server:
    running: S3Server = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def relay(plain: S3Server) -> Iterator[Relay]:
    relay = Relay(plain.port)
    yield relay
    relay.close()


@pytest.fixture
def relayed(plain: S3Server, relay: Relay) -> Place:
    return plain.place(endpoint=f"http://127.0.0.1:{relay.port}")


def blob_of(content: bytes) -> str:
    return f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


# -- outcomes that are not known ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["lose_requests", "lose_answers"])
def test_a_connection_that_ends_before_the_answer_comes_decides_nothing(
    relayed: Place, relay: Relay, lost: str
) -> None:
    bucket, losing = relayed.open(), getattr(relay, lost)
    for path in ("metadata/1.root.json", blob_of(b"x")):
        losing.append(b"PUT")
        assert bucket.put_if_absent(path, b"x") == "created"
        assert not losing
        losing.append(b"HEAD")
        assert bucket.size(path) == 1
    for expected in (b"1", b"11", b"111"):
        losing.append(b"PUT")
        update(bucket, POINTER, lambda before: (before or b"") + b"1")
        assert not losing
        assert bucket.get(POINTER) == expected


def test_a_lost_answer_is_not_taken_for_a_win_where_another_was_first(relayed: Place, relay: Relay) -> None:
    bucket, other = relayed.open(), relayed.open()
    other.put_if_absent("metadata/1.snapshot.json", b"the same")
    relay.lose_answers.append(b"PUT")
    assert bucket.put_if_absent("metadata/1.snapshot.json", b"the same") == "same"
    relay.lose_answers.append(b"PUT")
    with pytest.raises(PublishConflict):
        bucket.put_if_absent("metadata/1.snapshot.json", b"others")
    other.swap(POINTER, b"1", None)
    seen = bucket.read(POINTER)
    other.swap(POINTER, b"2", seen)
    relay.lose_answers.append(b"PUT")
    with pytest.raises(Raced):  # the same bytes, which somebody else wrote: of a counter, that would be one too few
        bucket.swap(POINTER, b"2", seen)
    assert not relay.lose_answers


def test_a_server_that_is_gone_is_a_fault_that_may_pass(plain: S3Server) -> None:
    place = plain.place(endpoint="http://127.0.0.1:9")
    bucket = place.open(retries=0)
    for act in (lambda: bucket.get("x"), lambda: bucket.put_if_absent("x", b""), lambda: bucket.list("x")):
        with pytest.raises(SourceError, match="refused") as caught:
            act()
        assert not caught.value.permanent


# -- large objects -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("large") / "pack"
    content = os.urandom(1 << 20) * 70 + b"end"
    path.write_bytes(content)
    return blob_of(content), path


def test_a_large_blob_goes_in_parts_and_one_part_that_is_lost_goes_again(
    relayed: Place, relay: Relay, large: tuple[str, Path]
) -> None:
    path, file = large
    bucket = relayed.open()
    relay.lose_answers += [b"PUT", b"POST"]  # a part; and the beginning or the end of the upload
    assert bucket.put_if_absent(path, file) == "created"
    assert not relay.lose_answers
    assert sum(line.startswith(b"PUT") for line in relay.requests) >= 5
    assert bucket.digest(path) == (path[-64:], file.stat().st_size)
    relay.requests.clear()
    assert bucket.put_if_absent(path, file) == "same"
    assert len(relay.requests) == 1  # nothing is read back, since the ETag of these parts is known


def test_what_is_sent_carries_its_checksums(server: S3Server, large: tuple[str, Path]) -> None:
    """So that a store which looks at them refuses what was damaged on the way."""
    path, file = large
    bucket: Any = server.place().open()
    sent: list[tuple[str, dict[str, Any]]] = []

    def seen(request: Any, event_name: str, **_: Any) -> None:
        sent.append((event_name.rpartition(".")[2], dict(request.headers.items())))

    bucket._requests._client.meta.events.register("before-send.s3", seen)
    bucket.put_if_absent(blob_of(b"small"), b"small")
    bucket.put_if_absent(path, file)
    [put] = [headers for name, headers in sent if name == "PutObject"]
    assert _text(put["x-amz-checksum-sha256"]) == base64.b64encode(hashlib.sha256(b"small").digest()).decode()
    assert _text(put["Content-MD5"]) == base64.b64encode(hashlib.md5(b"small").digest()).decode()
    content = file.read_bytes()
    parts = [
        (int(headers["Content-Length"]), _text(headers["Content-MD5"]))
        for name, headers in sent
        if name == "UploadPart"
    ]
    step = max(size for size, _ in parts)
    slices = [content[at : at + step] for at in range(0, len(content), step)]
    wanted = [(len(part), base64.b64encode(hashlib.md5(part).digest()).decode()) for part in slices]
    assert sorted(parts) == sorted(wanted)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def test_a_killed_upload_leaves_no_object_and_is_tidied_up_later(
    server: S3Server, large: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, (path, file) = server.place(), large
    code = """
from pathlib import Path
from kartifacts.publish.buckets.s3_requests import Requests
Requests.complete = lambda *_: os.kill(os.getpid(), 9)
bucket.put_if_absent(sys.argv[1], Path(sys.argv[2]))
"""
    killed = place.python(code, path, str(file))
    killed.communicate()
    assert killed.returncode == -9
    bucket = place.open()
    assert bucket.size(path) is None

    def uploads() -> list[Any]:
        where = s3.place(place.text)
        found = server.client().list_multipart_uploads(Bucket=where.bucket, Prefix=where.key("blobs"))
        return list(found.get("Uploads", []))

    assert len(uploads()) == 1
    bucket.tidy()
    assert len(uploads()) == 1  # it may be another publisher's, at this moment
    monkeypatch.setattr(s3_bucket, "_ABANDONED", -10.0)
    bucket.tidy()
    assert uploads() == []
    assert bucket.put_if_absent(path, file) == "created"
    assert bucket.digest(path)[0] == path[-64:]


# -- rights ------------------------------------------------------------------------------------------------------------


def test_wrong_credentials_are_refused_once_and_not_shown(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = server.place()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrongsecret")
    bucket = place.open()
    for act in (
        lambda: bucket.get("x"),
        lambda: bucket.size("x"),
        lambda: bucket.put_if_absent("x", b""),
        lambda: bucket.swap("x", b"", None),
        lambda: bucket.list("x"),
        lambda: bucket.delete("x"),
        lambda: bucket.preflight(),
    ):
        with pytest.raises(SourceError, match="403") as caught:
            act()
        assert caught.value.permanent
        assert caught.value.hint
        assert "wrongsecret" not in str(caught.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(SourceError, match="there are no credentials") as caught:
        place.open().get("x")
    assert caught.value.permanent


def test_a_reader_may_not_write(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = seaweedfs.place()
    place.open().put_if_absent("metadata/1.root.json", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kartreader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "readersecretkart")
    reader = place.open()
    assert reader.get("metadata/1.root.json") == b"x"
    for act in (lambda: reader.put_if_absent("metadata/2.root.json", b"x"), lambda: reader.swap(POINTER, b"x", None)):
        with pytest.raises(SourceError, match="403 AccessDenied") as caught:
            act()
        assert caught.value.denied


def test_a_bucket_that_does_not_exist_is_not_made(server: S3Server) -> None:
    bucket = replace(server.place(), text=f"s3://kart-absent-4711/x?endpoint={server.endpoint}").open()
    with pytest.raises(SourceError, match="NoSuchBucket") as caught:
        bucket.get("x")
    assert not caught.value.missing
    with pytest.raises(SourceError, match="NoSuchBucket"):
        bucket.preflight()
    with pytest.raises(SourceError, match="NoSuchBucket"):
        bucket.put_if_absent("metadata/1.root.json", b"x")


def test_a_publisher_who_may_not_delete_can_publish(server: S3Server, tmp_path: Path) -> None:
    place = server.place(own=True)
    where = s3.place(place.text)
    everything = f"arn:aws:s3:::{where.bucket}/*"
    statements = [{"Effect": "Deny", "Principal": "*", "Action": ["s3:DeleteObject"], "Resource": [everything]}]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    server.client().put_bucket_policy(Bucket=where.bucket, Policy=policy)
    bucket = place.open()
    bucket.put_if_absent("metadata/1.root.json", b"x")
    with pytest.raises(SourceError, match="403"):
        bucket.delete("metadata/1.root.json")
    bucket.preflight()
    tiny_repository(tmp_path / "tiny", {"a.so": b"a" * 5000})
    publish(tmp_path / "tiny", bucket)
    publish(tmp_path / "tiny", bucket)


def test_all_may_read_what_a_policy_opens_and_caches_are_told_what_changes(server: S3Server) -> None:
    place = server.place(own=True)
    where = s3.place(place.text)
    everything = f"arn:aws:s3:::{where.bucket}/*"
    statements = [{"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject"], "Resource": [everything]}]
    bucket, client = place.open(), server.client()
    bucket.put_if_absent(blob_of(b"x" * 1000), b"x" * 1000)
    bucket.swap(POINTER, b"{}", None)
    source = HttpSource(f"{server.endpoint}/{where.bucket}/{where.prefix}", place.settings())
    with pytest.raises(SourceError, match="403"):
        source.document(POINTER, 100)
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    client.put_bucket_policy(Bucket=where.bucket, Policy=policy)
    source = HttpSource(f"{server.endpoint}/{where.bucket}/{where.prefix}", place.settings())
    assert source.document(POINTER, 100) == b"{}"
    digest = Digest(blob_of(b"x" * 1000)[-64:])
    with source.read(digest, 1000, start=10, length=20) as pieces:
        assert b"".join(pieces) == b"x" * 20
    head = {
        path: client.head_object(Bucket=where.bucket, Key=where.key(path)) for path in (POINTER, blob_of(b"x" * 1000))
    }
    assert [found["CacheControl"] for found in head.values()] == ["no-cache", "public, max-age=31536000, immutable"]


# -- many objects, TLS, weak stores ------------------------------------------------------------------------------------


def test_more_objects_than_fit_on_a_page_are_all_listed(plain: S3Server) -> None:
    place = plain.place()
    where, client = s3.place(place.text), plain.client()
    keys = [f"t/{number:04}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: client.put_object(Bucket=where.bucket, Key=where.key(key), Body=b"x"), keys))
    assert [entry.path for entry in place.open().list("t")] == keys


def test_trailers_over_tls_are_a_choice_with_a_hint(ceph_tls: S3Server) -> None:
    place = ceph_tls.place(extra="&checksums=when_supported")
    client = s3.connect(s3.place(place.text), place.settings())
    where = s3.place(place.text)
    with pytest.raises(SourceError, match="411 MissingContentLength") as caught, s3.faults("write", "x", where):
        client.put_object(Bucket=where.bucket, Key=where.key("x"), Body=b"x")
    assert "checksums=when_required" in str(caught.value)
    bucket = place.open()
    bucket.preflight()  # our own writes bring their checksums as headers, which need no trailer
    assert bucket.put_if_absent("metadata/1.root.json", b"x") == "created"


def test_a_certificate_of_nobody_known_is_refused(ceph_tls: S3Server, tmp_path: Path) -> None:
    place = replace(ceph_tls.place(), environ={})
    with pytest.raises(SourceError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        place.open().get("x")
    assert caught.value.permanent
    with pytest.raises(ConfigError, match="not a file of certificates"):
        replace(place, environ={"SSL_CERT_DIR": str(tmp_path)}).open().get("x")


def test_a_store_that_ignores_conditions_is_refused_unless_there_is_one_writer(
    juicefs: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = juicefs.place()
    with pytest.raises(ConfigError, match="does not keep conditional writes: it let a second writer"):
        place.open().preflight()
    tiny_repository(tmp_path / "tiny", {"a.so": b"a" * 5000})
    for alone in (replace(place, single_writer=True).open(), juicefs.place(extra="&single-writer=1").open()):
        alone.preflight()
        assert "let nobody else write there" in caplog.text
        caplog.clear()
        publish(tmp_path / "tiny", alone)
        publish(tmp_path / "tiny", alone)
        assert alone.list("probe") == []
        with pytest.raises(PublishConflict):
            alone.put_if_absent("oci-layout", b"other")
        before = alone.read("index.json")
        alone.swap("index.json", b"{}", before)
        with pytest.raises(Raced):
            alone.swap("index.json", b"{ }", before)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_private_bucket_is_read_by_who_has_the_keys(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place, content = server.place(), os.urandom(700_000)
    bucket = place.open()
    bucket.put_if_absent(blob_of(content), content)
    bucket.put_if_absent("metadata/1.root.json", b"{}")
    (source,) = from_settings(place.settings(mirrors=place.text))
    digest = Digest(blob_of(content)[-64:])
    with source.read(digest, len(content)) as pieces:
        assert b"".join(pieces) == content
    with source.read(digest, len(content), start=1000, length=5000) as pieces:
        assert b"".join(pieces) == content[1000:6000]
        assert "Signature" not in pieces.place
    assert source.document("metadata/1.root.json", 100) == b"{}"
    for absent in ("metadata/2.root.json", blob_of(b"")):
        with pytest.raises(SourceError) as caught:
            source.document(absent, 100)
        assert caught.value.missing
    with pytest.raises(SourceError, match="larger than 1 bytes"):
        source.document("metadata/1.root.json", 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrongsecret")
    (other,) = from_settings(place.settings(mirrors=place.text))
    with pytest.raises(SourceError, match="403") as caught:
        other.document("metadata/1.root.json", 100)
    assert caught.value.permanent
    assert "Signature" not in str(caught.value)


def test_a_bucket_below_which_nothing_else_lies_is_one_too(seaweedfs: S3Server) -> None:
    place = seaweedfs.place(own=True)
    where = s3.place(place.text)
    bucket = open_bucket(f"s3://{where.bucket}?endpoint={seaweedfs.endpoint}", place.settings())
    bucket.preflight()
    bucket.put_if_absent("t/1", b"x")
    assert [entry.path for entry in bucket.list("t")] == ["t/1"]
    (source,) = from_settings(place.settings(mirrors=f"s3://{where.bucket}?endpoint={seaweedfs.endpoint}"))
    assert source.document("t/1", 10) == b"x"
