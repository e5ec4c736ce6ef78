"""verify and gc: damage is found, what is wanted stays, links are not followed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.model.digest import Digest, sha256
from kartifacts.store import Store

CONTENTS = [bytes([number]) * 1000 for number in range(5)]
DIGESTS = [sha256(content) for content in CONTENTS]


@pytest.fixture
def filled(store: Store) -> Store:
    for number, content in enumerate(CONTENTS):
        path = store.put(DIGESTS[number], content, ".so")
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    return store


def held(store: Store) -> set[Digest]:
    return {entry.digest for entry in store.entries()}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(0o444)


def test_verify_finds_a_flipped_byte_and_moves_the_entry_away(filled: Store) -> None:
    path = filled.path(DIGESTS[2], ".so")
    damage(path)
    read: list[int] = []
    report = filled.verify(read.append)
    assert report.entries == 5
    assert report.bytes == sum(read) == 5000
    (found,) = report.damaged
    assert found.path == path
    assert "sha256" in found.reason
    assert found.moved_to is not None
    assert found.moved_to.exists()
    assert not path.exists()
    assert filled.verify().damaged == ()


def test_verify_lists_damage_in_a_store_that_it_cannot_write(filled: Store, mount: Callable[..., None]) -> None:
    damage(filled.path(DIGESTS[0], ".so"))
    mount(filled.root, "--bind", "-o", "ro", str(filled.root))
    (found,) = Store(filled.root).verify().damaged
    assert found.moved_to is None
    assert found.path.exists()


def test_gc_keeps_what_it_is_told_to(filled: Store) -> None:
    report = filled.gc({DIGESTS[1], DIGESTS[3]}, dry_run=True)
    assert report.freed == 3000
    assert held(filled) == set(DIGESTS)
    assert filled.gc({DIGESTS[1], DIGESTS[3]}) == report
    assert held(filled) == {DIGESTS[1], DIGESTS[3]}


def test_gc_stops_at_the_size_that_is_wanted_with_the_longest_unused_gone(filled: Store) -> None:
    report = filled.gc({DIGESTS[0]}, max_bytes=3000)
    assert held(filled) == {DIGESTS[0], DIGESTS[3], DIGESTS[4]}
    assert (report.kept, report.kept_bytes) == (3, 3000)


def test_gc_never_removes_what_is_kept_however_large(filled: Store) -> None:
    filled.gc(set(DIGESTS), max_bytes=0)
    assert held(filled) == set(DIGESTS)


def test_gc_never_follows_a_link(filled: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = outside / DIGESTS[0]
    precious.write_bytes(CONTENTS[0])
    (filled.root / "v1" / "sha256" / "zz").symlink_to(outside)
    (filled.root / "v1" / "tmp").symlink_to(outside)
    os.utime(precious, (0, 0))
    filled.gc(set())
    assert precious.read_bytes() == CONTENTS[0]
    assert held(filled) == set()


def test_gc_sweeps_up_after_killed_processes_and_leaves_the_living_alone(filled: Store) -> None:
    directory = filled.path(DIGESTS[0]).parent
    dead, alive = directory / ".tmp-1-dead", directory / ".tmp-2-alive"
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(dead, (hours_ago, hours_ago))
    with filled.lock("held"), filled.lock("forgotten"):
        pass
    locks = filled.root / "v1" / "locks"
    (locks / "forgotten.lock").touch()
    os.utime(locks / "forgotten.lock", (hours_ago, hours_ago))
    with filled.lock("held"):
        os.utime(locks / "held.lock", (hours_ago, hours_ago))
        filled.gc(set(DIGESTS))
        assert (locks / "held.lock").exists()
    assert not (locks / "forgotten.lock").exists()
    assert not dead.exists()
    assert alive.exists()
