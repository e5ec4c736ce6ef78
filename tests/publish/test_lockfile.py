"""kartifacts.lock: one version of a library, never half written, readable by people and by the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.manifest import Pin, decode_lock
from kartifacts.publish.lockfile import add_pins, read_lock


def pin(library: str, version: str, digit: str = "a") -> Pin:
    return Pin(library=library, version=version, sha256=digit * 64, size=100)


def test_another_version_of_a_library_replaces_the_first_and_others_stay(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "my kartifacts.lock"
    add_pins(lock, [pin("b", "1"), pin("a", "1")])
    add_pins(lock, [pin("b", "2", "c")])
    assert read_lock(lock).releases == [pin("a", "1"), pin("b", "2", "c")]
    assert decode_lock(lock.read_bytes()) == read_lock(lock)


def test_the_same_pins_give_the_same_bytes_made_for_people(tmp_path: Path) -> None:
    add_pins(tmp_path / "x", [pin("a", "1"), pin("b", "1")])
    add_pins(tmp_path / "y", [pin("b", "1")])
    add_pins(tmp_path / "y", [pin("a", "1")])
    text = (tmp_path / "x").read_text()
    assert text == (tmp_path / "y").read_text()
    assert '\n      "library": "a",\n' in text
    assert text.endswith("}\n")


def test_pinning_again_does_not_touch_the_file(tmp_path: Path) -> None:
    add_pins(tmp_path / "x", [pin("a", "1")])
    before = (tmp_path / "x").stat()
    add_pins(tmp_path / "x", [pin("a", "1")])
    assert (tmp_path / "x").stat() == before


def test_two_versions_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 1 and 2 of a"):
        add_pins(tmp_path / "x", [pin("a", "1"), pin("a", "2")])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version":2,"releases":[]}', '{"version":1}', "\0"])
def test_a_malformed_lock_is_neither_read_nor_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "kartifacts.lock"
    path.write_text(damage)
    with pytest.raises(VerificationError, match=r"kartifacts\.lock"):
        read_lock(path)
    with pytest.raises(VerificationError, match=r"kartifacts\.lock"):
        add_pins(path, [pin("a", "1")])
    assert path.read_text() == damage


def test_a_lock_that_cannot_be_read_or_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the lock"):
        read_lock(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the lock"):
        add_pins(tmp_path / "file" / "x.lock", [pin("a", "1")])
    with pytest.raises(ConfigError, match="cannot write the lock"):
        add_pins(tmp_path, [pin("a", "1")])


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    add_pins(tmp_path / "link", [pin("a", "1")])
    assert os.readlink(tmp_path / "link") == "real"
    assert read_lock(tmp_path / "real").releases == [pin("a", "1")]


def test_no_pin_of_another_process_is_lost(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kartifacts.model.manifest import Pin
from kartifacts.publish.lockfile import add_pins
for n in range(10):
    add_pins(Path(sys.argv[1]), [Pin(library=f"{sys.argv[2]}{n}", version="1", sha256="a" * 64, size=1)])
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path / "lock", name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0] * 3
    assert len(json.loads((tmp_path / "lock").read_text())["releases"]) == 30
