"""Proxies and authorities as the environment names them, with a real proxy in between."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.model.digest import Digest
from kartifacts.remote.addresses import parse, proxy_for
from kartifacts.sources.http import HttpSource
from kartifacts.testing import Mirror, faults

Make = Callable[..., Settings]
PROXY = "http://proxy.example:3128"


def read(source: HttpSource, digest: Digest, size: int) -> bytes:
    with source.read(digest, size) as pieces:
        return b"".join(pieces)


@pytest.mark.parametrize(
    ("url", "environ", "direct"),
    [
        ("http://host.example/", {"http_proxy": PROXY}, False),
        ("http://host.example/", {"HTTP_PROXY": PROXY}, False),
        ("http://host.example/", {"HTTP_PROXY": "proxy.example:3128"}, False),
        ("http://host.example/", {"HTTP_PROXY": PROXY, "http_proxy": ""}, True),
        ("http://host.example/", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, True),
        ("http://host.example/", {"https_proxy": PROXY}, True),
        ("https://host.example/", {"https_proxy": PROXY}, False),
        ("https://host.example/", {"HTTPS_PROXY": PROXY}, False),
        ("https://host.example/", {"http_proxy": PROXY}, True),
        ("https://host.example/", {"ALL_PROXY": PROXY}, False),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "*"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "host.example"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "NO_PROXY": "other, HOST.example"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": ".example"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "*.example"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "example"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "ost.example"}, False),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "host.example:80"}, True),
        ("http://host.example/", {"http_proxy": PROXY, "no_proxy": "host.example:8080"}, False),
        ("http://10.1.2.3/", {"http_proxy": PROXY, "no_proxy": "10.0.0.0/8"}, True),
        ("http://11.1.2.3/", {"http_proxy": PROXY, "no_proxy": "10.0.0.0/8"}, False),
        ("http://10.1.2.3/", {"http_proxy": PROXY, "no_proxy": "10.1.2.3"}, True),
        ("http://[fd00::1]/", {"http_proxy": PROXY, "no_proxy": "fd00::/8"}, True),
        ("http://[fd00::1]/", {"http_proxy": PROXY, "no_proxy": "[fd00::1]"}, True),
        ("http://127.0.0.1/", {"http_proxy": PROXY}, True),
        ("http://127.9.9.9/", {"http_proxy": PROXY}, True),
        ("http://localhost/", {"http_proxy": PROXY}, True),
        ("http://a.localhost/", {"http_proxy": PROXY}, True),
        ("https://[::1]/", {"all_proxy": PROXY}, True),
        ("http://127.0.0.1/", {"http_proxy": "http://127.0.0.1:3128"}, False),
        ("http://127.0.0.1/", {"http_proxy": "http://localhost:3128", "no_proxy": "127.0.0.1"}, True),
    ],
)
def test_who_is_asked_by_a_proxy(settings: Make, url: str, environ: dict[str, str], direct: bool) -> None:
    assert (proxy_for(parse(url), settings(environ=environ)) is None) == direct


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "http://", "http://a b:1", "http://127.0.0.1:99999"])
def test_a_proxy_that_cannot_be_used_is_named(settings: Make, digest: Digest, proxy: str) -> None:
    source = HttpSource("http://mirror.invalid", settings(environ={"ALL_PROXY": proxy}))
    with pytest.raises(SourceError, match="cannot be used") as caught:
        read(source, digest, 10)
    assert caught.value.permanent
    assert "HTTPS_PROXY" in (caught.value.hint or "")


def test_plain_http_goes_by_the_proxy_and_a_password_in_it_to_nobody_else(
    mirror: Mirror, settings: Make, digest: Digest, content: bytes
) -> None:
    proxy = mirror.url.replace("//", "//me:hunter2@")
    for number in range(2):
        source = HttpSource(f"http://mirror{number}.invalid/a", settings(environ={"http_proxy": proxy}))
        with pytest.raises(SourceError) as caught:
            read(source, digest, len(content))
        assert caught.value.missing  # this proxy holds nothing of that name
        assert mirror.requests[-1].path == f"http://mirror{number}.invalid/a/blobs/sha256/{digest}"
        assert mirror.requests[-1].headers["host"] == f"mirror{number}.invalid"
        assert mirror.requests[-1].headers["proxy-authorization"].startswith("Basic ")
        assert "authorization" not in mirror.requests[-1].headers
        assert "hunter2" not in str(caught.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program is not installed")
    path = tmp_path_factory.mktemp("tls") / "mirror.pem"
    subject = ["-subj", "/CN=mirror.invalid", "-addext", "subjectAltName=DNS:mirror.invalid,DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*new, *subject, "-keyout", path, "-out", path.with_suffix(".crt")], check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
def encrypted(repository: Path, certificate: Path) -> Iterator[Mirror]:
    """A mirror that speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Mirror(repository, tls=context) as running:
        yield running


@pytest.fixture
def proxy(tmp_path: Path, encrypted: Mirror) -> Iterator[Mirror]:
    with Mirror(tmp_path) as running:
        running.tunnel_to = ("127.0.0.1", encrypted.port)
        yield running


@pytest.fixture
def environ(proxy: Mirror, certificate: Path) -> dict[str, str]:
    return {"https_proxy": proxy.url.replace("//", "//me:hunter2@"), "SSL_CERT_FILE": str(certificate)}


def test_https_goes_through_the_proxy_and_is_checked_at_the_other_end(
    proxy: Mirror, encrypted: Mirror, settings: Make, environ: dict[str, str], digest: Digest, content: bytes
) -> None:
    source = HttpSource("https://mirror.invalid", settings(environ=environ))
    for _ in range(2):
        assert read(source, digest, len(content)) == content
    (request,) = proxy.requests  # one tunnel for both
    assert (request.method, request.path) == ("CONNECT", "mirror.invalid:443")
    assert request.headers["proxy-authorization"].startswith("Basic ")
    assert len(encrypted.requests) == 2
    assert not {"proxy-authorization", "authorization"} & set(encrypted.requests[0].headers)
    with pytest.raises(SourceError, match="certificate is not trusted"):
        read(HttpSource("https://other.invalid", settings(environ=environ)), digest, len(content))


def test_a_proxy_that_speaks_tls_carries_plain_http_and_says_that_it_cannot_carry_https(
    encrypted: Mirror, settings: Make, certificate: Path, digest: Digest, content: bytes
) -> None:
    by_tls = {"ALL_PROXY": f"https://localhost:{encrypted.port}", "SSL_CERT_FILE": str(certificate)}
    assert read(HttpSource("http://mirror.invalid", settings(environ=by_tls)), digest, len(content)) == content
    assert encrypted.requests[0].path == f"http://mirror.invalid/blobs/sha256/{digest}"
    with pytest.raises(SourceError, match="cannot carry https"):
        read(HttpSource("https://mirror.invalid", settings(environ=by_tls)), digest, len(content))


def test_an_exempt_host_is_asked_directly(
    proxy: Mirror, encrypted: Mirror, settings: Make, environ: dict[str, str], digest: Digest, content: bytes
) -> None:
    url = f"https://localhost:{encrypted.port}"
    assert read(HttpSource(url, settings(environ={**environ, "NO_PROXY": "localhost"})), digest, 384_000) == content
    assert not proxy.requests


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.status(407), "the proxy answered 407"),
        (faults.status(403), "the proxy answered 403"),
        (faults.status(502), "the proxy answered 502"),
        (faults.raw(), "the proxy http://127.0.0.1"),
        (faults.raw(b"nonsense\r\n"), "the proxy http://127.0.0.1"),
        (faults.silent(), "no connection in time"),
        (faults.endless_headers(), "the proxy http://127.0.0.1"),
        (faults.raw(b"HTTP/1.1 200 OK\r\n\r\n"), "no answer from https://mirror.invalid"),
        (faults.raw(b"HTTP/1.1 200 OK\r\n\r\n", b"no TLS at all"), "no answer from https://mirror.invalid"),
    ],
)
def test_a_proxy_that_fails_is_named_in_time(
    proxy: Mirror, settings: Make, environ: dict[str, str], digest: Digest, fault: faults.Fault, message: str
) -> None:
    proxy.order(fault)
    started = time.monotonic()
    with pytest.raises(SourceError, match=message) as caught:
        read(HttpSource("https://mirror.invalid", settings(environ=environ)), digest, 10)
    assert time.monotonic() - started < 5
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("dead", ["dead_host", "refusing_host"])
def test_a_proxy_that_is_gone_is_named(
    request: pytest.FixtureRequest, settings: Make, digest: Digest, dead: str
) -> None:
    proxy = request.getfixturevalue(dead)
    source = HttpSource("http://mirror.invalid", settings(environ={"http_proxy": proxy}))
    with pytest.raises(SourceError, match=f"the proxy {proxy}.* failed") as caught:
        read(source, digest, 10)
    assert "HTTP_PROXY" in (caught.value.hint or "")


def test_a_wrong_authority_is_an_error_in_time_that_names_the_variable_and_is_not_tried_again(
    encrypted: Mirror, settings: Make, digest: Digest, tmp_path: Path
) -> None:
    url = f"https://localhost:{encrypted.port}"
    (tmp_path / "empty.pem").write_text("")
    for environ, hint in (({}, "SSL_CERT_FILE"), ({"SSL_CERT_FILE": str(tmp_path / "empty.pem")}, "SSL_CERT_FILE")):
        source = HttpSource(url, settings(environ=environ))
        started = time.monotonic()
        with pytest.raises(SourceError) as caught:
            read(source, digest, 10)
        assert time.monotonic() - started < 5
        assert caught.value.permanent
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_wrong_protocol_is_a_typed_error(
    mirror: Mirror, encrypted: Mirror, settings: Make, digest: Digest, scheme: str
) -> None:
    port = mirror.port if scheme == "https" else encrypted.port
    with pytest.raises(SourceError, match="no answer from"):
        read(HttpSource(f"{scheme}://localhost:{port}", settings()), digest, 10)


def test_a_host_that_accepts_connections_and_never_speaks_tls_costs_one_connect_timeout(
    settings: Make, digest: Digest
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = HttpSource(f"https://127.0.0.1:{listener.getsockname()[1]}", settings(connect_timeout=0.5))
        started = time.monotonic()
        with pytest.raises(SourceError, match="no connection in time"):
            read(source, digest, 10)
        assert time.monotonic() - started < 3
