"""Says what distributions are installed and declare, without the machinery that can read them all."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from importlib.machinery import PathFinder

_OURS = re.compile(r"^\[\s*(kartifacts\.[a-z_.]+)\s*\]", re.MULTILINE)
_ANY = "any"
_HEADERS = 1 << 16  # bytes
_VERSION = re.compile(rb"^Version:[ \t]*(\S+)[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)


def declares(group: str) -> bool:
    """Whether some distribution may have entry points of a group; where it is not certain, it may.

    `importlib.metadata` takes some twenty milliseconds to find none, more than all else that loading a kernel needs.
    """
    if _found_otherwise():
        return True
    groups = _groups(places())
    return group in groups or _ANY in groups


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed.

    `importlib.metadata` takes over ten milliseconds, most of them to import a reader of mail, and is only asked where
    it is not certain.
    """
    found = None if _found_otherwise() else _version(distribution, places())
    if found is not None:
        return found
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _found_otherwise() -> bool:
    """Whether distributions may be found by something else than the directories in sys.path."""
    return any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path)


@lru_cache(maxsize=16)
def _version(distribution: str, places: tuple[tuple[str, int], ...]) -> str | None:
    wanted = _normal(distribution)
    for place, _ in places:
        try:
            names = os.listdir(place or ".")
        except FileNotFoundError:
            continue
        except OSError:  # an archive, most likely
            return None
        near = [name for name in names if name[:1].lower() == wanted[:1] and name.endswith((".dist-info", ".egg-info"))]
        found = [name for name in near if _distribution(name) == wanted]
        if len(found) > 1:
            return None
        if found:
            return _said(os.path.join(place, found[0], "METADATA"))
    return None


def _distribution(name: str) -> str:
    """What a directory with notes about a distribution is named after."""
    return _normal(name.rpartition(".")[0].partition("-")[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _said(file: str) -> str | None:
    try:
        with open(file, "rb") as metadata:
            headers = metadata.read(_HEADERS)
    except OSError:
        return None
    match = _VERSION.search(re.split(rb"\r?\n\r?\n", headers, maxsplit=1)[0])
    return match[1].decode("utf-8", "replace") if match else None


def places() -> tuple[tuple[str, int], ...]:
    """Where packages are looked for, each with when something was last installed into it."""
    return tuple((place, _changed(place)) for place in sys.path)


def _changed(place: str) -> int:
    """When something was last installed into a place where packages are looked for."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _groups(places: tuple[tuple[str, int], ...]) -> frozenset[str]:
    found: set[str] = set()
    for place, _ in places:
        try:
            names = os.listdir(place or ".")
        except FileNotFoundError:
            continue
        except OSError:  # an archive, most likely
            found.add(_ANY)
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                found.update(_declared(os.path.join(place, name)))
    return frozenset(found)


def _declared(directory: str) -> list[str]:
    try:
        with open(os.path.join(directory, "entry_points.txt"), encoding="utf-8", errors="replace") as file:
            return _OURS.findall(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [_ANY]
