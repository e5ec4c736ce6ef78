"""The bytes of one blob from one mirror, over as many requests as it takes."""

from __future__ import annotations

import logging
import random
import re
import time
import zlib
from collections.abc import Iterator
from typing import Protocol

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.remote.addresses import Address, shown
from kartifacts.remote.answers import NoConnection, check_range, check_status, check_whole, innermost
from kartifacts.sources import Pieces
from kartifacts.sources.breaker import Breaker
from kartifacts.sources.wire import Answer, Broken

log = logging.getLogger(__name__)

PIECE = 256 << 10
MIN_RATE = 4096  # bytes a second; a mirror that is slower over a whole read timeout is given up
_MUCH = 64 << 10  # bytes; with less in hand, whoever reads does better to turn from a doubtful mirror to another
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_TRIES_ANEW = 1 << 20  # bytes that must have come since the last fault for the tries to count anew


class Asked(Protocol):
    """What is needed of a mirror."""

    settings: Settings
    breaker: Breaker

    def ask(self, address: Address, headers: dict[str, str]) -> tuple[Answer, Address]: ...
    def release(self, answer: Answer) -> None: ...
    def discard(self, answer: Answer) -> None: ...


class Resumed(Pieces):
    """The bytes from `start` to `end` of one blob."""

    def __init__(self, source: Asked, address: Address, size: int, start: int, end: int) -> None:
        super().__init__(self._generate(), shown(address.url))
        self._source = source
        self._address = address
        self._size = size
        self._start = self._position = start
        self._end = end
        self._etag = ""
        self._tries = 0
        self._resumed_at = start
        self._began = 0.0  # the open request
        self._answer: Answer | None = None

    def open(self) -> None:
        """Ask once."""
        with _Reported(self._source.breaker) as request:
            self._began = request.began
            self._open()

    def close(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._source.release(answer)

    def _open(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._position > 0 or self._end < self._size:
            headers["Range"] = f"bytes={self._position}-{self._end - 1}"
            if self._etag:
                headers["If-Range"] = self._etag
        answer, effective = self._source.ask(self._address, headers)
        self.place = shown(effective.url)
        try:
            check_status(answer.status, answer.headers, self.place, size=self._size)
            if answer.status == 206:
                check_range(answer.headers, self.place, start=self._position, end=self._end, size=self._size)
            else:
                check_whole(answer.headers, self.place, size=self._size)
            self._check_encoding(answer)
        except BaseException:
            self._source.discard(answer)
            raise
        etag = answer.headers.get("ETag", "")
        # A weak one does not vouch for bytes, and a strange one is not sent back.
        self._etag = etag if re.fullmatch(r'"[\x21\x23-\x7e]{1,200}"', etag) else ""
        self._answer = answer

    def _check_encoding(self, answer: Answer) -> None:
        encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        # Bytes of a compressed body are no bytes of the blob, so a part of one is of no use.
        allowed = ("identity", "", "gzip", "x-gzip") if answer.status == 200 else ("identity", "")
        if encoding not in allowed:
            raise SourceError(
                f"{self.place} answered with Content-Encoding {encoding[:40]!r}, which was not asked for",
                permanent=True,
                hint="switch compression off for the mirror's blobs/",
            )

    def _generate(self) -> Iterator[bytes]:
        while self._position < self._end:
            try:
                with _Reported(self._source.breaker, self._began):
                    for piece in self._body():
                        self._position += len(piece)
                        if self._position - self._resumed_at >= _TRIES_ANEW or self._position == self._end:
                            self._source.breaker.gave()
                        yield piece
                    if self._position < self._end:
                        raise SourceError(f"{self.place} was closed early, {self._end - self._position} bytes too soon")
            except SourceError as error:
                self.close()
                self._resume(error)
        self.close()

    def _resume(self, error: SourceError) -> None:
        """Go on where it broke off; raises `error` where that is not worthwhile, or has been tried often enough."""
        if self._position - self._resumed_at >= _TRIES_ANEW:
            self._tries = 0
        self._resumed_at = self._position
        have = self._position - self._start
        while True:
            if error.permanent or error.retry_after is not None:
                raise error
            if not have or (have < _MUCH and self._source.breaker.doubtful):
                raise error
            self._tries += 1
            if self._tries > self._source.settings.retries:
                error.permanent = True  # it has had its tries
                raise error
            longest = min(_FIRST_PAUSE * 2**self._tries, _LONGEST_PAUSE)
            pause = random.uniform(longest / 2, longest)  # noqa: S311  spreads clients, hides nothing
            log.info("%s; going on at byte %d in %.1f s", error.message, self._position, pause)
            time.sleep(pause)
            try:
                self.open()
            except SourceError as again:
                error = again
            else:
                return

    def _body(self) -> Iterator[bytes]:
        """What the open answer holds from the present position on, never past the end."""
        answer = self._answer
        assert answer is not None
        # A mirror that does not do ranges sends the whole blob: let go by what lies before.
        at = self._position if answer.status == 206 else 0
        pieces = self._received(answer, self._end - at)
        if answer.headers.get("Content-Encoding", "").strip().lower() in ("gzip", "x-gzip"):
            pieces = _gunzip(pieces, self.place, self._size)
        for piece in pieces:
            before = at
            at += len(piece)
            if before < self._position or at > self._end:
                piece = piece[max(0, self._position - before) : max(0, self._end - before)]
            if piece:
                yield piece
            if at >= self._end:
                return

    def _received(self, answer: Answer, expected: int) -> Iterator[bytes]:
        """The body as it comes: faster than `MIN_RATE`, and in a time that follows from its length."""
        window = self._source.settings.read_timeout
        left = window + expected / MIN_RATE
        waited, received = 0.0, 0
        while True:
            before = time.monotonic()
            try:  # never waits for a full piece, however slowly it comes
                piece = answer.read(PIECE, seconds=min(window, left))
            except Broken as error:
                raise SourceError(f"{self.place} broke off: {_broke_off(error)}") from error
            if not piece:
                return
            took = time.monotonic() - before
            left -= took
            waited += took
            received += len(piece)
            if left <= 0 or (waited >= window and received < MIN_RATE * waited):
                raise SourceError(f"{self.place} sent {received} bytes in {waited:.0f} s, which is too slow")
            if waited >= window:
                waited, received = 0.0, 0
            yield piece


class _Reported:
    """A request whose fault the breaker hears of."""

    def __init__(self, breaker: Breaker, began: float | None = None) -> None:
        self._breaker = breaker
        self.began = breaker.enter() if began is None else began

    def __enter__(self) -> _Reported:  # noqa: PYI034  Self is not in typing before Python 3.11
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        unanswered = isinstance(error, NoConnection)
        if isinstance(error, SourceError) and error.retry_after is not None:
            self._breaker.pause(error.retry_after)
        elif isinstance(error, SourceError) and (unanswered or not error.permanent):
            self._breaker.failed(self.began, error.message, unanswered=unanswered)
        elif error is None or isinstance(error, (SourceError, VerificationError)):
            self._breaker.answered(self.began)
            if isinstance(error, SourceError) and not error.missing:  # a refusal, perhaps of this one blob
                self._breaker.disappointed(error.message)


def _broke_off(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came for too long"
    if "IncompleteRead" in str(error):
        return "the connection was closed early"
    return innermost(error)


def _gunzip(pieces: Iterator[bytes], place: str, size: int) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    left = size + size // 1000 + (64 << 10)  # compressed, what cannot be compressed is hardly any longer
    try:
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise VerificationError(f"{place} sent more than {size} bytes compressed can be", source=place)
            rest = piece
            while rest and not decoder.eof:
                plain = decoder.decompress(rest, PIECE)
                rest = decoder.unconsumed_tail
                if plain:
                    yield plain
            if decoder.eof:
                return
    except zlib.error as error:
        raise VerificationError(f"{place} sent a body that is not gzip: {error}", source=place) from error
