"""Debugging, further flags and launchers: explicit, told apart by key, never the default, and never published."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build import jit, toolchains
from kartifacts.build.compile import compile_specs
from kartifacts.build.elf import inspect
from kartifacts.build.sections import sections_of
from kartifacts.build.toolchains import cxx, options
from kartifacts.build.toolchains.options import USUAL, flags_for
from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec, overridden

from .conftest import ONLY_NVCC, Compiler, answer_of

MakeSettings = Callable[..., Settings]
MakeSpec = Callable[..., Spec]
HOST, CUDA = "cxx", ("nvcc", "nvrtc")


def key_of(spec: Spec, settings: Settings) -> str:
    return spec.key(toolchains.find(spec.device.toolchain, settings).made_with(spec))


# -- which flags there are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", toolchains.KINDS)
def test_without_settings_nothing_is_added_and_no_fact(kind: str, settings: Settings) -> None:
    assert flags_for(settings, kind) == USUAL


@pytest.mark.parametrize("kind", toolchains.KINDS)
def test_every_toolchain_knows_what_debugging_is_and_says_so_in_its_facts(
    kind: str, make_settings: MakeSettings
) -> None:
    added = flags_for(make_settings(KARTIFACTS_DEBUG="1"), kind)
    assert added.flags
    assert added.symbols
    assert overridden(added.facts)


def test_debugging_has_line_numbers_already_so_nvcc_is_not_given_both(make_settings: MakeSettings) -> None:
    both = make_settings(KARTIFACTS_DEBUG="1", KARTIFACTS_LINEINFO="1")
    for kind in CUDA:
        assert flags_for(both, kind) == flags_for(make_settings(KARTIFACTS_DEBUG="1"), kind)
        assert flags_for(make_settings(KARTIFACTS_LINEINFO="1"), kind).flags != flags_for(both, kind).flags
    assert flags_for(make_settings(KARTIFACTS_LINEINFO="1"), HOST) == USUAL  # host code has no such thing


def test_flags_are_read_as_a_shell_reads_them_and_go_to_their_own_compiler(make_settings: MakeSettings) -> None:
    settings = make_settings(KARTIFACTS_CXX_FLAGS="-DNAME='a b' -O2", KARTIFACTS_CUDA_FLAGS="-DX=1")
    assert flags_for(settings, HOST).flags == ("-DNAME=a b", "-O2")
    for kind in CUDA:
        assert flags_for(settings, kind).flags == ("-DX=1",)
    assert flags_for(settings, "triton") == flags_for(settings, "cutedsl") == USUAL


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("-Xptxas -v", ["--ptxas-options=-v"]),
        ("-Xptxas=-v,-O2", ["--ptxas-options=-v", "--ptxas-options=-O2"]),
        ("--ptxas-options -v", ["--ptxas-options=-v"]),
        ("-D X=1 -DY=a=b -DZ -U W", ["-DX=1", "-DY=a=b", "-DZ", "-UW"]),
        ("-I /a -I/b --include-path=/c -isystem /d", ["-I/a", "-I/b", "-I/c", "-isystem", "/d"]),
        ("-maxrregcount 32 -ftz=true -rdc true", ["--maxrregcount=32", "--ftz=true", "--relocatable-device-code=true"]),
        ("-diag-suppress 177 -std c++20", ["--diag-suppress=177", "--std=c++20"]),
        ("--use_fast_math -w --no-such-flag", ["--use_fast_math", "-w", "--no-such-flag"]),
    ],
)
def test_flags_as_nvcc_takes_them_are_given_to_nvrtc_as_it_does(
    make_settings: MakeSettings, given: str, flags: list[str]
) -> None:
    settings = make_settings(KARTIFACTS_CUDA_FLAGS=given)
    assert list(flags_for(settings, "nvrtc").flags) == flags
    assert list(flags_for(settings, "nvcc").flags) == given.split()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *((flag, flag) for flag in ONLY_NVCC),
        ("-Xcompiler -Wall", "-Xcompiler"),
        *((flag, flag.rstrip("=")) for flag in ("-Xptxas", "-Xptxas=", "-Xptxas=-v,", "-D", "-I", "-maxrregcount")),
        *(
            (flag, flag)
            for flag in ("-dlto", "-Xcudafe=--x", "-include=x.h", "--use-pch=x", "stray.cu", "-lineinfo", "-G", "-g")
        ),
    ],
)
def test_a_flag_that_nvrtc_does_not_take_is_a_config_error_that_names_it_and_the_variable(
    make_settings: MakeSettings, given: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=r"KARTIFACTS_CUDA_FLAGS: .* cannot be given to NVRTC: ") as caught:
        flags_for(make_settings(KARTIFACTS_CUDA_FLAGS=given), "nvrtc")
    assert repr(named.removesuffix("=-v,")) in caught.value.message


@pytest.mark.parametrize(
    "flag",
    [
        *(
            "-o x",
            "-oelsewhere",
            "-c",
            "-E",
            "-S",
            "-M",
            "-MD",
            "-MMD",
            "--ptx",
            "-cubin",
            "--fatbin",
            "@flags",
            "-optf f",
        ),
        *(
            "-arch=sm_80",
            "--gpu-architecture=sm_80",
            "-gencode",
            "-code=sm_80",
            "--generate-code=arch=x",
            "-arch native",
        ),
        *("-split-compile=2", "--split-compile 0", "--split-compile-extended=2"),
    ],
)
def test_what_decides_what_is_made_or_makes_no_two_builds_alike_is_refused_by_name(
    make_settings: MakeSettings, flag: str
) -> None:
    for name, kind in (("KARTIFACTS_CXX_FLAGS", "cxx"), ("KARTIFACTS_CUDA_FLAGS", "nvcc")):
        with pytest.raises(ConfigError, match=name) as caught:
            flags_for(make_settings(**{name: f"-O2 {flag}"}), kind)
        assert repr(flag.split()[0]) in caught.value.message


@pytest.mark.parametrize("flag", ["--threads 8", "--threads=8", "-t 4", "-t4", "-t=4", "-j8", "-j 8", "--jobserver"])
def test_how_many_run_at_once_is_in_no_key_and_said_to_be_decided_elsewhere(
    make_settings: MakeSettings, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture, flag: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert flags_for(make_settings(KARTIFACTS_CUDA_FLAGS=f"{flag} -DX"), "nvcc").flags == ("-DX",)
    assert f"{flag} is left out" in caplog.text
    assert "KARTIFACTS_JOBS" in caplog.text
    spec = make_spec()
    assert key_of(spec, make_settings(KARTIFACTS_CXX_FLAGS=flag)) == key_of(spec, make_settings())


# -- the CPU that compiles ---------------------------------------------------------------------------------------------

CPUINFO = "processor : {n}\nvendor_id : GenuineIntel\nmodel : 143\ncpu MHz : {mhz}\nflags : fpu sse2 {flags}\n\n"


def test_the_digest_of_a_cpu_tells_features_apart_and_no_more() -> None:
    lesser = CPUINFO.format(n=0, mhz=2000.1, flags="avx2")
    greater = CPUINFO.format(n=0, mhz=2000.1, flags="avx2 avx512f")
    many = "".join(CPUINFO.format(n=n, mhz=2000 + n, flags="avx2") for n in range(8))
    assert options.cpu_digest(lesser) != options.cpu_digest(greater)
    assert options.cpu_digest(lesser) == options.cpu_digest(many)


@pytest.mark.parametrize("flag", ["-march=native", "-mtune=native", "-Xcompiler=-march=native"])
def test_code_for_whatever_cpu_compiles_it_has_another_key_on_each(
    make_settings: MakeSettings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    spec = make_spec()
    settings = make_settings(KARTIFACTS_CXX_FLAGS=flag)
    keys = set()
    for features in ("avx2", "avx2 avx512f"):
        text = CPUINFO.format(n=0, mhz=1, flags=features)
        monkeypatch.setattr(options, "_cpuinfo", lambda text=text: text)
        keys.add(key_of(spec, settings))
    assert len(keys) == 2
    assert key_of(spec, make_settings()) not in keys  # which does not look at the CPU at all


def test_the_usual_code_is_for_the_arch_and_not_for_the_cpu_that_compiles(
    make_settings: MakeSettings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    before = key_of(spec, make_settings())
    monkeypatch.setattr(options, "_cpuinfo", lambda: CPUINFO.format(n=0, mhz=1, flags="other"))
    assert key_of(spec, make_settings()) == before


# -- what they do to keys and kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {"KARTIFACTS_DEBUG": "1"},
        {"KARTIFACTS_CXX_FLAGS": "-O2"},
        {"KARTIFACTS_CXX_FLAGS": "-O2 -fno-math-errno"},
        {"KARTIFACTS_CXX_FLAGS": "-fno-math-errno -O2"},
        {"KARTIFACTS_DEBUG": "1", "KARTIFACTS_CXX_FLAGS": "-O2"},
    ],
)
def test_each_way_to_compile_has_its_own_key_and_the_op_stays_the_same(
    make_settings: MakeSettings, make_spec: MakeSpec, environ: dict[str, str]
) -> None:
    spec = make_spec()
    facts = toolchains.find("cxx", make_settings(**environ)).made_with(spec)
    usual = toolchains.find("cxx", make_settings()).made_with(spec)
    assert spec.key(facts) != spec.key(usual)
    assert set(facts) - set(usual) == {"overrides"}
    assert overridden(facts) == facts["overrides"]
    assert not overridden(usual)


def test_a_build_for_debugging_has_symbols_and_line_tables_and_the_usual_one_none(
    make_settings: MakeSettings, make_spec: MakeSpec
) -> None:
    spec = make_spec("large")
    for environ, there in (({"KARTIFACTS_DEBUG": "1"}, True), ({}, False)):
        [kernel] = compile_specs([spec], make_settings(**environ)).kernels
        names = {section.name for section in sections_of(memoryview(kernel.path.read_bytes()))}
        assert ({".debug_info", ".debug_line", ".symtab"} <= names) is there
        assert answer_of(kernel.path) == 7000


def test_a_further_flag_reaches_every_command_of_the_compiler_and_wins(
    make_settings: MakeSettings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path), KARTIFACTS_CXX_FLAGS="-UKART_SIZE -DKART_SIZE=3")
    [kernel] = compile_specs([make_spec("large")], settings).kernels
    assert answer_of(kernel.path) == 21
    for line in compiler.calls.read_text().splitlines():
        assert line.index("-O3") < line.index("-DKART_SIZE=3")


def test_what_was_built_for_debugging_is_not_found_without_and_the_other_way_round(
    make_settings: MakeSettings, make_spec: MakeSpec, compiler: Compiler
) -> None:
    spec = make_spec()
    usual = make_settings(KARTIFACTS_CXX=str(compiler.path))
    debug = make_settings(KARTIFACTS_CXX=str(compiler.path), KARTIFACTS_DEBUG="1")
    first = jit.build_one(spec, debug)
    assert jit.find_built(spec, usual) is None
    second = jit.build_one(spec, usual)
    assert first.path != second.path
    for _ in range(2):
        assert jit.build_one(spec, debug).path == first.path
        assert jit.find_built(spec, usual) == second
    assert len(compiler.compiled) == 4  # launcher and binding, each way


@pytest.mark.nvcc
@pytest.mark.usefixtures("real_toolkit")
@pytest.mark.parametrize(
    ("environ", "sections"),
    [
        ({"KARTIFACTS_LINEINFO": "1"}, {".debug_line"}),
        ({"KARTIFACTS_DEBUG": "1"}, {".debug_line", ".debug_info"}),
        ({}, set()),
    ],
)
def test_device_code_has_line_numbers_or_symbols_if_asked_for(
    make_settings: MakeSettings, make_spec: MakeSpec, environ: dict[str, str], sections: set[str]
) -> None:
    spec = make_spec(arch=parse_arch("9.0a"))
    [kernel] = compile_specs([spec], make_settings(**environ)).kernels
    assert bool(overridden(kernel.toolchain)) is bool(environ)
    [image] = inspect(kernel.path).images
    found = {section.name for section in sections_of(image.content)}
    assert {name for name in (".debug_line", ".debug_info") if name in found} == sections


# -- launchers ---------------------------------------------------------------------------------------------------------


def launcher(folder: Path, name: str = "ccache") -> tuple[Path, Path]:
    """A program that starts what it is given, as ccache does, and writes down that it did."""
    folder.mkdir(exist_ok=True)
    calls, path = folder / "calls", folder / name
    path.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec "$@"\n')
    path.chmod(0o755)
    return path, calls


def test_a_launcher_starts_every_compilation_and_changes_no_key(
    make_settings: MakeSettings, make_spec: MakeSpec, tmp_path: Path
) -> None:
    path, calls = launcher(tmp_path / "bin")
    spec = make_spec()
    settings = make_settings(KARTIFACTS_CXX_LAUNCHER=str(path))
    [kernel] = compile_specs([spec], settings).kernels
    assert kernel.key == key_of(spec, make_settings())
    started = calls.read_text().splitlines()
    assert len(started) == 2
    assert all(line.split()[0] == str(cxx.discover(settings).path) for line in started)
    assert compile_specs([spec], make_settings()).report["compiled"] == 0  # its objects are those of all


def test_a_launcher_is_looked_up_on_path_may_have_arguments_and_is_named_in_the_provenance(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    path, _ = launcher(tmp_path / "my bin", "sccache")
    settings = make_settings(KARTIFACTS_CXX_LAUNCHER="sccache --fast 'a b'", PATH=f"{path.parent}:/usr/bin:/bin")
    found = toolchains.find("cxx", settings)
    assert isinstance(found, cxx.Cxx)
    assert found.options.launcher == (str(path), "--fast", "a b")
    named = {name: digest for name, digest in found.programs(settings).items() if "sccache" in name}
    done = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    assert named == {"started by sccache": done.stdout.split()[0]}
    assert not [name for name in cxx.discover(make_settings()).programs(make_settings()) if "started" in name]


@pytest.mark.parametrize("value", ["no-such-launcher", "/nowhere/ccache", "''"])
def test_a_launcher_that_is_not_there_is_named_with_its_variable(make_settings: MakeSettings, value: str) -> None:
    for name, kind in (("KARTIFACTS_CXX_LAUNCHER", "cxx"), ("KARTIFACTS_CUDA_LAUNCHER", "nvcc")):
        with pytest.raises(ConfigError, match=name) as caught:
            flags_for(make_settings(**{name: value}), kind)
        assert repr(value.strip("'")) in caught.value.message


# -- the machine that compiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": ""}, {"MAX_JOBS": "2"}])
def test_nothing_of_the_devices_of_the_builder_is_in_a_key_or_a_kernel(
    make_settings: MakeSettings, make_spec: MakeSpec, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    [usual] = compile_specs([spec], make_settings()).kernels
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    elsewhere = make_settings(KARTIFACTS_WORKSPACE=f"{make_settings().workspace}-2", **environ)
    [other] = compile_specs([spec], elsewhere).kernels
    assert (usual.key, usual.sha256) == (other.key, other.sha256)
