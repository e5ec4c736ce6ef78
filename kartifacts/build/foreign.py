"""Trees of artifacts that others built become bundles: every listed file is there and is what its checksum says.

The layout is FlashInfer's: ``<commit>/<family>/checksums.txt`` lists files of any suffix in its directory.  Each file
keeps its path relative to the tree as its uri, so it is found again under the name it had.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kartifacts.build.elf import Inspection, inspect_bytes
from kartifacts.build.materials import described, imported
from kartifacts.build.pack import PackInput, Progress, pack_bundle
from kartifacts.build.reuse import Earlier
from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import sha256
from kartifacts.model.layout import check_name, check_path, suffix_of
from kartifacts.model.manifest import MAX_BLOCK_RAW, Descriptor
from kartifacts.model.materials import Content, Materials

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.txt"
MAX_LIST = 64 << 20  # bytes

_SHOWN = 20
_JOBS = 4
# As sha256sum writes it: digest, blanks, '*' for binary, path.
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64})[ \t]+\*?(?:\./)?(?P<path>\S.*)")
_NAMED_ARCH = re.compile(r"[sS][mM]_?(\d{2,3}[af]?)(?![0-9a-z])")
_CODE = (".so", ".cubin", ".fatbin", ".ptx")


@dataclass(frozen=True)
class _Listed:
    """A file that some checksums.txt promises."""

    uri: str
    family: str
    sha256: str
    by: str  # path of the list


@dataclass(frozen=True)
class _Fault:
    place: str
    problem: str
    kind: str  # for the count

    def __str__(self) -> str:
        place = self.place if self.place.isprintable() else ascii(self.place)
        return f"{place}: {self.problem}"


def import_checksums(
    tree: Path,
    out: Path,
    *,
    library: str,
    version: str,
    allow_unlisted: bool = False,
    without: Sequence[str] = (),
    earlier: Callable[[str, str], Sequence[Earlier]] = lambda arch, abi: (),  # noqa: ARG005  the protocol's names
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[tuple[Descriptor, Materials]]:
    """Check a tree and pack it into the repository `out`: one bundle for each family and arch, with what promised it.

    Args:
        version: of the release that the bundles are for.
        allow_unlisted: leave files out that no checksums.txt lists, instead of refusing the tree.
        without: directories, relative to the tree, that are left out as if they were not there.
        earlier: gives, for an arch and an ABI, the bundles of earlier releases; what is the same is not packed again.
        progress: told twice the bytes of the tree: they are checked, then packed.

    Raises:
        ConfigError: there is nothing to import, `without` names no directory, or a link leads back to where it lies.
        VerificationError: a file is missing, wrong or not listed, or a list is malformed; all faults are counted.
        StoreError: `out` cannot be written.
    """
    check_name(library, "library")
    check_name(version, "version")
    files = _files(tree, without)
    faults: list[_Fault] = []
    listed = _listed(tree, files, library, faults)
    faults += _unlisted(tree, files, listed, allow_unlisted)
    told = _Counted(progress, 2 * sum(status.st_size for uri, status in files.items() if uri in listed))
    folded = {uri.casefold(): uri for uri in files}
    bundles: dict[tuple[str, str], list[PackInput]] = defaultdict(list)
    with ThreadPoolExecutor(jobs or _JOBS, thread_name_prefix="import") as pool:
        answers = pool.map(partial(_checked, tree, files, folded), listed.values())
        for entry, checked in zip(listed.values(), answers, strict=True):
            if isinstance(checked, _Fault):
                faults.append(checked)
            else:
                bundles[entry.family, checked[1]].append(checked[0])
                told.add(files[entry.uri].st_size)
    _refuse(tree, faults)
    return [
        (
            pack_bundle(
                bundles[family, arch],
                out,
                library=library,
                family=family,
                arch=arch,
                abi="none",
                toolchain={"kind": "imported"},
                earlier=earlier(arch, "none"),
                jobs=jobs,
                progress=told.part(),
            ),
            _materials(tree, library, family, arch, [listed[entry.uri] for entry in bundles[family, arch]], files),
        )
        for family, arch in sorted(bundles)
    ]


def _materials(
    tree: Path, library: str, family: str, arch: str, entries: Sequence[_Listed], files: dict[str, os.stat_result]
) -> Materials:
    lists = sorted({entry.by for entry in entries})
    contents = [Content(path=entry.uri, sha256=entry.sha256, size=files[entry.uri].st_size) for entry in entries]
    promises = [described(uri, _read_list(tree, uri)) for uri in lists]
    return imported(library=library, family=family, arch=arch, abi="none", lists=promises, files=contents)


class _Counted:
    """Joins the progress of several steps into one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)

    def part(self) -> Progress:
        before = self._done

        def progress(done: int, _: int) -> None:
            self.add(before + done - self._done)

        return progress


# -- what is there, and what is promised -------------------------------------------------------------------------------


def _files(tree: Path, without: Sequence[str]) -> dict[str, os.stat_result]:
    """Every file of the tree by its path relative to it; links are followed."""
    if not os.path.isdir(tree):
        raise ConfigError(f"cannot import {str(tree)!r}: it is not a directory")
    left_out = [os.path.normpath(path) for path in without]
    for path in left_out:
        if not os.path.isdir(tree / path) or path.startswith(("..", "/")):
            raise ConfigError(f"cannot leave {path!r} out: there is no such directory in {str(tree)!r}")
    found: dict[str, os.stat_result] = {}
    above: dict[str, frozenset[str]] = {str(tree): frozenset()}  # directory → the real ones that it lies in
    try:
        for directory, subdirectories, names in os.walk(tree, onerror=_raise, followlinks=True):
            here = os.path.relpath(directory, tree)
            around = above.pop(directory) | {os.path.realpath(directory)}
            subdirectories[:] = [name for name in subdirectories if os.path.normpath(f"{here}/{name}") not in left_out]
            for name in subdirectories:
                place = os.path.join(directory, name)
                if os.path.islink(place) and os.path.realpath(place) in around:
                    raise ConfigError(f"cannot import {str(tree)!r}: the link {place!r} leads back to where it lies")
                above[place] = around
            for name in names:
                found[os.path.normpath(f"{here}/{name}")] = _status(os.path.join(directory, name))
    except OSError as error:
        raise StoreError(f"cannot read {error.filename!r}: {error.strerror or error}") from error
    return found


def _raise(error: OSError) -> None:
    raise error


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError:  # a link to nothing: itself, it is no regular file
        return os.lstat(path)


def _unlisted(
    tree: Path, files: dict[str, os.stat_result], listed: dict[str, _Listed], allowed: bool
) -> Iterator[_Fault]:
    unlisted = sorted(set(files) - set(listed))
    if allowed and unlisted:
        log.warning("%d files in %s are in no %s and are left out: %r ...", len(unlisted), tree, CHECKSUMS, unlisted[0])
    elif unlisted:
        yield from (_Fault(uri, f"no {CHECKSUMS} lists it", "not listed") for uri in unlisted)


def _listed(tree: Path, files: dict[str, os.stat_result], library: str, faults: list[_Fault]) -> dict[str, _Listed]:
    """What the lists promise, by full path: bare names collide between families.  The lists are part of it."""
    promised: dict[str, _Listed] = {}
    lists = [uri for uri in sorted(files) if uri.rpartition("/")[2] == CHECKSUMS and stat.S_ISREG(files[uri].st_mode)]
    if not lists:
        raise ConfigError(
            f"there is no {CHECKSUMS} in {str(tree)!r}", hint="the layout is <commit>/<family>/checksums.txt"
        )
    for uri in lists:
        try:
            data = _read_list(tree, uri)
        except VerificationError as error:
            faults.append(_Fault(uri, error.message, "malformed"))
            continue
        directory = uri.rpartition("/")[0]
        family = _family(directory) if directory else library
        entries = [_Listed(uri, family, sha256(data), uri), *_parsed(data, uri, directory, family, faults)]
        for entry in entries:
            other = promised.setdefault(entry.uri, entry)
            if other.sha256 != entry.sha256:
                faults.append(
                    _Fault(entry.uri, f"listed with two checksums, {other.sha256} and {entry.sha256}", "malformed")
                )
        if len(entries) == 1:
            faults.append(_Fault(uri, "it lists nothing", "malformed"))
    return promised


def _read_list(tree: Path, uri: str) -> bytes:
    try:
        return read_regular(tree / check_path(uri), MAX_LIST)
    except OSError as error:
        raise StoreError(f"cannot read {uri!r} in {str(tree)!r}: {error.strerror or error}") from error


def _family(directory: str) -> str:
    """A directory as a name; where two give the same, their files share bundles and keep their own paths."""
    return check_name(directory.lower().replace("/", ".")[-128:].strip("._+-") or "files", "family")


def _parsed(data: bytes, uri: str, directory: str, family: str, faults: list[_Fault]) -> Iterator[_Listed]:
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").splitlines(), start=1):
        if not line.strip():
            continue
        matched = _LINE.fullmatch(line.strip())
        try:
            if matched is None:
                raise VerificationError(f"expected a sha256 and a path, got {line[:150]!r}")
            path = check_path(matched["path"])
        except VerificationError as error:
            faults.append(_Fault(f"{uri} line {number}", error.message, "malformed"))
        else:
            yield _Listed(f"{directory}/{path}" if directory else path, family, matched["digest"].lower(), uri)


# -- each file ---------------------------------------------------------------------------------------------------------


def _checked(
    tree: Path, files: dict[str, os.stat_result], folded: dict[str, str], entry: _Listed
) -> tuple[PackInput, str] | _Fault:
    """A listed file whose content is right, and the arch it is for; or what is wrong with it."""
    status = files.get(entry.uri)
    if status is None:
        near = folded.get(entry.uri.casefold())
        return _Fault(entry.uri, f"missing; there is {near!r}" if near else "missing", "missing")
    if not stat.S_ISREG(status.st_mode):
        return _Fault(entry.uri, "not a regular file", "missing")
    path = tree / entry.uri
    try:
        data = read_regular(path, MAX_BLOCK_RAW)
    except OSError as error:
        return _Fault(entry.uri, f"cannot be read: {error.strerror or error}", "missing")
    actual = sha256(data)
    if actual != entry.sha256:
        return _Fault(entry.uri, f"expected sha256 {entry.sha256}, got {actual}, {len(data)} bytes", "wrong")
    found = _inspected(data, entry.uri)
    packed = PackInput(entry.uri, path, suffix_of(entry.uri), sha256=actual)
    if found is not None:
        packed = replace(packed, exports=found.exports, needs=found.needs)
    return packed, _arch(entry.uri, found)


def _inspected(data: bytes, uri: str) -> Inspection | None:
    found = None
    if data[:4] == b"\x7fELF":
        try:
            found = inspect_bytes(data, uri)
        except VerificationError as error:  # its checksum is right, so this is what its author published
            log.warning("%s", error.message)
    if uri.endswith(".cubin") and (found is None or found.kind != "cubin"):
        log.warning("%r is called a cubin but is no CUDA ELF file: no GPU will load it", uri)
    return found


def _arch(uri: str, found: Inspection | None) -> str:
    """The arch that a file is for: what its code says, then what its path says; ``any`` if neither does.

    Some assemblers leave the suffix out of what they write, so a name's suffix completes the same base.
    """
    images = found.archs if found else ()
    said = {replace(image, ptx=False) for image in images}
    named = _named_arch(uri) if found or uri.endswith(_CODE) else None
    if len(said) > 1:  # it is for several devices, and whoever loads it chooses
        return "any"
    arch = said.pop() if said else named
    if arch and not arch.suffix and named and (arch.major, arch.minor) == (named.major, named.minor):
        arch = named
    if arch is None:
        return "any"
    text = str(replace(arch, ptx=any(image.ptx for image in images)))
    try:
        return str(parse_arch(text))
    except ConfigError:
        log.warning("%s is for %s, which this version does not know; it is published for any arch", uri, text)
        return "any"


def _named_arch(uri: str) -> Arch | None:
    """The last arch in a path, which is the file's own if there are several."""
    for text in reversed(_NAMED_ARCH.findall(uri)):
        try:
            return parse_arch(f"sm_{text}")
        except ConfigError:
            continue
    return None


def _refuse(tree: Path, faults: list[_Fault]) -> None:
    if not faults:
        return
    kinds = [fault.kind for fault in faults]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise VerificationError(
        f"{str(tree)!r} is not what its checksums promise ({counts}); nothing was imported:{shown}{more}",
        source=str(tree),
        hint="complete the tree, or leave a directory out with --without DIR, unlisted files with --allow-unlisted",
    )
