"""Which of several published kernels is taken for a device, what is not even asked for, and what is said about it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import jit
from kartifacts.build.library import discover, open_library
from kartifacts.errors import ArtifactUnavailable, ConfigError, LoadError, MissingKernel, NoCompiler, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import FFI_ABI
from kartifacts.publish.lockfile import add_pins
from kartifacts.publish.repository import Repository
from kartifacts.runtime import host
from kartifacts.testing import Mirror
from tests.conftest import Content, Machine, MakeRelease, Released

URI = "norm/rmsnorm?dtype=float32"
Pretend = Callable[..., None]


def norm(arch: str, data: bytes | None = None, **more: Any) -> Content:
    return Content(arch, {URI: data or f"not opened, for {arch}".encode()}, **more)


def chosen(rows: list[Any]) -> list[str]:
    """The bundles that would do, best first, of what `explain` says."""
    return [row.reason.partition(" fits")[0] for row in rows if " fits: " in row.reason]


def explain(machine: Machine, made: Released, device: str = "cuda", **settings: Any) -> list[Any]:
    registry = machine.registry(path=made.path, lock=made.lock_file, **settings)
    return registry.explain("norm/rmsnorm", device=device, dtype="float32")


# -- archs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "fits", "refused"),
    [
        ("12.1", ["12.0f", "12.0"], ["12.0a", "9.0a", "8.0"]),
        ("12.0", ["12.0a", "12.0f", "12.0"], ["9.0a", "8.0"]),
        ("9.0", ["9.0a"], ["12.0a", "12.0f", "12.0", "8.0"]),
        ("8.9", ["8.0"], ["9.0a", "12.0"]),
        ("10.0", [], ["12.0a", "12.0f", "12.0", "9.0a", "8.0"]),
    ],
)
def test_a_device_gets_what_runs_on_it_best_first_and_nothing_else(
    machine: Machine, make_release: MakeRelease, gpus: Pretend, device: str, fits: list[str], refused: list[str]
) -> None:
    made = make_release(*(norm(arch) for arch in ("8.0", "12.0", "9.0a", "12.0f", "12.0a")))
    gpus(device)
    rows = explain(machine, made)
    assert [text.rpartition(" ")[2] for text in chosen(rows)] == fits
    for arch in refused:
        assert any(f"built for {arch}," in row.reason and f"the device is {device}" in row.reason for row in rows)


def test_each_of_two_different_gpus_gets_its_own(machine: Machine, make_release: MakeRelease, gpus: Pretend) -> None:
    made = make_release(norm("8.6"), norm("8.9"))
    gpus("8.9", "8.6")
    assert chosen(explain(machine, made, "cuda:0"))[0].endswith(" 8.9")
    assert [text.rpartition(" ")[2] for text in chosen(explain(machine, made, "cuda:1"))] == ["8.6"]
    with pytest.raises(ConfigError, match="no GPU 2"):
        explain(machine, made, "cuda:2")


@pytest.mark.parametrize("archs", [["9.0a"], ["9.0a", "8.0", "gfx942"]])
def test_what_lacks_the_device_is_not_asked_for_and_the_reason_reaches_the_user(
    machine: Machine, make_release: MakeRelease, gpus: Pretend, archs: list[str]
) -> None:
    made = make_release(*(norm(arch, op_digest="0" * 64) for arch in archs))
    gpus("12.0")
    with Mirror(made.path) as mirror:
        settings: dict[str, Any] = {"lock": made.lock_file, "mirrors": mirror.url}
        with pytest.raises(MissingKernel) as missing:
            machine.registry(jit="never", **settings).load("norm/rmsnorm", device="cuda", dtype="float32")
        with pytest.raises(NoCompiler) as without:  # the compiler was the choice, and there is none
            machine.registry(PATH="", CUDA_HOME=None, **settings).load("norm/rmsnorm", device="cuda", dtype="float32")
        [pin] = made.lock.releases
        assert {request.path.rpartition("/")[2] for request in mirror.requests} == {pin.sha256}
    for error in (missing.value, without.value):
        for arch in archs:
            assert f"built for {arch}," in str(error)
        assert "the device is 12.0" in str(error)


@pytest.mark.parametrize(("known", "way_out"), [(True, "no pinned release holds it"), (False, "fetch it first")])
def test_no_fetch_is_recommended_that_would_bring_nothing(
    machine: Machine, make_release: MakeRelease, gpus: Pretend, known: bool, way_out: str
) -> None:
    made = make_release(norm("9.0a"))
    gpus("12.1")
    here: dict[str, Any] = {"path": made.path} if known else {}
    with pytest.raises(MissingKernel, match=f"hint: {way_out}"):
        machine.registry(lock=made.lock_file, jit="never", **here).load("norm/rmsnorm", device="cuda", dtype="float32")


@pytest.mark.nvcc
@pytest.mark.usefixtures("toolkit")
def test_what_lacks_the_device_is_compiled_for_it(machine: Machine, make_release: MakeRelease, gpus: Pretend) -> None:
    made = make_release(norm("9.0a"))
    gpus("12.0")
    kernel = machine.registry(path=made.path, lock=made.lock_file).load("norm/rmsnorm", device="cuda", dtype="float32")
    assert (kernel.origin, str(kernel.arch)) == ("jit", "12.0f")
    assert any("built for 9.0a," in str(refusal) for refusal in kernel.refusals)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """The kernel of `URI` for an arch, as the JIT makes it."""
    machine = Machine(tmp_path_factory.mktemp("builder"))

    def make(arch: str) -> bytes:
        spec = discover().find("norm/rmsnorm").spec("norm/rmsnorm", {"dtype": "float32"}, parse_arch(arch))
        try:
            return jit.build_one(spec, machine.settings()).path.read_bytes()
        except NoCompiler as error:
            pytest.skip(f"needs a CUDA compiler: {error.message}")

    return make


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("said", "code", "device"),
    [
        ("9.0a", "8.0", "9.0"),
        ("12.0", "12.0a", "12.1"),  # the header of the file holds 12.0 in both cases
        ("12.1", "12.0", "12.1"),
    ],
)
def test_code_for_another_arch_than_the_table_says_is_never_opened(
    machine: Machine,
    make_release: MakeRelease,
    gpus: Pretend,
    built: Callable[[str], bytes],
    said: str,
    code: str,
    device: str,
) -> None:
    made = make_release(norm(said, built(code)))
    gpus(device)
    settings: dict[str, Any] = {"lock": made.lock_file, "mirrors": made.path}
    wrong = f"holds GPU code for {code}, and its table says {said}"
    for _ in range(2):  # neither from the mirror nor out of the store, where it is now
        with pytest.raises(MissingKernel, match=wrong):
            machine.registry(jit="never", **settings).load("norm/rmsnorm", device="cuda", dtype="float32")
    assert machine.cli("fetch", "--archs", said, **settings).code == 0  # and no note leads to it
    kernel = machine.registry(**settings).load("norm/rmsnorm", device="cuda", dtype="float32")
    assert kernel.origin == "jit"
    assert any(wrong in refusal.reason for refusal in kernel.refusals)


@pytest.mark.nvrtc
def test_code_that_the_table_says_rightly_is_used_before_what_it_does_not(
    machine: Machine, make_release: MakeRelease, gpus: Pretend, built: Callable[[str], bytes]
) -> None:
    sound = [norm(arch, built(arch)) for arch in ("9.0", "8.0+PTX", "12.0f", "10.3a")]
    made = make_release(norm("9.0a", built("8.0")), *sound)
    settings: dict[str, Any] = {"lock": made.lock_file, "path": made.path, "jit": "never"}
    for device, taken in (("9.0", "9.0"), ("10.0", "8.0+PTX"), ("12.1", "12.0f"), ("10.3", "10.3a")):
        gpus(device)
        kernel = machine.registry(**settings).load("norm/rmsnorm", device="cuda", dtype="float32")
        assert str(kernel.arch) == taken


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_code_for_another_machine_is_never_opened_whatever_the_table_says(
    machine: Machine, make_release: MakeRelease, gpus: Pretend, tiny: Path, device: str
) -> None:
    """Tables of earlier versions do not say whose host code a kernel for GPUs holds."""
    gpus("9.0")
    spec = open_library(tiny).spec("answer", {"size": 1000}, host.cpu())
    content = bytearray(jit.build_one(spec, machine.settings()).path.read_bytes())
    other = (183, "aarch64") if os.uname().machine == "x86_64" else (62, "x86_64")
    content[18:20] = other[0].to_bytes(2, "little")
    arch = str(host.cpu()) if device == "cpu" else "9.0a"
    made = make_release(norm(arch, bytes(content)))
    registry = machine.registry(path=made.path, lock=made.lock_file, jit="never")
    with pytest.raises(MissingKernel, match=f"holds host code for {other[1]}"):
        registry.load("norm/rmsnorm", device=device, dtype="float32")


def test_an_arch_from_the_future_is_a_reason_and_no_failure(
    machine: Machine, make_release: MakeRelease, gpus: Pretend
) -> None:
    made = make_release(norm("9.0a"), norm("8.0"))
    gpus("9.0")
    for blob in (
        made.path / "blobs/sha256"
    ).iterdir():  # the release index is what names archs before anything is opened
        if blob.name == made.lock.releases[0].sha256:
            index = blob.read_bytes().replace(b'arch":"8.0"', b'arch":"99.0z"')
    made = repinned(made, index)
    rows = explain(machine, made, jit="never")
    assert chosen(rows)[0].endswith(" 9.0a")
    assert any("arch is not known here" in row.reason for row in rows)


def repinned(made: Released, index: bytes) -> Released:
    """The same repository with another release index, and the lock that pins it."""
    from kartifacts.model.digest import sha256
    from kartifacts.model.layout import blob_path
    from kartifacts.model.manifest import Lock, Pin, encode

    [pin] = made.lock.releases
    (made.path / blob_path(sha256(index))).write_bytes(index)
    new = Pin(library=pin.library, version=pin.version, sha256=sha256(index), size=len(index))
    made.lock_file.write_bytes(encode(Lock(version=1, releases=[new])))
    return made


# -- ABIs and needs ----------------------------------------------------------------------------------------------------


def test_of_two_abis_the_one_that_this_process_loads_is_taken(machine: Machine, make_release: MakeRelease) -> None:
    arch = "cpu:x86-64"
    made = make_release(norm(arch, b"future", abi="tvm-ffi-9.9"), norm(arch, b"ours"), norm(arch, b"past", abi="none"))
    rows = explain(machine, made, "cpu")
    assert len(chosen(rows)) == 1
    for abi in ("tvm-ffi-9.9", "none"):
        assert any(f"has the ABI {abi!r}; this process loads {FFI_ABI}" in row.reason for row in rows)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"glibc": "99.1"}, "needs glibc 99.1; here it is"),
        ({"glibcxx": "9.9.9"}, "needs glibcxx 9.9.9; here it is"),
        ({"tvm_ffi": "7.0"}, "needs tvm_ffi 7.0; here it is"),
        ({"cudart": "77"}, "needs cudart 77; there is none here"),
        ({"rocm": "6"}, "cannot judge"),
    ],
)
def test_what_needs_a_newer_system_is_passed_over_for_what_does_not_before_it_is_fetched(
    machine: Machine, make_release: MakeRelease, needs: dict[str, str], reason: str
) -> None:
    made = make_release(norm("cpu:x86-64-v2", b"newer", needs=needs), norm("cpu:x86-64", b"older"))
    with Mirror(made.path) as mirror:
        settings: dict[str, Any] = {"lock": made.lock_file, "mirrors": mirror.url, "jit": "never"}
        rows = machine.registry(**settings).explain("norm/rmsnorm", device="cpu", dtype="float32")
        assert [text.rpartition(" ")[2] for text in chosen(rows)] == ["cpu:x86-64"]
        assert any(reason in row.reason for row in rows)
        with pytest.raises(LoadError, match="does not load"):  # it is no ELF file, but it is what was taken
            machine.registry(**settings).load("norm/rmsnorm", device="cpu", dtype="float32")
        packs = packs_of(made)
        assert mirror.count(packs["cpu:x86-64-v2"]) == 0
        assert mirror.count(packs["cpu:x86-64"]) == 1


@pytest.mark.parametrize("before", ["nothing", "the kernel's table", "a bundle for another arch"])
def test_explain_shows_what_mirrors_would_be_asked_for_whatever_metadata_is_here(
    machine: Machine, make_release: MakeRelease, before: str
) -> None:
    made = make_release(norm("cpu:x86-64-v2"), norm("cpu:x86-64"))
    with Mirror(made.path) as mirror:
        settings: dict[str, Any] = {"lock": made.lock_file, "mirrors": f"{mirror.url} https://127.0.0.1:9"}

        def ask() -> list[Any]:
            return machine.registry(**settings).explain("norm/rmsnorm", device="cpu", dtype="float32")

        if before == "the kernel's table":
            ask()
            machine.cli("fetch", "--ops", "none/none", lock=made.lock_file, mirrors=mirror.url)
        elif before != "nothing":
            machine.cli("fetch", "--archs", "cpu:x86-64", lock=made.lock_file, mirrors=mirror.url)
        fitting = [row for row in ask() if " fits: " in row.reason]
        assert {row.place for row in fitting} == {"mirrors"} | (
            {"local sources and the store"} if "another" in before else set()
        )
        for row in fitting:
            if row.place == "mirrors":
                assert row.reason.endswith(f" bytes to fetch from {mirror.url}, https://127.0.0.1:9")
        offline = machine.registry(**settings, offline=1).explain("norm/rmsnorm", device="cpu", dtype="float32")
        assert not [row for row in offline if "to fetch" in row.reason]
    whole = machine.registry(lock=made.lock_file, mirrors=f"file://{made.path}")
    rows = [row.reason for row in whole.explain("norm/rmsnorm", device="cpu", dtype="float32")]
    assert any(f" bytes to read from file://{made.path}" in reason for reason in rows)


def packs_of(made: Released) -> dict[str, str]:
    repository = Repository(made.path)
    [pin] = made.lock.releases
    return {
        bundle.note("arch"): repository.bundle(bundle).layers[0].sha256 for bundle in repository.release(pin).manifests
    }


def test_a_file_that_is_no_kernel_is_a_load_error_that_names_the_op_and_nothing_is_compiled(
    machine: Machine, make_release: MakeRelease
) -> None:
    made = make_release(norm("cpu:x86-64", b"\x7fELF" + bytes(100)))
    with pytest.raises(LoadError) as caught:
        machine.registry(path=made.path, lock=made.lock_file, PATH="").load(
            "norm/rmsnorm", device="cpu", dtype="float32"
        )
    assert URI in str(caught.value)


# -- ops that are only published ---------------------------------------------------------------------------------------


def test_an_op_without_sources_is_loaded_from_a_release_and_never_compiled(
    machine: Machine, make_release: MakeRelease, released: Released, tmp_path: Path
) -> None:
    kernel = (
        Machine(tmp_path / "other")
        .registry(path=released.path, lock=released.lock_file)
        .load("norm/rmsnorm", device="cpu", dtype="float32")
    )
    uri = "closed/secret?mode=fast"
    content = Content("cpu:x86-64", {uri: kernel.path.read_bytes()}, family="closed", library="closed", op_digest="")
    made = make_release(content, name="closed")
    registry = machine.registry(path=made.path, lock=made.lock_file)
    secret = registry.load("closed/secret", device="cpu", mode="fast")
    assert (secret.uri, secret.origin) == (uri, str(made.path))
    assert callable(secret.rmsnorm)
    with pytest.raises(ArtifactUnavailable, match="its sources are not installed") as caught:
        registry.load("closed/secret", device="cpu", mode="slow")
    assert not isinstance(caught.value, MissingKernel)
    with pytest.raises(ConfigError, match="no op 'closd/secret'"):
        registry.load("closd/secret", device="cpu", mode="fast")


# -- whose kernels they are --------------------------------------------------------------------------------------------


@pytest.fixture
def two(make_release: MakeRelease) -> Callable[..., Released]:
    """A release of ours and one of another library, both pinned; each by keys of its own."""

    def make(ours: list[Content], others: list[Content]) -> Released:
        mine = make_release(*ours, name="ours") if ours else None
        theirs = make_release(*others, name="others beside ours" if ours else "others")
        if mine is not None:
            shutil.copytree(theirs.path, mine.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("index.json"))
            add_pins(mine.lock_file, theirs.lock.releases)
        return mine or theirs

    return make


def test_no_kernel_of_another_library_answers_for_an_op_however_well_it_fits(
    machine: Machine, two: Callable[..., Released], gpus: Pretend
) -> None:
    gpus("9.0")
    made = two([norm("9.0")], [norm("9.0a", b"of somebody else", library="mylib")])
    rows = explain(machine, made)
    assert [text.rpartition(" ")[2] for text in chosen(rows)] == ["9.0"]
    assert any("mylib" in row.place and "another library than kartifacts" in row.reason for row in rows)
    alone = two([], [norm("9.0a", b"of somebody else", library="mylib")])
    registry = machine.registry(path=alone.path, lock=alone.lock_file, jit="never")
    with pytest.raises(MissingKernel, match="another library than kartifacts"):
        registry.load("norm/rmsnorm", device="cuda", dtype="float32")


def test_of_an_op_that_nothing_here_declares_no_library_answers_for_another(
    machine: Machine, two: Callable[..., Released], gpus: Pretend
) -> None:
    gpus("9.0")
    foreign: dict[str, Any] = {"family": "far", "op_digest": "0" * 64}
    content = {"far/away?dtype=float32": b"x"}
    made = two([Content("8.0", content, **foreign)], [Content("9.0a", content, library="mylib", **foreign)])
    registry = machine.registry(path=made.path, lock=made.lock_file, jit="never")
    with pytest.raises(ConfigError, match="several pinned libraries have a family 'far': kartifacts, mylib"):
        registry.load("far/away", device="cuda", dtype="float32")


@pytest.mark.parametrize("change", [{"library": "mylib"}, {"version": "2.0"}])
def test_a_release_is_taken_for_none_but_the_one_that_its_pin_names(
    machine: Machine, make_release: MakeRelease, change: dict[str, str]
) -> None:
    made = make_release(norm("cpu:x86-64"))
    lock = json.loads(made.lock_file.read_text())
    lock["releases"][0] |= change
    made.lock_file.write_text(json.dumps(lock))
    answer = machine.cli("fetch", path=made.path, lock=made.lock_file)
    assert (answer.code, "says that it is 'kartifacts' '1.0'" in answer.err) == (5, True), answer.err
    registry = machine.registry(path=made.path, lock=made.lock_file, jit="never")
    with pytest.raises(VerificationError, match="says that it is"):
        registry.load("norm/rmsnorm", device="cpu", dtype="float32")
