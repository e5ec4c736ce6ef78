"""What goes wrong on the way to a first signed kernel is blamed on its cause, and the way out is named."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kartifacts.errors import ConfigError, MissingKernel, SourceError, VerificationError
from kartifacts.model.layout import target_path
from kartifacts.testing import Mirror, TinyRepository, tiny_repository
from tests.conftest import Answer, Machine
from tests.trust.simulator import Publisher


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRepository:
    return tiny_repository(tmp_path / "repository", {"a.so": b"a" * 5000})


@pytest.fixture
def publisher(tiny: TinyRepository, tmp_path: Path) -> Publisher:
    shutil.copytree(tiny.path, tmp_path / "published")
    publisher = Publisher(tmp_path / "published", "tiny")
    index = publisher.path / target_path("tiny", "1.0", tiny.pin.sha256)  # type: ignore[arg-type]
    publisher.release("tiny", "1.0", index.read_bytes())
    return publisher


def trusting(machine: Machine, root: bytes) -> Path:
    home = machine.home / ".config/kartifacts"
    home.mkdir(parents=True, exist_ok=True)
    (home / "root.json").write_bytes(root)
    return home / "root.json"


def said(answer: Answer, code: int, *words: str) -> None:
    assert answer.code == code, answer.err
    for word in words:
        assert word in answer.err, answer.err


@contextmanager
def page(status: int = 200) -> Iterator[str]:
    """A server that shows the same page, whatever it is asked for."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"\n<!DOCTYPE html><title>Log in</title>")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


# -- which view, which root --------------------------------------------------------------------------------------------


@pytest.fixture
def carried(machine: Machine, tiny: TinyRepository, tmp_path: Path) -> Path:
    """A directory with an archive, a bucket, both roots, and a bucket that has no view but for air gaps."""
    keys, bucket = tmp_path / "ring", tmp_path / "bucket"
    for command in (
        ("keys", "init", keys, "--library", "tiny"),
        ("keys", "root", keys, "--out", tmp_path / "root.json"),
        ("keys", "root", keys, "--view", "airgap", "--out", tmp_path / "root.airgap.json"),
        ("publish", bucket, "--from", tiny.path, "--keys", keys),
        ("mirror", "export", bucket, tmp_path / "carried.tar", "--root", tmp_path / "root.airgap.json"),
        ("mirror", "pull", bucket, tmp_path / "mirror", "--root", tmp_path / "root.airgap.json"),
    ):
        answer = machine.cli(*command)
        assert answer.code == 0, answer.err
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("sync", "--root", "{at}/root.json"),
        ("mirror", "import", "{at}/carried.tar", "{at}/closed", "--root", "{at}/root.json"),
        ("mirror", "pull", "{at}/mirror", "{at}/closed", "--root", "{at}/root.json"),
        ("verify", "{at}/mirror", "--provenance", "--root", "{at}/root.json"),
    ],
)
def test_a_view_that_is_not_there_is_named_with_the_root_that_asks_for_it(
    machine: Machine, carried: Path, command: tuple[str, ...]
) -> None:
    answer = machine.cli(*(word.format(at=carried) for word in command), mirrors=carried / "mirror")
    code = (VerificationError if "import" in command else SourceError).exit_code  # a lack of what was carried is damage
    said(answer, code, "metadata for the online view", "airgap view")


def test_what_was_only_built_is_said_not_to_be_signed(machine: Machine, tiny: TinyRepository, carried: Path) -> None:
    answer = machine.cli("verify", tiny.path, "--provenance", "--root", carried / "root.json")
    said(answer, SourceError.exit_code, "no signed metadata", "kartifacts build", "bucket")


@pytest.mark.parametrize("damage", ["empty", "not JSON", "another file", "cut off", "changed"])
@pytest.mark.parametrize("place", ["configured", "named"])
def test_a_broken_root_is_blamed_on_its_file_and_on_no_mirror(
    machine: Machine, publisher: Publisher, tmp_path: Path, damage: str, place: str
) -> None:
    root = publisher.trust
    broken = {
        "empty": b"",
        "not JSON": b"<html>",
        "another file": (publisher.path / "metadata/timestamp.json").read_bytes(),
        "cut off": root[:-10],
        "changed": root.replace(b'"version":1', b'"version":2').replace(b'"version": 1', b'"version": 2'),
    }[damage]
    path, named = trusting(machine, broken), tmp_path / "root.json"
    named.write_bytes(broken)
    arguments = ("--root", named) if place == "named" else ()
    with Mirror(publisher.path) as mirror:
        answer = machine.cli("sync", *arguments, mirrors=mirror.url)
        said(answer, VerificationError.exit_code, str(named if arguments else path), "from the publisher")
        assert mirror.url not in answer.err
    said(
        machine.cli("mirror", "pull", publisher.path, tmp_path / "new", "--root", named),
        VerificationError.exit_code,
        str(named),
    )


# -- mirrors -----------------------------------------------------------------------------------------------------------


def test_a_page_instead_of_metadata_is_said_to_be_one(machine: Machine, publisher: Publisher) -> None:
    trusting(machine, publisher.trust)
    with page() as server:
        answer = machine.run_cli("sync", mirrors=f"http://{server}")
        said(answer, VerificationError.exit_code, "is HTML", "login", f"http://{server}")


def test_each_mirror_that_is_passed_over_is_named_with_what_is_wrong_there(
    machine: Machine, tiny: TinyRepository, publisher: Publisher, carried: Path
) -> None:
    trusting(machine, publisher.trust)
    with Mirror(tiny.path) as unsigned, Mirror(carried / "bucket") as wrong, Mirror(publisher.path) as good:
        answer = machine.run_cli("sync", mirrors=f"{unsigned.url} {wrong.url} {good.url}")
    said(answer, 0, unsigned.url, "no signed metadata for the online view", f"{wrong.url}: ", "signatures")
    assert good.url not in answer.err


@pytest.mark.parametrize("scheme", ["https", "oci"])
def test_a_server_without_tls_is_said_to_have_none(
    machine: Machine, publisher: Publisher, tiny: TinyRepository, scheme: str
) -> None:
    trusting(machine, publisher.trust)
    with page(404) as server:
        for command in (("sync",), ("publish", f"{scheme}://{server}/x", "--from", tiny.path, "--single-writer")):
            answer = machine.cli(*command, mirrors=f"{scheme}://{server}/x")
            said(answer, SourceError.exit_code, "TLS", "oci+http://" if scheme == "oci" else "http://")


# -- what to do next ---------------------------------------------------------------------------------------------------


def test_where_a_publisher_is_trusted_and_nothing_pinned_sync_is_the_next_step(
    machine: Machine, publisher: Publisher
) -> None:
    said(machine.cli("fetch"), ConfigError.exit_code, "KARTIFACTS_LOCK")
    root = trusting(machine, publisher.trust)
    said(machine.cli("fetch"), ConfigError.exit_code, "run kartifacts sync", str(root), "KARTIFACTS_MIRRORS")
    with pytest.raises(MissingKernel) as caught:
        machine.registry(jit="never").load("norm/rmsnorm", device="cpu", dtype="float32")
    assert "run kartifacts sync" in (caught.value.hint or "")


def test_status_after_sync_says_to_fetch_and_after_fetch_does_not(machine: Machine, publisher: Publisher) -> None:
    trusting(machine, publisher.trust)
    assert machine.cli("sync", mirrors=publisher.path).code == 0
    answer = machine.cli("status")
    assert (answer.code, "run kartifacts fetch" in answer.out) == (0, True)
    assert machine.cli("fetch", mirrors=publisher.path).code == 0
    assert "run kartifacts fetch" not in machine.cli("status").out


def test_publish_says_who_can_use_what_it_published(machine: Machine, carried: Path, tiny: TinyRepository) -> None:
    unsigned = machine.cli("publish", carried / "new", "--from", tiny.path)
    assert "unsigned: " in unsigned.out
    signed = machine.cli("publish", carried / "bucket", "--from", tiny.path, "--keys", carried / "ring")
    for view in ("online", "airgap"):
        assert f"signed for the {view} view: timestamp " in signed.out
    assert "unsigned" not in signed.out


def test_sync_says_that_it_follows_another_root_than_before(
    machine: Machine, publisher: Publisher, carried: Path
) -> None:
    trusting(machine, publisher.trust)
    first = machine.run_cli("sync", mirrors=publisher.path)
    assert (first.code, "another root" in first.err) == (0, False)
    trusting(machine, (carried / "root.json").read_bytes())
    said(machine.run_cli("sync", mirrors=carried / "bucket"), 0, "another root of trust", "tiny")
    again = machine.run_cli("sync", mirrors=carried / "bucket")
    assert (again.code, "another root" in again.err) == (0, False)
