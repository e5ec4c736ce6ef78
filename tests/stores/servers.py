"""Small servers on the loopback that tests look into: one that takes PUT, and a relay that loses what it is told to."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PutServer(ThreadingHTTPServer):
    """Takes PUT with conditions as RFC 9110 has them, and keeps all in memory; `broken` says which promise it breaks.

    overwrites: conditions are ignored; swaps: If-Match is; refuses: If-Match never holds; ignorant: 501 to conditions;
    forgets: what is read is what was written before.
    """

    daemon_threads = True

    def __init__(self, broken: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.broken = broken
        self.objects: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.guard = threading.Lock()
        self.fail: list[int] = []  # statuses of the next answers to PUT, which do take effect if they are negative
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/repository"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PutServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        content = self.server.objects.get(self.path)
        if content is None:
            self._answer(404)
        else:
            self._answer(200, content, ETag=_etag(content))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        server.log.append(f"PUT {self.path}")
        with server.guard:
            status = server.fail.pop(0) if server.fail else 0
            if status <= 0:
                refused = self._refused(server.objects.get(self.path))
                if refused:
                    return self._answer(refused)
                server.objects.setdefault(self.path, content)
                if server.broken != "forgets":
                    server.objects[self.path] = content
                server.headers[self.path] = dict(self.headers.items())
        return self._answer(abs(status) or 201)

    def do_DELETE(self) -> None:
        self._answer(404 if self.server.objects.pop(self.path, None) is None else 204)

    def _refused(self, present: bytes | None) -> int:
        broken = self.server.broken
        create, match = self.headers["If-None-Match"], self.headers["If-Match"]
        if broken == "ignorant" and (create or match):
            return 501
        if create and present is not None and broken not in ("overwrites", "forgets"):
            return 412
        if match and broken == "refuses":
            return 412
        if match and (present is None or match != _etag(present)) and broken not in ("overwrites", "swaps"):
            return 412
        return 0

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def put_server(broken: str = "") -> Iterator[PutServer]:
    server = PutServer(broken)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Relay:
    """Carries connections to a server on the loopback.

    Of requests that begin with one of `lose_answers`, the answer is lost: they reach the server, which does what they
    say, and then the connection ends.  Those that begin with one of `lose_requests` never reach it.  Each is lost once.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.lose_answers: list[bytes] = []
        self.lose_requests: list[bytes] = []
        self.requests: list[bytes] = []  # first lines
        self._guard = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            asked: list[bytes] = [b""]
            for pump in (self._requests, self._answers):
                threading.Thread(target=pump, args=(client, server, asked), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, asked: list[bytes]) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if data[:8].split(b" ")[0] in (b"GET", b"PUT", b"POST", b"HEAD", b"DELETE"):
                    asked[0] = data
                    self.requests.append(data.split(b"\r\n")[0])
                    if self._is_lost(self.lose_requests, data):
                        break
                server.sendall(data)
        _end(client, server)

    def _answers(self, client: socket.socket, server: socket.socket, asked: list[bytes]) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                # "100 Continue" says no more than that the rest may come.
                if not data.startswith(b"HTTP/1.1 100") and self._is_lost(self.lose_answers, asked[0]):
                    break
                client.sendall(data)
        _end(client, server)

    def _is_lost(self, which: list[bytes], data: bytes) -> bool:
        with self._guard:
            for begin in which:
                if data.startswith(begin):
                    which.remove(begin)
                    return True
        return False


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
