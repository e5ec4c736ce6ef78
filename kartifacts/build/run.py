"""Runs compilers and linkers, as many at once as cores and memory carry, and measures what each of them needed.

Every command is a job for a worker (see `toolchains/worker.py`): a small process that measures it and, when this one
ends by whatever cause, SIGKILL included, ends with all that it has started.  So no step outlives the call.
"""

from __future__ import annotations

import bisect
import logging
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kartifacts.build.failures import explain, keep_log
from kartifacts.build.jobs import Jobs
from kartifacts.build.room import Room
from kartifacts.build.steps import Ran, Step
from kartifacts.build.toolchains.probe import environment
from kartifacts.build.workers import COMMANDS, Answer, Died, Worker
from kartifacts.build.workspace import storage_errors
from kartifacts.config import Settings
from kartifacts.errors import BuildError, CompilerKilled
from kartifacts.files.trust import make_directory

log = logging.getLogger(__name__)

_TICK = 1.0  # seconds after which who listens is told how it goes, if nothing has happened
_SHORT = 0.5  # seconds: who does such a step is given the next one too, as we may be busy when it has ended
_PATIENCE = 600.0  # seconds for which other builders are left all the memory


@dataclass(frozen=True)
class Limits:
    """How many steps run at once: `jobs` at most, and as many as there is `room` for."""

    jobs: Jobs
    room: Room


class Listener(Protocol):
    """Who is told what happens, in the thread that runs the steps."""

    def running(self, steps: Sequence[tuple[Step, float]]) -> None:
        """These have run for so many seconds, longest first: whenever one begins, and every second."""

    def done(self, ran: Ran) -> None:
        """A step has succeeded."""

    def killed(self, step: Step) -> None:
        """The compiler of a step was killed, which is now expected to need more memory."""


def run(steps: Sequence[Step], limits: Limits, settings: Settings, *, staging: Path, listener: Listener) -> Jobs:
    """Run every step: those that keep others waiting longest first.

    Args:
        staging: a private directory, for temporary files of compilers (see `workspace.plainly`).

    Returns:
        How many ran at once in the end: fewer than at first after a compiler was killed.

    Raises:
        CompilerKilled: the compiler of a step was killed, or out of memory, twice.
        BuildError: a step failed otherwise; steps that had begun are waited for.
    """
    environ = environment(settings)
    temporary = staging / "temporary"
    with storage_errors(temporary):
        make_directory(temporary)
    environ["TMPDIR"] = str(temporary)
    running = _Run(steps, limits, environ, settings.workspace / "logs", listener)
    running.all()
    return running.limits.jobs


@dataclass(frozen=True)
class _Begun:
    step: Step
    at: int  # nanoseconds since the epoch
    since: float

    def ran(self, answer: Answer) -> Ran:
        return Ran(self.step, self.at, answer.cpu, answer.seconds, answer.memory, answer.text)


class _Run:
    """What is ready, what runs, and what waits for it."""

    def __init__(
        self,
        steps: Sequence[Step],
        limits: Limits,
        environ: Mapping[str, str],
        logs: Path,
        listener: Listener,
    ) -> None:
        self.limits = limits
        self.environ = environ
        self.logs = logs
        self.listener = listener
        self.order = _order(steps)
        self.ready: list[tuple[float, int, Step]] = []
        self.actions: deque[Step] = deque()  # that are ready
        self.waiting: dict[Path, list[Step]] = {}  # output of a step → those that need it
        self.lacking: dict[str, int] = {}  # name of a step → how many of its inputs are still to be made
        self.running: dict[Worker, _Begun] = {}
        self.following: dict[Worker, Step] = {}  # what it has been given to do next
        self.idle: dict[tuple[str, ...], list[Worker]] = {}
        self.retried: set[str] = set()
        self.failed: BuildError | None = None
        self.alone_since: float | None = None  # nothing runs, for want of memory
        self.selector = selectors.DefaultSelector()
        made = {step.output for step in steps}
        for step in steps:
            needed = {path for path in step.inputs if path in made}
            self.lacking[step.name] = len(needed)
            for path in needed:
                self.waiting.setdefault(path, []).append(step)
            if not needed:
                self._make_ready(step)

    def all(self) -> None:
        try:
            while True:
                self._begin_what_may()
                if self.running:
                    now = time.monotonic()
                    self.listener.running([(begun.step, now - begun.since) for begun in self.running.values()])
                elif self.failed is not None or not (self.ready or self.actions):
                    break  # else other builders have the memory
                acts = self.failed is None and bool(self.actions)
                for key, _ in self.selector.select(0 if acts else _TICK):
                    assert isinstance(key.fileobj, Worker)
                    self._hear(key.fileobj)
                if acts and self.failed is None:
                    self._act(self.actions.popleft())  # one, since meanwhile a worker may have nothing to do
            if self.failed is not None:
                raise self.failed
        finally:
            self._end()

    def _make_ready(self, step: Step) -> None:
        if step.command is None:
            self.actions.append(step)
        else:
            bisect.insort(self.ready, (*self.order[step.name], step), key=lambda item: item[:2])

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _begin_what_may(self) -> None:
        place, too_much = 0, float("inf")  # bytes for which there is no room now
        while self.failed is None and place < len(self.ready):
            step = self.ready[place][2]
            if len(self.running) >= self.limits.jobs.n:
                self._begin_what_follows()
                break
            if step.memory < too_much and self._begin(step):
                del self.ready[place]
            else:
                too_much = min(too_much, step.memory)
                place += 1

    def _begin(self, step: Step) -> bool:
        """Give a step to a worker, if there is room for it."""
        assert step.command is not None
        worker = self._worker(step.command.worker or COMMANDS)
        if not self.limits.room.take(worker.session, step.memory, anyway=self._has_waited()):
            self.idle.setdefault(worker.command, []).append(worker)
            return False
        self.alone_since = None
        self.running[worker] = _Begun(step, time.time_ns(), time.monotonic())
        _hand(step, worker)
        return True

    def _begin_what_follows(self) -> None:
        """Hand short steps, in their order, to workers that will soon have done such a one in as much memory."""
        for worker, begun in self.running.items():
            if not self.ready:
                break
            step = self.ready[0][2]
            assert step.command is not None
            short = max(begun.step.cost, step.cost) < _SHORT and step.memory <= begun.step.memory
            if short and worker not in self.following and (step.command.worker or COMMANDS) == worker.command:
                del self.ready[0]
                self.following[worker] = step
                _hand(step, worker)

    def _worker(self, kind: tuple[str, ...]) -> Worker:
        if idle := self.idle.get(kind):
            return idle.pop()
        worker = Worker(kind, self.environ)
        self.selector.register(worker, selectors.EVENT_READ)
        return worker

    def _has_waited(self) -> bool:
        """Whether nothing of ours has run for so long that those with all the memory may hang themselves."""
        if self.running:
            return False
        now = time.monotonic()
        if self.alone_since is None:
            self.alone_since = now
        return now - self.alone_since > _PATIENCE

    def _act(self, step: Step) -> None:
        begun, cpu = _Begun(step, time.time_ns(), time.monotonic()), time.process_time()
        assert step.action is not None
        _make_room(step)
        step.action()
        seconds, cpu = time.monotonic() - begun.since, time.process_time() - cpu
        self._is_done(begun.ran(Answer(0, "", seconds, cpu, 0)))

    # -- ending --------------------------------------------------------------------------------------------------------

    def _hear(self, worker: Worker) -> None:
        try:
            answers = worker.answers()
        except Died as error:
            self._has_died(worker, error)
            return
        for answer in answers:
            begun = self.running.pop(worker)
            if (step := self.following.pop(worker, None)) is not None:  # in the same room
                self.running[worker] = _Begun(step, begun.at, time.monotonic())
            else:
                self.limits.room.give_back(worker.session)
                self.idle.setdefault(worker.command, []).append(worker)
            if answer.status == 0:
                self._has_ended(begun, answer)
            else:
                self._has_failed(begun.step, answer.status, answer.text, answer.memory)

    def _has_died(self, worker: Worker, error: Died) -> None:
        self.selector.unregister(worker)
        worker.end()
        if worker not in self.running:
            self.idle[worker.command].remove(worker)
            return
        self.limits.room.give_back(worker.session)
        if (step := self.following.pop(worker, None)) is not None:
            self._make_ready(step)
        self._has_failed(self.running.pop(worker).step, error.status, error.text, 0)

    def _has_ended(self, begun: _Begun, answer: Answer) -> None:
        ran = begun.ran(answer)
        self._begin_what_may()  # before we are busy with what was made
        if answer.text.strip():
            log.debug("%s says: %s", begun.step.title, keep_log(begun.step, answer.text, self.logs, "succeeded"))
        self._is_done(ran)

    def _is_done(self, ran: Ran) -> None:
        self.listener.done(ran)
        for step in self.waiting.pop(ran.step.output, ()):
            self.lacking[step.name] -= 1
            if not self.lacking[step.name]:
                self._make_ready(step)

    def _has_failed(self, step: Step, status: int, text: str, memory: int) -> None:
        error = explain(step, status, text, self.logs)
        if isinstance(error, CompilerKilled) and step.name not in self.retried and self.failed is None:
            self.retried.add(step.name)
            fewer = max(1, self.limits.jobs.n // 2)
            log.warning("%s; trying it again with jobs=%d", error.message, fewer)
            reason = f"halved, since a compiler was killed; before: {self.limits.jobs.reason}"
            self.limits = replace(self.limits, jobs=Jobs(fewer, reason))
            step = replace(step, memory=max(2 * step.memory, memory))
            self.listener.killed(step)
            self._make_ready(step)
        elif self.failed is None:
            self.failed = error
            if self.running:
                log.warning("%s; waiting for %d steps that have begun", error.message, len(self.running))

    def _end(self) -> None:
        self.selector.close()
        for worker in self.running:
            worker.end(busy=True)
        for workers in self.idle.values():
            for worker in workers:
                worker.end()


def _hand(step: Step, worker: Worker) -> None:
    assert step.command is not None
    _make_room(step)
    worker.give(step.command.arguments, step.root)


def _make_room(step: Step) -> None:
    with storage_errors(step.output.parent):
        make_directory(step.output.parent)


def _order(steps: Sequence[Step]) -> dict[str, tuple[float, int]]:
    """What is to be begun first has the lowest: what others have been made for, then what is long with all after it."""
    after: dict[Path, float] = {}  # output → seconds of what needs it
    for step in steps:
        for path in step.inputs:
            after[path] = max(after.get(path, 0.0), step.cost)
    return {
        step.name: (float("-inf") if step.inputs else -(step.cost + after.get(step.output, 0.0)), number)
        for number, step in enumerate(steps)
    }
