"""Finds every file that a kernel's bytes depend on: sources, and whatever they include, with their digests."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from kartifacts.build import imports
from kartifacts.build.stamps import homes, is_file, is_settled, plain, stamp_of
from kartifacts.build.toolchains import directives
from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.spec import Source

INCLUDE = "include"
SHARED_INCLUDE = "kartifacts/include"  # what headers that others share with us call their directory
SHARED = "<kartifacts>"  # stands, in the identity of another library, for the root of our own
MAX_SOURCE = 64 << 20  # bytes

Asked = tuple[str, bool]
"""A header that a source asks for and the library has not got, and whether each of that name counts."""


@cache
def own_root() -> Path | None:
    """Our own kernels: of the checkout that this package lies in, else the packaged copy; None if there is neither."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and any((checkout / "kernels").glob("*/op.toml")):
        return checkout / "kernels"
    packaged = package / "_kernels"
    return packaged if packaged.is_dir() else None


def shared_include(root: Path) -> Path | None:
    """Where other libraries than our own find our headers, after their own include/; None for our own."""
    own = own_root()
    return None if own is None or own == root else own / INCLUDE


def inside(home: str, path: str, what: str) -> str:
    """`path`, written in the directory `home` of a library, relative to the library's root."""
    joined = posixpath.normpath(posixpath.join(home, path))
    if posixpath.isabs(joined) or joined in ("..", SHARED) or joined.startswith("../"):
        raise ConfigError(f"{what} reaches outside the library: {path[:200]!r}")
    if home.partition("/")[0] == SHARED != joined.partition("/")[0]:
        raise ConfigError(f"{what} reaches outside the library: {path[:200]!r}")
    return joined


def reached(
    root: Path,
    sources: Iterable[str],
    texts: Mapping[str, bytes] = {},
    missed: set[str] | None = None,
    asked: set[Asked] | None = None,
) -> tuple[Source, ...]:
    """`sources` and all they include, directly or not, that lies in the library at `root` or among our shared headers.

    A header of neither is the toolchain's or the system's: what is kept of a build remembers it (see `outside`).

    Args:
        texts: path → content of sources that are in no file.
        missed: where files are added that were looked for and are not there, by their full paths.
        asked: where headers are added that `__has_include` and the like look for outside of the library.

    Raises:
        ConfigError: a source is missing, would be another each time, or names a file that cannot be followed or lies
            outside the library.
    """
    found: dict[str, Digest] = {}
    places = _places(root)
    missed = set() if missed is None else missed
    asked = set() if asked is None else asked
    waiting = [(path, "op.toml") for path in sources]
    while waiting:
        path, wanted_by = waiting.pop()
        if path in found:
            continue
        try:
            text = texts[path] if path in texts else read_regular(_place(places, path), MAX_SOURCE)
        except OSError as error:
            raise ConfigError(
                f"{wanted_by} names {path!r}, which cannot be read in {str(root)!r}: {error.strerror or error}"
            ) from error
        found[path] = sha256(text)
        if path.endswith(".py"):
            waiting.extend((module, path) for module in _imported(places, posixpath.dirname(path), text, missed))
            continue
        _refuse(path, text)
        waiting.extend((header, path) for header in _included(places, path, text, missed, asked))
    return tuple(Source(path, found[path]) for path in sorted(found))


def _refuse(path: str, text: bytes) -> None:
    """Refuse a source whose bytes would tell when it was compiled, or hang on a file that no compiler tells of."""
    if clock := directives.clock(text):
        raise ConfigError(
            f"{path} uses {clock[0]}: the kernel would be another each time that it is compiled",
            hint="leave it out, or give a fixed text by a macro of your own",
        )
    if directive := directives.assembler(text):
        raise ConfigError(
            f"{path} uses {directive}, by which an assembler reads a file that no identity covers",
            hint="write the data as an array in a header, and include that by its name",
        )


def hangs_on(root: Path, sources: Iterable[Source], missed: Iterable[str]) -> set[str]:
    """Every file and directory of which one changes if `reached` would find something else than `sources`."""
    places = _places(root)
    return {*(str(_place(places, source.path)) for source in sources), *homes(missed), directives.__file__}


def changed(root: Path, sources: Iterable[Source], *, since: int) -> str | None:
    """The first of `sources` that does not hold any more what it held at `since`, in nanoseconds; None if all do."""
    for source in sources:
        place = place_of(root, source.path)
        try:
            if not is_settled(stamp_of(str(place)), since) and sha256(read_regular(place, MAX_SOURCE)) != source.sha256:
                return source.path
        except OSError:
            return source.path
    return None


def place_of(root: Path, path: str) -> Path:
    """Where a file lies on this machine that identities of the library at `root` name `path`."""
    return _place(_places(root), path)


def _places(root: Path) -> dict[str, Path]:
    return {"": root} | ({SHARED: shared.parent} if (shared := shared_include(root)) else {})


def _place(places: Mapping[str, Path], path: str) -> Path:
    top, _, rest = path.partition("/")
    return places[top] / rest if top == SHARED else places[""] / path


def _included(
    places: Mapping[str, Path], path: str, content: bytes, missed: set[str], asked: set[Asked]
) -> Iterator[str]:
    """What a source includes of its library, and what it only asks for: which is in the identity if it is there."""
    home = posixpath.dirname(path)
    shared = [f"{SHARED}/{INCLUDE}"] if SHARED in places else []
    for wanted in directives.wanted(content):
        name = _name(path, wanted)
        found = False
        for place in (*((home,) if wanted.quoted else ()), INCLUDE, *shared):
            there = os.path.join(_place(places, place), name)
            if not is_file(there):
                missed.add(there)
                continue
            found = True
            yield _followed(places, place, name, path)
            if not wanted.further:
                break
        if wanted.asked and (wanted.further or not found):
            asked.add((name, wanted.further))


def _name(path: str, wanted: directives.Wanted) -> str:
    try:
        name = wanted.name.decode()
    except UnicodeDecodeError:
        name = repr(wanted.name)
    else:
        if wanted.plain:
            return name
    how = "asks for" if wanted.asked else "includes"
    raise ConfigError(
        f"{path} {how} {name[:100]!r}, which cannot be followed",
        hint="name the file itself, in UTF-8, where it is included or asked for; what stands between #if and #endif "
        "counts too, since no condition is looked at, and what stands in a comment does not",
    )


def _followed(places: Mapping[str, Path], place: str, name: str, path: str) -> str:
    """The file that is found as `name` in `place`, by the path at which it is read again."""
    found = inside(place, name, f"an include in {path}")
    there = os.path.join(_place(places, place), name)
    if ".." in name.split("/") and plain(there) != os.path.abspath(there):
        raise ConfigError(
            f"{path} includes {name[:100]!r}, which goes through a link to a directory and back out of where that "
            f"leads: it is not {found!r}",
            hint="include the file by a path without such a link",
        )
    return found


def _imported(places: Mapping[str, Path], home: str, content: bytes, missed: set[str]) -> Iterator[str]:
    """What a source in Python imports of its library: from beside it, or from include/."""
    for module in imports.modules(content):
        name = module.lstrip(".")
        up = len(module) - len(name)
        tops = (home, INCLUDE) if not up else (posixpath.normpath(posixpath.join(home, *[".."] * (up - 1))),)
        for path in (posixpath.join(top, file) for top in tops for file in imports.files(name)):
            if path.startswith("../"):
                continue
            if os.path.isfile(there := _place(places, path)):
                yield path
            else:
                missed.add(str(there))


def content(root: Path, path: str) -> bytes:
    """A file that `reached` found for the library at `root`.

    Raises:
        ConfigError: it can no longer be read.
    """
    try:
        return read_regular(place_of(root, path), MAX_SOURCE)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read in {str(root)!r}: {error.strerror or error}") from error


def relative(root: Path, name: str) -> str | None:
    """A file that a compiler named, running in the library's root, as identities name it; None if it lies elsewhere."""
    path = plain(named := os.path.join(root, name))
    linked = path != os.path.abspath(named)
    for top, place in _places(root).items():
        start = os.path.realpath(place) if linked else str(place)
        if path.startswith(f"{start}/"):
            return posixpath.join(top, path[len(start) + 1 :])
    return None
