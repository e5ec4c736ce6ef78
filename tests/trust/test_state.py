"""What a reader remembers: only what it put there itself is read, and nothing that lies there makes it wait."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import StoreError
from kartifacts.trust import clock
from kartifacts.trust.client import Trusted, refresh, refresh_expired
from tests.trust.simulator import Publisher

TODAY = datetime.now(timezone.utc).date()
ASKS: dict[str, Callable[..., Trusted]] = {
    "refresh": refresh,
    "exempted": partial(refresh_expired, until=TODAY + timedelta(days=2), reason="a test"),
}
FILES = ["timestamp.json", "snapshot.json", "targets.json", "kernels.json", "root_history/2.root.json"]


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it was waited for")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=ASKS)
def ask(request: pytest.FixtureRequest) -> Callable[..., Trusted]:
    return ASKS[request.param]


@pytest.fixture
def seen(publisher: Publisher, state: Path) -> Path:
    publisher.next_root()
    refresh(publisher.trust, state, publisher.read)
    return state


def _instead(make: Callable[[Path], object], path: Path) -> None:
    path.unlink()
    make(path)


def _link(path: Path) -> None:
    kept = path.rename(path.with_name("elsewhere"))
    path.symlink_to(kept)


def _foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


PLANTS: dict[str, Callable[[Path], object]] = {
    "pipe": partial(_instead, os.mkfifo),
    "directory": partial(_instead, os.mkdir),
    "device": partial(_instead, partial(os.symlink, "/dev/zero")),
    "link": _link,
    "open to all": lambda path: path.chmod(0o666),
    "of somebody else": _foreign,
    "without end": lambda path: os.truncate(path, 1 << 33),
}


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", [*FILES, "root.json"])
def test_what_is_planted_among_what_was_seen_is_refused(
    publisher: Publisher, seen: Path, ask: Callable[..., Trusted], name: str, kind: str
) -> None:
    if kind == "of somebody else" and os.getuid() != 0:
        pytest.skip("only root gives files away")
    path = seen / name
    if name == "root.json":  # which is the updater's own link
        path.unlink()
        path.write_bytes(publisher.trust)
    PLANTS[kind](path)
    with pytest.raises(StoreError, match=path.name) as raised:
        ask(publisher.trust, seen, publisher.read)
    assert "remove it" in str(raised.value)


def test_the_roots_that_were_seen_are_not_read_from_where_others_write(
    publisher: Publisher, seen: Path, ask: Callable[..., Trusted]
) -> None:
    (seen / "root_history").chmod(0o777)
    with pytest.raises(StoreError, match="root_history"):
        ask(publisher.trust, seen, publisher.read)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b"[" * 100_000], ids=["0", "cut", "{}", "bin", "deep"])
def test_what_was_seen_and_is_damaged_is_told(
    publisher: Publisher,
    seen: Path,
    ask: Callable[..., Trusted],
    name: str,
    content: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (seen / name).write_bytes(content)
    assert ask(publisher.trust, seen, publisher.read).seen.root == 2
    assert [record for record in caplog.records if name in record.getMessage() and record.levelno == logging.WARNING]
    caplog.clear()
    ask(publisher.trust, seen, publisher.read)  # which had it mended
    assert not caplog.records or ask is not refresh


def test_a_fault_of_this_process_is_not_called_one_of_the_metadata(
    publisher: Publisher, state: Path, ask: Callable[..., Trusted], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tuf.api.metadata

    def lacks(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named '_strptime'")

    monkeypatch.setattr(tuf.api.metadata.Timestamp, "from_dict", lacks)
    with pytest.raises(ImportError, match="_strptime"):
        ask(publisher.trust, state, publisher.read)


# -- clocks ------------------------------------------------------------------------------------------------------------


def told(publisher: Publisher, caplog: pytest.LogCaptureFixture, now: datetime) -> list[str]:
    from kartifacts.trust import client_reading as reading

    trusted = refresh(publisher.trust, None, publisher.read)
    caplog.clear()
    files = {path.rpartition("/")[2]: content for path, content in trusted.files.items()}
    seen = trusted.seen
    verified = reading.Verified(
        {seen.root: files[f"{seen.root}.root.json"]},
        files["timestamp.json"],
        files[f"{seen.snapshot}.snapshot.json"],
        files[f"{seen.targets}.targets.json"],
        {},
    )
    clock.tell_if_behind(verified.signed(), trusted.libraries.values(), trusted.view, now)
    return [record.getMessage() for record in caplog.records if record.name == clock.__name__]


@pytest.mark.parametrize("published", ["", "2026-01-01"])
def test_a_clock_that_is_behind_is_remarked_on(
    publisher: Publisher, caplog: pytest.LogCaptureFixture, published: str
) -> None:
    for version in ("1.0", "1.1"):
        publisher.add("kernels", version, published=published)
    publisher.roles["other"].targets.clear()
    publisher.publish("kernels", "other")
    present = datetime.now(timezone.utc)
    assert told(publisher, caplog, present) == []
    assert told(publisher, caplog, present - timedelta(hours=20)) == []
    for before in (present - timedelta(days=3), present.replace(year=1971, day=1)):
        [message] = told(publisher, caplog, before)
        assert f"{before:%Y-%m-%d}" in message
        assert ("published" if published and before.year == 1971 else "expires") in message


def test_the_clock_is_looked_at_whenever_metadata_is_verified(
    publisher: Publisher, caplog: pytest.LogCaptureFixture, ask: Callable[..., Trusted]
) -> None:
    publisher.release("kernels", "2", published=f"{date.today() + timedelta(days=40)}")
    ask(publisher.trust, None, publisher.read)
    assert "kernels 2 was published on" in caplog.text
