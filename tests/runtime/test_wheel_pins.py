"""Pins that installed bundle wheels bring: no lock needed, the user's lock wins, and looking for them costs once."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts import sources
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import BUNDLE_LOCK, blob_path
from kartifacts.model.manifest import Lock, Pin, encode
from kartifacts.runtime.pins import read_lock
from kartifacts.sources import from_settings
from tests.sources.test_choice import install_bundle


def pin(library: str, version: str, index: bytes = b"an index") -> Pin:
    return Pin(library=library, version=version, sha256=sha256(index), size=len(index))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def wheel(package: str, *pins: Pin, index: bytes = b"an index") -> Path:
        directory = install_bundle(site, package, package)
        (directory / BUNDLE_LOCK).write_bytes(encode(Lock(version=1, releases=[*pins])))
        blob = directory / blob_path(sha256(index))
        blob.parent.mkdir(parents=True)
        blob.write_bytes(index)
        return directory

    return wheel


def in_force(lock: Path | None = None) -> list[tuple[str, str]]:
    return [(pin.library, pin.version) for pin in read_lock(Settings(lock=lock)).releases]


def test_a_wheel_needs_no_lock_and_the_users_lock_wins(install: Callable[..., Path], tmp_path: Path) -> None:
    install("wheel_a", pin("a", "1"))
    install("wheel_b", pin("b", "1"))
    assert in_force() == [("a", "1"), ("b", "1")]
    lock = tmp_path / "kartifacts.lock"
    lock.write_bytes(encode(Lock(version=1, releases=[pin("b", "2", b"other"), pin("c", "1", b"third")])))
    assert in_force(lock) == [("b", "2"), ("c", "1"), ("a", "1")]


def test_wheels_of_one_release_pin_it_once_and_of_two_releases_both(install: Callable[..., Path]) -> None:
    for number, version in enumerate(["1", "1", "2"]):
        install(f"wheel_{number}", pin("a", version))
    assert in_force() == [("a", "1"), ("a", "2")]


def test_a_pin_of_something_that_the_wheel_does_not_hold_is_damage(install: Callable[..., Path]) -> None:
    directory = install("wheel_a", pin("a", "1", b"another index"))
    with pytest.raises(VerificationError, match="wheel_a is damaged") as caught:
        read_lock(Settings())
    assert str(directory) in caught.value.source


@pytest.mark.parametrize(
    ("content", "error"), [(b"", VerificationError), (b"{", VerificationError), (b" " * (2 << 20), ConfigError)]
)
def test_a_malformed_lock_of_a_wheel_is_not_passed_over(
    install: Callable[..., Path], content: bytes, error: type[Exception]
) -> None:
    directory = install("wheel_a", pin("a", "1"))
    (directory / BUNDLE_LOCK).write_bytes(content)
    with pytest.raises(error, match=BUNDLE_LOCK):
        read_lock(Settings())


def test_a_bundle_without_a_lock_is_a_place_only(install: Callable[..., Path]) -> None:
    (install("wheel_a", pin("a", "1")) / BUNDLE_LOCK).unlink()
    assert in_force() == []
    assert [source.installed for source in from_settings(Settings())] == [True]


def test_what_is_installed_is_looked_up_once_until_something_is_installed(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("wheel_a", pin("a", "1"))
    sources._bundles_of.cache_clear()
    asked = []
    real = importlib.metadata.entry_points

    def entry_points(**selected: str) -> object:
        asked.append(selected)
        return real(**selected)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    for _ in range(3):
        assert in_force() == [("a", "1")]
        assert len(from_settings(Settings())) == 1
    assert len(asked) == 1
    install("wheel_b", pin("b", "1"))
    assert in_force() == [("a", "1"), ("b", "1")]
    assert len(asked) == 2
