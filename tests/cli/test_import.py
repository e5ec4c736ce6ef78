"""What others built: imported by its checksums, served, and written out again under the names it had."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.testing import Mirror
from tests.conftest import Machine

# Any suffix and none; one name in two families with other bytes, as two commits of one project have it.
FILES = {
    "0123abc/fmha/kernel.cubin": b"not really a cubin, and nobody says that it is",
    "0123abc/fmha/k_sm100f.so": b"first content under this name",
    "0123abc/fmha/include/Enums.h": b"#pragma once\n",
    "0123abc/fmha/LICENSE": b"text",
    "4567def/gemm/k_sm100f.so": b"second content under this name",
    "4567def/gemm/UPPER_case.json": b"{}",
}
NAMES = ("--library", "stranger", "--release-version", "0.6.13")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, data in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for family in ("0123abc/fmha", "4567def/gemm"):
        lines = [
            f"{hashlib.sha256(data).hexdigest()}  {name.removeprefix(family + '/')}\n"
            for name, data in FILES.items()
            if name.startswith(family)
        ]
        (root / family / "checksums.txt").write_text("".join(lines))
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def imported(machine: Machine, tree: Path, out: Path) -> dict[str, Any]:
    """The settings of a machine that may fetch what was imported."""
    lock = out.parent / "stranger.lock"
    answer = machine.cli("import", "checksums", tree, "--out", out, *NAMES, "--lock", lock, "--json")
    assert answer.code == 0, answer.err
    assert sum(row["kernels"] for row in answer.data["bundles"]) == len(contents(tree))
    return {"lock": lock}


def test_a_tree_comes_back_as_it_was(machine: Machine, tree: Path, tmp_path: Path) -> None:
    settings = imported(machine, tree, tmp_path / "repository")
    with Mirror(tmp_path / "repository") as mirror:
        answer = machine.cli("fetch", "--out", tmp_path / "back", mirrors=mirror.url, **settings)
        assert answer.code == 0, answer.err
        assert contents(tmp_path / "back") == contents(tree)
        requests = len(mirror.requests)
        again = machine.cli("fetch", "--out", tmp_path / "back", "--json", mirrors=mirror.url, **settings)
        assert (again.data["fetched"], len(mirror.requests)) == (0, requests)


def test_one_file_is_fetched_by_its_path_and_alone(machine: Machine, tree: Path, tmp_path: Path) -> None:
    settings = imported(machine, tree, tmp_path / "repository")
    wanted = "4567def/gemm/k_sm100f.so"
    arguments = ("fetch", "--path", wanted, "--out", tmp_path / "back")
    assert machine.cli(*arguments, mirrors=f"file://{tmp_path / 'repository'}", **settings).code == 0
    assert contents(tmp_path / "back") == {wanted: FILES[wanted]}


def test_a_file_whose_bytes_the_mirror_lost_fails_the_fetch_and_is_named(
    machine: Machine, tree: Path, tmp_path: Path
) -> None:
    settings = imported(machine, tree, tmp_path / "repository")
    (tmp_path / "repository/index.json").unlink()  # nothing is ever looked up in a listing
    with Mirror(tmp_path / "repository") as mirror:
        settings["mirrors"] = mirror.url
        assert machine.cli("fetch", "--path", "0123abc/fmha/LICENSE", **settings).code == 0
        packs = [request.path for request in mirror.requests][-1]
        (tmp_path / "repository" / packs.lstrip("/")).unlink()
        shutil.rmtree(machine.store)
        answer = machine.cli("fetch", "--json", **settings)
    assert answer.code == 3
    assert "0123abc/fmha/" in answer.data["message"]


def lose(path: Path) -> None:
    path.unlink()


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def add(path: Path) -> None:
    path.with_name("unlisted.so").write_bytes(b"x")


@pytest.mark.parametrize(("damage", "name"), [(lose, "k_sm100f.so"), (change, "k_sm100f.so"), (add, "unlisted.so")])
def test_a_tree_that_is_not_what_its_lists_say_is_refused_and_leaves_no_release(
    machine: Machine, tree: Path, tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    damage(tree / "0123abc/fmha/k_sm100f.so")
    lock = tmp_path / "stranger.lock"
    arguments = ("import", "checksums", tree, "--out", tmp_path / "repository", *NAMES, "--lock", lock)
    answer = machine.cli(*arguments)
    assert (answer.code, answer.out) == (5, "")
    assert f"0123abc/fmha/{name}" in answer.err
    assert "Traceback" not in answer.err
    assert not lock.exists()
    assert not (tmp_path / "repository/targets").exists()
    assert machine.cli(*arguments, "--json").data["error"] == "VerificationError"


def test_what_is_imported_and_what_is_built_lie_under_one_lock(
    machine: Machine, tree: Path, tmp_path: Path, released: Any
) -> None:
    settings = imported(machine, tree, tmp_path / "repository")
    assert machine.cli("lock", released.path, "--out", settings["lock"]).code == 0
    assert [pin["library"] for pin in json.loads(settings["lock"].read_text())["releases"]] == [
        "kartifacts",
        "stranger",
    ]
    settings["mirrors"] = f"file://{tmp_path / 'repository'} file://{released.path}"
    answer = machine.cli("fetch", "--library", "stranger", "--out", tmp_path / "back", **settings)
    assert answer.code == 0, answer.err
    assert contents(tmp_path / "back") == contents(tree)
    assert (
        machine.registry(jit="never", **settings)
        .load("rmsnorm", device="cpu", dtype="float32")
        .origin.startswith("file://")
    )
