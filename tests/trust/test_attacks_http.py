"""What somebody on the way to a mirror, or the mirror itself, can do to the transfer of metadata."""

from __future__ import annotations

import contextlib
import gzip
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.errors import SourceError, VerificationError
from kartifacts.sources.http import HttpSource
from kartifacts.testing import Mirror, faults
from kartifacts.trust.client import Trusted, refresh
from tests.trust.simulator import Publisher

Ask = Callable[..., Trusted]


@pytest.fixture
def mirror(publisher: Publisher) -> Iterator[Mirror]:
    with Mirror(publisher.path) as running:
        yield running


@pytest.fixture
def ask(publisher: Publisher, tmp_path: Path) -> Ask:
    def ask(mirror: Mirror, *, patience: float = 5.0, **environ: str) -> Trusted:
        overrides = {"connect_timeout": 2.0, "read_timeout": patience, "retries": 0}
        source = HttpSource(mirror.url, config.read({"HOME": str(tmp_path), **environ}, overrides))
        return refresh(publisher.trust, None, source.document)

    return ask


def test_metadata_comes_over_http_as_from_a_directory(publisher: Publisher, mirror: Mirror, ask: Ask) -> None:
    publisher.next_root()
    assert ask(mirror) == refresh(publisher.trust, None, publisher.read)
    assert mirror.connections == 1


def test_a_plus_sign_in_a_name_is_one_to_every_server(tmp_path: Path, ask: Ask) -> None:
    other = Publisher(tmp_path / "plus", "c++17")
    other.release("c++17", "1.0+cu130")
    with Mirror(other.path) as mirror:
        source = HttpSource(mirror.url, config.read({"HOME": str(tmp_path)}))
        assert refresh(other.trust, None, source.document).libraries["c++17"].releases
        assert not any("+" in request.path for request in mirror.requests)


@pytest.mark.parametrize("code", [403, 404, 410])
def test_a_root_that_is_not_there_ends_the_chain(publisher: Publisher, mirror: Mirror, ask: Ask, code: int) -> None:
    """403 is what a bucket says of a missing file to who may not list it."""
    publisher.next_root()
    mirror.order(faults.status(code), match="3.root.json")
    assert ask(mirror).seen.root == 2


@pytest.mark.parametrize("code", [401, 429, 500, 503])
def test_a_root_that_cannot_be_asked_for_is_not_taken_for_missing(mirror: Mirror, ask: Ask, code: int) -> None:
    mirror.order(faults.status(code), match="2.root.json")
    with pytest.raises(SourceError, match=str(code)):
        ask(mirror)


@pytest.mark.parametrize("code", [403, 404, 500])
@pytest.mark.parametrize("name", ["timestamp.json", "snapshot.json", "targets.json", "kernels.json"])
def test_anything_else_that_is_not_there_is_an_error(mirror: Mirror, ask: Ask, name: str, code: int) -> None:
    mirror.order(faults.status(code), match=name)
    with pytest.raises(SourceError, match=str(code)):
        ask(mirror)


FAULTS = {
    "endless": faults.endless(),
    "drip": faults.drip(1, 0.05),
    "stall": faults.stall(10),
    "silent": faults.silent(),
    "cut off": faults.truncate(40),
    "reset": faults.reset(40),
    "a page": faults.html(),
    "compressed": faults.gzip(),
    "claims to be compressed": faults.encoded("br"),
    "longer": faults.wrong_length(100_000),
    "endless headers": faults.endless_headers(),
    "slow headers": faults.slow_headers(0.05),
    "endless interim answers": faults.endless_interim(),
    "to a file": faults.redirect("file:///etc/passwd"),
    "to itself": faults.redirect("{path}"),
    "no content": faults.empty(204),
    "not modified": faults.empty(304),
}


@pytest.mark.parametrize("name", ["2.root.json", "timestamp.json", "kernels.json"])
@pytest.mark.parametrize("kind", FAULTS)
def test_no_transfer_is_endless_or_believed(mirror: Mirror, ask: Ask, kind: str, name: str) -> None:
    mirror.order(FAULTS[kind], match=name)
    if name == "2.root.json":  # where there is one, as there would be in this attack
        (mirror.directory / "metadata/2.root.json").write_bytes(b"{}" * 200)
    begun = time.monotonic()
    with pytest.raises((SourceError, VerificationError)):
        ask(mirror, patience=0.3)
    assert time.monotonic() - begun < 20  # it ends, which is all that is asked of it


def test_a_bomb_is_not_unpacked(publisher: Publisher, mirror: Mirror, ask: Ask) -> None:
    publisher.put("timestamp.json", gzip.compress(bytes(50 << 20)))
    mirror.order(faults.header("Content-Encoding", "gzip"), match="timestamp")
    with pytest.raises(SourceError, match=r"compressed|larger"):
        ask(mirror)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "127.0.0.1.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=t"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt"
    subprocess.run(command.split(), check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


def test_who_was_asked_by_https_does_not_lead_to_http(
    publisher: Publisher, mirror: Mirror, ask: Ask, certificate: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Mirror(publisher.path, tls=context) as secure:
        trusted = ask(secure, SSL_CERT_FILE=f"{certificate}.crt")
        assert trusted == ask(mirror)
        secure.order(faults.redirect(mirror.url + "{path}"), match="timestamp.json")
        before = mirror.count()
        with pytest.raises(SourceError, match="not encrypted"):
            ask(secure, SSL_CERT_FILE=f"{certificate}.crt")
        assert mirror.count() == before
        with pytest.raises(SourceError, match="not trusted"):
            ask(secure)


def test_redirects_within_reason_are_followed(publisher: Publisher, mirror: Mirror, ask: Ask) -> None:
    with Mirror(publisher.path) as other:
        mirror.order(faults.redirect(other.url + "{path}"), match="timestamp.json")
        assert ask(mirror) == refresh(publisher.trust, None, publisher.read)


def test_no_variable_of_others_leads_tuf_elsewhere(publisher: Publisher, mirror: Mirror, tmp_path: Path) -> None:
    """The proxies in force are those of the settings: here none, whatever the process itself has."""
    root = tmp_path / "root.json"
    root.write_bytes(publisher.trust)
    code = (
        "import sys; from pathlib import Path; from kartifacts import config\n"
        "from kartifacts.sources.http import HttpSource; from kartifacts.trust.client import refresh\n"
        "source = HttpSource(sys.argv[1], config.read({'HOME': sys.argv[2]}))\n"
        "print(refresh(Path(sys.argv[2], 'root.json').read_bytes(), None, source.document).seen.root)"
    )
    environ = {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, mirror.url, str(tmp_path)], env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 302 Found\r\nLocation: /metadata/1.root.json\r\n", b"HTTP/1.1 404 Gone\r\n"]
)
def test_the_rest_of_an_answer_that_is_of_no_use_is_not_waited_for(mirror: Mirror, ask: Ask, head: bytes) -> None:
    """Byte by byte, each soon enough, it would take hours."""
    pieces = [head + b"Content-Length: 60000\r\n\r\n", *([b"x"] * 150)]
    mirror.order(faults.raw(*pieces, pause=0.1), match="2.root.json")
    begun = time.monotonic()
    with contextlib.suppress(SourceError, VerificationError):
        ask(mirror)
    assert time.monotonic() - begun < 10
