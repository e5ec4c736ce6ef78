"""A kernel that was damaged in the store is healed, or an error where it cannot be; it is never compiled instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import StoreError, VerificationError
from kartifacts.store import Store
from kartifacts.testing import Mirror
from tests.conftest import Machine, Released

ASK: dict[str, Any] = {"op": "norm/rmsnorm", "device": "cpu", "dtype": "float32"}


def flip(path: Path) -> None:
    """Other bytes of the same number, as a disk may make them, in a file that no process has mapped."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    new = path.with_name("new")
    new.write_bytes(content)
    new.chmod(0o444)
    new.replace(path)


@pytest.mark.parametrize("note", [True, False], ids=["with a note", "without"])
@pytest.mark.parametrize("jit", ["auto", "always", "never"])
def test_damage_is_healed_online_and_an_error_offline_whatever_the_jit_may(
    machine: Machine, released: Released, jit: str, note: bool
) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "jit": jit}
        assert machine.cli("fetch", "--ops", "norm", "--archs", str(released.best), **settings).code == 0
        rows = machine.cli("list", "--ops", "norm/rmsnorm", "--archs", str(released.best), "--json", **settings).data
        (path,) = {Path(row["place"]) for row in rows["kernels"] if row["uri"].endswith("=float32")}
        good = path.read_bytes()
        if not note:
            for each in (machine.store / "v1" / "recall").glob("*"):
                each.unlink()
        flip(path)
        with pytest.raises(VerificationError) as caught:
            machine.registry(offline=1, **settings).load(**ASK)
        assert str(path) in str(caught.value)
        assert not list(machine.workspace.rglob("*.so"))
        healed = machine.registry(**settings).load(**ASK)
        assert healed.path.read_bytes() == good
        assert healed.origin == mirror.url


def test_what_is_exported_is_never_damaged(machine: Machine, released: Released, tmp_path: Path) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url}
        assert machine.cli("fetch", **settings).code == 0
        rows = machine.cli("list", "--json", **settings).data["kernels"]
        path = Path(rows[0]["place"])
        good = path.read_bytes()
        flip(path)
        answer = machine.cli("fetch", "--out", tmp_path / "offline", offline=1, **settings)
        assert answer.code == 5
        assert not list((tmp_path / "offline").rglob("*.so"))
        assert machine.cli("fetch", "--out", tmp_path / "out", **settings).code == 0
        assert good in [each.read_bytes() for each in (tmp_path / "out").rglob("*.so")]
        assert path.read_bytes() == good


def test_damage_that_cannot_be_moved_away_is_never_taken_for_the_kernel(
    machine: Machine, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "jit": "auto"}
        path = machine.registry(**settings).load(**ASK).path
        flip(path)

        def read_only(*_: object) -> Path:
            raise StoreError("cannot move away: Read-only file system")

        monkeypatch.setattr(Store, "quarantine", read_only)
        with pytest.raises(VerificationError, match=path.name):
            machine.registry(**settings).load(**ASK)
        assert not list(machine.workspace.rglob("*.so"))
