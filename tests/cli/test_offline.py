"""KARTIFACTS_OFFLINE: whatever is typed, no socket is opened; directories are all that is needed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3  # noqa: F401  importing it makes a socket, to see whether there is IPv6
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kartifacts.errors import ArtifactUnavailable, ConfigError
from kartifacts.model.digest import sha256
from kartifacts.publish.lockfile import add_pins
from kartifacts.publish.repository import Repository
from kartifacts.testing import Mirror, tiny_repository
from tests.cli.test_commands import COMMANDS
from tests.conftest import Answer, Machine

KINDS = [
    "http://127.0.0.1:{port}/x",
    "https://localhost:{port}/x",
    "s3://kernels/x?endpoint=http://127.0.0.1:{port}",
    "oci://localhost:{port}/x",
    "oci+http://127.0.0.1:{port}/x",
]

Commands = dict[tuple[str, ...], str]

# Command → what is typed after it: PLACE stands for what needs a socket, other words in capitals for paths.
BUCKETS: Commands = {
    ("publish",): "PLACE --from BUILT --keys RING --single-writer",
    ("promote",): "PLACE mylib 1.0 --channel stable --keys RING --single-writer",
    ("retire",): "PLACE mylib 1.0 --keys RING --single-writer",
    ("retain",): "PLACE --keys RING",
    ("keys", "publish"): "PLACE --keys RING --single-writer",
    ("timestamp", "refresh"): "PLACE --keys RING --single-writer",
    ("mirror", "pull"): "BUCKET PLACE --root ROOT --single-writer",
    ("mirror", "import"): "CARRIED PLACE --root ROOT --single-writer",
    ("mirror", "verify"): "PLACE --root ROOT",
    ("mirror", "list"): "PLACE",
    ("mirror", "export"): "PLACE NEW --root ROOT",
    ("build",): "--plan PLAN --build cpu --shard 1/1 --out PLACE",
    ("merge",): "--plan PLAN --from PLACE --out NEW",
}
SOURCES: Commands = {("mirror", "pull"): "PLACE dir:NEW --root ROOT"}
MIRRORS: Commands = {("fetch",): "", ("sync",): "--root ROOT --lock NEW", ("wheel",): "--out NEW"}
NEVER: Commands = {  # they answer whatever mirrors are named
    ("status",): "",
    ("list",): "",
    ("gc",): "--dry-run --max-bytes 1GiB",
    ("explain",): "norm/rmsnorm dtype=float32",
    ("verify",): "BUCKET",
    ("lock",): "BUCKET --out NEW",
    ("index",): "WHEELS",
    ("config",): "",
    ("doctor",): "",
    ("keys", "show"): "RING",
    ("keys", "root"): "RING",
    ("keys", "init"): "NEW --library mylib",
    ("keys", "renew"): "RING targets",
    ("keys", "rotate"): "RING timestamp",
    ("keys", "add-library"): "RING third",
    ("keys", "remove-library"): "RING mylib",
    ("keys", "export"): "RING NEW --roles other",
    ("keys", "sign"): "ROOT --keys RING",
    ("import", "checksums"): "TREE --out NEW --library mylib --release-version 1.0",
    ("build",): "--ops activation --archs cpu:x86-64-v3 --out NEW",
    ("plan",): "PLAN --check",
    ("coverage",): "KERNEL",
    ("gate",): "GATED --plan PLAN",
    ("inspect",): "KERNEL",
    ("diff",): "BUILT BUILT",
    ("explain-key",): "norm/rmsnorm dtype=float32 --arch cpu:x86-64-v3",
}
PLAN = """
schema = 2
library = "kartifacts"
[[build]]
name = "cpu"
machine = "x86_64"
archs = ["cpu:x86-64-v3"]
ops = ["activation"]
"""
_seen: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event.startswith("socket.") and event != "socket.gethostname":
        _seen.append(f"{event} {arguments[1:]}")


sys.addaudithook(_audit)


@contextmanager
def sockets() -> Iterator[list[str]]:
    """What is done to sockets meanwhile, by any thread of this process."""
    global _seen
    found = _seen = []
    try:
        yield found
    finally:
        _seen = None


class Scene:
    """A publisher's plan, shard, keyring, bucket and archive, and a reader's lock, in one directory."""

    def __init__(self, base: Path) -> None:
        self.base, self.machine = base, Machine(base / "home")

    def ask(self, *words: str, **settings: object) -> Answer:
        return self.machine.cli(*map(self._placed, words), **{"lock": self.base / "LOCK", **settings})

    def _placed(self, word: str) -> str:
        scheme, colon, name = word.rpartition(":")
        return f"{scheme}{colon}{self.base / name}" if name.isupper() else word


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scene = Scene(tmp_path_factory.mktemp("offline"))
    (scene.base / "TREE" / "c").mkdir(parents=True)
    (scene.base / "TREE" / "c" / "checksums.txt").write_text(f"{sha256(b'kernel')}  a.bin\n")
    (scene.base / "TREE" / "c" / "a.bin").write_bytes(b"kernel")
    (scene.base / "PLAN").write_text(PLAN)
    tiny_repository(scene.base / "BUILT", {"norm/x?dtype=half": b"bytes"}, library="mylib", version="1.0")
    for line in (
        "keys init RING --library mylib --library other",
        "keys root RING --out ROOT",
        "publish dir:BUCKET --from BUILT --keys RING --channel stable",
        "wheel --from BUILT --out WHEELS",
        "mirror export BUCKET CARRIED --root ROOT",
        "build --plan PLAN --build cpu --shard 1/1 --out BUCKET",
        "merge --plan PLAN --from BUCKET --out GATED",
    ):
        answer = scene.ask(*line.split())
        assert answer.code == 0, f"{line}: {answer.err}"
    shutil.copy(next(scene.machine.settings().workspace.rglob("*.so")), scene.base / "KERNEL")
    add_pins(scene.base / "LOCK", Repository(scene.base / "BUCKET").pins())
    return scene.base


@pytest.fixture
def scene(made: Path, tmp_path: Path) -> Scene:
    return Scene(Path(shutil.copytree(made, tmp_path / "scene")))


def typed(place: str, *tables: Commands) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each command, and all that is typed; what is new is not what another has made."""
    for number, (command, rest) in enumerate(pair for table in tables for pair in table.items()):
        names = {"PLACE": place.format(number=number), "NEW": f"NEW{'X' * number}", "dir:NEW": f"dir:NEW{'X' * number}"}
        yield command, [*command, *(names.get(word, word) for word in rest.split())]


def test_every_command_is_tried() -> None:
    tried = {*BUCKETS, *SOURCES, *MIRRORS, *NEVER, ("demo",)}  # the demo is a mirror itself, and heeds no settings
    assert tried == set(COMMANDS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_a_socket_is_refused_before_there_is_one(scene: Scene, kind: str) -> None:
    with Mirror(scene.base / "BUCKET") as mirror:
        place = kind.format(port=mirror.port)
        for command, words in typed(place, BUCKETS, SOURCES, MIRRORS):
            with sockets() as seen:
                answer = scene.ask(*words, mirrors=place, offline=1)
            assert seen == [], command
            assert answer.code in (ConfigError.exit_code, ArtifactUnavailable.exit_code), f"{command}: {answer.err}"
            assert "offline" in answer.err.lower(), f"{command}: {answer.err}"
        assert mirror.count() == 0


def test_what_needs_no_socket_goes_on_and_opens_none(scene: Scene) -> None:
    mirrors = " ".join(kind.format(port=9) for kind in KINDS)
    assert scene.ask("fetch", mirrors=f"file://{scene.base / 'BUCKET'}").code == 0
    for command, words in typed("", NEVER):
        with sockets() as seen:
            answer = scene.ask(*words, mirrors=mirrors, offline=1)
        assert seen == [], command
        assert answer.code == 0, f"{command}: {answer.err}"


@pytest.mark.parametrize("spelling", ["dir:{}", "file://{}", "{}"])
def test_directories_are_published_to_mirrored_and_read_as_ever(scene: Scene, spelling: str) -> None:
    for number, (command, words) in enumerate(
        typed(spelling.format(scene.base / "mirror{number}"), BUCKETS, SOURCES, MIRRORS)
    ):
        shutil.copytree(scene.base / "BUCKET", scene.base / f"mirror{number}")
        with sockets() as seen:
            answer = scene.ask(*words, mirrors=f"file://{scene.base / 'BUCKET'}", offline=1)
        assert seen == [], command
        assert answer.code == 0, f"{command}: {answer.err}"


def test_sockets_are_seen_where_they_are_allowed(scene: Scene) -> None:
    with Mirror(scene.base / "BUCKET") as mirror:
        for command, words in typed(mirror.url, BUCKETS, SOURCES, MIRRORS):
            with sockets() as seen:
                answer = scene.ask(*words, mirrors=mirror.url, retries=0, store=scene.base / " ".join(command))
            assert seen or command == ("mirror", "list"), answer  # of HTTP it says at once that it cannot be listed


@pytest.mark.parametrize(
    "uri", ["awskms:alias/kernels", "gcpkms:projects/p/k/v/1", "azurekms://vault.azure.net/k/1", "hv:k"]
)
def test_no_service_is_asked_to_sign(scene: Scene, uri: str) -> None:
    public = scene.base / "public.pem"
    key = Ed25519PrivateKey.generate().public_key()
    public.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    signer = f"{uri},{public}"
    for words in (
        ["keys", "init", "NEW", "--library", "mylib", "--signer", f"targets={signer}"],
        ["keys", "sign", "ROOT", "--key", signer],
    ):
        with sockets() as seen:
            answer = scene.ask(*words, offline=1)
        assert (seen, answer.code) == ([], ConfigError.exit_code), answer
        assert "KARTIFACTS_OFFLINE" in answer.err
