"""ELF files made to cost much: readers do work in proportion to the size of a file, whatever its numbers claim."""

from __future__ import annotations

import signal
import struct
from collections.abc import Callable, Iterator

import pytest
import zstandard

from kartifacts.build.difference import differences
from kartifacts.build.elf import inspect_bytes
from kartifacts.errors import VerificationError
from kartifacts.runtime import host

STRTAB, DYNAMIC, DYNSYM, VERDEF, VERNEED = 3, 6, 11, 0x6FFFFFFD, 0x6FFFFFFE
Row = tuple[int, int, int, int, int, int]  # name, kind, offset, size, link, info


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it takes more than its size is worth")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def elf(content: bytes, rows: list[Row], *, names: int = 0, machine: int = 62) -> bytes:
    """A file whose sections are `rows`; their offsets count from the start of `content`."""
    table = 64 + len(content)
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = identity + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, table, 0, 64, 56, 0, 64, len(rows), names)
    body = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, 64 + offset, size, link, info, 0, 0)
        for name, kind, offset, size, link, info in rows
    )
    return head + content + body


def many_sections_over_all(kind: int, content: bytes, count: int = 60_000) -> bytes:
    return elf(content, [(0, STRTAB, 0, len(content), 0, 0), *[(0, kind, 0, len(content), 0, 9)] * (count - 1)])


def fat(count: int, entry: bytes) -> bytes:
    return b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry for _ in range(count))


def image(raw: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQIIHHI", 2, 0, 64, len(payload), len(payload), 0, 0, 0, 80)
    return (head + bytes(40 - len(head)) + struct.pack("<QQQ", 0x8000, 0, raw)).ljust(64, b"\0") + payload


def one_fat_section(content: bytes, copies: int = 1) -> bytes:
    names = b"\0.nv_fatbin\0"
    rows: list[Row] = [(0, STRTAB, len(content), len(names), 0, 0)]
    rows += [(1, 1, 0, len(content), 0, 0)] * copies
    return elf(content + names, rows)


def bomb() -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))


CRAFTED: dict[str, Callable[[], bytes]] = {
    **{
        f"60,000 sections of kind {kind:#x} over the same megabyte": lambda kind=kind: many_sections_over_all(  # type: ignore[misc]
            kind, b"\x01\0\0\0\x10\0\x01\0" * (1 << 17)
        )
        for kind in (1, DYNAMIC, DYNSYM, VERNEED)
    },
    "section names of 4 KB each": lambda: elf(
        b"n" * 100_000, [(number, STRTAB, 0, 100_000 if number == 0 else 0, 0, 0) for number in range(60_000)]
    ),
    "symbol names of 4 KB each": lambda: elf(
        b"n" * 100_000 + struct.pack("<IBBHQQ", 7, 0x10, 0, 1, 0, 0) * 400_000,
        [(0, STRTAB, 0, 100_000, 0, 0), (0, DYNSYM, 100_000, 9_600_000, 0, 0)],
    ),
    "needed libraries of 4 KB each": lambda: elf(
        b"n" * 100_000 + struct.pack("<QQ", 1, 7) * 400_000,
        [(0, STRTAB, 0, 100_000, 0, 0), (0, DYNAMIC, 100_000, 6_400_000, 0, 0)],
    ),
    "versions that overlap": lambda: elf(
        b"\0" * 16 + struct.pack("<HHIII", 1, 0xFFFF, 0, 1, 1) * 20_000,
        [(0, STRTAB, 0, 16, 0, 0), (0, VERNEED, 16, 320_000, 0, 9)],
    ),
    "versions that each step one byte": lambda: elf(
        b"\0" * 16 + b"\x01\0\0\0" * 250_000, [(0, STRTAB, 0, 16, 0, 0), (0, VERNEED, 16, 1_000_000, 0, 9)]
    ),
    "many empty fat binaries": lambda: one_fat_section(fat(60_000, b"")),
    "fat sections over the same bytes": lambda: one_fat_section(fat(60_000, b""), copies=60_000),
    "padding without end": lambda: one_fat_section(bytes(60_000_000)),
    "many bombs": lambda: one_fat_section(fat(200, image(1 << 26, bomb()))),
    "images that claim a gigabyte": lambda: one_fat_section(fat(1, image(1 << 30, b"x") * 1000)),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_file_is_read_or_refused_in_time_that_its_size_is_worth(kind: str) -> None:
    content = CRAFTED[kind]()
    try:
        found = inspect_bytes(content, "crafted")
    except VerificationError:
        return
    assert sum(map(len, (*found.needed, *found.undefined, *found.exports))) <= 16 * len(content) + (4 << 20)


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_files_are_compared_in_time_that_their_size_is_worth(kind: str) -> None:
    content = CRAFTED[kind]()
    assert differences(content, content[:-1] + bytes([content[-1] ^ 1]))


def test_a_cubin_whose_notes_hold_a_number_without_end_is_a_typed_error_or_read() -> None:
    note, names = b"-arch sm_" + b"9" * 100_000, b"\0.note.nv.tkinfo\0"
    rows: list[Row] = [(0, STRTAB, len(note), len(names), 0, 0), (1, 7, 0, len(note), 0, 0)]
    assert inspect_bytes(elf(note + names, rows, machine=190), "crafted").kind == "cubin"


DEFINITIONS: dict[str, Callable[[], bytes]] = {
    "60,000 sections over the same definitions": lambda: many_sections_over_all(
        VERDEF, (b"\0" * 12 + struct.pack("<II", 20, 20)) * 20_000
    ),
    "definitions that step one byte": lambda: many_sections_over_all(
        VERDEF, (b"\0" * 12 + struct.pack("<II", 1, 1)) * 2_000
    ),
    "names without end": lambda: elf(
        struct.pack("<I", 0).rjust(16, b"\0") * 40_000 + b"n" * 4_000_000,
        [(0, STRTAB, 640_000, 4_000_000, 0, 0), (0, VERDEF, 0, 640_000, 0, 40_000)],
    ),
}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_the_versions_of_a_crafted_library_cost_no_more_than_its_size(kind: str) -> None:
    content = DEFINITIONS[kind]()
    try:
        host.defined_versions(content)
    except (ValueError, struct.error):
        return
