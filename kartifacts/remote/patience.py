"""Bounds what urllib3, and boto3 on it, wait for and read: an answer that trickles or has no end is an error.

Their own timeouts are for each single byte.  Here all that an answer is waited for may take no longer than that timeout
and the time in which the slowest honest line would have brought what has come.
"""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from kartifacts.config import Settings
from kartifacts.remote.addresses import Address
from kartifacts.remote.authorities import tls_context
from kartifacts.remote.logins import basic

if TYPE_CHECKING:
    import socket

    from urllib3 import PoolManager

RATE = 4096  # bytes per second
_SECONDS = 60.0  # where there is no timeout
_MARGIN = 1 << 20  # bytes of headers, chunk sizes and what errors say

_most: ContextVar[int | None] = ContextVar("_most", default=None)


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Let answers to what is asked inside have no more bytes, about; there is no bound elsewhere."""
    token = _most.set(2 * limit + _MARGIN)
    try:
        yield
    finally:
        _most.reset(token)


def patient_manager(proxy: Address | None, settings: Settings, *, connections: int) -> PoolManager:
    """Connections, by a proxy if there is one, that have patience, but not for ever."""
    import urllib3

    options: dict[str, Any] = {
        "timeout": urllib3.Timeout(connect=settings.connect_timeout, read=settings.read_timeout),
        "ssl_context": tls_context(settings),
        "maxsize": connections,
    }
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        login = {"Proxy-Authorization": basic(proxy.login)} if proxy.login else {}
        manager = urllib3.ProxyManager(proxy.url, proxy_headers=login, **options)
    manager.pool_classes_by_scheme = patient_pools(manager.pool_classes_by_scheme)
    return manager


def patient_pools(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """For each scheme, a class of urllib3's pools whose connections have patience."""
    return {scheme: _patient(kind) for scheme, kind in kinds.items()}


@lru_cache
def _patient(kind: type[Any]) -> type[Any]:
    connection = type(kind.ConnectionCls.__name__, (_Connection, kind.ConnectionCls), {})
    return type(kind.__name__, (kind,), {"ConnectionCls": connection})


class _Connection:
    """Goes before a class of connections."""

    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]  # of whatever class comes after this one
        self.sock = _Socket(self.sock)


class _Socket:
    """A socket whose files are read with patience."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makefile(self, mode: str = "r", buffering: int = io.DEFAULT_BUFFER_SIZE, **_: object) -> io.IOBase:
        received = _Received(self._inner, self._inner.makefile("rb", buffering=0))
        assert "r" in mode, "only answers are read as files"
        return received if buffering == 0 else io.BufferedReader(received, max(buffering, io.DEFAULT_BUFFER_SIZE))


class _Received(io.RawIOBase):
    """The bytes of one answer."""

    def __init__(self, source: socket.socket, file: object) -> None:
        self._socket = source
        self._file = cast("io.RawIOBase", file)  # keeps the socket open after its connection is done with it
        self._timeout = source.gettimeout() or _SECONDS
        self._waited = 0.0
        self._received = 0
        self._most = _most.get()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        left = self._timeout + self._received / RATE - self._waited
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(min(left, self._timeout))
        start = time.monotonic()
        try:
            count = self._file.readinto(buffer)
        finally:
            self._waited += time.monotonic() - start
        self._received += count or 0
        if self._most is not None and self._received > self._most:
            raise http.client.HTTPException(f"more than {self._most} bytes came")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
