"""Of all that was built here, what comes closest to what is wanted, and in which parts of its key it differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kartifacts.build import kept
from kartifacts.errors import VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import strict_json

_SHOWN = 8
_LONGEST = 60  # characters of a value


class Nearest(NamedTuple):
    path: Path
    differences: tuple[str, ...]


def nearest(workspace: Path, wanted: Mapping[str, Any]) -> Nearest | None:
    """The kernel of the same specialisation whose key differs in the fewest parts; the newest of several.

    Args:
        wanted: as `Spec.key_parts` gives it.
    """
    found = [(differences(parts, wanted), -age, path) for path, age, parts in _records(workspace, wanted["uri"])]
    if not found:
        return None
    fewest, _, path = min(found, key=lambda each: (len(each[0]), each[1]))
    shown = (*fewest[:_SHOWN], *([f"{len(fewest) - _SHOWN} more"] if len(fewest) > _SHOWN else []))
    return Nearest(path, shown)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Each part of a key that differs, with both values."""
    old, new = dict(_leaves(there)), dict(_leaves(here))
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [_sentence(name, old.get(name), new.get(name)) for name in changed]


def _sentence(name: str, old: Any, new: Any) -> str:
    if name.startswith("sources "):  # of two digests nobody learns anything
        return f"{name} ({'only there' if new is None else 'only here' if old is None else 'other content'})"
    return f"{name} ({_short(old)} there, {_short(new)} here)"


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
    return (text or "none") if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _leaves(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in parts.items():
        if isinstance(value, dict):
            yield from ((f"{name} {inner}", content) for inner, content in value.items())
        else:
            yield name, value


def _records(workspace: Path, uri: str) -> Iterator[tuple[Path, float, dict[str, Any]]]:
    """Place, time and parts of the key of each kernel of this specialisation; what is damaged is passed over."""
    for path in sorted(workspace.glob(f"kernels/*/*/{kept.RECORD}")):
        with suppress(OSError, VerificationError, KeyError, TypeError, AttributeError):
            record = strict_json(read_regular(path, kept.MAX_RECORD), what=str(path))
            if record["uri"] == uri:
                yield path.parent, path.stat().st_mtime, dict(record["parts"])
