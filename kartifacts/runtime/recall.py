"""Who brings a kernel into the store notes there what a load comes to, so that later processes need not look.

A note answers one question on one installation, and only as long as every file that had a part in the answer holds what
it held: lock, declarations, sources, the kernel itself.  That a file was not touched is proof enough; one that was, as
in a copy of the store, is read.  Without notes a load takes some forty milliseconds longer, no more; so one that finds
its kernel in the store writes none, and a warm store is never written.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kartifacts import __version__
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, Refusal, StoreError
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import check_own_directory, check_trusted, make_directory, unfit
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import sha256
from kartifacts.model.layout import NOTES
from kartifacts.runtime import host
from kartifacts.runtime.found import Found

log = logging.getLogger(__name__)

_MOST = 256 << 10  # bytes of a note
_LARGEST = 1 << 30  # bytes of what is read to see whether it changed
_TICK = 50_000_000  # nanoseconds by which a file system's clock may lag
_STANDARD = os.path.dirname(os.__file__)
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Stamp = tuple[int, ...]


class Recalled(NamedTuple):
    uri: str
    found: Found
    refusals: tuple[Refusal, ...]


class Question(NamedTuple):
    """What is asked of which installation; equal questions have equal answers until a watched file changes."""

    op: str
    device: Arch
    axes: tuple[tuple[str, str], ...]
    settings: Settings
    lock: str  # sha256

    @property
    def note(self) -> str:
        """The path of the note that would answer it."""
        settings = self.settings
        said = (
            *(__version__, self.op, str(self.device), self.axes, str(settings.store), self.lock),
            *(sys.prefix, __file__, [(place, rows) for place in _places() if (rows := _installed(place))]),
            *(os.uname().machine, host.glibc(), host.driver() if self.device.kind == "cuda" else None),
        )
        return f"{settings.store}/{NOTES}/{sha256(repr(said).encode())}.json"


def question(settings: Settings, op: str, device: Arch, axes: Mapping[str, object]) -> Question | None:
    """None where the answer hangs on more than a note can watch, as it does with explicit directories."""
    if settings.path or settings.verify == "off" or settings.lock is None:
        return None
    try:
        lock = sha256(read_regular(settings.lock, _MOST))
    except OSError:  # which the search says better
        return None
    return Question(op, device, tuple(sorted((axis, str(value)) for axis, value in axes.items())), settings, lock)


def look(asked: Question) -> Recalled | None:
    """The noted answer, if there is one and nothing that it hangs on has changed."""
    try:
        note = asked.note
        said = _read(note)
        if said is None or not all(_is_as_it_was(path, *seen) for path, *seen in said["watched"]):
            return None
        place = str(said["path"])
        if not _in_store(place, asked.settings):
            raise ValueError(f"{place!r} is not in the store")
        check_trusted(Path(note).parent)
        kernel = Path(place)
        for directory in (kernel.parent.parent, kernel.parent):  # what is above them has just been looked at
            check_own_directory(str(directory))
        if not _is_intact(place, said["stamp"]):
            return None
        texts = [said["uri"], said["arch"], *said["exports"], *(text for row in said["refusals"] for text in row)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it holds something other than text")
        found = Found(kernel, parse_arch(said["arch"]), "store", tuple(said["exports"]))
        return Recalled(said["uri"], found, tuple(Refusal(*row) for row in said["refusals"]))
    except (OSError, ConfigError, StoreError, KeyError, TypeError, ValueError, RecursionError) as error:
        log.debug("no use in a note about %s: %s", asked.op, error)
        return None


def keep(asked: Question, recalled: Recalled, watched: Iterable[str], *, since: int) -> None:
    """Note an answer, if its kernel is in the store and nothing that it hangs on changed while it was found.

    Args:
        since: when the first of `watched` was read, in nanoseconds.
    """
    place = str(recalled.found.path)
    stamps = {path: _stamp(path) for path in watched}
    if not _in_store(place, asked.settings) or any(not stamp or stamp[-1] > since - _TICK for stamp in stamps.values()):
        return
    said = {
        "uri": recalled.uri,
        "arch": str(recalled.found.arch),
        "path": place,
        "exports": recalled.found.exports,
        "refusals": [(refusal.place, refusal.reason) for refusal in recalled.refusals],
        "stamp": _stamp(place),
        "watched": [(path, stamp, _content(path)) for path, stamp in sorted(stamps.items())],
    }
    content = json.dumps(said).encode()
    note = Path(asked.note)
    try:
        check_trusted(note.parent)
        make_directory(note.parent, 0o700)
        partial = f"{note}.{os.getpid()}.tmp"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.rename(partial, note)
        except BaseException:
            os.unlink(partial)
            raise
    except (OSError, StoreError) as error:
        log.debug("no note about %s: %s", asked.op, error)


def forget(asked: Question) -> None:
    """Remove a note that led to something useless."""
    try:
        os.unlink(asked.note)
    except OSError as error:
        log.debug("a note about %s stays: %s", asked.op, error)


def _in_store(place: str, settings: Settings) -> bool:
    return place.startswith(f"{settings.store}/v1/sha256/") and "/../" not in place


def _read(note: str) -> dict[str, Any] | None:
    content = _bytes(note)
    said = None if content is None else json.loads(content)
    return said if isinstance(said, dict) else None


def _bytes(note: str | Path) -> bytes | None:
    try:
        descriptor = os.open(note, _FLAGS)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if reason := unfit(found, found.st_size):
            raise StoreError(f"{str(note)!r}: {reason}")
        return file.read(_MOST)


def _stamp(path: str) -> Stamp:
    """What is different as soon as a file or a directory has been changed or replaced; empty if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _content(path: str) -> str:
    """The sha256 of a file, or of the names in a directory."""
    if os.path.isdir(path):
        return sha256("\0".join(sorted(os.listdir(path))).encode(errors="surrogateescape"))
    return sha256(read_regular(path, _LARGEST))


def _is_as_it_was(path: str, stamp: list[int], content: str) -> bool:
    now = _stamp(path)
    return now == tuple(stamp) or (now != () and _content(path) == content)


def _is_intact(place: str, stamp: list[int]) -> bool:
    """Whether a kernel of the store is untouched, or else still what its name says and nobody else's."""
    if _stamp(place) == tuple(stamp):
        return True
    found = os.lstat(place)
    return not unfit(found, found.st_size) and sha256(read_regular(place, _LARGEST)) == os.path.basename(place)[:64]


def _places() -> list[str]:
    """Where packages are looked for, without the standard library, which is large and holds none of them."""
    return [place for place in sys.path if place != _STANDARD and not place.endswith(("/lib-dynload", ".zip"))]


def _installed(place: str) -> tuple[tuple[str, str], ...]:
    """What is installed in one place where packages are looked for, and what leads from there to other places."""
    try:
        return _listed(place, os.stat(place or ".").st_mtime_ns)
    except OSError:
        return ()


@lru_cache(maxsize=64)
def _listed(place: str, _changed: int) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for name in os.listdir(place or "."):
        if name.endswith("-info"):
            found.append((name, ""))
        elif name.endswith((".pth", ".egg-link")) or (name.startswith("__editable__") and name.endswith(".py")):
            with suppress(OSError):
                found.append((name, sha256(read_regular(os.path.join(place, name), _LARGEST))))
    return tuple(sorted(found))
