"""One connection to a host and one request on it at a time; whatever is waited for has to come before a deadline."""

from __future__ import annotations

import http.client
import io
import select
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kartifacts.remote.addresses import Address
from kartifacts.remote.logins import basic

if TYPE_CHECKING:
    import ssl

HEAD = 256 << 10  # bytes; no honest answer has as many before its body
_BUFFER = 16 << 10
Broken = (http.client.HTTPException, OSError, ValueError)
"""What reading an answer may raise: it is cut off, it is not HTTP, or the time is up."""


class Connection:
    """A connection to `address`, by a proxy if there is one.

    Args:
        seconds: what connecting may take; the same again for what a proxy and TLS have to say.
        context: how to check certificates, for https.

    Raises:
        OSError: there is no connection, or the certificate is not trusted (ssl.SSLError).
        ProxyRefused: the proxy does not let this one through.
    """

    def __init__(
        self, address: Address, proxy: Address | None, *, seconds: float, context: ssl.SSLContext | None
    ) -> None:
        self._absolute = proxy is not None and address.scheme == "http"
        self._proxy_login = basic(proxy.login) if proxy is not None and proxy.login else ""
        near = proxy or address
        self._socket = _connected(near.host, near.port, seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(seconds)
            if proxy is not None and address.scheme == "https":
                if proxy.scheme == "https":
                    raise OSError("a proxy that is itself reached by https:// cannot carry https://")
                self._tunnel(address, time.monotonic() + seconds)
            if context is not None:
                end = address if address.scheme == "https" else near
                self._socket = context.wrap_socket(self._socket, server_hostname=end.host)
        except BaseException:
            self._socket.close()
            raise

    def get(self, address: Address, headers: Mapping[str, str], *, seconds: float) -> Answer:
        """Ask; gives the answer once its headers are there, which is within `seconds`."""
        target = address.url if self._absolute else address.target
        lines = {"Host": address.authority, "User-Agent": "kartifacts", "Accept": "*/*", **headers}
        if self._absolute and self._proxy_login:
            lines["Proxy-Authorization"] = self._proxy_login
        due = time.monotonic() + seconds
        self._send(f"GET {target} HTTP/1.1", lines, seconds)
        return Answer(self, address.origin, *self._head("GET", due))

    def is_stale(self) -> bool:
        """Whether the other side has closed it, or says something that nobody asked for."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        self._socket.close()

    def _send(self, first: str, lines: Mapping[str, str], seconds: float) -> None:
        text = "\r\n".join((first, *(f"{name}: {value}" for name, value in lines.items()), "\r\n"))
        self._socket.settimeout(seconds)
        self._socket.sendall(text.encode("latin-1"))

    def _head(self, method: str, due: float) -> tuple[http.client.HTTPResponse, _Received]:
        received = _Received(self._socket, due)
        # All that HTTPResponse wants of a socket is makefile().
        response = http.client.HTTPResponse(cast("socket.socket", received), method=method)
        try:
            response.begin()
        except BaseException:
            response.close()
            raise
        received.allowed = None
        return response, received

    def _tunnel(self, address: Address, due: float) -> None:
        host = f"[{address.host}]" if ":" in address.host else address.host
        where = f"{host}:{address.port}"
        lines = {"Host": where, "User-Agent": "kartifacts"}
        if self._proxy_login:
            lines["Proxy-Authorization"] = self._proxy_login
        self._send(f"CONNECT {where} HTTP/1.1", lines, due - time.monotonic())
        response, _ = self._head("CONNECT", due)
        response.close()
        if response.status != 200:
            raise ProxyRefused(response.status)


class ProxyRefused(Exception):
    """A proxy answered CONNECT with another status than 200."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the proxy answered {status} to CONNECT")
        self.status = status


class Answer:
    """Status and headers of an answer, and its body, to be read."""

    def __init__(
        self,
        connection: Connection,
        origin: tuple[str, str, int],
        response: http.client.HTTPResponse,
        received: _Received,
    ) -> None:
        self.connection = connection
        self.origin = origin  # that the connection can be asked for
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._received = received
        self._finished = False

    def read(self, limit: int, *, seconds: float) -> bytes:
        """What has come, at most `limit` bytes of it; b"" at the end.  Raises one of `Broken`."""
        self._received.due = time.monotonic() + seconds
        return self._response.read1(limit)

    @property
    def complete(self) -> bool:
        """Whether nothing of an announced length is outstanding."""
        return self._response.length in (None, 0)

    def finish(self) -> bool:
        """Be done with it; tells, the first time, whether the connection can take another request."""
        if self._finished:
            return False  # by now the connection may be somebody else's
        self._finished = True
        reusable = not self._response.will_close and (self._response.isclosed() or self._response.length == 0)
        self._response.close()
        if not reusable:
            self.connection.close()
        return reusable


class _Received(io.RawIOBase):
    """What a socket receives until a time, as a file that is read through a buffer."""

    def __init__(self, source: socket.socket, due: float) -> None:
        self._socket = source
        self.due = due
        self.allowed: int | None = HEAD

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002  the name and shape that HTTPResponse expects
        return io.BufferedReader(self, _BUFFER)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = self.due - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        count = self._socket.recv_into(buffer)
        if self.allowed is not None:
            self.allowed -= count
            if self.allowed < 0:
                raise http.client.HTTPException("its headers have no end")
        return count


def _connected(host: str, port: int, seconds: float) -> socket.socket:
    """A connection to the first of a host's addresses that takes one; all of them together may take `seconds`."""
    due = time.monotonic() + seconds
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    fault: OSError = OSError(f"{host} has no address")
    for number, (family, kind, protocol, _, place) in enumerate(found):
        left = due - time.monotonic()
        if left <= 0:
            break
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(left / (len(found) - number))
            made.connect(place)
        except OSError as error:
            made.close()
            fault = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise fault
