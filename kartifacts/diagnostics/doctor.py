"""Checks an installation and says of each part whether it is usable; opens no socket and starts no GPU work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kartifacts import __version__
from kartifacts.config import VARIABLES, Settings
from kartifacts.errors import ConfigError, KartifactsError

PATIENCE = 20.0  # seconds


class Finding(NamedTuple):
    """One part that was looked at."""

    subject: str
    ok: bool
    text: str


def examine(settings: Settings) -> list[Finding]:
    """Look at the lock, the store, local directories, this host, the libraries of ops, their sources and the compilers.

    A missing compiler or GPU is a fact, not a fault: prebuilt kernels need neither.  One that a setting names is.
    """
    return [
        Finding("version", True, f"kartifacts {__version__}"),
        *_pins(settings),
        *_places(settings),
        *_host(),
        *_libraries(),
        *_compilers(settings),
        *_jobs(settings),
    ]


def _pins(settings: Settings) -> Iterator[Finding]:
    from kartifacts.fetch.sync import age
    from kartifacts.publish import lockfile
    from kartifacts.runtime.pins import read_lock, wheel_pins

    try:
        wheels = [f"{wheel} pins {pin.library} {pin.version} ({pin.sha256[:12]}…)" for wheel, pin in wheel_pins()]
        lock = read_lock(settings)
        synced = lockfile.read_lock(settings.lock).synced if settings.lock is not None else []
    except KartifactsError as error:
        yield Finding("lock", False, str(error))
        return
    for found in wheels:
        yield Finding("bundle wheel", True, found)
    pinned = ", ".join(f"{pin.library} {pin.version} ({pin.sha256[:12]}…)" for pin in lock.releases)
    if settings.lock is None:
        yield Finding("lock", True, "none" if wheels else "none: only kernels compiled here can be used")
    else:
        yield Finding("lock", True, f"{settings.lock}, with it these count: {pinned or 'nothing'}")
    for each in synced:
        text, sound = age(each)
        # No fault: what is pinned stays good, but nobody would notice that something newer is kept back.
        yield Finding("signed metadata", True, text if sound else f"{text}; run kartifacts sync")


def _places(settings: Settings) -> Iterator[Finding]:
    from kartifacts.files.trust import check_trusted
    from kartifacts.store import Store

    try:
        entries = list(Store(settings.store).entries())
        check_trusted(settings.store)
    except KartifactsError as error:
        yield Finding("store", False, str(error))
    else:
        size = sum(entry.size for entry in entries)
        yield Finding("store", *_usable(settings.store, f"{len(entries)} entries, {size} bytes", full=bool(entries)))
    yield Finding("workspace", *_usable(settings.workspace, "for what is compiled here", full=False))
    for path in settings.path:
        there = os.path.isdir(path)
        yield Finding("directory", there, f"{path}" if there else f"{path} of KARTIFACTS_PATH is not a directory")
    for mirror in settings.shown()["mirrors"][0].split():
        yield Finding("mirror", True, f"{mirror} (not asked)")


def _usable(path: Path, text: str, *, full: bool) -> tuple[bool, str]:
    """Whether a directory can be written, or made; one that holds something is of use without."""
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK) and os.statvfs(place).f_blocks:
        return True, f"{path}: {text}"
    return (
        full,
        f"{path}: {text}; nothing can be written, since {str(place)!r} is not a directory that this user may write",
    )


def _host() -> Iterator[Finding]:
    from kartifacts.runtime import host

    if host.has_driver() and not _driver_answers():
        yield Finding("CPU", True, str(host.cpu()))
        yield Finding(
            "GPUs", False, f"the NVIDIA driver did not answer within {PATIENCE:.0f} s; see dmesg and nvidia-smi"
        )
        return
    facts = host.detect()
    yield Finding("CPU", True, str(facts.cpu))
    yield Finding("GPUs", True, " ".join(map(str, facts.gpus)) or f"none: {facts.no_gpu}")
    versions = {"driver": facts.driver, "glibc": facts.glibc, "libstdc++": facts.glibcxx, "tvm_ffi": facts.tvm_ffi}
    shown = ", ".join(f"{name} {'.'.join(map(str, found)) if found else 'none'}" for name, found in versions.items())
    yield Finding("host", facts.tvm_ffi is not None, shown)


def _driver_answers() -> bool:
    """Whether the driver can be asked at all; a broken one keeps whoever asks for ever, so another process does."""
    asking = [sys.executable, "-c", "from kartifacts.runtime import host; host.gpus()"]
    process = subprocess.Popen(asking, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel does not end
            process.wait(1)
        return False
    return True


def _libraries() -> Iterator[Finding]:
    from kartifacts.build import library

    found = library.discover()
    for one in found:
        yield Finding("library", True, f"{one.name}: {len(one.ops)} ops in {one.root}")
        for error in one.faults():
            yield Finding("library", False, f"{one.name}: {error}")
    for broken in found.broken:
        yield Finding("library", False, str(broken))


def _asked_for(error: KartifactsError, settings: Settings) -> bool:
    """Whether it is about what the user has set, so that it is a fault; a compiler that nobody named may be missing."""
    if isinstance(error, ConfigError):
        return True
    named = [variable.env for variable in VARIABLES if not settings.origin_of(variable.field).startswith("default")]
    return any(re.search(rf"\b{name}\b", str(error)) for name in named)


def _jobs(settings: Settings) -> Iterator[Finding]:
    from kartifacts.build.jobs import check_max_jobs

    number, origin = settings.shown()["jobs"]
    try:
        check_max_jobs(settings.max_jobs)
    except ConfigError as error:
        yield Finding("jobs", False, str(error))
    else:
        yield Finding("jobs", True, f"{number} ({origin})" if number else "from cores and memory")


def _compilers(settings: Settings) -> Iterator[Finding]:
    from kartifacts.build import toolchains

    for kind in toolchains.KINDS:
        try:
            found = toolchains.find(kind, settings)
        except KartifactsError as error:
            yield Finding(kind, not _asked_for(error, settings), f"not usable: {error}")
        else:
            made_of = ", ".join(f"{name} {value}" for name, value in sorted(found.fingerprint.items()))
            instead = "" if found.kind == kind else f"{found.kind} instead, "
            yield Finding(kind, True, f"{instead}{found.place}: {made_of}")
