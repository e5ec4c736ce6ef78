"""Says what a built file is, and how two files, reports or repositories differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kartifacts.cli.flows.shared import Report
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.difference import Difference, documents
from kartifacts.model.digest import strict_json

if TYPE_CHECKING:
    from kartifacts.publish.changes import Scope

_MAX_RECORD = 1 << 20  # bytes
_MAX_REPORT = 64 << 20
# What was done in a run and measured, which no two have in common.
_MEASURED = frozenset(
    {
        "compiled",
        "cpu_seconds",
        "efficiency",
        "jobs",
        "jobs_reason",
        "kept",
        "kernels_reused",
        "linked",
        "memory",
        "objects_reused",
        "peak_memory",
        "seconds",
        "steps",
        "taken",
    }
)


def inspect(place: Path, kernel: str = "", **scope: str | None) -> Report:
    """What the bytes of a built file say of it, what a repository holds, or the bytes of one kernel in it.

    Args:
        kernel: a URI, with or without its axes.
        scope: library, version and arch to be looked at in a repository.
    """
    from kartifacts.diagnostics import described

    _check_there(place)
    if os.path.isdir(place):
        wanted = described.Wanted(scope.get("library"), scope.get("version"), kernel, scope.get("arch") or "")
        if kernel:
            return {"repository": str(place), "kernels": list(described.kernels(place, wanted))}
        return {"repository": str(place), "bundles": described.bundles(place, wanted)}
    if kernel or any(scope.values()):
        raise ConfigError(f"{str(place)!r} is no repository directory: there is nothing to choose from in one file")
    return described.file(place)


def diff(first: Path, second: Path, scope: Scope) -> Report:
    """How `second` differs from `first`; both are kernels, reports of builds, or repository directories."""
    _check_there(first)
    _check_there(second)
    if os.path.isdir(first) and os.path.isdir(second):
        kind, found = "repositories", _repositories(first, second, scope)
    elif os.path.isdir(first) or os.path.isdir(second):
        directory, file = (first, second) if os.path.isdir(first) else (second, first)
        raise ConfigError(f"{str(directory)!r} is a directory and {str(file)!r} is none: they cannot be compared")
    elif scope.library or any(scope.versions) or scope.family or scope.arch:
        raise ConfigError(f"{str(first)!r} is no repository directory: there is nothing to choose from in one file")
    else:
        before, after = _read(first), _read(second)
        reports = _report(before), _report(after)
        if reports[0] is not None and reports[1] is not None:
            kind, found = "reports", list(documents(*reports, without=_MEASURED))
        else:
            kind, found = "files", _files(first, before, second, after)
    rows = [{"where": row.where, "change": row.change, "text": row.text} for row in found]
    return {"kind": kind, "first": str(first), "second": str(second), "same": not rows, "differences": rows}


def _check_there(place: Path) -> None:
    if not os.path.lexists(place):
        raise ConfigError(f"there is no file or directory {str(place)!r}")


def _read(path: Path) -> bytes:
    from kartifacts.build.elf import read_file

    return read_file(path)


def _report(content: bytes) -> Any | None:
    """The content of a file that is JSON; None for any other."""
    if content.lstrip()[:1] != b"{" or len(content) > _MAX_REPORT:
        return None
    try:
        return strict_json(content, what="report")
    except VerificationError:
        return None


def _files(first: Path, before: bytes, second: Path, after: bytes) -> list[Difference]:
    from kartifacts.build.difference import differences

    found = differences(before, after)
    records = [_record(path) for path in (first, second)]
    if found and records[0] is not None and records[1] is not None:
        return [*(row.inside("key") for row in documents(*records)), *found]
    return found


def _record(path: Path) -> Any | None:
    """What the key of a kernel in a workspace is made of; None for files from elsewhere."""
    from kartifacts.build.kept import RECORD

    try:
        record = strict_json(read_regular(path.parent / RECORD, _MAX_RECORD), what=RECORD)
    except (OSError, VerificationError):
        return None
    return record.get("parts") if isinstance(record, dict) else None


def _repositories(first: Path, second: Path, scope: Scope) -> Sequence[Difference]:
    from kartifacts.build.difference import differences
    from kartifacts.publish.changes import releases
    from kartifacts.publish.repository import Repository

    return list(releases(Repository(first), Repository(second), scope, differences))
