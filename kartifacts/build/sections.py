"""The header and the sections of a 64-bit little-endian ELF file, read within what an honest one costs."""

from __future__ import annotations

import struct
from collections.abc import Iterator

HOSTS = {62: "x86_64", 183: "aarch64"}
SHT_NOTE, SHT_NOBITS, SHT_DYNAMIC, SHT_DYNSYM, SHT_VERNEED = 7, 8, 6, 11, 0x6FFFFFFE

# An honest file stays far below these; a crafted one must not cost more than its size.
_OVERLAP = 4  # times that each byte may be part of a section
_NAMES, _FEW_NAMES, _MAX_NAME = 16, 4 << 20, 4096  # characters read per byte of a table, and of any; of one name


class Malformed(Exception):
    """The bytes contradict the format."""


def unpack(layout: str, data: memoryview, offset: int = 0) -> tuple[int, ...]:
    try:
        return struct.unpack_from("<" + layout, data, offset)
    except (struct.error, OverflowError):
        raise Malformed(f"it ends inside a record at offset {offset}") from None


def cut(data: memoryview, start: int, length: int, what: str) -> memoryview:
    if start + length > len(data):
        raise Malformed(f"{what} reaches to byte {start + length} of {len(data)}")
    return data[start : start + length]


class Section:
    """One section; its content may be a table of names, from which no more is read than an honest file needs."""

    def __init__(self, kind: int, data: memoryview, link: int, flags: int = 0, size: int = 0, offset: int = 0) -> None:
        self.name = ""
        self.kind = kind
        self.data = data
        self.link = link
        self.flags = flags
        self.size = size  # also where the file holds no content
        self.offset = offset
        self._left = _NAMES * len(data) + _FEW_NAMES

    def text(self, offset: int) -> str:
        """The name at `offset`."""
        if offset >= len(self.data):
            raise Malformed(f"a name lies at byte {offset} of a table of {len(self.data)}")
        raw = bytes(self.data[offset : offset + _MAX_NAME]).partition(b"\0")[0]
        self._left -= len(raw)
        if self._left < 0:
            raise Malformed("its names overlap")
        return raw.decode("utf-8", "backslashreplace")


def host_machine(content: bytes) -> str:
    """Whose host code an ELF file holds: ``x86_64`` or ``aarch64``; empty if it is none of these."""
    return HOSTS.get(int.from_bytes(content[18:20], "little"), "") if content[:4] == b"\x7fELF" else ""


def kind_and_machine(data: memoryview) -> tuple[int, int]:
    """Type and machine."""
    if bytes(data[:4]) != b"\x7fELF":
        raise Malformed(f"it begins with {bytes(data[:4])!r}")
    if len(data) < 64 or bytes(data[4:6]) != b"\x02\x01":
        raise Malformed("expected a 64-bit little-endian one")
    kind, machine = unpack("HH", data, 16)
    return kind, machine


def sections_of(data: memoryview) -> list[Section]:
    (table,) = unpack("Q", data, 40)
    entry, count, names = unpack("HHH", data, 58)
    if count == 0:
        return []
    if entry != 64 or names >= count:
        raise Malformed(f"its section table has entries of {entry} bytes and its names in section {names} of {count}")
    rows = [unpack("IIQQQQIIQQ", data, table + 64 * number) for number in range(count)]
    sections = [
        Section(
            row[1],
            data[:0] if row[1] in (0, SHT_NOBITS) else cut(data, row[4], row[5], f"section {number}"),
            link=row[6],
            flags=row[2],
            size=row[5],
            offset=row[4],
        )
        for number, row in enumerate(rows)
    ]
    if sum(len(section.data) for section in sections) > _OVERLAP * len(data):
        raise Malformed("its sections overlap")
    for section, row in zip(sections, rows, strict=True):
        section.name = sections[names].text(row[0])
    return sections


def strings_of(sections: list[Section], section: Section) -> Section:
    if section.link >= len(sections):
        raise Malformed(f"section {section.name!r} names section {section.link} of {len(sections)}")
    return sections[section.link]


def segments_of(data: memoryview) -> Iterator[tuple[int, int]]:
    """Type and flags of every segment."""
    (table,) = unpack("Q", data, 32)
    entry, count = unpack("HH", data, 54)
    if count and entry != 56:
        raise Malformed(f"its segment table has entries of {entry} bytes")
    for number in range(count):
        kind, flags = unpack("II", data, table + 56 * number)
        yield kind, flags


def notes_of(section: Section) -> Iterator[tuple[str, int, memoryview]]:
    """Owner, type and content of every note in a section of notes."""
    offset = 0
    while offset < len(section.data):
        owner, size, kind = unpack("III", section.data, offset)
        name = cut(section.data, offset + 12, owner, "a note")
        content = offset + 12 + -(-owner // 4) * 4
        yield (
            bytes(name[:64]).rstrip(b"\0").decode("ascii", "replace"),
            kind,
            cut(section.data, content, size, "a note"),
        )
        offset = content + -(-size // 4) * 4
