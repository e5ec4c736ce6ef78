"""Real registries on the loopback, a token server that signs for them, and a relay that damages what passes."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.processes import free_ports
from tests.stores.conftest import require, run_script


@dataclass(frozen=True)
class Running:
    """A registry, and where it keeps its files."""

    port: int
    state: Path

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, repository: str, login: str = "") -> str:
        return f"oci+http://{f'{login}@' if login else ''}{self.host}/{repository}"

    def log(self) -> str:
        return (self.state / "registry.log").read_text(errors="replace")


@contextmanager
def registry(state: Path, *options: str, **environ: str) -> Iterator[Running]:
    require("docker-registry", "htpasswd", "curl")
    port = free_ports(1)
    try:
        run_script("registry", "start", state, port, *options, **environ)
        yield Running(port, state)
    finally:
        run_script("registry", "stop", state)


@contextmanager
def front(state: Path, behind: Running) -> Iterator[Running]:
    """nginx before a registry; see ci/stores/registry for its ports."""
    require("nginx", "openssl")
    port = free_ports(4)
    try:
        run_script("registry", "front", state, port, behind.state, behind.port)
        yield Running(port, state)
    finally:
        run_script("registry", "stop", state)


# -- tokens ------------------------------------------------------------------------------------------------------------


def _plain(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class TokenServer:
    """Gives tokens as the Docker token specification has it, to ``kart:kartpass`` for all, to others for pull."""

    certificate: Path
    life: int = 300
    asked: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)  # login, query
    url: str = ""

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")])
        now = datetime.now(timezone.utc)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        self._chain = [base64.b64encode(made.public_bytes(serialization.Encoding.DER)).decode()]

    def token(self, login: str, query: Mapping[str, list[str]]) -> str:
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.rsplit(":", 2) if scope.count(":") == 2 else ("", "", "")
            may = {"pull", "push", "delete"} if login == "kart:kartpass" else {"pull"}
            access.append({"type": kind, "name": name, "actions": sorted(may & set(actions.split(",")))})
        now = int(time.time())
        head = {"typ": "JWT", "alg": "ES256", "x5c": self._chain}
        claims = {
            "iss": "kart", "sub": login.partition(":")[0], "aud": "kart", "jti": os.urandom(8).hex(),
            "exp": now + self.life, "nbf": now - 60, "iat": now, "access": access,
        }  # fmt: skip
        signed = ".".join(_plain(json.dumps(part).encode()) for part in (head, claims))
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_plain(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


@contextmanager
def token_server(folder: Path) -> Iterator[TokenServer]:
    server = TokenServer(folder / "tokens.pem")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            scheme, _, value = self.headers.get("Authorization", "").partition(" ")
            login = base64.b64decode(value).decode() if scheme == "Basic" else ""
            query = parse_qs(urlsplit(self.path).query)
            server.asked.append((login, query))
            known = login in ("", "kart:kartpass", "reader:readerpass")
            answer = {"token": server.token(login, query), "expires_in": server.life} if known else {"details": "no"}
            body = json.dumps(answer).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with _serving(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/token"
        yield server


# -- a relay -----------------------------------------------------------------------------------------------------------


@dataclass
class Passing:
    """One request on its way: what a rule may look at and change."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    status: int = 0  # of the answer, once there is one
    answer: bytes = b""
    answer_headers: list[tuple[str, str]] = field(default_factory=list)
    cut: bool = False  # send half of the body on, and hang up
    cut_answer: bool = False  # send half of the answer back, and hang up


Rule = Callable[[Passing], None]
"""Is asked twice: before a request is sent on (status 0; setting it answers at once) and before its answer is."""


@dataclass
class Relay:
    port: int
    rules: list[Rule] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def url(self, repository: str) -> str:
        return f"oci+http://127.0.0.1:{self.port}/{repository}"


@contextmanager
def relay(behind: Running) -> Iterator[Relay]:
    """A proxy in front of a registry that does what its rules say."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            request = Passing(self.command, self.path, self.rfile.read(length), dict(self.headers))
            made.requests.append((request.method, request.path))
            for rule in made.rules:
                rule(request)
            if request.cut:
                self._send_half(request)
                return
            if request.status == 0:
                self._ask(request)
                for rule in made.rules:
                    rule(request)
            self.send_response(request.status)
            for name, value in request.answer_headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            announced = {name.lower(): value for name, value in request.answer_headers}.get("content-length")
            self.send_header(
                "Content-Length", announced if self.command == "HEAD" and announced else str(len(request.answer))
            )
            self.end_headers()
            self.wfile.write(request.answer[: len(request.answer) // 2] if request.cut_answer else request.answer)
            self.close_connection = self.close_connection or request.cut_answer

        do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = pass_on  # noqa: N815  http.server's names

        def _ask(self, request: Passing) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", behind.port, timeout=30)
            connection.request(request.method, request.path, request.body or None, request.headers)
            answer = connection.getresponse()
            request.status, request.answer, request.answer_headers = answer.status, answer.read(), answer.getheaders()
            connection.close()

        def _send_half(self, request: Passing) -> None:
            """As a link that breaks: the registry gets half of the body, the client no answer."""
            head = [f"{request.method} {request.path} HTTP/1.1", *(f"{n}: {v}" for n, v in request.headers.items())]
            with socket.create_connection(("127.0.0.1", behind.port)) as link:
                link.sendall("\r\n".join([*head, "", ""]).encode() + request.body[: len(request.body) // 2])
                time.sleep(0.1)  # so that it has been read when the link breaks
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with _serving(Handler) as port:
        made = Relay(port)
        yield made


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
