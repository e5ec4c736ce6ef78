"""GPU code in files: finds every image in an ELF file, and reads which arch it is for and what its functions take.

A cubin states the base of its arch in its ELF header and the suffix only in notes.  Inside a shared object cubins and
PTX lie in *fat binary* containers, one entry per image, whose header knows both even if the image is compressed, in
sections of their own or among constants; or one image of any kind lies in a section of its own (see `images`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kartifacts.build.images import IMAGE
from kartifacts.build.sections import (
    SHT_NOTE,
    Malformed,
    Section,
    cut,
    kind_and_machine,
    notes_of,
    sections_of,
    strings_of,
    unpack,
)
from kartifacts.errors import ConfigError
from kartifacts.model.arch import Arch, Suffix, parse_arch

CUDA, AMDGPU = 190, 224  # machines
_OSABI_OLD_CUBIN = 51  # ptxas before 13.0, for sm below 100
_OLD_ACCELERATOR = 0x800  # in the flags of the old format, which knows no families
_ACCELERATOR_TARGET = b"\x02\x09\x01"  # in .nv.compat: the code is for exactly this arch

_FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_FATBIN_MAGIC = 0xBA55ED50
_CONSTANTS = (".rodata", ".lrodata")
_CONTAINER = struct.pack("<IHH", _FATBIN_MAGIC, 1, 16)  # how one begins: version, size of its header
_FATBIN_PTX, _FATBIN_ELF = 1, 2
_FATBIN_ZSTD, _FATBIN_LZ4 = 0x8000, 0x2000
_FATBIN_ARCH_SPECIFIC, _FATBIN_FAMILY = 0x100000, 0x200000
_PIECE = 1 << 20
_MAX_IMAGE = 1 << 30  # bytes
_NOT_ZERO = re.compile(rb"[^\0]")

# An honest file stays far below these; a crafted one must not cost more than its size.
_RATIO, _SMALL = 64, 256 << 20  # bytes decompressed per byte of the file, and of any
_SUFFIXES: dict[bytes, Suffix] = {b"": "", b"a": "a", b"f": "f"}

# Attributes in .nv.info, and one of their four forms; the values of the others stand in place of a size.
_SIZED = 4
_FRAME, _REGISTERS, _BARRIERS, _ANNOTATIONS, _API = 0x11, 0x2F, 0x4C, 0x55, 0x37
_SPILL = 1  # kind of an annotation
_STORE_LOCAL, _LOAD_LOCAL = 0x387, 0x983  # the low 12 bits of an instruction, since sm_70
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 0)
_ENTRY = 0x10  # in what else a symbol says: the host may launch it
_ANNOTATED = 129  # since this release ptxas marks every instruction that spills
_RESERVED = 1024  # bytes of shared memory that the system takes of each block, since sm_90
_AMDGPU_METADATA = 32
_VGPR_BYTES = 4
_CHIP = re.compile(r"-(gfx\w+(?::\w+[+-])*)$")  # amdgcn-amd-amdhsa--gfx90a:xnack-, amdgpu9.42-amd-amdhsa-unknown-gfx942


@dataclass(frozen=True)
class Usage:
    """What one function takes of a GPU: registers and bytes of local memory per thread, the rest per block."""

    registers: int = 0
    stack: int = 0  # local memory in all, where spilled registers go and arrays that are indexed
    spill_stores: int = 0  # bytes that its instructions move there for want of registers
    spill_loads: int = 0
    shared: int = 0  # static
    barriers: int = 0

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    def largest(self, other: Usage) -> Usage:
        """The larger figure of each."""
        return Usage(**{name: max(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Image:
    """One GPU image.

    Args:
        exact: the file says the whole of its arch; else only that its suffix is not known to be there.
        cuda: the version of CUDA that made it, if it says so.
        functions: those that can be launched; of PTX and of what cannot be decompressed none are known.
        content: as the driver takes it, decompressed; empty where it cannot be.
    """

    arch: Arch
    exact: bool
    cuda: tuple[int, int] | None = None
    functions: dict[str, Usage] = field(default_factory=dict)
    content: memoryview = field(default=memoryview(b""), repr=False, compare=False)

    def is_for(self, arch: Arch) -> bool:
        """Whether this may be the image that was promised for `arch`."""
        if self.exact or self.arch.kind != "cuda":
            return self.arch == arch
        return (self.arch.major, self.arch.minor, self.arch.ptx) == (arch.major, arch.minor, arch.ptx)


def images_in(data: memoryview, sections: list[Section]) -> Iterator[Image]:
    """Every image in a file, which may itself be one, or a container of them; `sections` are those of an ELF file."""
    room = _Room(_RATIO * len(data) + _SMALL)
    if is_fatbin(data):
        yield from _fatbin(data, room)
        return
    _, machine = kind_and_machine(data)
    if machine in (CUDA, AMDGPU):
        yield image_of(data)
        return
    for section in sections:
        if section.name in _FATBIN_SECTIONS or (section.name == IMAGE and is_fatbin(section.data)):
            yield from _fatbin(section.data, room)
        elif section.name == IMAGE:
            yield image_of(section.data)
        elif section.name in _CONSTANTS:
            yield from _among_constants(section.data, room)


def is_fatbin(data: memoryview) -> bool:
    """Whether it is a container of images by itself."""
    return bytes(data[:4]) == _FATBIN_MAGIC.to_bytes(4, "little")


def image_of(data: memoryview) -> Image:
    """A cubin or the code object of an AMD GPU."""
    _, machine = kind_and_machine(data)
    if machine == CUDA:
        return _cubin(data)
    if machine == AMDGPU:
        return _code_object(data)
    raise Malformed(f"expected an image for a GPU, got code for machine {machine}")


def _arch(sm: int, suffix: Suffix, *, ptx: bool = False) -> Arch:
    return Arch(kind="cuda", major=sm // 10, minor=sm % 10, suffix=suffix, ptx=ptx)


def _cubin(data: memoryview) -> Image:
    (flags,) = unpack("I", data, 48)
    old = data[7] == _OSABI_OLD_CUBIN
    sm = flags & 0xFF if old else flags >> 8 & 0xFF
    sections = sections_of(data)
    by_name = {section.name: section for section in sections}
    tools = _content(by_name, ".note.nv.tkinfo")
    target = re.search(rb"-arch[ =]sm_(\d{1,3})([af]?)\b", tools)
    suffix: Suffix = ""
    exact = True
    if old:
        suffix = "a" if flags & _OLD_ACCELERATOR else ""
    elif target and int(target[1]) == sm:
        suffix = _SUFFIXES[target[2]]
    elif _content(by_name, ".nv.compat")[:3] == _ACCELERATOR_TARGET:
        suffix = "a"
    else:
        exact = sm < 90  # there are no suffixes below
    release = re.search(rb"release (\d{1,3})\.(\d{1,3}),", tools)
    cuda = (int(release[1]), int(release[2])) if release else None
    return Image(_arch(sm, suffix), exact, cuda, _functions(sections, by_name, sm), data)


def _content(sections: dict[str, Section], name: str) -> bytes:
    return bytes(sections[name].data) if name in sections else b""


# -- what functions take -----------------------------------------------------------------------------------------------


def _functions(sections: list[Section], by_name: dict[str, Section], sm: int) -> dict[str, Usage]:
    symbols, info = by_name.get(".symtab"), by_name.get(".nv.info")
    if symbols is None or info is None:
        return {}
    strings = strings_of(sections, symbols)
    figures: dict[str, dict[int, int]] = {}
    names: dict[int, str] = {}  # symbol → its name, if it can be launched
    for attribute, value in _attributes(info.data):
        if attribute in (_FRAME, _REGISTERS) and len(value) == 8:
            symbol, figure = unpack("II", value)
            if symbol not in names:
                text, _, other = unpack("IBB", symbols.data, 24 * symbol)
                names[symbol] = strings.text(text) if other & _ENTRY else ""
            figures.setdefault(names[symbol], {})[attribute] = figure
    figures.pop("", None)
    return {name: _usage(name, figures[name], by_name, sm) for name in sorted(figures)}


def _usage(name: str, figures: dict[int, int], sections: dict[str, Section], sm: int) -> Usage:
    """What a function takes, by the attributes of its own and its code."""
    code = sections.get(f".text.{name}")
    own = sections.get(f".nv.info.{name}")
    barriers = 0 if code is None else code.flags >> 20 & 0x7F
    spilling: list[int] = []
    api = 0
    for attribute, value in _attributes(own.data if own else memoryview(b"")):
        if attribute == _BARRIERS:
            barriers = value[0]
        elif attribute == _API and len(value) == 4:
            (api,) = unpack("I", value)
        elif attribute == _ANNOTATIONS:
            pairs = unpack(f"{len(value) // 8 * 2}I", value)
            spilling += [offset for kind, offset in zip(pairs[::2], pairs[1::2], strict=True) if kind == _SPILL]
    shared = sections.get(f".nv.shared.{name}")
    stack = figures.get(_FRAME, 0)
    stores = loads = 0
    if code is not None and stack and sm >= 70:
        places = spilling if api >= _ANNOTATED else range(0, len(code.data) - 15, 16)
        stores, loads = _local_traffic(code.data, places)
    return Usage(
        registers=figures.get(_REGISTERS, 0),
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        shared=max(0, shared.size - (_RESERVED if sm >= 90 else 0)) if shared else 0,
        barriers=barriers,
    )


def _attributes(info: memoryview) -> Iterator[tuple[int, memoryview]]:
    offset = 0
    while offset < len(info):
        form, attribute, size = unpack("BBH", info, offset)
        if form == _SIZED:
            yield attribute, cut(info, offset + 4, size, "an attribute")
            offset += 4 + size
        else:
            yield attribute, info[offset + 2 : offset + 4]
            offset += 4


def _local_traffic(code: memoryview, places: range | list[int]) -> tuple[int, int]:
    """Bytes that the instructions at `places` store in local memory, and that they load from there."""
    stores = loads = 0
    for place in places:
        low, high = unpack("QQ", code, place)
        width = _WIDTHS[high >> 9 & 7]
        if low & 0xFFF == _STORE_LOCAL:
            stores += width
        elif low & 0xFFF == _LOAD_LOCAL:
            loads += width
    return stores, loads


# -- AMD ---------------------------------------------------------------------------------------------------------------


class _AmdFunction(msgspec.Struct):
    name: str = msgspec.field(name=".name", default="")
    registers: int = msgspec.field(name=".vgpr_count", default=0)
    spilled: int = msgspec.field(name=".vgpr_spill_count", default=0)
    stack: int = msgspec.field(name=".private_segment_fixed_size", default=0)
    shared: int = msgspec.field(name=".group_segment_fixed_size", default=0)


class _AmdMetadata(msgspec.Struct):
    target: str = msgspec.field(name="amdhsa.target", default="")
    functions: list[_AmdFunction] = msgspec.field(name="amdhsa.kernels", default_factory=list)


def _code_object(data: memoryview) -> Image:
    for section in sections_of(data):
        if section.kind != SHT_NOTE:
            continue
        for owner, kind, content in notes_of(section):
            if (owner, kind) == ("AMDGPU", _AMDGPU_METADATA):
                return _described(content, data)
    raise Malformed("the code object of an AMD GPU does not say what it is for")


def _described(note: memoryview, data: memoryview) -> Image:
    try:
        found: Any = msgspec.msgpack.decode(note, type=_AmdMetadata)
        chip = _CHIP.search(found.target)
        arch = parse_arch(chip[1] if chip else found.target)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError, ConfigError) as error:
        raise Malformed(f"the code object of an AMD GPU describes itself wrongly: {error}") from None
    functions = {
        each.name: Usage(
            registers=each.registers,
            stack=each.stack,
            spill_stores=_VGPR_BYTES * each.spilled,
            spill_loads=_VGPR_BYTES * each.spilled,
            shared=each.shared,
        )
        for each in found.functions
    }
    return Image(arch, True, None, dict(sorted(functions.items())), data)


# -- fat binaries ------------------------------------------------------------------------------------------------------


class _Room:
    """How many bytes may still be decompressed from one file."""

    def __init__(self, left: int) -> None:
        self.left = left


def _fatbin(data: memoryview, room: _Room) -> Iterator[Image]:
    """Every image in a section of fat binary containers."""
    offset = 0
    while (found := _NOT_ZERO.search(data, offset)) is not None:
        offset += (found.start() - offset) // 8 * 8  # behind the padding between object files
        magic, _, header, size = unpack("IHHQ", data, offset)
        if magic != _FATBIN_MAGIC or header < 16:
            raise Malformed(f"expected a fat binary at byte {offset} of its section, got {magic:#x}, {header}")
        yield from _container(cut(data, offset + header, size, "a fat binary"), room)
        offset += header + size


def _among_constants(data: memoryview, room: _Room) -> Iterator[Image]:
    """The images in containers that a compiler has put among other constants, as CuTe DSL does."""
    constants, offset = bytes(data), -1
    while (offset := constants.find(_CONTAINER, offset + 1)) >= 0:
        try:
            (size,) = unpack("Q", data, offset + 8)
            found = list(_container(cut(data, offset + 16, size, "a fat binary"), room))
        except Malformed:  # bytes that look like the start of one
            continue
        yield from found
        offset += 15 + size


def _container(data: memoryview, room: _Room) -> Iterator[Image]:
    offset = 0
    while offset < len(data):
        kind, _, header, size, compressed, _, minor, major, sm = unpack("HHIQIIHHI", data, offset)
        flags, _, raw_size = unpack("QQQ", data, offset + 40)
        if header < 64:
            raise Malformed(f"an entry of a fat binary has a header of {header} bytes")
        payload = cut(data, offset + header, size, "an image")
        offset += header + size
        if flags & _FATBIN_ZSTD:
            room.left -= raw_size
            if room.left < 0:
                raise Malformed("its compressed images claim more than they can hold")
            payload = _decompressed(cut(payload, 0, compressed, "a compressed image"), raw_size)
        elif flags & _FATBIN_LZ4:
            payload = data[:0]
        suffix: Suffix = "a" if flags & _FATBIN_ARCH_SPECIFIC else "f" if flags & _FATBIN_FAMILY else ""
        if kind == _FATBIN_PTX:
            yield Image(_arch(sm, suffix, ptx=True), True, _cuda_of_ptx(major, minor), content=payload)
        elif kind == _FATBIN_ELF and not payload:
            yield Image(_arch(sm, suffix), True)
        elif kind == _FATBIN_ELF:
            kind_and_machine(payload)
            image = _cubin(payload)
            exact = Image(_arch(sm, suffix or image.arch.suffix), True, image.cuda, image.functions, payload)
            yield exact


def _decompressed(data: memoryview, size: int) -> memoryview:
    import zstandard

    if not 0 < size <= _MAX_IMAGE:
        raise Malformed(f"a compressed image claims {size} bytes")
    try:
        content = bytearray()
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            # `size` is padded, so the frame may hold a little less; and it is a claim, so no memory is taken on it.
            while len(content) < size and (piece := reader.read(min(_PIECE, size - len(content)))):
                content += piece
        return memoryview(content)
    except zstandard.ZstdError as error:
        raise Malformed(f"a compressed image cannot be read: {error}") from error


def _cuda_of_ptx(major: int, minor: int) -> tuple[int, int]:
    """The version of CUDA that speaks this version of PTX: 7.x is 11.x, 9.x is 13.x; 8.x left out 12.6."""
    return major + 4, minor + (major == 8 and minor >= 6)
