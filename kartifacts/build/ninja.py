"""Runs compile and link steps through ninja, tells of each one that is done, and says what went wrong in one line.

No step outlives the call: whatever ends it, be it SIGKILL, ninja is told to stop and takes its compilers with it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kartifacts.build.toolchains.probe import environment
from kartifacts.build.workspace import replace_file, storage_errors
from kartifacts.config import Settings
from kartifacts.errors import BuildError, NoCompiler, Refusal, StoreError
from kartifacts.files.trust import make_directory

_ENDED = "@ended@ "  # begins the line that ninja prints when a step has ended, one way or the other
_DONE = "@done@ "  # begins the line that a step prints when it has succeeded
_FAILED = re.compile(r"FAILED: (?:\[code=(-?\d+)\] )?(\S+)")
_GRACE = 10.0  # seconds that ninja has to stop its compilers
# Runs ninja for as long as somebody holds the other end of its standard input, which the operating system closes when
# we die.  (A signal at the parent's death would come when the thread that started it ends, and needs code after fork.)
_WATCHED = """\
exec 3<&0
"$@" </dev/null 3<&- & ninja=$!
(read -r _ <&3; kill -TERM $ninja) >/dev/null 2>&1 & watcher=$!
exec 3<&-
wait $ninja; status=$?
kill $watcher 2>/dev/null; wait $watcher 2>/dev/null
exit $status
"""


@dataclass(frozen=True)
class Step:
    """One command that makes one file.

    Args:
        name: of its log.
        title: for people.
        root: working directory of the command; nothing is written there.
        inputs: outputs of other steps that it needs.
    """

    name: str
    title: str
    root: str
    command: tuple[str, ...]
    output: Path
    inputs: tuple[Path, ...] = ()

    @property
    def shell(self) -> str:
        """The command as one types it."""
        return f"cd {shlex.quote(self.root)} && {shlex.join(self.command)}"


class Killed(BuildError):
    """A compiler was killed, most often for want of memory: with fewer at once it may live."""


def run(
    steps: Sequence[Step],
    *,
    folder: Path,
    jobs: int,
    settings: Settings,
    on_done: Callable[[Step], None],
) -> None:
    """Run every step, as many at once as `jobs`.

    Args:
        folder: a directory for ninja's own files.
        on_done: called after each step that succeeded, soon after it ended.

    Raises:
        BuildError: a step failed; steps that had begun are waited for. `Killed` if a compiler was killed.
        NoCompiler: there is no ninja.
    """
    program = find(settings)
    with storage_errors(folder):
        make_directory(folder)
        (folder / "build.ninja").write_bytes(_encoded(script(steps, folder)))
    environ = {**environment(settings), "NINJA_STATUS": _ENDED}
    command = [str(program), "-j", str(jobs)]
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", *command],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding=sys.getfilesystemencoding(),
            errors="surrogateescape",
            start_new_session=True,  # Ctrl-C reaches us alone, and we tell ninja
        )
    except (OSError, ValueError) as error:
        raise BuildError(f"ninja does not start: {error}", command=shlex.join(command)) from error
    try:
        assert process.stdout is not None
        follow = _Follower(steps, folder, settings.workspace / "logs", on_done)
        for line in process.stdout:
            follow.line(line)
        follow.end(process.wait())
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """End ninja if it still runs; on SIGTERM it ends its compilers too, which live in process groups of their own."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    if process.poll() is None:
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    process.stdout.close()


def find(settings: Settings) -> Path:
    """The ninja of the Python package, else the one on PATH."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("ninja", path=scripts) or shutil.which("ninja", path=settings.search_path)
    if found is None:
        raise NoCompiler(
            "ninja was not found, which runs the compilers",
            searched=(
                Refusal(scripts, "no program 'ninja'"),
                Refusal("PATH", f"no program 'ninja' in {settings.search_path!r}"),
            ),
            hint="pip install ninja",
        )
    return Path(found)


# -- what ninja reads --------------------------------------------------------------------------------------------------


def script(steps: Iterable[Step], folder: Path) -> str:
    """The text of build.ninja.

    Sources are no inputs: a step is there because no object of its content exists, and times of files decide nothing.
    Paths are relative to `folder`, since ninja has no escape for some characters.
    """
    lines = ["ninja_required_version = 1.7", "builddir = .", ""]
    for number, step in enumerate(steps):
        output, *inputs = (_name(path, folder) for path in (step.output, *step.inputs))
        lines += [
            f"rule r{number}",
            f"  command = {_value(f'{step.shell} && echo {_DONE}{number}')}",
            f"  description = {number}",
            f"build {output}: r{number} {' '.join(inputs)}",
            "",
        ]
    return "\n".join(lines)


def _name(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder)


def _encoded(text: str) -> bytes:
    """As the file system spells it; where the locale cannot spell a name, as UTF-8."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


def _value(text: str) -> str:
    if "\n" in text:
        raise BuildError(f"a command with a line break cannot be run: {text[:200]!r}")
    return text.replace("$", "$$")


# -- what ninja says ---------------------------------------------------------------------------------------------------


class _Follower:
    """Reads ninja's output: for each step that ended a line of its own, whether it failed, and what it printed."""

    def __init__(self, steps: Sequence[Step], folder: Path, logs: Path, on_done: Callable[[Step], None]) -> None:
        self.steps = steps
        self.by_output = {_name(step.output, folder): step for step in steps}
        self.logs = logs
        self.on_done = on_done
        self.text: list[str] = []  # of the step that ended last
        self.failed: tuple[Step, int, list[str]] | None = None  # the first that did, its status, what it printed

    def line(self, line: str) -> None:
        if line.startswith(_ENDED):
            self.text = []
        elif line.startswith(_DONE):
            self.on_done(self.steps[int(line.removeprefix(_DONE))])
        elif (match := _FAILED.match(line)) and match[2] in self.by_output:
            self.text = []
            if self.failed is None:
                self.failed = (self.by_output[match[2]], int(match[1] or 1), self.text)
        else:
            self.text.append(line)

    def end(self, status: int) -> None:
        if self.failed is not None:
            step, code, text = self.failed
            raise explain(step, code, "".join(text[1:]), self.logs)  # ninja shows the command first, which we know
        if status != 0:
            text = self.text
            raise BuildError(f"ninja exited with status {status}: {''.join(text).strip()[-500:]}", exit_status=status)


# -- what went wrong ---------------------------------------------------------------------------------------------------

_KILLED = re.compile(r"\bKilled\b|died due to signal 9|signal 9\b|terminated by signal 9")
_NO_HEADER = re.compile(  # of gcc, clang and nvcc
    r"error: ([^\s:'\"]+): No such file|error: '([^']+)' file not found|open source file \"([^\"]+)\""
)
_NO_LIBRARY = re.compile(r"(?:cannot find|unable to find library) -l(?P<name>\S+?)(?::|$)", re.MULTILINE)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_ERROR = re.compile(
    r"(?i)\b(?:fatal|error)\b\s*(?::|C?\d+:)|\bundefined reference to\b|\bcannot find -l|died due to signal|\berror\s*:"
)
_SUMMARY = re.compile(r"ninja: |\d+ errors? (?:detected|generated)|collect2: ")


def explain(step: Step, status: int, text: str, logs: Path) -> BuildError:
    """The error for a step that failed: the compiler's first real complaint, with the command and the full log."""
    log = str(logs / f"{step.name}.log")
    try:
        replace_file(Path(log), _encoded(f"$ {step.shell}\n{text}\nexit status {status}\n"))
    except StoreError as error:  # what the compiler says matters more
        log = f"not written: {error.message}"
    first = _first_error(text)
    kind: type[BuildError] = BuildError
    if status in (137, -9) or _KILLED.search(text):
        kind = Killed
        message = f"the compiler was killed (exit status {status}), most often for want of memory, at {step.title}"
        hint = "set KARTIFACTS_JOBS=1, or give the container more memory"
    elif _FULL.search(text):
        message, hint = (
            f"the disk is full, at {step.title}: {first}",
            "make room, or set KARTIFACTS_WORKSPACE and TMPDIR",
        )
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


def _first_error(text: str) -> str:
    """The line that says what is wrong; the last line if none looks like it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _SUMMARY.match(line)]
    found = next((line for line in lines if _ERROR.search(line)), lines[-1] if lines else "")
    return found[:500]
