"""The same source against nginx: TLS, ranges, passwords, and a downgrade that is refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import blob_path
from kartifacts.sources.http import HttpSource
from tests.processes import free_ports

pytestmark = [
    pytest.mark.nginx,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="the nginx program is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed"),
]

Make = Callable[..., Settings]
CONTENT = bytes(range(256)) * 1500
SCRIPT = Path(__file__).parents[2] / "ci" / "stores" / "nginx"


@dataclass
class Nginx:
    port: int
    authority: Path
    log: Path


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    state, tree = tmp_path_factory.mktemp("nginx"), tmp_path_factory.mktemp("tree")
    blob = tree / blob_path(sha256(CONTENT))
    blob.parent.mkdir(parents=True)
    blob.write_bytes(CONTENT)
    port = free_ports(4)
    subprocess.run([SCRIPT, "start", state, tree, str(port)], check=True)
    yield Nginx(port, state / "ca.pem", state / "access.log")
    subprocess.run([SCRIPT, "stop", state], check=True)


def read(source: HttpSource, digest: Digest, size: int, **part: int) -> bytes:
    with source.read(digest, size, **part) as pieces:
        return b"".join(pieces)


def test_plain_http_with_ranges(nginx: Nginx, settings: Make, digest: Digest) -> None:
    source = HttpSource(f"http://127.0.0.1:{nginx.port}", settings())
    assert read(source, digest, len(CONTENT)) == CONTENT
    assert read(source, digest, len(CONTENT), start=1000, length=5000) == CONTENT[1000:6000]
    assert nginx.log.read_text().count('" 206 ') == 1
    with pytest.raises(SourceError) as caught:
        read(source, Digest("0" * 64), 5)
    assert caught.value.missing


AUTHORITIES = pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"])


@AUTHORITIES
def test_every_variable_that_names_an_authority_is_honoured(
    nginx: Nginx, settings: Make, digest: Digest, variable: str
) -> None:
    source = HttpSource(f"https://localhost:{nginx.port + 1}", settings(environ={variable: str(nginx.authority)}))
    assert read(source, digest, len(CONTENT), start=10, length=10) == CONTENT[10:20]


def test_an_unknown_authority_is_an_error_at_once_that_names_the_variable(
    nginx: Nginx, settings: Make, digest: Digest
) -> None:
    with pytest.raises(SourceError, match="certificate is not trusted") as caught:
        read(HttpSource(f"https://localhost:{nginx.port + 1}", settings()), digest, 10)
    assert caught.value.permanent
    assert "REQUESTS_CA_BUNDLE" in (caught.value.hint or "")


@AUTHORITIES
def test_an_authority_file_that_is_missing_is_a_typed_error(
    nginx: Nginx, settings: Make, digest: Digest, variable: str
) -> None:
    source = HttpSource(f"https://localhost:{nginx.port + 1}", settings(environ={variable: "/nonexistent"}))
    with pytest.raises(SourceError, match=rf"no answer.*{variable} names '/nonexistent'") as caught:
        read(source, digest, 10)
    assert caught.value.permanent


def test_a_redirect_from_https_to_http_is_refused(nginx: Nginx, settings: Make, digest: Digest) -> None:
    known = settings(environ={"REQUESTS_CA_BUNDLE": str(nginx.authority)})
    with pytest.raises(SourceError, match=r"redirects to 'http://127\.0\.0\.1.*refused"):
        read(HttpSource(f"https://localhost:{nginx.port + 3}", known), digest, 10)


def test_a_password_opens_what_needs_one(nginx: Nginx, settings: Make, digest: Digest) -> None:
    address = f"127.0.0.1:{nginx.port + 2}"
    assert read(HttpSource(f"http://kart:kartpass@{address}", settings()), digest, len(CONTENT)) == CONTENT
    with pytest.raises(SourceError, match="answered 401") as caught:
        read(HttpSource(f"http://kart:wrong@{address}", settings()), digest, len(CONTENT))
    assert "netrc" in (caught.value.hint or "")
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("changed", [False, True])
def test_a_restart_of_the_server_in_the_middle_of_a_body_is_survived(
    settings: Make, tmp_path: Path, changed: bool
) -> None:
    size = 192 << 20  # more than the kernel keeps for a client that does not read
    digest = Digest(hashlib.sha256(bytes(size)).hexdigest())
    state, blob = tmp_path / "state", tmp_path / "tree" / blob_path(digest)
    blob.parent.mkdir(parents=True)
    blob.touch()
    os.truncate(blob, size)
    port = free_ports(4)
    start, stop = (
        [str(SCRIPT), "start", str(state), str(tmp_path / "tree"), str(port)],
        [str(SCRIPT), "stop", str(state)],
    )
    subprocess.run(start, check=True)
    got, length = hashlib.sha256(), 0
    try:
        source = HttpSource(f"http://127.0.0.1:{port}", settings(connect_timeout=5.0, read_timeout=5.0))
        with source.read(digest, size) as pieces:
            for piece in pieces:
                if not length:
                    subprocess.run(stop, check=True)
                    if changed:
                        with blob.open("r+b") as file:
                            file.seek(-1, os.SEEK_END)
                            file.write(b"x")
                        os.utime(blob, (1, 1))
                    subprocess.run(start, check=True)
                got.update(piece)
                length += len(piece)
    finally:
        subprocess.run(stop, check=True)
    assert length == size
    (line,) = (state / "access.log").read_text().splitlines()  # the server that was stopped wrote none
    # By If-Range, another file is not taken for the rest of this one.
    assert ('" 200 ' if changed else '" 206 ') in line
    assert (got.hexdigest() == digest) == (not changed)
