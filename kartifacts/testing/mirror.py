"""A real HTTP server over a repository directory, on 127.0.0.1, that keeps count and fails to order."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from kartifacts.testing.faults import Answer, Fault

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Request:
    """One request as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass
class _Order:
    fault: Fault
    match: str
    skip: int
    times: int | None


class Mirror:
    """Serves `directory` while it is open, with `tls` over https; see the package's docstring for how to use it.

    Attributes:
        requests: every request so far, in the order of arrival.
        connections: how many connections were accepted.
        most_at_once: the largest number of requests that were being answered at one time.
        tunnel_to: where CONNECT leads, for the use as a proxy.
        stopped: is set once it shuts down.
    """

    def __init__(self, directory: Path | str, *, prefix: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.directory = Path(directory)
        self.prefix = prefix
        self.tunnel_to = ("127.0.0.1", 9)
        self.requests: list[Request] = []
        self.connections = 0
        self.most_at_once = 0
        self._running = 0
        self._orders: list[_Order] = []
        self._guard = threading.Lock()
        self.stopped = threading.Event()
        self._tls = tls
        self._server = _Server(self, tls)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Mirror:  # noqa: PYI034  Self is not in typing before Python 3.11
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}{self.prefix}"

    def order(self, fault: Fault, *, match: str = "", skip: int = 0, times: int | None = None) -> None:
        """Have a fault on requests whose path contains `match`, after `skip` of them, `times` times or for ever."""
        with self._guard:
            self._orders.append(_Order(fault, match, skip, times))

    def cancel(self) -> None:
        """Forget all orders."""
        with self._guard:
            self._orders.clear()

    def disconnect(self) -> None:
        """Close every connection, as a server does that has waited long enough for the next request."""
        self._server.disconnect()

    def count(self, match: str = "") -> int:
        """How many requests had a path that contains `match`."""
        return sum(match in request.path for request in self.requests)

    def _next_fault(self, path: str) -> Fault | None:
        for order in self._orders:
            if order.match not in path or order.times == 0:
                continue
            if order.skip:
                order.skip -= 1
                continue
            if order.times is not None:
                order.times -= 1
            return order.fault
        return None

    # -- for the server ----------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Fault | None:
        """Count a request; gives the fault that its answer shall have."""
        with self._guard:
            self.requests.append(request)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            return self._next_fault(request.path)

    def end(self) -> None:
        """A request was answered."""
        with self._guard:
            self._running -= 1

    def answer(self, request: Request) -> Answer:
        """The right answer to a request."""
        path = unquote(urlsplit(request.path).path)
        file = self.directory / path.removeprefix(self.prefix).lstrip("/")
        if not path.startswith(self.prefix) or ".." in path or not file.is_file():
            return Answer(404, {"Content-Length": "5"}, [b"none\n"], b"", request.range, stopped=self.stopped)
        content = file.read_bytes()
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(content)),
            "ETag": f'"{len(content):x}-{file.stat().st_mtime_ns:x}"',
            "Accept-Ranges": "bytes",
            "X-Path": request.path,
        }
        answer = Answer(200, headers, [content], content, request.range, stopped=self.stopped)
        condition = request.headers.get("if-range", headers["ETag"])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range)
        if asked and condition == headers["ETag"]:
            first, last = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
            if first >= len(content):
                answer.status = 416
                headers["Content-Range"] = f"bytes */{len(content)}"
                answer.replace(b"")
            else:
                answer.status = 206
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                answer.replace(content[first : last + 1])
        return answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, mirror: Mirror, tls: ssl.SSLContext | None) -> None:
        self.mirror = mirror
        self._tls = tls
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, peer = super().get_request()
        if self._tls is not None:  # the handshake is left to the connection's own thread
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def connected(self, connection: socket.socket) -> None:
        with self._guard:
            self.mirror.connections += 1
            self._open.add(connection)

    def disconnected(self, connection: socket.socket) -> None:
        with self._guard:
            self._open.discard(connection)

    def shutdown_request(self, request: Any) -> None:
        # The usual farewell would come before the reset that `SO_LINGER` makes of closing.
        if request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == _RESET_ON_CLOSE:
            self.close_request(request)
        else:
            super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        self.disconnect()

    def disconnect(self) -> None:
        with self._guard:
            still_open = list(self._open)
        for connection in still_open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the next request

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that goes away is no news
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connected(self.connection)

    def finish(self) -> None:
        self.server.disconnected(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_CONNECT(self) -> None:
        """Carry bytes to and from `Mirror.tunnel_to`, whatever host was asked for; an order can prevent it."""
        mirror = self.server.mirror
        request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        fault = mirror.begin(request)
        self.close_connection = True
        try:
            if fault is None:
                self.send_response(200)
                self.end_headers()
                _carry(self.connection, mirror.tunnel_to)
            else:
                answer = Answer(200, {"Content-Length": "0"}, [], b"", "", stopped=mirror.stopped)
                fault(answer)
                self._send(answer)
        finally:
            mirror.end()

    def _serve(self) -> None:
        mirror = self.server.mirror
        request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        fault = mirror.begin(request)
        try:
            answer = mirror.answer(request)
            if fault is not None:
                fault(answer)
            self._send(answer)
        finally:
            mirror.end()

    def _send(self, answer: Answer) -> None:
        answer.before()
        if answer.raw is not None:
            self.close_connection = True
            for piece in answer.raw:
                self.wfile.write(piece)
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        for name, value in answer.more:
            self.send_header(name, value)
        in_chunks = "Content-Length" not in answer.headers
        if in_chunks:
            self.send_header("Transfer-Encoding", "chunked")
        if answer.after != "keep":
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD":
            return
        for piece in answer.body:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if in_chunks else piece)
            self.wfile.flush()
        if in_chunks:
            self.wfile.write(b"0\r\n\r\n")
        if answer.after == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Tests read `Mirror.requests` instead."""


def _carry(client: socket.socket, target: tuple[str, int]) -> None:
    """Bytes both ways until one side has had enough."""
    with socket.create_connection(target, timeout=5) as server:
        other = {client: server, server: client}
        while True:
            for side in select.select(list(other), [], [], 5)[0]:
                piece = side.recv(65536)
                if not piece:
                    return
                other[side].sendall(piece)
