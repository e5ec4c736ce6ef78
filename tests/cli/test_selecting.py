"""A misspelt name never passes for something that is there, whatever the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kartifacts.testing import Mirror
from tests.conftest import Machine, Released

WRONG = [
    ("--archs", "9.0"),
    ("--archs", "cpu:x86-64-v3 9.0"),
    ("--ops", "nonsense"),
    ("--ops", "norm,nrom"),
    ("--ops", "norm/rmsnrom"),
]


@pytest.fixture
def filled(machine: Machine, released: Released) -> dict[str, Any]:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url}
        assert machine.cli("fetch", **settings).code == 0
    return settings


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_what_nothing_pinned_is_called_is_missing(
    machine: Machine, released: Released, filled: dict[str, Any], wrong: tuple[str, str]
) -> None:
    for command, code in ((("fetch",), 3), (("list",), 3), (("verify",), 5), (("verify", released.path), 5)):
        answer = machine.cli(*command, *wrong, **filled)
        assert answer.code == code, (command, answer)
        assert "no selected kernel" in answer.out + answer.err


def test_what_is_there_is_found_complete_by_any_of_its_names(
    machine: Machine, released: Released, filled: dict[str, Any]
) -> None:
    for words in ((), ("--ops", "norm"), ("--ops", "norm/rmsnorm,activation"), ("--archs", str(released.best))):
        for command in (("fetch",), ("list",), ("verify",), ("verify", released.path)):
            answer = machine.cli(*command, *words, **filled)
            assert answer.code == 0, (command, words, answer)


def test_archs_of_the_settings_count_where_none_are_given(machine: Machine, filled: dict[str, Any]) -> None:
    assert machine.cli("verify", archs="9.0", **filled).code == 5
    assert machine.cli("fetch", archs="9.0", **filled).code == 3
    rows = machine.cli("status", "--json", archs="cpu:x86-64", **filled).data["bundles"]
    assert {row["arch"] for row in rows} == {"cpu:x86-64"}


def test_gc_never_takes_the_pins_of_a_wheel_for_all_that_the_store_is_for(
    machine: Machine, filled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kartifacts.runtime import pins

    lock = pins.read_lock(machine.settings(**filled))
    monkeypatch.setattr(pins, "wheel_pins", lambda: iter([("wheel", pin) for pin in lock.releases]))
    before = sorted(path for path in machine.store.rglob("*") if path.is_file())
    answer = machine.cli("gc", mirrors=filled["mirrors"])
    assert answer.code == 2
    assert "KARTIFACTS_LOCK" in answer.err
    assert sorted(path for path in machine.store.rglob("*") if path.is_file()) == before


def test_damage_in_a_local_directory_is_named_by_verify_though_the_store_is_whole(
    machine: Machine, filled: dict[str, Any], tmp_path: Path
) -> None:
    (kernel,) = {
        Path(row["place"])
        for row in machine.cli("list", "--ops", "norm/rmsnorm", "--archs", "cpu:x86-64", "--json", **filled).data[
            "kernels"
        ]
        if row["uri"].endswith("float32") and row["arch"] == "cpu:x86-64"
    }
    place = tmp_path / "unpacked" / "v1" / "sha256" / kernel.name[:2]
    place.mkdir(parents=True)
    content = bytearray(kernel.read_bytes())
    content[len(content) // 2] ^= 1
    (place / kernel.name).write_bytes(content)
    answer = machine.cli("verify", path=tmp_path / "unpacked", **filled)
    assert answer.code == 5
    assert f"damaged: norm/rmsnorm?dtype=float32: {place / kernel.name}" in answer.out
    assert "missing:" not in answer.out
