"""What a job and the commands about pinned kernels never import: signatures were checked when the lock was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Answer, Machine, Released

HEAVY = {"tuf", "securesystemslib", "cryptography", "boto3", "botocore", "urllib3", "requests", "sigstore"}
SYNCED = {
    "repository": "0" * 64,
    "view": "online",
    **dict.fromkeys(("root", "timestamp", "snapshot", "targets"), 1),
    "libraries": {"kartifacts": 1},
    "expires": "2020-01-01T00:00:00Z",  # long ago: what was pinned stays pinned
    "at": "2019-12-25T00:00:00Z",
}


@pytest.fixture
def lock(released: Released, tmp_path: Path) -> Path:
    """A lock as `sync` makes it."""
    content = json.loads(released.lock_file.read_text()) | {"synced": [SYNCED]}
    (tmp_path / "synced.lock").write_text(json.dumps(content))
    return tmp_path / "synced.lock"


def imported(answer: Answer) -> set[str]:
    assert answer.code == 0, answer.err
    names = {line.rpartition("|")[2].strip() for line in answer.err.splitlines() if line.startswith("import time:")}
    assert "kartifacts.config" in names  # else nothing was seen at all
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "command", ["fetch", "status", "list", "verify", "gc", "config", "explain norm/rmsnorm dtype=float32"]
)
def test_no_command_about_what_is_pinned_looks_at_signatures(
    machine: Machine, released: Released, lock: Path, command: str
) -> None:
    if command not in ("fetch", "config"):
        assert machine.cli("fetch", mirrors=f"file://{released.path}", lock=lock).code == 0
    answer = machine.run_cli(*command.split(), path=released.path, lock=lock, PYTHONPROFILEIMPORTTIME="1")
    assert not imported(answer) & HEAVY


def test_no_load_looks_at_signatures_or_their_expiry(machine: Machine, released: Released, lock: Path) -> None:
    code = "import kartifacts; print(kartifacts.load('norm/rmsnorm', device='cpu', dtype='float32').origin)"
    mirror = f"file://{released.path}"
    for places in ({"path": released.path}, {"mirrors": mirror}, {"offline": 1}):  # the last: from the store
        answer = machine.python(code, lock=lock, jit="never", PYTHONPROFILEIMPORTTIME="1", **places)
        assert not imported(answer) & HEAVY
