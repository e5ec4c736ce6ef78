"""Builders that share a workspace do not take the same memory twice, and none waits for one that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kartifacts.build import jobs, run, workspace
from kartifacts.build.room import FILE, Room, given, to_come
from kartifacts.config import Settings

from .conftest import CPU, Compiler, write_library
from .test_run import Listener, Steps

MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return workspace.usable(tmp_path / "workspace")


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that leads a session and takes hardly any memory."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def rooms(place: Path) -> Iterator[tuple[Room, Room, ExitStack]]:
    """Two builders on a machine with 1000 MiB, and what ends the first of them."""
    with ExitStack() as first, workspace.staging(place) as own:
        other = first.enter_context(workspace.staging(place))
        left = lambda: 1000 * MIB  # noqa: E731  nothing is taken yet
        yield Room(place, other, left, limited=True), Room(place, own, left, limited=True), first


def test_what_another_builder_has_given_out_and_nobody_has_taken_yet_is_not_given_out_again(
    rooms: tuple[Room, Room, ExitStack], sleeper: int
) -> None:
    first, second, _ = rooms
    assert first.take(sleeper, 600 * MIB)
    assert not second.take(1, 600 * MIB)
    assert second.take(1, 300 * MIB)
    second.give_back(1)
    first.give_back(sleeper)
    assert second.take(1, 600 * MIB)


def test_the_only_compiler_of_a_machine_may_take_more_than_there_is(
    rooms: tuple[Room, Room, ExitStack], sleeper: int
) -> None:
    first, second, _ = rooms
    assert first.take(sleeper, 5000 * MIB)
    assert not second.take(1, MIB)
    assert second.take(1, MIB, anyway=True)  # who has waited for too long


def test_a_builder_that_is_gone_has_no_claim(rooms: tuple[Room, Room, ExitStack], sleeper: int) -> None:
    first, second, ends = rooms
    assert first.take(sleeper, 5000 * MIB)
    ends.close()
    assert second.take(1, 900 * MIB)


def test_a_builder_that_was_killed_has_no_claim(place: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from kartifacts.build import workspace
from kartifacts.build.room import Room
place = Path(sys.argv[1])
with workspace.staging(place) as staging:
    assert Room(place, staging, lambda: 100, limited=True).take(os.getpid(), 1 << 40)
    print("claimed", flush=True)
    input()
"""
    with (
        workspace.staging(place) as own,
        subprocess.Popen(
            [sys.executable, "-c", code, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        room = Room(place, own, lambda: 100, limited=True)
        assert not room.take(1, 50)
        other.kill()
        other.wait()
        assert list(place.glob(f"staging/*/{FILE}"))  # its claim is still there
        assert room.take(1, 50)


def test_what_is_taken_already_is_not_counted_twice() -> None:
    code = "b = bytearray(300 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert 150 * MIB < to_come({worker.pid: 500 * MIB}) < 200 * MIB
        assert to_come({worker.pid: 100 * MIB}) == 0
        worker.kill()
        worker.wait()
        assert to_come({worker.pid: 500 * MIB}) == 500 * MIB


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b'{"1": "x"}', b"\xff"])
def test_a_claim_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE).write_bytes(content)
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / FILE).write_text(json.dumps({"7": 8}))
    assert given([tmp_path / "bad", tmp_path / "none", tmp_path / "good"]) == {7: 8}


def test_a_builder_whose_number_of_jobs_was_stated_takes_what_it_likes_and_says_so(place: Path, sleeper: int) -> None:
    with workspace.staging(place) as one, workspace.staging(place) as two:
        stated = Room(place, one, lambda: 100, limited=False)
        assert stated.take(sleeper, 1000 * MIB)
        assert stated.take(sleeper + 1, 1000 * MIB)
        assert not Room(place, two, lambda: 1000 * MIB, limited=True).take(1, 200 * MIB)


def test_who_finds_all_memory_taken_begins_when_it_is_free(
    place: Path, settings: Settings, tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_TICK", 0.05)
    steps = Steps(tmp_path, settings)
    looks: list[int] = []
    with workspace.staging(place) as staging:
        other = Room(place, staging, lambda: 100, limited=True)
        assert other.take(sleeper, 1 << 40)

        def left() -> int:
            looks.append(1)
            if len(looks) == 5:
                other.give_back(sleeper)
            return 100

        listener = Listener()
        steps.run([steps.step("patient", memory=50)], listener, left=left)
    assert listener.order == ["patient"]
    assert len(looks) >= 5


def test_who_hangs_with_all_memory_is_not_waited_for_without_end(
    place: Path, settings: Settings, tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_TICK", 0.02)
    monkeypatch.setattr(run, "_PATIENCE", 0.2)
    steps = Steps(tmp_path, settings)
    with workspace.staging(place) as staging:
        assert Room(place, staging, lambda: 100, limited=True).take(sleeper, 1 << 40)
        listener = Listener()
        steps.run([steps.step(name, memory=50) for name in ("one", "two")], listener, left=lambda: 100, jobs=2)
    assert sorted(listener.order) == ["one", "two"]
    assert listener.most == 1


BUILD = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.model.arch import parse_arch
specs, _ = open_library(Path(sys.argv[1])).specs([], [parse_arch(sys.argv[2])])
print(len(compile_specs(specs, config.read()).kernels))
"""


def test_two_builds_whose_compilers_need_all_memory_run_them_one_after_the_other(
    root: Path, compiler: Compiler, tmp_path: Path
) -> None:
    """Eight ranks that compile at once took eight times the memory of one."""
    other = write_library(tmp_path / "otherlib", {"include/deep/scale.h": "#pragma once\n#define SCALE 8L\n"})
    running = tmp_path / "running"
    running.mkdir()
    # Each says that it runs, and who else does.
    compiler.misbehave(f"echo >> {running}/$$; ls {running} | wc -l >> {tmp_path}/at-once; sleep 0.2; rm {running}/$$")
    place = workspace.usable(tmp_path / "workspace")
    memory = 100 * (jobs.machine().available_memory or 1 << 40)
    costs = {
        f"{library}:demo/{source} cxx": {"seconds": 1.0, "memory": memory}
        for library in ("demolib", "otherlib") for source in ("answer_cpu.cpp", "answer_binding.cpp")
    }  # fmt: skip
    (place / "costs.json").write_text(json.dumps({"schema": 1, "costs": costs}))
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KARTIFACTS_WORKSPACE": str(place),
        "KARTIFACTS_CXX": str(compiler.path),
    }
    builds = [
        subprocess.Popen([sys.executable, "-c", BUILD, str(library), str(CPU)], env=environ, stdout=subprocess.PIPE)
        for library in (root, other)
    ]
    assert [build.communicate(timeout=120)[0] for build in builds] == [b"2\n", b"2\n"]
    at_once = (tmp_path / "at-once").read_text().split()
    assert len(at_once) == 6
    assert set(at_once) == {"1"}
