"""What a built file says about itself (exports, needs, GPU archs), read from its bytes without loading it.

A cubin states the base of its arch in its ELF header and the suffix only in notes.  Inside a shared object cubins and
PTX lie in *fat binary* containers, one entry per image, whose header knows both even if the image is compressed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kartifacts.errors import StoreError, VerificationError
from kartifacts.model.arch import Arch, Suffix
from kartifacts.model.spec import FFI_ABI

_CUDA = 190
_MACHINES = {62: "x86_64", 183: "aarch64", _CUDA: "cuda", 224: "amdgpu"}
_SHARED_OBJECT = 3
_SHT_NOBITS, _SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED = 8, 6, 11, 0x6FFFFFFE
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_OSABI_OLD_CUBIN = 51  # ptxas before 13.0, for sm below 100

_FFI_PREFIX = "__tvm_ffi_"
_FFI_RESERVED = re.compile(r"__tvm_ffi_(main$|_library_ctx$|_library_bin$|_metadata_|_doc_|_cubin_)")

_FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_PTX, _FATBIN_ELF = 1, 2
_FATBIN_ZSTD, _FATBIN_LZ4 = 0x8000, 0x2000
_FATBIN_ARCH_SPECIFIC, _FATBIN_FAMILY = 0x100000, 0x200000
_MAX_IMAGE = 1 << 30
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
class _Section:
    name: str
    kind: int
    data: memoryview
    link: int
    info: int


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
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    return inspect_bytes(data, str(path))


def inspect_bytes(data: bytes, name: str) -> Inspection:
    """The same for a file that was read already; `name` is for the message."""
    try:
        return _inspect(memoryview(data))
    except _Malformed as error:
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
    except _Malformed as error:
        raise VerificationError(f"damaged cubin: {error}") from error


class _Malformed(Exception):
    """The bytes contradict the format."""


def _unpack(layout: str, data: memoryview, offset: int = 0) -> tuple[int, ...]:
    try:
        return struct.unpack_from("<" + layout, data, offset)
    except (struct.error, OverflowError):
        raise _Malformed(f"it ends inside a record at offset {offset}") from None


def _slice(data: memoryview, start: int, length: int, what: str) -> memoryview:
    if start + length > len(data):
        raise _Malformed(f"{what} reaches to byte {start + length} of {len(data)}")
    return data[start : start + length]


def _text(strings: memoryview, offset: int) -> str:
    if offset >= len(strings):
        raise _Malformed(f"a name lies at byte {offset} of a table of {len(strings)}")
    raw = bytes(strings[offset : offset + 4096]).partition(b"\0")[0]
    return raw.decode("utf-8", "backslashreplace")


def _inspect(data: memoryview) -> Inspection:
    kind, machine = _header(data)
    sections = _sections(data)
    sizes = {section.name: len(section.data) for section in sections if section.name}
    if machine == _CUDA:
        images = [_cubin(data)]
        host = Inspection(kind="cubin", machine="cuda")
    else:
        fat = [section.data for section in sections if section.name in _FATBIN_SECTIONS]
        images = [image for containers in fat for image in _fatbin(containers)]
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


def _header(data: memoryview) -> tuple[int, int]:
    """Type and machine."""
    if bytes(data[:4]) != b"\x7fELF":
        raise _Malformed(f"it begins with {bytes(data[:4])!r}")
    if len(data) < 64 or bytes(data[4:6]) != b"\x02\x01":
        raise _Malformed("expected a 64-bit little-endian one")
    kind, machine = _unpack("HH", data, 16)
    return kind, machine


def _sections(data: memoryview) -> list[_Section]:
    (table,) = _unpack("Q", data, 40)
    entry, count, names = _unpack("HHH", data, 58)
    if count == 0:
        return []
    if entry != 64 or names >= count:
        raise _Malformed(f"its section table has entries of {entry} bytes and its names in section {names} of {count}")
    rows = [_unpack("IIQQQQIIQQ", data, table + 64 * number) for number in range(count)]
    contents = [
        data[:0] if row[1] in (0, _SHT_NOBITS) else _slice(data, row[4], row[5], f"section {number}")
        for number, row in enumerate(rows)
    ]
    return [
        _Section(_text(contents[names], row[0]), row[1], content, row[6], row[7])
        for row, content in zip(rows, contents, strict=True)
    ]


def _strings(sections: list[_Section], section: _Section) -> memoryview:
    if section.link >= len(sections):
        raise _Malformed(f"section {section.name!r} names section {section.link} of {len(sections)}")
    return sections[section.link].data


def _host(sections: list[_Section], kind: str, machine: int) -> Inspection:
    """The part of an inspection that the dynamic linker would look at."""
    exports: list[str] = []
    undefined: list[str] = []
    needed: list[str] = []
    versions: dict[str, tuple[int, ...]] = {}
    has_rpath = False
    for section in sections:
        if section.kind == _SHT_DYNSYM:
            for name, defined, weak in _symbols(section, _strings(sections, section)):
                if defined and name.startswith(_FFI_PREFIX) and not _FFI_RESERVED.match(name):
                    exports.append(name.removeprefix(_FFI_PREFIX))
                elif name and not defined and not weak:
                    undefined.append(name)
        elif section.kind == _SHT_DYNAMIC:
            for tag, value in _dynamic(section):
                has_rpath = has_rpath or tag in (_DT_RPATH, _DT_RUNPATH)
                if tag == _DT_NEEDED:
                    needed.append(_text(_strings(sections, section), value))
        elif section.kind == _SHT_VERNEED:
            for name in _version_names(section, _strings(sections, section)):
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


def _symbols(section: _Section, strings: memoryview) -> Iterator[tuple[str, bool, bool]]:
    """Name, whether it is defined here for others to use, whether it is weak; of every dynamic symbol."""
    for offset in range(0, len(section.data), 24):
        name, info, other, index = _unpack("IBBH", section.data, offset)
        binding, visibility = info >> 4, other & 3
        if binding in (1, 2) and visibility in (0, 3):
            yield _text(strings, name), index != 0, binding == 2


def _dynamic(section: _Section) -> Iterator[tuple[int, int]]:
    for offset in range(0, len(section.data), 16):
        tag, value = _unpack("QQ", section.data, offset)
        if tag == 0:
            return
        yield tag, value


def _version_names(section: _Section, strings: memoryview) -> Iterator[str]:
    """``GLIBC_2.34`` and so on: every version that this file needs of every library."""
    library = 0
    # Each offset only grows, so a crafted chain ends at the section's end.
    while True:
        _, count, _, first, following = _unpack("HHIII", section.data, library)
        version = library + first
        for _ in range(count):
            _, _, _, name, step = _unpack("IHHII", section.data, version)
            yield _text(strings, name)
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
    _header(data)
    (flags,) = _unpack("I", data, 48)
    old = data[7] == _OSABI_OLD_CUBIN
    sm = flags & 0xFF if old else flags >> 8 & 0xFF
    sections = _sections(data)
    by_name = {section.name: section.data for section in sections}
    suffix: Suffix = ""
    tools = bytes(by_name.get(".note.nv.tkinfo", b""))
    target = re.search(rb"-arch[ =]sm_(\d+)([af]?)\b", tools)
    if target and int(target[1]) == sm:
        suffix = _SUFFIXES[target[2]]
    elif bytes(by_name.get(".nv.compat", b""))[:3] == b"\x02\x09\x01":
        suffix = "a"
    release = re.search(rb"release (\d{1,3})\.(\d{1,3}),", tools)
    cuda = (int(release[1]), int(release[2])) if release else None
    return _Image(_arch(sm, suffix), cuda, _frames(sections))


def _frames(sections: list[_Section]) -> dict[str, int]:
    """Kernel → bytes of its stack frame, which is where spilled registers go."""
    symbols = next((section for section in sections if section.name == ".symtab"), None)
    info = next((section.data for section in sections if section.name == ".nv.info"), None)
    if symbols is None or info is None:
        return {}
    strings = _strings(sections, symbols)
    frames = {}
    offset = 0
    while offset < len(info):
        form, attribute, size = _unpack("BBH", info, offset)
        offset += 4
        if form != 4:  # the value stood in the two bytes of the size
            continue
        if attribute == 0x11 and size == 8:
            symbol, frame = _unpack("II", info, offset)
            name = _text(strings, _unpack("I", symbols.data, 24 * symbol)[0])
            if frame and not name.startswith("$"):  # a helper that the compiler made
                frames[name] = frame
        offset += size
    return frames


def _fatbin(data: memoryview) -> Iterator[_Image]:
    """Every image in a section of fat binary containers."""
    offset = 0
    while offset < len(data):
        if not any(data[offset : offset + 8]):  # padding between object files
            offset += 8
            continue
        magic, _, header, size = _unpack("IHHQ", data, offset)
        if magic != _FATBIN_MAGIC or header < 16:
            raise _Malformed(f"expected a fat binary at byte {offset} of its section, got {magic:#x}, {header}")
        yield from _container(_slice(data, offset + header, size, "a fat binary"))
        offset += header + size


def _container(data: memoryview) -> Iterator[_Image]:
    offset = 0
    while offset < len(data):
        kind, _, header, size, compressed, _, minor, major, sm = _unpack("HHIQIIHHI", data, offset)
        flags, _, raw_size = _unpack("QQQ", data, offset + 40)
        if header < 64:
            raise _Malformed(f"an entry of a fat binary has a header of {header} bytes")
        payload = _slice(data, offset + header, size, "an image")
        offset += header + size
        suffix: Suffix = "a" if flags & _FATBIN_ARCH_SPECIFIC else "f" if flags & _FATBIN_FAMILY else ""
        if kind == _FATBIN_PTX:
            yield _Image(_arch(sm, suffix, ptx=True), _cuda_of_ptx(major, minor))
        elif kind == _FATBIN_ELF and flags & _FATBIN_LZ4:
            yield _Image(_arch(sm, suffix), None)
        elif kind == _FATBIN_ELF:
            if flags & _FATBIN_ZSTD:
                payload = _decompressed(_slice(payload, 0, compressed, "a compressed image"), raw_size)
            image = _cubin(payload)
            yield _Image(_arch(sm, suffix or image.arch.suffix), image.cuda, image.frames)


def _decompressed(data: memoryview, size: int) -> memoryview:
    import zstandard

    if not 0 < size <= _MAX_IMAGE:
        raise _Malformed(f"a compressed image claims {size} bytes")
    try:
        # `size` is padded, so the frame may hold a little less.
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            return memoryview(reader.read(size))
    except zstandard.ZstdError as error:
        raise _Malformed(f"a compressed image cannot be read: {error}") from error


def _cuda_of_ptx(major: int, minor: int) -> tuple[int, int]:
    """The version of CUDA that speaks this version of PTX: 7.x is 11.x, 9.x is 13.x; 8.x left out 12.6."""
    return major + 4, minor + (major == 8 and minor >= 6)
