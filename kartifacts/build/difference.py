"""Explains how two built files differ: by section, symbol, entry for the linker, note and image inside; pure.

The work is in proportion to the sizes of the files, whatever they claim about themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from kartifacts.build.cubins import CUDA, Image, Usage
from kartifacts.build.elf import Inspection, dynamic_of, inspect_bytes
from kartifacts.build.images import IMAGE
from kartifacts.build.sections import (
    SHT_DYNAMIC,
    SHT_DYNSYM,
    SHT_NOBITS,
    Malformed,
    Section,
    kind_and_machine,
    sections_of,
    strings_of,
    unpack,
)
from kartifacts.errors import VerificationError
from kartifacts.model.difference import Change, Difference, lines, names, values

_PIECE = 1 << 20
_MOST = 400  # rows of one file
_MOST_LINES = 1000  # in a section of text
_SHT_SYMTAB = 2
_HEADER = (("type", 16, "H"), ("machine", 18, "H"), ("ABI", 7, "B"), ("version of the ABI", 8, "B"), ("flags", 48, "I"))
_TAGS = {
    1: "needs",
    14: "is called",
    15: "run path",
    29: "run path",
    30: "flags",
    0x6FFFFFFB: "flags 1",
    22: "text relocations",
}
_NAMED_TAGS = (1, 14, 15, 29)
_TEXTS = (".comment", ".note.nv.tkinfo", ".kart.launch")  # sections that are read as lines of text
_TEXT = re.compile(rb"[\t\x20-\x7e]{3,}")
_CONTAINERS = (".nv_fatbin", "__nv_relfatbin", IMAGE)  # what is inside is compared instead
_MEANINGS = (
    (r"\.text(\..*)?|\.(init|fini|plt.*)", "code"),
    (r"\.rodata(\..*)?|\.data\.rel\.ro|\.nv\.constant.*", "constants"),
    (r"\.debug_.*|\.nv_debug.*|\.eh_frame.*", "line numbers, and how a stack is unwound"),
    (r"\.comment", "what compiled it"),
    (r"\.note\.nv\.tkinfo", "tools that made it, and their command lines"),
    (r"\.note\.gnu\.build-id", "an identity that the linker gave it"),
    (r"\.nv\.info.*|\.nv\.compat|\.note\.nv\.cuinfo", "what functions take of a GPU"),
    (r"\.nv\.(shared|local|global).*|\.bss", "memory that is set aside"),
    (r"\.(dyn|sym|str|shstr|gnu\.hash|gnu\.version).*|\.nv\.callgraph|\.nv\.prototype", "names, and where they lead"),
    (r"\.rela.*", "places that are filled in when it is loaded"),
    (r"\.kart\.launch", "what the launcher knows of its image"),
)


def differences(first: bytes, second: bytes) -> list[Difference]:
    """How two files differ; none if they are the same."""
    if first == second:
        return []
    try:
        before, after = inspect_bytes(first, "first"), inspect_bytes(second, "second")
        found = list(_elf(memoryview(first), memoryview(second), before, after))
    except VerificationError as error:
        why = f"one of them is no sound ELF file: {error.__cause__}"
        return [Difference("file", "changed", f"{_bytes(first, second)}; {why}")]
    if not found:
        found = [Difference("outside of all sections", "changed", _bytes(first, second))]
    found.sort(key=_rank)
    if len(found) > _MOST:
        found = [*found[:_MOST], Difference("further", "changed", f"{len(found) - _MOST} more differences")]
    return found


def _rank(row: Difference) -> int:
    """Causes before what follows from them."""
    told = (
        *(*_TEXTS, "dynamic entries", "exports", "needs", "function ", "header", "symbols"),
        *("section .text", "section .rodata", "section .data"),
    )
    place = next((number for number, word in enumerate(told) if word in row.where), len(told))
    return place if place < len(told) or row.change == "changed" else place - 1


def _elf(first: memoryview, second: memoryview, before: Inspection, after: Inspection) -> Iterator[Difference]:
    if "fatbin" not in (before.kind, after.kind):
        yield from _headers(first, second)
        yield from _sections(first, second)
    yield from names("exports", before.exports, after.exports)
    yield from values("needs", before.needs, after.needs)
    yield from _functions(before.functions, after.functions)
    if before.kind == after.kind == "shared" or "fatbin" in (before.kind, after.kind):
        yield from _images(before.images, after.images)


def _functions(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> Iterator[Difference]:
    for name in sorted({*before, *after}):
        if name not in after or name not in before:
            change: Change = "added" if name in after else "removed"
            yield Difference(f"function {name[:160]}", change, "is new" if name in after else "is gone")
        elif before[name] != after[name]:
            earlier, later = vars(before[name]), vars(after[name])
            changed = [each for each in earlier if earlier[each] != later[each]]
            text = "; ".join(f"{each.replace('_', ' ')} {earlier[each]} became {later[each]}" for each in changed)
            yield Difference(f"function {name[:160]}", "changed", text)


# -- what a file says of itself ----------------------------------------------------------------------------------------


def _headers(first: memoryview, second: memoryview) -> Iterator[Difference]:
    for name, offset, layout in _HEADER:
        before, after = unpack(layout, first, offset)[0], unpack(layout, second, offset)[0]
        if before != after:
            yield Difference(f"header, {name}", "changed", f"{before:#x} became {after:#x}")


# -- sections ----------------------------------------------------------------------------------------------------------


def _sections(first: memoryview, second: memoryview) -> Iterator[Difference]:
    before, after = sections_of(first), sections_of(second)
    _, machine = kind_and_machine(first)
    for name, earlier, later in _matched(before, after):
        where = f"section {name[:160]}{_meaning(name)}"
        if later is None:
            yield Difference(where, "removed", f"{earlier.size if earlier else 0} bytes are gone")
        elif earlier is None:
            yield Difference(where, "added", f"{later.size} bytes are new")
        elif _same(earlier, later) or (name in _CONTAINERS and machine != CUDA):
            continue
        else:
            said = lines(where, _texts(earlier.data), _texts(later.data)) if name in _TEXTS else ()
            yield from [*said] or [Difference(where, "changed", _change(earlier, later))]
    for kind in (SHT_DYNSYM, _SHT_SYMTAB):
        yield from names("symbols", _symbols(before, kind), _symbols(after, kind))
    yield from names("dynamic entries", _entries(before), _entries(after))


def _matched(
    before: Sequence[Section], after: Sequence[Section]
) -> Iterator[tuple[str, Section | None, Section | None]]:
    """Sections of the same name; the n-th of a name with the n-th."""
    waiting: dict[str, list[Section]] = {}
    for section in reversed(after):
        waiting.setdefault(section.name, []).append(section)
    for section in before:
        others = waiting.get(section.name)
        yield section.name, section, others.pop() if others else None
    for section in after:
        if (rest := waiting.get(section.name)) and rest[-1] is section:
            yield section.name, None, rest.pop()


def _meaning(name: str) -> str:
    return next((f" ({meaning})" for pattern, meaning in _MEANINGS if re.fullmatch(pattern, name)), "")


def _same(before: Section, after: Section) -> bool:
    return (before.kind, before.size, before.flags) == (after.kind, after.size, after.flags) and (
        before.data == after.data
    )


def _change(before: Section, after: Section) -> str:
    if SHT_NOBITS in (before.kind, after.kind):
        return f"{before.size} bytes became {after.size}"
    if before.data == after.data:
        return f"flags {before.flags:#x} became {after.flags:#x}, kind {before.kind:#x} became {after.kind:#x}"
    return _bytes(before.data, after.data)


def _bytes(before: bytes | memoryview, after: bytes | memoryview) -> str:
    """How many bytes differ, and where the first of them is."""
    length = min(len(before), len(after))
    first, count = length, 0
    for start in range(0, length, _PIECE):
        one, other = before[start : start + _PIECE], after[start : start + _PIECE]
        one, other = one[: length - start], other[: length - start]
        if one == other:
            continue
        changed = (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(len(one), "big")
        if not count:
            first = start + len(changed) - len(changed.lstrip(b"\0"))
        count += len(changed) - changed.count(0)
    if len(before) == len(after):
        return f"{count} of {length} bytes differ, the first at byte {first}"
    return f"{len(before)} bytes became {len(after)}; the first difference is at byte {first}"


def _texts(data: memoryview) -> list[str]:
    return [text[0].decode() for text in islice(_TEXT.finditer(data), _MOST_LINES)]


def _symbols(sections: Sequence[Section], kind: int) -> Iterator[str]:
    for section in sections:
        if section.kind != kind:
            continue
        strings = strings_of(list(sections), section)
        for offset in range(0, len(section.data), 24):
            name, _, _, index = unpack("IBBH", section.data, offset)
            if text := strings.text(name):
                yield text if index else f"{text} (undefined)"


def _entries(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        if section.kind != SHT_DYNAMIC:
            continue
        strings = strings_of(list(sections), section)
        for tag, value in dynamic_of(section):
            if tag in _TAGS:
                yield f"{_TAGS[tag]} {strings.text(value) if tag in _NAMED_TAGS else hex(value)}"


# -- images inside -----------------------------------------------------------------------------------------------------


def _images(before: Sequence[Image], after: Sequence[Image]) -> Iterator[Difference]:
    waiting: dict[str, list[Image]] = {}
    for image in reversed(after):
        waiting.setdefault(_called(image), []).append(image)
    for image in before:
        others = waiting.get(_called(image))
        if not others:
            yield Difference(_called(image), "removed", f"{len(image.content)} bytes are gone")
            continue
        other = others.pop()
        if image.content != other.content:
            yield from _inside(image, other)
    for name, rest in waiting.items():
        for image in rest:
            yield Difference(name, "added", f"{len(image.content)} bytes are new")


def _inside(before: Image, after: Image) -> Iterator[Difference]:
    name = _called(before)
    if before.arch.ptx:
        yield Difference(name, "changed", _bytes(before.content, after.content))
        return
    try:
        found = [*_headers(before.content, after.content), *_sections(before.content, after.content)]
    except Malformed as error:
        found = [Difference("file", "changed", f"{_bytes(before.content, after.content)}; {error}")]
    if not found:
        found = [Difference("outside of all sections", "changed", _bytes(before.content, after.content))]
    for row in found:
        yield row.inside(name)


def _called(image: Image) -> str:
    return f"PTX for {image.arch}" if image.arch.ptx else f"image for {image.arch}"
