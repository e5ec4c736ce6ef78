"""`kartifacts sync`: what its user sees, and that what it pins is what `fetch` then takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kartifacts.errors import ConfigError, ExpiredMetadata
from kartifacts.model.layout import target_path
from kartifacts.model.manifest import decode_lock
from kartifacts.testing import Mirror, TinyRepository, tiny_repository
from tests.conftest import Machine
from tests.trust.simulator import Publisher, soon


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRepository:
    return tiny_repository(tmp_path / "repository", {"a.so": b"a" * 5000, "b.so": b"b" * 5000})


@pytest.fixture
def publisher(tiny: TinyRepository) -> Publisher:
    publisher = Publisher(tiny.path, "tiny")
    index = tiny.path / target_path("tiny", "1.0", tiny.pin.sha256)  # type: ignore[arg-type]
    publisher.release("tiny", "1.0", index.read_bytes(), channels=["stable"])
    return publisher


@pytest.fixture
def reader(machine: Machine, publisher: Publisher) -> Machine:
    home = machine.home / ".config" / "kartifacts"
    home.mkdir(parents=True)
    (home / "root.json").write_bytes(publisher.trust)
    return machine


def test_what_is_synced_is_what_is_fetched_later_without_any_keys(
    reader: Machine, publisher: Publisher, tiny: TinyRepository
) -> None:
    with Mirror(publisher.path) as mirror:
        synced = reader.run_cli("sync", mirrors=mirror.url)
        assert synced.code == 0, synced.err
        assert f"pinned tiny 1.0: sha256:{tiny.pin.sha256}" in synced.out
        assert "expires in" in synced.out
        fetched = reader.cli("fetch", mirrors=mirror.url, progress="off")
        assert fetched.code == 0, fetched.err
        assert "2 kernels present: 2 fetched" in fetched.out
    shown = reader.cli("status", "--json")
    assert shown.data["complete"]
    (state,) = shown.data["synced"]
    assert state["sound"]
    assert state["source"] == mirror.url
    assert f"of {mirror.url}, synced " in reader.cli("status").out
    assert "signed metadata" in reader.cli("doctor").out


def test_json_tells_all_that_the_lock_has(reader: Machine, publisher: Publisher, tmp_path: Path) -> None:
    lock = tmp_path / "my.lock"
    answer = reader.cli("sync", "--json", "--lock", lock, "--channel", "stable", mirrors=f"file://{publisher.path}")
    assert answer.code == 0, answer.err
    assert answer.data["lock"] == str(lock)
    assert answer.data["pins"] == json.loads(lock.read_text())["releases"]
    assert answer.data["synced"] == json.loads(lock.read_text())["synced"][0]


def test_expired_metadata_ends_with_its_own_code_and_an_exemption_is_shown(
    reader: Machine, publisher: Publisher
) -> None:
    publisher.timestamp.expires = soon(-3)
    publisher.commit()
    mirrors = f"file://{publisher.path}"
    refused = reader.cli("sync", mirrors=mirrors)
    assert refused.code == ExpiredMetadata.exit_code
    assert "--accept-expired-until" in refused.err
    until = soon(10).date().isoformat()
    accepted = reader.run_cli(
        "sync", "--accept-expired-until", until, "--reason", "the ship is at sea", mirrors=mirrors
    )
    assert accepted.code == 0, accepted.err
    assert "the ship is at sea" in accepted.err
    status = reader.cli("status").out
    assert f"accepted until {until}" in status
    assert "the ship is at sea" in status


@pytest.mark.parametrize(
    "arguments",
    [
        ("--accept-expired-until", "2027-13-01", "--reason", "x"),
        ("--accept-expired-until", "tomorrow", "--reason", "x"),
        ("--accept-expired-until", "2020-01-01", "--reason", "x"),
        ("--accept-expired-until", "2999-01-01", "--reason", "x"),
        ("--reason", "x"),
        ("--root", "no-such-root.json"),
        ("--library", "tyni"),
        ("--lock", "/proc/none/lock"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    reader: Machine, publisher: Publisher, arguments: tuple[str, ...]
) -> None:
    answer = reader.cli("sync", *arguments, mirrors=f"file://{publisher.path}")
    assert answer.code == ConfigError.exit_code, answer.err
    assert not (reader.home / ".config/kartifacts/kartifacts.lock").exists()


def test_an_exemption_wants_a_reason(reader: Machine, publisher: Publisher) -> None:
    until = soon(10).date().isoformat()
    answer = reader.cli("sync", "--accept-expired-until", until, mirrors=f"file://{publisher.path}")
    assert answer.code == ConfigError.exit_code
    assert "reason" in answer.err


def test_offline_no_socket_is_opened(reader: Machine, publisher: Publisher) -> None:
    code = "from kartifacts.cli import main\ntry: main(['sync'])\nexcept SystemExit as end: result = end.code\n"
    seen = reader.watched(code, mirrors="https://127.0.0.1:9", offline=1)
    assert (seen.result, seen.of("socket")) == (ConfigError.exit_code, [])
    seen = reader.watched(code, mirrors=f"file://{publisher.path}", offline=1)
    # urllib3, which tuf imports, tries whether there is IPv6 by a socket that it connects to nothing.
    assert seen.result == 0
    assert {event for _, event, _ in seen.of("socket")} <= {"socket.__new__", "socket.bind"}


def test_gc_leaves_what_was_seen_of_a_repository_alone(reader: Machine, publisher: Publisher) -> None:
    for command in ("sync", "fetch"):
        assert reader.cli(command, mirrors=f"file://{publisher.path}", progress="off").code == 0
    lock = decode_lock((reader.home / ".config/kartifacts/kartifacts.lock").read_bytes())
    state = reader.store / "v1" / "meta" / lock.synced[0].repository
    assert state.is_dir()
    assert reader.cli("gc").code == 0
    assert (state / "timestamp.json").exists()


@pytest.mark.parametrize("day", ["٢٠٢٧-٠٣-٠١", "2027-3-1", "20270301", "2027-02-30", "2027-W01-1", "tomorrow", ""])
def test_a_day_that_is_none_is_refused(reader: Machine, publisher: Publisher, day: str) -> None:
    answer = reader.cli("sync", "--accept-expired-until", day, "--reason", "a test", mirrors=f"file://{publisher.path}")
    assert answer.code == 2
    assert "is not a day such as 2027-03-01" in answer.err


def test_nothing_that_is_logged_or_printed_steers_a_terminal(reader: Machine, publisher: Publisher) -> None:
    publisher.timestamp.expires = soon(-1)
    publisher.commit()
    day = f"{soon(5):%Y-%m-%d}"
    reason = "a\x1b[31m\x9b2Jb\u202e"
    answer = reader.run_cli(
        "sync", "--accept-expired-until", day, "--reason", reason, mirrors=f"file://{publisher.path}"
    )
    assert answer.code == 0, answer.err
    assert f"accepted until {day}, since: a\\x1b[31m" in answer.err
    for text in (answer.out, answer.err, reader.run_cli("status").out):
        assert not [char for char in text if not char.isprintable() and char != "\n"]


def test_a_pipe_among_what_was_seen_is_an_error_of_the_store(reader: Machine, publisher: Publisher) -> None:
    mirror = f"file://{publisher.path}"
    assert reader.cli("sync", mirrors=mirror).code == 0
    [path] = (reader.store / "v1" / "meta").glob("*/timestamp.json")
    path.unlink()
    os.mkfifo(path)
    answer = reader.run_cli("sync", mirrors=mirror)
    assert (answer.code, "Traceback" in answer.err) == (9, False)
    assert str(path) in answer.err


@pytest.mark.parametrize("command", ["verify", "lock", "sync"])
def test_a_pipe_in_place_of_signed_metadata_is_a_source_that_cannot_be_read(
    reader: Machine, publisher: Publisher, tmp_path: Path, command: str
) -> None:
    publisher.file("timestamp.json").unlink()
    os.mkfifo(publisher.file("timestamp.json"))
    more: dict[str, tuple[object, ...]] = {
        "sync": (),
        "verify": (publisher.path,),
        "lock": (publisher.path, "--out", tmp_path / "l"),
    }
    answer = reader.cli(command, *more[command], "--json", mirrors=f"file://{publisher.path}")
    assert (answer.code, answer.data["error"]) == (4, "SourceError")
    assert "a named pipe" in answer.err
