"""Locks: one process works, the others sleep; nothing that a dead process leaves behind stops anybody."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.store import Store, locking

Run = Callable[..., subprocess.Popen[str]]

HOLDER = """
import sys
from pathlib import Path
from kartifacts.store import Store
with Store(Path(sys.argv[1])).lock("job"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(run: Run, store: Store) -> subprocess.Popen[str]:
    process = run(HOLDER, store.root)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture(autouse=True)
def warned_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_warned", False)


def test_two_processes_take_turns(store: Store, run: Run) -> None:
    code = """
import sys
from pathlib import Path
from kartifacts.store import Store
count = Path(sys.argv[2])
for _ in range(30):
    with Store(Path(sys.argv[1])).lock("count"):
        count.write_text(str(int(count.read_text()) + 1))
"""
    count = store.root.parent / "count"
    count.write_text("0")
    processes = [run(code, store.root, count) for _ in range(4)]
    for process in processes:
        assert process.wait() == 0, process.communicate()
    assert count.read_text() == "120"
    assert list((store.root / "v1" / "locks").iterdir()) == []


def test_threads_of_one_process_take_turns(store: Store) -> None:
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with store.lock("job"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_killed_holder_stops_nobody(store: Store, run: Run) -> None:
    process = holder(run, store)
    process.kill()
    process.wait()
    assert (store.root / "v1" / "locks" / "job.lock").exists()
    started = time.monotonic()
    with store.lock("job") as held:
        assert held
    assert time.monotonic() - started < 2


def test_a_holder_killed_while_others_wait_stops_nobody(store: Store, run: Run) -> None:
    process = holder(run, store)
    waiter = run(HOLDER, store.root)
    process.kill()
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "held\n"


def test_a_leftover_lock_file_stops_nobody(store: Store) -> None:
    with store.lock("job"):
        pass
    (store.root / "v1" / "locks" / "job.lock").write_text("process 1 on elsewhere")
    with store.lock("job") as held:
        assert held


def test_a_forked_child_does_not_keep_the_lock(store: Store, run: Run) -> None:
    code = """
import os, sys
from pathlib import Path
from kartifacts.store import Store
store = Store(Path(sys.argv[1]))
ready = os.pipe()
with store.lock("job"):
    if os.fork() == 0:
        os.write(ready[1], b"!")
        os.read(0, 1)
        os._exit(0)
    os.read(ready[0], 1)
    os.execlp(sys.executable, sys.executable, "-c", "print('gone', flush=True)")
"""
    process = run(code, store.root)
    assert process.stdout is not None
    assert process.stdout.readline() == "gone\n"
    with store.lock("job") as held:  # the child still runs, until its standard input is closed
        assert held


def test_a_waiter_says_whom_it_waits_for_and_sleeps(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "PROGRESS_SECONDS", 0.3)
    process = holder(run, store)
    said: list[str] = []

    def waiting(sentence: str) -> None:
        said.append(sentence)
        if len(said) == 3:
            process.communicate("\n")

    before = resource.getrusage(resource.RUSAGE_SELF)
    with store.lock("job", waiting=waiting) as held:
        assert held
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert f"process {process.pid} on " in said[0]
    assert "job.lock" in said[0]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES])
def test_a_file_system_without_locks_is_gone_on_with_and_warned_about_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(3):
        with store.lock("job") as held:
            assert not held
        with store.slot(2):
            pass
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert os.strerror(number) in warnings[0].getMessage()


def test_only_so_many_processes_hold_a_slot(store: Store, run: Run) -> None:
    code = """
import os, sys, time
from pathlib import Path
from kartifacts.store import Store
here = Path(sys.argv[2])
for turn in range(5):
    with Store(Path(sys.argv[1])).slot(3):
        mark = here / f"{os.getpid()}"
        mark.touch()
        print(len(list(here.iterdir())))
        time.sleep(0.01)
        mark.unlink()
"""
    here = store.root.parent / "here"
    here.mkdir()
    processes = [run(code, store.root, here) for _ in range(6)]
    counts = [int(line) for process in processes for line in process.communicate()[0].split()]
    assert len(counts) == 30
    assert 1 < max(counts) <= 3


def test_a_lock_is_private(store: Store, tmp_path: Path) -> None:
    with store.lock("job"):
        lock = store.root / "v1" / "locks" / "job.lock"
        assert lock.stat().st_mode & 0o077 == 0
        assert lock.parent.stat().st_mode & 0o077 == 0
    target = tmp_path / "target"
    target.write_text("precious")
    lock.symlink_to(target)
    with pytest.raises(Exception, match="lock"), store.lock("job"):
        pass
    assert target.read_text() == "precious"
