"""File systems that lack a part of what the store likes best: it uses what there is, and the entry is as good."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kartifacts.model.digest import sha256
from kartifacts.store import Store

CONTENT = os.urandom(300_000)
DIGEST = sha256(CONTENT)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def lacking(monkeypatch: pytest.MonkeyPatch, name: str, reason: int, *, nameless: bool = False) -> list[Any]:
    """Let a function of the operating system fail as on a file system that cannot do it."""
    real = getattr(os, name)
    calls: list[Any] = []

    def fail(*args: Any, **options: Any) -> Any:
        if nameless and not str(args[0]).startswith("/proc/self/fd/"):
            return real(*args, **options)
        calls.append(args)
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, name, fail)
    return calls


@pytest.mark.parametrize("many", [False, True], ids=["one entry", "a batch"])
@pytest.mark.parametrize(
    ("name", "reason", "nameless"),
    [
        *(("link", getattr(errno, reason), True) for reason in ("ENOENT", "EPERM", "EXDEV", "EOPNOTSUPP", "EINVAL")),
        *(("link", getattr(errno, reason), False) for reason in ("EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EXDEV")),
        *(("fchmod", getattr(errno, reason), False) for reason in ("EPERM", "EOPNOTSUPP", "ENOSYS")),
        *(("fsync", getattr(errno, reason), False) for reason in ("EINVAL", "EOPNOTSUPP", "ENOSYS")),
    ],
)
def test_what_a_file_system_cannot_do_never_costs_the_entry(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, reason: int, nameless: bool, many: bool
) -> None:
    calls = lacking(monkeypatch, name, reason, nameless=nameless)
    if many:
        monkeypatch.setattr("kartifacts.store.writing._flush_file_system", lambda _: False)
        contents = [CONTENT, CONTENT[1:], CONTENT[2:]]
        with store.batch() as batch:
            for content in contents:
                with batch.writer(sha256(content), len(content)) as writer:
                    writer.write(content)
    else:
        contents = [CONTENT]
        store.put(DIGEST, CONTENT)
    assert calls
    for content in contents:
        path = store.find(sha256(content), len(content))
        assert path is not None
        assert path.read_bytes() == content
    assert sum(len(names) for _, _, names in os.walk(store.root / "v1" / "sha256")) == len(contents)


def test_two_writers_without_hard_links_leave_one_good_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "link", errno.EPERM)
    with store.writer(DIGEST, len(CONTENT)) as slow:
        slow.write(CONTENT)
        first = store.put(DIGEST, CONTENT).stat()
    assert store.path(DIGEST).stat().st_ino == first.st_ino
    assert store.path(DIGEST).read_bytes() == CONTENT


def test_a_flush_that_fails_for_good_is_never_taken_for_done(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from kartifacts.errors import StoreError

    lacking(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StoreError, match="cannot write"):
        store.put(DIGEST, CONTENT)
    assert store.find(DIGEST, len(CONTENT)) is None


def test_a_rename_that_was_done_and_not_known_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "link", errno.EPERM)
    rename = os.rename

    def forgetful(old: str, new: str) -> None:
        rename(old, new)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", old)

    monkeypatch.setattr(os, "rename", forgetful)
    assert store.put(DIGEST, CONTENT).read_bytes() == CONTENT


def test_a_stale_handle_is_asked_for_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    failed: list[Any] = []

    def stale(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_TMPFILE | os.O_CREAT) and "sha256" in str(path) and not failed:
            failed.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", stale)
    assert store.put(DIGEST, CONTENT).read_bytes() == CONTENT
    assert failed
