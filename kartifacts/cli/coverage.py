"""`kartifacts coverage`: which op is there for which arch by content, or what logs say was missing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kartifacts.cli import emit, json_option
from kartifacts.errors import ConfigError, VerificationError

log = logging.getLogger(__name__)

SOMETHING_MISSED = 12
_SHOWN = 5
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("coverage")
@click.argument("place", required=False, type=click.Path(path_type=Path))
@click.option("--from", "logs", multiple=True, metavar="LOG", help="Log of a run, '-' for stdin; may be repeated.")
@click.option("--plan", type=_FILE, help="Release plan that is to hold what the logs say was missing.")
@click.option("--library", help="Only releases of this library.")
@json_option
def coverage_command(
    place: Path | None, logs: tuple[str, ...], plan: Path | None, library: str | None, as_json: bool
) -> int:
    """Print ops and archs of the repository or built file PLACE, as its content says; or what was missing, with --from.

    A log is the file that KARTIFACTS_MISSES names, or any output that holds MissingKernel errors.  What was missing is
    printed as entries for a release plan; the exit code is 12 if anything was, even if its record cannot be read.
    """
    if (place is None) == (not logs):
        raise ConfigError("expected a repository or a built file, or logs", hint="kartifacts coverage --from LOG")
    if logs:
        if library is not None:
            raise ConfigError("--library is for repositories: logs are read whole")
        return _missed(logs, plan, as_json=as_json)
    if plan is not None:
        raise ConfigError(
            "--plan is for logs", hint="`kartifacts gate PLACE --plan PLAN` holds a repository against one"
        )
    assert place is not None
    return _covered(place, library, as_json=as_json)


def _missed(logs: tuple[str, ...], plan: Path | None, *, as_json: bool) -> int:
    from kartifacts.diagnostics import lacking, missed
    from kartifacts.publish.plan import read_plan

    wanted = None if plan is None else read_plan(plan)
    found, unread = missed.read(_lines(logs))
    for line in unread[:_SHOWN]:
        log.warning("this record of something that was missing cannot be read: %s", line)
    if len(unread) > _SHOWN:
        log.warning("and %d more cannot be read", len(unread) - _SHOWN)
    advice = lacking.advise(found, wanted)
    data = {"missed": [one.report() for one in found], "unread": unread, **advice.report()}
    nothing = "# nothing was missing" if not unread else "# what was missing cannot be read"
    emit(as_json, data, lacking.as_toml(found, advice) if found else nothing)
    return SOMETHING_MISSED if found or unread else 0


def _lines(logs: tuple[str, ...]) -> Iterator[str]:
    for log in logs:
        try:
            if log == "-":
                yield from (line.decode(errors="replace") for line in sys.stdin.buffer)
            else:
                with open(log, "rb") as file:
                    yield from (line.decode(errors="replace") for line in file)
        except OSError as error:
            raise ConfigError(f"cannot read the log {log!r}: {error.strerror or error}") from error


def _covered(place: Path, library: str | None, *, as_json: bool) -> int:
    from kartifacts.diagnostics import covered

    if place.is_dir():
        rows = list(covered.of_repository(place, library))
    elif library is not None:
        raise ConfigError(
            f"{str(place)!r} is no repository directory: --library has nothing to choose from in one file"
        )
    elif not os.path.lexists(place):
        raise ConfigError(f"there is no file or directory {str(place)!r}")
    else:
        rows = covered.of_file(place)
    table: dict[str, dict[str, set[str]]] = {}
    shown: dict[str, set[str]] = {}  # for people: no file tells the level of its CPU, so of those what is said of it
    for row in rows:
        shown.setdefault(row.uri, set()).update([row.said] if row.said.startswith("cpu:") else row.archs)
        cells = table.setdefault(row.uri, {"archs": set(), "said": set()})
        cells["archs"].update(row.archs)
        cells["said"].update([row.said] if row.said else [])
    problems = [f"{row.uri} for {row.said}: {row.problem}" for row in rows if row.problem]
    data: dict[str, Any] = {
        "place": str(place),
        "coverage": {uri: {name: sorted(archs) for name, archs in cells.items()} for uri, cells in table.items()},
        "problems": problems,
    }
    lines = [f"{uri}  {' '.join(sorted(archs))}" for uri, archs in sorted(shown.items())]
    emit(as_json, data, "\n".join([*lines, *(f"BAD {problem}" for problem in problems)]))
    return VerificationError.exit_code if problems else 0
