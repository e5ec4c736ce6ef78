from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import kept
from kartifacts.build.compile import Progress, check_complete, compile_specs
from kartifacts.build.elf import inspect
from kartifacts.build.library import Library, open_library
from kartifacts.build.workers import COMMANDS, Worker
from kartifacts.config import Settings
from kartifacts.errors import (
    BuildError,
    CompilerKilled,
    ConfigError,
    HeaderMissing,
    LinkMissing,
    NoCompiler,
    StoreError,
)
from kartifacts.model.arch import parse_arch, parse_archs
from kartifacts.model.spec import Spec

from .conftest import CPU, OP_TOML, Compiler, answer_of, write_library

MakeSettings = Callable[..., Settings]
MakeSpec = Callable[..., Spec]


@pytest.fixture
def watched(make_settings: MakeSettings, compiler: Compiler) -> Settings:
    """Settings whose host compiler writes down what it compiles."""
    return make_settings(KARTIFACTS_CXX=str(compiler.path))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def nothing_was_kept(workspace: Path) -> bool:
    return not any(files_in(workspace / name) for name in ("kernels", "objects", "staging"))


# -- what is built -----------------------------------------------------------------------------------------------------


def test_a_built_kernel_loads_and_is_what_its_record_says(settings: Settings, make_spec: MakeSpec) -> None:
    specs = [make_spec("small"), make_spec("large")]
    build = compile_specs(specs, settings)
    assert [answer_of(kernel.path) for kernel in build.kernels] == [7, 7000]
    for spec, kernel in zip(specs, build.kernels, strict=True):
        assert (kernel.uri, kernel.arch, kernel.op_digest) == (spec.uri, spec.arch, spec.op_digest)
        assert kernel.key == spec.key(dict(kernel.toolchain))
        assert kernel.path.stat().st_size == kernel.size
        found = inspect(kernel.path)
        assert found.exports == kernel.exports == ("answer",)
        assert found.needs == dict(kernel.needs)
        assert not found.run_path


def test_the_report_adds_up(settings: Settings, demo: Library) -> None:
    specs, _ = demo.specs([], [CPU])
    calls: list[Progress] = []
    build = compile_specs(specs, settings, progress=calls.append)
    report = json.loads(json.dumps(build.report))
    assert (report["compiled"], report["linked"], report["kernels"], report["kernels_reused"]) == (3, 2, 2, 0)
    assert report["bytes"] == sum(kernel.path.stat().st_size for kernel in build.kernels)
    assert report["coverage"] == {f"demo/answer?size={size}": [str(CPU)] for size in ("large", "small")}
    assert report["jobs"] >= 1
    assert report["jobs_reason"]
    assert report["seconds"] > 0
    assert report["peak_memory"] > 1 << 20
    assert sorted({call.done for call in calls}) == [0, 1, 2, 3, 4, 5]
    assert [call.done for call in calls] == sorted(call.done for call in calls)
    assert {call.total for call in calls} == {5}
    assert calls[-1].memory == report["peak_memory"] == max(step["memory"] for step in report["steps"])
    assert (len(report["steps"]), calls[-1].left) == (5, 0)
    assert report["cpu_seconds"] == pytest.approx(sum(step["cpu_seconds"] for step in report["steps"]), abs=0.01)
    assert 0 < report["efficiency"] <= 1
    assert {(step["op"], step["arch"]) for step in report["steps"]} == {
        ("demo/answer", ""),  # the binding, which is compiled once for both
        ("demo/answer?size=small", str(CPU)),
        ("demo/answer?size=large", str(CPU)),
    }
    for step in report["steps"]:
        assert 0 < step["cpu_seconds"] < 60
        assert step["seconds"] > 0
        assert step["memory"] > 1 << 20


def test_the_binding_is_compiled_once_for_all_specialisations(
    watched: Settings, demo: Library, compiler: Compiler
) -> None:
    specs, _ = demo.specs([], parse_archs("cpu:x86-64 cpu:x86-64-v2") if CPU.name == "x86-64" else [CPU])
    compile_specs(specs, watched)
    assert compiler.compiled.count("demo/answer_binding.cpp") == 1
    assert compiler.compiled.count("demo/answer_cpu.cpp") == len(specs)


def test_the_library_is_never_written(settings: Settings, make_spec: MakeSpec, root: Path) -> None:
    before = {name: (root / name).stat().st_mtime_ns for name in files_in(root)}
    compile_specs([make_spec()], settings)
    assert {name: (root / name).stat().st_mtime_ns for name in files_in(root)} == before


def test_bytes_do_not_depend_on_where_and_when_they_are_made(
    make_settings: MakeSettings, make_spec: MakeSpec, root: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(root, tmp_path / "other" / "demolib", copy_function=shutil.copyfile)
    digests = set()
    for number, place in enumerate((root, other)):
        settings = make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / f"workspace{number}"))
        kernel = compile_specs([make_spec(where=place)], settings).kernels[0]
        digests.add((kernel.key, kernel.sha256))
        assert str(tmp_path).encode() not in kernel.path.read_bytes()
    assert len(digests) == 1


@pytest.mark.nvcc
def test_gpu_code_is_built_for_exactly_the_archs_asked_for_and_is_reproducible(
    make_settings: MakeSettings, make_spec: MakeSpec, root: Path, tmp_path: Path, real_toolkit: Path
) -> None:
    other = shutil.copytree(root, tmp_path / "other" / "demolib")
    kernels = []
    for number, place in enumerate((root, other)):
        settings = make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / f"ws{number}"), CUDA_HOME=str(real_toolkit))
        specs = [make_spec(arch=parse_arch(arch), where=place) for arch in ("9.0a", "8.0+PTX")]
        kernels.append(compile_specs(specs, settings).kernels)
    (first, ptx), (second, _) = kernels
    assert first.sha256 == second.sha256
    assert first.key != ptx.key
    assert first.op_digest != make_spec().op_digest  # the CPU has other sources
    assert set(map(str, inspect(ptx.path).archs)) == {"8.0", "8.0+PTX"}
    assert "cudart" not in ptx.needs  # it is linked statically


# -- what is not built again -------------------------------------------------------------------------------------------


def test_a_second_build_compiles_nothing_not_even_after_a_touch(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler, root: Path
) -> None:
    first = compile_specs([make_spec()], watched)
    for path in root.rglob("*"):
        os.utime(path)
    second = compile_specs([make_spec()], watched)
    assert second.kernels == first.kernels
    assert (second.report["compiled"], second.report["linked"], second.report["kernels_reused"]) == (0, 0, 1)
    assert len(compiler.compiled) == 2


def test_an_edit_rebuilds_what_reaches_it_under_a_new_name_and_leaves_the_old_file(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler, root: Path
) -> None:
    old = compile_specs([make_spec()], watched).kernels[0]
    content = old.path.read_bytes()
    header = root / "include/deep/scale.h"
    header.write_text(header.read_text().replace("7L", "8L"))
    os.utime(header, (0, 1_000_000_000))
    new = compile_specs([make_spec()], watched).kernels[0]
    assert compiler.compiled[2:] == ["demo/answer_cpu.cpp"]  # the binding does not include it
    assert new.path != old.path
    assert old.path.read_bytes() == content
    assert (answer_of(old.path), answer_of(new.path)) == (7, 8)


def test_the_number_of_jobs_is_in_no_key(make_settings: MakeSettings, make_spec: MakeSpec) -> None:
    one = compile_specs([make_spec()], make_settings(KARTIFACTS_JOBS="1")).kernels[0]
    four = compile_specs([make_spec()], make_settings(MAX_JOBS="4"))
    assert four.kernels[0] == one
    assert four.report["compiled"] == 0


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.chmod(0o644)
    path.write_bytes(content)


def replaced(by: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        by(path)

    return replace


DAMAGE: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 100),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": flipped,
    "other": lambda path: path.write_bytes(b"\x7fELF" + b"x" * 1000),
    "pipe": replaced(os.mkfifo),
    "device": replaced(lambda path: os.symlink("/dev/zero", path)),
    "gone": replaced(lambda _: None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_object_that_was_damaged_is_made_again_once(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler, damage: str
) -> None:
    compile_specs([make_spec()], watched)
    for path in list((watched.workspace / "objects").rglob("*.o")):
        DAMAGE[damage](path)
    shutil.rmtree(watched.workspace / "kernels")
    assert answer_of(compile_specs([make_spec()], watched).kernels[0].path) == 7
    assert len(compiler.compiled) == 4
    shutil.rmtree(watched.workspace / "kernels")
    assert compile_specs([make_spec()], watched).report["objects_reused"] == 2


def changed(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: {**record, **fields}


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list": lambda record: [record],
    "null": lambda record: None,
    "empty": lambda record: {},
    "parts without compiler": changed(parts={}),
    "parts with a text": changed(parts={"compiler": "gcc"}),
    "parts with numbers": changed(parts={"compiler": {"kind": 1}}),
    "parts null": changed(parts=None),
    "a short key": changed(key="12"),
    "a path as key": changed(key="../../x"),
    "another arch": changed(arch="9.0"),
    "no arch": changed(arch="\x1b[2J"),
    "another uri": changed(uri="x/y"),
    "another digest": changed(sha256="0" * 64),
    "another size": changed(size=3),
    "no size": changed(size="big"),
    "needs of numbers": changed(needs={"glibc": 2.34}),
    "exports of numbers": changed(exports=[1]),
    "unknown field": changed(more=1),
    "deep": lambda record: eval("[" * 80 + "]" * 80),
}


@pytest.mark.parametrize("fault", [*RECORDS, "no json", "half", "pipe", "directory", "device", "gone", "no directory"])
def test_a_kept_kernel_whose_record_is_malformed_counts_as_none_and_is_built_again(
    settings: Settings, make_spec: MakeSpec, fault: str
) -> None:
    spec = make_spec()
    [built] = compile_specs([spec], settings).kernels
    path = built.path.with_name(kept.RECORD)
    if fault in RECORDS:
        content = json.dumps(RECORDS[fault](json.loads(path.read_text())))
        path.chmod(0o644)
        path.write_text(content)
    elif fault == "no directory":
        shutil.rmtree(path.parent)
        path.parent.write_bytes(b"")
    else:
        half = path.read_bytes()[:100]
        path.unlink()
        plants: dict[str, Callable[[], object]] = {
            "no json": lambda: path.write_bytes(b"\xff"),
            "half": lambda: path.write_bytes(half),
            "pipe": lambda: os.mkfifo(path),
            "directory": path.mkdir,
            "device": lambda: path.symlink_to("/dev/zero"),
            "gone": lambda: None,
        }
        plants[fault]()
    assert kept.find(settings.workspace, spec) is None
    [again] = compile_specs([spec], settings).kernels
    assert again.sha256 == built.sha256
    assert (again.path == built.path) is (fault != "gone")  # which a network disk may only not show yet
    assert kept.find(settings.workspace, spec, again.key) == again


# -- what goes wrong ---------------------------------------------------------------------------------------------------

BAD = {
    "header": ("echo 'a.cpp:3:10: fatal error: x.h: No such file or directory'; exit 1", "needs the header 'x.h'"),
    "clang header": ("echo \"a.cpp:3:10: fatal error: 'z.h' file not found\"; exit 1", "needs the header 'z.h'"),
    "nvcc header": ("echo 'a.cu(1): error: could not open source file \"y.h\"'; exit 2", "needs the header 'y.h'"),
    "no assembler": (
        "echo \"g++: fatal error: cannot execute 'as': execvp: No such file or directory\"; exit 1",
        "failed: g++: fatal error: cannot execute 'as'",
    ),
    "killed": ("exit 137", "was killed (exit status 137)"),
    "really killed": ("kill -9 $$", "was killed"),
    "killed below": ("echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1", "was killed"),
    "error": (
        "echo noise; echo \"a.cpp:1:2: error: expected ';'\"; echo more; exit 1",
        "a.cpp:1:2: error: expected ';'",
    ),
    "full": ("echo 'fatal error: error writing to a.s: No space left on device'; exit 1", "the disk is full"),
    "silent": ("exit 3", "exit status 3, without a message"),
    "after writing": ("echo junk > $out; exit 1", "exit status 1"),
    "no file, and says something": ("echo 'licence expired'; exit 0", "made no file, or an empty one"),
    "no file": ("exit 0", "made no file, or an empty one"),
    "empty": (": > $out; exit 0", "made no file, or an empty one"),
    "no list": (
        'set -- $(echo " $* " | sed "s/-MD -MF [^ ]* / /"); exec g++ "$@"',
        "did not list the files that it read",
    ),
    "folder": ("mkdir $out; exit 0", "made no file, or an empty one"),
}

TYPED: dict[str, type[BuildError]] = {
    **dict.fromkeys(("header", "clang header", "nvcc header"), HeaderMissing),
    **dict.fromkeys(("killed", "really killed", "killed below"), CompilerKilled),
    "library": LinkMissing,
}


@pytest.mark.parametrize("kind", BAD)
def test_whatever_a_compiler_does_wrong_is_said_and_nothing_of_it_is_kept(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler, kind: str
) -> None:
    behaviour, message = BAD[kind]
    compiler.misbehave(behaviour)
    with pytest.raises(BuildError) as caught:
        compile_specs([make_spec()], watched)
    error = caught.value
    assert type(error) is TYPED.get(kind, BuildError)
    assert message in error.message
    assert "demo/answer" in error.message
    assert error.command.startswith(f"cd {make_spec().root} && {compiler.path} ")
    assert nothing_was_kept(watched.workspace)
    log = Path(error.log).read_text()
    assert log.startswith(f"$ {error.command}")
    assert error.hint
    compiler.misbehave("")
    assert answer_of(compile_specs([make_spec()], watched).kernels[0].path) == 7


def test_what_a_compiler_said_before_it_made_nothing_is_told(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    compiler.misbehave("echo 'licence expired'; echo 'on stderr' >&2; exit 0")
    with pytest.raises(BuildError, match=r"hint: it said: on stderr; full log: ") as caught:
        compile_specs([make_spec()], watched)
    assert "licence expired\non stderr\n" in Path(caught.value.log).read_text()


LINK = {
    "library": (
        "echo '/usr/bin/ld: cannot find -lcuda: No such file or directory'; exit 1",
        "needs the library 'cuda'",
    ),
    "junk": ("echo junk > $out; exit 0", "is not a sound ELF file"),
    "empty": (": > $out; exit 0", "made no file, or an empty one"),
    "symbol": ("echo 'a.o: undefined reference to `f()'; echo 'collect2: error: ld returned 1'; exit 1", "`f()"),
}


@pytest.mark.parametrize("kind", LINK)
def test_whatever_a_linker_does_wrong_is_said_and_no_kernel_is_kept(
    watched: Settings, make_spec: MakeSpec, compiler: Compiler, kind: str
) -> None:
    behaviour, message = LINK[kind]
    compiler.misbehave(behaviour, on="-shared")
    with pytest.raises(BuildError, match=r"linking|is not what was promised") as caught:
        compile_specs([make_spec()], watched)
    assert type(caught.value) is TYPED.get(kind, BuildError)
    assert message in str(caught.value)
    assert caught.value.command in Path(caught.value.log).read_text()
    assert not files_in(watched.workspace / "kernels")
    compiler.misbehave("")
    assert compile_specs([make_spec()], watched).report["compiled"] == 0  # the objects were good


def test_a_real_compiler_error_is_shown_as_the_compiler_says_it(
    settings: Settings, make_spec: MakeSpec, root: Path
) -> None:
    (root / "demo/answer_cpu.cpp").write_text('#include "answer.h"\nlong kart_answer() { return nothing; }\n')
    with pytest.raises(BuildError, match=r"demo/answer_cpu.cpp:2:\d+: error: .*nothing.* was not declared") as caught:
        compile_specs([make_spec()], settings)
    done = subprocess.run(caught.value.command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1  # the command can be pasted into a shell


def test_a_symbol_that_nobody_defines_fails_at_the_link_and_not_at_the_first_call(
    settings: Settings, make_spec: MakeSpec, root: Path
) -> None:
    (root / "demo/answer_cpu.cpp").write_text("int other() { return KART_SIZE; }\n")
    with pytest.raises(BuildError, match=r"linking .*undefined reference to `kart_answer"):
        compile_specs([make_spec()], settings)


def test_a_compiler_killed_once_is_tried_again_with_half_the_jobs(
    make_settings: MakeSettings, demo: Library, compiler: Compiler, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    compiler.misbehave(f"mkdir {once} 2>/dev/null && exit 137")
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path), KARTIFACTS_JOBS="4")
    build = compile_specs(demo.specs([], [CPU])[0], settings)
    assert [answer_of(kernel.path) for kernel in build.kernels] == [7, 7000]
    assert build.report["jobs"] == 2
    assert "halved" in build.report["jobs_reason"]
    assert len(compiler.compiled) == 4  # only the one that was killed ran twice


def test_a_kernel_without_its_promised_function_is_refused(settings: Settings, tmp_path: Path) -> None:

    declared = OP_TOML.replace('exports = ["answer"]', 'exports = ["answer", "question"]')
    spec = open_library(write_library(tmp_path / "lib", {"demo/op.toml": declared})).spec(
        "answer", {"size": "small"}, CPU
    )
    with pytest.raises(BuildError, match=r"demo/answer.*does not export question \(it exports answer\)"):
        compile_specs([spec], settings)
    assert not files_in(settings.workspace / "kernels")


@pytest.mark.nvcc
def test_a_compiler_that_drops_an_arch_is_caught_with_the_name_of_op_and_arch(
    make_settings: MakeSettings, make_spec: MakeSpec, tmp_path: Path, real_toolkit: Path
) -> None:
    root = tmp_path / "cuda"
    shutil.copytree(real_toolkit / "bin", root / "bin", symlinks=True)
    for name in ("nvvm", "include", "lib64", "lib"):
        if (real_toolkit / name).is_dir():
            (root / name).symlink_to(real_toolkit / name)
    (root / "bin/nvcc").unlink()
    (root / "bin/nvcc").write_text(
        '#!/bin/sh\nfor a in "$@"; do shift; set -- "$@" "$(echo "$a" | sed s/90a/80/g)"; done\n'
        f'exec {real_toolkit}/bin/nvcc "$@"\n'
    )
    (root / "bin/nvcc").chmod(0o755)
    with pytest.raises(BuildError, match=r"demo/answer\?size=small for 9.0a.*GPU code for 8.0, expected 9.0a"):
        compile_specs([make_spec(arch=parse_arch("9.0a"))], make_settings(CUDA_HOME=str(root)))


def test_a_file_that_the_compiler_reads_behind_our_back_is_refused(
    make_settings: MakeSettings, make_spec: MakeSpec, root: Path, tmp_path: Path
) -> None:
    hidden = root / "demo/hidden.h"
    hidden.write_text("")
    wrapper = tmp_path / "g++"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *answer_cpu.cpp*) exec g++ -include {hidden} "$@" ;; *) exec g++ "$@" ;; esac\n'
    )
    wrapper.chmod(0o755)
    settings = make_settings(KARTIFACTS_CXX=str(wrapper))
    with pytest.raises(BuildError, match=r"read 'demo/hidden.h', which the op's identity does not cover"):
        compile_specs([make_spec()], settings)
    assert nothing_was_kept(settings.workspace) or not files_in(settings.workspace / "kernels")


def test_sources_that_change_after_they_were_read_are_not_built_under_the_old_name(
    settings: Settings, make_spec: MakeSpec, root: Path
) -> None:
    spec = make_spec()
    (root / "include/deep/scale.h").write_text("#define SCALE 9L\n")
    with pytest.raises(BuildError, match="have changed since they were read"):
        compile_specs([spec], settings)


def test_a_build_that_lacks_anything_promised_fails_with_the_list(settings: Settings, demo: Library) -> None:
    specs, _ = demo.specs([], [CPU])
    kernels = compile_specs(specs, settings).kernels
    check_complete(specs, kernels)
    more, _ = demo.specs([], (CPU, parse_arch("9.0a")))
    with pytest.raises(BuildError) as caught:
        check_complete(more, kernels[:1])
    assert caught.value.message == (
        f"3 of 4 promised kernels were not built: demo/answer?size=large for {CPU}; "
        "demo/answer?size=small for 9.0a; demo/answer?size=large for 9.0a"
    )


def test_an_arch_that_cannot_be_built_stops_the_build_before_a_compiler_starts(
    watched: Settings, demo: Library, compiler: Compiler, tmp_path: Path, make_settings: MakeSettings
) -> None:
    specs, _ = demo.specs([], (CPU, parse_arch("9.0a")))
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path), PATH=str(tmp_path), CUDA_HOME="/nonexistent")
    with pytest.raises((NoCompiler, ConfigError)):
        compile_specs([*specs, demo.spec("answer", {"size": "small"}, parse_arch("10.7a"))], settings)
    assert compiler.compiled == []


@pytest.mark.parametrize("kind", ["file", "everybody", "link"])
def test_a_workspace_that_cannot_be_trusted_or_written_is_refused(
    make_settings: MakeSettings, make_spec: MakeSpec, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777 if kind == "everybody" else 0o755)
    if kind == "link":
        if os.geteuid() != 0:
            pytest.skip("needs root to make a link of another user")
        link = tmp_path / "link"
        link.symlink_to(place)
        os.lchown(link, 12345, 12345)
        place = link
    with pytest.raises(StoreError, match="workspace"):
        compile_specs([make_spec()], make_settings(KARTIFACTS_WORKSPACE=str(place)))


def test_a_compiler_named_by_its_path_needs_no_path(make_settings: MakeSettings, make_spec: MakeSpec) -> None:
    real = shutil.which("g++")
    assert real is not None
    settings = make_settings(KARTIFACTS_CXX=real, PATH="")
    assert answer_of(compile_specs([make_spec()], settings).kernels[0].path) == 7


def test_without_an_interpreter_to_start_the_error_names_it(
    settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kartifacts.build.run.COMMANDS", (str(tmp_path / "python"), "-I"))
    with pytest.raises(BuildError, match=r"a worker for compilers does not start: .*python") as caught:
        compile_specs([make_spec()], settings)
    assert caught.value.command == f"{tmp_path}/python -I"
    assert nothing_was_kept(settings.workspace)


def test_odd_characters_in_paths_reach_the_compiler_as_they_are(
    make_settings: MakeSettings, make_spec: MakeSpec, root: Path, tmp_path: Path
) -> None:
    place = tmp_path / "a $b: 'c' | d"
    shutil.move(root, place)
    settings = make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / "w $x: \"y\" | 'z'"))
    assert answer_of(compile_specs([make_spec(where=place)], settings).kernels[0].path) == 7


# -- what is interrupted -----------------------------------------------------------------------------------------------

BUILD = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.model.arch import parse_arch
specs, _ = open_library(Path(sys.argv[1])).specs([], [parse_arch(sys.argv[2])])
compile_specs(specs, config.read())
"""


@pytest.fixture
def stuck_build(
    watched: Settings, compiler: Compiler, root: Path, tmp_path: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """A build in another process, one of whose compilers hangs when the other two have ended; with its process id."""
    told = tmp_path / "told"
    os.mkfifo(told)
    objects = f"{watched.workspace}/objects/*/*/*.o"
    compiler.misbehave(
        'case "$all" in *KART_SIZE=1000*)\n'
        f'while [ "$(ls {objects} 2>/dev/null | wc -l)" -lt 2 ]; do sleep 0.02; done\n'
        f"echo $$ > {told}; exec tail -f /dev/null;; esac"
    )
    environ = {
        "PATH": watched.search_path,
        "HOME": str(tmp_path),
        "KARTIFACTS_WORKSPACE": str(watched.workspace),
        "KARTIFACTS_CXX": str(compiler.path),
        "KARTIFACTS_JOBS": "2",
    }
    # Whoever runs the tests by nohup has the signal ignored, which a process inherits.
    code = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n{BUILD}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(CPU)], env=environ, stderr=subprocess.DEVNULL
    )
    hanging = int(told.read_text())
    return process, hanging


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupt_leaves_no_compiler_and_no_half_output(
    stuck_build: tuple[subprocess.Popen[bytes], int], watched: Settings
) -> None:
    process, hanging = stuck_build
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert not is_running(hanging)
    assert not files_in(watched.workspace / "staging")


@contextlib.contextmanager
def ended(*processes: int) -> Iterator[None]:
    """Sees to it that processes which run now have ended soon after the block."""
    handles = [os.pidfd_open(process) for process in processes]
    yield
    for handle in handles:
        ready, _, _ = select.select([handle], [], [], 30)
        os.close(handle)
        assert ready, "a process is still running"


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_no_compiler_outlives_the_process_that_started_it(
    stuck_build: tuple[subprocess.Popen[bytes], int], number: signal.Signals
) -> None:
    process, hanging = stuck_build
    family = [hanging]
    while family[-1] != process.pid:  # the compiler's shell, the worker that started it, and who asked for it
        family.append(parent(family[-1]))
    assert len(family) > 2
    with ended(*family):
        process.send_signal(number)
        process.wait(30)


@pytest.mark.parametrize(
    "wrapper",
    ["setsid sh -c '{}' & wait", "trap '' TERM; exec setsid sh -c 'setsid {} & wait'"],
    ids=["one", "deaf, two"],
)
def test_what_a_compiler_puts_into_a_session_of_its_own_ends_with_the_worker(tmp_path: Path, wrapper: str) -> None:
    """As wrappers do that ask for licences, or that start a container."""
    told = tmp_path / "told"
    os.mkfifo(told)
    worker = Worker(COMMANDS, {"PATH": os.environ["PATH"]})
    hang = tmp_path / "hang"
    hang.write_text(f"#!/bin/sh\necho $$ > {told}\nexec tail -f /dev/null\n")
    hang.chmod(0o755)
    worker.give(("sh", "-c", wrapper.replace("{}", str(hang))), "/")
    process = int(told.read_text())
    assert os.getsid(process) != worker.session
    with ended(process, worker.session):
        worker.end(busy=True)


@pytest.mark.parametrize("part", ["workspace", "library", "compiler"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_names_that_the_locale_cannot_spell_are_built_in_or_refused_in_a_sentence(
    tmp_path: Path, root: Path, part: str, locale: str
) -> None:
    """A locale of ASCII alone, or bytes that are no UTF-8: what old containers and network shares have."""
    odd = os.fsencode(tmp_path) + b"/\xff \xc3\xa9$:'|"
    os.mkdir(odd)
    library = odd + b"/lib" if part == "library" else os.fsencode(root)
    if part == "library":
        shutil.copytree(root, os.fsdecode(library))
    real = shutil.which("g++")
    assert real is not None
    os.symlink(real, odd + b"/g++")
    code = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.model.arch import parse_arch
spec = open_library(Path(sys.argv[1]), "odd").spec("answer", {"size": "small"}, parse_arch(sys.argv[2]))
for again in (False, True):
    build = compile_specs([spec], config.read())
    print(len(build.kernels), build.report["compiled"])
"""
    environ = {
        b"PATH": os.fsencode(os.environ["PATH"]),
        b"HOME": os.fsencode(tmp_path),
        b"KARTIFACTS_WORKSPACE": odd + b"/w" if part == "workspace" else os.fsencode(tmp_path / "w"),
        b"KARTIFACTS_CXX": odd + b"/g++" if part == "compiler" else os.fsencode(real),
        b"LC_ALL": locale.encode(),
        b"PYTHONUTF8": b"0",
        b"PYTHONCOERCECLOCALE": b"0",
    }
    command = [os.fsencode(sys.executable), b"-c", code.encode(), library, str(CPU).encode()]
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [b"1", b"2", b"1", b"0"]


def test_a_source_that_the_locale_cannot_spell_is_a_typed_error(root: Path, tmp_path: Path) -> None:
    declared = OP_TOML.replace("answer_cpu.cpp", "answer_\u00e9.cpp")
    (root / "demo/op.toml").write_text(declared, encoding="utf-8")
    (root / "demo/answer_cpu.cpp").rename(root / "demo/answer_\u00e9.cpp")
    code = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.errors import ConfigError
from kartifacts.model.arch import parse_arch
try:
    spec = open_library(Path(sys.argv[1])).spec("answer", {"size": "small"}, parse_arch(sys.argv[2]))
except ConfigError as error:
    print("refused:", ascii(str(error)))
else:
    print("built", len(compile_specs([spec], config.read()).kernels))
"""
    base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KARTIFACTS_WORKSPACE": str(tmp_path / "w")}
    for locale, answer in (("C", "refused: "), ("C.UTF-8", "built 1")):
        environ = {**base, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-c", code, str(root), str(CPU)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.stdout.startswith(answer), (done.stdout, done.stderr)


def test_a_killed_build_goes_on_where_it_was_and_its_remains_are_removed(
    stuck_build: tuple[subprocess.Popen[bytes], int],
    watched: Settings,
    demo: Library,
    compiler: Compiler,
) -> None:
    process, hanging = stuck_build
    with ended(hanging):
        process.kill()
        process.wait(30)
    assert list((watched.workspace / "staging").iterdir())
    before = compiler.compiled
    compiler.misbehave("")
    build = compile_specs(demo.specs([], [CPU])[0], watched)
    assert [answer_of(kernel.path) for kernel in build.kernels] == [7, 7000]
    assert compiler.compiled[len(before) :] == ["demo/answer_cpu.cpp"]  # the one that hung
    assert not list((watched.workspace / "staging").iterdir())


def test_another_library_compiles_against_our_headers(settings: Settings, tmp_path: Path) -> None:
    source = '#include "answer.h"\n#include "kart/launch.h"\nlong kart_answer() { return KART_CUDA * KART_SIZE; }\n'
    library = open_library(write_library(tmp_path / "other", {"demo/answer_cpu.cpp": source}))
    [kernel] = compile_specs([library.spec("answer", {"size": "large"}, CPU)], settings).kernels
    assert answer_of(kernel.path) == 2000
