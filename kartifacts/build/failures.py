"""Says in one line why a step failed, as a typed error, and keeps all that the compiler said beside it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from kartifacts.build.steps import Ran, Step
from kartifacts.build.workspace import replace_file
from kartifacts.errors import BuildError, CompilerKilled, HeaderMissing, LinkMissing, StoreError

_SIGNALLED = (137, -9)  # as a shell tells it, and as an operating system does
_CRASHED = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
_CRASHES = {status: number.name for number in _CRASHED for status in (128 + number, -number)}
# As gcc, clang, nvcc and shells say it; an identifier of this name is quoted where a compiler complains of it.
_KILLED = re.compile(
    r"^(?:.*:\s+(?:\d+\s+)?)?Killed(?:\s*$|\s{2,})|\bKilled signal terminated program"
    r"|\b(?:died due to|terminated by) signal 9\b",
    re.MULTILINE,
)
_NO_MEMORY = re.compile(
    r"\bout of memory allocating \d|\bvirtual memory exhausted\b|^LLVM ERROR: out of memory"
    r"|: (?:\[Errno 12\] )?Cannot allocate memory\b|^ptxas fatal\s*: Memory allocation failure"
    r"|^terminate called after throwing an instance of 'std::bad_alloc'|\bNVRTC_ERROR_OUT_OF_MEMORY\b|^MemoryError\b",
    re.MULTILINE,
)
_NO_HEADER = re.compile(  # of gcc, clang, nvcc and NVRTC; a file that is missing on the command line has no position
    r"^\S.*?[:(]\d+\)?(?::\d+)?: (?:fatal )?error: (?P<gcc>[^\s:'\"]+): No such file"
    r"|error: '(?P<clang>[^']+)' file not found|open source file \"(?P<nvcc>[^\"]+)\"",
    re.MULTILINE,
)
_NO_LIBRARY = re.compile(  # of GNU ld, gold, lld and mold
    r"\b(?:ld|mold)\b[\w.-]*: (?:error: |fatal: )?"
    r"(?:cannot find|unable to find library|library not found:) (?P<name>\S+?)(?=:|\s|$)"
)
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
    if status in _SIGNALLED or _KILLED.search(text):
        kind = CompilerKilled
        message = f"the compiler was killed (exit status {status}), most often for want of memory, at {step.title}"
        hint = f"set KARTIFACTS_JOBS=1, or give the container more memory; full log: {log}"
    elif _NO_MEMORY.search(text):
        kind = CompilerKilled
        message = f"the compiler ran out of memory, at {step.title}: {first}"
        hint = f"set KARTIFACTS_JOBS=1, or give the container more memory; full log: {log}"
    elif _FULL.search(text):
        message = f"the disk is full, at {step.title}: {first}"
        hint = f"make room, or set KARTIFACTS_WORKSPACE to another disk; full log: {log}"
    elif match := _NO_HEADER.search(text):
        kind = HeaderMissing
        message = f"{step.title} needs the header {match[match.lastindex or 0]!r}, which is not there: {first}"
        hint = f"headers of a library lie beside its sources or in its include/; full log: {log}"
    elif match := _NO_LIBRARY.search(text):
        kind = LinkMissing
        name = match["name"].removeprefix("-l")
        message = f"{step.title} needs the library {name!r}, which the linker does not find: {first}"
        hint = f"install it for this compiler; full log: {log}"
    elif status in _CRASHES:
        message = f"the compiler crashed ({_CRASHES[status]}), at {step.title}: {first or 'it said nothing'}"
        hint = f"a fault of its own, often with a flag or a line that it cannot take; full log: {log}"
    else:
        message = f"{step.title} failed: {first or f'exit status {status}, without a message'}"
        hint = f"full log: {log}"
    return kind(message, command=step.shell, log=log, exit_status=status, hint=hint)


def of_made(error: BuildError, ran: Ran, logs: Path) -> BuildError:
    """`error`, about what a step that succeeded has made, with its command and all that its compiler said."""
    error.command = error.command or ran.step.shell
    error.log = error.log or keep_log(ran.step, ran.text, logs, f"exit status 0, and yet: {error.message}")
    said = _first_error(ran.text)
    parts = (error.hint, f"it said: {said}" if said else None, f"full log: {error.log}")
    error.hint = "; ".join(filter(None, parts))
    return error


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
