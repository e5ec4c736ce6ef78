"""An HTTP(S) mirror as a source: bounded, resumed where it broke off, and never believed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import blob_path
from kartifacts.sources import Pieces
from kartifacts.sources.answers import REDIRECTS, TRANSIENT, discard, innermost, shown
from kartifacts.sources.breaker import Breaker
from kartifacts.sources.resumed import Resumed

if TYPE_CHECKING:
    import requests

log = logging.getLogger(__name__)

MAX_REDIRECTS = 5


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
        try:
            parts = urlsplit(url.rstrip("/"))
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f"not a mirror's URL: {shown(url)!r}")
        self.name = shown(url)
        self._url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self._auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
        self.settings = settings
        self._breaker = Breaker(self.name)
        self._threads = threading.local()

    def __repr__(self) -> str:
        return f"HttpSource({self.name!r})"

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        end = size if length is None else start + length
        transfer = Resumed(self, f"{self._url}/{blob_path(digest)}", size, start, end)
        try:
            transfer.open()
            yield transfer
        finally:
            transfer.close()

    def blob(self, digest: Digest, size: int) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

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
                    timeout=(self.settings.connect_timeout, self.settings.read_timeout),
                )
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                fault = _connection_fault(error, url)
                if _never_answered(error):
                    self._breaker.failed(fault.message)
                raise fault from error
            if response.status_code not in TRANSIENT:
                self._breaker.succeeded()
            if response.status_code not in REDIRECTS:
                return response, url
            discard(response)
            url = _redirected(url, response.headers.get("Location", ""))
        raise SourceError(f"{shown(url)}: more than {MAX_REDIRECTS} redirects", permanent=True)

    def pause(self, seconds: float) -> None:
        self._breaker.pause(seconds)

    def gave_up(self, reason: str) -> None:
        self._breaker.failed(reason)

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
        return SourceError(f"{where}: {innermost(error)}")
    return SourceError(f"{where}: {innermost(error)}", permanent=True)
