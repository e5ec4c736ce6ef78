"""The quick look at what is installed never misses what the slow one would find."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kartifacts.files import installed
from kartifacts.files.installed import declares

GROUP = "kartifacts.bundles"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # pytest's own, and those of editable installs, would make every answer "perhaps".
    usual = [each for each in sys.meta_path if each is PathFinder or not hasattr(each, "find_distributions")]
    monkeypatch.setattr(sys, "meta_path", usual)
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


# -- versions ----------------------------------------------------------------------------------------------------------


WHEEL = "Metadata-Version: 2.1\nName: some-wheel\nVersion: 1.2+cu130\n"


def describe(place: Path, directory: str, text: str = WHEEL) -> None:
    (place / directory).mkdir(parents=True)
    (place / directory / ("METADATA" if directory.endswith("dist-info") else "PKG-INFO")).write_text(text)


@pytest.mark.parametrize(
    ("directory", "text"),
    [
        ("some_wheel-1.2+cu130.dist-info", "Name: some-wheel\nVersion: 1.2+cu130\n\nVersion: 9\n"),
        ("Some.Wheel-1.2.dist-info", "name: x\r\nversion:1.2+cu130\r\n\r\nSays: nothing\r\n"),
        ("some_wheel-1.2.dist-info", "Description: of\n  Version: 7\nVersion: 1.2+cu130\n"),
        ("some_wheel.egg-info", "Name: some-wheel\nVersion: 1.2+cu130\n"),
        ("some_wheel-1.2-py3.11.egg-info", "Name: some-wheel\nVersion: 1.2+cu130\n"),
    ],
)
def test_a_version_is_what_the_standard_library_says(place: Path, directory: str, text: str) -> None:
    assert installed.version("some-wheel") is None
    describe(place, "some_wheel_extra-3.dist-info")
    describe(place, directory, text)
    for name in ("some-wheel", "some_wheel", "Some.Wheel"):
        assert installed.version(name) == metadata.version(name) == "1.2+cu130"


def test_of_two_installations_that_counts_which_is_found_first(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1", "2"):
        describe(place / version, f"some_wheel-{version}.dist-info", f"Name: some-wheel\nVersion: {version}\n")
    for order in ("12", "21"):
        monkeypatch.setattr(sys, "path", [str(tmp_path / "gone"), *(str(place / version) for version in order)])
        assert installed.version("some-wheel") == metadata.version("some-wheel") == order[0]


@pytest.mark.parametrize("damage", ["no METADATA", "no Version", "two of them", "an archive"])
def test_where_it_is_not_certain_the_standard_library_is_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    describe(place, "some_wheel-1.2.dist-info")
    if damage == "no METADATA":
        (place / "some_wheel-1.2.dist-info/METADATA").unlink()
    elif damage == "no Version":
        (place / "some_wheel-1.2.dist-info/METADATA").write_text("Name: some-wheel\n\nVersion: 1\n")
    elif damage == "two of them":
        describe(place, "some_wheel-1.3.dist-info")
    else:
        (place / "packages.zip").write_bytes(b"PK\x05\x06" + bytes(18))
        monkeypatch.setattr(sys, "path", [str(place / "packages.zip"), str(place)])
    monkeypatch.setattr(metadata, "version", lambda name: f"asked for {name}")
    assert installed.version("some-wheel") == "asked for some-wheel"


def test_another_version_installed_while_a_process_runs_is_seen(place: Path) -> None:
    describe(place, "some_wheel-1.dist-info", "Name: some-wheel\nVersion: 1\n")
    assert installed.version("some-wheel") == "1"
    (place / "some_wheel-1.dist-info").rename(place / "some_wheel-2.dist-info")
    (place / "some_wheel-2.dist-info/METADATA").write_text("Name: some-wheel\nVersion: 2\n")
    assert installed.version("some-wheel") == "2"


def test_the_usual_answer_needs_no_machinery() -> None:
    code = "import sys\nfrom kartifacts.files.installed import version\nprint(version('apache-tvm-ffi'))\n"
    code += "assert 'importlib.metadata' not in sys.modules"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == metadata.version("apache-tvm-ffi")
