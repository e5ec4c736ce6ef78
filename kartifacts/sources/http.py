"""An HTTP(S) mirror as a source: bounded, resumed where it broke off, and never believed."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import blob_path
from kartifacts.sources import Pieces
from kartifacts.sources.answers import REDIRECTS, check_range, check_status, check_whole, shown
from kartifacts.sources.breaker import Breaker

if TYPE_CHECKING:
    import requests

log = logging.getLogger(__name__)

PIECE = 256 << 10
MAX_REDIRECTS = 5
MIN_RATE = 4096  # bytes a second; a mirror that is slower over a whole read timeout is given up
PATIENCE = 60.0  # seconds that one read waits in all because a mirror asked for it
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_RESUME_RESETS = 1 << 20  # bytes that must have come since the last fault for the tries to count anew


class HttpSource:
    """A repository behind `url`.

    Args:
        url: where ``blobs/`` lies; a user and password in it are sent to that origin only and never shown.
        settings: timeouts and tries.
    """

    local = False
    mirror = True

    def __init__(self, url: str, settings: Settings) -> None:
        if settings.offline:
            raise ConfigError(f"the mirror {shown(url)} was to be opened although KARTIFACTS_OFFLINE is set")
        parts = urlsplit(url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"not a mirror's URL: {shown(url)!r}")
        self.name = shown(url)
        self._url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self._auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
        self._settings = settings
        self._breaker = Breaker(self.name)
        self._threads = threading.local()

    def __repr__(self) -> str:
        return f"HttpSource({self.name!r})"

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        end = size if length is None else start + length
        transfer = _Transfer(self, f"{self._url}/{blob_path(digest)}", size, start, end)
        try:
            transfer.open()
            yield transfer
        finally:
            transfer.close()

    def loose(self, digest: Digest, size: int, suffix: str) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    # -- one request -------------------------------------------------------------------------------------------------

    def ask(self, url: str, headers: dict[str, str]) -> tuple[requests.Response, str]:
        """GET `url`, following redirects by hand; gives the answer and the URL it came from."""
        import requests
        import urllib3

        for _ in range(MAX_REDIRECTS + 1):
            self._breaker.enter()
            auth = self._auth if _origin(url) == _origin(self._url) else None
            try:
                response = self._session().get(
                    url,
                    headers=headers,
                    auth=auth,
                    stream=True,
                    allow_redirects=False,
                    timeout=(self._settings.connect_timeout, self._settings.read_timeout),
                )
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                fault = _connection_fault(error, url)
                if _never_answered(error):
                    self._breaker.failed(fault.message)
                raise fault from error
            self._breaker.succeeded()
            if response.status_code not in REDIRECTS:
                return response, url
            _discard(response)
            url = _redirected(url, response.headers.get("Location", ""))
        raise SourceError(f"{shown(url)}: more than {MAX_REDIRECTS} redirects", permanent=True)

    def pause(self, seconds: float) -> None:
        self._breaker.pause(seconds)

    def gave_up(self, reason: str) -> None:
        self._breaker.failed(reason)

    @property
    def settings(self) -> Settings:
        return self._settings

    def _session(self) -> requests.Session:
        # One a thread, since a Session is not safe to share; one a process, since a forked child must not go on
        # speaking on its parent's connection.
        kept = getattr(self._threads, "session", None)
        if kept is None or kept[0] != os.getpid():
            kept = self._threads.session = (os.getpid(), _new_session())
        session: requests.Session = kept[1]
        return session


def _new_session() -> requests.Session:
    import ssl

    import requests

    session = requests.Session()
    session.headers.clear()
    session.headers["User-Agent"] = "kartifacts"
    # What OpenSSL calls SSL_CERT_FILE; REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE are honoured by requests, and win.
    paths = ssl.get_default_verify_paths()
    if paths.cafile and paths.cafile != paths.openssl_cafile:
        session.verify = paths.cafile
    return session


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise SourceError(f"{shown(url)} is not a URL", permanent=True) from error
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def _discard(response: requests.Response) -> None:
    """Let go of an answer; its connection stays open if so little is left of it that reading is cheaper."""
    import urllib3

    length = response.headers.get("Content-Length", "")
    if re.fullmatch(r"\d{1,5}", length):
        try:
            for _ in range(4):
                if not response.raw.read1(1 << 16, decode_content=False):
                    break
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            log.debug("the rest of an answer: %s", error)
    response.close()


def _redirected(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
        scheme = urlsplit(target).scheme
    except ValueError:
        target, scheme = location, ""
    if scheme not in ("http", "https") or (scheme == "http" and url.startswith("https:")):
        raise SourceError(f"{shown(url)} redirects to {shown(target)!r}, which is refused", permanent=True)
    return target


def _never_answered(error: Exception) -> bool:
    """Whether the mirror is not there at all; a connection that it reset later says less about it."""
    import requests
    import urllib3

    if isinstance(error, requests.ConnectionError):
        return bool(error.args) and isinstance(error.args[0], urllib3.exceptions.MaxRetryError)
    return True


def _connection_fault(error: Exception, url: str) -> SourceError:
    import requests

    where = f"no answer from {shown(url)}"
    if isinstance(error, requests.exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return SourceError(
            f"{where}: its certificate is not trusted",
            permanent=True,
            hint="set REQUESTS_CA_BUNDLE or SSL_CERT_FILE to the certificate of the authority that signed it",
        )
    if isinstance(error, requests.ConnectTimeout):
        return SourceError(f"{where}: no connection in time")
    if isinstance(error, requests.Timeout):
        return SourceError(f"{where}: it accepted the connection and then said nothing")
    if isinstance(error, requests.exceptions.ProxyError):
        return SourceError(f"{where}: the proxy failed", hint="see HTTPS_PROXY, HTTP_PROXY and NO_PROXY")
    if isinstance(error, requests.ConnectionError):
        return SourceError(f"{where}: {_innermost(error)}")
    return SourceError(f"{where}: {_innermost(error)}", permanent=True)


def _innermost(error: BaseException) -> str:
    """The shortest true reason of a chain of wrapped exceptions, without the addresses that they print."""
    import http.client

    reason: BaseException | None = error
    text = ""
    for _ in range(10):
        if reason is None:
            break
        if isinstance(reason, OSError) and reason.strerror:
            text = reason.strerror
        elif isinstance(reason, http.client.HTTPException):
            text = str(reason)[:200] or type(reason).__name__
        reason = reason.__cause__ or reason.__context__
    return text or type(error).__name__


class _Transfer(Pieces):
    """The bytes from `start` to `end` of one blob, over as many requests as it takes."""

    def __init__(self, source: HttpSource, url: str, size: int, start: int, end: int) -> None:
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
            _discard(response)
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
    return _innermost(error)


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
