"""Builds one kernel when it is wanted: once, however many processes want it, and nobody waits in silence.

The lock is politeness: it saves work, and every result is right without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kartifacts.build import kept, workspace
from kartifacts.build.compile import Told, compile_specs
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.toolchains import Toolchain, find
from kartifacts.config import Settings
from kartifacts.files import locking
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

HEARTBEAT = 10.0  # seconds between two lines of somebody who builds or waits
_PATIENCE = 3600.0  # no compilation takes so long: then it is done a second time


def build_one(
    spec: Spec, settings: Settings, *, progress: Told | None = None, heartbeat: float = HEARTBEAT
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
    path = workspace.locks(settings.workspace) / spec.key(toolchain.made_with(spec))

    def waiting(holder: str, seconds: float) -> None:
        log.warning("waiting for %s, which %s builds: %.0f s", title, holder, seconds)

    with locking.hold(path, waiting=waiting, every=heartbeat, patience=_PATIENCE):
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
    return next(every_built(spec, settings, toolchain), None)


def every_built(spec: Spec, settings: Settings, toolchain: Toolchain | None = None) -> Iterator[BuiltKernel]:
    """All of them, newest first: machines and environments that share a workspace may each have their own."""
    key = None if toolchain is None else spec.key(toolchain.made_with(spec))
    yield from kept.every(settings.workspace, spec, key)


def explain_key(spec: Spec, settings: Settings) -> dict[str, Any]:
    """Every ingredient of the key of `spec` with the compiler that is here now, and both digests."""
    fingerprint = find(spec.device.toolchain, settings).made_with(spec)
    return {"key": spec.key(fingerprint), "op_digest": spec.op_digest, "parts": spec.key_parts(fingerprint)}


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
