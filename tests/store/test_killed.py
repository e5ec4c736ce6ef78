"""A writer that is killed, or refused, at any of its system calls leaves a store in which nothing is wrong."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.errors import StoreError
from kartifacts.model.digest import sha256
from kartifacts.store import Store

CONTENTS = [b"one kernel" * 500, b"another" * 300]
DIGESTS = [sha256(content) for content in CONTENTS]
# What changes a file system, or holds a lock on it.
CALLS = (
    "mkdir,mkdirat,openat,write,pwrite64,writev,ftruncate,fallocate,fchmod,chmod,fchmodat,fsync,fdatasync,syncfs,"
    "link,linkat,rename,renameat,renameat2,unlink,unlinkat,flock"
)


STORE_ERROR = 9


def put(store: Store) -> None:
    with store.lock("job"):
        store.put(DIGESTS[0], CONTENTS[0], ".so")


def batch(store: Store) -> None:
    with store.slot(2), store.batch() as many:
        for digest, content in zip(DIGESTS, CONTENTS, strict=True):
            with many.writer(digest, len(content), ".so") as writer:
                writer.write(content)


def replace_damaged(store: Store) -> None:
    path = store.path(DIGESTS[0], ".so")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"damaged")
    store.put(DIGESTS[0], CONTENTS[0], ".so")


def without_nameless_files(store: Store) -> None:
    real = os.open

    def without(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *rest, **named)

    os.open = without  # type: ignore[assignment]
    put(store)


def without_links(store: Store) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    os.link = refuse
    without_nameless_files(store)


def traced(work: Callable[[Store], None], store: Store, *options: str) -> tuple[int, list[str]]:
    """How a process that does `work` under strace ended, and its system calls in order."""
    log = store.root.parent / "strace"
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(ready, 1)
            work(store)
            os._exit(0)
        except StoreError:
            os._exit(STORE_ERROR)
        finally:
            os._exit(1)
    tracer = subprocess.Popen(
        ["strace", "-p", str(child), "-o", log, "-e", f"trace={CALLS}", *options], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tracer.communicate()
        pytest.skip(f"strace may not look at a process here: {said.strip()}")
    os.write(go, b"!")
    _, status = os.waitpid(child, 0)
    tracer.communicate()
    os.close(ready)
    os.close(go)
    return os.waitstatus_to_exitcode(status), re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE)


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@needs_strace
@pytest.mark.parametrize("work", [put, batch, replace_damaged, without_nameless_files, without_links])
def test_a_writer_killed_at_any_system_call_harms_nobody(tmp_path: Path, work: Callable[[Store], None]) -> None:
    (tmp_path / "whole").mkdir()
    code, calls = traced(work, Store(tmp_path / "whole" / "store"))
    assert code == 0
    assert len(calls) > 10
    for step, call in enumerate(calls):
        number = calls[: step + 1].count(call)
        home = tmp_path / f"{step}-{call}-{number}"
        home.mkdir()
        store = Store(home / "store")
        code, _ = traced(work, store, "-e", f"inject={call}:signal=SIGKILL:when={number}")
        assert code == -signal.SIGKILL, f"{call} number {number}"
        check(store)


@needs_strace
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EXDEV", "EACCES", "ESTALE", "EINTR", "ENOSYS"])
def test_whatever_call_the_system_refuses_is_done_without_or_a_typed_error(tmp_path: Path, fault: str) -> None:
    (tmp_path / "whole").mkdir()
    batch(Store(tmp_path / "imports"))  # so that none of them is refused
    _, calls = traced(batch, Store(tmp_path / "whole" / "store"))
    for step, call in enumerate(calls):
        number = calls[: step + 1].count(call)
        home = tmp_path / f"{step}-{call}-{number}"
        home.mkdir()
        store = Store(home / "store")
        code, _ = traced(batch, store, "-e", f"inject={call}:error={fault}:when={number}")
        assert code in (0, STORE_ERROR), f"{fault} from {call} number {number}"
        if call == "flock":
            assert code == 0
        if code == 0:
            found = [store.find(digest, len(content), ".so") for digest, content in zip(DIGESTS, CONTENTS, strict=True)]
            assert None not in found
        check(store, swept=True)


def check(store: Store, *, swept: bool = False) -> None:
    if swept:  # who lives to say what failed also cleans up
        names = {path.name for path in store.root.rglob("*") if path.is_file()}
        assert not {name for name in names if not name.startswith(tuple(DIGESTS)) and not name.endswith(".lock")}
    for digest, content in zip(DIGESTS, CONTENTS, strict=True):
        path = store.find(digest, len(content), ".so")
        if path is not None:
            assert path.read_bytes() == content
    started = time.monotonic()
    with store.lock("job") as held, store.slot(2):
        assert held
        for digest, content in zip(DIGESTS, CONTENTS, strict=True):
            assert store.put(digest, content, ".so").read_bytes() == content
    assert time.monotonic() - started < 2
    assert store.verify().damaged == ()
    hours_ago = time.time() - 7200
    for path in store.root.rglob("*"):
        if path.is_file():
            os.utime(path, (hours_ago, hours_ago))
    store.gc(set(DIGESTS))
    left = [path for path in store.root.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(store.path(digest, ".so") for digest in DIGESTS)
