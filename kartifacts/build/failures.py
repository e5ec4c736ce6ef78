"""Says in one line why a step failed, as a typed error, and keeps all that the compiler said beside it."""

from __future__ import annotations

import re
from pathlib import Path

from kartifacts.build.steps import Step
from kartifacts.build.workspace import replace_file
from kartifacts.errors import BuildError, StoreError


class Killed(BuildError):
    """A compiler was killed, most often for want of memory: with fewer at once it may live."""


KILLED = (137, -9)  # as a shell tells it, and as an operating system does
_KILLED = re.compile(r"\bKilled\b|died due to signal 9|signal 9\b|terminated by signal 9")
_NO_HEADER = re.compile(  # of gcc, clang, nvcc and NVRTC
    r"error: ([^\s:'\"]+): No such file|error: '([^']+)' file not found|open source file \"([^\"]+)\""
)
_NO_LIBRARY = re.compile(r"(?:cannot find|unable to find library) -l(?P<name>\S+?)(?::|$)", re.MULTILINE)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_ERROR = re.compile(
    r"(?i)\b(?:fatal|error)\b\s*(?::|C?\d+:)|\bundefined reference to\b|\bcannot find -l|died due to signal|\berror\s*:"
)
_SUMMARY = re.compile(r"\d+ errors? (?:detected|generated)|collect2: ")


def explain(step: Step, status: int, text: str, logs: Path) -> BuildError:
    """The error for a step that failed: the compiler's first real complaint, with the command and the full log."""
    log = keep_log(step, text, logs, f"exit status {status}")
    first = _first_error(text)
    kind: type[BuildError] = BuildError
    if status in KILLED or _KILLED.search(text):
        kind = Killed
        message = f"the compiler was killed (exit status {status}), most often for want of memory, at {step.title}"
        hint = "set KARTIFACTS_JOBS=1, or give the container more memory"
    elif _FULL.search(text):
        message = f"the disk is full, at {step.title}: {first}"
        hint = "make room, or set KARTIFACTS_WORKSPACE to another disk"
    elif match := _NO_HEADER.search(text):
        message = f"{step.title} needs the header {match[match.lastindex or 0]!r}, which is not there: {first}"
        hint = f"headers of a library lie beside its sources or in its include/; full log: {log}"
    elif match := _NO_LIBRARY.search(text):
        message = f"{step.title} needs the library {match['name']!r}, which the linker does not find: {first}"
        hint = f"install it for this compiler; full log: {log}"
    else:
        message = f"{step.title} failed: {first or f'exit status {status}, without a message'}"
        hint = f"full log: {log}"
    return kind(message, command=step.shell, log=log, exit_status=status, hint=hint)


def keep_log(step: Step, text: str, logs: Path, end: str) -> str:
    """Write the full log and give its path; or why there is none, since what the compiler says matters more."""
    path = logs / f"{step.name}.log"
    try:
        replace_file(path, encoded(f"$ {step.shell}\n{text}\n{end}\n"))
    except StoreError as error:
        return f"not written: {error.message}"
    return str(path)


def encoded(text: str) -> bytes:
    """As the file system spells it; where the locale cannot spell a name, as UTF-8."""
    import os

    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


def _first_error(text: str) -> str:
    """The line that says what is wrong; the last line if none looks like it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _SUMMARY.match(line)]
    found = next((line for line in lines if _ERROR.search(line)), lines[-1] if lines else "")
    return found[:500]
