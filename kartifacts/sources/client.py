"""Asks a mirror: connections that are kept, redirects, proxies, authorities and passwords."""

from __future__ import annotations

import logging
import time
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.remote.addresses import Address, proxy_for, redirected, shown
from kartifacts.remote.answers import REDIRECTS, NoConnection, check_status, innermost
from kartifacts.remote.authorities import AUTHORITY_HINT, tls_context, tls_hint
from kartifacts.remote.logins import Netrc, basic
from kartifacts.sources.breaker import Breaker
from kartifacts.sources.pool import Pool
from kartifacts.sources.resumed import Resumed
from kartifacts.sources.wire import Answer, Broken, Connection, ProxyRefused

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

log = logging.getLogger(__name__)

MAX_REDIRECTS = 5
_CHEAP = 64 << 10  # bytes that are rather read than given up with their connection
_PROXY_HINT = "see HTTPS_PROXY, HTTP_PROXY and NO_PROXY"


class Authorizing(Protocol):
    """How a mirror is shown who asks."""

    def header(self) -> str:
        """The value of Authorization for the next request; "" for none."""
        ...

    def renew(self, headers: Sequence[str], used: str) -> bool:
        """After a 401 with these WWW-Authenticate headers: whether another value is worth another request."""
        ...

    def check(self, status: int, place: str) -> None:
        """Raise a `SourceError` if that status says that a request was not let through."""
        ...


class Client:
    """What it takes to ask the mirror at `mirror`, shared by all threads.

    Args:
        accept: media types that are asked for.
        authorization: how to show who asks, where a login alone does not do.
    """

    def __init__(
        self,
        mirror: Address,
        settings: Settings,
        breaker: Breaker,
        *,
        accept: str = "*/*",
        authorization: Authorizing | None = None,
    ) -> None:
        self._mirror = mirror
        self._accept = accept
        self._authorization = authorization
        self.settings = settings
        self.breaker = breaker
        self._pool = Pool()
        weakref.finalize(self, self._pool.close)

    def read(self, address: Address, size: int, start: int, end: int) -> Resumed:
        """The bytes from `start` to `end` of what lies at `address`, `size` bytes in all; to be opened and closed."""
        return Resumed(self, address, size, start, end)

    def whole(self, address: Address, limit: int) -> bytes:
        """All of a small file, at most `limit` bytes, as it is now and within one read timeout.

        Raises:
            SourceError: `missing`, larger, slower, cut off, or another fault.
        """
        due = time.monotonic() + self.settings.read_timeout
        answer, effective = self.ask(address, {"Accept-Encoding": "identity", "Cache-Control": "no-cache"})
        place = shown(effective.url)
        content = bytearray()
        try:
            if answer.status != 200:
                self.discard(answer)  # or each name that is not there would cost a connection
                check_status(answer.status, answer.headers, place, size=limit)
                raise SourceError(f"{place} answered {answer.status} to a plain GET", permanent=True)
            if answer.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
                raise SourceError(f"{place} is compressed, which was not asked for", permanent=True)
            while piece := answer.read(limit + 1 - len(content), seconds=max(due - time.monotonic(), 0)):
                content += piece
                if len(content) > limit:
                    raise SourceError(f"{place} is larger than {limit} bytes; no more was read", permanent=True)
            if not answer.complete:
                raise SourceError(f"{place} broke off after {len(content)} bytes")
            return bytes(content)
        except Broken as error:
            reason = "too slow" if isinstance(error, TimeoutError) else innermost(error)
            raise SourceError(f"{place} broke off after {len(content)} bytes: {reason}") from error
        finally:
            self.release(answer)

    def ask(self, address: Address, headers: dict[str, str]) -> tuple[Answer, Address]:
        """GET `address`, following redirects; gives the answer and the address it came from."""
        due = time.monotonic() + self.settings.connect_timeout + self.settings.read_timeout
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._admitted(address, headers)
            if answer.status not in REDIRECTS:
                return answer, address
            location = answer.headers.get("Location", "")
            self.discard(answer)
            address = redirected(address, location)
            if time.monotonic() > due:
                raise SourceError(f"{shown(address.url)}: the redirects to it took too long")
        raise SourceError(f"{shown(address.url)}: more than {MAX_REDIRECTS} redirects", permanent=True)

    def release(self, answer: Answer) -> None:
        """Be done with an answer; its connection serves the next request if all of it has been read."""
        if answer.finish():
            self._pool.put(answer.origin, answer.connection)

    def discard(self, answer: Answer) -> None:
        """Let go of an answer that is of no use, reading what little may be left of it."""
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and len(length) < 6 and int(length) <= _CHEAP:
            due = time.monotonic() + 1.0  # for all of it, however small the pieces are
            try:
                while answer.read(_CHEAP, seconds=due - time.monotonic()):
                    pass
            except Broken as error:
                log.debug("the rest of an answer: %s", error)
        self.release(answer)

    def _admitted(self, address: Address, headers: dict[str, str]) -> Answer:
        """GET with what the other side wants to see, renewed once where it does not let that pass."""
        authorization = self._authorization
        if authorization is None or address.origin != self._mirror.origin:
            login = self._login(address)
            return self._get(address, headers, basic(login) if login else "")
        used = authorization.header()
        answer = self._get(address, headers, used)
        try:
            if answer.status == 401 and authorization.renew(answer.headers.get_all("WWW-Authenticate", []), used):
                self.discard(answer)
                answer = self._get(address, headers, authorization.header())
            authorization.check(answer.status, shown(address.url))
        except BaseException:
            self.discard(answer)
            raise
        return answer

    def _get(self, address: Address, headers: dict[str, str], authorization: str) -> Answer:
        lines = {"Accept": self._accept, **headers}
        if authorization:
            lines["Authorization"] = authorization
        connection = self._pool.take(address.origin)
        while True:
            used = connection is not None
            connection = connection or self._connect(address)
            try:
                return connection.get(address, lines, seconds=self.settings.read_timeout)
            except Broken as error:
                connection.close()
                if used and not isinstance(error, TimeoutError):  # the mirror had just closed it
                    connection = None
                    continue
                silent = isinstance(error, TimeoutError)
                reason = "it accepted the connection and then said nothing" if silent else innermost(error)
                raise SourceError(f"no answer from {shown(address.url)}: {reason}") from error
            except BaseException:
                connection.close()
                raise

    def _connect(self, address: Address) -> Connection:
        proxy = proxy_for(address, self.settings)
        tls = "https" in (address.scheme, proxy.scheme if proxy else "")
        context = self._context if tls else None
        try:
            return Connection(address, proxy, seconds=self.settings.connect_timeout, context=context)
        except (ProxyRefused, *Broken) as error:
            raise _no_connection(error, address, proxy) from error

    @cached_property
    def _context(self) -> ssl.SSLContext:
        try:
            return tls_context(self.settings)
        except SourceError as error:
            message = f"no answer from {shown(self._mirror.url)}: {error.message}"
            raise NoConnection(message, permanent=True, hint=error.hint) from error

    def _login(self, address: Address) -> tuple[str, str] | None:
        """The user and password for an address: its URL's, or what netrc has for its host."""
        ours = address.origin == self._mirror.origin
        if ours and self._mirror.login:
            return self._mirror.login
        return self._netrc.login(address.host, default=ours)

    @cached_property
    def _netrc(self) -> Netrc:
        return Netrc(self.settings.netrc)


def _no_connection(error: Exception, address: Address, proxy: Address | None) -> NoConnection:
    import ssl

    where = f"no answer from {shown(address.url)}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return NoConnection(
            f"{where}: its certificate is not trusted: {error.verify_message}", permanent=True, hint=AUTHORITY_HINT
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, TimeoutError)):
        return NoConnection(f"{where}: TLS failed: {innermost(error)}", permanent=True, hint=tls_hint(error))
    if isinstance(error, ProxyRefused):
        denied = error.status < 500
        hint = "the proxy wants credentials: put them into HTTPS_PROXY" if error.status == 407 else _PROXY_HINT
        return NoConnection(f"{where}: {error}", permanent=denied, hint=hint)
    reason = "no connection in time" if isinstance(error, TimeoutError) else innermost(error)
    if proxy is None:
        return NoConnection(f"{where}: {reason}")
    return NoConnection(f"{where}: the proxy {shown(proxy.url)} failed: {reason}", hint=_PROXY_HINT)
