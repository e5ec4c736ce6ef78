"""The bytes of one blob from one mirror, over as many requests as it takes."""

from __future__ import annotations

import logging
import random
import re
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.sources import Pieces
from kartifacts.sources.answers import check_range, check_status, check_whole, discard, innermost, shown

if TYPE_CHECKING:
    import requests

log = logging.getLogger(__name__)

PIECE = 256 << 10
MIN_RATE = 4096  # bytes a second; a mirror that is slower over a whole read timeout is given up
PATIENCE = 60.0  # seconds that one read waits in all because a mirror asked for it
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_RESUME_RESETS = 1 << 20  # bytes that must have come since the last fault for the tries to count anew


class Asked(Protocol):
    """What is needed of a mirror."""

    name: str
    settings: Settings

    def ask(self, url: str, headers: dict[str, str]) -> tuple[requests.Response, str]: ...
    def pause(self, seconds: float) -> None: ...
    def gave_up(self, reason: str) -> None: ...


class Resumed(Pieces):
    """The bytes from `start` to `end` of one blob, over as many requests as it takes."""

    def __init__(self, source: Asked, url: str, size: int, start: int, end: int) -> None:
        super().__init__(self._generate(), shown(url))
        self._source = source
        self._url = url
        self._size = size
        self._position = start
        self._end = end
        self._etag = ""
        self._tries = 0
        self._waited = 0.0
        self._resumed_at = start
        self._response: requests.Response | None = None
        self._effective = url  # where the open answer came from

    def open(self) -> None:
        """Ask until there is an answer with a body, or no more try is left."""
        while True:
            try:
                self._open_once()
            except SourceError as error:
                self._before_next_try(error)
            else:
                return

    def _generate(self) -> Iterator[bytes]:
        while self._position < self._end:
            try:
                for piece in self._body():
                    self._position += len(piece)
                    yield piece
                if self._position < self._end:
                    raise SourceError(f"{self.place} ended {self._end - self._position} bytes early")
            except SourceError as error:
                self.close()
                self._before_next_try(error)
                self.open()

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _open_once(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._position > 0 or self._end < self._size:
            headers["Range"] = f"bytes={self._position}-{self._end - 1}"
            if self._etag:
                headers["If-Range"] = self._etag
        response, self._effective = self._source.ask(self._url, headers)
        self.place = shown(self._effective)
        try:
            check_status(response.status_code, response.headers, self._effective, size=self._size)
            if response.status_code == 206:
                check_range(response.headers, self._effective, start=self._position, end=self._end, size=self._size)
            else:
                check_whole(response.headers, self._effective, size=self._size)
            self._check_encoding(response)
        except BaseException:
            discard(response)
            raise
        etag = response.headers.get("ETag", "")
        self._etag = etag if etag.startswith('"') else ""  # a weak one does not vouch for bytes
        self._response = response

    def _check_encoding(self, response: requests.Response) -> None:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        # Bytes of a compressed body are no bytes of the blob, so a part of one is of no use.
        allowed = ("identity", "", "gzip", "x-gzip") if response.status_code == 200 else ("identity", "")
        if encoding not in allowed:
            raise SourceError(
                f"{self.place} answered with Content-Encoding {encoding[:40]!r}, which was not asked for",
                permanent=True,
                hint="switch compression off for the mirror's blobs/",
            )

    def _before_next_try(self, error: SourceError) -> None:
        """Wait as long as is right, or raise `error`: it is final, or patience has run out."""
        if error.permanent:
            raise error
        if self._position - self._resumed_at >= _RESUME_RESETS:
            self._tries = 0
        self._resumed_at = self._position
        if error.retry_after is None:
            self._tries += 1
            if self._tries > self._source.settings.retries:
                self._source.gave_up(error.message)
                raise error
            longest = min(_FIRST_PAUSE * 2**self._tries, _LONGEST_PAUSE)
            pause = random.uniform(longest / 2, longest)  # noqa: S311  spreads clients, hides nothing
            log.info("%s; trying again in %.1f s", error.message, pause)
            time.sleep(pause)
            return
        pause = max(error.retry_after, 0.5)
        self._waited += pause
        if self._waited > PATIENCE:
            self._source.gave_up(error.message)
            raise error
        log.warning("%s is rate limited: it asks for a pause of %.0f s", self._source.name, pause)
        self._source.pause(pause)

    def _body(self) -> Iterator[bytes]:
        """What the open answer holds from the present position on, never past the end."""
        response = self._response
        assert response is not None
        pieces = self._raw(response)
        if response.headers.get("Content-Encoding", "").strip().lower() in ("gzip", "x-gzip"):
            pieces = _gunzip(pieces, self._effective)
        at = self._position if response.status_code == 206 else 0
        for piece in pieces:
            # A mirror that does not do ranges sends the whole blob: let go by what lies before.
            wanted = piece[max(0, self._position - at) : max(0, self._end - at)]
            at += len(piece)
            if wanted:
                yield wanted
            if at >= self._end:
                return

    def _raw(self, response: requests.Response) -> Iterator[bytes]:
        import urllib3

        window = self._source.settings.read_timeout
        waited, received = 0.0, 0
        while True:
            before = time.monotonic()
            try:  # read1, since read would wait for a full piece however slowly it comes
                piece: bytes = response.raw.read1(PIECE, decode_content=False)
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                raise SourceError(f"{self.place} broke off: {_broke_off(error)}") from error
            if not piece:
                return
            waited += time.monotonic() - before
            received += len(piece)
            if waited >= window:
                if received < MIN_RATE * waited:
                    raise SourceError(f"{self.place} sent {received} bytes in {waited:.0f} s, which is too slow")
                waited, received = 0.0, 0
            yield piece


def _broke_off(error: Exception) -> str:
    import urllib3

    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "nothing came for too long"
    if re.search("IncompleteRead", str(error)):
        return "the connection was closed early"
    return innermost(error)


def _gunzip(pieces: Iterator[bytes], url: str) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    try:
        for piece in pieces:
            rest = piece
            while rest and not decoder.eof:
                plain = decoder.decompress(rest, PIECE)
                rest = decoder.unconsumed_tail
                if plain:
                    yield plain
    except zlib.error as error:
        raise VerificationError(f"{shown(url)} sent a body that is not gzip: {error}", source=shown(url)) from error
