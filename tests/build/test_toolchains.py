from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import toolchains
from kartifacts.build.compile import compile_specs
from kartifacts.build.elf import inspect
from kartifacts.build.toolchains import cxx, nvcc, probe
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec

from .conftest import CPU, Compiler

MakeSettings = Callable[..., Settings]
BANNER = "Cuda compilation tools, release {release}, V{release}.88\nBuild cuda_{release}.r{release}\n"
TARGET = f"targets/{'sbsa' if os.uname().machine == 'aarch64' else 'x86_64'}-linux"


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def lay_toolkit(
    root: Path,
    *,
    release: str = "13.0",
    ptxas: str = "",
    cicc: str = "",
    libraries: str = "lib64",
    headers: str = "include",
) -> Path:
    """A toolkit whose programs say their versions and do nothing else."""
    say = BANNER.format(release=release)
    script(root / "bin/nvcc", f'case "$1" in --list-gpu-code) echo sm_80; echo sm_90;; *) echo "{say}";; esac')
    script(root / "bin/ptxas", f'echo "{BANNER.format(release=ptxas or release)}"')
    for name, content in (
        ("nvvm/bin/cicc", "\x7fELF..." + BANNER.format(release=cicc or release)),
        (f"{libraries}/libcudart_static.a", "!<arch>"),
        (f"{headers}/cuda_runtime_api.h", "#define CUDART_VERSION  13000\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture
def no_other_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the toolkits of this machine that no setting names."""
    monkeypatch.setattr(nvcc, "USUAL", Path("/nonexistent/cuda"))
    monkeypatch.setattr(nvcc, "_wheels", lambda: iter(()))


@pytest.fixture
def path_without_nvcc(tmp_path: Path) -> str:
    folder = tmp_path / "path"
    folder.mkdir()
    for name in ("g++", "ld", "as"):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return str(folder)


# -- the host compiler -------------------------------------------------------------------------------------------------


def test_without_any_compiler_the_error_lists_every_place_searched(make_settings: MakeSettings) -> None:
    with pytest.raises(NoCompiler) as caught:
        toolchains.find("cxx", make_settings(PATH=""))
    assert [refusal.place for refusal in caught.value.searched] == ["PATH"] * 3
    for name in ("g++", "clang++", "c++"):
        assert f"no program {name!r}" in str(caught.value)


@pytest.mark.parametrize("value", ["no-such-compiler", "/nonexistent/g++", "g++ -m32"])
def test_a_wrong_cxx_setting_is_named_and_nothing_else_is_taken(make_settings: MakeSettings, value: str) -> None:
    with pytest.raises(NoCompiler) as caught:
        toolchains.find("cxx", make_settings(KARTIFACTS_CXX=value))
    assert f"KARTIFACTS_CXX: no program {value!r}" in str(caught.value)


def test_a_compiler_that_does_not_run_is_passed_over_for_the_next(make_settings: MakeSettings, tmp_path: Path) -> None:
    script(tmp_path / "bin/g++", "echo broken; exit 3")
    real = shutil.which("g++")
    assert real is not None
    (tmp_path / "bin/clang++").symlink_to(real)
    found = cxx.discover(make_settings(PATH=f"{tmp_path}/bin:{os.environ['PATH']}"))
    assert found.path == tmp_path / "bin/clang++"


def test_the_fingerprint_says_what_the_compiler_is_and_not_where_it_is(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    found = cxx.discover(make_settings())
    link = tmp_path / "elsewhere" / "c++"
    link.parent.mkdir()
    link.symlink_to(found.path)
    other = cxx.discover(make_settings(KARTIFACTS_CXX=str(link)))
    assert other.path == link
    assert other.fingerprint == found.fingerprint
    assert set(found.fingerprint) == {"kind", "version", "machine", "linker", "tvm_ffi", "flags"}
    assert not any("/" in value for value in found.fingerprint.values())


def test_a_warm_lookup_starts_no_process(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_other_toolkit: None
) -> None:
    settings = make_settings(CUDA_HOME=str(lay_toolkit(tmp_path / "cuda")))
    first = toolchains.find("nvcc", settings), toolchains.find("cxx", settings)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    second = toolchains.find("nvcc", settings), toolchains.find("cxx", settings)
    assert [found.fingerprint for found in first] == [found.fingerprint for found in second]


def test_a_compiler_that_was_replaced_is_asked_again(make_settings: MakeSettings, compiler: Compiler) -> None:
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path))
    before = cxx.discover(settings).fingerprint["version"]
    status = compiler.path.stat()
    compiler.misbehave("echo 'g++ (Other) 99.9'; exit 0", on="--version")
    os.utime(compiler.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cxx.discover(settings).fingerprint["version"] == "gcc (Other) 99.9" != before


def test_a_damaged_record_of_a_probe_is_not_believed(make_settings: MakeSettings) -> None:
    settings = make_settings()
    settings.workspace.mkdir()
    expected = cxx.discover(settings).fingerprint
    records = list((settings.workspace / "toolchains").iterdir())
    assert records
    for content in (b"", b"{}", b"[]", b'{"facts": 1, "stamps": {}}', b'{"facts": {}, "stamps": 3}', b"\xff"):
        for record in records:
            record.write_bytes(content)
        assert cxx.discover(settings).fingerprint == expected


def test_what_silently_changes_the_output_does_not_reach_a_compiler(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CPATH", "NVCC_APPEND_FLAGS", "CPLUS_INCLUDE_PATH", "DEPENDENCIES_OUTPUT", "PTXAS_FLAGS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("KEPT", "y")
    env = probe.environment(make_settings(PATH="/some/path"))
    assert "x" not in env.values()
    assert (env["LC_ALL"], env["KEPT"], env["PATH"].split(":")[0]) == ("C", "y", "/some/path")


@pytest.mark.parametrize("variable", ["COMPILER_PATH", "GCC_EXEC_PREFIX"])
def test_parts_of_another_compiler_that_a_variable_names_are_not_started(
    make_spec: Callable[..., Spec],
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
) -> None:
    calls = tmp_path / "calls"
    for name in ("as", "ld", "cc1plus", "collect2"):
        script(tmp_path / "parts" / name, f"echo {name} >> {calls}; exit 1")
    monkeypatch.setenv(variable, f"{tmp_path}/parts/")
    settings = make_settings()
    program = cxx.discover(settings).place
    source = tmp_path / "empty.cpp"
    source.touch()
    bare = subprocess.run([program, "-c", source, "-o", tmp_path / "o"], capture_output=True, check=False)
    assert bare.returncode != 0
    calls.unlink()  # it was started
    compile_specs([make_spec()], settings)
    assert not calls.exists()


def test_libraries_are_not_looked_for_where_a_variable_says(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = make_settings()
    program, source = cxx.discover(settings).place, tmp_path / "empty.cpp"
    source.touch()
    (tmp_path / "libstray.a").write_bytes(b"!<arch>\n")
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    command: list[str | Path] = [program, "-shared", source, "-lstray", "-o", tmp_path / "o"]
    statuses = [
        subprocess.run(command, env=env, capture_output=True, check=False).returncode
        for env in (None, probe.environment(settings))
    ]
    assert (statuses[0], statuses[1] != 0) == (0, True)


@pytest.mark.nvcc
def test_what_nvcc_adds_from_variables_reaches_none_of_its_parts(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toolkit: Path
) -> None:
    """Its nvcc.profile adds to variables of the environment, which nvcc then gives to its parts."""
    names = ("PTXAS_FLAGS", "CUDAFE_FLAGS", "INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES", "NVLINK_FLAGS")
    for name in (*names, "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.setenv(name, "-DKART_STRAY")
    source = tmp_path / "empty.cu"
    source.touch()
    command: list[str | Path] = [toolkit / "bin/nvcc", "--dryrun", source, "-o", tmp_path / "o"]
    said = [
        subprocess.run(command, env=env, capture_output=True, check=True, text=True).stderr
        for env in (None, probe.environment(make_settings()))
    ]
    assert "KART_STRAY" in said[0]
    assert "KART_STRAY" not in said[1]


def test_a_cpu_of_another_kind_is_refused_before_anything_is_compiled(
    make_spec: Callable[..., Spec], make_settings: MakeSettings, compiler: Compiler
) -> None:
    other = parse_arch("cpu:aarch64" if CPU.name == "x86-64" else "cpu:x86-64")
    with pytest.raises(ConfigError, match=f"for {other} cannot be built: g\\+\\+ makes code for"):
        compile_specs([make_spec(), make_spec(arch=other)], make_settings(KARTIFACTS_CXX=str(compiler.path)))
    assert compiler.compiled == []


# -- nvcc --------------------------------------------------------------------------------------------------------------


def test_without_a_cuda_compiler_the_error_lists_every_place_searched(
    make_settings: MakeSettings, path_without_nvcc: str, no_other_toolkit: None
) -> None:
    with pytest.raises(NoCompiler) as caught:
        toolchains.find("nvcc", make_settings(PATH=path_without_nvcc, CUDA_HOME="/nonexistent"))
    places = [refusal.place for refusal in caught.value.searched]
    assert places == ["CUDA_HOME='/nonexistent'", "PATH", "/nonexistent/cuda", "Python packages"]
    assert "kartifacts[cuda]" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (":/usr/local/cuda", "got a list separated by ':'"),
        ("/a:/b", "got a list separated by ':'"),
        ("   ", "it is empty"),
        ("", "it is empty"),
        ("/nonexistent", "no such directory"),
        ("cuda", "not an absolute path"),
        ("/", "no bin/nvcc"),
    ],
)
def test_a_bad_cuda_home_is_named_and_the_next_place_is_taken(
    make_settings: MakeSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    problem: str,
) -> None:
    monkeypatch.setattr(nvcc, "_warned", set())
    good = lay_toolkit(tmp_path / "with space")
    settings = make_settings(CUDA_HOME=value, CUDA_PATH=str(good))
    assert nvcc.discover(settings).root == good
    assert f"CUDA_HOME={value!r}: " in caplog.text
    assert problem in caplog.text
    nvcc.discover(settings)
    assert caplog.text.count(problem) == 1


@pytest.mark.parametrize(
    ("libraries", "headers"),
    [("lib64", "include"), ("lib", "include"), (f"{TARGET}/lib", f"{TARGET}/include")],
    ids=["toolkit", "wheel", "conda"],
)
def test_every_layout_of_a_toolkit_is_understood(
    make_settings: MakeSettings, tmp_path: Path, libraries: str, headers: str
) -> None:
    root = lay_toolkit(tmp_path / "cuda", libraries=libraries, headers=headers)
    found = nvcc.discover(make_settings(CUDA_HOME=str(root)))
    assert str(root / libraries / "libcudart_static.a") in found.link(["a.o"], "out.so")
    assert found.fingerprint["cudart"] == "13000"


@pytest.mark.parametrize(("part", "version"), [("ptxas", "13.5"), ("cicc", "12.9")])
def test_parts_of_different_releases_are_refused(
    make_settings: MakeSettings, tmp_path: Path, no_other_toolkit: None, path_without_nvcc: str, part: str, version: str
) -> None:
    root = lay_toolkit(tmp_path / "cuda", **{part: version})
    with pytest.raises(NoCompiler) as caught:
        nvcc.discover(make_settings(CUDA_HOME=str(root), PATH=path_without_nvcc))
    assert f"nvcc is of CUDA 13.0.88, {part} of {version}.88" in str(caught.value)


@pytest.mark.parametrize(
    "missing", ["bin/ptxas", "nvvm/bin/cicc", "lib64/libcudart_static.a", "include/cuda_runtime_api.h"]
)
def test_an_incomplete_toolkit_is_refused_with_what_it_lacks(
    make_settings: MakeSettings, tmp_path: Path, no_other_toolkit: None, path_without_nvcc: str, missing: str
) -> None:
    root = lay_toolkit(tmp_path / "cuda")
    (root / missing).unlink()
    with pytest.raises(NoCompiler) as caught:
        nvcc.discover(make_settings(CUDA_HOME=str(root), PATH=path_without_nvcc))
    assert missing.rpartition("/")[2] in str(caught.value)


def test_a_toolkit_behind_a_link_has_the_same_fingerprint(make_settings: MakeSettings, tmp_path: Path) -> None:
    root = lay_toolkit(tmp_path / "cuda-13.0")
    link = tmp_path / "cuda"
    link.symlink_to(root)
    direct, linked = (nvcc.discover(make_settings(CUDA_HOME=str(path))) for path in (root, link))
    assert linked.root == link
    assert direct.fingerprint == linked.fingerprint
    assert not any(str(tmp_path) in value for value in direct.fingerprint.values())


def test_a_script_on_path_leads_to_the_toolkit_that_it_starts(
    make_settings: MakeSettings, tmp_path: Path, no_other_toolkit: None
) -> None:
    root = lay_toolkit(tmp_path / "cuda")
    script(tmp_path / "bin/nvcc", f'echo "#\\$ _HERE_={root}/bin"')
    found = nvcc.discover(make_settings(PATH=f"{tmp_path}/bin:{os.environ['PATH']}"))
    assert found.root == root


@pytest.mark.parametrize(
    ("arch", "release", "message"),
    [
        ("10.0f", "12.8", r"needs CUDA >= 12.9"),
        ("12.0", "12.6", r"arch 12.0 cannot be built with CUDA 12.6.*12.8"),
        ("10.0", "13.0", r"lists sm_80 sm_90, not sm_100"),  # our table says yes, this nvcc says no
    ],
)
def test_an_arch_that_the_toolkit_cannot_build_is_refused_with_the_rule(
    make_settings: MakeSettings, make_spec: Callable[..., Spec], tmp_path: Path, arch: str, release: str, message: str
) -> None:
    found = nvcc.discover(make_settings(CUDA_HOME=str(lay_toolkit(tmp_path / "cuda", release=release))))
    found.check(make_spec(arch=parse_arch("9.0a")))
    with pytest.raises(ConfigError, match=message):
        found.check(make_spec(arch=parse_arch(arch)))


def test_without_a_host_compiler_nvcc_is_of_no_use_and_the_error_says_which_is_missing(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(CUDA_HOME=str(lay_toolkit(tmp_path / "cuda")), PATH="")
    with pytest.raises(NoCompiler, match=r"no host C\+\+ compiler"):
        nvcc.discover(settings)


def lay_real_toolkit(root: Path, real: Path, layout: str) -> Path:
    """The toolkit of this machine in one of the layouts in use; gives its directory of libraries."""
    prefix = f"{TARGET}/" if layout == "conda" else ""
    shutil.copytree(real / "bin", root / "bin", symlinks=True)
    runtime, header = nvcc.runtime_of(real)
    libraries = root / ("lib64" if layout == "toolkit" else f"{prefix}lib")
    for name, target in ((root / "nvvm", real / "nvvm"), (root / f"{prefix}include", header.parent)):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(target)
    libraries.mkdir(parents=True)
    (libraries / runtime.name).symlink_to(runtime)
    return libraries


@pytest.mark.nvcc
@pytest.mark.parametrize("layout", ["toolkit", "wheel", "conda"])
def test_a_real_toolkit_builds_in_every_layout(
    make_settings: MakeSettings, make_spec: Callable[..., Spec], tmp_path: Path, real_toolkit: Path, layout: str
) -> None:
    lay_real_toolkit(tmp_path / "cuda", real_toolkit, layout)
    settings = make_settings(CUDA_HOME=str(tmp_path / "cuda"))
    built = compile_specs([make_spec(arch=parse_arch("8.0"))], settings).kernels[0]
    assert inspect(built.path).archs == (parse_arch("8.0"),)


@pytest.mark.nvcc
@pytest.mark.parametrize("layout", ["toolkit", "wheel", "conda"])
def test_libraries_of_a_toolkit_are_linked_in_every_layout(
    make_settings: MakeSettings,
    make_spec: Callable[..., Spec],
    root: Path,
    tmp_path: Path,
    real_toolkit: Path,
    layout: str,
) -> None:
    """In wheels there is libcudart.so.13 and no libcudart.so; the driver's library is nowhere, but for a stub."""
    libraries = lay_real_toolkit(tmp_path / "with space" / "cuda", real_toolkit, layout)
    (libraries / "stubs").mkdir()
    for name, soname in (("libkartmath.so.7", "libkartmath.so.7"), ("stubs/libkartdriver.so", "libkartdriver.so.1")):
        made = f'extern "C" int {soname.partition(".")[0]}() {{ return 0; }}'
        flags = ("-shared", "-fPIC", f"-Wl,-soname,{soname}", "-x", "c++", "-", "-o", str(libraries / name))
        subprocess.run(["g++", *flags], input=made, text=True, check=True)
    if layout != "wheel":
        (libraries / "libkartmath.so").symlink_to("libkartmath.so.7")
    toml, source = root / "demo/op.toml", root / "demo/answer.cu"
    declared = 'toolchain = "nvcc"\nlink_flags = ["-lkartmath", "-lkartdriver"]'
    toml.write_text(toml.read_text().replace('toolchain = "nvcc"', declared))
    calling = 'extern "C" int libkartmath(); extern "C" int libkartdriver();\n'
    text = source.read_text().replace("return (long)", "return libkartmath() + libkartdriver() + (long)")
    source.write_text(calling + text)
    settings = make_settings(CUDA_HOME=str(tmp_path / "with space" / "cuda"))
    built = compile_specs([make_spec(arch=parse_arch("8.0"))], settings).kernels[0]
    found = inspect(built.path)
    assert {"libkartmath.so.7", "libkartdriver.so.1"} <= set(found.needed)
    assert found.run_path == ""


def test_the_wheels_of_the_cuda_extra_are_a_whole_compiler(
    make_settings: MakeSettings,
    make_spec: Callable[..., Spec],
    monkeypatch: pytest.MonkeyPatch,
    path_without_nvcc: str,
) -> None:
    wheels = [*nvcc._wheels()]
    if not wheels:
        pytest.skip("the cuda extra is not installed: pip install 'kartifacts[cuda]'")
    monkeypatch.setattr(nvcc, "USUAL", Path("/nonexistent/cuda"))
    settings = make_settings(PATH=path_without_nvcc)
    found = nvcc.discover(settings)
    assert found.root == wheels[0]
    built = compile_specs([make_spec(arch=parse_arch("9.0a"))], settings).kernels[0]
    assert inspect(built.path).archs == (parse_arch("9.0a"),)
