"""A repository in which anything at all was changed is refused, or says exactly what it said before.

What may change without being refused is told here, and nothing else may:

- `UNREAD`: what no reader with a root of trust asks for.
- The array of signatures of a timestamp or of a later root, which no other file can list by its hash.  Hex digits may
  come in upper case, and a signature that is not needed for the threshold may be damaged: what was signed is the same.
- The T and the Z of the time at which one of these two expires: in lower case it is the same time, and signatures are
  over what was read, written anew.
- White space after the end of one of these two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from tests.properties.small import Small, looked_at, make

UNREAD = re.compile(
    r"index\.json|oci-layout"  # for tools that know only OCI
    r"|(metadata|airgap)/1\.root\.json"  # whoever trusts it has it already
    r"|metadata/1\.(snapshot|demo)\.json|airgap/1\.(snapshot|demo)\.json"  # replaced by the second release
    r"|gc/.*"  # of publishers among themselves
)
UNLISTED = re.compile(r"(metadata|airgap)/(timestamp|2\.root)\.json")
REFUSALS = (VerificationError, ConfigError, SourceError)

Look = Callable[[], "dict[str, Any] | None"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def look(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Look:
    """What readers believe now; None if it is refused.  It fails if that is anything but what they believed before."""
    place = tmp_path_factory.mktemp("reader")
    settings = Settings(store=place / "store", workspace=place / "workspace", download_threads=1, retries=0)
    before = looked_at(small, settings)

    def now() -> dict[str, Any] | None:
        try:
            found = looked_at(small, settings)
        except REFUSALS:
            return None
        assert found == before
        return found

    return now


def files(small: Small) -> list[str]:
    return sorted(path.relative_to(small.path).as_posix() for path in small.path.rglob("*") if path.is_file())


def read_files(small: Small) -> list[str]:
    return [name for name in files(small) if not UNREAD.fullmatch(name)]


@contextmanager
def holding(path: Path, content: bytes) -> Iterator[None]:
    """Other content in a file for a while; as a new file: some are linked to one another."""
    before = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def check_flip(small: Small, look: Look, name: str, position: int, bit: int) -> None:
    content = (small.path / name).read_bytes()
    flipped = bytearray(content)
    flipped[position] ^= bit
    with holding(small.path / name, bytes(flipped)):
        if look() is not None:
            where = f"bit {bit} of byte {position} of {name}: {content[max(0, position - 40) : position + 40]!r}"
            assert UNLISTED.fullmatch(name), where
            assert position in unsigned(content), where


def unsigned(content: bytes) -> set[int]:
    """The places in a file of metadata whose case or content no signature is over."""
    when = re.search(rb'"expires":"[0-9-]{10}(T)[0-9:]{8}(Z)"', content)
    assert when is not None
    signatures = range(content.index(b'"signatures":['), content.index(b'],"signed":'))
    return {*signatures, when.start(1), when.start(2)}


def spread(size: int, count: int) -> list[int]:
    """The first and the last place, and some between."""
    return sorted({round(number * (size - 1) / (count - 1)) for number in range(count)})


def test_the_repository_is_believed_as_it_is(look: Look) -> None:
    assert look() is not None


def test_what_is_called_unread_is_read_by_nobody(small: Small, look: Look) -> None:
    unread = [small.path / name for name in files(small) if UNREAD.fullmatch(name)]
    assert len(unread) == 8
    before = [path.read_bytes() for path in unread]
    for path in unread:
        path.unlink()
    try:
        assert look() is not None
    finally:
        for path, content in zip(unread, before, strict=True):
            path.write_bytes(content)


def test_a_flipped_byte_is_never_accepted_as_something_else(small: Small, look: Look) -> None:
    for number, name in enumerate(read_files(small)):
        for place in spread((small.path / name).stat().st_size, 4):
            check_flip(small, look, name, place, 1 << (place + number) % 8)


@pytest.mark.slow
@pytest.mark.parametrize("bit", [1, 32])
def test_no_flipped_byte_is_ever_accepted_as_something_else(small: Small, look: Look, bit: int) -> None:
    for name in read_files(small):
        for place in range((small.path / name).stat().st_size):
            check_flip(small, look, name, place, bit)


def test_a_signature_in_upper_case_is_the_same_signature(small: Small, look: Look) -> None:
    path = small.path / "metadata/timestamp.json"
    changed = re.sub(rb'(?<="sig":")[0-9a-f]+', lambda found: found[0].upper(), path.read_bytes())
    assert changed != path.read_bytes()
    with holding(path, changed):
        assert look() is not None


def test_a_damaged_signature_counts_only_if_it_is_needed(small: Small, look: Look) -> None:
    """Three keys have signed the second root, and two suffice."""
    path = small.path / "metadata/2.root.json"
    content = path.read_bytes()
    places = [found.start() for found in re.finditer(rb'(?<="sig":")[0-9a-f]', content)]
    assert len(places) == 3
    for count, believed in ((1, True), (2, False), (3, False)):
        for chosen in combinations(places, count):
            damaged = bytearray(content)
            for place in chosen:
                damaged[place] = ord("0") if damaged[place] != ord("0") else ord("1")
            with holding(path, bytes(damaged)):
                assert (look() is not None) is believed, chosen


def check_cut(small: Small, look: Look, name: str, size: int) -> None:
    with holding(small.path / name, (small.path / name).read_bytes()[:size]):
        assert look() is None, f"{name} cut to {size} bytes"


def test_a_file_that_is_cut_off_is_refused(small: Small, look: Look) -> None:
    for name in read_files(small):
        for size in spread((small.path / name).stat().st_size, 3):
            check_cut(small, look, name, size)


@pytest.mark.slow
def test_a_file_that_is_cut_off_anywhere_is_refused(small: Small, look: Look) -> None:
    for name in read_files(small):
        for size in range((small.path / name).stat().st_size):
            check_cut(small, look, name, size)


@pytest.mark.parametrize("more", [b"\n", b"\0", b"{}"])
def test_a_file_with_more_at_its_end_is_refused(small: Small, look: Look, more: bytes) -> None:
    for name in read_files(small):
        with holding(small.path / name, (small.path / name).read_bytes() + more):
            if look() is not None:
                assert UNLISTED.fullmatch(name), name
                assert more.isspace()


def check_swap(small: Small, look: Look, one: str, other: str) -> None:
    contents = [(small.path / name).read_bytes() for name in (one, other)]
    if contents[0] == contents[1]:
        return
    with holding(small.path / one, contents[1]), holding(small.path / other, contents[0]):
        assert look() is None, f"{one} and {other} are swapped"


def test_a_file_in_the_place_of_its_like_is_refused(small: Small, look: Look) -> None:
    """The other view's, another version's, or another release's: each is signed, and none is what belongs there."""
    by_kind: dict[tuple[str, int], list[str]] = {}
    for name in read_files(small):
        kind = re.sub(r"^(metadata|airgap)/|\d+\.|[0-9a-f]{64}|demo/1\.\d", "", name)
        size = (small.path / name).stat().st_size if name.startswith("blobs/") else 0
        by_kind.setdefault((kind, size), []).append(name)
    pairs = [pair for names in by_kind.values() for pair in combinations(names, 2)]
    assert len(pairs) > 10
    for one, other in pairs:
        check_swap(small, look, one, other)


@pytest.mark.slow
def test_no_two_files_can_be_swapped(small: Small, look: Look) -> None:
    for one, other in combinations(read_files(small), 2):
        check_swap(small, look, one, other)


def test_an_older_version_of_a_file_is_refused(small: Small, look: Look) -> None:
    replaced = 0
    for name in read_files(small):
        directory, _, last = name.rpartition("/")
        kind = re.sub(r"^\d+\.", "", last)
        if directory in ("metadata", "airgap"):
            olds = [old for old in (small.older / directory).iterdir() if re.sub(r"^\d+\.", "", old.name) == kind]
            for content in {old.read_bytes() for old in olds} - {(small.path / name).read_bytes()}:
                replaced += 1
                with holding(small.path / name, content):
                    assert look() is None, name
    assert replaced >= 8  # root, role, snapshot and timestamp of each view


def test_an_older_state_as_a_whole_is_refused(small: Small, look: Look) -> None:
    """It is complete and was right once; only who was there before can know."""
    changed = [name for name in files(small) if not UNREAD.fullmatch(name) and (small.older / name).exists()]
    changed = [name for name in changed if (small.older / name).read_bytes() != (small.path / name).read_bytes()]
    assert changed == ["airgap/timestamp.json", "metadata/timestamp.json"]
    for name in changed:
        with holding(small.path / name, (small.older / name).read_bytes()):
            assert look() is None
