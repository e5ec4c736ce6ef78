"""CuTe DSL: kernels that launch themselves without its runtime library, and the directory that holds their objects.

What only a GPU can show is in ci/gpu.
"""

from __future__ import annotations

import compileall
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import elf, toolchains
from kartifacts.build.compile import Build, compile_specs
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import cutedsl, nvcc, packages
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, NoCompiler
from kartifacts.model.arch import parse_arch, parse_archs
from kartifacts.model.materials import cuda_of
from kartifacts.model.spec import Spec
from tests.conftest import Machine
from tests.ops.test_any_launcher import GIVEN

from .pythons import CUTEDSL, edit, found, write

MakeSettings = Callable[..., Settings]
ARCHS = "8.0 9.0a 10.0f"
pytestmark = pytest.mark.cutedsl


@pytest.fixture
def compiler(settings: Settings) -> cutedsl.CuteDsl:
    made = found("cutedsl", settings)
    assert isinstance(made, cutedsl.CuteDsl)
    return made


@pytest.fixture
def root(compiler: cutedsl.CuteDsl, tmp_path: Path) -> Path:
    return write(tmp_path / "pylib", CUTEDSL)


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this process believe that another version of the compiler's package is installed."""
    real = packages.find

    def pretend(version: str) -> None:
        monkeypatch.setattr(packages, "find", lambda *args: replace(real(*args), version=version))

    return pretend


def spec_of(root: Path, arch: str = "9.0a", dtype: str = "float16") -> Spec:
    return open_library(root).spec("scale", {"dtype": dtype}, parse_arch(arch))


def build(root: Path, settings: Settings, arch: str = "9.0a", *dtypes: str) -> Build:
    return compile_specs([spec_of(root, arch, dtype) for dtype in dtypes or ("float16",)], settings)


def content(root: Path, settings: Settings, arch: str = "9.0a", dtype: str = "float16") -> bytes:
    return build(root, settings, arch, dtype).kernels[0].path.read_bytes()


# -- what is made ------------------------------------------------------------------------------------------------------


def test_every_specialisation_is_built_for_every_gpu_where_there_is_none(
    root: Path, settings: Settings, compiler: cutedsl.CuteDsl
) -> None:
    specs, skipped = open_library(root).specs(["scale"], parse_archs(ARCHS))
    assert (len(specs), skipped) == (3 * 2, [])
    seen = set()
    for spec, kernel in zip(specs, compile_specs(specs, settings).kernels, strict=True):
        data = kernel.path.read_bytes()
        made = elf.inspect_bytes(data, spec.uri)
        assert (kernel.path.suffix, made.archs, made.exports) == (".so", (spec.arch,), ("scale",))
        assert len(made.functions) == 1
        assert cuda_of(compiler.made_with(spec)) == compiler.runtime.release
        assert made.needs["driver"] == f"{compiler.runtime.release.split('.')[0]}.0"
        seen.add(data)
    assert len(seen) == len(specs)


def test_a_kernel_needs_neither_the_package_nor_its_runtime_library(
    root: Path, machine: Machine, tmp_path: Path
) -> None:
    """That library has 43 MB, and whoever loads a kernel that needs it has to load it first, for everybody to see."""
    made = build(root, machine.settings()).kernels[0].path
    needed = elf.inspect(made).needed
    assert not [name for name in needed if "cute" in name or "cudart" in name]
    assert made.stat().st_size < 2 << 20
    code = (
        "import sys\nsys.modules['cutlass'] = sys.modules['nvidia_cutlass_dsl'] = None\n"
        "import numpy as np, tvm_ffi\n"
        f"scale = tvm_ffi.load_module({str(made)!r}).get_function('scale')\n"
        "x = np.zeros(4, np.float16)\n"
        "for given in ((x, x, 1.0), (x, x.astype(np.float32), 1.0), (x[0], x, 1.0), (x, x)):\n"
        "    try:\n        scale(*given)\n"
        "    except Exception as error:\n        print(type(error).__name__, str(error).splitlines()[0])\n"
        "print([line for line in open('/proc/self/maps') if 'cute_dsl' in line or 'cutlass' in line])\n"
    )
    answer = machine.python(code)
    assert answer.code == 0, answer.err
    *errors, mapped = answer.out.splitlines()
    assert mapped == "[]"
    assert len(errors) == 4
    assert "device" in errors[0]
    assert "out" in errors[1]
    assert errors[3].startswith("TypeError")


def test_the_bytes_are_the_same_in_another_directory_workspace_home_and_environment(
    root: Path, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content(root, make_settings())
    other = write(tmp_path / "some where else/of another depth/pylib", CUTEDSL)
    for name, value in (
        ("CUTE_DSL_ARCH", "sm_80"),
        ("CUTE_DSL_CACHE_DIR", str(tmp_path / "cache")),
        ("CUTE_DSL_DUMP_DIR", str(tmp_path / "dump")),
        ("CUTE_DSL_KEEP_PTX", "1"),
        ("CUTE_DSL_LINEINFO", "1"),
        ("PYTHONHASHSEED", "7"),
        ("PYTHONPATH", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    elsewhere = make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / "workspace, another"), HOME=str(tmp_path / "h"))
    assert content(other, elsewhere) == first
    for place in (tmp_path, Path(sys.prefix), Path.home()):
        assert os.fsencode(place) not in first
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("setting", ["KARTIFACTS_LINEINFO", "KARTIFACTS_DEBUG"])
def test_line_numbers_are_there_for_who_asks_under_another_key(
    root: Path, settings: Settings, make_settings: MakeSettings, setting: str
) -> None:
    told = make_settings(**{setting: "1"})
    plain, lined = content(root, settings), content(root, told)
    assert b"scale.py" in lined
    assert b"scale.py" not in plain
    spec = spec_of(root)
    assert len({spec.key(found("cutedsl", each).made_with(spec)) for each in (settings, told)}) == 2
    assert content(root, settings) == plain


def test_a_tensor_of_known_shape_strides_and_alignment_makes_other_code(root: Path, settings: Settings) -> None:
    declared = (root / "demo/op.toml").read_text()
    seen = {content(root, settings)}
    for tensor in ("dtype(4096)", "dtype(n:8):16", "dtype(n; 1):16"):
        (root / "demo/op.toml").write_text(declared.replace("dtype(n)", tensor))
        seen.add(content(root, settings))
    assert len(seen) == 4


def test_a_wrong_call_is_refused_before_anything_is_launched(root: Path, machine: Machine) -> None:
    """By the kernel itself, which names the argument.  A sound call gets as far as the driver, which is not here."""
    made = build(root, machine.settings()).kernels[0].path
    calls = {
        "half(), single(), 1.5": "ValueError Mismatched Tensor on argument #1 .* expected dtype=float16",
        "half(), half(size=63), 1.5": r"ValueError Mismatched out\.shape\[0\] .* expected to match x\.shape\[0\]",
        "half(stride=2), half(), 1.5": r"ValueError Mismatched x\.strides\[0\] .* expected to be 1",
        "half(address=0x1001), half(), 1.5": "ValueError Misaligned Tensor data on argument #0 .* alignment=2 bytes",
        "half(device=1), half(), 1.5": r"ValueError Mismatched device index .* expected to match x\.device\.index",
        "half(), half(), 'a'": "TypeError Mismatched type on argument #2 .* expected float",
        "half(), half(), 1.5": "RuntimeError Got Cuda Runtime Error: ",
        "half(address=0x1002), half(), 1": "RuntimeError Got Cuda Runtime Error: ",
    }
    code = GIVEN + f"scale = tvm_ffi.load_module({str(made)!r}).get_function('scale')\n"
    for call in calls:
        code += f"try:\n    scale({call})\nexcept Exception as error:\n"
        code += "    print(type(error).__name__, str(error).splitlines()[0])\n"
    answer = machine.python(code, CUDA_VISIBLE_DEVICES="")
    assert answer.code == 0, answer.err
    for said, expected in zip(answer.out.splitlines(), calls.values(), strict=True):
        assert re.match(expected, said), said


# -- for which GPU -----------------------------------------------------------------------------------------------------

_ASKS = "import cutlass\nimport cutlass.cute as cute\nfrom cutlass.cutlass_dsl import CuTeDSL\n"


def test_a_kernel_that_asks_for_its_arch_is_told_the_target(root: Path, settings: Settings) -> None:
    """Kernels of CUTLASS choose their instructions so; without it they would be told of this machine's GPU, or none."""
    edit(root, "demo/scale.py", "import cutlass\nimport cutlass.cute as cute\n", _ASKS)
    edit(
        root,
        "demo/scale.py",
        "    blocks = ",
        "    WIDTH = 1 if CuTeDSL._get_dsl().envar.arch == 'sm_80' else 2\n    blocks = ",
    )
    edit(root, "demo/scale.py", "cute.ceil_div(cute.size(x), THREADS)", "cute.ceil_div(cute.size(x), THREADS) * WIDTH")
    plain = write(root.parent / "plain", CUTEDSL)
    doubled = write(root.parent / "doubled", CUTEDSL)
    edit(doubled, "demo/scale.py", "cute.ceil_div(cute.size(x), THREADS)", "cute.ceil_div(cute.size(x), THREADS) * 2")
    assert content(root, settings, "8.0") == content(plain, settings, "8.0")
    assert content(root, settings, "9.0a") == content(doubled, settings, "9.0a")


@pytest.mark.parametrize(("device", "arch"), [("9.0", "9.0a"), ("12.0", "12.0f"), ("8.9", "8.9")])
def test_without_a_target_it_is_compiled_for_the_active_device(
    root: Path, machine: Machine, gpus: Callable[..., None], device: str, arch: str
) -> None:
    gpus(device)
    kernel = machine.registry(libraries=[root]).load("demo/scale", device="cuda", dtype="float16")
    assert (str(kernel.arch), kernel.origin) == (arch, "jit")
    assert elf.inspect(kernel.path).archs == (parse_arch(arch),)


# -- the directory of a module -----------------------------------------------------------------------------------------


def place_of(root: Path, settings: Settings, arch: str = "9.0a") -> Path:
    return settings.workspace / f"modules/pylib.demo.scale.{parse_arch(arch).slug}"


def forget_all_but_modules(settings: Settings) -> None:
    """As if nothing but the directories of modules had been kept: what a cleaned workspace is, or another key."""
    for name in ("objects", "kernels"):
        (settings.workspace / name).rename(settings.workspace / f"{name}.{len(list(settings.workspace.iterdir()))}")


def stamps(place: Path) -> dict[str, tuple[int, int]]:
    """What is another one for each file that was written, be it the same."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in place.iterdir()}


def test_a_module_is_a_directory_with_metadata_and_an_object_for_each_specialisation(
    root: Path, settings: Settings, compiler: cutedsl.CuteDsl
) -> None:
    build(root, settings, "9.0a", "float16", "float32")
    build(root, settings, "8.0")
    place = place_of(root, settings)
    assert {path.name for path in place.iterdir()} == {"meta.json", "dtype=float16.o", "dtype=float32.o"}
    assert {path.name for path in place_of(root, settings, "8.0").iterdir()} == {"meta.json", "dtype=float16.o"}
    meta = json.loads((place / "meta.json").read_text())
    assert meta["made_of"]["arch"] == "9.0a"
    assert meta["made_of"]["compiler"]["version"] == compiler.package.version
    assert set(meta["made_of"]["sources"]) >= {"demo/scale.py", "include/bias.py"}
    assert sorted(meta["entries"]["dtype=float16"]["read"]) == ["demo/scale.py", "include/bias.py"]
    assert (place / "dtype=float16.o").read_bytes()[:4] == b"\x7fELF"


def test_an_object_of_a_module_is_taken_and_not_made_again(root: Path, settings: Settings) -> None:
    first = build(root, settings)
    before = stamps(place_of(root, settings))
    forget_all_but_modules(settings)
    second = build(root, settings)
    assert second.report["kernels_reused"] == 0
    assert stamps(place_of(root, settings)) == before
    [step] = [step for step in second.report["steps"] if step["title"].startswith("compiling demo/scale.py")]
    [made] = [step for step in first.report["steps"] if step["title"].startswith("compiling demo/scale.py")]
    assert step["cpu_seconds"] < made["cpu_seconds"] / 4  # the compiler is not even imported
    assert first.kernels[0].sha256 == second.kernels[0].sha256


@pytest.mark.parametrize("change", ["compiler", "source", "imported module"])
def test_a_module_is_begun_anew_when_the_compiler_or_a_source_changes(
    root: Path, settings: Settings, other_version: Callable[[str], None], change: str
) -> None:
    build(root, settings, "9.0a", "float16", "float32")
    place = place_of(root, settings)
    before = stamps(place)
    if change == "compiler":
        other_version("99.0")
    elif change == "source":
        edit(root, "demo/scale.py", "* factor", "/ factor")
    else:
        edit(root, "include/bias.py", "0.5", "0.25")
    report = build(root, settings).report
    assert report["kernels_reused"] == 0
    after = stamps(place)
    assert set(after) == {"meta.json", "dtype=float16.o"}  # the other one is of what is no more
    assert after["dtype=float16.o"] != before["dtype=float16.o"]
    made_of = json.loads((place / "meta.json").read_text())["made_of"]
    assert (made_of["compiler"]["version"] == "99.0") == (change == "compiler")


def test_what_does_not_belong_to_the_sources_leaves_a_module_alone(root: Path, settings: Settings) -> None:
    build(root, settings)
    before = stamps(place_of(root, settings))
    edit(root, "include/unused.py", "1", "2")
    os.utime(root / "demo/scale.py", (1, 1))
    assert build(root, settings).report["kernels_reused"] == 1
    assert stamps(place_of(root, settings)) == before


@pytest.mark.parametrize("damage", ["object", "cut", "no object", "metadata", "no metadata", "another digest"])
def test_a_damaged_module_is_nobodys_fault_and_made_again(root: Path, settings: Settings, damage: str) -> None:
    first = content(root, settings)
    place = place_of(root, settings)
    made, meta = place / "dtype=float16.o", place / "meta.json"
    data = made.read_bytes()
    for path in (made, meta):
        path.chmod(0o644)
    if damage == "object":
        made.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    elif damage == "cut":
        made.write_bytes(data[:2000])
    elif damage == "no object":
        made.unlink()
    elif damage == "metadata":
        meta.write_text('{"entries": [')
    elif damage == "no metadata":
        meta.unlink()
    else:
        meta.write_text(meta.read_text().replace('"sha256": "', '"sha256": "0'))
    forget_all_but_modules(settings)
    assert content(root, settings) == first
    assert made.read_bytes() == data


# -- what the key is made of -------------------------------------------------------------------------------------------


def test_whatever_can_change_the_bytes_changes_the_key(
    root: Path, settings: Settings, compiler: cutedsl.CuteDsl
) -> None:
    def key(made: cutedsl.CuteDsl = compiler) -> str:
        return spec_of(root).key(made.made_with(spec_of(root)))

    def other(**package: Any) -> cutedsl.CuteDsl:
        return replace(compiler, package=replace(compiler.package, **package))

    seen = [key(), key(other(version="99.0")), key(other(digest="0" * 64))]
    seen.append(key(replace(compiler, runtime=replace(compiler.runtime, version="12080"))))
    seen.append(key(replace(compiler, host=replace(compiler.host, facts={"version": "gcc 99"}))))
    for name in ("demo/scale.py", "include/bias.py"):
        with (root / name).open("a") as file:
            file.write("# changed\n")
        seen.append(key())
    edit(root, "demo/op.toml", "THREADS = 128", "THREADS = 64")
    seen.append(key())
    assert len(set(seen)) == len(seen)
    last = key()
    edit(root, "include/unused.py", "1", "2")
    assert key() == last
    assert key(replace(compiler, package=replace(compiler.package, site=Path("/elsewhere")))) == last


def test_cutedsl_is_imported_by_a_worker_and_never_by_who_builds(root: Path, machine: Machine) -> None:
    code = (
        "import sys\nfrom kartifacts import config\nfrom kartifacts.build.compile import compile_specs\n"
        "from kartifacts.build.library import open_library\nfrom kartifacts.model.arch import parse_arch\n"
        "from pathlib import Path\n"
        f"spec = open_library(Path({str(root)!r})).spec('scale', {{'dtype': 'float16'}}, parse_arch('9.0a'))\n"
        "compile_specs([spec], config.read())\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'triton', 'torch', 'cutlass'}))\n"
    )
    answer = machine.python(code)
    assert (answer.code, answer.out) == (0, "[]\n"), answer.err


def test_a_data_file_that_the_key_does_not_know_of_is_refused(root: Path, settings: Settings) -> None:
    """Also the second time, when what the compiler made of it is kept in the module."""
    (root / "demo/bias.txt").write_text("2.0")
    edit(root, "demo/scale.py", "from bias import BIAS", "BIAS = float(open('demo/bias.txt').read())")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"read 'demo/bias\.txt', which the op's identity does not cover"):
            content(root, settings)


def test_no_bytecode_of_a_library_is_compiled(root: Path, settings: Settings) -> None:
    bias = root / "include/bias.py"
    compileall.compile_dir(root, quiet=1)
    stale = bias.stat()
    edit(root, "include/bias.py", "0.5", "0.7")
    os.utime(bias, ns=(stale.st_atime_ns, stale.st_mtime_ns))
    fresh = write(root.parent / "fresh", CUTEDSL)
    edit(fresh, "include/bias.py", "0.5", "0.7")
    assert content(root, settings) == content(fresh, settings)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "reason", "hint"),
    [
        ("7.5", "it knows no such GPU", "known are 8.0, 8.6, 8.7, 8.9, 9.0, 9.0a, 10.0"),
        ("9.0a+PTX", "what it makes holds no PTX", "ask for 9.0a"),
    ],
)
def test_an_arch_that_cutedsl_makes_nothing_for_is_refused_with_the_rule(
    root: Path, settings: Settings, arch: str, reason: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        content(root, settings, arch)
    assert f"demo/scale?dtype=float16 for {parse_arch(arch)} cannot be built by CuTe DSL" in str(caught.value)
    assert reason in str(caught.value)
    assert hint in str(caught.value.hint)


WRONG = {
    "no such function": (
        {"demo__scale": "def other():\n    pass\n"},
        "demo/scale.py:1: error: it has no function 'scale'",
    ),
    "other parameters": (
        {"demo__scale": CUTEDSL["demo/scale.py"].replace("stream, THREADS", "stream, OTHER")},
        "scale takes x, out, factor, stream, OTHER; op.toml says nothing of OTHER; op.toml names THREADS",
    ),
    "no Python": ({"demo__scale": "import cutlass\ndef scale(:\n"}, "demo/scale.py:2: error: SyntaxError"),
    "a mistake in the kernel": (
        {"demo__scale": CUTEDSL["demo/scale.py"].replace("x[at].to(", "x[at].no_such(")},
        "demo/scale.py:13: error: AttributeError: 'Float16' object has no attribute 'no_such'",
    ),
    "a name that is not there, in an if of the kernel": (
        {"demo__scale": CUTEDSL["demo/scale.py"].replace("if at < cute.size(x)", "if at < nothing")},
        "demo/scale.py:12: error: NameError: name 'nothing' is not defined",
    ),
    "a name that is not there, in the host function": (
        {"demo__scale": CUTEDSL["demo/scale.py"].replace("grid=(blocks,", "grid=(nothing,")},
        "demo/scale.py:19: error: NameError: name 'nothing' is not defined",
    ),
    "it ends the process": ({"include__bias": "import os\nos._exit(0)\n"}, "made no file"),
    "it is killed": ({"include__bias": "import os\nos.abort()\n"}, "the compiler crashed (SIGABRT)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_is_an_error_with_the_line_it_is_in(
    case: str, tmp_path: Path, settings: Settings, compiler: cutedsl.CuteDsl
) -> None:
    files, said = WRONG[case]
    root = write(tmp_path / "pylib", CUTEDSL, **files)
    with pytest.raises(BuildError) as caught:
        content(root, settings)
    assert said in str(caught.value)
    assert not list((settings.workspace / "modules").glob("*/*.o"))


def test_without_the_package_the_error_says_how_to_get_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    def lacking(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", lacking)
    with pytest.raises(NoCompiler) as caught:
        toolchains.find("cutedsl", settings)
    assert "the Python package 'cutlass' was not found" in str(caught.value)
    assert caught.value.hint == "pip install 'kartifacts[cutedsl]'"


def test_without_a_cuda_runtime_the_error_lists_every_place(
    settings: Settings,
    compiler: cutedsl.CuteDsl,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(nvcc, "USUAL", tmp_path / "usual")
    monkeypatch.setattr(nvcc, "wheels", lambda: iter(()))
    with pytest.raises(NoCompiler) as caught:
        toolchains.find("cutedsl", make_settings(CUDA_HOME=str(tmp_path / "named")))
    assert "no CUDA runtime was found" in str(caught.value)
    assert [refusal.place for refusal in caught.value.searched] == [str(tmp_path / "named"), str(tmp_path / "usual")]
    assert "nvidia-cuda-runtime" in str(caught.value.hint)
    old = tmp_path / "named"
    (old / "lib64").mkdir(parents=True)
    (old / "include").mkdir()
    (old / "lib64/libcudart_static.a").write_text("!<arch>")
    (old / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  11080\n")
    with pytest.raises(NoCompiler, match=r"its CUDA runtime is 11080; expected 12\.5 or newer"):
        toolchains.find("cutedsl", make_settings(CUDA_HOME=str(old)))
