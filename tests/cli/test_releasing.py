"""What becomes of releases that are public, as somebody types it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kartifacts.testing import tiny_repository
from tests.conftest import Machine


@pytest.fixture
def keys(machine: Machine, tmp_path: Path) -> Path:
    assert machine.cli("keys", "init", tmp_path / "keys", "--library", "mylib").code == 0
    return tmp_path / "keys"


@pytest.fixture
def bucket(machine: Machine, keys: Path, tmp_path: Path) -> str:
    """Two releases, the first of them stable."""
    text = f"dir:{tmp_path}/bucket"
    for version, channels in (("1.0", ["--channel", "stable"]), ("2.0", [])):
        content = {"norm/x?dtype=half": version.encode()}
        source = tiny_repository(tmp_path / version, content, library="mylib", version=version).path
        done = machine.cli("publish", text, "--from", source, "--keys", keys, *channels)
        assert done.code == 0, done.err
    return text


def test_a_channel_is_led_to_another_release(machine: Machine, bucket: str, keys: Path) -> None:
    done = machine.cli("promote", bucket, "mylib", "2.0", "--channel", "stable", "--keys", keys)
    assert done.code == 0, done.err
    assert "stable leads to mylib 2.0" in done.out
    assert "verified as a new reader: online: timestamp 3" in done.out
    again = machine.cli("promote", bucket, "mylib", "2.0", "--channel", "stable", "--keys", keys, "--json")
    assert json.loads(again.out)["views"]["online"]["timestamp"] == 3
    wrong = machine.cli("promote", bucket, "mylib", "3.0", "--channel", "stable", "--keys", keys)
    assert wrong.code == 2
    assert "there are: 1.0, 2.0" in wrong.err


def test_a_release_is_retired_and_its_bytes_go_after_their_grace(
    machine: Machine, bucket: str, keys: Path, tmp_path: Path
) -> None:
    done = machine.cli("retire", bucket, "mylib", "1.0", "--keys", keys)
    assert (done.code, done.out.splitlines()[0]) == (0, "retired mylib 1.0")
    again = machine.cli("retire", bucket, "mylib", "1.0", "--keys", keys)
    assert (again.code, again.out.splitlines()[0]) == (0, "mylib 1.0 is not listed")
    for path in (tmp_path / "bucket").rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 9_000_000,) * 2)
    first = machine.cli("retain", bucket, "--keys", keys, "--json")
    assert first.code == 0, first.err
    waiting = json.loads(first.out)["waiting"]
    assert waiting > 4
    told = machine.cli("retain", bucket, "--keys", keys, "--grace", "0s", "--dry-run")
    assert f"would delete {waiting} objects" in told.out
    second = machine.cli("retain", bucket, "--keys", keys, "--grace", "0", "--json")
    assert len(json.loads(second.out)["deleted"]) == waiting
    assert machine.cli("verify", tmp_path / "bucket").code == 0


@pytest.mark.parametrize("grace", ["", "-1d", "1w", "1 day", "nan", "9999999d", "٣d"])
def test_a_span_of_time_that_is_none_is_refused(machine: Machine, keys: Path, tmp_path: Path, grace: str) -> None:
    done = machine.cli("retain", f"dir:{tmp_path}/bucket", "--keys", keys, "--grace", grace)
    assert done.code == 2
    assert "span of time" in done.err


def test_retention_of_a_bucket_where_nothing_is_signed_deletes_nothing(
    machine: Machine, keys: Path, tmp_path: Path
) -> None:
    source = tiny_repository(tmp_path / "source", {"norm/x?dtype=half": b"x"}, library="mylib", version="1").path
    assert machine.cli("publish", f"dir:{tmp_path}/plain", "--from", source).code == 0
    done = machine.cli("retain", f"dir:{tmp_path}/plain", "--keys", keys, "--grace", "0s")
    assert done.code == 2
    assert "nothing is signed" in done.err
    assert machine.cli("verify", tmp_path / "plain").code == 0
