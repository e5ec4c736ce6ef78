"""What is the same kernel and what is another: by content and by full arch, never by time, path or version."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kartifacts
from kartifacts.runtime import host
from kartifacts.testing import Mirror
from tests.conftest import Compiler, Machine, Released

CHECKOUT = Path(__file__).parents[2]
ANSWER: dict[str, Any] = {"op": "demo/answer", "device": "cpu", "size": 1000}
YEAR_2001 = 1_000_000_000


def touch(tree: Path, when: float | None = None) -> None:
    for path in tree.rglob("*"):
        os.utime(path, None if when is None else (when, when))


@pytest.mark.parametrize("when", [None, YEAR_2001, 0.0], ids=["now", "2001", "1970"])
def test_touching_every_file_compiles_nothing(
    machine: Machine, tiny: Path, compiler: Compiler, when: float | None
) -> None:
    first = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    touch(tiny, when)
    again = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    assert (again.origin, again.path) == ("built here before", first.path)
    assert compiler.compiled == 1


def test_a_library_elsewhere_with_the_same_content_compiles_nothing(
    machine: Machine, tiny: Path, compiler: Compiler, tmp_path: Path
) -> None:
    first = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    shutil.copytree(tiny, tmp_path / "elsewhere/another name")
    again = machine.registry(libraries=[tmp_path / "elsewhere/another name"], cxx=compiler.path).load(**ANSWER)
    assert (again.path, compiler.compiled) == (first.path, 1)


def test_a_changed_header_with_an_old_time_compiles_anew_beside_what_is_in_use(
    machine: Machine, tiny: Path, compiler: Compiler
) -> None:
    old = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    before = (old.path.read_bytes(), old.path.stat())
    header = tiny / "include/scale.h"
    header.write_text(header.read_text().replace("7L", "8L"))
    touch(tiny, YEAR_2001)
    new = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    assert (new.origin, new()) == ("jit", 8000)
    assert new.path != old.path
    assert (old.path.read_bytes(), old.path.stat()) == before
    assert old() == 7000  # still mapped, still itself
    header.write_text(header.read_text().replace("8L", "7L"))
    back = machine.registry(libraries=[tiny], cxx=compiler.path).load(**ANSWER)
    assert (back.path, back(), compiler.compiled) == (old.path, 7000, 2)


def test_one_process_sees_an_edited_source_in_its_next_registry(machine: Machine, tiny: Path) -> None:
    source = tiny / "demo/answer_cpu.cpp"
    for factor, answer in ((1, 7000), (2, 14000), (1, 7000)):
        source.write_text(source.read_text().replace(f"* {3 - factor} *", f"* {factor} *"))
        if f"* {factor} *" not in source.read_text():
            source.write_text(source.read_text().replace("SCALE *", f"SCALE * {factor} *"))
        assert machine.registry(libraries=[tiny]).load(**ANSWER)() == answer


# -- prebuilt kernels fit by the digest of their op --------------------------------------------------------------------


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A copy of this project's kernels in which one op has been changed."""
    root = tmp_path / "kernels"
    shutil.copytree(CHECKOUT / "kernels", root, ignore=shutil.ignore_patterns("__pycache__"))
    source = root / "norm/rmsnorm_cpu.cpp"
    source.write_text(source.read_text() + "// changed\n")
    return root


def test_a_changed_op_is_compiled_while_the_others_stay_prebuilt(
    machine: Machine, released: Released, edited: Path
) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url}
        registry = machine.registry(libraries=[edited], **settings)
        changed = registry.load("norm/rmsnorm", device="cpu", dtype="float32")
        assert changed.origin == "jit"
        assert any("was built from other sources" in refusal.reason for refusal in changed.refusals)
        for op in ("norm/layernorm", "norm/fused_add_rmsnorm", "activation/silu_and_mul"):
            assert registry.load(op, device="cpu", dtype="float32").origin == mirror.url


def test_a_version_that_is_not_ours_is_no_reason_to_compile(
    machine: Machine, released: Released, tmp_path: Path
) -> None:
    """The same content under the version of some other day, such as a companion package has after half an upgrade."""
    assert [pin.version for pin in released.lock.releases] != [kartifacts.__version__]
    out, lock = tmp_path / "repository", tmp_path / "kartifacts.lock"
    for version in ("0.6.16+cu130", "0.0.0+unknown", "99"):
        shutil.copytree(released.path / "blobs", out / "blobs", dirs_exist_ok=True)
        rename_release(released, out, lock, version)
        registry = machine.registry(path=out, lock=lock, jit="never")
        assert registry.load("norm/rmsnorm", device="cpu", dtype="float32").arch == released.best


def rename_release(released: Released, out: Path, lock: Path, version: str) -> None:
    from kartifacts.publish.lockfile import add_pins
    from kartifacts.publish.release import make_release
    from kartifacts.publish.repository import Repository

    bundles = Repository(released.path).release(released.lock.releases[0]).manifests
    make_release(out, "kartifacts", version, bundles)
    add_pins(lock, Repository(out).pins("kartifacts", version))


def test_an_upgraded_package_recompiles_only_what_changed_and_imports_in_any_case(
    machine: Machine, released: Released, tmp_path: Path
) -> None:
    """The whole package, as another checkout or an upgrade leaves it: one op differs, and so does the version."""
    package = tmp_path / "upgraded"
    ignored = shutil.ignore_patterns("__pycache__", "_kernels")
    for name in ("kartifacts", "kernels"):
        shutil.copytree(CHECKOUT / name, package / name, ignore=ignored)
    shutil.copy(CHECKOUT / "pyproject.toml", package)
    init = package / "kartifacts/__init__.py"
    init.write_text(init.read_text().replace(f'"{kartifacts.__version__}"', '"7.7.7"'))
    source = package / "kernels/norm/layernorm_cpu.cpp"
    source.write_text(source.read_text() + "// changed\n")
    code = """
import kartifacts, kartifacts.ops
origins = [kartifacts.load(op, device="cpu", dtype="float32").origin for op in ("norm/rmsnorm", "norm/layernorm")]
result = [kartifacts.__version__, kartifacts.__file__, *origins]
"""
    settings: dict[str, Any] = {"lock": released.lock_file, "path": released.path, "PYTHONPATH": package}
    version, file, same, changed = machine.watched(code, **settings).result
    assert (version, Path(file)) == ("7.7.7", init)
    assert (same, changed) == (str(released.path), "jit")


# -- a kernel is what its metadata says --------------------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.usefixtures("toolkit")
def test_a_compiler_that_makes_another_arch_than_was_promised_makes_no_release(
    machine: Machine, tmp_path: Path
) -> None:
    from kartifacts.build.toolchains import nvcc

    real = nvcc.discover(machine.settings()).root
    toolkit = tmp_path / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    for path in real.iterdir():
        if path.name != "bin":
            (toolkit / path.name).symlink_to(path)
    for path in (real / "bin").iterdir():
        if path.name != "nvcc":
            (toolkit / "bin" / path.name).symlink_to(path)
    wrong = toolkit / "bin/nvcc"
    wrong.write_text(
        "#!/bin/bash\nwords=()\n"
        'for word in "$@"; do words+=("${word//90a/80}"); done\n'
        f'exec {real}/bin/nvcc "${{words[@]}}"\n'
    )
    wrong.chmod(0o755)
    out, lock = tmp_path / "out", tmp_path / "kartifacts.lock"
    arguments = ("build", "--archs", "9.0a", "--ops", "rmsnorm", "--out", out, "--lock", lock, "--json")
    answer = machine.cli(*arguments, CUDA_HOME=toolkit, cuda_compiler="nvcc")
    assert answer.code == 6, answer.err
    assert "norm/rmsnorm?dtype=" in answer.data["message"]
    assert "GPU code for 8.0, expected 9.0a" in answer.data["message"]
    assert not out.exists()
    assert not lock.exists()


def test_no_kernel_is_taken_for_a_cpu_that_lacks_its_instructions(
    machine: Machine, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kartifacts.model.arch import Arch

    if len(released.archs) < 2:
        pytest.skip("needs an x86-64 CPU")
    cpu: Callable[[], Arch] = lambda: Arch("cpu", name="x86-64-v2")  # noqa: E731
    monkeypatch.setattr(host, "cpu", cpu)
    kernel = machine.registry(path=released.path, lock=released.lock_file, jit="never").load(
        "norm/rmsnorm", device="cpu", dtype="float32"
    )
    assert str(kernel.arch) == "cpu:x86-64"
    assert any("built for cpu:x86-64-v3" in str(refusal) for refusal in kernel.refusals)
