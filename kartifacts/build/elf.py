"""What a built file says about itself (exports, needs, GPU archs), read from its bytes without loading it.

A cubin states the base of its arch in its ELF header and the suffix only in notes.  Inside a shared object cubins and
PTX lie in *fat binary* containers, one entry per image, whose header knows both even if the image is compressed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kartifacts.build.sections import (
    SHT_DYNAMIC,
    SHT_DYNSYM,
    SHT_VERNEED,
    Malformed,
    Section,
    cut,
    kind_and_machine,
    sections_of,
    strings_of,
    unpack,
)
from kartifacts.errors import StoreError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch, Suffix
from kartifacts.model.spec import FFI_ABI

_CUDA = 190
_MACHINES = {62: "x86_64", 183: "aarch64", _CUDA: "cuda", 224: "amdgpu"}
_SHARED_OBJECT = 3
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_OSABI_OLD_CUBIN = 51  # ptxas before 13.0, for sm below 100

_FFI_PREFIX = "__tvm_ffi_"
_FFI_RESERVED = re.compile(r"__tvm_ffi_(main$|_library_ctx$|_library_bin$|_metadata_|_doc_|_cubin_)")

_FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_PTX, _FATBIN_ELF = 1, 2
_FATBIN_ZSTD, _FATBIN_LZ4 = 0x8000, 0x2000
_FATBIN_ARCH_SPECIFIC, _FATBIN_FAMILY = 0x100000, 0x200000
_PIECE = 1 << 20
_MAX_FILE, _MAX_IMAGE = 4 << 30, 1 << 30  # bytes
_NOT_ZERO = re.compile(rb"[^\0]")

# An honest file stays far below these; a crafted one must not cost more than its size.
_RATIO, _SMALL = 64, 256 << 20  # bytes decompressed per byte of the file, and of any
_SUFFIXES: dict[bytes, Suffix] = {b"": "", b"a": "a", b"f": "f"}


@dataclass(frozen=True)
class Inspection:
    """What one ELF file exports and needs."""

    kind: str  # shared | cubin | other
    machine: str  # x86_64 | aarch64 | cuda | amdgpu | the number
    exports: tuple[str, ...] = ()  # names of TVM-FFI functions, sorted
    needs: dict[str, str] = field(default_factory=dict)  # as in model.manifest.KernelEntry
    needed: tuple[str, ...] = ()  # shared libraries
    undefined: tuple[str, ...] = ()  # symbols that another library must define (weak ones need not be there)
    has_rpath: bool = False
    archs: tuple[Arch, ...] = ()  # of its GPU images, each once; ptx marks a PTX image
    sections: dict[str, int] = field(default_factory=dict)  # name → bytes in the file
    frames: dict[str, int] = field(default_factory=dict)  # kernel → bytes of local memory per thread, if any


@dataclass(frozen=True)
class _Image:
    """One GPU image: its arch, the version of CUDA that made it (if it says so), frames per kernel."""

    arch: Arch
    cuda: tuple[int, int] | None
    frames: dict[str, int] = field(default_factory=dict)


def inspect(path: Path) -> Inspection:
    """Read what the ELF file at `path` says.

    Raises:
        VerificationError: it is no 64-bit little-endian ELF file, or is damaged.
        StoreError: it cannot be read.
    """
    try:
        data = read_regular(path, _MAX_FILE)
    except OSError as error:
        raise StoreError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    return inspect_bytes(data, str(path))


def inspect_bytes(data: bytes, name: str) -> Inspection:
    """The same for a file that was read already; `name` is for the message."""
    try:
        return _inspect(memoryview(data))
    except Malformed as error:
        raise VerificationError(f"{name!r} is not a sound ELF file: {error}", source=name) from error


def cubin_arch(data: bytes) -> Arch | None:
    """The arch that the cubin `data` was made for; None if `data` is no cubin.

    Raises:
        VerificationError: it is a damaged cubin.
    """
    if data[:4] != b"\x7fELF" or data[18:20] != _CUDA.to_bytes(2, "little"):
        return None
    try:
        return _cubin(memoryview(data)).arch
    except Malformed as error:
        raise VerificationError(f"damaged cubin: {error}") from error


def _inspect(data: memoryview) -> Inspection:
    kind, machine = kind_and_machine(data)
    sections = sections_of(data)
    sizes = {section.name: len(section.data) for section in sections if section.name}
    if machine == _CUDA:
        images = [_cubin(data)]
        host = Inspection(kind="cubin", machine="cuda")
    else:
        fat = [section.data for section in sections if section.name in _FATBIN_SECTIONS]
        room = _Room(_RATIO * len(data) + _SMALL)
        images = [image for containers in fat for image in _fatbin(containers, room)]
        host = _host(sections, "shared" if kind == _SHARED_OBJECT else "other", machine)
    archs = {image.arch for image in images}
    return Inspection(
        kind=host.kind,
        machine=host.machine,
        exports=host.exports,
        needs={**host.needs, **_driver(images)},
        needed=host.needed,
        undefined=host.undefined,
        has_rpath=host.has_rpath,
        archs=tuple(sorted(archs, key=lambda arch: (arch.major, arch.minor, arch.suffix, arch.ptx))),
        sections=sizes,
        frames=_largest(image.frames for image in images),
    )


def _largest(frames: Iterable[dict[str, int]]) -> dict[str, int]:
    largest: dict[str, int] = {}
    for found in frames:
        for name, size in found.items():
            largest[name] = max(size, largest.get(name, 0))
    return dict(sorted(largest.items()))


def _host(sections: list[Section], kind: str, machine: int) -> Inspection:
    """The part of an inspection that the dynamic linker would look at."""
    exports: list[str] = []
    undefined: list[str] = []
    needed: list[str] = []
    versions: dict[str, tuple[int, ...]] = {}
    has_rpath = False
    for section in sections:
        if section.kind == SHT_DYNSYM:
            for name, defined, weak in _symbols(section, strings_of(sections, section)):
                if defined and name.startswith(_FFI_PREFIX) and not _FFI_RESERVED.match(name):
                    exports.append(name.removeprefix(_FFI_PREFIX))
                elif name and not defined and not weak:
                    undefined.append(name)
        elif section.kind == SHT_DYNAMIC:
            for tag, value in _dynamic(section):
                has_rpath = has_rpath or tag in (_DT_RPATH, _DT_RUNPATH)
                if tag == _DT_NEEDED:
                    needed.append(strings_of(sections, section).text(value))
        elif section.kind == SHT_VERNEED:
            for name in _version_names(section, strings_of(sections, section)):
                family, version = _version(name)
                versions[family] = max(version, versions.get(family, (0,)))
    needs = {family: ".".join(map(str, versions[family])) for family in sorted(versions) if family}
    if "libtvm_ffi.so" in needed or any(name.startswith("TVMFFI") for name in undefined):
        needs["tvm_ffi"] = FFI_ABI.removeprefix("tvm-ffi-")
    for library in needed:
        if runtime := re.fullmatch(r"libcudart\.so\.(\d+)[.\d]*", library):
            needs["cudart"] = runtime[1]
    return Inspection(
        kind=kind,
        machine=_MACHINES.get(machine, str(machine)),
        exports=tuple(sorted(set(exports))),
        needs=needs,
        needed=tuple(needed),
        undefined=tuple(sorted(set(undefined))),
        has_rpath=has_rpath,
    )


def _symbols(section: Section, strings: Section) -> Iterator[tuple[str, bool, bool]]:
    """Name, whether it is defined here for others to use, whether it is weak; of every dynamic symbol."""
    for offset in range(0, len(section.data), 24):
        name, info, other, index = unpack("IBBH", section.data, offset)
        binding, visibility = info >> 4, other & 3
        if binding in (1, 2) and visibility in (0, 3):
            yield strings.text(name), index != 0, binding == 2


def _dynamic(section: Section) -> Iterator[tuple[int, int]]:
    for offset in range(0, len(section.data), 16):
        tag, value = unpack("QQ", section.data, offset)
        if tag == 0:
            return
        yield tag, value


def _version_names(section: Section, strings: Section) -> Iterator[str]:
    """``GLIBC_2.34`` and so on: every version that this file needs of every library."""
    left = len(section.data) // 16  # records that there can be: crafted ones overlap
    library = 0
    while True:
        _, count, _, first, following = unpack("HHIII", section.data, library)
        version = library + first
        for _ in range(count):
            left -= 1
            if left < 0:
                raise Malformed("its versions overlap")
            _, _, _, name, step = unpack("IHHII", section.data, version)
            yield strings.text(name)
            if step == 0:
                break
            version += step
        if following == 0:
            return
        library += following


def _version(name: str) -> tuple[str, tuple[int, ...]]:
    """('glibc', (2, 34)); the family is empty for what no host can be measured by."""
    if name == "GLIBC_ABI_DT_RELR":
        return "glibc", (2, 36)
    matched = re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI)_(\d{1,4}(?:\.\d{1,4})*)", name)
    if not matched:
        return "", (0,)
    return matched[1].lower(), tuple(int(part) for part in matched[2].split("."))


def _driver(images: list[_Image]) -> dict[str, str]:
    """The driver that will do: code of CUDA 13.x runs with every driver from 13.0 on, PTX needs the same minor too."""
    versions = [image.cuda for image in images if image.cuda]
    if not versions:
        return {}
    major, minor = max(versions)
    return {"driver": f"{major}.{minor if all(image.arch.ptx for image in images) else 0}"}


def _arch(sm: int, suffix: Suffix, *, ptx: bool = False) -> Arch:
    return Arch(kind="cuda", major=sm // 10, minor=sm % 10, suffix=suffix, ptx=ptx)


def _cubin(data: memoryview) -> _Image:
    kind_and_machine(data)
    (flags,) = unpack("I", data, 48)
    old = data[7] == _OSABI_OLD_CUBIN
    sm = flags & 0xFF if old else flags >> 8 & 0xFF
    sections = sections_of(data)
    by_name = {section.name: section.data for section in sections}
    suffix: Suffix = ""
    tools = bytes(by_name.get(".note.nv.tkinfo", b""))
    target = re.search(rb"-arch[ =]sm_(\d{1,3})([af]?)\b", tools)
    if target and int(target[1]) == sm:
        suffix = _SUFFIXES[target[2]]
    elif bytes(by_name.get(".nv.compat", b""))[:3] == b"\x02\x09\x01":
        suffix = "a"
    release = re.search(rb"release (\d{1,3})\.(\d{1,3}),", tools)
    cuda = (int(release[1]), int(release[2])) if release else None
    return _Image(_arch(sm, suffix), cuda, _frames(sections))


def _frames(sections: list[Section]) -> dict[str, int]:
    """Kernel → bytes of its stack frame, which is where spilled registers go."""
    symbols = next((section for section in sections if section.name == ".symtab"), None)
    info = next((section.data for section in sections if section.name == ".nv.info"), None)
    if symbols is None or info is None:
        return {}
    strings = strings_of(sections, symbols)
    frames = {}
    offset = 0
    while offset < len(info):
        form, attribute, size = unpack("BBH", info, offset)
        offset += 4
        if form != 4:  # the value stood in the two bytes of the size
            continue
        if attribute == 0x11 and size == 8:
            symbol, frame = unpack("II", info, offset)
            name = strings.text(unpack("I", symbols.data, 24 * symbol)[0])
            if frame and not name.startswith("$"):  # a helper that the compiler made
                frames[name] = frame
        offset += size
    return frames


class _Room:
    """How many bytes may still be decompressed from one file."""

    def __init__(self, left: int) -> None:
        self.left = left


def _fatbin(data: memoryview, room: _Room) -> Iterator[_Image]:
    """Every image in a section of fat binary containers."""
    offset = 0
    while (found := _NOT_ZERO.search(data, offset)) is not None:
        offset += (found.start() - offset) // 8 * 8  # behind the padding between object files
        magic, _, header, size = unpack("IHHQ", data, offset)
        if magic != _FATBIN_MAGIC or header < 16:
            raise Malformed(f"expected a fat binary at byte {offset} of its section, got {magic:#x}, {header}")
        yield from _container(cut(data, offset + header, size, "a fat binary"), room)
        offset += header + size


def _container(data: memoryview, room: _Room) -> Iterator[_Image]:
    offset = 0
    while offset < len(data):
        kind, _, header, size, compressed, _, minor, major, sm = unpack("HHIQIIHHI", data, offset)
        flags, _, raw_size = unpack("QQQ", data, offset + 40)
        if header < 64:
            raise Malformed(f"an entry of a fat binary has a header of {header} bytes")
        payload = cut(data, offset + header, size, "an image")
        offset += header + size
        suffix: Suffix = "a" if flags & _FATBIN_ARCH_SPECIFIC else "f" if flags & _FATBIN_FAMILY else ""
        if kind == _FATBIN_PTX:
            yield _Image(_arch(sm, suffix, ptx=True), _cuda_of_ptx(major, minor))
        elif kind == _FATBIN_ELF and flags & _FATBIN_LZ4:
            yield _Image(_arch(sm, suffix), None)
        elif kind == _FATBIN_ELF:
            if flags & _FATBIN_ZSTD:
                room.left -= raw_size
                if room.left < 0:
                    raise Malformed("its compressed images claim more than they can hold")
                payload = _decompressed(cut(payload, 0, compressed, "a compressed image"), raw_size)
            image = _cubin(payload)
            yield _Image(_arch(sm, suffix or image.arch.suffix), image.cuda, image.frames)


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
