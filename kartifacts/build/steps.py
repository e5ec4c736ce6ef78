"""What a build has to do, one file at a time, and what was measured while it was done: values alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kartifacts.build.toolchains import Command


@dataclass(frozen=True)
class Step:
    """One file that is made, by a command or by ourselves.

    Args:
        name: of its log.
        title: for people.
        root: working directory of the command; nothing is written there.
        inputs: outputs of other steps that it needs.
        action: makes the file in this process, in less time than a process takes to start.
        known_as: under which name its demand is learned; empty: it is not.
        memory: bytes that it is expected to need.
        cost: seconds that it is expected to take.
        op, arch: what it is for; empty where it is for several.
    """

    name: str
    title: str
    root: str
    output: Path
    command: Command | None = None
    action: Callable[[], None] | None = None
    inputs: tuple[Path, ...] = ()
    known_as: str = ""
    memory: int = 0
    cost: float = 0.0
    op: str = ""
    arch: str = ""

    @property
    def shell(self) -> str:
        """The command as one types it."""
        line = shlex.join(self.command.line) if self.command else f": made by kartifacts itself: {self.title}"
        return f"cd {shlex.quote(self.root)} && {line}"


@dataclass(frozen=True)
class Ran:
    """A step that succeeded.

    Args:
        began: nanoseconds since the epoch.
        cpu, wall: seconds.
        memory: bytes, of its hungriest process; 0 if it had none of its own.
        text: what the compiler said all the same.
    """

    step: Step
    began: int
    cpu: float
    wall: float
    memory: int
    text: str = ""
