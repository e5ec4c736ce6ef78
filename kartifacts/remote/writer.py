"""Asks a registry to change something, and reads back what it holds: one request at a time, by urllib3.

Reading kernels needs none of this: a source speaks for itself, without what urllib3 takes to import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import urllib3

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.model.digest import strict_json
from kartifacts.remote.addresses import Address, parse, proxy_for, redirected, shown
from kartifacts.remote.answers import REDIRECTS, TRANSIENT, asked_pause, innermost
from kartifacts.remote.authorization import MAX_TOKEN, Authorization
from kartifacts.remote.logins import Login, basic
from kartifacts.remote.patience import patient_manager
from kartifacts.remote.registry import ACCEPT, Registry

MAX_REDIRECTS = 5
MAX_ANSWER = 1 << 20  # bytes of an answer that is not asked for its content
_PIECE = 1 << 20
_HINTS = {
    405: "it is read-only, or switched that off; see docs/howto/registries.md",
    413: "something in front of the registry limits the size of bodies (nginx: client_max_body_size)",
    507: "the registry has no space left",
}
_CONNECTIONS = 16


class Refused(SourceError):
    """What a registry answered, where it was not what was hoped for.

    Args:
        status: of HTTP.
        code: the registry's word for it, like DIGEST_INVALID.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "",
        permanent: bool = False,
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        missing = status in (404, 410)
        super().__init__(message, missing=missing, permanent=permanent, retry_after=retry_after, hint=hint)
        self.status = status
        self.code = code


class Reply(NamedTuple):
    """An answer that was hoped for."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    address: Address  # after redirects


class Writer:
    """What it takes to write to one repository of a registry.

    Args:
        actions: for the token that is asked for, like ``pull,push``.
    """

    def __init__(self, registry: Registry, settings: Settings, actions: str = "pull,push") -> None:
        self._registry = registry
        self._settings = settings
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._authorization = Authorization(registry, settings, actions, self._ask_token_server)

    def ask(
        self,
        method: str,
        address: Address,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        hoped: tuple[int, ...] = (200,),
        limit: int = MAX_ANSWER,
    ) -> Reply:
        """One request, asked once (and once more after a 401).

        Raises:
            Refused: the answer has another status than those `hoped` for.
            SourceError: there is no answer, or it has more than `limit` bytes.
        """
        with self._answer(method, address, body, headers or {}, hoped) as (response, effective):
            content = b"".join(self._pieces(response, shown(effective.url), limit))
            return Reply(response.status, response.headers, content, effective)

    @contextmanager
    def stream(self, address: Address, limit: int) -> Iterator[Iterator[bytes]]:
        """GET, in pieces, at most `limit` bytes of it; for what is too large to hold."""
        with self._answer("GET", address, b"", {}, (200,)) as (response, effective):
            yield self._pieces(response, shown(effective.url), limit)

    @contextmanager
    def _answer(
        self, method: str, address: Address, body: bytes, headers: Mapping[str, str], hoped: tuple[int, ...]
    ) -> Iterator[tuple[urllib3.BaseHTTPResponse, Address]]:
        for _ in range(MAX_REDIRECTS + 1):
            response = self._admitted(method, address, body, headers)
            try:
                if response.status not in REDIRECTS or response.status in hoped:
                    self._check(response, method, shown(address.url), hoped)
                    yield response, address
                    return
                if method not in ("GET", "HEAD"):
                    raise Refused(
                        f"{shown(address.url)} answered {response.status} to {method}; only reads are redirected",
                        status=response.status,
                        permanent=True,
                    )
                address = redirected(address, response.headers.get("Location", ""))
            finally:
                self._release(response)
        raise SourceError(f"{shown(address.url)}: more than {MAX_REDIRECTS} redirects", permanent=True)

    def _admitted(
        self, method: str, address: Address, body: bytes, headers: Mapping[str, str]
    ) -> urllib3.BaseHTTPResponse:
        """The answer to a request that shows the registry, and nobody else, who asks."""
        if address.origin != self._registry.root.origin:
            return self._request(method, address, body, headers)
        used = self._authorization.header()
        response = self._request(method, address, body, headers, used)
        try:
            if response.status == 401 and self._authorization.renew(_challenges(response), used):
                self._release(response)
                response = self._request(method, address, body, headers, self._authorization.header())
            self._authorization.check(response.status, f"{method} {shown(address.url)}")
        except BaseException:
            self._release(response)
            raise
        return response

    def _request(
        self, method: str, address: Address, body: bytes, headers: Mapping[str, str], authorization: str = ""
    ) -> urllib3.BaseHTTPResponse:
        lines = {"User-Agent": "kartifacts", "Accept": ACCEPT, "Accept-Encoding": "identity", **headers}
        if authorization:
            lines["Authorization"] = authorization
        try:
            return self._pool(address).request(
                method,
                address.url,
                body=body or (b"" if method in ("POST", "PUT", "PATCH") else None),
                headers=lines,
                preload_content=False,
                decode_content=False,
                redirect=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _no_answer(error, method, address) from error

    def _pool(self, address: Address) -> urllib3.PoolManager:
        proxy = proxy_for(address, self._settings)
        name = proxy.url if proxy else ""
        if name not in self._pools:
            self._pools[name] = patient_manager(proxy, self._settings, connections=_CONNECTIONS)
        return self._pools[name]

    def _pieces(self, response: urllib3.BaseHTTPResponse, place: str, limit: int) -> Iterator[bytes]:
        received = 0
        try:
            for piece in response.stream(_PIECE):
                received += len(piece)
                if received > limit:
                    raise SourceError(f"{place} is larger than {limit} bytes; no more was read", permanent=True)
                yield piece
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise SourceError(f"{place} broke off after {received} bytes: {_reason(error)}") from error

    def _check(self, response: urllib3.BaseHTTPResponse, method: str, place: str, hoped: tuple[int, ...]) -> None:
        status = response.status
        if status in hoped:
            return
        code, said = "", ""
        with suppress(SourceError):  # the status says enough
            code, said = _told(b"".join(self._pieces(response, place, MAX_ANSWER)))
        message = f"{place} answered {status} to {method}" + (f": {said}" if said else "")
        pause = asked_pause(response.headers) if status in TRANSIENT else None
        raise Refused(
            message,
            status=status,
            code=code,
            permanent=status not in TRANSIENT,
            retry_after=pause,
            hint=_HINTS.get(status),
        )

    def _release(self, response: urllib3.BaseHTTPResponse) -> None:
        """Keep the connection where little is left to read, else close it."""
        try:
            length = response.headers.get("Content-Length", "")
            if re.fullmatch(r"\d{1,5}", length):
                response.drain_conn()
            else:
                response.close()
        finally:
            response.release_conn()

    def _ask_token_server(self, url: str, login: Login | None) -> bytes:
        address = replace(parse(url), login=None)
        authorization = basic(login) if login else ""
        response = self._request("GET", address, b"", {"Accept": "application/json"}, authorization)
        try:
            place = shown(url)
            if response.status in (401, 403):
                raise SourceError(f"{place} answered {response.status}", permanent=True)
            self._check(response, "GET", place, (200,))
            return b"".join(self._pieces(response, place, MAX_TOKEN))
        finally:
            self._release(response)


def _challenges(response: urllib3.BaseHTTPResponse) -> list[str]:
    headers: Any = response.headers
    found: list[str] = headers.getlist("WWW-Authenticate")
    return found


def _told(content: bytes) -> tuple[str, str]:
    """The code of the first error in a registry's answer, and what it says about it, for a message."""
    try:
        found = strict_json(content, what="an answer")
    except VerificationError:
        return "", ""
    errors = found.get("errors") if isinstance(found, dict) else None
    first = errors[0] if isinstance(errors, list) and errors else None
    if not isinstance(first, dict):
        return "", ""
    code, message, detail = (first.get(name) for name in ("code", "message", "detail"))
    said = f"{message!r:.200}" + (f" ({detail!r:.200})" if detail else "")
    return str(code)[:100], f"{code!s:.100} {said}"


def _reason(error: BaseException) -> str:
    text = innermost(error)
    return re.sub(r"^<[^>]*>: |^HTTPS?Connection\w*\([^)]*\): ", "", text) or type(error).__name__


def _no_answer(error: Exception, method: str, address: Address) -> SourceError:
    import ssl

    where = f"no answer from {shown(address.url)} to {method}"
    if isinstance(error, urllib3.exceptions.SSLError):
        from kartifacts.remote.authorities import tls_hint

        refused = "CERTIFICATE_VERIFY_FAILED" in str(error)
        why = "its certificate is not trusted" if refused else f"TLS failed: {_reason(error)}"
        return SourceError(f"{where}: {why}", permanent=True, hint=tls_hint(error))
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # which urllib3 takes for a timeout
    if isinstance(error, urllib3.exceptions.TimeoutError) and not refused:
        return SourceError(f"{where}: nothing came for too long")
    permanent = isinstance(error, (ssl.SSLError, urllib3.exceptions.SSLError, urllib3.exceptions.LocationValueError))
    return SourceError(f"{where}: {_reason(error)}", permanent=permanent)
