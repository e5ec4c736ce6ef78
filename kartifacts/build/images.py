"""Device code travels in the shared object that launches it: attaches an image to a launcher, and finds it there again.

    kernel.so = a launcher, byte for byte what the linker made, but for where its section headers are
              + .kart.image    the image, as the driver takes it, aligned to 64 bytes
              + .kart.launch   what the launcher has to know of it: one `key value` per line, sorted by key

Neither section is loaded: no program header changes.  The launcher finds its own file and maps them when it is called.
An image may have a .kart.launch of its own, where its compiler alone knows what a launcher has to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence

from kartifacts.build.sections import Malformed, kind_and_machine, sections_of, unpack
from kartifacts.errors import ConfigError, VerificationError

IMAGE = ".kart.image"
LAUNCH = ".kart.launch"

ALIGNMENT = 64
MAX_NOTES = 64 << 10  # bytes
_SHARED_OBJECT, _SHT_PROGBITS, _SHT_STRTAB = 3, 1, 3
_DEVICES = (190, 224)  # machines: NVIDIA's and AMD's GPUs
_ROW = "<IIQQQQIIQQ"
_MOST_SECTIONS = 0xFF00  # from here on ELF counts them elsewhere
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")


def attach(launcher: bytes, image: bytes, notes: Mapping[str, str]) -> bytes:
    """The shared object `launcher` with `image` and `notes` in two more sections; a function of its arguments alone.

    Raises:
        VerificationError: `launcher` is no sound ELF shared object, or holds an image already.
        ConfigError: the image is empty, or a note cannot be written as a line.
    """
    text = _written(notes)
    if not image:
        raise ConfigError("an image to be attached is empty")
    try:
        return _attached_to(memoryview(launcher), image, text)
    except Malformed as error:
        raise VerificationError(f"no image can be attached to the launcher: {error}") from error


def noted(image: bytes, notes: Mapping[str, str]) -> bytes:
    """The image with `notes` in a section that goes wherever it goes; a function of its arguments alone.

    Raises:
        VerificationError: it is no sound ELF file, or has notes already.
        ConfigError: a note cannot be written as a line.
    """
    text = _written(notes)
    try:
        return _extended(memoryview(image), ((LAUNCH, text, 1),))
    except Malformed as error:
        raise VerificationError(f"nothing can be noted in the image: {error}") from error


def noted_in(image: bytes | memoryview) -> dict[str, str]:
    """The notes in an image, or in a file that was linked; none if it has no such section.

    Raises:
        VerificationError: it is no ELF file, or is damaged.
    """
    try:
        found = next((section for section in sections_of(memoryview(image)) if section.name == LAUNCH), None)
        return {} if found is None else _read(bytes(found.data))
    except Malformed as error:
        raise VerificationError(f"the notes in an image are not sound: {error}") from error


def attached(module: bytes | memoryview) -> tuple[bytes, dict[str, str]] | None:
    """The image in `module` and the notes about it; None if it is an ELF file without an image, or an image itself.

    Raises:
        VerificationError: it is no ELF file, is damaged, or holds one section without the other.
    """
    data = memoryview(module)
    try:
        _, machine = kind_and_machine(data)
        found = [section for section in sections_of(data) if section.name in (IMAGE, LAUNCH)]
        if not found or machine in _DEVICES:
            return None
        if sorted(section.name for section in found) != [IMAGE, LAUNCH]:
            raise Malformed(
                f"expected one {IMAGE} and one {LAUNCH}, got {', '.join(section.name for section in found)}"
            )
        by_name = {section.name: bytes(section.data) for section in found}
        if not by_name[IMAGE]:
            raise Malformed(f"{IMAGE} is empty")
        return by_name[IMAGE], _read(by_name[LAUNCH])
    except Malformed as error:
        raise VerificationError(f"a module with an attached image is not sound: {error}") from error


def _attached_to(data: memoryview, image: bytes, text: bytes) -> bytes:
    kind, _ = kind_and_machine(data)
    if kind != _SHARED_OBJECT:
        raise Malformed(f"expected a shared object (type {_SHARED_OBJECT}), got type {kind}")
    return _extended(data, ((IMAGE, image, ALIGNMENT), (LAUNCH, text, 1)))


def _extended(data: memoryview, added: Sequence[tuple[str, bytes, int]]) -> bytes:
    """An ELF file with further sections that nothing loads: name, content and alignment of each."""
    sections = sections_of(data)
    if taken := [section.name for section in sections if section.name in (IMAGE, LAUNCH)]:
        raise Malformed(f"it has a section {taken[0]} already")
    (table,) = unpack("Q", data, 40)
    count, names = unpack("HH", data, 60)
    if not 0 < count < _MOST_SECTIONS - len(added):
        raise Malformed(f"it has {count} section headers")
    rows = [list(unpack(_ROW[1:], data, table + 64 * number)) for number in range(count)]
    old = bytes(sections[names].data)
    if sections[names].kind != _SHT_STRTAB or not old.endswith(b"\0"):
        raise Malformed("its section names are no table of strings")

    out = bytearray(data)
    table_of_names = old + "".join(f"{name}\0" for name, _, _ in added).encode()
    start = len(old)
    for name, content, alignment in added:
        place = _append(out, content, alignment)
        rows.append([start, _SHT_PROGBITS, 0, 0, place, len(content), 0, 0, alignment, 0])
        start += len(name) + 1
    rows[names][4:6] = _append(out, table_of_names, 1), len(table_of_names)
    headers = _append(out, b"".join(struct.pack(_ROW, *row) for row in rows), 8)
    struct.pack_into("<Q", out, 40, headers)
    struct.pack_into("<H", out, 60, len(rows))
    return bytes(out)


def _append(out: bytearray, content: bytes, alignment: int) -> int:
    """Where `content` lies after it was added."""
    out.extend(bytes(-len(out) % alignment))
    place = len(out)
    out.extend(content)
    return place


def _written(notes: Mapping[str, str]) -> bytes:
    for key, value in notes.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(f"a note for the launcher is called {key[:100]!r}; expected letters, digits and _ . -")
        if not value or value != value.strip() or not value.isascii() or not value.isprintable():
            raise ConfigError(f"the note {key!r} for the launcher is {value[:100]!r}; expected one line of ASCII text")
    text = "".join(f"{key} {notes[key]}\n" for key in sorted(notes)).encode()
    if len(text) > MAX_NOTES:
        raise ConfigError(f"the notes for a launcher take {len(text)} bytes; expected at most {MAX_NOTES}")
    return text


def _read(text: bytes) -> dict[str, str]:
    if len(text) > MAX_NOTES:
        raise Malformed(f"{LAUNCH} has {len(text)} bytes; expected at most {MAX_NOTES}")
    try:
        lines = text.decode("ascii").split("\n")
        notes = dict(line.split(" ", 1) for line in lines[:-1])
        if _written(notes) == text:
            return notes
    except (ValueError, ConfigError):
        pass
    raise Malformed(f"{LAUNCH} does not hold sorted lines of keys and values")
