"""Whoever edits what a kernel reaches gets that kernel built again at its next use; whoever touches it does not."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kartifacts import config
from kartifacts.build import closure, kept, remembered, stamps, templates, workspace
from kartifacts.build.jit import build_one, find_built
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.library import open_library
from kartifacts.config import Settings
from kartifacts.errors import BuildError, StoreError
from kartifacts.model.spec import Spec

from .conftest import CPU, OP_TOML, Compiler, answer_of, write_library

OTHER_TOML = """
[[op]]
name = "other"
summary = "Shares a header with nobody."
exports = ["answer"]
axes.size = ["small"]

[op.device.cpu]
toolchain = "cxx"
sources = ["other_cpu.cpp"]
host_sources = ["answer_binding.cpp"]
defines.size = { small = "KART_SIZE=1" }
"""
RICH = {
    "demo/op.toml": OP_TOML.replace('"answer_cpu.cpp"', '"answer_cpu.cpp", "more.cpp.jinja"') + OTHER_TOML,
    "demo/near.cuh": "#pragma once\n#define NEAR 1L\n",
    "demo/answer_cpu.cpp": (
        '#include "answer.h"\n#include "near.cuh"\n#include "scale.h"\n#include <kart/shared.h>\nlong more();\n'
        "long kart_answer() { return SCALE * KART_SIZE * NEAR * KART_SHARED + more() - 100; }\n"
    ),
    "demo/more.cpp.jinja": '{% include "part.jinja" %}\nlong more() { return PART; }\n',
    "include/part.jinja": "#define PART {{ 100 if size == 'small' else 200 }}L\n",
    "demo/other_cpu.cpp": '#include "answer.h"\nlong kart_answer() { return 5; }\n',
}
EDITS = {
    "source": ("demo/answer_cpu.cpp", "SCALE * KART_SIZE", "2 * SCALE * KART_SIZE", 14),
    "header beside": ("demo/near.cuh", "1L", "3L", 21),
    "transitive header": ("include/deep/scale.h", "7L", "8L", 8),
    "header in include": ("include/scale.h", "#pragma once", "#pragma once\n#define SCALE 9L\n#if 0", None),
    "shared header": ("../own/include/kart/shared.h", "1L", "2L", 14),
    "template": ("demo/more.cpp.jinja", "return PART", "return PART + 1", 8),
    "part of a template": ("include/part.jinja", "100 if", "104 if", 11),
    "value in op.toml": (
        "demo/op.toml",
        'small = "KART_SIZE=1", large = "KART_SIZE=1000" }\n\n[op.device.cuda]',
        'small = "KART_SIZE=2", large = "KART_SIZE=1000" }\n\n[op.device.cuda]',
        14,
    ),
    "of another device": (
        "demo/op.toml",
        'host_sources = ["answer_binding.cpp"]\nmin_arch',
        'host_sources = ["answer_binding.cpp"]\nflags = ["--use_fast_math"]\nmin_arch',
        7,
    ),
}


class Loop(NamedTuple):
    """A library that was built once, and a compiler that writes down what it compiles from now on."""

    root: Path
    settings: Settings
    compiler: Compiler
    first: BuiltKernel
    other: BuiltKernel

    def spec(self, op: str = "answer") -> Spec:
        return open_library(self.root, workspace=self.settings.workspace).spec(op, {"size": "small"}, CPU)

    def build(self, op: str = "answer") -> BuiltKernel:
        return build_one(self.spec(op), self.settings)

    @property
    def notes(self) -> list[Path]:
        return sorted((self.settings.workspace / "libraries").iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a library, our own one, and the workspace in which both ops were built."""
    place = tmp_path_factory.mktemp("loop")
    write_library(place / "lib", RICH)
    write_library(place / "own", {"include/kart/shared.h": "#pragma once\n#define KART_SHARED 1L\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closure, "own_root", lambda: place / "own")
        settings = settings_in(place)
        for op in ("answer", "other"):
            build_one(open_library(place / "lib").spec(op, {"size": "small"}, CPU), settings)
        yield place


def settings_in(place: Path, **environ: str) -> Settings:
    named = {name: str(place / name.lower()) for name in ("WORKSPACE", "GENERATED", "STORE")}
    base = {"HOME": str(place), "PATH": os.environ["PATH"]}
    return config.read({**base, **{f"KARTIFACTS_{name}": path for name, path in named.items()}, **environ})


@pytest.fixture
def loop(built: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A copy of what was built: at another place, with other times and inodes, to be edited."""
    monkeypatch.setattr(stamps, "_TICK", 0)  # or nothing that was only just made could be remembered
    place = tmp_path / "copy"
    shutil.copytree(built, place, copy_function=shutil.copyfile)
    (place / "workspace").chmod(0o755)
    monkeypatch.setattr(closure, "own_root", lambda: place / "own")
    settings = settings_in(place, KARTIFACTS_CXX=str(compiler.path))
    made = [
        build_one(open_library(place / "lib", workspace=settings.workspace).spec(op, {"size": "small"}, CPU), settings)
        for op in ("answer", "other")
    ]
    assert compiler.compiled == []
    return Loop(place / "lib", settings, compiler, *made)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# -- by content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_of_any_file_that_is_reached_builds_that_kernel_again_and_no_other(loop: Loop, kind: str) -> None:
    name, old, new, expected = EDITS[kind]
    if kind == "header in include":  # what it included is left out, and no longer reached
        edit(loop.root / name, '#include "deep/scale.h"', "#define SCALE 9L")
        expected = 9
    else:
        edit(loop.root / name, old, new)
    again = loop.build()
    changed = ["demo/more.cpp"] if "template" in kind else ["demo/answer_cpu.cpp"]
    changed = {"value in op.toml": ["demo/answer_cpu.cpp", "demo/more.cpp"], "of another device": []}.get(kind, changed)
    assert sorted(loop.compiler.compiled) == changed
    assert (again.path != loop.first.path) is bool(changed)
    assert answer_of(again.path) == expected
    assert answer_of(loop.first.path) == 7
    assert loop.build("other") == loop.other
    assert loop.build() == again
    assert sorted(loop.compiler.compiled) == changed


@pytest.mark.parametrize("moment", [None, 1_000_000_000, 4_000_000_000])
def test_touching_every_file_builds_nothing(loop: Loop, moment: int | None) -> None:
    for top in (loop.root, loop.root.parent / "own", loop.settings.generated):
        for path in top.rglob("*"):
            os.utime(path, None if moment is None else (moment, moment))
    assert (loop.build(), loop.build("other")) == (loop.first, loop.other)
    assert loop.compiler.compiled == []


def test_an_edit_that_keeps_size_and_time_is_seen(loop: Loop) -> None:
    header = loop.root / "include/deep/scale.h"
    before = header.stat()
    edit(header, "7L", "8L")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = header.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert answer_of(loop.build().path) == 8


def test_a_file_put_in_place_of_another_with_its_size_and_time_is_seen(loop: Loop, tmp_path: Path) -> None:
    header, other = loop.root / "include/deep/scale.h", tmp_path / "scale.h"
    other.write_text(header.read_text().replace("7L", "8L"))
    before = header.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, header)
    assert answer_of(loop.build().path) == 8


@pytest.mark.parametrize("name", ["demo/scale.h", "demo/kart/shared.h", "include/kart/shared.h", "demo/part.jinja"])
def test_a_new_file_that_hides_another_is_seen(loop: Loop, name: str) -> None:
    path = loop.root / name
    path.parent.mkdir(exist_ok=True)
    text = {"scale.h": "#define SCALE 8L\n", "shared.h": "#define KART_SHARED 2L\n"}.get(
        path.name, "#define PART 101L\n"
    )
    path.write_text(text)
    expected = {"demo/kart/shared.h": 7}.get(name, {"shared.h": 14}.get(path.name, 8))  # in brackets: not beside
    assert answer_of(loop.build().path) == expected


def test_a_source_that_changes_while_it_is_compiled_is_kept_under_no_key(loop: Loop) -> None:
    source = loop.root / "demo/other_cpu.cpp"
    edit(source, "return 5", "return 6")
    wanted = loop.spec("other")
    loop.compiler.misbehave(f'case "$all" in *other_cpu*) sed -i s/6/7/ {source};; esac')
    with pytest.raises(BuildError, match=r"other_cpu.cpp has changed while it was compiled"):
        build_one(wanted, loop.settings)
    assert find_built(wanted, loop.settings) is None
    loop.compiler.misbehave("")
    assert answer_of(loop.build("other").path) == 7


def test_what_is_compiled_beside_a_template_is_what_was_read_whatever_changes_meanwhile(loop: Loop) -> None:
    source = loop.root / "demo/answer_cpu.cpp"
    edit(source, "SCALE * KART_SIZE", "2 * SCALE * KART_SIZE")
    wanted = loop.spec()
    loop.compiler.misbehave(f'case "$all" in *answer_cpu*) sed -i "s/2 . SCALE/3 * SCALE/" {source};; esac')
    assert answer_of(build_one(wanted, loop.settings).path) == 14
    loop.compiler.misbehave("")
    assert answer_of(loop.build().path) == 21


# -- what is remembered ------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each closure that is found by reading files."""
    found: list[str] = []
    real = templates.traced

    def noted(root: Path, *rest: object) -> object:
        found.append(str(root))
        return real(root, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(templates, "traced", noted)
    return found


def test_what_was_not_touched_is_not_read_again(loop: Loop, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "parsed", lambda file: pytest.fail(f"{file} is read"))
    assert loop.build() == loop.first
    assert reads == []


WATCHED = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.build.jit import build_one
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import cxx
from kartifacts.model.arch import parse_arch
settings, root, arch = config.read(), Path(sys.argv[1]), parse_arch(sys.argv[2])
seen = []
sys.addaudithook(lambda event, args: seen.append(f"{event} {args[:1]}"))
build_one(open_library(root, workspace=settings.workspace).spec("other", {"size": "small"}, arch), settings)
print(*seen, sep="\\n")
"""


def test_a_check_with_nothing_to_do_opens_no_header_and_starts_no_program(loop: Loop) -> None:
    """However many there are: for 200 it is to cost 5 ms of CPU (see `bench/noop.py`)."""
    for number in range(200):
        text = f'#include "h{number + 1}.h"\n' if number % 20 < 19 else ""
        (loop.root / f"include/h{number}.h").write_text(f"#pragma once\n{text}")
    includes = "".join(f'#include "h{number}.h"\n' for number in range(0, 200, 20))
    edit(loop.root / "demo/other_cpu.cpp", "long kart", f"{includes}long kart")
    loop.build("other")
    place = loop.settings.workspace
    environ = {"HOME": str(loop.root), "PATH": os.environ["PATH"], "KARTIFACTS_WORKSPACE": str(place)}
    command = [sys.executable, "-c", WATCHED, str(loop.root), str(CPU)]
    before, after = (
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert before.count("h199.h") == 1  # another library lends it headers than this process: it remembers nothing yet
    assert "include" not in after
    assert 3 <= len(re.findall(r"^open \('", after, re.MULTILINE)) <= 6
    assert not re.search(r"^(subprocess|os\.(fork|exec|posix_spawn))", after, re.MULTILINE)


def test_what_was_touched_is_read_once(loop: Loop, reads: list[str]) -> None:
    os.utime(loop.root / "include/scale.h")
    assert [loop.build(), loop.build()] == [loop.first, loop.first]
    assert reads == [str(loop.root)]


def damage(path: Path, how: str, others: Path) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a digit":
        place = content.index(b'"answer"') + 40
        digit = next(at for at in range(place, len(content)) if content[at : at + 1] in b"0123456789")
        path.write_bytes(
            content[:digit] + (b"1" if content[digit : digit + 1] != b"1" else b"2") + content[digit + 1 :]
        )
    elif how == "of another root":
        path.write_bytes(others.read_bytes())
    elif how == "writable":
        path.chmod(0o666)
    elif how == "a link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
    else:
        os.chown(path, 12345, 12345)


@pytest.mark.parametrize("how", ["cut", "empty", "a digit", "of another root", "writable", "a link", "somebody else's"])
def test_damaged_or_planted_memory_is_not_used(loop: Loop, reads: list[str], tmp_path: Path, how: str) -> None:
    if how == "somebody else's" and os.geteuid() != 0:
        pytest.skip("needs root to give a file to another user")
    other = tmp_path / "elsewhere"
    (other / "workspace").mkdir(parents=True)
    write_library(other / "lib", {**RICH, "demo/answer_cpu.cpp": RICH["demo/answer_cpu.cpp"] + "// other\n"})
    open_library(other / "lib", workspace=other / "workspace").spec("answer", {"size": "small"}, CPU)
    foreign = max((other / "workspace/libraries").iterdir(), key=lambda path: path.stat().st_size)
    for note in loop.notes:
        damage(note, how, foreign)
    reads.clear()
    assert loop.spec().op_digest == loop.first.op_digest
    assert reads == [str(loop.root)]
    assert loop.spec().op_digest == loop.first.op_digest
    assert len(reads) == 1  # another one was written in its place


def test_memory_in_a_workspace_that_others_may_write_is_neither_used_nor_made(loop: Loop, reads: list[str]) -> None:
    loop.settings.workspace.chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in loop.notes}
    assert loop.spec().op_digest == loop.first.op_digest
    assert reads == [str(loop.root)]
    assert {path: path.stat().st_mtime_ns for path in loop.notes} == before


def test_what_was_changed_a_moment_ago_is_not_remembered(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be changed again within the same tick of the file system's clock, and look untouched."""
    monkeypatch.setattr(stamps, "_TICK", 3600 * 10**9)
    (tmp_path / "workspace").mkdir()
    open_library(root, workspace=tmp_path / "workspace").spec("answer", {"size": "small"}, CPU)
    assert list((tmp_path / "workspace").rglob("*")) == []


@pytest.mark.parametrize(
    ("changed", "settled"),
    [
        (10**18 + 1, False),
        (10**18 - 40_000_000, False),
        (10**18 - 60_000_000, True),
        (10**18 - 10**9, False),  # a whole second: the file system may count nothing finer,
        (10**18 - 2 * 10**9, False),  # as FAT counts pairs of them
        (10**18 - 3 * 10**9, True),
    ],
)
def test_a_stamp_of_the_last_tick_is_not_trusted(changed: int, settled: bool) -> None:
    assert stamps.is_settled((1, 2, 3, 4, 5, changed), before=10**18) is settled


# -- places ------------------------------------------------------------------------------------------------------------


def test_the_same_library_at_two_places_has_the_same_keys_and_kernels(loop: Loop, tmp_path: Path) -> None:
    moved = Loop(shutil.copytree(loop.root, tmp_path / "a" / "place with space"), *loop[1:])
    link = Loop(tmp_path / "link", *loop[1:])
    link.root.symlink_to(loop.root)
    for other in (moved, link):
        assert other.spec().op_digest == loop.spec().op_digest
        assert other.build() == loop.first
    shutil.rmtree(loop.root)
    assert moved.build() == loop.first
    assert loop.compiler.compiled == []


SILENT = {
    "import": "import kartifacts, kartifacts.ops",
    "config": "from kartifacts.cli import main; main(['config'])",
    "list": "from kartifacts.cli import main; main(['list'])",
    "explain": "from kartifacts.cli import main; main(['explain', 'norm/rmsnorm', 'dtype=float32', '--device', 'cpu'])",
    "explain-key": "from kartifacts.cli import main; main(['explain-key', 'norm/rmsnorm', 'dtype=float32', "
    "'--arch', 'cpu:x86-64-v3'])",
    "doctor": "from kartifacts.cli import main; main(['doctor'])",
    "registry": "import kartifacts; kartifacts.Registry().libraries.find('norm/rmsnorm')",
}


@pytest.mark.parametrize("what", SILENT)
def test_who_only_asks_makes_no_workspace(tmp_path: Path, what: str) -> None:
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "KARTIFACTS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", SILENT[what]], env=environ, capture_output=True, text=True)
    assert done.returncode in (0, 2, 3), done.stderr
    assert [path.name for path in (tmp_path / ".cache/kartifacts").glob("*") if path.name != "store"] == []


def test_a_library_is_never_written(loop: Loop) -> None:
    """As one in an installed package, which another user may own."""
    for path in (loop.root, *loop.root.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    before = {path: path.stat() for path in (loop.root, *loop.root.rglob("*"))}
    shutil.rmtree(loop.settings.workspace)
    shutil.rmtree(loop.settings.generated)
    assert answer_of(loop.build().path) == 7
    assert {path: path.stat().st_ctime_ns for path in (loop.root, *loop.root.rglob("*"))} == {
        path: found.st_ctime_ns for path, found in before.items()
    }


def test_sources_and_artifacts_are_made_in_places_of_their_own_when_they_are_needed(loop: Loop, tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "new", KARTIFACTS_GENERATED=str(tmp_path / "sources" / "here"))
    (tmp_path / "new").mkdir()
    build_one(loop.spec("other"), settings)
    assert not settings.generated.exists()  # no templates
    build_one(loop.spec(), settings)
    assert {path.name for path in settings.generated.rglob("*.cpp")} >= {"more.cpp"}
    assert not list(settings.generated.rglob("*.o"))
    assert not list(settings.workspace.rglob("more.cpp"))


def test_sources_are_not_rendered_where_others_may_plant_code(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    settings = settings_in(tmp_path / "new", KARTIFACTS_GENERATED=str(tmp_path / "open"))
    (tmp_path / "new").mkdir()
    with pytest.raises(StoreError, match="may be written by other users") as caught:
        build_one(loop.spec(), settings)
    assert "KARTIFACTS_GENERATED" in str(caught.value.hint)


# -- without a cache ---------------------------------------------------------------------------------------------------


def test_without_the_disk_cache_nothing_that_was_kept_is_used_or_added(loop: Loop) -> None:
    before = sorted(path for path in loop.settings.workspace.rglob("*") if "staging" not in path.parts)
    apart = workspace.apart(settings_in(loop.root.parent, KARTIFACTS_DISK_CACHE="off"))
    again = build_one(loop.spec(), apart)
    assert (again.key, again.sha256) == (loop.first.key, loop.first.sha256)
    assert again.path != loop.first.path
    assert again.path.is_relative_to(loop.settings.workspace / "staging")
    assert Path(apart.generated).is_relative_to(loop.settings.workspace / "staging")
    assert sorted(path for path in loop.settings.workspace.rglob("*") if "staging" not in path.parts) == before
    assert workspace.apart(loop.settings) == loop.settings
    assert kept.find(loop.settings.workspace, loop.spec()) == loop.first


def test_a_place_without_a_cache_is_gone_with_its_process(tmp_path: Path) -> None:
    code = (
        "from kartifacts import config\nfrom kartifacts.build import workspace\n"
        "made = workspace.apart(config.read())\nassert made == workspace.apart(config.read())\n"
        "print(workspace.usable(made.workspace))"
    )
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "KARTIFACTS_DISK_CACHE": "off"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert "staging" in done.stdout
    assert not Path(done.stdout.strip()).exists()


Build = Callable[[], BuiltKernel]
