"""fetch, status, list, verify and gc where something is missing, damaged, or pinned by others too."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Lock, Pin, encode
from kartifacts.testing import TinyRepository, tiny_repository
from tests.conftest import Machine

HERE = {f"here{number}.cubin": bytes([number]) * 5000 for number in range(3)}
GONE = {"gone.cubin": b"gone" * 1000}


@pytest.fixture
def here(tmp_path: Path) -> TinyRepository:
    return tiny_repository(tmp_path / "mirror", HERE, library="here")


@pytest.fixture
def gone(tmp_path: Path) -> TinyRepository:
    """A release that no mirror has."""
    return tiny_repository(tmp_path / "gone", GONE, library="gone")


def lock_of(path: Path, *pins: Pin) -> Path:
    path.write_bytes(encode(Lock(version=1, releases=list(pins))))
    return path


@pytest.fixture
def settings(tmp_path: Path, here: TinyRepository, gone: TinyRepository) -> dict[str, Any]:
    """Two pins; the mirror has the second only."""
    return {"lock": lock_of(tmp_path / "both.lock", gone.pin, here.pin), "mirrors": f"file://{here.path}"}


def kernels_in(machine: Machine) -> set[bytes]:
    return {path.read_bytes() for path in machine.store.glob("v1/sha256/*/*.cubin")}


# -- a release that is not here ----------------------------------------------------------------------------------------


def test_a_release_that_no_mirror_has_fails_the_fetch_by_name_and_the_others_are_fetched(
    machine: Machine, settings: dict[str, Any]
) -> None:
    for _ in range(2):
        answer = machine.cli("fetch", **settings)
        assert answer.code == 3
        assert "release gone 1.0" in answer.err
        assert kernels_in(machine) == set(HERE.values())


def test_a_release_that_is_not_here_is_reported_as_unknown_beside_the_others(
    machine: Machine, settings: dict[str, Any]
) -> None:
    machine.cli("fetch", **settings)
    settings = {**settings, "mirrors": None}
    answer = machine.cli("status", "--json", **settings)
    assert (answer.code, answer.err) == (0, "")
    rows = {row["library"]: row for row in answer.data["bundles"]}
    assert (rows["here"]["kernels"], rows["here"]["present"], rows["here"]["problem"]) == (3, 3, "")
    assert (rows["gone"]["kernels"], rows["gone"]["problem"]) == (None, "release index of gone 1.0 is not here")
    assert not answer.data["complete"]
    text = machine.cli("status", **settings).out
    assert "gone 1.0: unknown, release index of gone 1.0 is not here\n" in text
    assert "here 1.0 demo for any: 3 of 3 present\n" in text
    answer = machine.cli("list", "--json", **settings)
    assert (answer.code, len(answer.data["kernels"])) == (0, 3)
    assert answer.data["unknown"] == ["release index of gone 1.0 is not here"]
    assert "unknown: release index of gone 1.0" in machine.cli("list", **settings).out
    answer = machine.cli("verify", "--json", **settings)
    assert answer.code == 5
    assert (answer.data["missing"], answer.data["damaged"]) == (["release index of gone 1.0"], [])
    assert machine.cli("verify", "--library", "here", **settings).code == 0


@pytest.mark.parametrize("part", ["manifest", "table"])
def test_metadata_that_is_missing_is_named_and_keeps_nothing_else_from_being_reported(
    machine: Machine, settings: dict[str, Any], here: TinyRepository, gone: TinyRepository, part: str, tmp_path: Path
) -> None:
    everywhere = {**settings, "mirrors": f"file://{here.path} file://{gone.path}"}
    assert machine.cli("fetch", **everywhere).code == 0
    digest = getattr(gone, part)
    (machine.store / f"v1/sha256/{digest[:2]}/{digest}").unlink()
    local = {**settings, "mirrors": None}
    rows = {row["library"]: row for row in machine.cli("status", "--json", **local).data["bundles"]}
    assert rows["gone"]["kernels"] is None
    assert "kernel table of gone 1.0 demo any" in rows["gone"]["problem"]
    assert rows["here"]["present"] == 3
    answer = machine.cli("verify", "--json", **local)
    assert (answer.code, answer.data["missing"]) == (5, ["kernel table of gone 1.0 demo any"])
    answer = machine.cli("fetch", **settings)
    assert answer.code == 3
    assert "gone 1.0" in answer.err
    answer = machine.cli("gc", **settings)  # which kernels a table lists is not known, so nothing may go
    assert answer.code == 9
    assert "nothing was removed" in answer.err
    assert kernels_in(machine) == {*HERE.values(), *GONE.values()}


# -- missing and damaged -----------------------------------------------------------------------------------------------


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.chmod(0o644)
    if how == "removed":
        path.unlink()
    elif how == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif how == "cut":
        path.write_bytes(content[:-1])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "a link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved").name)
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    else:
        path.chmod(0o666)
    if not path.is_symlink() and path.is_file() and how != "open to all":
        path.chmod(0o444)


@pytest.mark.parametrize("how", ["removed", "flipped", "cut", "emptied", "a link", "a directory", "open to all"])
def test_a_spoilt_kernel_is_an_error_offline_and_heals_online(
    machine: Machine, here: TinyRepository, how: str, tmp_path: Path
) -> None:
    settings = {"lock": lock_of(tmp_path / "lock", here.pin), "mirrors": f"file://{here.path}"}
    offline = {**settings, "mirrors": "http://127.0.0.1:9", "offline": 1}
    assert machine.cli("fetch", **settings).code == 0
    digest = sha256(HERE["here1.cubin"])
    path = machine.store / f"v1/sha256/{digest[:2]}/{digest}.cubin"
    spoil(path, how)
    if how != "flipped":  # which only reading it tells
        status = machine.cli("status", "--json", **offline).data
        assert (status["complete"], status["bundles"][0]["present"]) == (False, 2)
    answer = machine.cli("verify", "--json", **offline)
    assert answer.code == 5
    assert [row for row in answer.data["missing"] if "here1.cubin" in row], "whatever became of it, it is not here"
    assert bool(answer.data["damaged"]) == (how not in ("removed", "a link", "a directory"))
    answer = machine.cli("fetch", **offline)
    assert answer.code == 3
    assert "here1.cubin" in answer.err
    assert machine.cli("fetch", **settings).code == 0
    assert path.read_bytes() == HERE["here1.cubin"]
    assert machine.cli("verify", **offline).code == 0


def test_verify_of_a_repository_tells_missing_from_damaged(machine: Machine, here: TinyRepository) -> None:
    pack = here.blob(here.packs[0])
    content = pack.read_bytes()
    pack.unlink()
    answer = machine.cli("verify", here.path, "--json")
    assert answer.code == 5
    assert answer.data["damaged"] == []
    assert any(pack.name in row for row in answer.data["missing"])
    pack.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    answer = machine.cli("verify", here.path, "--json")
    assert (answer.code, answer.data["missing"]) == (5, [])
    assert any(pack.name in row for row in answer.data["damaged"])


# -- gc ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(machine: Machine, here: TinyRepository, gone: TinyRepository, tmp_path: Path) -> dict[str, Any]:
    """A store with the kernels of two projects; the settings are those of one."""
    mirrors = f"file://{here.path} file://{gone.path}"
    lock_of(tmp_path / "other.lock", gone.pin)
    for lock in (lock_of(tmp_path / "mine.lock", here.pin), tmp_path / "other.lock"):
        assert machine.cli("fetch", lock=lock, mirrors=mirrors).code == 0
    return {"lock": tmp_path / "mine.lock", "mirrors": mirrors}


def test_gc_keeps_what_other_locks_reach_if_it_is_told_of_them(
    machine: Machine, shared: dict[str, Any], tmp_path: Path
) -> None:
    everything = kernels_in(machine)
    other = tmp_path / "other.lock"
    answer = machine.cli("gc", "--keep-lock", other, "--json", **shared)
    assert (answer.code, answer.data["removed"]) == (0, [])
    assert kernels_in(machine) == everything
    assert machine.cli("gc", "--keep-lock", tmp_path / "none.lock", **shared).code == 2
    assert kernels_in(machine) == everything
    answer = machine.cli("gc", "--dry-run", "--json", **shared)
    assert len(answer.data["removed"]) == 4  # a kernel, and the index, the manifest and the table of its release
    assert kernels_in(machine) == everything
    assert machine.cli("gc", "--json", **shared).data["removed"] == answer.data["removed"]
    assert kernels_in(machine) == set(HERE.values())


def test_gc_leaves_what_was_used_lately_if_it_is_asked_to(machine: Machine, shared: dict[str, Any]) -> None:
    week_ago = time.time() - 7 * 86_400
    victim = next(path for path in machine.store.rglob("*.cubin") if path.read_bytes() in GONE.values())
    os.utime(victim, (week_ago, week_ago))
    assert machine.cli("gc", "--unused-for", 8, "--json", **shared).data["removed"] == []
    assert machine.cli("gc", "--unused-for", 6, "--json", **shared).data["removed"] == [str(victim)]


def test_gc_stops_at_the_size_that_is_wanted(machine: Machine, shared: dict[str, Any]) -> None:
    before = machine.cli("status", "--json", **shared).data["bytes"]
    assert machine.cli("gc", "--max-bytes", before, "--json", **shared).data["removed"] == []
    answer = machine.cli("gc", "--max-bytes", 0, "--json", **shared)
    assert len(answer.data["removed"]) == 4
    assert answer.data["kept_bytes"] == machine.cli("status", "--json", **shared).data["bytes"] < before


def test_what_is_unpacked_in_a_directory_counts_as_here(
    machine: Machine, shared: dict[str, Any], tmp_path: Path
) -> None:
    shutil.move(machine.store, tmp_path / "image")
    settings = {**shared, "mirrors": None, "path": tmp_path / "image"}
    assert machine.cli("status", "--json", **settings).data["complete"]
    rows = machine.cli("list", "--json", **settings).data["kernels"]
    assert all(row["place"].startswith(str(tmp_path / "image")) for row in rows)
    assert machine.cli("fetch", "--json", **settings).data["present"] == 3
    assert machine.cli("verify", **settings).code == 0
    assert not machine.store.exists()
