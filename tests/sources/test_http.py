"""What a mirror may do wrong, and that nothing of it gets past the source."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.sources import Source
from kartifacts.sources.client import MAX_REDIRECTS
from kartifacts.sources.http import HttpSource
from kartifacts.testing import Mirror, faults

Make = Callable[..., Settings]
Fetch = Callable[..., bytes]
Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch


def read(source: Source, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> bytes:
    with source.read(digest, size, start=start, length=length) as pieces:
        return b"".join(pieces)


@pytest.fixture
def source(mirror: Mirror, settings: Make) -> HttpSource:
    return HttpSource(mirror.url, settings())


# -- right answers -----------------------------------------------------------------------------------------------------


def test_a_blob_and_its_ranges_come_as_they_are(source: HttpSource, digest: Digest, content: bytes) -> None:
    size = len(content)
    assert read(source, digest, size) == content
    assert read(source, digest, size, start=1000, length=5000) == content[1000:6000]
    assert read(source, digest, size, start=size - 1, length=1) == content[-1:]
    assert read(source, digest, size, start=7) == content[7:]


def test_one_connection_serves_many_reads(source: HttpSource, mirror: Mirror, digest: Digest, content: bytes) -> None:
    for start in range(10):
        read(source, digest, len(content), start=start, length=100)
    assert (mirror.count(), mirror.connections) == (10, 1)


def test_the_whole_blob_is_asked_for_without_a_range_and_uncompressed(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    read(source, digest, len(content))
    (request,) = mirror.requests
    assert request.range == ""
    assert request.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("fault", [faults.chunked(), faults.gzip(), faults.ignore_range(), faults.endless()])
@pytest.mark.parametrize(("start", "length"), [(0, None), (1000, 5000)])
def test_headers_are_hints_and_right_bytes_are_taken(
    source: HttpSource,
    mirror: Mirror,
    digest: Digest,
    content: bytes,
    fault: faults.Fault,
    start: int,
    length: int | None,
) -> None:
    mirror.order(fault)
    assert read(source, digest, len(content), start=start, length=length) == content[start:][:length]


def test_a_mirror_below_a_path_is_asked_below_it(
    repository: Path, settings: Make, digest: Digest, content: bytes
) -> None:
    with Mirror(repository, prefix="/a/b") as mirror:
        assert read(HttpSource(mirror.url + "/", settings()), digest, len(content)) == content
        assert mirror.requests[0].path == f"/a/b/blobs/sha256/{digest}"


# -- wrong answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [faults.html(), faults.wrong_length(1), faults.wrong_length(-1)])
def test_a_page_in_place_of_a_blob_is_named_with_its_length(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, fault: faults.Fault
) -> None:
    mirror.order(fault)
    with pytest.raises(VerificationError) as caught:
        read(source, digest, len(content))
    assert f"{mirror.url}/blobs/sha256/{digest}" in caught.value.message
    assert "answered 200 with" in caught.value.message
    assert f"expected {len(content)} bytes" in caught.value.message


def test_a_page_behind_a_redirect_is_named_by_the_url_it_came_from(
    source: HttpSource, mirror: Mirror, tmp_path: Path, digest: Digest, content: bytes
) -> None:
    with Mirror(tmp_path) as portal:
        portal.order(faults.html())
        mirror.order(faults.redirect(f"{portal.url}/login?token=secret"))
        with pytest.raises(VerificationError) as caught:
            read(source, digest, len(content))
    assert f"{portal.url}/login" in caught.value.message
    assert "text/html" in caught.value.message
    assert "secret" not in caught.value.message
    assert caught.value.source.startswith(f"{portal.url}/login")


@pytest.mark.parametrize("code", [404, 410])
def test_missing_is_said_at_once(source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, code: int) -> None:
    mirror.order(faults.status(code))
    with pytest.raises(SourceError, match=f"answered {code}") as caught:
        read(source, digest, len(content))
    assert caught.value.missing
    assert mirror.count() == 1


@pytest.mark.parametrize("code", [400, 401, 403, 407, 418, 451])
def test_a_refusal_is_not_asked_for_twice(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, code: int
) -> None:
    mirror.order(faults.status(code))
    with pytest.raises(SourceError, match=f"{digest} answered {code}") as caught:
        read(source, digest, len(content))
    assert caught.value.permanent
    assert not caught.value.missing
    assert mirror.count() == 1


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_a_passing_fault_is_tried_again(
    source: HttpSource, mirror: Mirror, content: bytes, code: int, fetch: Fetch
) -> None:
    mirror.order(faults.status(code), times=2)
    assert fetch([source], content) == content
    assert mirror.count() == 3


def test_a_lasting_fault_is_tried_no_more_often_than_allowed(
    mirror: Mirror, settings: Make, content: bytes, fetch: Fetch
) -> None:
    mirror.order(faults.status(503))
    with pytest.raises(SourceError, match="answered 503"):
        fetch([HttpSource(mirror.url, settings(retries=1))], content, retries=1)
    assert mirror.count() == 2


@pytest.mark.parametrize("fault", [faults.reset(100_000), faults.truncate(100_000), faults.stall(100_000)])
def test_a_transfer_that_breaks_off_goes_on_where_it_was(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, fault: faults.Fault
) -> None:
    mirror.order(fault, times=1)
    assert read(source, digest, len(content)) == content
    first, second = mirror.requests
    assert first.range == ""
    at = int(second.range.removeprefix("bytes=").partition("-")[0])
    assert 0 < at <= 100_000
    assert second.headers["if-range"].startswith('"')


def test_a_mirror_without_ranges_adds_no_garbage_to_what_was_resumed(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    mirror.order(faults.truncate(100_000), times=1)
    mirror.order(faults.ignore_range())
    assert read(source, digest, len(content)) == content


def test_a_blob_that_changed_meanwhile_is_not_patched_together(
    source: HttpSource, mirror: Mirror, repository: Path, digest: Digest, content: bytes
) -> None:
    release = threading.Event()
    mirror.order(faults.truncate(100_000), times=1)
    mirror.order(faults.hold(release), times=1)
    with source.read(digest, len(content)) as pieces:
        got = next(pieces)
        while len(got) < 100_000:
            got += next(pieces)
        changed = bytes(len(content))
        (repository / "blobs" / "sha256" / digest).write_bytes(changed)
        release.set()
        got += b"".join(pieces)
    # The mirror sees by If-Range that its file is another one and sends all of it; what was read stays in place.
    assert len(got) == len(content)
    assert mirror.requests[1].headers["if-range"]
    assert got == content[:100_000] + changed[100_000:]


@pytest.mark.parametrize("fault", [faults.truncate, faults.reset, faults.stall])
@pytest.mark.parametrize("keep", [0, 10, 80_000])
def test_a_mirror_that_breaks_off_every_time_is_given_up(
    source: HttpSource, mirror: Mirror, content: bytes, fetch: Fetch, keep: int, fault: Callable[[int], faults.Fault]
) -> None:
    mirror.order(fault(keep), times=1)
    mirror.order(fault(min(keep, 10)))
    with pytest.raises(SourceError, match=r"closed early|reset|nothing came|said nothing|is not asked"):
        fetch([source], content)
    assert mirror.count() <= 5


def test_silence_is_given_up_after_the_read_timeout(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    mirror.order(faults.silent())
    started = time.monotonic()
    with pytest.raises(SourceError, match="said nothing"):
        read(source, digest, len(content))
    assert time.monotonic() - started < 10


def test_a_drip_is_given_up_although_bytes_keep_coming(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    mirror.order(faults.drip(4, 0.02))
    with pytest.raises(SourceError, match="too slow"):
        read(source, digest, len(content))


@pytest.mark.parametrize("shift", [-1, 1, 1000])
def test_bytes_of_another_range_are_not_taken(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, shift: int
) -> None:
    mirror.order(faults.other_range(shift))
    with pytest.raises(SourceError, match="answered bytes"):
        read(source, digest, len(content), start=2000, length=1000)


def test_a_range_of_a_smaller_blob_is_wrong_content(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    with pytest.raises(VerificationError, match=f"holds {len(content)} bytes"):
        read(source, digest, 2 * len(content), start=5, length=10)
    with pytest.raises(VerificationError, match="416"):
        read(source, digest, 2 * len(content), start=len(content) + 5, length=10)


def test_a_compression_that_was_not_asked_for_is_refused(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    mirror.order(faults.encoded("br"))
    with pytest.raises(SourceError, match="Content-Encoding 'br'"):
        read(source, digest, len(content))
    mirror.cancel()
    mirror.order(faults.encoded("gzip"))
    with pytest.raises(SourceError, match="Content-Encoding 'gzip'"):
        read(source, digest, len(content), start=10, length=10)
    with pytest.raises(VerificationError, match="not gzip"):
        read(source, digest, len(content))


def test_a_gzip_bomb_ends_at_the_size_of_the_blob(
    mirror: Mirror, settings: Make, repository: Path, digest: Digest, content: bytes
) -> None:
    (repository / "blobs" / "sha256" / digest).write_bytes(bytes(100 << 20))
    mirror.order(faults.gzip())
    source = HttpSource(mirror.url, settings(read_timeout=30.0))
    assert read(source, digest, len(content)) == bytes(len(content))


WRONG_ANSWERS = {
    "no range said": (faults.without("Content-Range"), SourceError, True),
    "another total": (faults.header("Content-Range", "bytes 2000-2999/7"), VerificationError, True),
    "several ranges": (faults.multipart(), SourceError, True),
    "range and length differ": (faults.header("Content-Length", "5"), SourceError, True),
    "nothing": (faults.empty(204), SourceError, False),
    "not modified": (faults.empty(304), SourceError, False),
    "another protocol": (faults.empty(101), SourceError, False),
    "two lengths": (faults.again("Content-Length", "5"), SourceError, False),
    "no HTTP": (faults.raw(b"SSH-2.0-OpenSSH_9.2\r\n"), SourceError, False),
    "no status": (faults.raw(b"HTTP/1.1 abc\r\n\r\n"), SourceError, False),
    "HTTP/9": (faults.raw(b"HTTP/9.0 200 OK\r\n\r\n"), SourceError, False),
    "binary": (faults.raw(bytes(range(256)) * 100), SourceError, False),
    "closed at once": (faults.raw(), SourceError, False),
    "half a head": (faults.raw(b"HTTP/1.1 200 OK\r\nContent-"), SourceError, False),
    "a long header": (faults.header("X-Long", "x" * 70_000), SourceError, False),
    "many headers": (faults.raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"), SourceError, False),
    "endless headers": (faults.endless_headers(), SourceError, False),
    "endless interim answers": (faults.endless_interim(), SourceError, False),
    "slow headers": (faults.slow_headers(0.02), SourceError, False),
    "chunks of no number": (faults.bad_chunks(b"zz"), SourceError, False),
    "chunks of no size": (faults.bad_chunks(b""), SourceError, False),
    "a chunk that never ends": (faults.bad_chunks(b"f" * 30), SourceError, False),
    "an endless chunk line": (faults.bad_chunks(b"5" * 200_000), SourceError, False),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_an_answer_against_the_rules_is_a_typed_error_in_time_and_the_next_mirror_is_used(
    source: HttpSource,
    mirror: Mirror,
    settings: Make,
    repository: Path,
    digest: Digest,
    content: bytes,
    fetch: Fetch,
    case: str,
) -> None:
    fault, error, in_range = WRONG_ANSWERS[case]
    part = {"start": 2000, "length": 1000} if in_range else {}
    mirror.order(fault)
    started = time.monotonic()
    if case == "a chunk that never ends":  # the bytes are right, as far as they go
        assert len(read(source, digest, len(content))) == len(content)
    else:
        with pytest.raises(error):
            read(source, digest, len(content), **part)
    assert time.monotonic() - started < 5
    if not in_range:
        with Mirror(repository) as good:
            assert fetch([source, HttpSource(good.url, settings())], content) == content


@pytest.mark.parametrize("text", ["-5", "x", "", "1" * 30, "0x10"])
def test_a_length_that_is_no_number_is_no_reason_to_refuse_right_bytes(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, text: str
) -> None:
    mirror.order(faults.header("Content-Length", text))
    assert read(source, digest, len(content)) == content


@pytest.mark.parametrize(
    ("size", "pause"),
    [(4, 0.02), (2000, 0.02)],  # far too slow, and fast enough at first sight
)
def test_a_small_blob_takes_no_longer_than_its_size_allows(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, size: int, pause: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("kartifacts.sources.resumed.MIN_RATE", len(content))
    source = HttpSource(mirror.url, settings(read_timeout=0.5))
    mirror.order(faults.drip(size, pause))
    started = time.monotonic()
    with pytest.raises(SourceError, match="too slow"):
        read(source, digest, len(content))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("body", [b"", b"\x00\x00\x00\xff\xff"])
def test_a_compressed_body_that_holds_nothing_comes_to_an_end(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, body: bytes
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
    mirror.order(faults.raw(head, *([body * 10_000] * 100)))
    with pytest.raises((SourceError, VerificationError), match=r"closed early|more than"):
        read(source, digest, len(content))


def test_a_missing_blob_is_found_as_soon_as_it_is_published(
    source: HttpSource, repository: Path, digest: Digest, content: bytes
) -> None:
    blob = repository / "blobs" / "sha256" / digest
    blob.unlink()
    for _ in range(3):
        with pytest.raises(SourceError) as caught:
            read(source, digest, len(content))
        assert caught.value.missing
    blob.write_bytes(content)
    assert read(source, digest, len(content)) == content


def test_a_connection_that_the_mirror_has_closed_meanwhile_costs_no_try(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes
) -> None:
    source = HttpSource(mirror.url, settings(retries=0))
    for _ in range(3):
        assert read(source, digest, len(content)) == content
        mirror.disconnect()
    assert (mirror.count(), mirror.connections) == (3, 3)


def test_a_forked_child_does_not_speak_on_its_parents_connection(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes
) -> None:
    source = HttpSource(mirror.url, settings())
    assert read(source, digest, len(content)) == content
    child = os.fork()
    if child == 0:
        os._exit(0 if read(source, digest, len(content)) == content else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(source, digest, len(content)) == content
    assert (mirror.count(), mirror.connections) == (3, 2)


# -- redirects and credentials -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed(
    source: HttpSource, mirror: Mirror, repository: Path, digest: Digest, content: bytes, code: int
) -> None:
    with Mirror(repository) as other:
        mirror.order(faults.redirect(other.url + "{path}", code))
        with source.read(digest, len(content), start=5, length=10) as pieces:
            assert b"".join(pieces) == content[5:15]
            assert pieces.place == f"{other.url}/blobs/sha256/{digest}"
        assert other.requests[0].range == "bytes=5-14"


def test_a_redirect_loop_ends(source: HttpSource, mirror: Mirror, digest: Digest, content: bytes) -> None:
    mirror.order(faults.redirect("{path}"))
    with pytest.raises(SourceError, match="redirects"):
        read(source, digest, len(content))
    assert mirror.count() == MAX_REDIRECTS + 1


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"])
def test_a_redirect_to_another_protocol_is_refused(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, target: str
) -> None:
    mirror.order(faults.redirect(target))
    with pytest.raises(SourceError, match="refused") as caught:
        read(source, digest, len(content))
    assert caught.value.permanent


@pytest.mark.parametrize(
    "target",
    ["http://[", "http://127.0.0.1:99999/", "http://\x00/", "//", "", "http://a b/", "http://\u00fc../", "?" * 9000],
)
def test_a_redirect_to_nonsense_is_a_typed_error(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, target: str
) -> None:
    mirror.order(faults.redirect(target))
    with pytest.raises(SourceError):
        read(source, digest, len(content))


def test_credentials_go_to_the_configured_origin_only_and_are_never_shown(
    mirror: Mirror, settings: Make, repository: Path, digest: Digest, content: bytes
) -> None:
    source = HttpSource(mirror.url.replace("//", "//us%40er:hunter2@"), settings())
    assert read(source, digest, len(content)) == content
    assert mirror.requests[0].headers["authorization"].startswith("Basic ")
    with Mirror(repository) as other:
        mirror.order(faults.redirect(other.url + "{path}"))
        assert read(source, digest, len(content)) == content
        assert "authorization" not in other.requests[0].headers
        assert set(other.requests[0].headers) == {"host", "user-agent", "accept", "accept-encoding"}
    mirror.cancel()
    mirror.order(faults.status(403))
    with pytest.raises(SourceError) as caught:
        read(source, digest, len(content))
    assert "hunter2" not in f"{caught.value} {source!r} {source.name}"


@pytest.mark.parametrize("line", ["machine 127.0.0.1 login me password secret", "default login me password secret"])
def test_a_password_in_netrc_is_used_and_stays_with_its_host(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, repository: Path, tmp_path: Path, line: str
) -> None:
    for name, environ in ((".netrc", {}), ("elsewhere", {"NETRC": str(tmp_path / "elsewhere")})):
        (tmp_path / name).write_text(line + "\n")
        (tmp_path / name).chmod(0o600)
        source = HttpSource(mirror.url, settings(environ=environ))
        assert read(source, digest, len(content)) == content
        assert mirror.requests[-1].headers["authorization"].startswith("Basic ")
        with Mirror(repository) as other:
            mirror.order(faults.redirect(other.url.replace("127.0.0.1", "localhost") + "{path}"), times=1)
            assert read(source, digest, len(content)) == content
            assert "authorization" not in other.requests[0].headers
        (tmp_path / name).unlink()


@pytest.mark.parametrize("text", ["machine", "nonsense here", "\xff\xfe"])
def test_a_damaged_netrc_is_a_warning(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, tmp_path: Path, text: str, caplog: Log
) -> None:
    (tmp_path / ".netrc").write_bytes(text.encode("latin-1"))
    assert read(HttpSource(mirror.url, settings()), digest, len(content)) == content
    assert "netrc is not used" in caplog.text


def test_misses_and_redirects_do_not_cost_a_connection_each(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes
) -> None:
    source = HttpSource(mirror.url, settings())
    for _ in range(5):
        with pytest.raises(SourceError):
            read(source, Digest("0" * 64), 5)
    mirror.order(faults.redirect("{path}?again"), skip=0, times=1)
    assert read(source, digest, len(content)) == content
    assert mirror.connections == 1


def test_a_connection_is_never_given_to_two_readers(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes
) -> None:
    with pytest.raises(SourceError):
        source.document("metadata/9.root.json", 100)
    with source.read(digest, len(content)) as one, source.read(digest, len(content)) as other:
        assert b"".join(other) == content
        assert b"".join(one) == content
    assert (mirror.connections, mirror.count()) == (2, 3)  # nothing had to be asked for again


# -- mirrors that are not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hop", [faults.delay(0.3), faults.silent()])
def test_a_chain_of_slow_redirects_ends(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, hop: faults.Fault
) -> None:
    def slow(answer: faults.Answer) -> None:
        faults.redirect("{path}")(answer)
        hop(answer)

    mirror.order(slow)
    started = time.monotonic()
    with pytest.raises(SourceError):
        read(source, digest, len(content))
    assert time.monotonic() - started < 3


def test_a_dead_mirror_costs_two_timeouts_however_many_blobs_there_are(
    dead_host: str, settings: Make, digest: Digest
) -> None:
    source = HttpSource(dead_host, settings(retries=5))
    started = time.monotonic()
    for _ in range(200):
        with pytest.raises(SourceError, match="no connection in time"):
            read(source, digest, 10)
    assert time.monotonic() - started < 2 * 0.5 + 1.5


def test_a_mirror_that_refuses_connections_is_named_with_the_reason(
    refusing_host: str, settings: Make, digest: Digest
) -> None:
    with pytest.raises(SourceError, match=f"{refusing_host}.*Connection refused"):
        read(HttpSource(refusing_host, settings()), digest, 10)


def test_a_name_that_does_not_exist_is_a_typed_error(settings: Make, digest: Digest) -> None:
    with pytest.raises(SourceError, match=r"mirror\.invalid"):
        read(HttpSource("http://mirror.invalid", settings()), digest, 10)


def test_threads_share_what_is_known_of_a_mirror(dead_host: str, settings: Make, digest: Digest) -> None:
    source = HttpSource(dead_host, settings(retries=5))
    messages: list[str] = []

    def work() -> None:
        for _ in range(25):
            try:
                read(source, digest, 10)
            except SourceError as error:
                messages.append(error.message)

    threads = [threading.Thread(target=work) for _ in range(8)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 2 * 0.5 + 1.5
    assert len(messages) == 200
    assert sum("is not asked" in message for message in messages) >= 184


def test_a_mirror_that_is_not_asked_costs_no_import_of_a_client() -> None:
    code = (
        "import sys, kartifacts.config as c, kartifacts.sources as s\n"
        "assert s.from_settings(c.read({}, {'mirrors': 'https://mirror.example'}))\n"
        "print(sorted({'http.client', 'ssl', 'certifi', 'requests', 'urllib3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_mirror_is_opened_offline(settings: Make) -> None:
    with pytest.raises(ConfigError, match="KARTIFACTS_OFFLINE"):
        HttpSource("http://127.0.0.1:1", settings(offline=True))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "ftp://127.0.0.1",
        "http://",
        "http:///path",
        "http://[",
        "http://[bad/",
        "http://[::1",
        "http://[12]/",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1:x",
        "http://127.0.0.1:-1",
        "http://a b/",
        "http://a/b c",
        "http://a\n/b",
        "http://a\x00b/",
        "http://a..b/",
        "http://-a/",
        "http://" + "a" * 64 + "/",
        "http://" + "a." * 130 + "b/",
        "http://\ud800/",
        "http://\u00fc..example/",
        "http://ex%41mple/",
        "http://user@/",
        "http://127.0.0.1/a?b=c",
    ],
)
def test_a_url_that_is_none_is_a_typed_error(settings: Make, url: str) -> None:
    with pytest.raises(ConfigError, match="not a mirror's URL"):
        HttpSource(url, settings())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST"])
def test_a_host_may_be_spelt_in_several_ways(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, host: str
) -> None:
    source = HttpSource(f"HTTP://{host}:{mirror.port}///", settings(connect_timeout=5.0))
    assert read(source, digest, len(content)) == content
