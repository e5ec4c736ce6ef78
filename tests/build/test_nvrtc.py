"""NVRTC: found wherever it comes from, refused with the rule where it cannot do, the same machine code as nvcc's."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kartifacts.build import images
from kartifacts.build.compile import compile_specs
from kartifacts.build.elf import inspect, inspect_bytes
from kartifacts.build.jit import build_one
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.library import discover as libraries
from kartifacts.build.toolchains import CUBIN, FATBIN, find, nvcc, nvrtc, options
from kartifacts.build.toolchains.nvcc import Nvcc
from kartifacts.build.toolchains.nvrtc import Nvrtc
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, NoCompiler
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec

from .conftest import IMAGE_FILES, ONLY_NVCC, write_files

MakeSettings = Callable[..., Settings]
MakeSpec = Callable[..., Spec]
TARGET = "targets/x86_64-linux" if os.uname().machine == "x86_64" else "targets/sbsa-linux"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVRTC but where a test says."""
    monkeypatch.setattr(nvcc, "USUAL", Path("/nonexistent/cuda"))
    monkeypatch.setattr(nvcc, "wheels", list)
    monkeypatch.setattr(nvcc, "_warned", set())
    monkeypatch.setattr(nvrtc, "_SYSTEM", ())
    monkeypatch.setattr(sys, "prefix", "/nonexistent/prefix")


@pytest.fixture
def real(make_settings: MakeSettings) -> Nvrtc:
    """The NVRTC of this machine."""
    environ = {name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}
    try:
        found = find("nvrtc", make_settings(KARTIFACTS_CUDA_COMPILER="nvrtc", **environ))
    except NoCompiler:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    assert isinstance(found, Nvrtc)
    return found


def lay(directory: Path, real: Nvrtc) -> Path:
    """The real libraries, by links, in a directory of another layout."""
    directory.mkdir(parents=True)
    for library in (real.library, real.builtins):
        (directory / library.name).symlink_to(library)
    return directory


def machine_code(image: bytes) -> dict[str, bytes]:
    """Function → its instructions."""
    sections = ELFFile(io.BytesIO(image)).iter_sections()
    return {section.name: section.data() for section in sections if section.name.startswith(".text.")}


def image_of(built: BuiltKernel) -> bytes:
    content = built.path.read_bytes()
    found = images.attached(content)
    return content if found is None else found[0]


# -- where it is -------------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize("libraries", ["lib64", "lib", f"{TARGET}/lib"])
def test_it_is_found_in_every_layout_of_a_toolkit(
    libraries: str, real: Nvrtc, make_settings: MakeSettings, tmp_path: Path, nowhere: None
) -> None:
    lay(tmp_path / "with space" / libraries, real)
    found = find("nvrtc", make_settings(CUDA_HOME=str(tmp_path / "with space"), PATH=""))
    assert isinstance(found, Nvrtc)
    assert found.library.parent == tmp_path / "with space" / libraries
    assert found.facts["version"] == real.facts["version"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("package", ["cu13", "cuda_nvrtc"])
def test_it_is_found_in_what_torch_brings(
    package: str,
    real: Nvrtc,
    make_settings: MakeSettings,
    tmp_path: Path,
    nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = lay(tmp_path / "nvidia" / package / "lib", real)
    monkeypatch.setattr(nvcc, "wheels", lambda: [tmp_path / "nvidia"])
    assert find("nvrtc", make_settings(PATH="")).place.parent == place


@pytest.mark.nvrtc
def test_the_newest_is_taken_and_one_that_does_not_load_is_passed_over(
    real: Nvrtc, make_settings: MakeSettings, tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "nvidia" / "cu99" / "lib"
    broken.mkdir(parents=True)
    for name in ("libnvrtc.so.99", "libnvrtc-builtins.so.99.1"):
        (broken / name).write_bytes(b"no library")
    place = lay(tmp_path / "nvidia" / "cu13" / "lib", real)
    monkeypatch.setattr(nvcc, "wheels", lambda: [tmp_path / "nvidia"])
    assert find("nvrtc", make_settings(PATH="")).place.parent == place
    shutil.rmtree(place)
    with pytest.raises(NoCompiler, match=r"libnvrtc\.so\.99: .*cannot be used"):
        find("nvrtc", make_settings(PATH=""))


@pytest.mark.nvrtc
def test_parts_of_different_releases_are_refused(
    real: Nvrtc, make_settings: MakeSettings, tmp_path: Path, nowhere: None
) -> None:
    place = lay(tmp_path / "cuda" / "lib", real)
    major = real.facts["release"].partition(".")[0]
    (place / real.builtins.name).rename(place / f"libnvrtc-builtins.so.{major}.77")
    with pytest.raises(NoCompiler, match="its parts do not belong together"):
        find("nvrtc", make_settings(CUDA_HOME=str(tmp_path / "cuda"), PATH=""))


@pytest.mark.parametrize("value", [":/usr/local/cuda", "/a:/b", "   ", "", "/nonexistent", "cuda", "/"])
def test_without_any_compiler_every_place_and_every_bad_variable_is_named(
    value: str, make_settings: MakeSettings, nowhere: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoCompiler) as caught:
        find("nvrtc", make_settings(CUDA_HOME=value, PATH=""))
    said = str(caught.value)
    assert said.startswith("no CUDA compiler was found, neither NVRTC nor nvcc")
    for place in (f"CUDA_HOME={value!r}", "Python packages: nvidia-cuda-nvrtc", "/nonexistent/cuda", "PATH"):
        assert place in said
    assert f"CUDA_HOME={value!r}" in caplog.text
    assert "looking elsewhere" in caplog.text
    assert "pip install nvidia-cuda-nvrtc" in said


@pytest.mark.nvrtc
@pytest.mark.parametrize("value", ["", ":/usr/local/cuda", "/nonexistent", "/", "PLACE", "PLACE/bin", "PLACE/bin/nvcc"])
def test_a_cuda_home_without_an_nvrtc_is_named_once_where_another_is_taken(
    value: str,
    real: Nvrtc,
    make_settings: MakeSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvcc, "_warned", set())
    (tmp_path / "half a toolkit/bin").mkdir(parents=True)
    (tmp_path / "half a toolkit/bin/nvcc").touch(0o755)
    value = value.replace("PLACE", str(tmp_path / "half a toolkit"))
    for _ in range(2):
        assert isinstance(find("nvrtc", make_settings(CUDA_HOME=value)), Nvrtc)
    assert caplog.text.count(f"CUDA_HOME={value!r}: ") == 1
    assert caplog.text.count("looking elsewhere") == 1
    caplog.clear()
    find("nvrtc", make_settings())
    assert caplog.text == ""


def test_half_an_nvrtc_is_named(make_settings: MakeSettings, tmp_path: Path, nowhere: None) -> None:
    (tmp_path / "cuda" / "lib64").mkdir(parents=True)
    (tmp_path / "cuda" / "lib64" / "libnvrtc.so.13").touch()
    with pytest.raises(NoCompiler, match=r"lib64.*without the libnvrtc-builtins\.so"):
        find("nvrtc", make_settings(CUDA_HOME=str(tmp_path / "cuda"), PATH=""))


@pytest.mark.nvrtc
def test_a_known_nvrtc_is_not_asked_again(
    real: Nvrtc, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*command: object, **kwargs: object) -> None:
        raise AssertionError(f"a process was started: {command}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    again = find("nvrtc", make_settings(KARTIFACTS_CUDA_COMPILER="nvrtc"))
    assert again.fingerprint == real.fingerprint


@pytest.mark.nvcc
def test_where_there_is_no_nvrtc_nvcc_makes_the_images_and_says_once_why(
    make_settings: MakeSettings,
    image_spec: MakeSpec,
    real_toolkit: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nothing = [nvrtc._Place("some place", None, "no such directory")]
    monkeypatch.setattr(nvrtc, "_places", lambda settings: iter(nothing))
    nvrtc._explain.cache_clear()
    caplog.set_level(logging.INFO, "kartifacts.build.toolchains.nvrtc")
    settings = make_settings(CUDA_HOME=str(real_toolkit))
    assert isinstance(find("nvrtc", settings), Nvcc)
    built = build_one(image_spec(), settings)
    assert built.toolchain["kind"] == "nvcc"
    assert inspect(built.path).archs == (parse_arch("9.0a"),)
    said = f"nvcc of {real_toolkit} makes images of device code: NVRTC was not found"
    assert caplog.text.count(said) == 1
    assert "searched some place: no such directory" in caplog.text
    with pytest.raises(NoCompiler, match="NVRTC was not found"):
        find("nvrtc", make_settings(KARTIFACTS_CUDA_COMPILER="nvrtc"))


@pytest.mark.nvcc
@pytest.mark.nvrtc
def test_who_asks_for_nvcc_gets_nvcc_under_another_key(
    real: Nvrtc, make_settings: MakeSettings, image_spec: MakeSpec, real_toolkit: Path
) -> None:
    chosen = find("nvrtc", make_settings(KARTIFACTS_CUDA_COMPILER="nvcc", CUDA_HOME=str(real_toolkit)))
    assert isinstance(chosen, Nvcc)
    assert image_spec().key(chosen.made_with(image_spec())) != image_spec().key(real.made_with(image_spec()))


# -- which archs -------------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("arch", "release", "expected"),
    [
        ("10.0f", "12.8", ["10.0f", "12.8", "CUDA >= 12.9"]),
        ("12.0", "12.6", ["12.0", "12.6", "CUDA >= 12.8"]),
        ("9.0a", "11.8", ["9.0a", "11.8", "CUDA >= 12.0"]),
        ("7.0", "13.0", ["7.0", "13.0", "CUDA < 13.0"]),
        ("10.0", "13.9", ["10.0", "13.9", "lists 8.0, 9.0"]),  # our table says yes, this NVRTC says no
    ],
)
def test_an_arch_that_it_cannot_make_is_refused_with_the_rule(
    arch: str, release: str, expected: list[str], real: Nvrtc, image_spec: MakeSpec
) -> None:
    old = replace(real, facts={**real.facts, "release": release, "archs": "80 90"})
    with pytest.raises(ConfigError) as caught:
        old.check(replace(image_spec(), arch=parse_arch(arch)))
    for text in expected:
        assert text in str(caught.value)
    assert "sm75" not in str(caught.value)


@pytest.mark.network
@pytest.mark.nvrtc
@pytest.mark.parametrize(("version", "refused"), [("12.6.85", "12.0"), ("12.9.86", "8.8")])
def test_an_older_nvrtc_from_a_wheel_makes_images_too(
    version: str, refused: str, make_settings: MakeSettings, image_spec: MakeSpec, tmp_path: Path, nowhere: None
) -> None:
    """Their images do not tell by themselves which driver they need."""
    wheel = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*wheel, f"nvidia-cuda-nvrtc-cu12=={version}"], check=True)
    settings = make_settings(CUDA_HOME=str(tmp_path / "site/nvidia/cuda_nvrtc"), KARTIFACTS_CUDA_COMPILER="nvrtc")
    built = build_one(image_spec(), settings)
    assert built.toolchain["version"] == version
    assert built.needs["driver"] == "12.0"
    with pytest.raises(ConfigError, match=version.rpartition(".")[0]):
        build_one(image_spec(refused), settings)


# -- what it makes -----------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_an_image_is_attached_to_a_launcher_that_is_made_once(
    real: Nvrtc, image_spec: MakeSpec, settings: Settings, tmp_path: Path
) -> None:
    specs = [image_spec(arch, size) for arch in ("9.0a", "8.0") for size in ("small", "large")]
    build = compile_specs(specs, settings)
    assert build.report["compiled"] == len(specs) + 1  # and the launcher
    assert build.report["linked"] == 1
    for spec, built in zip(specs, build.kernels, strict=True):
        found = images.attached(built.path.read_bytes())
        assert found is not None
        assert found[1] == {"define.KART_SIZE": spec.defines[0].partition("=")[2], "toolkit": real.facts["release"]}
        assert inspect(built.path).archs == (spec.arch,)
        assert built.suffix == ".so"
        assert built.needs["driver"] == real.facts["release"].partition(".")[0] + ".0"
    code = "import sys, tvm_ffi; print(*(tvm_ffi.load_module(path).scale() for path in sys.argv[1:]))"
    paths = [str(built.path) for built in build.kernels]
    said = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1", "1000", "1", "1000"]


@pytest.mark.nvrtc
def test_an_image_without_host_sources_is_the_kernel(real: Nvrtc, image_spec: MakeSpec, settings: Settings) -> None:
    built = build_one(image_spec(op="bare"), settings)
    assert (built.suffix, built.path.suffix) == (CUBIN, CUBIN)
    assert inspect(built.path).kind == "cubin"
    assert tuple(inspect(built.path).functions) == ("scale",)
    beside = build_one(image_spec(op="bare", arch="8.0+PTX"), settings)
    assert beside.suffix == FATBIN
    assert set(inspect(beside.path).archs) == {parse_arch("8.0"), parse_arch("8.0+PTX")}


@pytest.mark.nvrtc
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["8.0", "9.0a", "10.0f"])
def test_nvcc_makes_the_same_machine_code(
    arch: str, real: Nvrtc, image_spec: MakeSpec, make_settings: MakeSettings, real_toolkit: Path
) -> None:
    home = str(real_toolkit)
    other = find("nvcc", make_settings(CUDA_HOME=home))
    if f"CUDA {other.fingerprint['version']}" != f"CUDA {real.facts['version']}":
        pytest.skip("needs NVRTC and nvcc of one release")
    made = [
        machine_code(build_one(image_spec(arch, op="bare"), make_settings(CUDA_HOME=home, **chosen)).path.read_bytes())
        for chosen in ({"KARTIFACTS_CUDA_COMPILER": "nvrtc"}, {"KARTIFACTS_CUDA_COMPILER": "nvcc"})
    ]
    assert made[0]
    assert made[0] == made[1]


# What addresses are computed with, by the nine bits that name an instruction: MOV, IADD3, LEA, LOP3, SHF, IMAD, and two
# of 64 bits; and what fills up the end.
ADDRESSES = {0x02, 0x10, 0x11, 0x12, 0x19, 0x24, 0x35, 0x36, 0x118}


def work_of(code: bytes) -> Counter[int]:
    """How many there are of each instruction that loads, stores, exchanges or computes with floats."""
    named = Counter(int.from_bytes(code[place : place + 2], "little") & 0x1FF for place in range(0, len(code), 16))
    return Counter({name: count for name, count in named.items() if name not in ADDRESSES})


@pytest.mark.nvrtc
@pytest.mark.nvcc
def test_nvcc_makes_the_same_machine_code_of_our_own_kernels(
    real: Nvrtc, make_settings: MakeSettings, real_toolkit: Path
) -> None:
    """But for addresses of shared memory, which nvcc has in 32 bits: there nothing else may differ."""
    library = libraries().library_of("norm/rmsnorm")
    assert library is not None
    specs, _ = library.specs([], [parse_arch("9.0a")])
    specs = [spec for spec in specs if spec.device.toolchain == "nvrtc" and ("dtype", "bfloat16") in spec.axes]
    made = [
        compile_specs(specs, make_settings(CUDA_HOME=str(real_toolkit), KARTIFACTS_CUDA_COMPILER=chosen)).kernels
        for chosen in ("nvrtc", "nvcc")
    ]
    same = 0
    for ours, theirs in zip(*made, strict=True):
        usage, own, other = inspect(ours.path).functions, machine_code(image_of(ours)), machine_code(image_of(theirs))
        assert own.keys() == other.keys()
        for section, code in own.items():
            if code == other[section]:
                same += 1
                continue
            assert usage[section.removeprefix(".text.")].shared > 0, (ours.uri, section)
            assert work_of(code) == work_of(other[section]), (ours.uri, section)
    assert same == 14  # activations and rotary embedding


@pytest.mark.nvrtc
def test_an_image_is_the_same_from_any_directory_and_in_any_order(
    real: Nvrtc, make_settings: MakeSettings, tmp_path: Path
) -> None:
    """Also where __FILE__ tells where a header lies, and names are internal."""
    files = {
        **IMAGE_FILES,
        "demo/scale.cu": (
            '#include "kart/launch.h"\n'
            "namespace { __device__ float hidden; __device__ __noinline__ float get() { return hidden; } }\n"
            'extern "C" __global__ void scale(const char** x) { *x = get() > 0 ? __FILE__ : KART_HERE; }\n'
        ),
        "include/kart/launch.h": "#define KART_HERE here()\n__device__ const char* here() { return __FILE__; }\n",
    }
    made = []
    for name in ("one", "another place"):
        root = write_files(tmp_path / name / "lib", files)
        settings = make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / name / "workspace"))
        spec = libraries([root]).find("demo/bare").spec("demo/bare", {"size": "small"}, parse_arch("9.0a"))
        made.append(build_one(spec, settings).path.read_bytes())
    assert made[0] == made[1]
    assert str(tmp_path).encode() not in made[0]
    assert b"include/kart/launch.h" in made[0]


@pytest.mark.nvrtc
def test_symbols_and_line_numbers_are_made_only_when_asked_for_and_under_other_keys(
    real: Nvrtc, image_spec: MakeSpec, make_settings: MakeSettings
) -> None:
    spec = image_spec(op="bare")
    made = {
        asked: build_one(spec, make_settings(**({asked: "1"} if asked else {})))
        for asked in ("", "KARTIFACTS_LINEINFO", "KARTIFACTS_DEBUG")
    }
    assert len({built.key for built in made.values()}) == 3
    debugging = {asked: ".debug_line" in inspect(built.path).sections for asked, built in made.items()}
    assert debugging == {"": False, "KARTIFACTS_LINEINFO": True, "KARTIFACTS_DEBUG": True}


@pytest.mark.nvrtc
def test_flags_for_ptxas_may_be_lists(real: Nvrtc, image_root: Path, settings: Settings, image_spec: MakeSpec) -> None:
    declaration = image_root / "demo/op.toml"
    text = declaration.read_text().replace(
        'sources = ["scale.cu"]\n', 'sources = ["scale.cu"]\nflags = ["-Xptxas=-O3,-dlcm=cg", "--use_fast_math"]\n'
    )
    declaration.write_text(text)
    assert inspect(build_one(image_spec(op="bare"), settings).path).kind == "cubin"
    declaration.write_text(text.replace("--use_fast_math", "-Xcompiler=-Wall"))
    with pytest.raises(ConfigError, match=r"-Xcompiler=-Wall.*nvrtc does not know it"):
        image_spec(op="bare")


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", ["scale", "bare"])
def test_an_image_without_a_kernel_is_refused(
    op: str, real: Nvrtc, image_root: Path, image_spec: MakeSpec, settings: Settings
) -> None:
    """A template that nobody uses makes an empty image, which would be found out at the first launch."""
    source = image_root / "demo/scale.cu"
    source.write_text(source.read_text().replace('extern "C"', "template <class T>").replace("float*", "T*"))
    with pytest.raises(BuildError, match=r"demo/(scale|bare)\?size=small.*holds no kernel|does not export scale"):
        build_one(image_spec(op=op), settings)


def test_an_image_is_made_of_one_source(image_root: Path, image_spec: MakeSpec) -> None:
    declaration = image_root / "demo/op.toml"
    declaration.write_text(declaration.read_text().replace('["scale.cu"]', '["scale.cu", "other.cu"]'))
    with pytest.raises(ConfigError, match="an image is made of one source"):
        image_spec()


@pytest.mark.nvrtc
def test_nvrtc_never_gets_into_the_process_that_builds(real: Nvrtc, image_spec: MakeSpec, settings: Settings) -> None:
    build_one(image_spec(op="bare"), settings)
    assert "libnvrtc" not in Path("/proc/self/maps").read_text()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("int x = ;", r"demo/scale\.cu\(2\): error: "),
        ("#include <stdint.h>", r"demo/scale\.cu\(2\): .*stdint\.h.*no headers of a C library.*__CUDACC_RTC__"),
        ("#include <type_traits>", r"demo/scale\.cu\(2\): .*no headers of a C\+\+ library.*<cuda/std/type_traits>"),
        ("int host() { return 1; }", r"demo/scale\.cu\(2\): .*host code is for host_sources, or for toolchain"),
        ('#include "missing.h"', r"needs the header 'missing\.h'.*demo/scale\.cu\(2\)"),
        ('#error "not for this arch"', r"demo/scale\.cu\(2\): .*not for this arch"),
    ],
)
def test_the_first_complaint_names_file_and_line(
    line: str, expected: str, real: Nvrtc, image_root: Path, image_spec: MakeSpec, settings: Settings
) -> None:
    source = image_root / "demo/scale.cu"
    source.write_text(f"{line}\n".join(source.read_text().partition("\n")[::2]).replace('h"' + line, f'h"\n{line}'))
    with pytest.raises(BuildError, match=expected) as caught:
        build_one(image_spec(op="bare"), settings)
    assert caught.value.log is not None
    assert line in Path(caught.value.log).read_text()


@pytest.mark.nvrtc
def test_without_cuda_headers_the_complaint_says_so_and_other_kernels_are_made(
    real: Nvrtc, image_root: Path, image_spec: MakeSpec, make_settings: MakeSettings, tmp_path: Path, nowhere: None
) -> None:
    lay(tmp_path / "cuda/lib", real)
    settings = make_settings(CUDA_HOME=str(tmp_path / "cuda"), PATH="")
    built = build_one(image_spec(op="bare"), settings)
    assert built.toolchain["cudart"] == "none"
    source = image_root / "demo/scale.cu"
    source.write_text("#include <cuda_fp16.h>\n" + source.read_text())
    with pytest.raises(BuildError, match="no CUDA headers belong to this NVRTC"):
        build_one(image_spec(op="bare"), settings)


@pytest.mark.nvrtc
def test_a_cuda_header_that_changes_is_noticed(
    real: Nvrtc, image_root: Path, image_spec: MakeSpec, make_settings: MakeSettings, tmp_path: Path, nowhere: None
) -> None:
    lay(tmp_path / "cuda/lib", real)
    major = real.facts["release"].partition(".")[0]
    headers = {
        "cuda_fp16.h": '#include "inner.h"\n',
        "inner.h": "#define INNER 5\n",
        "cuda_runtime_api.h": f"#define CUDART_VERSION {major}000\n",
    }
    write_files(tmp_path / "cuda/include", headers)
    source = image_root / "demo/scale.cu"
    source.write_text("#include <cuda_fp16.h>\n" + source.read_text().replace("FACTOR", "INNER"))
    settings = make_settings(CUDA_HOME=str(tmp_path / "cuda"), PATH="")
    first = build_one(image_spec(op="bare"), settings)
    assert first.toolchain["cudart"] == f"{major}000"
    assert build_one(image_spec(op="bare"), settings).path == first.path
    (tmp_path / "cuda/include/inner.h").write_text("#define INNER 6\n")
    second = build_one(image_spec(op="bare"), settings)
    assert second.path != first.path
    assert machine_code(second.path.read_bytes()) != machine_code(first.path.read_bytes())


# -- the worker --------------------------------------------------------------------------------------------------------


def job(real: Nvrtc, root: Path, *flags: str, source: str = "demo/scale.cu", output: str = "out") -> dict[str, object]:
    chosen = [f"--nvrtc={real.library}", f"--builtins={real.builtins}", "--gpu-architecture=sm_80", "-DKART_SIZE=1"]
    paths = ["--depfile", f"{output}.d", "--output", output]
    return {"arguments": [*chosen, "-Iinclude", *flags, *paths, source], "cwd": str(root)}


def answers(jobs: list[dict[str, object]]) -> list[dict[str, object]]:
    lines = "".join(f"{json.dumps(each)}\n" for each in jobs)
    done = subprocess.run(nvrtc.worker(), input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.nvrtc
def test_a_worker_does_many_jobs_and_one_that_fails_harms_no_other(real: Nvrtc, image_root: Path) -> None:
    told = answers(
        [
            job(real, image_root, output="first"),
            job(real, image_root, "-DKART_SIZE=("),
            job(real, image_root, "--no-such-flag"),
            job(real, image_root, output="second"),
        ]
    )
    assert [answer["status"] for answer in told] == [0, 1, 1, 0]
    assert "demo/scale.cu(" in str(told[1]["text"])
    assert "no-such-flag" in str(told[2]["text"])
    assert (image_root / "first").read_bytes() == (image_root / "second").read_bytes()
    assert not (image_root / "out").exists()


@pytest.mark.nvrtc
def test_every_flag_that_is_refused_as_nvccs_is_unknown_to_nvrtc(real: Nvrtc, image_root: Path) -> None:
    told = answers([job(real, image_root, flag) for flag in ONLY_NVCC])
    known = [
        flag for flag, answer in zip(ONLY_NVCC, told, strict=True) if "unrecognized option" not in str(answer["text"])
    ]
    assert known == []


@pytest.mark.nvrtc
def test_a_compiler_that_aborts_is_a_build_error_that_says_so(
    image_spec: MakeSpec, make_settings: MakeSettings, real: Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(KARTIFACTS_CUDA_FLAGS="--ptxas-options=")
    monkeypatch.setattr(options, "as_nvrtc_takes", lambda words, _: words)
    with pytest.raises(BuildError, match=r"the compiler crashed \(SIGABRT\), at compiling demo/") as caught:
        compile_specs([image_spec()], settings)
    assert caught.value.exit_status == -signal.SIGABRT
    assert "terminate called" in Path(caught.value.log).read_text()


@pytest.mark.nvrtc
def test_the_list_of_what_was_read_is_followed_as_nvrtc_does(real: Nvrtc, tmp_path: Path) -> None:
    """Every file that strace sees it open, and none twice."""
    files = {
        "demo/scale.cu": '#include "near.h"\n#include <far.h>\n#if 0\n#include "never.h"\n#endif\n',
        "demo/near.h": '#include "deep/er.h"\n',
        "demo/deep/er.h": '#  include "beside.h"\n#include "near too.h"\n',
        "demo/deep/beside.h": "#include \\\n<$odd#name.h>\n",
        "include/near too.h": "",
        "include/beside.h": "#error found in the wrong place",
        "elsewhere/$odd#name.h": "",
        "include/far.h": '#pragma once\n#include "far.h"\n#include "near.h"\n',
        "include/near.h": "",
    }
    root = write_files(tmp_path / "lib", files)
    given = job(real, root, f"-I{root}/elsewhere")
    [told] = answers([given])
    assert told["status"] == 0, told["text"]
    listed = (root / "out.d").read_text()
    expected = ["demo/scale.cu", "demo/near.h", "demo/deep/er.h", "demo/deep/beside.h", r"include/near\ too.h"]
    expected += [rf"{root}/elsewhere/$$odd\#name.h", "include/far.h", "include/near.h"]
    assert sorted(re.split(r"(?<!\\)\s+", listed.replace("\\\n", "").partition(":")[2].strip())) == sorted(expected)
    strace = shutil.which("strace")
    if strace is not None:
        command = [strace, "-f", "-e", "trace=openat,open", "-o", str(tmp_path / "trace"), *nvrtc.worker()]
        arguments = given["arguments"]
        assert isinstance(arguments, list)
        subprocess.run([*command, *arguments], cwd=root, check=True, capture_output=True)
        opened = re.findall(r'"([^"]+\.(?:h|cu))", O_RDONLY[^\n]*= \d', (tmp_path / "trace").read_text())
        names = {os.path.basename(name) for name in opened}
        assert names == {os.path.basename(name) for name in files}


# -- PTX beside binary code --------------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.nvcc
def test_a_fat_binary_says_what_nvidias_own_tool_says(
    real: Nvrtc, image_root: Path, real_toolkit: Path, tmp_path: Path
) -> None:
    """Every field of every entry, but for the remarks about it that may be left out."""
    answers([job(real, image_root, output="cubin"), job(real, image_root, "--ptx", output="fatbin")])
    ours = (image_root / "fatbin").read_bytes()
    ptx = ours.rpartition(b"//\n// Generated")[2].rstrip(b"\0")
    (image_root / "ptx").write_bytes(b"//\n// Generated" + ptx)
    given = [f"--image3=kind={kind},sm=80,file={name}" for kind, name in (("elf", "cubin"), ("ptx", "ptx"))]
    tool = [str(real_toolkit / "bin/fatbinary"), "--64", "--compress-mode=none", "--create=theirs", *given]
    subprocess.run(tool, cwd=image_root, check=True)
    theirs = (image_root / "theirs").read_bytes()
    assert entries(ours) == entries(theirs)
    assert (image_root / "cubin").read_bytes() in ours
    assert {image.arch for image in inspect_bytes(ours, "ours").images} == {parse_arch("8.0"), parse_arch("8.0+PTX")}


def entries(container: bytes) -> list[tuple[int, ...]]:
    """Kind, version of the entry, version of its content, arch and flags of each."""
    found: list[tuple[int, ...]] = []
    offset = struct.unpack_from("<IHHQ", container)[2]
    while offset < len(container):
        kind, version, header, size, _, _, minor, major, arch = struct.unpack_from("<HHIQIIHHI", container, offset)
        (flags,) = struct.unpack_from("<Q", container, offset + 40)
        found.append((kind, version, major, minor, arch, flags))
        offset += header + size
    return found
