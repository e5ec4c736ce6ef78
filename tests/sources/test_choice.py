"""Which sources there are, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.digest import Digest
from kartifacts.sources import from_settings, installed_bundles
from kartifacts.sources.directory import DirectorySource

Make = Callable[..., Settings]


def install_bundle(site: Path, package: str, value: str) -> Path:
    """What pip leaves of a bundle wheel, with a package that must not be imported."""
    directory = site / package
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise RuntimeError('imported')")
    information = site / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[kartifacts.bundles]\n{package} = {value}\n")
    return directory


def test_explicit_directories_come_first_and_mirrors_last(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = install_bundle(tmp_path / "site", "bundle_of_tests", "bundle_of_tests")
    monkeypatch.syspath_prepend(tmp_path / "site")
    sources = from_settings(
        settings(path=f"{tmp_path}/a:{tmp_path}/b", mirrors=f"http://127.0.0.1:1 file://{tmp_path}/m%20n")
    )
    assert [source.local for source in sources] == [True, True, True, False, True]
    assert [source.path for source in sources if isinstance(source, DirectorySource)] == [
        tmp_path / "a",
        tmp_path / "b",
        bundle,
        tmp_path / "m n",
    ]
    assert "bundle_of_tests" not in sys.modules


def test_offline_no_source_needs_a_socket(tmp_path: Path, settings: Make) -> None:
    sources = from_settings(settings(mirrors=f"http://127.0.0.1:1 file://{tmp_path}", offline=True))
    assert [source.name for source in sources] == [f"file://{tmp_path}"]


def test_a_bundle_may_lie_inside_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = install_bundle(tmp_path, "bundle_with_depth", "bundle_with_depth.repository")
    monkeypatch.syspath_prepend(tmp_path)
    assert ("bundle_with_depth", bundle / "repository") in installed_bundles()


@pytest.mark.parametrize("value", ["no_such_package", "", "two words", ".inside", "kartifacts.config:x y"])
def test_a_broken_bundle_is_a_warning_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    install_bundle(tmp_path, "bundle_that_lies", value)
    monkeypatch.syspath_prepend(tmp_path)
    assert "bundle_that_lies" not in dict(installed_bundles())
    assert "bundle_that_lies" in caplog.text


def test_a_file_url_of_another_host_is_refused(settings: Make) -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        from_settings(settings(mirrors="file://elsewhere/mirror"))


def test_a_file_mirror_is_read(repository: Path, settings: Make, digest: Digest, content: bytes) -> None:
    (source,) = from_settings(settings(mirrors=f"file://{repository}"))
    with source.read(digest, len(content)) as pieces:
        assert b"".join(pieces) == content
