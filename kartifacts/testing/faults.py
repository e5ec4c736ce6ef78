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


def hold(until: threading.Event) -> Fault:
    """A right answer, once `until` is set."""

    def fault(answer: Answer) -> None:
        answer.before = until.wait

    return fault


def _zeros() -> Iterator[bytes]:
    while True:
        yield bytes(65536)
