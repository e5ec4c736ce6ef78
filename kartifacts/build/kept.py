"""Finished kernels in the workspace: how one is written down, found again, and put in place when several make it.

kernels/<op digest>.<arch>/<key>/kernel.so      this name never means two contents: dlopen caches by path
                                /kernel.json    what it is, the digest of the file beside it, and the files outside
                                                of the library that went into it
                           <key>.<any>/         built when another directory of this key was there and of no use
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kartifacts.build import remembered
from kartifacts.build.outside import Seen, unchanged
from kartifacts.build.sections import host_machine
from kartifacts.build.stamps import stamp_of
from kartifacts.build.toolchains import IMAGES
from kartifacts.build.workspace import check_owner, storage_errors, sync
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import make_directory
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import Digest, canonical_json, parse_digest, sha256
from kartifacts.model.spec import Spec, overridden

log = logging.getLogger(__name__)

NAME = "kernel"
RECORD = "kernel.json"
MAX_RECORD = 16 << 20  # bytes
MAX_KERNEL = 2 << 30  # bytes
SUFFIX = ".so"
SUFFIXES = (SUFFIX, *IMAGES)
FILE = NAME + SUFFIX


_warned: dict[Path, tuple[object, ...]] = {}


@dataclass(frozen=True)
class BuiltKernel:
    """One finished kernel: what a packer or a loader needs to know of it."""

    uri: str
    arch: Arch
    path: Path
    key: Digest
    op_digest: Digest
    sha256: Digest
    size: int
    exports: tuple[str, ...]
    needs: Mapping[str, str]
    toolchain: Mapping[str, str]
    suffix: str = SUFFIX
    machine: str = ""  # whose host code it holds, as `os.uname` names it; empty for an image


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of kernel.json."""

    uri: str
    arch: str
    key: str
    op_digest: str
    sha256: str
    size: int
    exports: list[str]
    needs: dict[str, str]
    parts: dict[str, Any]  # what the key is made of, so that two keys can be compared
    suffix: str = SUFFIX
    outside: list[Seen] = []  # what its compilers read outside of the library


def folder(workspace: Path, spec: Spec) -> Path:
    """Where all builds of one op, one specialisation and one arch lie."""
    return workspace / "kernels" / f"{spec.op_digest}.{spec.arch.slug}"


def find(
    workspace: Path, spec: Spec, key: Digest | None = None, *, looked: dict[Seen, bool] | None = None
) -> BuiltKernel | None:
    """The first of `every`; None if there is none."""
    return next(every(workspace, spec, key, looked=looked), None)


def every(
    workspace: Path, spec: Spec, key: Digest | None = None, *, looked: dict[Seen, bool] | None = None
) -> Iterator[BuiltKernel]:
    """The finished builds of `spec` with this key, or without one those of any compiler on any machine, newest first.

    Without a key, what was compiled with flags of somebody's settings is passed over.  A damaged build counts as none,
    with a warning, and so does one of headers that have changed.  Writes nothing.

    Args:
        looked: as of `outside.unchanged`.

    Raises:
        StoreError: the workspace belongs to somebody else, or everybody may write to it.
    """
    with storage_errors(workspace, "read"):
        check_owner(workspace)
    home = folder(workspace, spec)
    if key is None:
        places: Iterable[Path] = sorted(_entries(home), key=_age)
    else:  # its place, then those beside it; only looked for if need be
        places = chain([home / key], (place for place in _entries(home) if place.name.startswith(f"{key}.")))
    found = (kernel for place in places if (kernel := _usable(place, spec, looked)) is not None)
    yield from (kernel for kernel in found if key is not None or not overridden(kernel.toolchain))


def _usable(place: Path, spec: Spec, looked: dict[Seen, bool] | None) -> BuiltKernel | None:
    try:
        record = _record(place, spec)
        if unchanged(record.outside, looked):
            return _checked(place, record)
        log.info("what %s includes has changed outside of its library since it was built in %s", spec.uri, place)
    except FileNotFoundError:
        pass
    except (OSError, VerificationError, ConfigError) as error:
        _warn_once(place, f"the kernel built in {place} is not used: {error}")
    return None


def _warn_once(place: Path, text: str) -> None:
    """Say what is wrong with a build, which one search may look at several times, once for as long as it stays so."""
    stamps = tuple(stamp_of(str(path)) for path in (place, *_entries(place)))
    if _warned.get(place) != (text, stamps):
        _warned[place] = text, stamps
        log.warning("%s", text)


def _entries(home: Path) -> Iterator[Path]:
    with suppress(OSError):  # whatever keeps it from being read, a new build may still be put there
        yield from sorted(home.iterdir())


def _age(place: Path) -> float:
    try:
        return -(place / RECORD).stat().st_mtime
    except OSError:
        return 0.0


def read(place: Path, spec: Spec) -> BuiltKernel:
    """The finished build in `place`, its file checked.

    Raises:
        VerificationError: it is damaged, or of another spec.
        OSError: it is not there or cannot be read.
    """
    return _checked(place, _record(place, spec))


def _record(place: Path, spec: Spec) -> Record:
    what = str(place / RECORD)
    try:
        record = msgspec.json.decode(read_regular(place / RECORD, MAX_RECORD), type=Record)
        msgspec.convert(record.parts.get("compiler"), dict[str, str])
    except (ValueError, RecursionError) as error:  # not JSON, of which msgspec's errors are, or not UTF-8
        raise VerificationError(f"{what} is malformed: {error}") from error
    parse_digest(record.key, what=what)
    if record.suffix not in SUFFIXES:
        raise VerificationError(f"{what} names a kernel{record.suffix[:20]!r}; expected {', '.join(SUFFIXES)}")
    if (record.uri, record.op_digest, record.arch) != (spec.uri, spec.op_digest, str(spec.arch)):
        raise VerificationError(
            f"{what} describes {record.uri[:150]!r} for {record.arch[:50]!r}, not {spec.uri} for {spec.arch}"
        )
    return record


def _checked(place: Path, record: Record) -> BuiltKernel:
    path = place / f"{NAME}{record.suffix}"
    content = read_regular(path, MAX_KERNEL)
    if (actual := sha256(content)) != record.sha256 or len(content) != record.size:
        raise VerificationError(f"{str(path)!r} has changed since it was built", expected=record.sha256, actual=actual)
    return BuiltKernel(
        uri=record.uri,
        arch=parse_arch(record.arch),
        path=path,
        key=Digest(record.key),
        op_digest=Digest(record.op_digest),
        sha256=Digest(record.sha256),
        size=record.size,
        exports=tuple(record.exports),
        needs=record.needs,
        toolchain=record.parts["compiler"],
        suffix=record.suffix,
        machine=host_machine(content),
    )


def keep(
    staged: Path, workspace: Path, spec: Spec, record: Record, *, outside: Iterable[Seen] | None = None
) -> BuiltKernel:
    """Move the directory `staged`, which holds the kernel, to its place; if another build is there already, use that.

    Args:
        outside: what its compilers read outside of the library, if the record does not say so yet.

    Raises:
        StoreError: it cannot be written.
    """
    home = folder(workspace, spec)
    if outside is not None:
        # The last of several is one with a stamp, if there is any.
        best = {(file.path, file.sha256, file.absent): file for file in sorted(outside)}
        record = msgspec.structs.replace(record, outside=sorted(best.values()))
    with storage_errors(workspace):
        (staged / RECORD).write_bytes(canonical_json(msgspec.to_builtins(record)))
        names = (f"{NAME}{record.suffix}", RECORD)
        for name in names:
            (staged / name).chmod(0o444)
        staged.chmod(staged.stat().st_mode & ~0o022)
        for path in (*(staged / name for name in names), staged):
            sync(path)
        make_directory(home)
        place = _settle(staged, home / record.key, spec)
    remembered.note(workspace, spec)
    with storage_errors(workspace, "read"):
        return read(place, spec)


def _settle(staged: Path, place: Path, spec: Spec) -> Path:
    """Where the build is in the end: in `place`, or beside it if what holds `place` cannot be seen or is of no use."""
    try:
        os.rename(staged, place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.ENOENT):
            raise
    else:
        return place
    try:
        current = unchanged(_record(place, spec).outside)
        read(place, spec)
    except FileNotFoundError:  # on a network file system the winner may stay invisible for a minute
        current = False
    except (VerificationError, OSError):  # out of the way with it, where a process that mapped it is not disturbed
        os.rename(place, staged.with_name(f"{staged.name}.damaged"))
        os.rename(staged, place)
        return place
    if not current:
        place = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
        os.rename(staged, place)
    return place
