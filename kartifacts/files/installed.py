"""Says whether an installed distribution declares entry points of ours, without the machinery that reads them all."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from importlib.machinery import PathFinder

_OURS = re.compile(r"^\[\s*(kartifacts\.[a-z_.]+)\s*\]", re.MULTILINE)
_ANY = "any"


def declares(group: str) -> bool:
    """Whether some distribution may have entry points of a group; where it is not certain, it may.

    `importlib.metadata` takes some twenty milliseconds to find none, more than all else that loading a kernel needs.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    groups = _groups(places())
    return group in groups or _ANY in groups


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
