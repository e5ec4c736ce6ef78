"""The quick look at what is installed never misses what the slow one would find."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kartifacts.files.installed import declares

GROUP = "kartifacts.bundles"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # pytest's own, and those of editable installs, would make every answer "perhaps".
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not hasattr(each, "find_distributions")])
    return tmp_path


def install(place: Path, text: str, *, kind: str = "dist-info") -> None:
    directory = place / f"some_wheel-1.0.{kind}"
    directory.mkdir()
    (directory / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text("Name: some-wheel\nVersion: 1.0\n")
    (directory / "entry_points.txt").write_text(text)


@pytest.mark.parametrize("kind", ["dist-info", "egg-info"])
@pytest.mark.parametrize(
    "text",
    [
        f"[{GROUP}]\nnorm = some_package\n",
        f"[console_scripts]\nx = y:z\n\n[{GROUP}]\nnorm = some_package\n",
        f"; a comment\n\n[ {GROUP} ]\r\nnorm = some_package\r\n",
        f"[{GROUP}]   \nnorm=some_package",
        f"[kartifacts.libraries]\na = b\n[{GROUP}]\nnorm = \xe4\n",
    ],
)
def test_what_is_declared_is_seen_however_it_is_spelt(place: Path, kind: str, text: str) -> None:
    assert not declares(GROUP)
    install(place, text, kind=kind)
    assert declares(GROUP)


@pytest.mark.parametrize(
    "text", ["", "[console_scripts]\nx = kartifacts.bundles:z\n", "[kartifacts.bundles_of_others]\n"]
)
def test_what_is_not_declared_is_not_seen(place: Path, text: str) -> None:
    install(place, text)
    assert not declares(GROUP)


def test_what_is_installed_while_a_process_runs_is_seen(place: Path) -> None:
    assert not declares(GROUP)
    install(place, f"[{GROUP}]\nnorm = some_package\n")
    assert declares(GROUP)


def test_an_archive_is_left_to_who_can_read_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(place / "packages.zip", "w") as archive:
        archive.writestr("some_wheel-1.0.dist-info/entry_points.txt", f"[{GROUP}]\nnorm = some_package\n")
        archive.writestr("some_wheel-1.0.dist-info/METADATA", "Name: some-wheel\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [str(place / "packages.zip")])
    assert declares(GROUP)


def test_another_way_to_find_distributions_is_left_to_who_can_use_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_distributions(context: Any = None) -> list[Any]:
            return []

    assert not declares(GROUP)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert declares(GROUP)


def test_it_agrees_with_the_standard_library_about_this_environment() -> None:
    for group in (GROUP, "kartifacts.libraries"):
        assert declares(group) or not entry_points(group=group)
