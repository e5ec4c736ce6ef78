"""Triton: images for GPUs that this machine has not got, the same everywhere, and all that can change them in the key.

What only a GPU can show is in ci/gpu.
"""

from __future__ import annotations

import compileall
import ctypes
import os
import pwd
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import elf, images, toolchains
from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.build.sections import sections_of
from kartifacts.build.toolchains import packages, triton
from kartifacts.config import Settings
from kartifacts.errors import BuildError, CompilerKilled, ConfigError, LoadError, NoCompiler
from kartifacts.model.arch import parse_arch, parse_archs
from kartifacts.model.materials import cuda_of
from kartifacts.model.spec import Spec
from tests.conftest import Machine

from .pythons import DESCRIPTORS, TRITON, edit, found, write

MakeSettings = Callable[..., Settings]
ARCHS = "8.0 9.0a 10.0a gfx942 gfx1100"
AXES = {"dtype": "float16", "block": "128"}
pytestmark = pytest.mark.triton


@pytest.fixture
def compiler(settings: Settings) -> triton.Triton:
    made = found("triton", settings)
    assert isinstance(made, triton.Triton)
    return made


@pytest.fixture
def root(compiler: triton.Triton, tmp_path: Path) -> Path:
    return write(tmp_path / "pylib", TRITON)


def spec_of(root: Path, arch: str = "9.0a", **axes: str) -> Spec:
    return open_library(root).spec("scale", {**AXES, **axes}, parse_arch(arch))


def content(root: Path, settings: Settings, arch: str = "9.0a", **axes: str) -> bytes:
    [kernel] = compile_specs([spec_of(root, arch, **axes)], settings).kernels
    return kernel.path.read_bytes()


def image_in(kernel: bytes) -> bytes:
    attached = images.attached(kernel)
    assert attached is not None
    return attached[0]


def notes_in(kernel: bytes) -> dict[str, str]:
    attached = images.attached(kernel)
    return images.noted_in(kernel) if attached is None else attached[1]


# -- what is made ------------------------------------------------------------------------------------------------------


def test_every_specialisation_is_built_for_every_gpu_where_there_is_none(root: Path, settings: Settings) -> None:
    specs, skipped = open_library(root).specs(["scale"], parse_archs(ARCHS))
    assert (len(specs), skipped) == (5 * 4, [])
    for spec, kernel in zip(specs, compile_specs(specs, settings).kernels, strict=True):
        data = kernel.path.read_bytes()
        seen = elf.inspect_bytes(data, spec.uri)
        assert seen.archs == (spec.arch,)
        assert set(seen.functions) == {"scale"}
        notes, axes = notes_in(data), dict(spec.axes)
        dtype, hip = axes["dtype"], spec.arch.kind == "hip"
        warps = 2 if hip else 1 if axes["block"] == "128" else 8
        assert notes["entry"] == "scale"
        assert notes["arguments"] == f"x=*{dtype}:16 out=*{dtype}:16 n=int32 factor=float32"
        assert notes["threads"] == str(warps * (64 if spec.arch.name == "gfx942" else 32))
        assert int(notes["shared"]) == 0
        assert (kernel.path.suffix, seen.exports) == ((".hsaco", ()) if hip else (".so", ("scale",)))
        if not hip:  # the driver that this machine lacks has to be one for the assembler, of which there are two
            assert int(notes["toolkit"].split(".")[0]) >= 12
            assert seen.needs["driver"] == f"{notes['toolkit'].split('.')[0]}.0"


def test_two_kernels_are_one_launcher_with_another_image(root: Path, settings: Settings) -> None:
    specs = [spec_of(root, "9.0a", dtype=dtype) for dtype in ("float16", "float32")]
    build = compile_specs(specs, settings)
    assert build.report["compiled"] == 2 + 1
    one, other = (kernel.path.read_bytes() for kernel in build.kernels)
    assert image_in(one) != image_in(other)
    stripped = [data[: data.index(image_in(data))][64:] for data in (one, other)]  # but for the header of the file
    assert stripped[0] == stripped[1]


def test_the_bytes_are_the_same_in_another_directory_workspace_home_and_environment(
    root: Path, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "some where else/of another depth/pylib", TRITON)
    for arch in ("9.0a", "gfx942"):
        first = content(root, make_settings(), arch)
        for name, value in (
            ("TRITON_CACHE_DIR", str(tmp_path / "cache")),
            ("TRITON_HOME", str(tmp_path)),
            ("TRITON_DISABLE_LINE_INFO", "0"),
            ("TRITON_DEFAULT_FP_FUSION", "0"),
            ("TRITON_F32_DEFAULT", "ieee"),
            ("TRITON_KERNEL_DUMP", "1"),
            ("TRITON_PTXAS_PATH", "/nonexistent/ptxas"),
            ("TRITON_INTERPRET", "1"),
            ("DISABLE_PTXAS_OPT", "1"),
            ("PYTHONHASHSEED", "7"),
            ("PYTHONPATH", str(tmp_path)),
        ):
            monkeypatch.setenv(name, value)
        elsewhere = make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / "workspace, another"), HOME=str(tmp_path / "h"))
        second = content(other, elsewhere, arch)
        assert first == second
        for place in (tmp_path, Path(sys.prefix), Path.home()):
            assert os.fsencode(place) not in first
        monkeypatch.undo()


@pytest.mark.parametrize("setting", ["KARTIFACTS_LINEINFO", "KARTIFACTS_DEBUG"])
def test_line_numbers_are_there_for_who_asks_under_another_key(
    root: Path, settings: Settings, make_settings: MakeSettings, setting: str
) -> None:
    plain = content(root, settings)
    told = make_settings(**{setting: "1"})
    lined = content(root, told)
    assert b"scale.py" in image_in(lined)
    assert b"scale.py" not in plain
    names = [[section.name for section in sections_of(memoryview(image_in(each)))] for each in (plain, lined)]
    assert [".debug_line" in each for each in names] == [False, True]
    spec = spec_of(root)
    keys = {spec.key(found("triton", each).made_with(spec)) for each in (settings, told)}
    assert len(keys) == 2
    assert content(root, settings) == plain


def test_an_argument_that_is_known_to_be_a_multiple_of_16_makes_other_code(root: Path, settings: Settings) -> None:
    """Else a kernel would be as slow as if nothing were known; one that wrongly believes it reads what it must not."""
    first, key = content(root, settings), spec_of(root).op_digest
    text = (root / "demo/op.toml").read_text()
    seen = {image_in(first)}
    for arguments in ('x = "*dtype"', 'n = "int32:16"', 'n = "int64"'):
        name = arguments.split(" ")[0]
        usual = {"x": 'x = "*dtype:16"', "n": 'n = "int32"'}[name]
        (root / "demo/op.toml").write_text(text.replace(usual, arguments))
        made = content(root, settings)
        assert f"{name}={arguments.split(chr(34))[1].replace('dtype', 'float16')}" in notes_in(made)["arguments"]
        assert spec_of(root).op_digest != key
        seen.add(image_in(made))
    assert len(seen) == 4


def test_a_constant_is_compiled_in_and_is_no_argument(root: Path, settings: Settings) -> None:
    first = content(root, settings)
    text = (root / "demo/op.toml").read_text()
    (root / "demo/op.toml").write_text(text.replace("EVEN = false", "EVEN = true"))
    second = content(root, settings)
    assert notes_in(first)["arguments"] == notes_in(second)["arguments"]
    assert image_in(first) != image_in(second)
    assert len(image_in(second)) < len(image_in(first))  # no comparison is left


def test_what_a_kernel_wants_beside_its_arguments_is_noted_and_what_has_a_default_need_not_be_told(
    compiler: triton.Triton, tmp_path: Path, settings: Settings
) -> None:
    """Whoever launches it has to give memory for the descriptors, which Triton's own launcher would take."""
    library = open_library(write(tmp_path / "pylib", DESCRIPTORS))
    specs = [library.spec("twice", {}, parse_arch(arch)) for arch in ("8.0", "9.0a")]
    plain, wanting = (notes_in(kernel.path.read_bytes()) for kernel in compile_specs(specs, settings).kernels)
    assert plain["arguments"] == wanting["arguments"] == "x=*float16:16 out=*float16:16 rows=int32"
    assert "scratch" not in plain
    assert int(wanting["scratch"]) >= 2 * 128
    assert int(wanting["scratch.align"]) <= 256  # as all memory of the driver is aligned
    assert int(wanting["shared"]) >= 64 * 64 * 2


def test_a_source_may_be_a_template(root: Path, settings: Settings) -> None:
    text = (root / "demo/scale.py").read_text()
    (root / "demo/scale.py").rename(root / "demo/scale.py.jinja")
    edit(root, "demo/scale.py.jinja", "tl.constexpr(2)", "tl.constexpr({{ 2 if dtype == 'float16' else 3 }})")
    (root / "demo/op.toml").write_text((root / "demo/op.toml").read_text().replace('"scale.py"', '"scale.py.jinja"'))
    made = {dtype: image_in(content(root, settings, dtype=dtype)) for dtype in ("float16", "float32")}
    plain = write(root.parent / "plain", TRITON)
    assert text == (plain / "demo/scale.py").read_text()
    assert made["float16"] == image_in(content(plain, settings))
    assert made["float32"] != image_in(content(plain, settings, dtype="float32"))


def test_an_image_for_amd_is_launched_by_nobody_and_says_so(root: Path, settings: Settings, tmp_path: Path) -> None:
    from kartifacts.runtime.driver import Image

    path = tmp_path / "kernel.hsaco"
    path.write_bytes(content(root, settings, "gfx942"))
    with pytest.raises(LoadError, match=r"launched by NVIDIA's driver only, and this is a \.hsaco for other GPUs"):
        Image(path, "demo/scale")


def test_a_loaded_kernel_refuses_what_it_cannot_launch(root: Path, machine: Machine, gpus: Callable[..., None]) -> None:
    """Which needs no GPU: whatever is wrong is found before the driver is asked."""
    import numpy as np

    gpus("9.0")
    kernel = machine.registry(libraries=[root]).load("demo/scale", device="cuda", **AXES)
    assert (kernel.arch, kernel.exports) == (parse_arch("9.0a"), ("scale",))
    x: Any = np.zeros(64, np.float16)
    for arguments, said in (
        ((1, 1, 1, x, x, 64, 2.0), "this kernel runs on cuda, but x is on cpu"),
        ((1, 1, 1, x.astype(np.float32), x, 64, 2.0), "x must be float16, got float32"),
        ((1, 1, 1, 64, x, 64, 2.0), "x must be a tensor"),
        ((x, x, 64, 2.0), "takes 7 arguments, the blocks in x, y and z and 4 of its kernel, got 4"),
        ((-1, 1, 1, x, x, 64, 2.0), "the number of blocks in x is -1"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            kernel.scale(*arguments)


def test_a_device_gets_the_arch_that_triton_knows_it_by(
    root: Path, machine: Machine, gpus: Callable[..., None]
) -> None:
    """Others compile for the family, 12.0f; Triton always for the exact device."""
    gpus("12.0")
    kernel = machine.registry(libraries=[root]).load("demo/scale", device="cuda", **AXES)
    assert str(kernel.arch) == "12.0a"


# -- what the key is made of -------------------------------------------------------------------------------------------


def test_whatever_can_change_the_bytes_changes_the_key(root: Path, compiler: triton.Triton) -> None:
    def key(made: triton.Triton = compiler) -> str:
        return spec_of(root).key(made.made_with(spec_of(root)))

    def other(**package: Any) -> triton.Triton:
        return replace(compiler, package=replace(compiler.package, **package))

    seen = [key(), key(other(version="99.0")), key(other(digest="0" * 64))]
    seen.append(key(replace(compiler, facts={**compiler.facts, "ptxas": "12.0.1"})))
    for name in ("demo/scale.py", "demo/shift.py", "include/shared/bias.py", "include/shared/__init__.py"):
        with (root / name).open("a") as file:
            file.write("# changed\n")
        seen.append(key())
    edit(root, "demo/op.toml", "num_warps = { block = { 128 = 1, 1024 = 8 } }", "num_warps = 4")
    seen.append(key())
    assert len(set(seen)) == len(seen)
    last = key()
    with (root / "include/shared/unused.py").open("a") as file:
        file.write("# changed\n")
    assert key() == last
    assert key(replace(compiler, package=replace(compiler.package, site=Path("/elsewhere")))) == last


def test_a_package_that_a_kernel_imports_is_in_the_key_with_its_version(
    root: Path, compiler: triton.Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(root, "demo/shift.py", "import triton\n", "import numpy\nimport triton\n")
    spec = spec_of(root)
    facts = compiler.made_with(spec)
    assert facts["imports"].startswith("numpy ")
    monkeypatch.setattr(packages, "_providers", lambda: {"numpy": ["numpy 99.0"]})
    assert compiler.made_with(spec) == {**facts, "imports": "numpy 99.0"}


def test_the_knob_that_decides_how_floats_are_fused_is_set_and_in_the_key(
    root: Path, settings: Settings, compiler: triton.Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default changes with a release of Triton, which must not change what a kernel computes unseen."""
    first, facts = content(root, settings), compiler.made_with(spec_of(root))
    assert facts["set"] == "TRITON_DEFAULT_FP_FUSION=1"
    monkeypatch.setattr(triton, "_SET", ("TRITON_DEFAULT_FP_FUSION=0",))
    again = found("triton", settings)
    assert again.made_with(spec_of(root)) == {**facts, "set": "TRITON_DEFAULT_FP_FUSION=0"}
    assert image_in(content(root, settings)) != image_in(first)


def test_the_key_says_of_which_cuda_the_code_for_a_gpu_is_as_the_kernel_does(
    root: Path, settings: Settings, compiler: triton.Triton
) -> None:
    """Triton brings two assemblers, and another one decides for a GPU from release to release of it."""
    specs, _ = open_library(root).specs(["scale"], parse_archs("8.0 8.9 9.0a 10.0a 12.0a"))
    specs = [spec for spec in specs if dict(spec.axes) == AXES]
    kernels = compile_specs(specs, settings).kernels
    noted = [notes_in(kernel.path.read_bytes())["toolkit"] for kernel in kernels]
    assert [cuda_of(compiler.made_with(spec)) for spec in specs] == noted
    assert set(noted) <= set(compiler.releases.values())
    assert "cuda" not in compiler.made_with(spec_of(root, "gfx942"))


def test_an_edit_of_a_module_builds_what_imports_it_and_nothing_else(root: Path, settings: Settings) -> None:
    source = TRITON["demo/scale.py"].replace("from shared.bias import BIAS", "BIAS = tl.constexpr(1.0)")
    (root / "demo/other.py").write_text(source)
    declared = (root / "demo/op.toml").read_text()
    copy = declared[declared.index("[[op]]") :].replace('name = "scale"', 'name = "other"')
    (root / "demo/op.toml").write_text(declared + copy.replace('"scale.py"', '"other.py"'))
    archs = parse_archs("8.0")

    def built() -> list[str]:
        specs, _ = open_library(root).specs([], archs)
        report = compile_specs(specs, settings).report
        return sorted({step["op"].partition("?")[0] for step in report["steps"] if "compiling" in step["title"]})

    assert built() == ["demo/other", "demo/scale"]
    os.utime(root / "include/shared/bias.py", (1, 1))
    assert built() == []
    edit(root, "include/shared/bias.py", "0.5", "0.25")
    assert built() == ["demo/scale"]
    edit(root, "demo/shift.py", "+ bias", "- bias")
    assert built() == ["demo/other", "demo/scale"]


# -- what is read and written ------------------------------------------------------------------------------------------


def test_nothing_is_read_or_written_where_triton_keeps_its_own(
    root: Path, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache there may be another user's, or hold a kernel of another Triton under the same name."""
    home = tmp_path / "home of a user"
    kept = home / ".triton/cache"
    kept.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in ("TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, str(kept))
    real = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".triton"  # where it would be taken for without HOME
    before = real.exists()
    watched = Watched(home, home / ".triton", kept)
    content(root, settings)
    assert watched.seen() == []
    (kept / "x").touch()
    assert watched.seen() != []  # or it would see nothing else either
    assert real.exists() == before


class Watched:
    """Directories in which whatever is opened, made or removed is told."""

    _EVENTS = 0x20 | 0x100 | 0x200 | 0x2 | 0x1  # open, create, delete, modify, access

    def __init__(self, *places: Path) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._watch = self._c.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._watch >= 0
        for place in places:
            assert self._c.inotify_add_watch(self._watch, os.fsencode(place), self._EVENTS) >= 0

    def seen(self) -> list[str]:
        try:
            data = os.read(self._watch, 1 << 16)
        except BlockingIOError:
            return []
        names = []
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            names.append(f"{mask:#x} {data[16 : 16 + length].rstrip(bytes(1)).decode()}")
            data = data[16 + length :]
        return names


def test_triton_is_imported_by_a_worker_and_never_by_who_builds(root: Path, machine: Machine) -> None:
    """It takes a third of a second and half a gigabyte, and imports torch where there is one."""
    code = (
        "import sys\nfrom kartifacts import config\nfrom kartifacts.build.compile import compile_specs\n"
        "from kartifacts.build.library import open_library\nfrom kartifacts.model.arch import parse_arch\n"
        "from pathlib import Path\n"
        f"spec = open_library(Path({str(root)!r})).spec('scale', {AXES!r}, parse_arch('9.0a'))\n"
        "compile_specs([spec], config.read())\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'triton', 'torch', 'cutlass'}))\n"
    )
    answer = machine.python(code)
    assert (answer.code, answer.out) == (0, "[]\n"), answer.err


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "reason", "hint"),
    [
        ("7.0", "it knows no such GPU", "known are 7.5, 8.0, 8.6"),
        ("9.0", "for 9.0 it always makes code for sm_90a", "ask for 9.0a"),
        ("10.0f", "for 10.0 it always makes code for sm_100a", "ask for 10.0a"),
        ("8.0+PTX", "holds binary code for one arch, and no PTX", "ask for 8.0"),
        ("gfx1030", "it knows no such GPU", "gfx1100"),
        ("gfx942:xnack+", "it leaves target features at what they are by default", "ask for gfx942"),
    ],
)
def test_an_arch_that_triton_makes_nothing_for_is_refused_with_the_rule(
    root: Path, settings: Settings, arch: str, reason: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_specs([spec_of(root, arch)], settings)
    assert f"demo/scale?block=128&dtype=float16 for {parse_arch(arch)} cannot be built by Triton" in str(caught.value)
    assert reason in str(caught.value)
    assert hint in str(caught.value.hint)


WRONG = {
    "no such function": (
        {"demo__scale": "def other():\n    pass\n"},
        "demo/scale.py:1: error: it has no function 'scale'",
    ),
    "no kernel": (
        {"demo__scale": "def scale(x, out, n, factor, BLOCK, EVEN):\n    pass\n"},
        "demo/scale.py:1: error: 'scale' is a function, not a @triton.jit function",
    ),
    "autotuned": (
        {
            "demo__scale": "import triton\n\n\n@triton.autotune([triton.Config({'BLOCK': 64})], key=['n'])\n"
            "@triton.jit\ndef scale(x, out, n, factor, BLOCK, EVEN):\n    pass\n"
        },
        "'scale' is a Autotuner, not a @triton.jit function; name the function below @triton.autotune",
    ),
    "other parameters": (
        {"demo__scale": "import triton\n\n\n@triton.jit\ndef scale(x, out, m, factor, BLOCK, EVEN):\n    pass\n"},
        "scale takes x, out, m, factor, BLOCK, EVEN; op.toml says nothing of m; op.toml names n",
    ),
    "no Python": ({"demo__scale": "import triton\ndef scale(:\n"}, "demo/scale.py:2: error: SyntaxError"),
    "a package that is not there": (
        {"demo__shift": "import no_such_package\n"},
        "demo/shift.py:1: error: ModuleNotFoundError: No module named 'no_such_package'",
    ),
    "a mistake in a function of another file": (
        {"demo__shift": "import triton\n\n\n@triton.jit\ndef shifted(value, factor, bias):\n    return nothing\n"},
        "demo/shift.py:6: error: NameError('nothing is not defined')",
    ),
    "it ends the process": ({"demo__scale": "import os\nos._exit(0)\n"}, "made no file"),
    "it is killed": ({"demo__scale": "import os\nos.abort()\n"}, "the compiler crashed (SIGABRT)"),
    "it raises what is no Exception": (
        {"demo__scale": "raise SystemExit(0)\n"},
        "demo/scale.py:1: error: SystemExit: 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_is_an_error_with_the_line_it_is_in(
    case: str, tmp_path: Path, settings: Settings, compiler: triton.Triton
) -> None:
    files, said = WRONG[case]
    with pytest.raises(BuildError) as caught:
        content(write(tmp_path / "pylib", TRITON, **files), settings)
    assert said in str(caught.value)
    assert content(write(tmp_path / "sound", TRITON), settings)


def test_a_compiler_that_is_killed_is_told_apart_from_a_mistake(
    tmp_path: Path, settings: Settings, compiler: triton.Triton
) -> None:
    killed = {"demo__scale": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"}
    with pytest.raises(CompilerKilled, match=r"exit status 137.*most often for want of memory"):
        content(write(tmp_path / "pylib", TRITON, **killed), settings)


def test_a_module_that_the_key_does_not_know_of_is_refused(root: Path, settings: Settings) -> None:
    """What is imported by a name that is made up at run time is in no text that could be read beforehand."""
    edit(root, "demo/scale.py", "from shift import shifted", "shifted = __import__('sh' + 'ift').shifted")
    with pytest.raises(BuildError) as caught:
        content(root, settings)
    assert "read 'demo/shift.py', which the op's identity does not cover" in str(caught.value)
    assert caught.value.hint is not None
    assert "import it where its name can be read: import shift" in caught.value.hint


def test_a_data_file_that_the_key_does_not_know_of_is_refused(root: Path, settings: Settings) -> None:
    """Also the second time."""
    (root / "include/shared/width.txt").write_text("2")
    reading = "tl.constexpr(int(open('include/shared/width.txt').read()))"
    edit(root, "demo/scale.py", "tl.constexpr(2)", reading)
    for _ in range(2):
        with pytest.raises(BuildError) as caught:
            content(root, settings)
        assert "read 'include/shared/width.txt', which the op's identity does not cover" in str(caught.value)
        assert caught.value.hint is not None
        assert "write what it says into a module in Python, and import that" in caught.value.hint


def test_no_bytecode_of_a_library_is_compiled(root: Path, settings: Settings) -> None:
    """Which can be of another text than its file has, of the same size and time."""
    bias = root / "include/shared/bias.py"
    compileall.compile_dir(root, quiet=1)
    stale = bias.stat()
    edit(root, "include/shared/bias.py", "0.5", "0.7")
    os.utime(bias, ns=(stale.st_atime_ns, stale.st_mtime_ns))
    fresh = write(root.parent / "fresh", TRITON)
    edit(fresh, "include/shared/bias.py", "0.5", "0.7")
    assert image_in(content(root, settings)) == image_in(content(fresh, settings))


def test_a_file_outside_of_the_library_is_remembered(root: Path, settings: Settings, tmp_path: Path) -> None:
    """It is in no key, and yet the kernel is built again when it changes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "aside.py").write_text("ASIDE = 1.0\n")
    edit(root, "demo/scale.py", "WIDTH = tl.constexpr(2)", f"import sys\nsys.path.insert(0, {str(elsewhere)!r})\n"
         "import aside\nWIDTH = tl.constexpr(aside.ASIDE)")  # fmt: skip
    first = image_in(content(root, settings))
    assert image_in(content(root, settings)) == first
    (elsewhere / "aside.py").write_text("ASIDE = 3.0\n")
    assert image_in(content(root, settings)) != first


def test_without_the_package_the_error_says_how_to_get_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    def lacking(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", lacking)
    with pytest.raises(NoCompiler) as caught:
        toolchains.find("triton", settings)
    assert "the Python package 'triton' was not found" in str(caught.value)
    assert f"triton is not installed for {sys.executable}" in str(caught.value)
    assert caught.value.hint == "pip install 'kartifacts[triton]'"
