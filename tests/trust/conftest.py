"""A repository with two libraries, and what a client remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trust.simulator import Publisher


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "repository", "kernels", "other")
    publisher.release("kernels", "1.0", b"first")
    publisher.release("kernels", "1.1", b"second", channels=["stable"])
    publisher.release("other", "2026.1", b"third")
    return publisher


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"
