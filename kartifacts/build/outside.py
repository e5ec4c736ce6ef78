"""What a compiler read outside of a library: listed by its depfile, looked at once, and compared before each use.

These files are in no key (see `docs/adr/0021-outside-headers.md`): a machine that compiles nothing has not got them.
What was looked for in vain counts as well, since a header may be put where a compiler looks earlier.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kartifacts.build.closure import Asked, relative
from kartifacts.build.stamps import Stamp, homes, is_file, is_settled, plain, stamp_of
from kartifacts.build.toolchains import directives
from kartifacts.errors import BuildError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import sha256

MAX_DEPFILE = 16 << 20  # bytes
MAX_HEADER = 256 << 20  # bytes
UNKNOWN = ""  # the digest of what changed while a compiler read it: nothing is equal to it
_ENVIRONMENT = "<environment>"  # stands for the Python environment, which may be moved with all that lies in it


class Seen(NamedTuple):
    """A file as it was: `stamp` is proof enough that it still is; without one, or with another one, `sha256` is.

    Or a directory, with names of files that were not in it, nor below it.
    """

    path: str
    stamp: Stamp
    sha256: str
    absent: tuple[str, ...] = ()


def read_depfile(path: Path) -> list[str]:
    """Every file that a compiler read, as it spelled them in the rules that it wrote for make.

    Raises:
        BuildError: there is no such list.
    """
    try:
        text = read_regular(path, MAX_DEPFILE).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise BuildError(f"the compiler did not list the files that it read: {error.strerror or error}") from error
    found: dict[str, None] = {}
    for rule in re.sub(r"\\\r?\n", " ", text).splitlines():
        _, colon, files = _SEPARATOR.sub("\0", rule, count=1).partition("\0")
        if not colon and rule.strip():
            raise BuildError(f"the compiler's list of the files that it read is no rule of make: {rule[:200]!r}")
        found.update(dict.fromkeys(_unescaped(word) for word in _WORD.findall(files)))
    return list(found)


_SEPARATOR = re.compile(r":(?=\s|$)")
_WORD = re.compile(r"(?:\\[\s\\#]|\S)+")


def _unescaped(word: str) -> str:
    """As gcc, clang and nvcc escape: blanks (and backslashes before them) and # by a backslash, $ by another one."""
    word = re.sub(r"(\\*)\\(?=\s)", lambda match: "\\" * (len(match[1]) // 2), word)
    return word.replace("\\#", "#").replace("$$", "$")


def outside(root: Path, read: Iterable[str]) -> list[str]:
    """Those of the files that a compiler read, running in `root`, that lie outside of the library, as full paths."""
    return [os.path.join(root, name) for name in read if relative(root, name) is None]


def seen(
    paths: Iterable[str], search: Sequence[str] = (), *, asked: Iterable[Asked] = (), since: int | None = None
) -> list[Seen]:
    """Look at files that a compiler has read.

    Args:
        search: the directories in which it looks for headers, in their order, as it spells them.
        asked: what the library's own sources asked for.
        since: when it started, in nanoseconds; what was changed later may not be what it read.

    Raises:
        BuildError: one can no longer be read, or makes an assembler read another file.
    """
    found: list[Seen] = []
    missed: set[str] = set()
    there: set[str] = set()  # files of which it may matter that they are there, whatever they hold
    for name, further in asked:
        _ask(name, search, further, missed, there)
    _real.cache_clear()
    homes = [(place, _real(place)) for place in search]
    read = set(map(plain, paths))
    for path in sorted(read):
        file, text = _look(path, since)
        found.append(file)
        missed.update(_looked_for(path, text, homes))
        for further, quoted, angled in _ASKED.findall(text):
            looked_in = ((os.path.dirname(path),) if quoted else ()) + (*search,)
            _ask(os.fsdecode(quoted or angled), looked_in, bool(further), missed, there)
    found += (_look(path, None)[0] for path in sorted({*map(plain, there)} - read))
    return found + _absent(missed)


def unchanged(files: Iterable[Seen], looked: dict[Seen, bool] | None = None) -> bool:
    """Whether each still holds what it held, or lacks what it lacked; what was not touched is not read.

    Args:
        looked: what was found a moment ago, which is added to: hundreds of kernels include the same headers.
    """
    if looked is None:
        return all(map(_is_as_it_was, files))
    for file in files:
        if file not in looked:
            looked[file] = _is_as_it_was(file)
        if not looked[file]:
            return False
    return True


def _is_as_it_was(file: Seen) -> bool:
    here = _here(file.path)
    if file.stamp and stamp_of(here) == file.stamp:
        return True
    if file.absent:
        return not any(is_file(os.path.join(here, name)) for name in file.absent)
    try:
        return file.sha256 != UNKNOWN and sha256(read_regular(here, MAX_HEADER)) == file.sha256
    except OSError:
        return False


def _look(path: str, since: int | None) -> tuple[Seen, bytes]:
    now = stamp_of(path)
    settled = is_settled(now)
    try:
        text = read_regular(path, MAX_HEADER)
    except OSError as error:
        raise BuildError(f"{path!r} was read by the compiler and cannot be read: {error.strerror or error}") from error
    if directive := directives.assembler(text):
        raise BuildError(
            f"{path!r} uses {directive}, by which an assembler reads a file that nothing tells of",
            hint="include data as an array in a header of the library",
        )
    changed = since is not None and (not now or now[-1] > since)
    # Its stamp, as it is now, would tell that what the compiler has not read is still there.
    return Seen(_stored(path), now if settled and not changed else (), UNKNOWN if changed else sha256(text)), text


def _looked_for(path: str, text: bytes, homes: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Where a compiler may have looked in vain for the header `path`, and for others on behalf of it."""
    home = os.path.dirname(path)
    real = os.path.join(_real(home), os.path.basename(path))
    holders = [(len(place), number) for number, (_, place) in enumerate(homes) if real.startswith(place + os.sep)]
    if holders:
        length, number = max(holders)
        yield from (os.path.join(place, real[length + 1 :]) for place, _ in homes[:number])
    for name in map(os.fsdecode, _QUOTED.findall(text)):
        yield os.path.join(home, name)


def _ask(name: str, places: Iterable[str], further: bool, missed: set[str], there: set[str]) -> None:
    """Where a compiler looks that is asked whether there is a header: in vain, and where one is."""
    for place in places:
        path = os.path.join(place, name)
        if not is_file(path):
            missed.add(path)
            continue
        there.add(path)
        if not further:
            break


_real = cache(os.path.realpath)  # for one call of `seen`
_QUOTED = re.compile(rb'(?:#|%:)[ \t]*include(?:_next)?[ \t]*"([^"\n]+)"')
_ASKED = re.compile(rb'__has_(?:include|embed)(_next)?(?:__)?[ \t]*\([ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)')


def _absent(paths: Iterable[str]) -> list[Seen]:
    """Those of `paths` at which there is no file, by the nearest directory that there is."""
    lacking: dict[str, list[str]] = {}
    for path in sorted(paths):
        if not is_file(path):
            (home,) = homes([path])
            lacking.setdefault(home, []).append(path[len(home) :].lstrip(os.sep))  # which `path` begins with
    found = []
    for home, names in sorted(lacking.items()):
        now = stamp_of(home)
        found.append(Seen(_stored(home), now if is_settled(now) else (), UNKNOWN, tuple(names)))
    return found


def _stored(path: str) -> str:
    path = plain(path).encode("utf-8", "backslashreplace").decode()  # JSON holds no other names
    return _ENVIRONMENT + path[len(sys.prefix) :] if f"{path}/".startswith(f"{sys.prefix}/") else path


def _here(path: str) -> str:
    return sys.prefix + path[len(_ENVIRONMENT) :] if path.partition("/")[0] == _ENVIRONMENT else path
