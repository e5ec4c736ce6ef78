"""Locks: one process works, the others sleep; nothing that a dead process leaves behind stops anybody."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.files import locking
from kartifacts.store import Store

Run = Callable[..., subprocess.Popen[str]]

HOLDER = """
import sys
from pathlib import Path
from kartifacts.store import Store
with Store(Path(sys.argv[1])).lock("job"):
    print("held", flush=True)
    sys.stdin.readline()
"""


WAITER = """
import sys
from pathlib import Path
from kartifacts.files import locking
path = Path(sys.argv[1]) / "v1" / "locks" / "job.lock"
said = []
def waiting(holder, seconds):
    if not said:
        said.append(print("waiting", flush=True))
with locking.hold(path, waiting=waiting, every=0.01) as held:
    pass
print(held)
"""


def holder(run: Run, store: Store) -> subprocess.Popen[str]:
    process = run(HOLDER, store.root)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture(autouse=True)
def warned_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_warned", set())


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
    waiters = [run(WAITER, store.root) for _ in range(3)]
    for waiter in waiters:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waiting\n"
    started = time.monotonic()
    process.kill()
    for waiter in waiters:
        assert waiter.communicate()[0] == "True\n"
    assert time.monotonic() - started < 2


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
    process = holder(run, store)
    path = store.root / "v1" / "locks" / "job.lock"
    said: list[tuple[str, float]] = []

    def waiting(name: str, seconds: float) -> None:
        said.append((name, seconds))
        if len(said) == 3:
            process.communicate("\n")

    before = resource.getrusage(resource.RUSAGE_SELF)
    with locking.hold(path, waiting=waiting, every=0.3) as held:
        assert held
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert said[0][0] == f"process {process.pid} on {os.uname().nodename}"
    assert 0.3 <= said[0][1] < said[1][1] < said[2][1]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


NO_LOCKS = [
    errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EACCES, errno.EPERM, errno.EIO, errno.EBADF,
    errno.ESTALE, errno.EINTR, errno.EDEADLK, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT,
]  # fmt: skip


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("number", NO_LOCKS, ids=errno.errorcode.get)
def test_whatever_flock_says_is_gone_on_with_and_warned_about_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(3):
        with store.lock("job") as held:
            assert not held
        with store.slot(2):
            pass
    (warning,) = warnings_in(caplog)
    assert os.strerror(number) in warning
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EINTR], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_lock_file_that_went_stale_is_opened_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, call: str
) -> None:
    module = os if call == "open" else fcntl
    real = getattr(module, call)
    faults = [number] * 3

    def sometimes(*arguments: Any) -> Any:
        if faults and (call == "flock" or str(arguments[0]).endswith(".lock")):
            raise OSError(faults.pop(), "not now")
        return real(*arguments)

    with store.lock("something"):
        pass
    monkeypatch.setattr(module, call, sometimes)
    with store.lock("job") as held:
        assert held
    assert faults == []
    assert warnings_in(caplog) == []


def directory(path: Path) -> None:
    path.mkdir()


def full_directory(path: Path) -> None:
    (path / "below").mkdir(parents=True)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def link_to_a_file(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to("target")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "plant", [directory, full_directory, link_to_nothing, link_to_a_file, link_to_itself, os.mkfifo, unix_socket]
)
def test_what_is_no_lock_file_is_warned_about_once_left_alone_and_gone_on_without(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, plant: Callable[[Path], None]
) -> None:
    store = Store(tmp_path_factory.mktemp("s") / "s")  # a short path: that of a socket is limited
    with store.lock("job"):
        pass
    locks = store.root / "v1" / "locks"
    names = ["job.lock", "slot-0.lock", "slot-1.lock"]
    for name in names:
        (locks / name).parent.joinpath("target").unlink(missing_ok=True)
        plant(locks / name)
    for _ in range(2):
        with store.lock("job") as held:
            assert not held
        with store.slot(2):
            pass
        assert locking.is_held(locks / "job.lock") in (True, False)
    assert len(warnings_in(caplog)) == 1
    assert all(os.path.lexists(locks / name) for name in names)
    if plant is link_to_a_file:
        assert (locks / "target").read_text() == "precious"
    # Of several slots the good ones are still used.
    with store.slot(3):
        assert locking.is_held(locks / "slot-2.lock")


@pytest.mark.usefixtures("need_root")
def test_a_lock_file_of_another_user_is_gone_on_without(open_path: Path, run: Run) -> None:
    store = Store(open_path / "store")
    with store.lock("job"):
        pass
    locks = store.root / "v1" / "locks"
    for path in (store.root, *store.root.rglob("*")):
        os.chown(path, 65534, 65534)
    for name in ("job.lock", "slot-0.lock"):
        (locks / name).touch(0o600)
    code = """
import logging, sys
from pathlib import Path
from kartifacts.store import Store
logging.basicConfig()
store = Store(Path(sys.argv[1]))
with store.lock("job") as held, store.slot(1):
    print(held)
"""
    out, err = run(code, store.root, user=65534).communicate()
    assert out == "False\n", err
    assert err.count("no locks in") == 1


def test_who_has_waited_long_enough_goes_on_without(store: Store, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    process = holder(run, store)
    path = store.root / "v1" / "locks" / "job.lock"
    os.kill(process.pid, signal.SIGSTOP)  # it holds the lock and will never give it back
    started = time.monotonic()
    before = time.process_time()
    with locking.hold(path, patience=1.0) as held:
        assert not held
    assert 1.0 <= time.monotonic() - started < 1.5
    assert time.process_time() - before < 0.05
    (warning,) = warnings_in(caplog)
    assert f"process {process.pid} on " in warning
    assert path.exists()


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


def test_a_lock_is_private(store: Store) -> None:
    with store.lock("job"):
        lock = store.root / "v1" / "locks" / "job.lock"
        assert lock.stat().st_mode & 0o077 == 0
        assert lock.parent.stat().st_mode & 0o077 == 0


def test_a_forked_child_that_leaves_the_block_frees_nothing(store: Store) -> None:
    with store.lock("job"):
        child = os.fork()
        if child == 0:
            return_code = 1
            try:
                with store.lock("other") as held:
                    return_code = 0 if held else 2
            finally:
                os._exit(return_code)
        assert os.waitpid(child, 0)[1] == 0
        path = store.root / "v1" / "locks" / "job.lock"
        assert locking.is_held(path)
    assert not path.exists()


# -- network file systems ----------------------------------------------------------------------------------------------

MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:40 / /home rw,relatime - nfs4 server:/home rw,vers=4.2
24 22 0:41 / /scratch rw shared:5 master:7 - lustre mgs@tcp:/scratch rw
25 22 0:42 / /data rw - fuse.juicefs JuiceFS:data rw
26 22 0:43 / /overlay rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("device", "kind"),
    [("8:1", None), ("0:40", "nfs4"), ("0:41", "lustre"), ("0:42", "fuse.juicefs"), ("0:43", None), ("0:99", None)],
)
def test_a_network_file_system_is_told_by_its_mount(device: str, kind: str | None) -> None:
    assert locking.network_kind(MOUNTS, device) == kind
    assert locking.network_kind("nonsense\n - \n" + MOUNTS, device) == kind


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes everything look as if on NFS, and gives the directory that this node has for locks."""
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setattr(locking, "network_kind", lambda mounts, device: "nfs4")
    monkeypatch.setattr(locking, "_NODE_LOCAL", (tmp_path / "not there", node))
    return node


def test_locks_of_a_network_file_system_are_in_a_private_directory_of_this_node(
    store: Store, on_nfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Store(store.root.parent / "other")
    with store.lock("job") as held, other.lock("job") as too, store.slot(1):
        assert held
        assert too
        found = sorted((path for path in on_nfs.rglob("*") if path.is_file()), key=lambda path: path.name)
        assert [path.name for path in found] == ["job.lock", "job.lock", "slot-0.lock"]
        assert all(path.stat().st_mode & 0o077 == 0 for path in on_nfs.rglob("*"))
        assert not list((store.root / "v1" / "locks").iterdir())
        with locking.hold(found[0], patience=0.0) as again:
            assert not again
    assert len(warnings_in(caplog)) == 1  # the one about `again`


@pytest.mark.parametrize("plant", ["link", "file", "open", "foreign"])
def test_a_directory_for_locks_that_another_user_planted_is_not_used(
    store: Store, on_nfs: Path, caplog: pytest.LogCaptureFixture, plant: str, tmp_path: Path
) -> None:
    on_nfs.chmod(0o1777)
    place = on_nfs / f"kartifacts-{os.geteuid()}"
    outside = tmp_path / "outside"
    outside.mkdir()
    if plant == "link":
        place.symlink_to(outside)
        outside.chmod(0o777)
    elif plant == "file":
        place.touch()
    else:
        place.mkdir()
        if plant == "open":
            place.chmod(0o777)
        elif os.geteuid() != 0:
            pytest.skip("needs root to give a directory to another user")
        else:
            os.chown(place, 12345, 12345)
    for _ in range(2):
        with store.lock("job"):  # in the store then, for what that is worth
            pass
    assert len(warnings_in(caplog)) == 1
    assert not [path for path in (*outside.rglob("*"), *on_nfs.rglob("*")) if path.name.endswith(".lock")]


def test_a_store_on_a_local_file_system_has_its_locks_itself(store: Store) -> None:
    store.root.mkdir()
    if locking.elsewhere(store.root) is not None:
        pytest.skip("needs a temporary directory that is not on a network file system")
    with store.lock("job"):
        assert [path.name for path in (store.root / "v1" / "locks").iterdir()] == ["job.lock"]
