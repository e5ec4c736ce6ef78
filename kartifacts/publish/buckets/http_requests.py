"""One request to a server that takes a plain PUT at a time, with its faults typed; who asks decides what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError
from kartifacts.model.manifest import MAX_PACK
from kartifacts.publish.buckets.sent import Sent, served_as
from kartifacts.remote.addresses import Address, parse, proxy_for, redirected, shown
from kartifacts.remote.answers import REDIRECTS, TRANSIENT, asked_pause, innermost
from kartifacts.remote.authorities import tls_hint
from kartifacts.remote.logins import Netrc, basic
from kartifacts.remote.patience import at_most, patient_manager

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

_PIECE = 1 << 20
_MAX_REDIRECTS = 5
_CONNECTIONS = 8
_DONE = (200, 201, 202, 204)


class HttpError(SourceError):
    """What a server answered; `status` is 0 if it did not."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        permanent: bool = False,
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            message,
            missing=status in (404, 410),
            denied=status == 403,
            permanent=permanent,
            retry_after=retry_after,
            hint=hint,
        )
        self.status = status


class Found(NamedTuple):
    """What a server says of an object."""

    size: int | None
    etag: str  # as it came, with quotes; "" if there is none
    sha256: str  # Artifactory knows it; "" if the server does not say


class Requests:
    """Paths are those of a repository, below a URL; every fault is an `HttpError`.

    Raises:
        ConfigError: it is no such URL.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        try:
            self._base = parse(url.rstrip("/"))
            if "?" in self._base.target:
                raise ValueError("objects are named below it, so it cannot have a query")
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"not a bucket's URL: {shown(url)!r}: {error}") from error
        self.name = shown(url).rstrip("/")
        self._token = unquote(parts.password or "") if not parts.username else ""
        self._settings = settings

    def head(self, path: str) -> Found | None:
        try:
            with self._asked("HEAD", path) as answer:
                return _found(answer)
        except HttpError as error:
            if error.missing:
                return None
            raise

    def get(self, path: str, limit: int) -> tuple[bytes, Found]:
        content = bytearray()
        with self._asked("GET", path, most=limit) as answer:
            for piece in answer.stream(_PIECE, decode_content=False):
                content += piece
                if len(content) > limit:
                    raise HttpError(f"{path!r} in {self.name} is larger than {limit} bytes", permanent=True)
            return bytes(content), _found(answer)

    def pieces(self, path: str) -> Iterator[bytes]:
        with self._asked("GET", path, most=MAX_PACK) as answer:
            yield from answer.stream(_PIECE, decode_content=False)

    def put(self, path: str, sent: Sent, condition: Mapping[str, str]) -> None:
        content_type, cache_control = served_as(path)
        headers = {
            "Content-Type": content_type,
            "Cache-Control": cache_control,
            "Content-Length": str(sent.size),
            "Content-MD5": sent.md5,
            "X-Checksum-Sha256": sent.digest[0],  # Artifactory refuses what it does not fit
            **condition,
        }
        with self._asked("PUT", path, headers, sent) as answer:
            answer.drain_conn()

    def delete(self, path: str) -> None:
        try:
            with self._asked("DELETE", path) as answer:
                answer.drain_conn()
        except HttpError as error:
            if not error.missing:
                raise

    @contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        sent: Sent | None = None,
        *,
        most: int = _PIECE,
    ) -> Iterator[BaseHTTPResponse]:
        """A good answer, whose body can be read inside."""
        import urllib3

        doing = f"cannot {method} {path!r} in {self.name}"
        address = Address(*self._base.origin, f"{self._base.target.rstrip('/')}/{path}", self._base.login)
        try:
            with at_most(most):
                answer = self._answered(doing, method, address, headers or {}, sent)
            try:
                self._check(answer, doing)
                yield answer
            finally:
                answer.close()  # which its connection survives if all of it was read
        except urllib3.exceptions.SSLError as error:
            message = f"{doing}: TLS failed: {innermost(error)}"
            raise HttpError(message, permanent=True, hint=tls_hint(error)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise HttpError(f"{doing}: {_reason(error)}") from error

    def _answered(
        self, doing: str, method: str, address: Address, headers: Mapping[str, str], sent: Sent | None
    ) -> BaseHTTPResponse:
        """The answer, of wherever reading is redirected to; a write is not."""
        import urllib3

        first = address
        for _ in range(_MAX_REDIRECTS + 1):
            lines = {"Accept-Encoding": "identity", "User-Agent": "kartifacts", **headers, **self._login(address)}
            with sent.open() if sent is not None else nullcontext() as body:
                try:
                    answer = self._pool.request(
                        method,
                        address.url,
                        headers=lines,
                        body=body,
                        preload_content=False,
                        retries=False,
                        redirect=False,
                    )
                except (urllib3.exceptions.HTTPError, OSError) as error:
                    if address is first:
                        raise
                    where = shown(address.url)
                    raise HttpError(f"{doing}: it redirects to {where!r}: {_reason(error)}") from error
            if answer.status not in REDIRECTS or method not in ("GET", "HEAD"):
                return answer
            answer.close()
            address = redirected(address, answer.headers.get("Location", ""))
        raise HttpError(f"{shown(address.url)}: more than {_MAX_REDIRECTS} redirects", permanent=True)

    def _login(self, address: Address) -> dict[str, str]:
        if address.origin != self._base.origin:
            return {}
        if self._token:
            return {"Authorization": f"Bearer {self._token}"}
        login = self._base.login or Netrc(self._settings.netrc).login(address.host, default=True)
        return {"Authorization": basic(login)} if login else {}

    def _check(self, answer: BaseHTTPResponse, doing: str) -> None:
        status = answer.status
        if status in _DONE:
            return
        raise HttpError(
            f"{doing}: it answered {status}",
            status=status,
            permanent=status not in TRANSIENT,
            retry_after=asked_pause(answer.headers) if status in TRANSIENT else None,
            hint="put the login into the URL or into ~/.netrc; for a token, an empty user: https://:TOKEN@host/path"
            if status in (401, 403)
            else "its limit for the size of a request is too small"
            if status == 413
            else None,
        )

    @cached_property
    def _pool(self) -> PoolManager:
        return patient_manager(proxy_for(self._base, self._settings), self._settings, connections=_CONNECTIONS)


def _found(answer: BaseHTTPResponse) -> Found:
    length = answer.headers.get("Content-Length", "")
    size = int(length) if length.isdecimal() and len(length) < 19 else None
    return Found(size, answer.headers.get("ETag", ""), answer.headers.get("X-Checksum-Sha256", "").lower())


def _reason(error: BaseException) -> str:
    import urllib3

    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # which urllib3 takes for a timeout
    if isinstance(error, urllib3.exceptions.TimeoutError) and not refused:
        return "it said nothing for too long"
    return innermost(error)
