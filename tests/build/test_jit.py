from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import kept
from kartifacts.build.compile import Progress
from kartifacts.build.jit import build_one, explain_key, find_built
from kartifacts.build.toolchains import find
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, KartifactsError, StoreError
from kartifacts.files import locking
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec
from tests.conftest import Machine

from .conftest import CPU, Compiler, answer_of

MakeSettings = Callable[..., Settings]
MakeSpec = Callable[..., Spec]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def watched(make_settings: MakeSettings, compiler: Compiler) -> Settings:
    return make_settings(KARTIFACTS_CXX=str(compiler.path))


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def together(count: int, work: Callable[[], str]) -> list[str]:
    """What `work` gives in `count` processes that begin at the same moment; the name of the error if it raises."""
    start = FORK.Barrier(count)
    answers: Any = FORK.Queue()

    def one() -> None:
        start.wait()
        try:
            answers.put(work())
        except KartifactsError as error:
            answers.put(type(error).__name__)

    processes = [FORK.Process(target=one) for _ in range(count)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return found


# -- once --------------------------------------------------------------------------------------------------------------


def test_sixteen_cold_processes_compile_one_kernel_once(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    spec = make_spec()
    paths = together(16, lambda: str(build_one(spec, watched).path))
    assert len(set(paths)) == 1
    assert sorted(compiler.compiled) == ["demo/answer_binding.cpp", "demo/answer_cpu.cpp"]
    assert answer_of(Path(paths[0])) == 7


def test_a_compiler_that_fails_gives_every_process_the_same_error_and_the_next_run_tries_again(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    spec = make_spec()
    compiler.misbehave(": > $out; exit 0")
    assert together(4, lambda: str(build_one(spec, watched).path)) == ["BuildError"] * 4
    assert find_built(spec, watched) is None
    compiler.misbehave("")
    assert answer_of(build_one(spec, watched).path) == 7


def test_a_warm_look_up_writes_nothing_and_starts_nothing(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_one(make_spec(), settings)
    before = snapshot(settings.workspace)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert build_one(make_spec(), settings) == built
    assert snapshot(settings.workspace) == before


def test_what_was_built_is_found_again_without_any_compiler(
    settings: Settings, make_settings: MakeSettings, make_spec: MakeSpec
) -> None:
    built = build_one(make_spec(), settings)
    assert find_built(make_spec(), make_settings(PATH="")) == built
    assert find_built(make_spec("large"), make_settings(PATH="")) is None


def test_a_build_for_another_arch_or_of_another_compiler_is_not_taken(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    spec = make_spec()
    built = build_one(spec, watched)
    if CPU.name == "x86-64":
        assert find_built(make_spec(arch=parse_arch("cpu:x86-64-v2")), watched) is None
    compiler.misbehave("echo 'g++ (Other) 99.9'; exit 0", on="--version")
    other = find("cxx", watched)
    assert find_built(spec, watched, other) is None
    assert find_built(spec, watched) == built
    again = build_one(spec, watched)
    assert again.key != built.key
    assert again.op_digest == built.op_digest


READ_ONLY = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.build import jit, library
from kartifacts.model.arch import parse_arch
spec = library.open_library(Path(sys.argv[1])).spec("answer", {"size": "small"}, parse_arch(sys.argv[2]))
settings = config.read()
print(settings.workspace.joinpath("probe").touch() if sys.argv[3] == "write" else jit.build_one(spec, settings).path)
"""


def test_a_complete_workspace_that_cannot_be_written_is_enough(settings: Settings, make_spec: MakeSpec) -> None:
    built = build_one(make_spec(), settings)
    mount = f"mount --bind {settings.workspace} {settings.workspace} && mount -o remount,ro,bind {settings.workspace}"
    environ = {"KARTIFACTS_WORKSPACE": str(settings.workspace), "PATH": settings.search_path}

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", READ_ONLY, make_spec().root, str(CPU), what]
        inside = ["unshare", "-r", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        return subprocess.run(inside, env=environ, capture_output=True, text=True, check=False)

    if "Read-only file system" not in run("write").stderr:
        pytest.skip("needs unshare and the right to mount a directory read-only")
    done = run("build")
    assert done.stdout.strip() == str(built.path), done.stderr


# -- locks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(watched: Settings, make_spec: MakeSpec, compiler: Compiler, tmp_path: Path) -> Any:
    """Another process that holds the lock while its compiler hangs; gives it, and what lets the compiler go on."""
    told, go = tmp_path / "told", tmp_path / "go"
    os.mkfifo(told)
    compiler.misbehave(
        f'case "$all" in *answer_cpu*) echo $$ > {told}; while [ ! -e {go} ]; do sleep 0.02; done;; esac'
    )
    spec = make_spec()
    process = FORK.Process(target=lambda: build_one(spec, watched))
    process.start()
    pid = int(told.read_text())
    yield process, go
    go.write_text("")
    process.join()
    assert pid


def test_a_killed_holder_frees_the_lock_at_once(
    held: tuple[Any, Path], watched: Settings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    holder, _ = held
    holder.kill()
    holder.join()
    compiler.misbehave("")
    assert answer_of(build_one(make_spec(), watched).path) == 7


def test_who_waits_says_for_whom_and_gets_what_the_holder_built(
    held: tuple[Any, Path], watched: Settings, make_spec: MakeSpec, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    holder, go = held
    spec = make_spec()
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(build_one(spec, watched, heartbeat=0.01).path))
    waiter.start()
    while not caplog.records:
        waiter.join(0.01)
    go.write_text("")
    waiter.join()
    holder.join()
    message = caplog.records[0].getMessage()
    assert message.startswith(f"waiting for demo/answer?size=small for {CPU}, which process {holder.pid} on ")
    assert "builds: " in message
    assert answer_of(found[0]) == 7
    assert compiler.compiled.count("demo/answer_cpu.cpp") == 1


def test_who_builds_says_that_it_goes_on(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = tmp_path / "go"
    compiler.misbehave(f"while [ ! -e {go} ]; do sleep 0.02; done")
    spec = make_spec()
    builder = threading.Thread(target=lambda: build_one(spec, watched, heartbeat=0.01))
    builder.start()
    while len(caplog.records) < 2:
        builder.join(0.01)
    go.write_text("")
    builder.join()
    assert f"still building demo/answer?size=small for {CPU}: " in caplog.records[1].getMessage()
    assert f"process {os.getpid()}" in caplog.records[1].getMessage()


def test_a_lock_file_left_behind_means_nothing(settings: Settings, make_spec: MakeSpec) -> None:
    spec = make_spec()
    lock = settings.workspace / "locks" / spec.key(find("cxx", settings).fingerprint)
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text("process 1 on another-host")
    assert answer_of(build_one(spec, settings).path) == 7


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_lies_in_the_place_of_a_lock_costs_one_warning(
    settings: Settings,
    make_spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plant: Callable[[Path], None],
) -> None:
    spec = make_spec()
    lock = settings.workspace / "locks" / spec.key(find("cxx", settings).fingerprint)
    lock.parent.mkdir(parents=True, exist_ok=True)
    plant(lock)
    monkeypatch.setattr(locking, "_warned", set())
    assert answer_of(build_one(spec, settings).path) == 7
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert os.path.lexists(lock)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_no_directory_for_locks_costs_one_warning(
    settings: Settings,
    make_spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    settings.workspace.mkdir(parents=True, exist_ok=True)
    locks = settings.workspace / "locks"
    locks.touch() if kind == "file" else locks.symlink_to("nowhere")
    monkeypatch.setattr(locking, "_warned", set())
    assert answer_of(build_one(make_spec(), settings).path) == 7
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EACCES, errno.EOPNOTSUPP, errno.EIO, errno.ESTALE])
def test_a_file_system_without_locks_costs_one_warning(
    settings: Settings,
    make_spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locking, "_warned", set())
    assert answer_of(build_one(make_spec("small"), settings).path) == 7
    assert answer_of(build_one(make_spec("large"), settings).path) == 7000
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert os.strerror(code) in warnings[0].getMessage()


def test_the_locks_of_a_workspace_on_a_network_file_system_are_this_nodes(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setattr(locking, "network_kind", lambda mounts, device: "lustre")
    monkeypatch.setattr(locking, "_NODE_LOCAL", (node,))
    seen: list[str] = []

    def look(progress: Progress) -> None:
        seen.extend(path.name for path in node.rglob("*") if path.is_file())

    built = build_one(make_spec(), settings, progress=look)
    assert set(seen) == {built.key}
    assert not list((settings.workspace / "locks").iterdir())


# -- several at once, without a lock -----------------------------------------------------------------------------------


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: None)


def test_without_locks_only_age_tells_that_a_build_was_killed(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as NFS says of a directory

    monkeypatch.setattr(fcntl, "flock", refuse)
    staging = settings.workspace / "staging"
    for name in (
        f"{os.uname().nodename}-1-young",
        f"{os.uname().nodename}-1-old",
        "elsewhere-1-young",
        "elsewhere-1-old",
    ):
        (staging / name).mkdir(parents=True)
        if name.endswith("old"):
            os.utime(staging / name, (0, 0))
    build_one(make_spec(), settings)
    assert {path.name.split("-")[-1] for path in staging.iterdir()} == {"young"}
    assert len(list(staging.iterdir())) == 2


def test_without_locks_several_builders_end_with_one_kernel(
    watched: Settings, make_spec: MakeSpec, without_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kartifacts.build.workspace._reap", lambda parent: None)  # it would take all for abandoned
    spec = make_spec()
    paths = together(4, lambda: str(build_one(spec, watched).path))
    assert {answer_of(Path(path)) for path in paths} == {7}
    assert len(set(paths)) == 1


def test_the_loser_of_the_race_uses_its_own_build_if_it_cannot_see_the_winners(
    settings: Settings, make_spec: MakeSpec
) -> None:
    spec = make_spec()
    key = spec.key(find("cxx", settings).fingerprint)
    taken = kept.folder(settings.workspace, spec) / key
    (taken / "not yet visible").mkdir(parents=True)
    built = build_one(spec, settings)
    assert answer_of(built.path) == 7
    assert built.path.parent != taken
    assert built.path.parent.parent == taken.parent
    assert built.key == key


def test_a_rename_that_reports_failure_after_it_was_done_is_no_failure(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "stale answer of a server", str(source))

    monkeypatch.setattr(os, "rename", late)
    built = build_one(make_spec(), settings)
    assert built.path.parent.name == built.key
    assert answer_of(built.path) == 7


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "cut", "record", "foreign record", "no record", "no kernel"])
def test_a_damaged_build_is_made_again_and_who_uses_the_old_file_keeps_it(
    settings: Settings, make_spec: MakeSpec, damage: str
) -> None:
    first = build_one(make_spec(), settings)
    content = first.path.read_bytes()
    record = first.path.with_name(kept.RECORD)
    with first.path.open("rb") as used:
        first.path.chmod(0o644)
        if damage == "flipped":
            first.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif damage == "cut":
            first.path.write_bytes(content[:100])
        elif damage == "record":
            record.write_bytes(record.read_bytes()[:-5])
        elif damage == "foreign record":
            record.write_text(json.dumps({**json.loads(record.read_text()), "arch": "9.0a"}))
        else:
            (record if damage == "no record" else first.path).unlink()
        assert find_built(make_spec(), settings) is None
        second = build_one(make_spec(), settings)
        assert used.read()[:4] == content[:4]
    assert second.sha256 == first.sha256
    assert answer_of(second.path) == 7
    assert build_one(make_spec(), settings).path.read_bytes() == content
    assert not list((settings.workspace / "staging").iterdir())


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "{file}", "{file}/x", "{loop}", "{full}", "{long}"])
def test_a_workspace_that_cannot_be_is_told_with_what_to_set(
    tmp_path: Path, make_settings: MakeSettings, make_spec: MakeSpec, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kernels").touch()  # where a directory is to be
    named = {name: tmp_path / name for name in ("file", "loop", "full")}
    settings = make_settings(KARTIFACTS_WORKSPACE=place.format(**named, long=tmp_path / ("x" * 300)))
    with pytest.raises(StoreError) as caught:
        build_one(make_spec(), settings)
    assert "KARTIFACTS_WORKSPACE" in (caught.value.hint or "")


def test_a_damaged_build_is_warned_of_once_in_a_load_and_again_when_it_is_damaged_anew(
    machine: Machine, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for size in ("1", "1000"):  # other registries, so that nothing is in their memory
        path = machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=size).path
        for damage in (b"cut", b"flipped"):
            path.chmod(0o644)
            path.unlink()
            path.write_bytes(damage)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=size).origin == "jit"
            said = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
            assert len(said) == 1, said
            assert str(path.parent) in said[0]


def test_a_build_in_a_workspace_that_others_may_write_is_not_run(settings: Settings, make_spec: MakeSpec) -> None:
    build_one(make_spec(), settings)
    settings.workspace.chmod(0o777)
    for ask in (find_built, build_one):
        with pytest.raises(StoreError, match="may be written by other users"):
            ask(make_spec(), settings)
    if os.geteuid() == 0:
        settings.workspace.chmod(0o755)
        os.chown(settings.workspace, 12345, 12345)
        with pytest.raises(StoreError, match="belongs to user 12345"):
            find_built(make_spec(), settings)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory to another user")
def test_a_workspace_below_what_another_user_made_in_a_shared_place_is_refused(
    make_settings: MakeSettings, make_spec: MakeSpec, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / "kartifacts-0").mkdir(parents=True)
    shared.chmod(0o1777)
    settings = make_settings(KARTIFACTS_WORKSPACE=str(shared / "kartifacts-0" / "workspace"))
    build_one(make_spec(), settings)
    os.chown(shared / "kartifacts-0", 12345, 12345)
    for ask in (find_built, build_one):
        with pytest.raises(StoreError, match=r"kartifacts-0' belongs to user 12345"):
            ask(make_spec(), settings)


def test_a_full_disk_is_a_typed_error_and_leaves_what_was_there(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_one(make_spec("small"), settings)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        build_one(make_spec("large"), settings)
    monkeypatch.undo()
    assert find_built(make_spec("small"), settings) == first
    assert find_built(make_spec("large"), settings) is None
    assert not list((settings.workspace / "staging").iterdir())


def test_published_folders_are_as_open_as_the_umask_says(settings: Settings, make_spec: MakeSpec) -> None:
    old = os.umask(0o022)
    try:
        built = build_one(make_spec(), settings)
    finally:
        os.umask(old)
    assert built.path.stat().st_mode & 0o777 == 0o444
    for path in (built.path.parent, built.path.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o755


# -- explaining --------------------------------------------------------------------------------------------------------


def test_every_ingredient_of_a_key_is_shown(settings: Settings, make_spec: MakeSpec) -> None:
    shown = explain_key(make_spec(), settings)
    built = build_one(make_spec(), settings)
    assert (shown["key"], shown["op_digest"]) == (built.key, built.op_digest)
    assert shown["parts"] == json.loads(built.path.with_name(kept.RECORD).read_text())["parts"]
    assert {"arch", "toolchain", "sources", "flags", "defines", "uri", "ffi"} <= set(shown["parts"])
    assert make_spec().root not in json.dumps(shown)


def test_an_arch_of_another_machine_is_refused_before_anything_is_written(
    settings: Settings, make_spec: MakeSpec
) -> None:
    other = parse_arch("cpu:aarch64" if CPU.name == "x86-64" else "cpu:x86-64")
    with pytest.raises(ConfigError):
        build_one(make_spec(arch=other), settings)
    assert not (settings.workspace / "locks").exists()


def test_a_workspace_on_a_disk_without_hard_links_works(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    assert answer_of(build_one(make_spec(), settings).path) == 7
    shutil.rmtree(settings.workspace / "kernels")
    assert answer_of(build_one(make_spec(), settings).path) == 7


def test_errors_carry_the_command_and_the_log(watched: Settings, make_spec: MakeSpec, compiler: Compiler) -> None:
    compiler.misbehave("echo 'a.cpp:1:1: error: no'; exit 1")
    with pytest.raises(BuildError) as caught:
        build_one(make_spec(), watched)
    assert str(compiler.path) in caught.value.command
    assert "error: no" in Path(caught.value.log).read_text()


def test_a_child_forked_during_a_build_does_not_keep_the_lock(settings: Settings, make_spec: MakeSpec) -> None:
    spec = make_spec()
    over = FORK.Event()
    children: list[Any] = []

    def fork(progress: Progress) -> None:
        if not children:
            children.append(FORK.Process(target=over.wait))
            children[0].start()

    built = build_one(spec, settings, progress=fork)
    with locking.hold(settings.workspace / "locks" / built.key, patience=0) as held:
        assert held
    over.set()
    children[0].join()


def test_nobody_else_may_write_what_was_built_whatever_the_umask(settings: Settings, make_spec: MakeSpec) -> None:
    old = os.umask(0)
    try:
        built = build_one(make_spec(), settings)
    finally:
        os.umask(old)
    for path in (built.path, *built.path.parents):
        if path == settings.workspace.parent:
            break
        assert not path.stat().st_mode & 0o002, path
    assert built.path.stat().st_mode & 0o777 == 0o444
