"""Headers outside of a library are in no key, and what was built of them is not used once they have changed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kartifacts.build import kept, objects, outside, stamps
from kartifacts.build.jit import build_one, find_built
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import find, search
from kartifacts.config import Settings
from kartifacts.errors import BuildError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec

from .conftest import CPU, Compiler, answer_of, write_library

MakeSettings = Callable[..., Settings]

# -- what compilers list -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("a.o: a.cpp b.h", ["a.cpp", "b.h"]),
        ("a.o : a.cu \\\n    b.h \\\r\n  c.h\n", ["a.cu", "b.h", "c.h"]),  # as nvcc has it
        ("a.o: a.cpp\nb.h:\nc.h:\n", ["a.cpp"]),  # -MP
        ("a.o: with\\ space.h tab\\\there", ["with space.h", "tab\there"]),
        ("a.o: two\\\\\\ and.h", ["two\\ and.h"]),  # a backslash before a space
        ("a.o: back\\slash.h C:\\x.h", ["back\\slash.h", "C:\\x.h"]),
        ("a.o: \\#hash.h $$dollar.h a:b.h", ["#hash.h", "$dollar.h", "a:b.h"]),
        ("dir\\ a/a.o: a.cpp", ["a.cpp"]),
        ("a.o: a.cpp a.cpp", ["a.cpp"]),
        ("a.o: \xe4.h", ["\xe4.h"]),
        ("a.o:", []),
    ],
)
def test_a_list_of_files_is_read_as_make_reads_it(tmp_path: Path, text: str, files: list[str]) -> None:
    (tmp_path / "a.d").write_bytes(text.encode())
    assert outside.read_depfile(tmp_path / "a.d") == files


def test_odd_names_survive_the_way_through_a_real_compiler(
    make_settings: MakeSettings, make_spec: Callable[..., Spec], tmp_path: Path
) -> None:
    place = tmp_path / "with space $and #hash"
    place.mkdir()
    (place / "odd name.h").write_text("#define ODD 6L\n")
    write_library(
        tmp_path / "demolib",
        {"demo/answer_cpu.cpp": '#include "answer.h"\n#include "odd name.h"\nlong kart_answer() { return ODD; }'},
    )
    settings = make_settings(KARTIFACTS_CXX_FLAGS=f"'-I{place}'")
    built = build_one(make_spec(), settings)
    assert str(place / "odd name.h") in [file.path for file in recorded(built)]


@pytest.mark.parametrize("content", [None, b"no rule"])
def test_a_compiler_that_lists_nothing_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.d").write_bytes(content)
    with pytest.raises(BuildError, match=r"list of the files|did not list the files"):
        outside.read_depfile(tmp_path / "a.d")


# -- what is built of them ---------------------------------------------------------------------------------------------


class Outside(NamedTuple):
    """A library that includes `number.h`, which lies in the second of two directories outside of it."""

    first: Path
    second: Path
    settings: Settings
    compiler: Compiler
    make_spec: Callable[..., Spec]

    def build(self) -> BuiltKernel:
        return build_one(self.make_spec(), self.settings)

    def find(self) -> BuiltKernel | None:
        return find_built(self.make_spec(), self.settings, find("cxx", self.settings))

    @property
    def header(self) -> Path:
        return self.second / "number.h"


@pytest.fixture
def there(
    root: Path, tmp_path: Path, make_settings: MakeSettings, make_spec: Callable[..., Spec], compiler: Compiler
) -> Outside:
    source = '#include "answer.h"\n#include <number.h>\nlong kart_answer() { return NUMBER; }\n'
    write_library(root, {"demo/answer_cpu.cpp": source})
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    (places[1] / "number.h").write_text("#pragma once\n#define NUMBER 3L\n")
    flags = " ".join(f"-I{place}" for place in places)
    settings = make_settings(KARTIFACTS_CXX_FLAGS=flags, KARTIFACTS_CXX=str(compiler.path))
    return Outside(places[0], places[1], settings, compiler, make_spec)


def recorded(built: BuiltKernel) -> list[outside.Seen]:
    record = json.loads(built.path.with_name(kept.RECORD).read_text())
    return [
        outside.Seen(path, tuple(stamp), digest, tuple(absent)) for path, stamp, digest, absent in record["outside"]
    ]


SOURCE = "demo/answer_cpu.cpp"


@pytest.mark.parametrize("how", ["written", "in 2001", "same size and time", "replaced", "link turned"])
def test_a_header_outside_that_changes_means_a_new_build_beside_the_old_one(there: Outside, how: str) -> None:
    if how == "link turned":
        real = there.second.with_name("real")
        there.second.rename(real)
        there.second.symlink_to(real)
    first = there.build()
    content = first.path.read_bytes()
    assert there.find() == first
    with first.path.open("rb") as mapped:
        before = there.header.stat()
        if how == "link turned":
            other = there.second.with_name("other")
            other.mkdir()
            (other / "number.h").write_text("#pragma once\n#define NUMBER 4L\n")
            there.second.unlink()
            there.second.symlink_to(other)
        elif how == "replaced":
            fresh = there.second / "fresh"
            fresh.write_text("#pragma once\n#define NUMBER 4L\n")
            os.replace(fresh, there.header)
        else:
            there.header.write_text("#pragma once\n#define NUMBER 4L\n")
        if how == "in 2001":
            os.utime(there.header, (1_000_000_000, 1_000_000_000))
        elif how == "same size and time":
            os.utime(there.header, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert there.find() is None
        second = there.build()
        assert mapped.read() == content
    assert (second.key, second.op_digest) == (first.key, first.op_digest)
    assert second.path != first.path
    assert second.path.parent.parent == first.path.parent.parent
    assert (answer_of(first.path), answer_of(second.path)) == (3, 4)
    assert there.build() == second
    assert there.compiler.compiled.count(SOURCE) == 2
    assert there.compiler.compiled.count("demo/answer_binding.cpp") == 1


def test_a_header_outside_that_is_as_it_was_again_needs_no_third_build(there: Outside) -> None:
    first = there.build()
    text = there.header.read_text()
    there.header.write_text(text.replace("3L", "4L"))
    second = there.build()
    there.header.write_text(text)
    assert there.build() == first
    there.header.write_text(text.replace("3L", "4L"))
    assert there.build() == second
    assert there.compiler.compiled.count(SOURCE) == 2


def test_a_header_outside_that_is_touched_or_moved_with_its_content_is_no_change(there: Outside) -> None:
    first = there.build()
    for moment in (None, 1_000_000_000):
        os.utime(there.header, None if moment is None else (moment, moment))
        assert there.build() == first
    shutil.copy(there.header, there.second / "copy")
    os.replace(there.second / "copy", there.header)
    (there.second / "unrelated.h").write_text("#error\n")
    assert there.build() == first
    assert there.compiler.compiled.count(SOURCE) == 1


@pytest.mark.parametrize("place", ["an earlier directory", "below an earlier directory", "an earlier link"])
def test_a_header_put_where_the_compiler_looks_earlier_is_a_change(there: Outside, place: str) -> None:
    if place == "below an earlier directory":
        (there.second / "sub").mkdir()
        there.header.rename(there.second / "sub" / "number.h")
        source = Path(there.make_spec().root) / SOURCE
        source.write_text(source.read_text().replace("<number.h>", "<sub/number.h>"))
    first = there.build()
    (there.first / "unrelated.h").write_text("")
    assert there.build() == first
    text = "#define NUMBER 4L\n"
    if place == "below an earlier directory":
        (there.first / "sub").mkdir()
        assert there.build() == first
        (there.first / "sub" / "number.h").write_text(text)
    elif place == "an earlier link":
        other = there.first.with_name("other")
        other.mkdir()
        (other / "number.h").write_text(text)
        there.first.joinpath("unrelated.h").unlink()
        there.first.rmdir()
        there.first.symlink_to(other)
    else:
        (there.first / "number.h").write_text(text)
    assert there.find() is None
    assert answer_of(there.build().path) == 4


def test_a_header_that_a_header_outside_looks_for_beside_itself_is_a_change(there: Outside) -> None:
    there.header.write_text('#include "detail.h"\n#define NUMBER DETAIL\n')
    (there.first / "detail.h").write_text("#define DETAIL 5L\n")
    assert answer_of(there.build().path) == 5
    (there.second / "detail.h").write_text("#define DETAIL 6L\n")
    assert answer_of(there.build().path) == 6


def test_a_header_that_was_only_asked_for_counts_when_it_is_there(there: Outside) -> None:
    there.header.write_text(
        "#if __has_include(<more.h>)\n#include <more.h>\n#else\n#define MORE 0L\n#endif\n#define NUMBER 3L + MORE\n"
    )
    assert answer_of(there.build().path) == 3
    (there.second / "more.h").write_text("#define MORE 4L\n")
    assert answer_of(there.build().path) == 7


def test_a_header_outside_that_is_gone_is_a_change(there: Outside) -> None:
    there.build()
    there.header.unlink()
    assert there.find() is None
    with pytest.raises(BuildError, match=r"needs the header 'number.h', which is not there"):
        there.build()


@pytest.mark.parametrize("long_ago", [False, True])
def test_a_header_outside_that_changes_while_it_is_compiled_is_not_taken_for_what_was_read(
    there: Outside, monkeypatch: pytest.MonkeyPatch, long_ago: bool
) -> None:
    if long_ago:  # by the time that it is looked at
        monkeypatch.setattr(stamps, "_TICK", 0)
    there.compiler.misbehave(
        f'case "$all" in *answer_cpu*) {there.compiler.real} "$@"; s=$?; sed -i s/3L/4L/ {there.header}; exit $s;; esac'
    )
    assert answer_of(there.build().path) == 3
    there.compiler.misbehave("")
    assert answer_of(there.build().path) == 4


def test_system_headers_and_those_of_the_environment_are_looked_at(there: Outside) -> None:
    spec = there.make_spec()
    source = Path(spec.root) / SOURCE
    source.write_text("#include <cstdint>\n" + source.read_text())
    paths = [file.path for file in recorded(there.build())]
    assert any(path.endswith("/cstdint") for path in paths)
    assert any(path.startswith("<environment>/") and path.endswith("tvm/ffi/c_api.h") for path in paths)
    assert not [path for path in paths if path.startswith(spec.root)]
    local = [file for file in recorded(there.build()) if file.path == "/usr/local/include"]
    assert all("stdint.h" in file.absent for file in local)


@pytest.mark.nvcc
def test_cuda_headers_are_looked_at(
    make_settings: MakeSettings, make_spec: Callable[..., Spec], real_toolkit: Path
) -> None:
    built = build_one(make_spec(arch=parse_arch("8.0")), make_settings(CUDA_HOME=str(real_toolkit)))
    names = {os.path.basename(file.path) for file in recorded(built)}
    assert {"cuda_runtime.h", "c_api.h"} <= names


def test_the_directories_in_which_a_compiler_looks_are_told_in_its_order(there: Outside) -> None:
    spec = there.make_spec()
    unit = find("cxx", there.settings).units(spec)[0]
    found = search.places(there.settings, Path(spec.root), unit)
    assert found[:2] == [str(there.first), str(there.second)]
    assert found.index("/usr/include") > 2
    assert not [place for place in found if place.startswith(spec.root)]


# -- what is written down ----------------------------------------------------------------------------------------------


def test_an_environment_may_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "include").mkdir(parents=True)
    (tmp_path / "a" / "include" / "x.h").write_text("1")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "a"))
    files = outside.seen([str(tmp_path / "a/include/x.h")], [str(tmp_path / "a"), str(tmp_path / "a/include")])
    (tmp_path / "a").rename(tmp_path / "b")
    assert not outside.unchanged(files)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "b"))
    assert outside.unchanged(files)
    (tmp_path / "b" / "x.h").write_text("2")
    assert not outside.unchanged(files)


def test_a_file_that_was_changed_a_moment_ago_is_compared_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "x.h"
    header.write_text("1")
    files = outside.seen([str(header)])
    assert files[0].stamp == ()
    assert outside.unchanged(files)
    monkeypatch.setattr(stamps, "_TICK", 0)
    settled = outside.seen([str(header)])
    assert settled[0].stamp
    monkeypatch.setattr(outside, "read_regular", lambda *_: pytest.fail("it is read"))
    assert outside.unchanged(settled)


@pytest.mark.parametrize("damage", ["gone", "cut", "no json", "other types", "flipped object", "writable"])
def test_an_object_whose_record_is_damaged_is_not_used(there: Outside, damage: str) -> None:
    there.build()
    place = there.settings.workspace / "objects"
    for path in [*place.rglob("*.o")]:
        record = path.with_suffix(".json")
        path.chmod(0o644)
        if damage == "gone":
            record.unlink()
        elif damage == "flipped object":
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        elif damage == "writable":
            path.chmod(0o666)
        else:
            record.write_bytes({"cut": record.read_bytes()[:-9], "no json": b"x"}.get(damage, b'[["a", "b", "c", []]]'))
    shutil.rmtree(there.settings.workspace / "kernels")
    assert answer_of(there.build().path) == 3
    assert there.compiler.compiled.count(SOURCE) == 2


def test_an_object_without_a_record_says_so(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="cannot be read"):
        objects.outside_of(tmp_path / "a.o")


def test_kernels_of_two_archs_share_what_they_have_in_common(there: Outside) -> None:
    there.build()
    other = open_library(Path(there.make_spec().root)).spec("answer", {"size": "large"}, CPU)
    build_one(other, there.settings)
    there.header.write_text("#pragma once\n#define NUMBER 4L\n")
    build_one(other, there.settings)
    assert there.compiler.compiled.count("demo/answer_binding.cpp") == 1
