"""From a spec to a loaded kernel: what is used, what is built, and what is raised when it cannot be."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kartifacts
from kartifacts.build import jit, kept, toolchains
from kartifacts.build.elf import inspect
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import nvcc, nvrtc
from kartifacts.cli.flows import shared
from kartifacts.errors import (
    AbiMismatch,
    ArtifactUnavailable,
    BuildError,
    ConfigError,
    KartifactsError,
    LoadError,
    MissingKernel,
    NoCompiler,
    StoreError,
)
from kartifacts.model.arch import check_toolkit, parse_arch
from kartifacts.model.digest import sha256
from kartifacts.model.spec import Spec
from kartifacts.runtime import host, lifecycle
from kartifacts.runtime.kernel import Kernel
from kartifacts.runtime.lifecycle import build_and_load
from tests.build.conftest import write_files
from tests.build.pythons import CUTEDSL, TRITON
from tests.conftest import Compiler, Content, Machine, MakeRelease, Released

ANSWER: dict[str, Any] = {"op": "demo/answer", "device": "cpu", "size": 1000}
OP: dict[str, Any] = {"op": "norm/rmsnorm", "device": "cpu", "dtype": "float32"}
NEVER_OPENS = "-Wl,-z,nodlopen"  # what the linker makes so, dlopen refuses


def spec_of(tiny: Path, arch: str = "") -> Spec:
    return open_library(tiny).spec("answer", {"size": 1000}, parse_arch(arch) if arch else host.cpu())


def answer_of(kernel: Kernel) -> object:
    return kernel()


@pytest.fixture
def published(tiny: Path, make_release: MakeRelease, tmp_path: Path) -> Released:
    """A release that holds the op of `tiny` for this CPU."""
    spec = spec_of(tiny)
    built = jit.build_one(spec, Machine(tmp_path / "publisher").settings())
    return make_release(
        Content(
            str(spec.arch),
            {spec.uri: built.path.read_bytes()},
            family="demo",
            library="tiny",
            op_digest=spec.op_digest,
            exports=("answer",),
        )
    )


# -- what is raised ----------------------------------------------------------------------------------------------------


def breaking(tiny: Path) -> None:
    (tiny / "demo/answer_cpu.cpp").write_text("int x = no_such_name;\n")


def test_a_spec_that_no_compiler_here_makes_is_a_config_error_and_nothing_is_compiled(
    machine: Machine, tiny: Path, compiler: Compiler
) -> None:
    other = "cpu:aarch64" if os.uname().machine == "x86_64" else "cpu:x86-64"
    with pytest.raises(ConfigError, match=f"demo/answer.* for {other} cannot be built"):
        build_and_load(spec_of(tiny, other), machine.settings(cxx=compiler.path))
    with pytest.raises(ConfigError, match="KARTIFACTS_CXX_FLAGS"):
        build_and_load(spec_of(tiny), machine.settings(cxx=compiler.path, cxx_flags="-o x"))
    with pytest.raises(ConfigError, match="KARTIFACTS_CXX_LAUNCHER"):
        build_and_load(spec_of(tiny), machine.settings(cxx=compiler.path, cxx_launcher="nothing-of-that-name"))
    assert compiler.compiled == 0


@pytest.mark.parametrize("policy", [{"jit": "never"}, {"offline": 1}])
def test_what_must_not_be_compiled_comes_with_the_spec_that_would_be(
    machine: Machine, tiny: Path, compiler: Compiler, policy: dict[str, Any]
) -> None:
    spec = spec_of(tiny)
    with pytest.raises(MissingKernel) as caught:
        build_and_load(spec, machine.settings(cxx=compiler.path, **policy))
    error = caught.value
    assert error.message.startswith(
        f"no usable kernel for demo/answer?size=1000 on {host.cpu()}, and compiling it is refused: "
    )
    assert (error.uri, error.arch, error.spec) == (spec.uri, str(spec.arch), spec)
    way_out = "KARTIFACTS_JIT=auto" if "jit" in policy else "KARTIFACTS_JIT=always"
    assert way_out in (error.hint or "")
    with pytest.raises(MissingKernel, match=rf"hint: .*{way_out}; or pin a release that holds it"):
        machine.registry(libraries=[tiny], **policy).load(**ANSWER)
    assert compiler.starts == 0
    sent = pickle.loads(pickle.dumps(error))  # as a test runner or a pool of processes does
    assert (str(sent), sent.spec) == (str(error), spec)
    assert answer_of(build_and_load(sent.spec, machine.settings(jit="always"))) == 7000


def test_without_a_compiler_every_place_searched_is_told(machine: Machine, tiny: Path) -> None:
    with pytest.raises(NoCompiler) as caught:
        build_and_load(spec_of(tiny), machine.settings(PATH="/nowhere"))
    assert caught.value.searched
    assert any(refusal.place == "built here before" for refusal in caught.value.refusals)


def test_a_compiler_that_fails_is_a_build_error_with_command_and_log(machine: Machine, tiny: Path) -> None:
    breaking(tiny)
    with pytest.raises(BuildError, match="no_such_name") as caught:
        build_and_load(spec_of(tiny), machine.settings())
    assert "answer_cpu.cpp" in caught.value.command
    assert "no_such_name" in Path(caught.value.log).read_text()


@pytest.mark.parametrize("jit", ["auto", "never"])
def test_a_workspace_that_cannot_be_used_stands_in_the_way_of_building_only(
    machine: Machine, tiny: Path, jit: str
) -> None:
    machine.workspace.mkdir()
    machine.workspace.chmod(0o777)
    kind = StoreError if jit == "auto" else MissingKernel
    with pytest.raises(kind) as caught:
        build_and_load(spec_of(tiny), machine.settings(jit=jit))
    assert str(machine.workspace) in str(caught.value)


def test_what_was_built_and_does_not_load_is_a_load_error(machine: Machine, tiny: Path) -> None:
    settings = machine.settings(cxx_flags=NEVER_OPENS)
    for _ in range(2):  # nothing remembers the failure
        with pytest.raises(LoadError, match="demo/answer"):
            build_and_load(spec_of(tiny), settings)
    assert answer_of(build_and_load(spec_of(tiny), machine.settings())) == 7000


# -- what is used ------------------------------------------------------------------------------------------------------


def test_a_process_loads_a_spec_once_and_another_finds_it_built(
    machine: Machine, tiny: Path, compiler: Compiler
) -> None:
    settings = machine.settings(cxx=compiler.path)
    kernel = build_and_load(spec_of(tiny), settings)
    assert (kernel.origin, kernel()) == ("jit", 7000)
    assert build_and_load(spec_of(tiny), settings) is kernel
    again = build_and_load(spec_of(tiny), machine.settings(cxx=compiler.path, retries=1))
    assert (again.origin, again.path) == ("built here before", kernel.path)
    (tiny / "include/scale.h").write_text("#define SCALE 8L\n")
    assert answer_of(build_and_load(spec_of(tiny), settings)) == 8000
    assert compiler.compiled == 2


def test_what_it_is_called_by_is_public(machine: Machine, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machine.environ({}).items():
        monkeypatch.setenv(name, value)
    assert kartifacts.build_and_load is build_and_load
    kernel = kartifacts.build_and_load(spec_of(tiny))
    assert kernel.path.is_relative_to(machine.workspace)


@pytest.mark.parametrize("here", [(0, 2), (1, 0), None])
def test_environments_that_share_a_workspace_take_no_kernel_of_another_abi(
    machine: Machine, tiny: Path, here: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.registry(libraries=[tiny]).load(**ANSWER)
    monkeypatch.setattr(host, "tvm_ffi", lambda: here)
    with pytest.raises(MissingKernel, match=r"built here before: needs tvm_ffi \d+\.\d+.*here"):
        machine.registry(libraries=[tiny], jit="never").load(**ANSWER)


def of_another_abi(content: bytes, needs: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    return content, {**needs, "tvm_ffi": "9.0"}


def of_a_newer_system(content: bytes, needs: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    return content, {**needs, "glibc": "99.0"}


def of_another_machine(content: bytes, needs: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """A home on a network, mounted by machines of two kinds that have the same GPU."""
    other = 183 if os.uname().machine == "x86_64" else 62
    return content[:18] + other.to_bytes(2, "little") + content[20:], needs


def that_does_not_load(content: bytes, needs: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    return content[:64] + bytes(len(content) - 64), needs


def put_beside(kernel: Kernel, change: Callable[[bytes, dict[str, str]], tuple[bytes, dict[str, str]]]) -> Path:
    """What somebody else, who shares the workspace, built later of the same sources for the same GPU or CPU."""
    said = json.loads(kernel.path.with_name("kernel.json").read_bytes())
    content, needs = change(kernel.path.read_bytes(), said["needs"])
    key = sha256(b"of another compiler")
    said |= {"key": key, "sha256": sha256(content), "size": len(content), "needs": needs}
    place = kernel.path.parent.with_name(key)
    place.mkdir()
    for path, data in ((place / "kernel.so", content), (place / "kernel.json", json.dumps(said).encode())):
        path.write_bytes(data)
        path.chmod(0o444)
    later = kernel.path.with_name("kernel.json").stat().st_mtime + 60
    os.utime(place / "kernel.json", (later, later))
    return place / "kernel.so"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_another_abi, "needs tvm_ffi 9.0; here it is"),
        (of_a_newer_system, "needs glibc 99.0; here it is"),
        (of_another_machine, f"this machine is {os.uname().machine}"),
        (that_does_not_load, "does not load"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_who_shares_a_workspace_loads_its_own_and_leaves_that_of_others(
    machine: Machine,
    tiny: Path,
    compiler: Compiler,
    change: Callable[[bytes, dict[str, str]], tuple[bytes, dict[str, str]]],
    words: str,
) -> None:
    own = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    other = put_beside(own, change)
    for policy in ("never", "auto"):
        kernel = machine.registry(libraries=[tiny], cxx=compiler.path, jit=policy).load(**ANSWER)
        assert (kernel.origin, kernel.path, kernel()) == ("built here before", own.path, 7000)
        looked_at = any(words in refusal.reason for refusal in kernel.refusals)
        assert looked_at == (policy == "never")  # else only what the compiler here has made
    assert compiler.compiled == 1

    shutil.rmtree(own.path.parent)
    with pytest.raises(MissingKernel, match=words):
        machine.registry(libraries=[tiny], jit="never").load(**ANSWER)
    kernel = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    assert (kernel.origin, kernel()) == ("jit", 7000)
    assert other.exists()


@pytest.fixture
def compilers(tmp_path: Path) -> list[Compiler]:
    """Two that make the same, and say that they are of other versions."""
    made = [Compiler(tmp_path / name) for name in ("first", "second")]
    for number, each in enumerate(made):
        each.first.write_text(f'[ "$1" = --version ] && echo "g++ (Test) {number}.0" && exit 0\n')
    return made


def test_what_another_compiler_made_is_compiled_again_beside_it(
    machine: Machine, tiny: Path, compilers: list[Compiler]
) -> None:
    first, second = compilers
    loaded = [machine.registry(libraries=[tiny], cxx=each.path).load(**ANSWER) for each in (first, second)]
    assert [kernel.origin for kernel in loaded] == ["jit", "jit"]
    assert loaded[0].path != loaded[1].path
    assert any("by the compiler that is here" in refusal.reason for refusal in loaded[1].refusals)
    starts = [each.starts for each in compilers]
    for each, kernel in zip(compilers, loaded, strict=True):
        again = machine.registry(libraries=[tiny], cxx=each.path).load(**ANSWER)
        assert (again.origin, again.path, again()) == ("built here before", kernel.path, 7000)
    assert [each.starts for each in compilers] == starts  # what they are is remembered


def test_a_compiler_that_was_replaced_compiles_again(machine: Machine, tiny: Path, compilers: list[Compiler]) -> None:
    """As the upgrade of a system does it, or a toolkit put in the place of another, with nothing named by anyone."""
    first, second = compilers
    path = f"{first.path.parent}:{os.environ['PATH']}"
    before = machine.registry(libraries=[tiny], PATH=path).load(**ANSWER)
    first.path.write_text(second.path.read_text())
    after = machine.registry(libraries=[tiny], PATH=path).load(**ANSWER)
    assert (before.origin, after.origin, second.compiled) == ("jit", "jit", 1)


def install(place: Path, version: str, *names: str, files: dict[str, str]) -> None:
    """Lay the distributions `names` of this version into a directory, as a wheel is unpacked."""
    for name in names:
        for old in place.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        notes = place / f"{name}-{version}.dist-info"
        notes.mkdir(parents=True)
        (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (notes / "RECORD").write_text("".join(f"{file},sha256={version},9\n" for file in files))
    for file, content in files.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(content)


PACKAGES: dict[str, tuple[list[str], dict[str, str], dict[str, str], dict[str, str]]] = {
    "triton": (
        ["triton"],
        {"triton/backends/nvidia/compiler.py": "def get_ptxas(arch):\n    return knobs.nvidia.ptxas\n"},
        TRITON,
        {"dtype": "float32", "block": "128"},
    ),
    "cutedsl": (
        [f"nvidia_cutlass_dsl{part}" for part in ("", "_libs_base", "_libs_core", "_libs_cu13")],
        {"nvidia_cutlass_dsl/cu13/lib/libcuda_dialect_runtime_static.a": ""},
        CUTEDSL,
        {"dtype": "float32"},
    ),
}


@pytest.mark.parametrize("kind", PACKAGES)
def test_what_another_version_of_a_compiler_in_python_made_is_not_used(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kind: str
) -> None:
    names, files, sources, axes = PACKAGES[kind]
    if kind == "cutedsl":  # whose kernels are linked with a CUDA runtime
        request.getfixturevalue("toolkit")
    spec = open_library(write_files(tmp_path / "pylib", sources)).spec("scale", axes, parse_arch("9.0a"))
    settings, packages = machine.settings(), tmp_path / "packages"
    monkeypatch.syspath_prepend(packages)
    imported = set(sys.modules)

    def usable(policy: str = "auto") -> list[str]:
        found = lifecycle.usable(spec, replace(settings, jit=policy), [])
        return [built.toolchain["version"] for built in found]

    versions = ("97.0", "98.0")
    for version in versions:
        install(packages, version, *names, files=files)
        assert usable() == []
        made_with = toolchains.find(kind, settings).made_with(spec)
        content = b"no kernel, and never loaded here"
        said = kept.Record(
            uri=spec.uri,
            arch=str(spec.arch),
            key=spec.key(made_with),
            op_digest=spec.op_digest,
            sha256=sha256(content),
            size=len(content),
            exports=[],
            needs={},
            parts=spec.key_parts(made_with),
            suffix=".cubin",
        )
        staged = tmp_path / version
        staged.mkdir()
        (staged / "kernel.cubin").write_bytes(content)
        kept.keep(staged, machine.workspace, spec, said)
        assert usable() == [version]
    install(packages, "97.0", *names, files=files)
    assert usable() == ["97.0"]
    assert sorted(usable("never")) == sorted(versions)
    assert not {"triton", "cutlass", "torch"} & (set(sys.modules) - imported)


@pytest.mark.parametrize("policy", [{"jit": "never"}, {"offline": 1}, {"PATH": "/nowhere"}], ids=str)
def test_where_nothing_can_be_compiled_what_another_compiler_made_is_used_and_explain_says_so(
    machine: Machine, tiny: Path, compilers: list[Compiler], policy: dict[str, Any]
) -> None:
    first, second = compilers
    made = machine.registry(libraries=[tiny], cxx=first.path).load(**ANSWER)
    registry = machine.registry(libraries=[tiny], **({} if "PATH" in policy else {"cxx": second.path}), **policy)
    kernel = registry.load(**ANSWER)
    assert (kernel.origin, kernel.path, kernel()) == ("built here before", made.path, 7000)
    [said] = [row.reason for row in registry.explain(**ANSWER) if row.reason.startswith("fits: ")]
    assert "by cxx gcc (Test) 0.0" in said
    assert ("no such compiler is here" if "PATH" in policy else "another compiler than is here") in said
    assert second.compiled == 0
    own = machine.registry(libraries=[tiny], cxx=first.path, jit="never").explain(**ANSWER)
    assert [f"fits: {made.path}"] == [row.reason for row in own if row.reason.startswith("fits: ")]


@pytest.mark.parametrize("named", ["/nonexistent/g++", "no-such-compiler", "/bin/true", "/bin/false"])
def test_a_compiler_that_was_named_and_is_none_is_an_error_whatever_was_kept(
    machine: Machine, tiny: Path, published: Released, named: str
) -> None:
    machine.registry(libraries=[tiny]).load(**ANSWER)
    with pytest.raises(NoCompiler, match="KARTIFACTS_CXX"):
        machine.registry(libraries=[tiny], cxx=named).load(**ANSWER)
    kept = machine.registry(libraries=[tiny], cxx=named, jit="never").load(**ANSWER)
    assert kept.origin == "built here before"
    settings: dict[str, Any] = {"lock": published.lock_file, "mirrors": published.path}
    fetched = machine.registry(libraries=[tiny], cxx=named, **settings).load(**ANSWER)
    assert fetched.origin == f"file://{published.path}"


def test_a_workspace_that_is_only_read_gives_what_any_compiler_made(
    machine: Machine, tiny: Path, compilers: list[Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = compilers
    made = machine.registry(libraries=[tiny], cxx=first.path).load(**ANSWER)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != machine.workspace)  # root may write anywhere
    kernel = machine.registry(libraries=[tiny], cxx=second.path).load(**ANSWER)
    assert (kernel.origin, kernel.path) == ("built here before", made.path)


def test_a_kept_kernel_of_our_own_key_that_needs_more_than_is_here_is_built_again(machine: Machine, tiny: Path) -> None:
    """As a container with an older system may have the very same compiler."""
    kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    record = kernel.path.with_name("kernel.json")
    said = json.loads(record.read_bytes())
    record.chmod(0o644)
    record.write_text(json.dumps({**said, "needs": {"glibc": "99.0"}}))
    record.chmod(0o444)
    kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    assert (kernel.origin, kernel()) == ("jit", 7000)
    assert json.loads(record.read_bytes())["needs"] == said["needs"]


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolkit")
@pytest.mark.parametrize(
    ("first", "second", "archs"), [("8.9", "8.6", ["8.9", "8.6"]), ("12.0", "12.1", ["12.0f", "12.1a"])]
)
def test_each_of_two_different_gpus_gets_a_kernel_compiled_for_it(
    machine: Machine, gpus: Callable[..., None], first: str, second: str, archs: list[str]
) -> None:
    gpus(first, second)
    assert [str(arch) for arch in shared.native("native")[:2]] == archs
    op: dict[str, Any] = {"op": "norm/rmsnorm", "dtype": "float32"}
    for device, arch in (("cuda:0", archs[0]), ("cuda:1", archs[1]), ("cuda", archs[0])):
        if device == "cuda:1":  # what there is for the first is not for the second, not even for want of a better one
            with pytest.raises(MissingKernel, match=f"nothing for {arch}"):
                machine.registry(jit="never").load(device=device, **op)
        kernel = machine.registry().load(device=device, **op)
        assert [str(kernel.arch)] == [str(found) for found in inspect(kernel.path).archs] == [arch]
        assert (kernel.origin == "jit") == (device != "cuda")


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolkit")
@pytest.mark.parametrize(
    ("device", "toolkit", "arch"), [("12.0", (12, 8), "12.0a"), ("12.0", (12, 9), "12.0f"), ("9.0", (12, 0), "9.0a")]
)
def test_an_older_toolkit_builds_what_it_can_for_the_device(
    machine: Machine,
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    toolkit: tuple[int, int],
    arch: str,
) -> None:
    """CUDA 12.8 brought 12.0, and family-specific code came with 12.9."""
    gpus(device)
    op: dict[str, Any] = {"op": "norm/rmsnorm", "dtype": "float32", "device": "cuda"}
    older(monkeypatch, toolkit)
    assert any(f" for {arch} " in row.reason for row in machine.registry().explain(**op) if row.place == "JIT")
    kernel = machine.registry().load(**op)
    assert (kernel.origin, str(kernel.arch)) == ("jit", arch)
    for policy in ("auto", "never"):
        again = machine.registry(jit=policy).load(**op)
        assert again.path == kernel.path


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolkit")
@pytest.mark.parametrize(
    ("device", "toolkit", "words"),
    [
        ("12.0", (12, 6), ["12.0f cannot be built with CUDA 12.6", "needs CUDA >= 12.9"]),
        ("12.1", (12, 8), ["12.1a cannot be built with CUDA 12.8", "needs CUDA >= 12.9"]),
        ("10.3", (12, 8), ["10.3a cannot be built with CUDA 12.8", "needs CUDA >= 12.9"]),
    ],
)
def test_a_gpu_that_is_newer_than_the_toolkit_is_told_with_both_and_the_rule(
    machine: Machine,
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    toolkit: tuple[int, int],
    words: list[str],
) -> None:
    gpus(device)
    older(monkeypatch, toolkit)
    op: dict[str, Any] = {"op": "norm/rmsnorm", "dtype": "float32", "device": "cuda"}
    for compiler in ("nvrtc", "nvcc"):
        registry = machine.registry(cuda_compiler=compiler)
        with pytest.raises(ConfigError) as caught:
            registry.load(**op)
        for said in (str(caught.value), " ".join(map(str, registry.explain(**op)))):
            assert all(word in said for word in words)
            assert "7.5" not in said  # it is not too old


def older(monkeypatch: pytest.MonkeyPatch, release: tuple[int, int]) -> None:
    """Have the rules of an older CUDA decide what the toolkit of this machine may build."""
    monkeypatch.setattr(nvcc, "check_toolkit", lambda arch, _: check_toolkit(arch, release))
    monkeypatch.setattr(nvrtc, "check_toolkit", lambda arch, _: check_toolkit(arch, release))


# -- what was kept and is of no use ------------------------------------------------------------------------------------


def make_unloadable(machine: Machine, tiny: Path, scratch: Machine) -> Path:
    """Put a sound record of a file that does not load where the kernel of `machine` is kept."""
    kernel = jit.build_one(spec_of(tiny), machine.settings())  # and not loaded, as dlopen remembers by path
    with pytest.raises(LoadError):
        scratch.registry(libraries=[tiny], cxx_flags=NEVER_OPENS).load(**ANSWER)
    [other] = scratch.workspace.rglob("kernel.so")
    content = other.read_bytes()
    record = kernel.path.with_name("kernel.json")
    said = json.loads(record.read_bytes())
    said |= {"sha256": sha256(content), "size": len(content)}
    for path, data in ((kernel.path, content), (record, json.dumps(said).encode())):
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o444)
    return kernel.path


@pytest.fixture
def unloadable(machine: Machine, tiny: Path, tmp_path: Path) -> Path:
    return make_unloadable(machine, tiny, Machine(tmp_path / "scratch"))


def test_a_kept_kernel_that_does_not_load_is_built_again_once(
    machine: Machine, tiny: Path, unloadable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    assert (kernel.origin, kernel()) == ("jit", 7000)
    assert str(unloadable.parent) in caplog.text
    assert any("does not load" in refusal.reason for refusal in kernel.refusals)
    assert machine.registry(libraries=[tiny]).load(**ANSWER).origin == "built here before"


@pytest.mark.parametrize("policy", [{"jit": "never"}, {"offline": 1}])
def test_a_kept_kernel_that_does_not_load_stays_where_nothing_may_be_built(
    machine: Machine, tiny: Path, unloadable: Path, policy: dict[str, Any]
) -> None:
    before = unloadable.read_bytes()
    with pytest.raises(MissingKernel, match=r"built here before: .*does not load"):
        machine.registry(libraries=[tiny], **policy).load(**ANSWER)
    assert unloadable.read_bytes() == before


def test_a_kept_kernel_that_does_not_load_does_not_keep_a_mirror_from_being_asked(
    machine: Machine, tiny: Path, unloadable: Path, published: Released
) -> None:
    assert unloadable.exists()
    registry = machine.registry(libraries=[tiny], jit="never", lock=published.lock_file, mirrors=published.path)
    kernel = registry.load(**ANSWER)
    assert (kernel.origin, kernel()) == (f"file://{published.path}", 7000)


# -- no disk cache -----------------------------------------------------------------------------------------------------


def kept_in(machine: Machine) -> list[Path]:
    return sorted(path for name in ("kernels", "objects") for path in (machine.workspace / name).rglob("*"))


def test_without_the_disk_cache_nothing_kept_is_used_and_nothing_is_kept_and_it_is_said(
    machine: Machine, tiny: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    before = kept_in(machine)
    code = """
import logging, sys
from pathlib import Path
from kartifacts import Registry
logging.basicConfig(level=logging.WARNING)
kernel = Registry(libraries=[Path(sys.argv[1])]).load("demo/answer", device="cpu", size=1000)
print(kernel.origin, kernel())
"""
    for number in range(2):
        answer = machine.python(code, tiny, cxx=compiler.path, disk_cache="off")
        assert answer.out.split() == ["jit", "7000"], answer.err
        assert answer.err.count("KARTIFACTS_DISK_CACHE=off") == 2  # not looked for, not kept
        assert compiler.compiled == 2 + number
    assert kept_in(machine) == before
    assert list(machine.workspace.glob("staging/*")) == []
    assert machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER).origin == "built here before"


def test_without_the_disk_cache_published_kernels_are_used_as_ever(
    machine: Machine, tiny: Path, published: Released, compiler: Compiler
) -> None:
    settings: dict[str, Any] = {"path": published.path, "lock": published.lock_file, "cxx": compiler.path}
    registry = machine.registry(libraries=[tiny], disk_cache="off", jit="never", **settings)
    assert registry.load(**ANSWER).origin == str(published.path)
    assert compiler.starts == 0


def test_without_the_disk_cache_and_a_compiler_forbidden_what_was_built_is_missing(
    machine: Machine, tiny: Path
) -> None:
    machine.registry(libraries=[tiny]).load(**ANSWER)
    with pytest.raises(MissingKernel, match="not looked at: KARTIFACTS_DISK_CACHE=off"):
        machine.registry(libraries=[tiny], disk_cache="off", jit="never").load(**ANSWER)
    rows = machine.registry(libraries=[tiny], disk_cache="off").explain(**ANSWER)
    assert any("KARTIFACTS_DISK_CACHE=off" in row.reason for row in rows)
    assert not any("nearest" in row.reason for row in rows)  # it would be the very same


def test_without_the_disk_cache_the_log_of_a_failure_stays(machine: Machine, tiny: Path) -> None:
    breaking(tiny)
    code = """
import sys
from pathlib import Path
from kartifacts import Registry
from kartifacts.errors import BuildError
try:
    Registry(libraries=[Path(sys.argv[1])]).load("demo/answer", device="cpu", size=1000)
except BuildError as error:
    print(error.log)
    assert error.log in str(error), error
"""
    answer = machine.python(code, tiny, disk_cache="off")
    assert answer.code == 0, answer.err
    assert "no_such_name" in Path(answer.out.strip()).read_text()
    assert Path(answer.out.strip()).parent == machine.workspace / "logs"


# -- compiled otherwise than published kernels are ---------------------------------------------------------------------

OTHERWISE = [{"debug": 1}, {"lineinfo": 1}, {"cxx_flags": "-O2"}, {"cuda_flags": "-DX"}]


@pytest.mark.parametrize("asked", OTHERWISE, ids=lambda asked: next(iter(asked)))
def test_who_asks_for_other_flags_gets_no_published_kernel_and_is_told_why(
    machine: Machine, tiny: Path, published: Released, asked: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"libraries": [tiny], "path": published.path, "lock": published.lock_file}
    kernel = machine.registry(**settings, **asked).load(**ANSWER)
    name = f"KARTIFACTS_{next(iter(asked)).upper()}"
    assert (kernel.origin, kernel()) == ("jit", 7000)
    for rows in (kernel.refusals, machine.registry(**settings, **asked).explain(**ANSWER)):
        assert any(row.place == "published kernels" and name in row.reason for row in rows)
    assert machine.registry(**settings).load(**ANSWER).origin == str(published.path)


def test_an_op_without_sources_can_only_be_had_as_it_is_published(
    machine: Machine, make_release: MakeRelease, tiny: Path
) -> None:
    kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    uri = "closed/secret?mode=fast"
    content = Content(
        str(kernel.arch), {uri: kernel.path.read_bytes()}, family="closed", library="closed", op_digest="",
        exports=("answer",),
    )  # fmt: skip
    made = make_release(content)
    registry = machine.registry(path=made.path, lock=made.lock_file, debug=1)
    assert registry.load("closed/secret", device="cpu", mode="fast")() == 7000


# -- what is nearest ---------------------------------------------------------------------------------------------------


def change_a_flag(tiny: Path, machine: Machine) -> dict[str, Any]:
    path = tiny / "demo/op.toml"
    path.write_text(path.read_text().replace('toolchain = "cxx"\n', 'toolchain = "cxx"\nflags = ["-O2"]\n'))
    return {}


def change_a_header(tiny: Path, machine: Machine) -> dict[str, Any]:
    (tiny / "include/scale.h").write_text("#define SCALE 9L\n")
    return {}


def change_the_macro(tiny: Path, machine: Machine) -> dict[str, Any]:
    path = tiny / "demo/op.toml"
    path.write_text(path.read_text().replace("KART_SIZE=1000", "KART_SIZE=1001"))
    return {}


def ask_for_symbols(tiny: Path, machine: Machine) -> dict[str, Any]:
    return {"debug": 1}


def take_another_compiler(tiny: Path, machine: Machine) -> dict[str, Any]:
    other = machine.home / "g++"
    other.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ (Other) 99.9" && exit\nexec /usr/bin/env g++ "$@"\n')
    other.chmod(0o755)
    return {"cxx": other, "lineinfo": 0, "cxx_flags": "-DX"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_a_flag, ["flags (none there, -O2 here)"]),
        (change_a_header, ["sources include/scale.h (other content)"]),
        (change_the_macro, ["defines (KART_SIZE=1000 there, KART_SIZE=1001 here)"]),
        (ask_for_symbols, ["compiler overrides (none there, -g -O0 here)"]),
        (take_another_compiler, ["compiler version (gcc ", "compiler overrides"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_explain_names_the_part_in_which_what_was_built_here_differs(
    machine: Machine, tiny: Path, change: Callable[[Path, Machine], dict[str, Any]], words: list[str]
) -> None:
    first = machine.registry(libraries=[tiny]).load(**ANSWER)
    assert any("fits" in row.reason for row in machine.registry(libraries=[tiny]).explain(**ANSWER))
    rows = machine.registry(libraries=[tiny], **change(tiny, machine)).explain(**ANSWER)
    [nearest] = [row.reason for row in rows if "nearest" in row.reason]
    assert str(first.path.parent) in nearest
    for word in words:
        assert word in nearest


def test_where_nothing_of_the_kind_was_built_nothing_is_nearest(machine: Machine, tiny: Path) -> None:
    rows = machine.registry(libraries=[tiny]).explain(**ANSWER)
    assert not any("nearest" in row.reason for row in rows)
    machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=1)
    assert not any("nearest" in row.reason for row in machine.registry(libraries=[tiny]).explain(**ANSWER))


def test_a_damaged_record_is_no_obstacle_to_explaining(machine: Machine, tiny: Path) -> None:
    kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    change_a_header(tiny, machine)
    record = kernel.path.with_name("kernel.json")
    for content in (b"", b"[]", b'{"uri": "demo/answer?size=1000"}', b'{"uri": "demo/answer?size=1000", "parts": 3}'):
        record.chmod(0o644)
        record.write_bytes(content)
        assert machine.registry(libraries=[tiny]).explain(**ANSWER)


# -- artifacts that ask for what is not here ---------------------------------------------------------------------------

ASKS = (
    '#include <tvm/ffi/c_api.h>\nextern "C" int kart_nowhere(int);\n'
    'extern "C" __attribute__((visibility("default"))) int __tvm_ffi_rmsnorm(void*, const TVMFFIAny*, int32_t,\n'
    "    TVMFFIAny* result) { result->type_index = kTVMFFIInt; result->v_int64 = kart_nowhere(1); return 0; }\n"
)


def compile_so(folder: Path, name: str, text: str, *flags: str) -> Path:
    import tvm_ffi

    source, out = folder / f"{name}.cpp", folder / name
    source.write_text(text)
    include = Path(tvm_ffi.__file__).parent / "include"
    subprocess.run(
        ["g++", "-shared", "-fPIC", f"-I{include}", source, "-o", out, *flags], check=True, capture_output=True
    )
    return out


@pytest.fixture
def asking(tmp_path: Path) -> dict[str, Path]:
    """Files that ask for a symbol, a version or a library that is not there; each was once linked in good faith."""
    lib = tmp_path / "lib"
    lib.mkdir()
    define = 'extern "C" int kart_nowhere(int x) { return x; }\n'
    (lib / "v.map").write_text("KART_9.9 { global: kart_nowhere; };\n")
    compile_so(lib, "libkart_old.so", define, f"-Wl,--version-script={lib / 'v.map'}")
    compile_so(lib, "libkart_gone.so", define)
    asks = {
        "symbol": compile_so(tmp_path, "symbol.so", ASKS),
        "version": compile_so(tmp_path, "version.so", ASKS, f"-L{lib}", "-lkart_old", f"-Wl,-rpath,{lib}"),
        "library": compile_so(tmp_path, "library.so", ASKS, f"-L{lib}", "-lkart_gone"),
    }
    compile_so(lib, "libkart_old.so", 'extern "C" int kart_other(int x) { return x; }\n')
    return asks


@pytest.mark.parametrize(
    ("kind", "wanted"), [("symbol", "kart_nowhere"), ("version", "KART_9.9"), ("library", "libkart_gone.so")]
)
def test_what_an_artifact_lacks_here_is_named_before_any_of_its_code_runs(
    asking: dict[str, Path], kind: str, wanted: str
) -> None:
    with pytest.raises(AbiMismatch, match=wanted) as caught:
        Kernel("norm/rmsnorm", parse_arch("cpu:x86-64"), asking[kind], "store", ("rmsnorm",))
    assert wanted in caught.value.wanted


@pytest.mark.parametrize("kind", ["symbol", "library"])
def test_a_published_kernel_that_does_not_belong_here_is_passed_over_for_the_compiler(
    machine: Machine, make_release: MakeRelease, asking: dict[str, Path], kind: str
) -> None:
    uri = "norm/rmsnorm?dtype=float32"
    made = make_release(Content(str(host.cpu()), {uri: asking[kind].read_bytes()}))
    settings: dict[str, Any] = {"path": made.path, "lock": made.lock_file}
    kernel = machine.registry(**settings).load(**OP)
    assert kernel.origin == "jit"
    assert any("kart_" in refusal.reason for refusal in kernel.refusals)
    lacking = Machine(machine.home / "other").registry(jit="never", **settings)
    with pytest.raises(MissingKernel, match="kart_"):
        lacking.load(**OP)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is one arch of this kind of CPU")
def test_of_two_published_kernels_the_one_that_belongs_here_is_taken(
    machine: Machine, make_release: MakeRelease, asking: dict[str, Path], tiny: Path
) -> None:
    sound = jit.build_one(spec_of(tiny), machine.settings()).path.read_bytes()
    notes: dict[str, Any] = {"family": "closed", "library": "closed", "op_digest": "", "exports": ("answer",)}
    better, plain = str(host.cpu()), "cpu:x86-64"
    made = make_release(
        Content(better, {"closed/x": asking["symbol"].read_bytes()}, **notes),
        Content(plain, {"closed/x": sound}, **notes),
    )
    kernel = machine.registry(path=made.path, lock=made.lock_file).load("closed/x", device="cpu")
    assert (str(kernel.arch), kernel()) == (plain, 7000)


def test_without_sources_what_does_not_belong_here_is_told_with_the_symbol(
    machine: Machine, make_release: MakeRelease, asking: dict[str, Path]
) -> None:
    content = Content(
        str(host.cpu()), {"closed/x": asking["symbol"].read_bytes()}, "closed", library="closed", op_digest=""
    )
    made = make_release(content)
    with pytest.raises(ArtifactUnavailable, match="kart_nowhere"):
        machine.registry(path=made.path, lock=made.lock_file).load("closed/x", device="cpu")


# -- misses ------------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_miss_and_each_compilation_is_written_down_with_the_test_that_had_it(
    machine: Machine, tiny: Path, tmp_path: Path
) -> None:
    misses = tmp_path / "misses"
    for jit_policy, outcome in (("never", "refused"), ("auto", "compiled")):
        registry = machine.registry(libraries=[tiny], misses=misses, jit=jit_policy)
        try:
            registry.load(**ANSWER)
        except MissingKernel:
            assert outcome == "refused"
        line = lines_of(misses)[-1]
        assert (line["missing"], line["arch"], line["outcome"]) == (spec_of(tiny).uri, str(host.cpu()), outcome)
        assert line["test"].endswith("::test_each_miss_and_each_compilation_is_written_down_with_the_test_that_had_it")
        assert (line["pid"], line["op_digest"]) == (os.getpid(), spec_of(tiny).op_digest)
    machine.registry(libraries=[tiny], misses=misses, jit="never").load(**ANSWER)  # it is here now: no miss
    assert len(lines_of(misses)) == 2
    breaking(tiny)
    with pytest.raises(BuildError):
        machine.registry(libraries=[tiny], misses=misses).load(**ANSWER)
    assert lines_of(misses)[-1]["outcome"] == "failed"


def test_many_processes_write_whole_lines(machine: Machine, tiny: Path, tmp_path: Path) -> None:
    misses = tmp_path / "misses"
    code = """
import sys
from pathlib import Path
from kartifacts import Registry
from kartifacts.errors import MissingKernel
registry = Registry(libraries=[Path(sys.argv[1])])
for number in range(100):
    try:
        registry.load("demo/answer", device="cpu", size=(1, 1000)[number % 2])
    except MissingKernel:
        pass
"""
    environ = machine.environ({"misses": misses, "jit": "never"})
    command = [sys.executable, "-c", code, str(tiny)]
    running = [subprocess.Popen(command, env=environ, cwd=machine.home) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    lines = lines_of(misses)
    assert len(lines) == 400
    assert {line["pid"] for line in lines} == {process.pid for process in running}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


@pytest.mark.parametrize("spoil", [Path.mkdir, make_pipe, make_below_a_file, lambda path: path.symlink_to(path)])
def test_a_file_that_takes_no_misses_never_fails_a_load(
    machine: Machine, tiny: Path, tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    misses = tmp_path / "logs" / "misses"
    misses.parent.mkdir()
    spoil(misses)
    with caplog.at_level(logging.WARNING):
        assert machine.registry(libraries=[tiny], misses=misses).load(**ANSWER)() == 7000
    assert f"KARTIFACTS_MISSES: cannot write to {misses}" in caplog.text


def test_kinds_of_failure_are_told_apart_by_class_alone() -> None:
    kinds = [ConfigError, MissingKernel, BuildError, StoreError, LoadError]
    for one in kinds:
        assert issubclass(one, KartifactsError)
        assert not any(issubclass(one, other) for other in kinds if other is not one)
    assert issubclass(NoCompiler, BuildError)
