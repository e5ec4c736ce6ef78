"""What sources include, embed and ask for is what compilers read; what they only seem to is not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build import outside
from kartifacts.build.closure import reached, relative
from kartifacts.build.jit import build_one, find_built
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import directives, find
from kartifacts.build.toolchains.options import flags_for
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec

from .conftest import CPU, OP_TOML, answer_of, write_files, write_library

MakeSettings = Callable[..., Settings]


def by_toolchain(*cases: tuple[str, ...]) -> list[object]:
    """Each case for each compiler; those of nvcc, which takes seconds, are slow but for the last."""
    mark = pytest.mark
    quick = [pytest.param("nvrtc", *case, marks=mark.nvrtc) for case in cases]
    slow = [pytest.param("nvcc", *case, marks=[mark.nvcc, mark.slow]) for case in cases[:-1]]
    return [*(("cxx", *case) for case in cases), *quick, *slow, pytest.param("nvcc", *cases[-1], marks=mark.nvcc)]


# -- as compilers see it -----------------------------------------------------------------------------------------------

SPELLINGS = {
    "plain": '#include "near.h"',
    "digraph": '%:include "near.h"',
    "spliced": '#incl\\\nude "near.h"',
    "spliced digraph": '%\\\n:inc\\\nlude "near.h"',
    "spliced as on Windows": '#incl\\\r\nude "near.h"',
    "byte order mark": '\ufeff#include "near.h"',
    "after a comment": '/* why\n not */ #include "near.h"',
    "around comments": '# /* a */ include /* b\n */ "near.h" // c',
    "form feed": '#\f\vinclude "near.h"',
    "import": '#import "near.h"',
    "no comment begins in a text": 'const char* a = "/*";\n#include "near.h"\n// */',
    "no comment begins in a character": "const char a = '\"', b = '/';\n#include \"near.h\"\nconst char c = '\"';",
    "no comment begins in a raw text": 'const char* a = R"x(/* )" )x";\n#include "near.h"\n// */',
    "no text begins in a number": "const long a = 1'000; /* b'\n*/\n#include \"near.h\"",
    "no text begins in a skipped line": '#if 0\ndon\'t "\n#endif\n#include "near.h"',
    "no comment begins in a header's name": '#include <sys//types.h>\n#include "near.h"',
    "escaped quote": 'const char* a = "\\"/*";\n#include "near.h"\n// */',
    "asked": '#if __has_include("near.h")\n#include "near.h"\n#endif',
    "in a comment": '/*\n#include "near.h"\n#include MACRO\n#include "../../near.h"\n__has_include(MACRO)\n*/',
    "in a comment that is spliced": '// why \\\n#include "near.h"',
    "in a raw text": 'const char* a = R"(\n#include "near.h"\n#include MACRO\n)";',
    "in a text": 'const char* a = "__has_include(MACRO) \\\n#include MACRO";',
    "in a comment without an end": "int a;\n// /*\n#if 0\n/* */\n#endif",
    "not at the start": "/* */ int a; /*\n*/ #define A\nint b;".replace(" #define A", ""),
    "defined where it is missing": "#ifndef __has_include\n#define __has_include(x) 0\n#endif",
    "only tested": "#if defined(__has_include) && defined __has_include\nint a;\n#endif",
}


@pytest.mark.parametrize("how", SPELLINGS)
def test_what_is_followed_is_what_a_compiler_reads(tmp_path: Path, how: str) -> None:
    root = write_files(tmp_path / "lib", {"demo/near.h": "", "demo/a.cpp": SPELLINGS[how]})
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ on PATH")
    command = [compiler, "-std=c++17", "-w", "-M", "-MF", "a.d", "demo/a.cpp"]
    subprocess.run(command, cwd=root, check=True)
    read = {relative(root, name) for name in outside.read_depfile(root / "a.d")} - {None}
    assert {source.path for source in reached(root, ["demo/a.cpp"])} == read
    assert ("demo/near.h" in read) is not how.startswith(("in a", "defined", "only", "not at"))


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("#include H", "includes 'H'"),
        ("%:include H", "includes 'H'"),
        ("#if 0\n#include H\n#endif", "includes 'H'"),
        ("#if __has_include(H)\n#endif", r"asks for 'H'"),
        ("#if __has_include_next(H)\n#endif", r"asks for 'H'"),
        ("#if __has_embed(H)\n#endif", r"asks for 'H'"),
        ("#define ASK(x) __has_include(x)", r"asks for 'x'"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_the_hint_tells_what_counts(tmp_path: Path, line: str, how: str) -> None:
    root = write_library(tmp_path / "lib", {"demo/a.cpp": line})
    with pytest.raises(ConfigError, match=rf"demo/a.cpp {how}, which cannot be followed") as caught:
        reached(root, ["demo/a.cpp"])
    assert "no condition is looked at, and what stands in a comment does not" in str(caught.value.hint)


@pytest.mark.parametrize("decoy", [True, False])
def test_a_header_behind_a_link_and_back_is_not_taken_for_the_one_that_the_text_names(
    tmp_path: Path, decoy: bool
) -> None:
    files = {"inc2/deep/y.h": "", "inc2/x.h": "#define X 1", "demo/a.cpp": '#include "sub/../x.h"'}
    root = write_library(tmp_path / "lib", {**files, **({"demo/x.h": "#define X 2"} if decoy else {})})
    (root / "demo/sub").symlink_to("../inc2/deep")
    with pytest.raises(ConfigError, match=r"a.cpp includes 'sub/../x.h', which goes through a link to a directory"):
        reached(root, ["demo/a.cpp"])
    assert relative(root, "demo/sub/../x.h") == "inc2/x.h"
    assert relative(root, "demo/sub/y.h") == "demo/sub/y.h"
    (root / "inc2/x.h").rename(root / "include/x.h")  # now the compiler finds none there
    assert [source.path for source in reached(root, ["demo/a.cpp"])] == ["demo/a.cpp"]


def test_a_header_outside_behind_a_link_is_looked_at_where_it_lies(tmp_path: Path) -> None:
    write_files(tmp_path, {"real/deep/y.h": "", "real/x.h": "1", "x.h": "2"})
    (tmp_path / "link").symlink_to("real/deep")
    files = outside.seen([str(tmp_path / "link/../x.h")])
    assert [file.path for file in files] == [str(tmp_path / "real/x.h")]
    (tmp_path / "real/x.h").write_text("3")
    assert not outside.unchanged(files)


@pytest.mark.parametrize("decoy", [True, False])
@pytest.mark.parametrize("toolchain", ["cxx", pytest.param("nvrtc", marks=pytest.mark.nvrtc)])
def test_an_edit_of_a_header_outside_that_is_behind_a_link_is_seen(
    root: Path, tmp_path: Path, make_settings: MakeSettings, toolchain: str, decoy: bool
) -> None:
    asking(root, toolchain, "1")
    source = root / "demo" / ("answer_cpu.cpp" if toolchain == "cxx" else "answer.cu")
    source.write_text("#include <link/../x.h>\n" + source.read_text().replace("FOUND 1", "FOUND X"))
    place = write_files(tmp_path / "place", {"real/deep/y.h": "", "real/x.h": "#define X 5", "at/y.h": ""})
    if decoy:
        write_files(place, {"at/x.h": "#define X 7"})
    (place / "at/link").symlink_to("../real/deep")
    flags = f"KARTIFACTS_{'CXX' if toolchain == 'cxx' else 'CUDA'}_FLAGS"
    settings = make_settings(**{flags: f"-I{place / 'at'}"})
    spec = spec_of(root, toolchain, settings)
    first = build_one(spec, settings)
    (place / "real/x.h").write_text("#define X 6")
    second = build_one(spec, settings)
    assert first.sha256 != second.sha256
    if toolchain == "cxx":
        assert (answer_of(first.path), answer_of(second.path)) == (5, 6)


# -- what is only asked for --------------------------------------------------------------------------------------------


ASKED = """
#if {asked}
#define FOUND 1
#else
#define FOUND 0
#endif
"""
CODE = {
    "cxx": '#include "answer.h"\nlong kart_answer() { return FOUND; }\n',
    "nvcc": '#include "answer.h"\nlong kart_answer() { return FOUND; }\n',
    "nvrtc": 'extern "C" __global__ void answer(long* x) { *x = 4000 + FOUND; }\n',
}
ONLY_IMAGE = """
schema = 1
family = "demo"
[[op]]
name = "answer"
summary = "Gives a number."
exports = ["answer"]
axes.size = ["small"]
device.cuda = { toolchain = "nvrtc", sources = ["answer.cu"] }
"""


def asking(root: Path, toolchain: str, asked: str) -> None:
    source = "answer_cpu.cpp" if toolchain == "cxx" else "answer.cu"
    text = ASKED.format(asked=asked) + CODE[toolchain]
    toml = ONLY_IMAGE if toolchain == "nvrtc" else OP_TOML
    write_library(root, {f"demo/{source}": text, "demo/op.toml": toml})


def spec_of(root: Path, toolchain: str, settings: Settings) -> Spec:
    arch = CPU if toolchain == "cxx" else parse_arch("9.0")
    return open_library(root, workspace=settings.workspace).spec("answer", {"size": "small"}, arch)


@pytest.mark.parametrize(
    ("toolchain", "asked", "file"),
    by_toolchain(
        ('__has_include("opt.h")', "demo/opt.h"),
        ('__has_include ( "opt.h" )', "include/opt.h"),
        ("__has_include(<opt.h>)", "include/opt.h"),
        ("__has_inc\\\nlude(/* */ <sub/opt.h>)", "include/sub/opt.h"),
    ),
)
def test_a_file_of_the_library_that_is_asked_for_is_in_the_identity_whether_it_is_there_or_not(
    root: Path, make_settings: MakeSettings, toolchain: str, asked: str, file: str
) -> None:
    asking(root, toolchain, asked)
    settings = make_settings()
    without = build_one(spec_of(root, toolchain, settings), settings)
    write_files(root, {file: ""})
    spec = spec_of(root, toolchain, settings)
    assert file in [source.path for source in spec.sources]
    assert find_built(spec, settings) is None
    found = build_one(spec, settings)
    assert found.op_digest != without.op_digest
    assert found.sha256 != without.sha256
    (root / file).unlink()
    assert build_one(spec_of(root, toolchain, settings), settings) == without
    if toolchain == "cxx":
        assert (answer_of(without.path), answer_of(found.path)) == (0, 1)


def test_asking_for_the_next_one_counts_each_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_library(tmp_path / "own")
    monkeypatch.setattr("kartifacts.build.closure.own_root", lambda: own)
    text = "#if __has_include_next(<opt.h>)\n#include_next <opt.h>\n#endif\n"
    root = write_library(tmp_path / "lib", {"demo/a.cpp": "#include <opt.h>\n", "include/opt.h": text})
    before = [source.path for source in reached(root, ["demo/a.cpp"])]
    write_files(own, {"include/opt.h": ""})
    after = [source.path for source in reached(root, ["demo/a.cpp"])]
    assert (before, after) == (["demo/a.cpp", "include/opt.h"], ["<kartifacts>/include/opt.h", *before])


def test_data_that_is_embedded_or_asked_for_is_in_the_identity(tmp_path: Path) -> None:
    text = '#if __has_embed("data.bin" limit(4))\n#endif\n#if __has_embed__(<more.bin>)\n#endif\n#embed <last.bin>\n'
    files = {"demo/a.cpp": text, "demo/data.bin": "1", "include/more.bin": "2", "include/last.bin": "3"}
    root = write_files(tmp_path / "lib", files)
    assert [source.path for source in reached(root, ["demo/a.cpp"])] == sorted(files)


@pytest.mark.parametrize(
    ("toolchain", "asked"),
    by_toolchain(("__has_include(<optx.h>)",), ('__has_include("optx.h")',), ("__has_include_next(<optx.h>)",)),
)
def test_a_header_outside_that_a_source_asks_for_is_looked_up_before_each_use(
    root: Path, tmp_path: Path, make_settings: MakeSettings, toolchain: str, asked: str
) -> None:
    if "next" in asked and toolchain == "nvrtc":
        asked = asked.replace("_next", "")
    asking(root, toolchain, asked)
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    flags = " ".join(f"-I{place}" for place in places)
    settings = make_settings(**{f"KARTIFACTS_{'CXX' if toolchain == 'cxx' else 'CUDA'}_FLAGS": flags})
    spec = spec_of(root, toolchain, settings)
    compiler = find(toolchain, settings)
    without = build_one(spec, settings)
    for place in reversed(places):  # it is there, though none of its text is read
        header = place / "optx.h"
        header.write_text("#error it is only asked for\n")
        assert find_built(spec, settings, compiler) is None
        found = build_one(spec, settings)
        assert (found.key, found.op_digest) == (without.key, without.op_digest)
        assert found.sha256 != without.sha256
        assert find_built(spec, settings, compiler) == found
        header.unlink()
        assert find_built(spec, settings, compiler) == without


@pytest.mark.parametrize("name", ["one.h", "other.h"])
def test_what_each_source_of_a_kernel_asks_for_is_looked_up(
    root: Path, tmp_path: Path, make_settings: MakeSettings, name: str
) -> None:
    asking(root, "cxx", "__has_include(<one.h>)")
    binding = root / "demo/answer_binding.cpp"
    text = binding.read_text().replace("kart_answer();", "kart_answer() + 2 * FOUND;")
    binding.write_text(ASKED.format(asked="__has_include(<other.h>)") + text)
    (tmp_path / "place").mkdir()
    settings = make_settings(KARTIFACTS_CXX_FLAGS=f"-I{tmp_path / 'place'}")
    assert answer_of(build_one(spec_of(root, "cxx", settings), settings).path) == 0
    (tmp_path / "place" / name).write_text("")
    assert answer_of(build_one(spec_of(root, "cxx", settings), settings).path) == {"one.h": 1, "other.h": 2}[name]


# -- what assemblers read ----------------------------------------------------------------------------------------------

ASSEMBLED = [
    'asm(".incbin \\"data.bin\\"");',
    'asm(".section .rodata\\n\\t.incbin\\t\\"data.bin\\"\\n");',
    'asm(R"(\n.incbin "data.bin"\n)");',
    "#define TEXT(x) #x\nasm(TEXT(.incbin));",
    'asm(".inc\\\nbin \\"data.bin\\"");',
    'asm(".include \\"more.s\\"");',
    'asm(R"(.include "more.s")");',
]


@pytest.mark.parametrize("file", ["demo/answer_cpu.cpp", "include/scale.h"])
@pytest.mark.parametrize("text", ASSEMBLED)
def test_what_makes_an_assembler_read_a_file_is_refused(root: Path, text: str, file: str) -> None:
    (root / file).write_text((root / file).read_text() + text)
    with pytest.raises(ConfigError, match=rf"{file} uses \.inc(bin|lude), by which an assembler reads a file"):
        open_library(root).spec("answer", {"size": "small"}, CPU)


def test_a_header_outside_that_makes_an_assembler_read_a_file_is_refused(
    root: Path, tmp_path: Path, make_settings: MakeSettings
) -> None:
    write_files(tmp_path / "other", {"data.bin": "x", "data.h": 'asm(".incbin \\"data.bin\\"");\n'})
    source = "#include <data.h>\nlong kart_answer() { return 1; }\n"
    write_library(root, {"demo/answer_cpu.cpp": source})
    (root / "data.bin").write_text("x")
    settings = make_settings(KARTIFACTS_CXX_FLAGS=f"-I{tmp_path / 'other'}")
    with pytest.raises(BuildError, match=r"data.h' uses \.incbin, by which an assembler reads a file"):
        build_one(spec_of(root, "cxx", settings), settings)


@pytest.mark.parametrize("text", ["// .incbin", '/* .include "x" */', "x.include(y);", 'a = "no.include"', "x.incbins"])
def test_what_only_looks_like_it_is_no_directive_of_an_assembler(text: str) -> None:
    assert directives.assembler(text.encode()) is None


# -- clocks ------------------------------------------------------------------------------------------------------------

CLOCKS = ["__TIME__", "__DATE__", "__TIMESTAMP__"]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(("device", "toolchain"), [("cpu", "cxx"), ("cuda", "nvcc"), ("cuda", "nvrtc")])
@pytest.mark.parametrize("how", ["-DSTAMP={}", "-DSTAMP=(1,{})", "-Xcompiler=-DSTAMP={}", "defines"])
def test_no_macro_of_the_command_line_tells_when_it_was_compiled(
    root: Path, clock: str, device: str, toolchain: str, how: str
) -> None:
    if how.startswith("-X") and toolchain != "nvcc":
        how = "-DSTAMP=x{0}y+{0}"
    text = ONLY_IMAGE if toolchain == "nvrtc" else OP_TOML
    if how == "defines":
        old = 'small = "KART_SIZE=1"'
        text = text.replace(old, f'small = "KART_SIZE=1+{clock}"')
        text = text.replace('"]}', "").replace('["answer.cu"] }', f'["answer.cu"], defines.size.small = "A={clock}" }}')
    else:
        flag = how.format(clock)
        text = text.replace(f'toolchain = "{toolchain}"', f'toolchain = "{toolchain}"\nflags = ["{flag}"]')
        text = text.replace('"nvrtc"\nflags', '"nvrtc", flags')
    write_library(root, {"demo/op.toml": text})
    with pytest.raises(ConfigError, match=rf"{clock}: the kernel would be another each time that it is compiled"):
        open_library(root).spec("answer", {"size": "small"}, CPU if device == "cpu" else parse_arch("9.0"))


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(("name", "kind"), [("CXX", "cxx"), ("CUDA", "nvcc"), ("CUDA", "nvrtc")])
@pytest.mark.parametrize("flags", ["-DSTAMP={}", "-D STAMP={}", "'-DSTAMP=(1, {})'"])
def test_no_macro_of_the_settings_tells_when_it_was_compiled(
    make_settings: MakeSettings, clock: str, name: str, kind: str, flags: str
) -> None:
    settings = make_settings(**{f"KARTIFACTS_{name}_FLAGS": flags.format(clock)})
    with pytest.raises(ConfigError, match=rf"KARTIFACTS_{name}_FLAGS: .*{clock}.*another each time"):
        flags_for(settings, kind)
    fixed = make_settings(**{f"KARTIFACTS_{name}_FLAGS": f"-D{clock}=1"})  # a time that is none
    assert f"-D{clock}=1" in " ".join(flags_for(fixed, kind).flags)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("text", ["{} x", 'R"(" )" {}', "'\"' {} '\"'", "1'0 {} 1'0", '/* " */ {}', '// " \n {}'])
def test_a_clock_is_seen_between_texts_and_comments(clock: str, text: str) -> None:
    found = directives.clock(text.format(clock).encode())
    assert found is not None
    assert found == (clock, 1 + text.count("\n"))
    assert directives.clock(text.format(f'"{clock}"').replace("\\", "").encode()) is None
    assert directives.clock(text.format(clock[:4] + "\\\n" + clock[4:]).encode()) is not None
