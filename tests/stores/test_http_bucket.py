"""A server that takes a plain PUT: logins, faults, and answers that were lost."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError
from kartifacts.publish.buckets import Raced, open_bucket, update
from kartifacts.publish.protocol import publish
from kartifacts.publish.verify import verify_repository
from kartifacts.testing import tiny_repository
from tests.stores.servers import Relay, put_server

POINTER = "metadata/timestamp.json"
FAST = Settings(retries=2, connect_timeout=2, read_timeout=5)


def test_a_server_is_told_what_the_bytes_must_be_and_how_to_serve_them() -> None:
    with put_server() as server:
        bucket = open_bucket(server.url, FAST)
        bucket.put_if_absent("metadata/1.root.json", b"{}")
        bucket.swap(POINTER, b"{}", None)
        once, pointer = (server.headers[f"/repository/{path}"] for path in ("metadata/1.root.json", POINTER))
    assert once["Content-MD5"] == base64.b64encode(hashlib.md5(b"{}").digest()).decode()
    assert once["X-Checksum-Sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert once["Content-Type"] == "application/json"
    assert "immutable" in once["Cache-Control"]
    assert pointer["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    ("login", "netrc", "sent"),
    [
        ("us%40er:pa%2Fss@", "", "Basic " + base64.b64encode(b"us@er:pa/ss").decode()),
        (":a%2Ftoken@", "machine 127.0.0.1 login x password y", "Bearer a/token"),
        ("", "machine 127.0.0.1 login x password y", "Basic " + base64.b64encode(b"x:y").decode()),
    ],
)
def test_logins_come_from_the_url_or_netrc(tmp_path: Path, login: str, netrc: str, sent: str) -> None:
    (tmp_path / "netrc").write_text(netrc)
    with put_server() as server:
        bucket = open_bucket(server.url.replace("//", f"//{login}"), Settings(retries=0, netrc=tmp_path / "netrc"))
        bucket.put_if_absent("x", b"")
        assert server.headers["/repository/x"]["Authorization"] == sent
        assert bucket.name == server.url
        with pytest.raises(SourceError) as caught:
            bucket.get("absent")
    assert not login or login not in str(caught.value)


@pytest.mark.parametrize("url", ["http://", "http://h/x?y=1", "https://h:0/x", "http://h o/x", "https://u:pa ss@h/x"])
def test_a_url_that_names_no_bucket_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="not a bucket's URL") as caught:
        open_bucket(url, Settings())
    assert "pa ss" not in str(caught.value)


@pytest.mark.parametrize("status", [500, -500, 503, -503, 429])
def test_a_fault_that_passes_is_waited_out_whether_or_not_the_write_took_effect(status: int) -> None:
    with put_server() as server:
        bucket = open_bucket(server.url, FAST)
        server.fail = [status]
        assert bucket.put_if_absent("metadata/1.root.json", b"x") == "created"
        server.fail = [status]
        bucket.swap(POINTER, b"1", None)
        before = bucket.read(POINTER)
        server.fail = [status]
        bucket.swap(POINTER, b"2", before)
        assert bucket.get(POINTER) == b"2"
        with pytest.raises(Raced):
            bucket.swap(POINTER, b"3", before)


@pytest.mark.parametrize("lost", ["requests", "answers"])
def test_a_connection_that_ends_before_the_answer_comes_decides_nothing(lost: str) -> None:
    with put_server() as server:
        relay = Relay(server.server_address[1])
        bucket = open_bucket(f"http://127.0.0.1:{relay.port}/repository", FAST)
        losing = relay.lose_answers if lost == "answers" else relay.lose_requests
        losing.append(b"PUT")
        assert bucket.put_if_absent("metadata/1.root.json", b"x") == "created"
        assert not losing
        losing.append(b"PUT")
        update(bucket, POINTER, lambda before: (before or b"") + b"x")
        losing.append(b"PUT")
        update(bucket, POINTER, lambda before: (before or b"") + b"x")
        assert not losing
        assert bucket.get(POINTER) == b"xx"
        relay.close()


def test_a_redirect_of_a_write_is_refused() -> None:
    with put_server() as server:
        server.fail = [307] * 9
        with pytest.raises(SourceError, match="answered 307"):
            open_bucket(server.url, FAST).put_if_absent("x", b"")


def test_a_release_is_published_without_a_listing(tmp_path: Path) -> None:
    tiny = tiny_repository(tmp_path / "tiny", {"a.so": b"a" * 5000})
    with put_server() as server:
        for _ in range(2):
            publish(tmp_path / "tiny", open_bucket(server.url, FAST))
        for path, content in server.objects.items():
            (tmp_path / "copy" / path[12:]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / path[12:]).write_bytes(content)
    report = verify_repository(tmp_path / "copy")
    report.check("the copy")
    assert list(report.pins) == [tiny.pin]


@pytest.mark.stores
def test_nginx_is_refused_unless_there_is_one_writer(nginx_uploads: tuple[str, Path], tmp_path: Path) -> None:
    url, uploads = nginx_uploads
    with pytest.raises(ConfigError, match="overwrite the first"):
        open_bucket(f"{url}/one", FAST).preflight()
    tiny_repository(tmp_path / "tiny", {"a.so": b"a" * 5000})
    bucket = open_bucket(f"{url}/one", FAST, single_writer=True)
    bucket.preflight()
    publish(tmp_path / "tiny", bucket)
    verify_repository(uploads / "one").check("what nginx has")
    with pytest.raises(SourceError, match="answered 401"):
        open_bucket(url.replace("kartpass", "wrong") + "/one", FAST).put_if_absent("x", b"")
