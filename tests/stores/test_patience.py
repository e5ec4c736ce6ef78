"""Servers that trickle, send without an end, redirect or answer something else to those who publish."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, KartifactsError, SourceError
from kartifacts.publish.buckets import Bucket, open_bucket
from kartifacts.remote.authorities import NO_TLS_HINT

PATH = "metadata/timestamp.json"
HEAD = b"HTTP/1.1 200 OK\r\n"
MANIFEST = b'HTTP/1.1 200 OK\r\nContent-Type: application/vnd.oci.image.manifest.v1+json\r\nETag: "x"\r\n'
KINDS = ["http://127.0.0.1:{}/x", "s3://kernels/x?endpoint=http://127.0.0.1:{}", "oci+http://127.0.0.1:{}/x"]
ACTS: dict[str, Callable[[Bucket], object]] = {
    "get": lambda bucket: bucket.get(PATH),
    "read": lambda bucket: bucket.read(PATH),
    "digest": lambda bucket: bucket.digest(PATH),
    "size": lambda bucket: bucket.size(PATH),
    "put": lambda bucket: bucket.put_if_absent(PATH, b"{}"),
    "swap": lambda bucket: bucket.swap(PATH, b"{}", None),
    "delete": lambda bucket: bucket.delete(PATH),
    "preflight": lambda bucket: bucket.preflight(),
    "list": lambda bucket: bucket.list("metadata"),
    "tidy": lambda bucket: bucket.tidy(),
}


@dataclass
class Server:
    """Takes a request, whatever it is, and answers by pieces until the other side has had enough."""

    pieces: Callable[[], Iterator[bytes]]
    pause: float = 0.0
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._stop = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._listening.accept()
                threading.Thread(target=self._answer, args=(taken,), daemon=True).start()

    def _answer(self, taken: socket.socket) -> None:
        number = len(self.sent)
        self.sent.append(0)
        with taken, contextlib.suppress(OSError):
            taken.recv(1 << 20)
            for piece in self.pieces():
                taken.sendall(piece)
                self.sent[number] += len(piece)
                if self._stop.wait(self.pause):
                    return

    def close(self) -> None:
        self._stop.set()
        self._listening.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(pieces: Callable[[], Iterator[bytes]], pause: float = 0.0) -> Server:
        made.append(Server(pieces, pause))
        return made[-1]

    yield start
    for each in made:
        each.close()


def headers_without_end() -> Iterator[bytes]:
    return itertools.chain([HEAD], (b"X-%d: y\r\n" % number for number in range(60)))


def body_that_trickles() -> Iterator[bytes]:
    return itertools.chain([MANIFEST + b"Content-Length: 60\r\n\r\n"], itertools.repeat(b"x", 60))


def error_that_trickles() -> Iterator[bytes]:
    return itertools.chain([b"HTTP/1.1 403 No\r\nContent-Length: 60\r\n\r\n"], itertools.repeat(b"x", 60))


def body_without_end() -> Iterator[bytes]:
    piece = b"40000\r\n" + b"{" * 0x40000 + b"\r\n"
    return itertools.chain([MANIFEST + b"Transfer-Encoding: chunked\r\n\r\n"], itertools.repeat(piece, 2400))


def opened(kind: str, server: Server, *, seconds: float = 10.0, alone: bool = True) -> Bucket:
    settings = Settings(retries=0, connect_timeout=10.0, read_timeout=seconds)
    return open_bucket(kind.format(server.port), settings, single_writer=alone)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("pieces", [headers_without_end, body_that_trickles, error_that_trickles])
@pytest.mark.parametrize("kind", KINDS)
def test_what_trickles_is_given_up(
    serve: Callable[..., Server], kind: str, pieces: Callable[[], Iterator[bytes]]
) -> None:
    server = serve(pieces, 0.05)
    bucket = opened(kind, server, seconds=0.2)
    for name, act in ACTS.items():
        with contextlib.suppress(KartifactsError):  # a HEAD that was answered, or the status, may be all that is needed
            act(bucket)
        whole = sum(map(len, pieces()))
        assert max(server.sent, default=0) < whole, f"{name} waited for all of it"


@pytest.mark.parametrize("act", ["get", "read"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_end_is_not_read_to_it(serve: Callable[..., Server], kind: str, act: str) -> None:
    server = serve(body_without_end)
    bucket = opened(kind, server)
    with pytest.raises(KartifactsError):
        bucket.get(PATH, 100_000) if act == "get" else ACTS[act](bucket)
    assert max(server.sent) < {"get": 16 << 20, "read": 200 << 20}[act]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_to_a_write_has_an_end(serve: Callable[..., Server], kind: str) -> None:
    for name in ("swap", "delete"):
        server = serve(body_without_end)
        with contextlib.suppress(KartifactsError):
            ACTS[name](opened(kind, server))
        assert max(server.sent) < 200 << 20, name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # urllib3 drops what it cannot parse
@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("where", ["", "/elsewhere", "http://127.0.0.1:9/x", "http://[::bad"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_redirects_is_a_fault_of_the_store(
    serve: Callable[..., Server], kind: str, where: str, status: int
) -> None:
    answer = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {where}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    server = serve(lambda: iter([answer.encode()]))
    bucket = opened(kind, server)
    for name in ("get", "size", "swap", "delete"):
        with pytest.raises(SourceError) as caught:
            ACTS[name](bucket)
        said = str(caught.value)
        assert str(status) in said or "redirect" in said or where in said, f"{name}: {said}"
    assert len(server.sent) <= 40


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 99999999999999\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nLast-Modified: then\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 7\r\n\r\n<Error>",
        b"HTTP/1.1 400 No\r\nContent-Length: 4\r\n\r\n\x00\xff<<",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_answered_is_a_typed_error_or_an_answer(
    serve: Callable[..., Server], kind: str, answer: bytes
) -> None:
    bucket = opened(kind, serve(lambda: iter([answer])))
    for act in ACTS.values():
        with contextlib.suppress(KartifactsError):
            act(bucket)
    with pytest.raises((SourceError, ConfigError)):
        opened(kind, serve(lambda: iter([answer])), alone=False).preflight()


def test_a_store_that_claims_to_hold_what_was_made_up_is_none(serve: Callable[..., Server]) -> None:
    answer = b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 99999999999999\r\n\r\nx"
    for alone in (False, True):
        with pytest.raises(SourceError, match="what answers is no store"):
            opened(KINDS[1], serve(lambda: iter([answer])), alone=alone).preflight()


@pytest.mark.parametrize("status", [405, 501])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_server_that_takes_no_put_is_not_called_one_without_conditions(
    serve: Callable[..., Server], kind: str, status: int
) -> None:
    answer = f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    with pytest.raises(SourceError, match="takes no writes"):
        opened(kind, serve(lambda: iter([answer]))).preflight()


def test_credentials_that_no_header_can_hold_are_refused_at_once(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(body_that_trickles)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "some\none")
            with pytest.raises(ConfigError, match="control character"):
                opened(KINDS[1], server).get(PATH)
    assert server.sent == []


@pytest.mark.parametrize("text", ["s3://kernels/a\tb", "s3://kernels/a\nb", "s3://ker\nnels/a", "s3://kernels/a\x7f"])
def test_a_place_with_a_control_character_is_refused_and_not_cleaned(text: str) -> None:
    for scheme in ("s3", "http", "https", "oci", "oci+http"):
        with pytest.raises(ConfigError):
            open_bucket(text.replace("s3", scheme, 1), Settings())


@pytest.mark.parametrize("kind", KINDS)
def test_tls_with_who_speaks_none_is_not_called_a_matter_of_certificates(
    serve: Callable[..., Server], kind: str
) -> None:
    server = serve(lambda: iter([b"HTTP/1.1 400 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]))
    over_tls = kind.replace("oci+http", "oci").replace("http://", "https://")
    with pytest.raises(SourceError, match="TLS") as caught:
        opened(over_tls, server).get(PATH)
    assert caught.value.hint == NO_TLS_HINT


@pytest.mark.parametrize(("checksums", "passing"), [("", True), ("&checksums=when_supported", False)])
def test_bytes_that_were_damaged_on_their_way_are_not_called_a_matter_of_trailers(
    serve: Callable[..., Server], checksums: str, passing: bool
) -> None:
    said = b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>"
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(said)}\r\nConnection: close\r\n\r\n"
    server = serve(lambda: iter([head.encode() + said]))
    with pytest.raises(SourceError, match="XAmzContentSHA256Mismatch") as caught:
        opened(KINDS[1] + checksums, server).list("metadata")
    assert caught.value.permanent is not passing
    assert ("trailers" in str(caught.value.hint)) is not passing
