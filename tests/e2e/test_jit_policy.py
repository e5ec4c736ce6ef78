"""When a compiler is started, when it must not be, and what is said if there is none."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import (
    ArtifactUnavailable,
    ConfigError,
    KartifactsError,
    MissingKernel,
    NoCompiler,
    VerificationError,
)
from kartifacts.runtime import host
from kartifacts.testing import Mirror, faults
from tests.conftest import Compiler, Content, Machine, MakeRelease, Released

ANSWER: dict[str, Any] = {"op": "demo/answer", "device": "cpu", "size": 1000}
OP: dict[str, Any] = {"op": "norm/rmsnorm", "device": "cpu", "dtype": "float32"}
DEAD = "http://127.0.0.1:9"
LOAD_OR_NO_COMPILER = """
import time
import kartifacts
from kartifacts.errors import KartifactsError, NoCompiler
try:
    kernel = kartifacts.load("norm/rmsnorm", device="cpu", dtype="float32")
    result = ["loaded", kernel.origin, ""]
except NoCompiler as error:
    result = ["NoCompiler", [str(place) for place in error.searched], str(error), time.process_time()]
"""


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", ["nothing", "unreachable"])
@pytest.mark.parametrize("offline", [0, 1])
@pytest.mark.parametrize(("jit", "compiles"), [("auto", (True, False)), ("always", (True, True)), ("never", (0, 0))])
def test_what_is_nowhere_is_compiled_only_as_the_policy_says(
    machine: Machine,
    tiny: Path,
    compiler: Compiler,
    released: Released,
    jit: str,
    offline: int,
    compiles: tuple[bool, bool],
    published: str,
) -> None:
    settings = {"jit": jit, "offline": offline, "cxx": compiler.path, "retries": 0}
    if published == "unreachable":
        settings |= {"lock": released.lock_file, "mirrors": DEAD}
    registry = machine.registry(libraries=[tiny], **settings)
    if compiles[offline]:
        kernel = registry.load(**ANSWER)
        assert (kernel.origin, kernel()) == ("jit", 7000)
        assert machine.registry(libraries=[tiny], **settings).load(**ANSWER).origin == "built here before"
        assert compiler.compiled == 1
    else:
        with pytest.raises(MissingKernel, match="KARTIFACTS_JIT") as caught:
            registry.load(**ANSWER)
        assert compiler.starts == 0
        assert (caught.value.uri, caught.value.arch) == ("demo/answer?size=1000", str(host.cpu()))


def test_what_was_built_here_before_is_loaded_under_any_policy(
    machine: Machine, tiny: Path, compiler: Compiler
) -> None:
    machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    starts = compiler.starts
    for settings in ({"jit": "never"}, {"offline": 1}, {"PATH": "", "cxx": None}):
        kernel = machine.registry(libraries=[tiny], **{"cxx": compiler.path, **settings}).load(**ANSWER)
        assert (kernel.origin, kernel()) == ("built here before", 7000)
    assert compiler.starts == starts


def test_a_prebuilt_kernel_starts_no_compiler_even_where_it_always_may(
    machine: Machine, released: Released, compiler: Compiler
) -> None:
    settings: dict[str, Any] = {"path": released.path, "lock": released.lock_file, "cxx": compiler.path}
    assert machine.registry(jit="always", **settings).load(**OP).origin == str(released.path)
    assert compiler.starts == 0


@pytest.mark.parametrize("value", ["sometimes", "1", "yes", "0", "off"])
def test_a_policy_that_does_not_exist_is_refused(machine: Machine, value: str) -> None:
    with pytest.raises(ConfigError, match=r"KARTIFACTS_JIT.*auto, always, never"):
        machine.registry(jit=value)


def test_why_the_compiler_was_chosen_is_logged_and_explained_alike(
    machine: Machine, tiny: Path, released: Released, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": DEAD, "retries": 0}
    explained = [str(row) for row in machine.registry(libraries=[tiny], **settings).explain(**ANSWER)]
    with caplog.at_level(logging.INFO, logger="kartifacts"):
        kernel = machine.registry(libraries=[tiny], **settings).load(**ANSWER)
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("compiling")]
    assert "demo/answer?size=1000" in line
    assert "Connection refused" in line
    assert "built here before: nothing" in line
    for refusal in kernel.refusals:
        assert str(refusal) in line
        assert refusal.place in "\n".join(explained)
    assert any(row.startswith("JIT: would compile demo/answer?size=1000") for row in explained)


# -- wrong bytes are never answered by compiling -----------------------------------------------------------------------


def parts_of(released: Released) -> dict[str, str]:
    """Digest of each kind of blob that the load of OP needs: release, manifest, table, pack."""
    from kartifacts.publish.repository import Repository

    repository = Repository(released.path)
    [pin] = released.lock.releases
    [bundle] = [
        each
        for each in repository.release(pin).manifests
        if each.note("family") == "norm" and each.note("arch") == str(released.best)
    ]
    manifest = repository.bundle(bundle)
    return {
        "release": pin.sha256,
        "manifest": bundle.sha256,
        "table": manifest.config.sha256,
        "pack": manifest.layers[0].sha256,
    }


@pytest.mark.parametrize("jit", ["auto", "always"])
@pytest.mark.parametrize("part", ["release", "manifest", "table", "pack"])
@pytest.mark.parametrize("fault", [faults.flip(at=40), faults.html()], ids=["flipped", "login-page"])
def test_wrong_bytes_everywhere_are_an_error_and_no_compiler_is_started(
    machine: Machine, released: Released, compiler: Compiler, part: str, fault: faults.Fault, jit: str
) -> None:
    with Mirror(released.path) as mirror:
        mirror.order(fault, match=parts_of(released)[part])
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "cxx": compiler.path}
        registry = machine.registry(jit=jit, retries=1, **settings)
        with pytest.raises(VerificationError) as caught:
            registry.load(**OP)
        assert mirror.url in str(caught.value)
        assert compiler.starts == 0
        assert not list(machine.store.rglob("*.so"))
        mirror.cancel()
        assert registry.load(**OP).origin == mirror.url  # the same process recovers once the mirror does


def test_what_was_built_here_before_does_not_answer_wrong_bytes_either(
    machine: Machine, released: Released, tmp_path: Path
) -> None:
    assert machine.registry().load(**OP).origin == "jit"
    shutil.copytree(released.path, tmp_path / "image")
    for digest in parts_of(released).values():
        blob = tmp_path / "image/blobs/sha256" / digest
        blob.write_bytes(bytes(blob.stat().st_size))
        with pytest.raises(VerificationError, match=digest):
            machine.registry(path=tmp_path / "image", lock=released.lock_file).load(**OP)
        shutil.copy(released.path / "blobs/sha256" / digest, blob)


@pytest.mark.parametrize("part", ["release", "manifest", "table", "pack"])
def test_switching_verification_off_does_not_let_wrong_bytes_of_a_mirror_in(
    machine: Machine, released: Released, part: str
) -> None:
    with Mirror(released.path) as mirror:
        mirror.order(faults.flip(at=40), match=parts_of(released)[part])
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "retries": 0}
        with pytest.raises(VerificationError):
            machine.registry(verify="off", **settings).load(**OP)


@pytest.mark.parametrize("part", ["release", "manifest", "table", "pack"])
def test_wrong_bytes_of_one_mirror_are_answered_by_the_next(machine: Machine, released: Released, part: str) -> None:
    with Mirror(released.path) as bad, Mirror(released.path) as good:
        bad.order(faults.flip(at=40), match=parts_of(released)[part])
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": f"{bad.url} {good.url}"}
        kernel = machine.registry(jit="never", **settings).load(**OP)
        assert kernel.origin == (good.url if part == "pack" else bad.url)


def test_explain_says_that_wrong_bytes_stand_in_the_way_of_the_compiler(machine: Machine, released: Released) -> None:
    with Mirror(released.path) as mirror:
        mirror.order(faults.flip(at=40), match=parts_of(released)["table"])
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "retries": 0}
        rows = machine.registry(**settings).explain(**OP)
    assert "never answered by compiling" in str(rows[-1])
    assert any(parts_of(released)["table"] in str(row) for row in rows)


def test_a_damaged_release_of_another_library_is_not_in_the_way_of_what_is_pinned_beside_it(
    machine: Machine, released: Released, make_release: MakeRelease, tmp_path: Path
) -> None:
    other = make_release(Content("any", {"stranger/x.cubin": b"x"}, "stranger", "none", "aaa", op_digest=""))
    lock = tmp_path / "both.lock"
    for repository in (other.path, released.path):
        assert machine.cli("lock", repository, "--out", lock).code == 0
    shutil.copytree(other.path, tmp_path / "served")
    shutil.copytree(released.path / "blobs", tmp_path / "served/blobs", dirs_exist_ok=True)
    with Mirror(tmp_path / "served") as mirror:
        mirror.order(faults.flip(), match=other.lock.releases[0].sha256)
        settings: dict[str, Any] = {"lock": lock, "mirrors": mirror.url, "retries": 0}
        assert machine.registry(**settings).load(**OP).origin == mirror.url
        with pytest.raises(VerificationError):  # but what the damaged release may hold is not compiled instead
            machine.registry(**settings).load("stranger/y", dtype="float32")


# -- locks -------------------------------------------------------------------------------------------------------------

PIN = {"library": "kartifacts", "version": "1.0", "sha256": "0" * 64, "size": 10}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"version": 1}',
        b'{"version": 2, "releases": []}',
        b'{"version": 1, "releases": [], "version": 1}',
        json.dumps({"version": 1, "releases": [PIN, PIN]}).encode(),
        json.dumps({"version": 1, "releases": [{**PIN, "sha256": "0" * 63}]}).encode(),
        json.dumps({"version": 1, "releases": [{**PIN, "library": "../x"}]}).encode(),
        json.dumps({"version": 1, "releases": [{**PIN, "size": -1}]}).encode(),
        b" " * (2 << 20),
    ],
    ids=lambda content: repr(content[:60]),
)
def test_a_malformed_lock_is_an_error_that_names_it_and_nothing_is_compiled(
    machine: Machine, compiler: Compiler, content: bytes
) -> None:
    lock = machine.home / "bad.lock"
    lock.write_bytes(content)
    with pytest.raises((VerificationError, ConfigError)) as caught:
        machine.registry(lock=lock, jit="always", cxx=compiler.path).load(**OP)
    assert str(lock) in str(caught.value)
    assert compiler.starts == 0


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path), lambda path: None])
def test_a_lock_that_is_named_and_cannot_be_read_is_an_error(
    machine: Machine, compiler: Compiler, make: Callable[[Path], None]
) -> None:
    lock = machine.home / "named.lock"
    make(lock)
    with pytest.raises(ConfigError, match=r"named\.lock"):
        machine.registry(lock=lock, jit="always", cxx=compiler.path).load(**OP)
    assert compiler.starts == 0


def test_a_lock_that_pins_another_digest_leaves_what_is_there_unused(machine: Machine, released: Released) -> None:
    lock = machine.home / "other.lock"
    lock.write_text(json.dumps({"version": 1, "releases": [PIN]}))
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": lock, "mirrors": mirror.url}
        with pytest.raises(MissingKernel, match="answered 404"):
            machine.registry(jit="never", **settings).load(**OP)
        assert [request.path.rpartition("/")[2] for request in mirror.requests] == [PIN["sha256"]]
        assert machine.registry(jit="auto", **settings).load(**OP).origin == "jit"


def test_an_empty_lock_and_none_are_told_apart_in_the_reasons(machine: Machine, tiny: Path) -> None:
    lock = machine.home / "empty.lock"
    lock.write_text('{"version": 1, "releases": []}')
    for named, reason in ((lock, "empty.lock is empty"), (None, "there is no kartifacts.lock")):
        with pytest.raises(MissingKernel, match=reason):
            machine.registry(libraries=[tiny], lock=named, jit="never").load(**ANSWER)


# -- no compiler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/nowhere", "/nowhere:/nor-here"])
def test_without_compilers_what_is_published_loads_and_the_rest_says_where_it_was_looked_for(
    machine: Machine, released: Released, path: str
) -> None:
    settings: dict[str, Any] = {"PATH": path, "CUDA_HOME": None, "CUDA_PATH": None}
    found = machine.watched(LOAD_OR_NO_COMPILER, path=released.path, lock=released.lock_file, **settings)
    assert found.result[:2] == ["loaded", str(released.path)]
    missing = machine.watched(LOAD_OR_NO_COMPILER, **settings)
    kind, searched, text, seconds = missing.result
    assert seconds < 1  # of processor time
    assert kind == "NoCompiler"
    for name in ("g++", "clang++"):
        assert any(name in place for place in searched)
    assert repr(path) in text
    assert "none is pinned" in text  # and why nothing published was taken
    assert missing.of("process") == []


def test_a_compiler_that_is_named_and_not_there_is_named_in_the_error(machine: Machine, tiny: Path) -> None:
    for cxx in ("no-such-compiler", "/nowhere/g++", str(machine.home)):
        with pytest.raises(NoCompiler, match=r"KARTIFACTS_CXX|home") as caught:
            machine.registry(libraries=[tiny], cxx=cxx).load(**ANSWER)
        assert cxx in str(caught.value)


def test_import_never_fails_whatever_is_wrong_with_the_machine(machine: Machine) -> None:
    bad: dict[str, Any] = {
        "lock": "/nowhere/x.lock",
        "mirrors": "ftp://x",
        "jit": "perhaps",
        "misspelt": "1",
        "store": "/proc/nothing",
        "HOME": None,
        "PATH": "",
        "CUDA_HOME": ":/usr/local/cuda",
    }
    code = """
import kartifacts, kartifacts.ops, kartifacts.errors
try:
    kartifacts.load("norm/rmsnorm", device="cpu", dtype="float32")
except kartifacts.errors.ConfigError as error:
    result = str(error)
"""
    seen = machine.watched(code, **bad)
    assert seen.seen == []
    assert "KARTIFACTS_MISSPELT" in seen.result


@pytest.mark.parametrize("value", [":/usr/local/cuda", "/a:/b", "", " ", "/nonexistent", "relative/cuda", "/"])
def test_a_bad_cuda_home_is_named_with_its_value_and_the_search_goes_on(
    machine: Machine, tiny: Path, value: str, gpus: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    from kartifacts.build.toolchains import nvcc

    nvcc._warned.clear()
    gpus("9.0")
    registry = machine.registry(libraries=[tiny], CUDA_HOME=value, PATH="")
    with pytest.raises(KartifactsError) as caught:  # no host compiler on PATH, whether or not a CUDA is found
        registry.load("demo/answer", device="cuda", size=1)
    said = caplog.text + str(caught.value)
    assert f"CUDA_HOME={value!r}" in said
    assert isinstance(caught.value, NoCompiler)


def test_a_gpu_op_without_any_cuda_lists_every_place(
    machine: Machine, tiny: Path, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kartifacts.build.toolchains import nvcc, nvrtc

    monkeypatch.setattr(nvcc, "USUAL", Path("/nowhere/cuda"))
    monkeypatch.setattr(nvcc, "wheels", list)
    monkeypatch.setattr(nvrtc, "_SYSTEM", ())
    monkeypatch.setattr(sys, "prefix", "/nowhere/prefix")
    gpus("9.0")
    began = time.process_time()
    for ask, places in (
        ({"op": "demo/answer", "size": 1}, ["nvidia-cuda-nvcc", "pip install 'kartifacts[cuda]'"]),
        (
            {"op": "norm/rmsnorm", "dtype": "float32"},
            ["nvidia-cuda-nvcc", "nvidia-cuda-nvrtc", "pip install nvidia-cuda-nvrtc"],
        ),
    ):
        with pytest.raises(NoCompiler) as caught:
            machine.registry(libraries=[tiny], PATH="", CUDA_HOME=None).load(device="cuda", **ask)
        for place in ("PATH", "/nowhere/cuda", *places):
            assert place in str(caught.value)
    assert time.process_time() - began < 1


@pytest.mark.nvcc
@pytest.mark.usefixtures("toolkit")
def test_a_cuda_home_with_a_space_in_it_builds(machine: Machine, tmp_path: Path) -> None:
    from kartifacts.build.toolchains import nvcc

    place = tmp_path / "my cuda"
    place.symlink_to(nvcc.discover(machine.settings()).root)
    answer = machine.cli("build", "--archs", "9.0a", "--ops", "rmsnorm", "--out", tmp_path / "out dir", CUDA_HOME=place)
    assert answer.code == 0, answer.err


def test_an_op_that_no_library_declares_is_not_called_unknown_when_the_releases_cannot_be_read(
    machine: Machine, released: Released
) -> None:
    settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": DEAD, "retries": 0}
    with pytest.raises(ArtifactUnavailable, match="Connection refused"):
        machine.registry(**settings).load("attention/decode", device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="no op 'rmsnrom'"):  # a bare name is in no release: only a library knows it
        machine.registry(**settings).load("rmsnrom", device="cpu", dtype="float32")
