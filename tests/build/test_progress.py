"""Who waits for a build sees what for, how long and with how many jobs, and can end it without leaving anything."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kartifacts.build.compile import Progress
from kartifacts.build.jobs import Jobs
from kartifacts.cli.flows.building import build_line, described
from kartifacts.config import Settings

from .conftest import CPU, Compiler
from .test_compile import ended, files_in, parent

MakeSettings = Callable[..., Settings]

NOW = Progress(
    3, 10, "compiling a.cu", "norm/rmsnorm?dtype=float16", "9.0a", 12.0, 75.4, 190_000_000, Jobs(7, "memory")
)

# As `kartifacts build` does it, of a library that need not be installed.
BUILD = """
import signal, sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.library import open_library
from kartifacts.cli.flows.producing import run_compilers
from kartifacts.model.arch import parse_arch
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests by nohup has it ignored
specs, _ = open_library(Path(sys.argv[1])).specs([], [parse_arch(sys.argv[2])])
print(len(run_compilers(specs, config.read()).kernels))
"""


@pytest.fixture
def start(tmp_path: Path, root: Path, compiler: Compiler) -> Callable[..., subprocess.Popen[bytes]]:
    """Begins a build of the tiny library in a process of its own."""

    def begin(stderr: int = subprocess.PIPE, **environ: str) -> subprocess.Popen[bytes]:
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "KARTIFACTS_WORKSPACE": str(tmp_path / "workspace"),
            "KARTIFACTS_CXX": str(compiler.path),
        }
        command = [sys.executable, "-c", BUILD, str(root), str(CPU)]
        return subprocess.Popen(command, env={**base, **environ}, stdout=subprocess.PIPE, stderr=stderr)

    return begin


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_what_is_waited_for_what_is_left_and_the_memory_are_told() -> None:
    assert described(NOW) == "about 01:15 left, 190 MB at most, norm/rmsnorm?dtype=float16 for 9.0a"
    assert described(replace(NOW, arch="")).endswith("at most, norm/rmsnorm?dtype=float16")


def test_a_terminal_shows_one_line_that_changes_after_the_jobs_and_why(
    start: Callable[..., subprocess.Popen[bytes]], compiler: Compiler
) -> None:
    compiler.misbehave("sleep 0.3")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = start(theirs, KARTIFACTS_JOBS="2")
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.communicate(timeout=60)[0] == b"2\n"
    text = shown.decode()
    assert "building 2 kernels: 5 steps, jobs=2 (setting jobs)" in text
    assert re.search(
        r"building 2 kernels: +\d+%.* [1-4]/5 \[00:\d\d, about 00:\d\d left, [1-9]\d+ MB at most, demo/answer", text
    )
    assert f"demo/answer?size=large for {CPU}" in text or f"demo/answer?size=small for {CPU}" in text
    assert text.count("\n") == 1  # the rest is one line again and again
    assert text.rpartition("\r")[0].rpartition("\r")[2].strip() == ""  # which is gone in the end


def test_a_log_holds_the_jobs_and_little_else(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    for environ, jobs in (
        ({"MAX_JOBS": "3"}, r"3 \(MAX_JOBS\)"),
        ({}, r"\d+ \((cores|memory.*|cgroup.*|limit of processes)\)"),
    ):
        out, err = start(**environ, KARTIFACTS_DISK_CACHE="off").communicate(timeout=60)
        assert out == b"2\n"
        assert re.fullmatch(rf"building 2 kernels: 5 steps, jobs={jobs}\n", err.decode())


def test_nothing_is_said_where_nothing_is_wanted_or_done(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    for progress in ("off", "auto"):  # the second build finds all that the first has made
        assert start(KARTIFACTS_PROGRESS=progress).communicate(timeout=60) == (b"2\n", b"")


def test_lines_of_a_long_build_are_far_between(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("kartifacts.cli.flows.building.time.monotonic", lambda: clock[0])
    with build_line(make_settings(), 4) as show:
        for second in range(3600):
            clock[0] += 1
            show(replace(NOW, elapsed=float(second)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "building 4 kernels: 10 steps, jobs=7 (memory)"
    assert lines[1] == f"building 4 kernels: 3/10, 30 s, {described(NOW)}"
    assert 100 < len(lines) <= 121


@pytest.mark.parametrize("text", ["abc", "0", "-1", "2.5", " "])
@pytest.mark.parametrize("name", ["MAX_JOBS", "KARTIFACTS_JOBS"])
def test_a_number_of_jobs_that_is_none_is_refused_before_a_compiler_starts(
    start: Callable[..., subprocess.Popen[bytes]], compiler: Compiler, name: str, text: str
) -> None:
    process = start(**{name: text})
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(rf"ConfigError: {name}={text!r}", err.decode())
    assert compiler.compiled == []


# -- how it is ended ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_a_build_finds_no_compiler_and_no_half_output_afterwards(
    start: Callable[..., subprocess.Popen[bytes]], compiler: Compiler, tmp_path: Path, number: signal.Signals
) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    # It writes half of its output, starts another process, and hangs.
    compiler.misbehave(f"echo half > $out; sleep 600 & echo $$ $! > {told}; wait")
    process = start(KARTIFACTS_JOBS="1")
    hanging, below = map(int, told.read_text().split())
    family = [below, hanging]
    while family[-1] != process.pid:
        family.append(parent(family[-1]))
    began = time.monotonic()
    with ended(*family):
        process.send_signal(number)
        process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert process.returncode == (-number if number == signal.SIGINT else 128 + number)
    workspace = tmp_path / "workspace"
    assert not any(files_in(workspace / name) for name in ("staging", "kernels", "objects"))
    compiler.misbehave("")
    assert start().communicate(timeout=60)[0] == b"2\n"


def test_a_whole_group_that_is_interrupted_as_by_a_terminal_ends_in_order(
    start: Callable[..., subprocess.Popen[bytes]], compiler: Compiler, tmp_path: Path
) -> None:
    """Ctrl-C reaches every process of the terminal's group; compilers are not among them, and end with us."""
    told = tmp_path / "told"
    os.mkfifo(told)
    compiler.misbehave(f"echo $$ $(ps -o pgid= $$) > {told}; exec sleep 600")
    process = start(KARTIFACTS_JOBS="1")
    hanging, group = map(int, told.read_text().split())
    assert group != os.getpgid(process.pid)
    with ended(hanging):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # who is impatient
        process.communicate(timeout=30)
    assert not files_in(tmp_path / "workspace/objects")
