"""Builds one kernel when it is wanted: once, however many processes want it, and nobody waits in silence.

The lock is politeness: it saves work, and every result is right without it.  The kernel of the operating system gives
it up when its holder dies, so a lock file that is left behind means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kartifacts.build import kept, workspace
from kartifacts.build.compile import Progress, compile_specs
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.toolchains import Toolchain, find
from kartifacts.config import Settings
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

HEARTBEAT = 10.0  # seconds between two lines of somebody who builds or waits
_warned: set[str] = set()


def build_one(
    spec: Spec, settings: Settings, *, progress: Progress | None = None, heartbeat: float = HEARTBEAT
) -> BuiltKernel:
    """The kernel of `spec`: built before by the compiler that is here now, or built now.

    Args:
        heartbeat: seconds after which a build, or the wait for another process that builds it, says that it goes on.

    Raises:
        ConfigError, NoCompiler, BuildError, StoreError: as `compile_specs`.
    """
    toolchain = find(spec.device.toolchain, settings)
    built = find_built(spec, settings, toolchain)
    if built is not None:
        return built
    toolchain.check(spec)
    workspace.usable(settings.workspace)
    title = f"{spec.uri} for {spec.arch}"
    path = settings.workspace / "locks" / spec.key(toolchain.fingerprint)
    with _locked(path, title, heartbeat):
        built = find_built(spec, settings, toolchain)
        if built is not None:
            return built
        log.info("building %s", title)
        with _beating(heartbeat, lambda elapsed: f"still building {title}: {elapsed:.0f} s in process {os.getpid()}"):
            return compile_specs([spec], settings, progress=progress).kernels[0]


def find_built(spec: Spec, settings: Settings, toolchain: Toolchain | None = None) -> BuiltKernel | None:
    """A kernel of `spec` that was built in this workspace: by `toolchain`, or by any if none is given.

    Writes nothing and starts no process.
    """
    key = None if toolchain is None else spec.key(toolchain.fingerprint)
    return kept.find(settings.workspace, spec, key)


def explain_key(spec: Spec, settings: Settings) -> dict[str, Any]:
    """Every ingredient of the key of `spec` with the compiler that is here now, and both digests."""
    fingerprint = find(spec.device.toolchain, settings).fingerprint
    return {"key": spec.key(fingerprint), "op_digest": spec.op_digest, "parts": spec.key_parts(fingerprint)}


# -- one at a time -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path, title: str, heartbeat: float) -> Iterator[None]:
    """Hold the lock at `path`; where locks do not work, go on without, after one warning."""
    try:
        workspace.make_folder(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
    except OSError as error:
        _warn_unlocked(path, error)
        yield
        return
    try:
        _wait(handle, path, title, heartbeat)
        yield
    finally:
        with contextlib.suppress(OSError):  # a child forked meanwhile has the lock too, and closing would not end it
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _wait(handle: int, path: Path, title: str, heartbeat: float) -> None:
    started = time.monotonic()
    told = started
    pause = 0.01
    while not _taken(handle, path):
        now = time.monotonic()
        if now - told >= heartbeat:
            told = now
            log.warning("waiting for %s, which %s builds: %.0f s", title, _holder(handle), now - started)
        time.sleep(min(pause, heartbeat))
        pause = min(pause * 1.5, 0.2)
    with contextlib.suppress(OSError):  # a full disk must not stop us here
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _taken(handle: int, path: Path) -> bool:
    """False while another holds the lock; True also where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _warn_unlocked(path, error)
    return True


def _holder(handle: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(handle, 200, 0).decode(errors="replace") or "another process"
    return "another process"


def _warn_unlocked(path: Path, error: Exception) -> None:
    where = str(path.parent)
    if where not in _warned:
        _warned.add(where)
        log.warning("locks do not work in %s (%s): several processes may build the same kernel", where, error)


@contextlib.contextmanager
def _beating(interval: float, text: Callable[[float], str]) -> Iterator[None]:
    """Say every `interval` seconds that we are still at it."""
    over = threading.Event()
    started = time.monotonic()

    def beat() -> None:
        while not over.wait(interval):
            log.warning("%s", text(time.monotonic() - started))

    thread = threading.Thread(target=beat, name="kartifacts-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
