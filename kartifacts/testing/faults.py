"""Faults that a `Mirror` can be ordered to have: each is a function that changes one answer before it is sent."""

from __future__ import annotations

import gzip as gzip_format
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What is about to be sent."""

    status: int
    headers: dict[str, str]
    body: Iterable[bytes]
    whole: bytes  # the file that was asked for, whatever the range; empty if there is none
    range_asked: str  # the Range header, or nothing
    before: Callable[[], object] = field(default=lambda: None)  # runs before the status line is sent
    after: str = "keep"  # then the connection is: keep | close | reset
    more: list[tuple[str, str]] = field(default_factory=list)  # headers that come a second time
    raw: Iterable[bytes] | None = None  # sent in place of all of the above, after which the connection is closed
    stopped: threading.Event = field(default_factory=threading.Event)  # set when the mirror shuts down

    def replace(self, body: bytes, *, length: int | None = None) -> None:
        """Send `body` instead, announced with its own length or with `length`."""
        self.body = [body]
        self.headers["Content-Length"] = str(len(body) if length is None else length)

    def sent(self) -> bytes:
        """The body as one value."""
        content = b"".join(self.body)
        self.body = [content]
        return content


Fault = Callable[[Answer], None]


def flip(at: int = 0) -> Fault:
    """One wrong byte; length and headers stay right."""

    def fault(answer: Answer) -> None:
        content = bytearray(answer.sent())
        content[at % len(content)] ^= 0x40
        answer.body = [bytes(content)]

    return fault


def truncate(keep: int) -> Fault:
    """The right length is announced, `keep` bytes are sent, then the connection is closed."""

    def fault(answer: Answer) -> None:
        answer.body = [answer.sent()[:keep]]
        answer.after = "close"

    return fault


def reset(keep: int) -> Fault:
    """The same, but the connection is reset."""

    def fault(answer: Answer) -> None:
        answer.body = [answer.sent()[:keep]]
        answer.after = "reset"

    return fault


def endless() -> Fault:
    """Chunks without end, the right bytes first."""

    def fault(answer: Answer) -> None:
        content = answer.sent()
        del answer.headers["Content-Length"]
        answer.body = itertools.chain([content], itertools.takewhile(lambda _: not answer.stopped.is_set(), _zeros()))

    return fault


def chunked() -> Fault:
    """The right bytes in chunks, no length announced."""

    def fault(answer: Answer) -> None:
        content = answer.sent()
        del answer.headers["Content-Length"]
        answer.body = [content[at : at + 1000] for at in range(0, len(content), 1000)]

    return fault


def wrong_length(extra: int) -> Fault:
    """`extra` bytes more than there should be, announced as such; fewer if negative."""

    def fault(answer: Answer) -> None:
        content = answer.sent()
        answer.replace(content + bytes(extra) if extra > 0 else content[:extra])

    return fault


def html(text: str = "<html><body>please log in</body></html>") -> Fault:
    """200 with a page, as a login portal or a parked domain gives."""

    def fault(answer: Answer) -> None:
        answer.status = 200
        answer.headers = {"Content-Type": "text/html"}
        answer.replace(text.encode())

    return fault


def redirect(to: str, status: int = 302) -> Fault:
    """Send the client elsewhere; ``{path}`` in `to` becomes the path that was asked for."""

    def fault(answer: Answer) -> None:
        answer.status = status
        answer.headers = {"Location": to.replace("{path}", answer.headers.get("X-Path", ""))}
        answer.replace(b"")

    return fault


def status(code: int, **headers: str) -> Fault:
    """Another status, with headers such as ``Retry_After="2"``."""

    def fault(answer: Answer) -> None:
        answer.status = code
        answer.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        answer.replace(b"no\n")

    return fault


def ignore_range() -> Fault:
    """200 with the whole file although a range was asked for."""

    def fault(answer: Answer) -> None:
        answer.status = 200
        answer.headers.pop("Content-Range", None)
        answer.replace(answer.whole)

    return fault


def other_range(shift: int) -> Fault:
    """206, but for bytes that lie `shift` further on, and says so."""

    def fault(answer: Answer) -> None:
        span, _, total = answer.headers["Content-Range"].removeprefix("bytes ").partition("/")
        first, last = (int(text) + shift for text in span.split("-"))
        answer.headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        answer.replace(answer.whole[first : last + 1])

    return fault


def gzip() -> Fault:
    """The whole file, compressed although identity was asked for."""

    def fault(answer: Answer) -> None:
        ignore_range()(answer)
        answer.headers["Content-Encoding"] = "gzip"
        answer.replace(gzip_format.compress(answer.whole))

    return fault


def encoded(name: str) -> Fault:
    """Claims a Content-Encoding."""

    def fault(answer: Answer) -> None:
        answer.headers["Content-Encoding"] = name

    return fault


def stall(keep: int) -> Fault:
    """`keep` bytes, then nothing for as long as the mirror runs, with the connection open."""

    def fault(answer: Answer) -> None:
        content = answer.sent()

        def body() -> Iterator[bytes]:
            yield content[:keep]
            answer.stopped.wait()

        answer.body = body()
        answer.after = "close"

    return fault


def silent() -> Fault:
    """Accepts the request and never answers."""

    def fault(answer: Answer) -> None:
        answer.before = answer.stopped.wait
        answer.after = "close"

    return fault


def drip(size: int, pause: float) -> Fault:
    """`size` bytes at a time with a pause in between."""

    def fault(answer: Answer) -> None:
        content = answer.sent()

        def body() -> Iterator[bytes]:
            for at in range(0, len(content), size):
                yield content[at : at + size]
                if answer.stopped.wait(pause):
                    return

        answer.body = body()

    return fault


def delay(seconds: float) -> Fault:
    """A right answer, late."""

    def fault(answer: Answer) -> None:
        answer.before = lambda: answer.stopped.wait(seconds)

    return fault


def header(name: str, value: str) -> Fault:
    """One header says something else."""

    def fault(answer: Answer) -> None:
        answer.headers[name] = value

    return fault


def again(name: str, value: str) -> Fault:
    """One header comes twice, the second time with `value`."""

    def fault(answer: Answer) -> None:
        answer.more.append((name, value))

    return fault


def without(name: str) -> Fault:
    """One header is missing.  Without a Content-Length the body comes in chunks."""

    def fault(answer: Answer) -> None:
        answer.headers.pop(name, None)

    return fault


def raw(*pieces: bytes, pause: float = 0.0, last: bool = True) -> Fault:
    """These bytes in place of a whole answer, head and all, with pauses in between; unless `last`, over and over."""

    def fault(answer: Answer) -> None:
        def sent() -> Iterator[bytes]:
            for piece in pieces if last else itertools.cycle(pieces):
                yield piece
                if answer.stopped.wait(pause) if pause else answer.stopped.is_set():
                    return

        answer.raw = sent()

    return fault


def endless_headers() -> Fault:
    """A status line and headers without end."""

    def fault(answer: Answer) -> None:
        raw(b"HTTP/1.1 200 OK\r\n")(answer)
        first = answer.raw or ()
        raw(b"X-More: and more\r\n" * 50, last=False)(answer)
        answer.raw = itertools.chain(first, answer.raw or ())

    return fault


def slow_headers(pause: float) -> Fault:
    """A right answer whose head comes one byte at a time."""

    def fault(answer: Answer) -> None:
        lines = [f"HTTP/1.1 {answer.status} OK", *(f"{name}: {value}" for name, value in answer.headers.items())]
        head = "\r\n".join([*lines, "", ""]).encode()
        raw(*(bytes([byte]) for byte in head), answer.sent(), pause=pause)(answer)

    return fault


def endless_interim(status: int = 100) -> Fault:
    """Interim answers without end, and never a real one."""
    return raw(b"HTTP/1.1 %d Wait\r\n\r\n" % status * 50, last=False)


def bad_chunks(size: bytes) -> Fault:
    """The body in chunks, the first of which says that it is `size` long."""

    def fault(answer: Answer) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        raw(head, size + b"\r\n" + answer.whole)(answer)

    return fault


def multipart() -> Fault:
    """206 with multipart/byteranges, as if several ranges had been asked for."""

    def fault(answer: Answer) -> None:
        span = answer.headers.pop("Content-Range", f"bytes 0-{len(answer.whole) - 1}/{len(answer.whole)}")
        answer.status = 206
        answer.headers["Content-Type"] = "multipart/byteranges; boundary=kart"
        answer.replace(f"--kart\r\nContent-Range: {span}\r\n\r\n".encode() + answer.sent() + b"\r\n--kart--\r\n")

    return fault


def empty(code: int) -> Fault:
    """204 or 304: a status that comes without a body."""

    def fault(answer: Answer) -> None:
        raw(b"HTTP/1.1 %d Nothing\r\n\r\n" % code)(answer)

    return fault


def hold(until: threading.Event) -> Fault:
    """A right answer, once `until` is set."""

    def fault(answer: Answer) -> None:
        answer.before = until.wait

    return fault


def _zeros() -> Iterator[bytes]:
    while True:
        yield bytes(65536)
