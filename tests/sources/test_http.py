"""What a mirror may do wrong, and that nothing of it gets past the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.sources import Source
from kartifacts.sources.http import MAX_REDIRECTS, HttpSource
from kartifacts.testing import Mirror, faults

Make = Callable[..., Settings]


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
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, code: int
) -> None:
    mirror.order(faults.status(code), times=2)
    assert read(source, digest, len(content)) == content
    assert mirror.count() == 3


def test_a_lasting_fault_is_tried_no_more_often_than_allowed(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes
) -> None:
    mirror.order(faults.status(503))
    with pytest.raises(SourceError, match="answered 503"):
        read(HttpSource(mirror.url, settings(retries=1)), digest, len(content))
    assert mirror.count() == 2


@pytest.mark.parametrize("headers", [{"Retry_After": "1"}, {"RateLimit": '"hour";r=0;t=1'}])
def test_a_mirror_is_not_asked_before_the_time_that_it_names(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, headers: dict[str, str]
) -> None:
    mirror.order(faults.status(429, **headers), times=1)
    started = time.monotonic()
    assert read(HttpSource(mirror.url, settings(retries=0)), digest, len(content)) == content
    assert time.monotonic() - started >= 1
    assert mirror.count() == 2


def test_a_pause_of_hours_is_not_waited_for(source: HttpSource, mirror: Mirror, digest: Digest, content: bytes) -> None:
    mirror.order(faults.status(429, Retry_After="7200"))
    started = time.monotonic()
    with pytest.raises(SourceError, match="429") as caught:
        read(source, digest, len(content))
    assert time.monotonic() - started < 5
    assert caught.value.retry_after == 7200


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


@pytest.mark.parametrize("keep", [0, 10])
def test_a_mirror_that_breaks_off_every_time_is_given_up(
    source: HttpSource, mirror: Mirror, digest: Digest, content: bytes, keep: int
) -> None:
    mirror.order(faults.truncate(keep))
    with pytest.raises(SourceError, match="closed early"):
        read(source, digest, len(content))
    assert mirror.count() == 3


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


@pytest.mark.parametrize("target", ["http://[", "http://127.0.0.1:99999/", "http://\x00/", "//", ""])
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
    mirror.cancel()
    mirror.order(faults.status(403))
    with pytest.raises(SourceError) as caught:
        read(source, digest, len(content))
    assert "hunter2" not in f"{caught.value} {source!r} {source.name}"


def test_a_proxy_is_used_where_the_environment_names_one(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", mirror.url)
    assert read(HttpSource("http://mirror.invalid", settings()), digest, len(content)) == content
    assert mirror.requests[0].path == f"http://mirror.invalid/blobs/sha256/{digest}"
    assert mirror.requests[0].headers["host"] == "mirror.invalid"
    monkeypatch.setenv("no_proxy", "mirror.invalid")
    with pytest.raises(SourceError, match=r"no answer from http://mirror\.invalid"):
        read(HttpSource("http://mirror.invalid", settings()), digest, len(content))


def test_a_password_in_netrc_is_used(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert read(HttpSource(mirror.url, settings()), digest, len(content)) == content
    assert mirror.requests[0].headers["authorization"].startswith("Basic ")


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


# -- mirrors that are not there ----------------------------------------------------------------------------------------


def test_a_dead_mirror_costs_two_timeouts_however_many_blobs_there_are(
    dead_host: str, settings: Make, digest: Digest
) -> None:
    source = HttpSource(dead_host, settings(retries=5))
    started = time.monotonic()
    for _ in range(200):
        with pytest.raises(SourceError, match="no connection in time"):
            read(source, digest, 10)
    assert time.monotonic() - started < 2 * 0.5 + 1.5


def test_a_mirror_that_only_ever_fails_is_soon_left_alone(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes
) -> None:
    mirror.order(faults.status(503))
    source = HttpSource(mirror.url, settings(retries=1))
    for _ in range(50):
        with pytest.raises(SourceError, match="answered 503"):
            read(source, digest, len(content))
    assert mirror.count() == 4


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


def test_no_mirror_is_opened_offline(settings: Make) -> None:
    with pytest.raises(ConfigError, match="KARTIFACTS_OFFLINE"):
        HttpSource("http://127.0.0.1:1", settings(offline=True))


def test_a_url_that_is_none_is_a_typed_error(settings: Make) -> None:
    for url in ("ftp://127.0.0.1", "http://", "nonsense", "http://[", "http://127.0.0.1:99999", "http://127.0.0.1:x"):
        with pytest.raises(ConfigError, match="not a mirror's URL"):
            HttpSource(url, settings())
