"""Repositories, mirrors and fetchers; processes of their own."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.fetch import Fetcher
from kartifacts.sources import from_settings
from kartifacts.store import Store
from kartifacts.testing import Mirror, TinyRepository, tiny_repository
from tests.processes import open_path, run

__all__ = ["open_path", "run"]  # fixtures

FILES = {
    "a.cubin": random.Random(1).randbytes(70_000),
    "b.so": b"\x7fELF" * 9000,
    "c.h": b"#pragma once\n",
    "d": b"no suffix at all",
    "norm/rmsnorm?dtype=bfloat16": random.Random(2).randbytes(30_000),
}


@pytest.fixture
def files() -> dict[str, bytes]:
    return dict(FILES)


@pytest.fixture
def repository(tmp_path: Path) -> TinyRepository:
    return tiny_repository(tmp_path / "repository", FILES)


@pytest.fixture
def mirror(repository: TinyRepository) -> Iterator[Mirror]:
    with Mirror(repository.path) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings with short times, nothing read from this machine's environment."""

    def make(**overrides: object) -> Settings:
        base = {
            "store": tmp_path / "store",
            "connect_timeout": 0.5,
            "read_timeout": 2.0,
            "retries": 2,
            "progress": "off",
        }
        return config.read({"HOME": str(tmp_path)}, {**base, **overrides})

    return make


@pytest.fixture
def fetcher(settings: Callable[..., Settings]) -> Callable[..., Fetcher]:
    def make(**overrides: object) -> Fetcher:
        chosen = settings(**overrides)
        return Fetcher(Store(chosen.store), from_settings(chosen), chosen)

    return make


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to make a socket fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
