"""A repository, a mirror in front of it, and a host that never answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.errors import VerificationError
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import blob_path
from kartifacts.sources import Source
from kartifacts.sources.turns import first_good
from kartifacts.testing import Mirror

CONTENT = bytes(range(256)) * 1500


@pytest.fixture
def content() -> bytes:
    return CONTENT


@pytest.fixture
def digest() -> Digest:
    return sha256(CONTENT)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    blob = path / blob_path(sha256(CONTENT))
    blob.parent.mkdir(parents=True)
    blob.write_bytes(CONTENT)
    return path


@pytest.fixture
def mirror(repository: Path) -> Iterator[Mirror]:
    with Mirror(repository) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings with short times, nothing read from this machine's environment."""

    def make(*, environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
        base = {"store": tmp_path / "store", "connect_timeout": 0.5, "read_timeout": 0.5, "retries": 2}
        return config.read({"HOME": str(tmp_path), **(environ or {})}, {**base, **overrides})

    return make


Fetch = Callable[..., bytes]


@pytest.fixture
def fetch() -> Fetch:
    """Reads a blob from the first of some sources that has it and checks its digest, as a transfer does."""

    def run(
        sources: Sequence[Source], content: bytes, *, retries: int = 2, errors: list[Exception] | None = None
    ) -> bytes:
        seen: list[Exception] = [] if errors is None else errors

        def attempt(source: Source) -> bytes:
            with source.read(sha256(content), len(content)) as pieces:
                got = b"".join(pieces)
            if got != content:
                raise VerificationError("these are other bytes")
            return got

        found = first_good(
            sources, attempt, label="a blob", retries=retries, refused=lambda _, error: seen.append(error)
        )
        if found is None:
            raise seen[-1]
        return found

    return run


@pytest.fixture
def dead_host() -> Iterator[str]:
    """A port that drops every connection attempt, as a firewall does: its queue is full and nobody empties it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for filler in fillers:
            filler.close()


@pytest.fixture
def refusing_host() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
