"""Worker processes, from this side: starts one, gives it a job, takes its answer, ends it with all it has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from kartifacts.build.failures import encoded
from kartifacts.errors import BuildError

COMMANDS = (sys.executable, "-I", "-S", str(Path(__file__).with_name("toolchains") / "worker.py"))
"""How the worker is started whose jobs are command lines."""
_GRACE = 5.0  # seconds: longer than a worker gives its compilers
_PAUSE = 0.005
_MOST_ERRORS = 1 << 20  # bytes


class Answer(msgspec.Struct, frozen=True):
    """What a worker says about a job: see `toolchains/worker.py`."""

    status: int
    text: str
    seconds: float
    cpu: float
    memory: int


class Died(Exception):
    """A worker ended in the middle of its job: its exit status, -9 if it was killed, and what it left on its way."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Worker:
    """A process that does one job after the other.

    Raises:
        BuildError: it does not start.
    """

    def __init__(self, command: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self.command = command
        self._errors = os.memfd_create("errors")
        self._buffer = bytearray()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environ,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches us alone, and all that it starts can be ended by one signal
            )
        except (OSError, ValueError) as error:
            os.close(self._errors)
            raise BuildError(f"a worker for compilers does not start: {error}", command=" ".join(command)) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin, self._process.stdout

    @property
    def session(self) -> int:
        """The process that leads the session of all that it starts."""
        return self._process.pid

    def fileno(self) -> int:
        """Can be read from when there is something for `answers`."""
        return self._answers.fileno()

    def give(self, arguments: tuple[str, ...], root: str) -> None:
        job = {"arguments": [_spelled(word) for word in arguments], "cwd": _spelled(root)}
        line = memoryview(json.dumps(job).encode() + b"\n")
        with suppress(BrokenPipeError):  # it has died, which `answers` will say
            while line:
                line = line[self._jobs.write(line) :]

    def answers(self) -> list[Answer]:
        """The answers of which the whole is there, in the order of their jobs.

        Raises:
            Died: there will be none.
        """
        piece = os.read(self.fileno(), 1 << 16)
        *lines, rest = bytes(self._buffer + piece).split(b"\n")
        self._buffer = bytearray(rest)
        try:
            if not piece:
                raise ValueError("it has ended")
            return [msgspec.convert(json.loads(line), Answer) for line in lines]  # ours takes no lone surrogates
        except ValueError:
            self._kill()
            left = b"\n".join((*lines, rest)).decode(errors="replace")
            raise Died(self._process.wait(), self._said() + left) from None

    def end(self, *, busy: bool = False) -> None:
        """End it; one that is `busy` may let its compiler remove temporary files, in a few seconds."""
        for pipe in (self._jobs, self._answers):
            with suppress(OSError):
                pipe.close()
        over = time.monotonic() + _GRACE
        while busy and time.monotonic() < over and not _has_ended(self._process.pid):
            time.sleep(_PAUSE)
        self._kill()
        self._process.wait()
        os.close(self._errors)

    def _kill(self) -> None:
        """While the process has not been waited for nobody else can have its number."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _said(self) -> str:
        return os.pread(self._errors, _MOST_ERRORS, 0).decode("utf-8", "surrogateescape")


def _has_ended(process: int) -> bool:
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has waited for it
        return True


def _spelled(word: str) -> str:
    """A worker takes all names for UTF-8, whatever the locale of this process."""
    return encoded(word).decode("utf-8", "surrogateescape")
