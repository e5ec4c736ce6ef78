from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build import closure
from kartifacts.build.closure import own_root as real_root
from kartifacts.build.closure import reached
from kartifacts.build.declared import TAKEN
from kartifacts.build.library import Library, discover, open_library
from kartifacts.errors import ConfigError
from kartifacts.model.arch import Arch, parse_arch, parse_archs
from kartifacts.model.spec import Spec
from kartifacts.runtime import kernel as loading
from kartifacts.runtime.kernel import Kernel

from .conftest import CPU, OP_TOML, write_library


def paths_of(spec: Spec) -> list[str]:
    return [source.path for source in spec.sources]


def test_the_identity_covers_every_file_reached_and_no_other(make_spec: Callable[..., Spec]) -> None:
    assert paths_of(make_spec()) == [
        "demo/answer.h",
        "demo/answer_binding.cpp",
        "demo/answer_cpu.cpp",
        "include/deep/scale.h",
        "include/scale.h",
    ]


@pytest.mark.parametrize("arch", [CPU, parse_arch("9.0a")], ids=str)
def test_a_changed_header_of_a_header_changes_the_identity_whatever_its_time(
    make_spec: Callable[..., Spec], root: Path, arch: Arch
) -> None:
    before = make_spec(arch=arch).op_digest
    header = root / "include/deep/scale.h"
    header.write_text(header.read_text().replace("7L", "8L"))
    os.utime(header, (0, 1_000_000_000))
    assert make_spec(arch=arch).op_digest != before


def test_touching_files_or_editing_an_unrelated_one_changes_no_identity(
    make_spec: Callable[..., Spec], root: Path
) -> None:
    before = make_spec().op_digest
    for path in root.rglob("*"):
        os.utime(path)
    (root / "include/unrelated.h").write_text("#error\n")
    assert make_spec().op_digest == before


def test_the_place_of_a_library_is_in_no_identity(make_spec: Callable[..., Spec], root: Path, tmp_path: Path) -> None:
    other = shutil.copytree(root, tmp_path / "other" / "place with space")
    toolchain = {"kind": "cxx", "version": "1"}
    assert make_spec().op_digest == make_spec(where=other).op_digest
    assert make_spec().key(toolchain) == make_spec(where=other).key(toolchain)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('#include "near.h"', ["demo/near.h"]),  # beside the source goes before include/
        ('#include "far.h"', ["include/far.h"]),
        ("#include <far.h>", ["include/far.h"]),
        ("#include <near.h>", []),  # angle brackets do not look beside the source
        ('  #  include\t"near.h" // why', ["demo/near.h"]),
        ('#inc\\\nlude "near.h"', ["demo/near.h"]),
        ('#include_next "far.h"', ["include/far.h"]),
        ('#include "sub/../near.h"', ["demo/near.h"]),
        ('#include "../demo/near.h"', ["demo/near.h"]),
        ('// #include "near.h"', []),
        ('#include "tvm/ffi/c_api.h"\n#include <vector>', []),  # the toolchain's and the system's
    ],
)
def test_includes_are_followed_as_a_compiler_does(tmp_path: Path, line: str, found: list[str]) -> None:
    files = {"demo/near.h": "", "demo/sub/x.h": "", "include/near_too.h": "", "include/far.h": "", "demo/a.cpp": line}
    root = write_library(tmp_path / "lib", files)
    assert [source.path for source in reached(root, ["demo/a.cpp"]) if source.path != "demo/a.cpp"] == found


def test_an_include_by_macro_is_refused_since_it_cannot_be_followed(tmp_path: Path) -> None:
    root = write_library(tmp_path / "lib", {"demo/a.cpp": '#define H "answer.h"\n#include H\n'})
    with pytest.raises(ConfigError, match=r"demo/a.cpp includes 'H', which cannot be followed"):
        reached(root, ["demo/a.cpp"])


def test_headers_that_include_each_other_are_read_once(tmp_path: Path) -> None:
    files = {"demo/a.cpp": '#include "a.h"', "demo/a.h": '#include "b.h"', "demo/b.h": '#include "a.h"'}
    root = write_library(tmp_path / "lib", files)
    assert [source.path for source in reached(root, ["demo/a.cpp"])] == ["demo/a.cpp", "demo/a.h", "demo/b.h"]


@pytest.mark.parametrize("include", ['"../../outside.h"', '"{outside}"'])
def test_an_include_cannot_reach_outside_the_library(tmp_path: Path, include: str) -> None:
    outside = tmp_path / "outside.h"
    outside.write_text("")
    root = write_library(tmp_path / "lib", {"demo/a.cpp": "#include " + include.format(outside=outside)})
    with pytest.raises(ConfigError, match="reaches outside the library"):
        reached(root, ["demo/a.cpp"])


@pytest.mark.parametrize("path", ["../../secret.cpp", "/etc/passwd", "sub/../../../x.cpp"])
def test_a_source_cannot_reach_outside_the_library(tmp_path: Path, path: str) -> None:
    root = write_library(tmp_path / "lib", {"demo/op.toml": OP_TOML.replace("answer_cpu.cpp", path)})
    with pytest.raises(ConfigError, match=r"demo/op.toml: answer.device.cpu reaches outside the library"):
        open_library(root).spec("answer", {"size": "small"}, CPU)


def test_a_source_may_lie_in_another_directory_of_the_library(tmp_path: Path) -> None:
    files = {"demo/op.toml": OP_TOML.replace("answer_cpu.cpp", "../common/cpu.cpp"), "common/cpu.cpp": "int x;"}
    spec = open_library(write_library(tmp_path / "lib", files)).spec("answer", {"size": "small"}, CPU)
    assert "common/cpu.cpp" in paths_of(spec)
    assert spec.device.sources == ["common/cpu.cpp"]


def test_a_missing_source_is_named(root: Path, make_spec: Callable[..., Spec]) -> None:
    (root / "demo/answer_cpu.cpp").unlink()
    with pytest.raises(ConfigError, match=r"'demo/answer_cpu.cpp', which cannot be read"):
        make_spec()


def _many(*numbers: int) -> str:
    """The axis of the demo, with further ones of so many values."""
    more = [f"axes.a{place} = {[str(value) for value in range(number)]}" for place, number in enumerate(numbers)]
    return "\n".join(['axes.size = ["small", "large"]', *more]).replace("'", '"')


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("summary =", "sumary =", "sumary"),
        ('min_arch = "7.5"', 'minarch = "7.5"', "answer.device.cuda has the unknown field 'minarch'"),
        (
            'min_arch = "7.5"',
            "unsupported = []",
            "device.cuda has the unknown field 'unsupported'; it belongs to [[op]]",
        ),
        (', large = "KART_SIZE=1000" }', " }", "answer.device.cpu.defines.size has no macro for large"),
        ('toolchain = "cxx"', 'toolchain = "nvrtc"', "expected 'cxx', got 'nvrtc'"),
        ('min_arch = "7.5"', "min_arch = 7.5", "min_arch"),
        ('min_arch = "7.5"', 'min_arch = "75x"', "75x"),
        ('min_arch = "7.5"', 'min_arch = "gfx942"', "no cuda arch"),
        (
            'axes.size = ["small", "large"]',
            'axes.size = ["small", "large"]\naxes.more = []',
            "more must list its values",
        ),
        ('["small", "large"]', '["small", "large", "small"]', "each once"),
        ('["small", "large"]', '["small", "large", "a&b=c"]', "bad name or value 'a&b=c'"),
        ('exports = ["answer"]', "exports = []", "exports no function"),
        ("schema = 1", "schema = 2", "schema 2"),
        ("schema = 1", "schema = ", "is not TOML"),
        ('family = "demo"', 'family = "Demo"', "bad family name"),
        ('toolchain = "cxx"', 'toolchain = "cxx"\noutput = "image"', "cxx makes an object, not an image"),
        ('toolchain = "cxx"', 'toolchain = "cxx"\noutput = "x"', "cxx makes an object, not an x"),
        ('toolchain = "nvcc"', 'toolchain = "nvcc"\noutput = "x"', "nvcc makes an object or an image, not an x"),
        ('toolchain = "nvcc"', 'toolchain = "nvrtc"\noutput = "object"', "nvrtc makes an image, not an object"),
        ('toolchain = "cxx"', 'toolchain = "cxx"\nmajors = [9]', "cpu.majors says nothing"),
        ('sources = ["answer.cu"]', 'sources = ["answer.cu", "answer.cuh"]', "cuda.sources: 'answer.cuh' is a header"),
        ('["answer_binding.cpp"]', '["answer_binding.cpp", "a/b.H"]', "host_sources: 'a/b.H' is a header"),
        ('min_arch = "7.5"', "majors = [0]", "cuda.majors: expected the first number"),
        ('min_arch = "7.5"', "majors = [9, -1]", "cuda.majors: expected the first number"),
        ('min_arch = "7.5"', "majors = [9, 9]", "each once"),
        (OP_TOML, 'schema = 1\nfamily = "demo"\nop = []\n', "the family 'demo' declares no op"),
        ('axes.size = ["small", "large"]', _many(3000, 3000), "18000000 combinations"),
        ('axes.size = ["small", "large"]', _many(*[2] * 17), "262144 combinations"),
        ('min_arch = "7.5"', 'flags = ["-march=native"]', "depend on more than the op's own files"),
        ('min_arch = "7.5"', 'flags = ["-gencode=arch=compute_89,code=sm_89"]', "depend on more"),
        ('min_arch = "7.5"', 'flags = ["-I/opt/include"]', "depend on more"),
        ('min_arch = "7.5"', 'flags = ["--threads=4"]', "depend on more"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_name_of_its_file(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in OP_TOML
    root = write_library(tmp_path / "lib", {"demo/op.toml": OP_TOML.replace(old, new)})
    with pytest.raises(ConfigError) as caught:
        open_library(root)
    assert message in str(caught.value)
    assert "demo/op.toml" in str(caught.value)


def test_an_op_toml_that_is_not_text_is_refused(root: Path) -> None:
    (root / "demo/op.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"demo/op.toml"):
        open_library(root)


def test_one_family_cannot_be_declared_twice(tmp_path: Path) -> None:
    root = write_library(tmp_path / "lib", {"copy/op.toml": OP_TOML})
    with pytest.raises(ConfigError, match=r"declares the family 'demo', as copy/op.toml does"):
        open_library(root)


@pytest.mark.parametrize("missing", [True, False])
def test_a_directory_without_ops_is_no_library(tmp_path: Path, missing: bool) -> None:
    with pytest.raises(ConfigError, match="is no kernel library"):
        open_library(tmp_path / "nothing" if missing else tmp_path)


def test_an_op_is_found_by_its_full_or_bare_name_and_a_misspelt_one_gets_the_near_ones(demo: Library) -> None:
    assert demo.find("demo/answer") == demo.find("answer")
    with pytest.raises(ConfigError, match="no op 'anser'") as caught:
        demo.find("anser")
    assert caught.value.hint == "near ones: demo/answer"


def test_a_bare_name_of_two_families_is_ambiguous(tmp_path: Path) -> None:
    second = OP_TOML.replace('family = "demo"', 'family = "more"')
    both = open_library(write_library(tmp_path / "lib", {"more/op.toml": second}))
    with pytest.raises(ConfigError, match=r"ambiguous.*demo/answer, more/answer"):
        both.find("answer")
    assert both.find("more/answer")[0] == "more"


@pytest.mark.parametrize("arch", ["7.0", "gfx942"])
def test_a_spec_for_an_arch_that_the_op_does_not_support_is_refused(demo: Library, arch: str) -> None:
    with pytest.raises(ConfigError, match=f"demo/answer cannot be built for {arch}"):
        demo.spec("answer", {"size": "small"}, parse_arch(arch))


@pytest.mark.parametrize(
    "axes", [{}, {"size": "huge"}, {"size": "small", "dtype": "int8"}, {"size": ["small"]}, {"size": None}]
)
def test_axes_that_are_not_declared_are_refused(demo: Library, axes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"demo/answer"):
        demo.spec("answer", axes, CPU)


def test_specs_cover_every_axis_and_arch_and_say_what_they_leave_out(demo: Library) -> None:
    specs, skipped = demo.specs([], (*parse_archs("7.0 8.0 9.0a gfx942"), CPU))
    assert [(spec.uri, str(spec.arch)) for spec in specs] == [
        (f"demo/answer?size={size}", arch) for arch in ("8.0", "9.0a", str(CPU)) for size in ("small", "large")
    ]
    assert [str(refusal) for refusal in skipped] == [
        "demo/answer for 7.0: the op needs 7.5 or later",
        "demo/answer for gfx942: the op is declared for cpu, cuda only",
    ]


def test_an_arch_list_of_which_nothing_is_left_is_an_error_with_the_reasons(demo: Library) -> None:
    with pytest.raises(ConfigError, match=r"nothing to build for 7.0: demo/answer for 7.0: the op needs 7.5"):
        demo.specs(["answer"], parse_archs("7.0"))


# -- what may be declared ----------------------------------------------------------------------------------------------

_REACHING = [
    *(
        "-I/opt/include",
        "-I",
        "-Ifoo",
        "-isystem",
        "-isystem/x",
        "-iquote/x",
        "-idirafter/x",
        "-iprefix/x",
        "-iwithprefix/x",
    ),
    *("-imacros/x", "-include/x", "-include", "--include-directory=/x", "--include-directory-after=/x", "--imacros=/x"),
    *(
        "-Wp,-I/x",
        "-Wp,-imacros,/x",
        "-Wa,-I/x",
        "-Wl,-L/x",
        "-Xpreprocessor",
        "-Xlinker",
        "-Xassembler",
        "-L/x",
        "-lm",
    ),
    *(
        "@file",
        "-specs=x",
        "--specs=x",
        "-fplugin=x.so",
        "-fplugin-arg-x-y=z",
        "-B/x",
        "-B",
        "--sysroot=/x",
        "-isysroot/x",
    ),
    *(
        "-fprofile-use=/x",
        "-fauto-profile=/x",
        "-fmodule-mapper=/x",
        "-fsanitize-blacklist=/x",
        "-fdump-tree-all",
        "-o",
        "-MF/x",
    ),
    *(
        "-march=native",
        "-mtune=native",
        "-mcpu=x",
        "-mavx512f",
        "-save-temps",
        "-wrapper",
        "-x",
        "/x.cpp",
        "x.o",
        "-",
        "",
    ),
    *(
        "-fopenmp",
        "-pthread",
        "-shared",
        "-static",
        "-E",
        "-g",
        "-DX=$(id)",
        "-DX=`id`",
        "-O3 -I/x",
        "-O3\n",
        "-c",
        "--help",
    ),
    *("-fdiagnostics-add-output=sarif:file=/x", "-frandom-seed=1", "-fstack-usage", "-Werror=x,-I/x", "-D", "-D1"),
]
_REACHING_NVCC = [
    *_REACHING,
    *(
        "-Xcompiler=-I/x",
        "-Xcompiler=-O3,-I/x",
        "-Xcompiler",
        "--compiler-options=-I/x",
        "--compiler-options",
        "-Xcompiler=@x",
    ),
    *(
        "--options-file=x",
        "-optf",
        "-optf=x",
        "--include-path=/x",
        "--system-include=/x",
        "--pre-include=/x",
        "-Xptxas",
    ),
    *("-Xptxas=--input-as-string", "-Xptxas=-v,-I", "-Xnvlink=-L/x", "-Xarchive=x", "-ccbin=x", "--compiler-bindir=x"),
    *(
        "-gencode=arch=compute_89,code=sm_89",
        "-arch=sm_90",
        "--gpu-architecture=sm_90",
        "-code=sm_90",
        "-t4",
        "--threads=4",
    ),
    *(
        "-rdc=true",
        "--relocatable-device-code=true",
        "-dlto",
        "--keep",
        "--keep-dir=x",
        "--dryrun",
        "-lineinfo",
        "-G",
        "-ptx",
    ),
    *(
        "--library=x",
        "--library-path=x",
        "-ldir=x",
        "--cudart=shared",
        "-time=x",
        "--fdevice-time-trace=x",
        "-Xcudafe=--x",
    ),
    *("--libdevice-directory=x", "--target-directory=x", "--use-local-env", "--run", "--clean-targets"),
]


@pytest.mark.parametrize(
    ("kind", "flag"), [*(("cpu", flag) for flag in _REACHING), *(("cuda", flag) for flag in _REACHING_NVCC)]
)
def test_a_flag_whose_effect_the_identity_does_not_cover_is_refused_by_its_name(
    tmp_path: Path, kind: str, flag: str
) -> None:
    marker = 'toolchain = "cxx"' if kind == "cpu" else 'toolchain = "nvcc"'
    text = OP_TOML.replace(marker, f"{marker}\nflags = [{json.dumps(flag)}]")
    with pytest.raises(ConfigError, match="depend on more than the op's own files") as caught:
        open_library(write_library(tmp_path / "lib", {"demo/op.toml": text}))
    assert f"answer.device.{kind}.flags" in caught.value.message
    assert any(repr(part) in caught.value.message for part in (flag, *flag.partition("=")[2].split(",")))


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (
            "cpu",
            "-O3 -Ofast -std=c++20 -ffast-math -fno-trapping-math -fno-math-errno -funroll-loops -Wall -Wno-unused",
        ),
        (
            "cpu",
            '-DX -DX=1 -UX -DA="a,b" -fopenmp-simd -ffp-contract=off -mprefer-vector-width=512 -ftemplate-depth=2000',
        ),
        ("cuda", "-O3 -std=c++17 --use_fast_math -use_fast_math -ftz=true --fmad=false --maxrregcount=128 -DX=1 -w"),
        ("cuda", "--expt-relaxed-constexpr -extended-lambda -Xptxas=-O3,-v,-dlcm=ca --ptxas-options=--warn-on-spills"),
        ("cuda", "-Xcompiler=-fno-math-errno,-Wall --compiler-options=-ffast-math -diag-suppress=177,550 -restrict"),
    ],
)
def test_what_kernels_need_may_be_declared(tmp_path: Path, kind: str, flags: str) -> None:
    marker = 'toolchain = "cxx"' if kind == "cpu" else 'toolchain = "nvcc"'
    text = OP_TOML.replace(marker, f"{marker}\nflags = {json.dumps(flags.split())}")
    open_library(write_library(tmp_path / "lib", {"demo/op.toml": text}))


@pytest.mark.parametrize("define", ["", "1X=1", "X -I/x", "X=$(id)", "-I/x", "X=1\n"])
def test_a_define_that_is_none_is_refused(tmp_path: Path, define: str) -> None:
    text = OP_TOML.replace('"KART_SIZE=1"', json.dumps(define))
    with pytest.raises(ConfigError, match=r"answer.device.cpu.defines: expected NAME"):
        open_library(write_library(tmp_path / "lib", {"demo/op.toml": text}))


def test_an_export_cannot_hide_what_a_kernel_says_about_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_load_module", lambda *_: None)
    taken = {name for name in vars(Kernel("u", CPU, Path("x"), "o", ())) if not name.startswith("_")}
    assert taken == TAKEN
    for name in (*sorted(taken), "_module", "__call__", "a-b", "a b", "1a", "", "class", "a.b", "\u00e9"):
        text = OP_TOML.replace('exports = ["answer"]', f"exports = [{json.dumps(name)}]")
        with pytest.raises(ConfigError, match="answer exports"):
            open_library(write_library(tmp_path / "lib", {"demo/op.toml": text}))
    text = OP_TOML.replace('exports = ["answer"]', 'exports = ["answer", "answer"]')
    with pytest.raises(ConfigError, match="each once"):
        open_library(write_library(tmp_path / "lib", {"demo/op.toml": text}))


@pytest.mark.parametrize("values", [["x" * 300], ["x" * 128, "y" * 128, "z" * 128]])
def test_axes_that_no_file_could_be_named_after_are_refused_where_they_are_declared(
    tmp_path: Path, values: list[str]
) -> None:
    axes = "\n".join(f'axes.a{number} = ["{value}"]' for number, value in enumerate(values))
    text = OP_TOML.replace("axes.size", f"{axes}\naxes.size")
    with pytest.raises(ConfigError, match="at most 200"):
        open_library(write_library(tmp_path / "lib", {"demo/op.toml": text}))


# -- what lies in the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "huge"])
@pytest.mark.parametrize("name", ["demo/op.toml", "demo/answer_cpu.cpp", "demo/answer.h", "include/deep/scale.h"])
def test_what_is_planted_in_a_library_is_refused_and_never_waited_for(root: Path, name: str, kind: str) -> None:
    (root / name).unlink()
    if kind == "huge":
        with open(root / name, "wb") as file:
            file.truncate(1 << 40)
    else:
        {"pipe": os.mkfifo, "directory": os.mkdir, "device": lambda at: os.symlink("/dev/zero", at)}[kind](root / name)
    if kind == "directory" and name.endswith(".h"):  # passed over, as compilers do
        assert name not in paths_of(open_library(root).spec("answer", {"size": "small"}, CPU))
        return
    with pytest.raises(ConfigError, match=name):
        open_library(root).spec("answer", {"size": "small"}, CPU)


@pytest.mark.parametrize(
    "text", ["[[op]", "a = " + "[" * 100_000, 'schema = 1\nfamily = "more"\n[[op]]\nname = "x"', "\0"]
)
def test_a_mistake_in_one_declaration_stops_what_is_released_and_no_other_op(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_library(tmp_path / "lib", {"more/op.toml": text})
    with pytest.raises(ConfigError, match=r"more/op.toml"):
        open_library(root)
    libraries = discover([root])
    library = libraries.find("demo/answer")
    assert library.spec("answer", {"size": "small"}, CPU).uri == "demo/answer?size=small"
    assert "more/op.toml" in caplog.text
    for ask in (libraries.library_of, libraries.find, library.find):
        with pytest.raises(ConfigError, match=r"more/op.toml"):
            ask("more/x")
    with pytest.raises(ConfigError, match="no op 'x'") as caught:
        libraries.find("x")
    assert "more/op.toml" in str(caught.value)
    for wanted in ([], ["demo/answer"]):
        with pytest.raises(ConfigError, match=r"more/op.toml"):
            library.specs(wanted, [CPU])


_MORE = OP_TOML.replace('"demo"', '"more"')
_TEMPLATE = _MORE.replace('"answer_cpu.cpp"', '"bad.cpp.jinja"').replace('"answer.cu"', '"bad.cu.jinja"')


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"more/op.toml": _TEMPLATE, "more/bad.cpp.jinja": "\n{{ unknown }}"}, r"more/bad\.cpp\.jinja:2"),
        ({"more/op.toml": _TEMPLATE, "more/bad.cpp.jinja": "\n{{ size | dictsort }}"}, r"more/bad\.cpp\.jinja:2"),
        ({"more/op.toml": _TEMPLATE, "more/bad.cpp.jinja": "{% if %}"}, r"more/bad\.cpp\.jinja:1"),
        ({"more/op.toml": _TEMPLATE}, r"'more/bad\.cpp\.jinja' cannot be read"),
        ({"more/op.toml": _MORE}, r"'more/answer_\w+\.cpp', which cannot be read"),
        (
            {"more/op.toml": _MORE.replace("answer_cpu.cpp", "../../answer_cpu.cpp")},
            r"more/op\.toml.* outside the library",
        ),
    ],
)
def test_sources_of_one_op_that_are_wrong_stop_no_other_op_and_are_found_without_compiling(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    library = discover([write_library(tmp_path / "lib", files)]).find("demo/answer")
    assert library.spec("demo/answer", {"size": "small"}, CPU).uri == "demo/answer?size=small"
    specs, _ = library.specs(["demo/answer"], [CPU])
    assert len(specs) == 2
    with pytest.raises(ConfigError, match=message):
        library.spec("more/answer", {"size": "small"}, CPU)
    with pytest.raises(ConfigError, match=message):
        library.specs([], [CPU])
    assert re.search(message, "\n".join(error.message for error in library.faults()))
    assert discover([write_library(tmp_path / "good")]).find("demo/answer").faults() == []


# -- our headers -------------------------------------------------------------------------------------------------------


def test_another_library_finds_our_headers_and_they_are_part_of_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = '#include "kart/ffi.h"\n#include <kart/scalar.h>\n'
    root = write_library(tmp_path / "lib", {"demo/answer_binding.cpp": source})
    own = real_root()
    assert own is not None
    ours = shutil.copytree(own, tmp_path / "ours")
    monkeypatch.setattr(closure, "own_root", lambda: ours)

    def read() -> Spec:
        return open_library(root).spec("answer", {"size": "small"}, CPU)

    before = read()
    assert {f"<kartifacts>/include/kart/{name}.h" for name in ("ffi", "launch", "scalar")} < set(paths_of(before))
    header = ours / "include/kart/launch.h"
    header.write_text(header.read_text() + "// changed\n")
    assert read().op_digest != before.op_digest
    (root / "include/kart").mkdir()
    (root / "include/kart/launch.h").write_text("// its own goes first, also for our headers\n")
    assert "include/kart/launch.h" in paths_of(read())
    assert "<kartifacts>/include/kart/launch.h" not in paths_of(read())


# -- finding libraries -------------------------------------------------------------------------------------------------


def test_an_explicit_library_hides_the_same_op_of_an_installed_one(root: Path, tmp_path: Path) -> None:
    declaration = OP_TOML.replace('"demo"', '"norm"').replace('"answer"', '"rmsnorm"', 1)
    mine = write_library(tmp_path / "mine", {"demo/op.toml": declaration})
    libraries = discover([mine, root])
    assert libraries.find("norm/rmsnorm").root == mine
    assert libraries.find("demo/answer").root == root
    with pytest.raises(ConfigError, match="no op 'norm/nothing'"):
        libraries.find("norm/nothing")


def test_an_op_of_two_explicit_libraries_is_ambiguous(root: Path, tmp_path: Path) -> None:
    other = write_library(tmp_path / "otherlib")
    with pytest.raises(ConfigError, match=r"declared more than once.*demolib.*otherlib"):
        discover([root, other]).library_of("answer")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Installs a package that must not be imported, with an entry point for a library."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def install(name: str, value: str) -> Path:
        package = site / name
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        meta = site / f"{name}-1.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text(f"[kartifacts.libraries]\n{name} = {value}\n")
        return package

    return install


@pytest.mark.parametrize(("value", "folder"), [("kart_ext:ops.cuda", "ops/cuda"), ("kart_ext.ops", "ops")])
def test_a_library_of_an_installed_package_is_found_without_importing_it(
    install: Callable[[str, str], Path], value: str, folder: str
) -> None:
    package = install("kart_ext", value)
    write_library(package / folder)
    library = discover().find("demo/answer")
    assert (library.name, library.root, library.version) == ("kart_ext", package / folder, "1.0")


def test_a_broken_installed_library_hides_no_other_and_is_named_where_an_op_is_missing(
    install: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    install("kart_bad", "kart_bad:nowhere")
    good = install("kart_good", "kart_good:ops")
    write_library(good / "ops")
    libraries = discover()
    assert libraries.find("demo/answer").root == good / "ops"
    assert "kart_bad" in caplog.text
    with pytest.raises(ConfigError, match="no op 'demo/question'") as caught:
        libraries.find("demo/question")
    assert "kart_bad" in str(caught.value)


def test_every_op_of_our_own_library_can_be_read() -> None:
    own = next(library for library in discover() if library.name == "kartifacts")
    archs = parse_archs("8.0 9.0a 10.0f cpu:x86-64-v3")
    specs, skipped = own.specs([], archs)
    assert {spec.arch for spec in specs} == set(archs)
    assert not skipped
    assert len({spec.op_digest for spec in specs if spec.arch.kind == "cpu"}) == len(specs) // len(archs)
