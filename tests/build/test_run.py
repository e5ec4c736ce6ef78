"""Commands run in the order that ends soonest, within memory, and none is lost or left behind: with real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kartifacts.build import workspace
from kartifacts.build.jobs import Jobs
from kartifacts.build.room import Room
from kartifacts.build.run import Limits, run
from kartifacts.build.steps import Ran, Step
from kartifacts.build.toolchains import Command
from kartifacts.config import Settings
from kartifacts.errors import BuildError, CompilerKilled, KartifactsError

MIB = 1 << 20


@dataclass
class Listener:
    """Writes down what it is told, and does `then` after a step."""

    then: Callable[[Ran], object] = lambda ran: None
    most: int = 0  # that ran at once
    order: list[str] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    doomed: list[Step] = field(default_factory=list)

    def running(self, steps: Sequence[tuple[Step, float]]) -> None:
        self.most = max(self.most, len(steps))

    def done(self, ran: Ran) -> None:
        self.ran.append(ran)
        self.order.append(ran.step.name)
        self.then(ran)

    def killed(self, step: Step) -> None:
        self.doomed.append(step)


class Steps:
    """Steps whose commands are lines of a shell, which find the file to make in $out."""

    def __init__(self, place: Path, settings: Settings) -> None:
        self.place = place
        self.settings = settings

    def step(
        self, name: str, shell: str = "", *, memory: int = 1, cost: float = 1.0, after: Sequence[Step] = ()
    ) -> Step:
        output = self.place / "made" / name
        command = Command(("/bin/sh", "-c", f"out={output}\n{shell}\necho {name} > $out"))
        inputs = tuple(step.output for step in after)
        return Step(
            name, f"making {name}", str(self.place), output, command, inputs=inputs, memory=memory, cost=cost
        )  # fmt: skip

    def run(
        self, steps: Sequence[Step], listener: Listener, *, jobs: int = 1, left: Callable[[], int | None] = lambda: None
    ) -> Jobs:
        settings = self.settings
        with workspace.staging(workspace.usable(settings.workspace)) as staging:
            room = Room(settings.workspace, staging, left, limited=True)
            return run(steps, Limits(Jobs(jobs, "a test"), room), settings, staging=staging, listener=listener)


@pytest.fixture
def steps(tmp_path: Path, settings: Settings) -> Steps:
    return Steps(tmp_path, settings)


# -- order -------------------------------------------------------------------------------------------------------------


def test_what_keeps_others_waiting_longest_begins_first(steps: Steps) -> None:
    short = steps.step("short", cost=1)
    last = steps.step("last", cost=10, after=[short])
    listener = Listener()
    steps.run([steps.step("middle", cost=3), steps.step("long", cost=5), last, short], listener)
    # A free place is filled before what was made is put away and frees others.
    assert listener.order == ["short", "long", "last", "middle"]


def test_what_needs_a_file_waits_for_it_however_many_may_run(steps: Steps) -> None:
    first = [steps.step(f"first{number}", "sleep 0.1") for number in range(3)]
    content = "".join(f"cat {step.output} > /dev/null || exit 1\n" for step in first)
    listener = Listener()
    steps.run([steps.step("last", content, cost=100, after=first), *first], listener, jobs=8)
    assert listener.order[-1] == "last"
    assert listener.most == 3


def test_no_more_run_at_once_than_jobs_and_as_many_do(steps: Steps) -> None:
    listener = Listener()
    steps.run([steps.step(f"s{number}", "sleep 0.05") for number in range(6)], listener, jobs=2)
    assert listener.most == 2
    assert sorted(listener.order) == [f"s{number}" for number in range(6)]


def test_workers_go_on_with_short_steps_while_what_they_made_is_put_away(steps: Steps) -> None:
    first, second, third = (steps.step(name, f"echo {name} >> {steps.place}/ran", cost=0.1) for name in "abc")

    def wait(ran: Ran) -> None:
        over = time.monotonic() + 20
        while ran.step is first and not third.output.exists():
            assert time.monotonic() < over, "the worker waits for us"
            time.sleep(0.01)

    listener = Listener(wait)
    steps.run([first, second, third], listener)
    assert listener.order == ["a", "b", "c"]
    assert (steps.place / "ran").read_text().split() == ["a", "b", "c"]


def test_what_a_worker_was_to_do_next_is_done_though_it_dies(steps: Steps) -> None:
    once = f"mkdir {steps.place}/once 2>/dev/null && {{ sleep 0.3; kill -9 $PPID; }}"
    listener = Listener()
    steps.run([steps.step("doomed", once, cost=0.2), *(steps.step(f"s{n}", cost=0.1) for n in range(3))], listener)
    assert sorted(listener.order) == ["doomed", "s0", "s1", "s2"]
    assert [step.name for step in listener.doomed] == ["doomed"]


def test_a_short_step_that_needs_more_memory_than_the_one_before_waits_for_room(steps: Steps) -> None:
    modest = [steps.step(f"m{number}", "sleep 0.2", memory=4, cost=0.3) for number in range(2)]
    listener = Listener()
    steps.run([*modest, steps.step("hungry", memory=9, cost=0.2)], listener, jobs=2, left=lambda: 10)
    assert listener.order[-1] == "hungry"
    assert next(ran.began for ran in listener.ran if ran.step.name == "hungry") > max(
        ran.began + int(ran.wall * 1e9) for ran in listener.ran if ran.step in modest
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def test_no_more_memory_is_given_out_than_there_was_though_it_is_not_taken_yet(steps: Steps) -> None:
    listener = Listener()
    steps.run(
        [steps.step(f"s{number}", "sleep 0.1", memory=4) for number in range(5)], listener, jobs=8, left=lambda: 10
    )
    assert listener.most == 2


def test_a_step_that_needs_more_than_all_memory_runs_by_itself(steps: Steps) -> None:
    alone: list[bool] = []
    huge = steps.step("huge", "sleep 0.1", memory=1000, cost=0.1)
    listener = Listener(lambda ran: alone.append(ran.step is huge))
    steps.run([huge, *(steps.step(f"s{number}", memory=1) for number in range(3))], listener, jobs=8, left=lambda: 10)
    assert alone == [False, False, False, True]


def test_small_steps_pass_one_for_which_there_is_no_room(steps: Steps) -> None:
    listener = Listener()
    large = [steps.step(f"large{number}", "sleep 0.3", memory=6, cost=10) for number in range(2)]
    steps.run([*large, steps.step("small", memory=2, cost=1)], listener, jobs=2, left=lambda: 10)
    assert listener.order == ["small", "large0", "large1"]


def test_memory_that_any_program_has_taken_meanwhile_is_not_given_out(steps: Steps) -> None:
    looks = iter([100])  # at first; then somebody takes nearly all of it
    listener = Listener()
    steps.run(
        [steps.step(f"s{number}", memory=10) for number in range(3)], listener, jobs=8, left=lambda: next(looks, 5)
    )
    assert (listener.most, len(listener.order)) == (1, 3)


def test_what_a_step_needed_is_that_of_its_hungriest_process_and_all_their_time(steps: Steps) -> None:
    hungry = f"{sys.executable} -S -c 'b = bytearray(200 << 20); import time; e = time.process_time() + 0.2'"
    busy = f"{hungry[:-1]}\nwhile time.process_time() < e: pass'"
    listener = Listener()
    steps.run([steps.step("hungry", busy), steps.step("modest", cost=0)], listener)
    hungry_one, modest = listener.ran
    assert 200 * MIB < hungry_one.memory < 300 * MIB
    assert 0.2 <= hungry_one.cpu < 5
    assert hungry_one.wall >= 0.2
    assert modest.memory < 50 * MIB  # that of this job alone, though the same worker did it


# -- what dies ---------------------------------------------------------------------------------------------------------

KILLED = {
    "the compiler": "kill -9 $$",
    "below a shell": "sh -c 'kill -9 $$' || exit 137",
    "its worker": "kill -9 $PPID",
    "want of memory": "ulimit -v 2000000; exec @python -S -c 'bytearray(8 << 30)'",
}


@pytest.mark.parametrize("how", KILLED)
def test_a_compiler_that_dies_for_want_of_memory_is_tried_once_more_with_half_the_jobs(steps: Steps, how: str) -> None:
    dies = KILLED[how].replace("@python", sys.executable)
    once = f"mkdir {steps.place}/once 2>/dev/null && {{ {dies}; }}"
    listener = Listener()
    jobs = steps.run([steps.step("doomed", once, memory=100), steps.step("other")], listener, jobs=4)
    assert sorted(listener.order) == ["doomed", "other"]
    assert jobs.n == 2
    assert "halved" in jobs.reason
    [expected] = listener.doomed
    assert expected.memory >= 200  # so that the next build gives it more


@pytest.mark.parametrize("how", KILLED)
def test_a_compiler_that_dies_twice_ends_the_build(steps: Steps, how: str) -> None:
    dies = KILLED[how].replace("@python", sys.executable)
    told = steps.place / "told"
    with pytest.raises(CompilerKilled, match="making doomed"):
        steps.run([steps.step("doomed", f"echo >> {told}\n{dies}")], Listener())
    assert told.read_text().count("\n") == 2


def test_a_failure_begins_nothing_more_and_lets_what_runs_end(steps: Steps) -> None:
    listener = Listener()
    running = steps.step("running", "sleep 0.3", cost=9)
    with pytest.raises(BuildError, match=r"making bad failed: a\.c:1: error: no"):
        steps.run(
            [running, steps.step("bad", "echo 'a.c:1: error: no'; exit 1", cost=8), steps.step("never", cost=1)],
            listener,
            jobs=2,
        )
    assert listener.order == ["running"]
    assert not (steps.place / "made/never").exists()


def test_of_two_failures_the_first_is_told(steps: Steps) -> None:
    with pytest.raises(BuildError, match="the first"):
        steps.run(
            [
                steps.step("one", "echo 'a.c:1: error: the first'; exit 1"),
                steps.step("two", "sleep 0.3; echo 'a.c:1: error: the second'; exit 1"),
            ],
            Listener(),
            jobs=2,
        )


def test_a_worker_that_is_killed_while_it_has_nothing_to_do_is_replaced(steps: Steps) -> None:
    told = steps.place / "worker"
    first = steps.step("first", f"echo $PPID > {told}", cost=2)

    def kill(ran: Ran) -> None:
        if ran.step is first:
            os.kill(int(told.read_text()), signal.SIGKILL)

    second = steps.step("second", "sleep 0.5", cost=2)
    third, last = (steps.step(name, after=[second]) for name in ("third", "last"))
    listener = Listener(kill)
    steps.run([first, second, third, last], listener, jobs=2)
    assert sorted(listener.order) == ["first", "last", "second", "third"]
    assert listener.doomed == []


def test_what_a_listener_raises_ends_the_build_with_all_that_it_started(steps: Steps) -> None:
    told = steps.place / "pid"

    def refuse(ran: Ran) -> None:
        while not told.exists() or not told.read_text().strip():
            pass
        raise KartifactsError("not what was promised")

    with pytest.raises(KartifactsError, match="promised"):
        steps.run(
            [steps.step("hangs", f"echo $$ > {told}; exec sleep 600"), steps.step("made")], Listener(refuse), jobs=2
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
