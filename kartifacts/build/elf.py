"""What a built file says about itself (exports, needs, GPU code), read from its bytes without loading it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kartifacts.build.cubins import AMDGPU, CUDA, Image, Usage, images_in, is_fatbin
from kartifacts.build.images import IMAGE, attached, noted_in
from kartifacts.build.sections import (
    HOSTS,
    SHT_DYNAMIC,
    SHT_DYNSYM,
    SHT_NOTE,
    SHT_VERNEED,
    Malformed,
    Section,
    kind_and_machine,
    notes_of,
    sections_of,
    segments_of,
    strings_of,
    unpack,
)
from kartifacts.errors import StoreError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch
from kartifacts.model.spec import FFI_ABI

_MACHINES = {**HOSTS, CUDA: "cuda", AMDGPU: "amdgpu"}
_IMAGES = {CUDA: "cubin", AMDGPU: "hsaco"}
_SHARED_OBJECT = 3
_DT_NEEDED, _DT_RPATH, _DT_TEXTREL, _DT_RUNPATH, _DT_FLAGS, _DF_TEXTREL = 1, 15, 22, 29, 30, 4
_SHT_VERSYM = 0x6FFFFFFF
_PT_LOAD, _PT_GNU_STACK, _WRITABLE, _EXECUTABLE = 1, 0x6474E551, 2, 1
_NT_GNU_BUILD_ID = 3

_FFI_PREFIX = "__tvm_ffi_"
_FFI_RESERVED = re.compile(r"__tvm_ffi_(main$|_library_ctx$|_library_bin$|_metadata_|_doc_|_cubin_)")
_MAX_FILE = 4 << 30  # bytes


@dataclass(frozen=True)
class Inspection:
    """What one ELF file exports and needs."""

    kind: str  # shared | cubin | fatbin | hsaco | other
    machine: str  # x86_64 | aarch64 | cuda | amdgpu | the number
    exports: tuple[str, ...] = ()  # names of TVM-FFI functions, sorted
    needs: dict[str, str] = field(default_factory=dict)  # as in model.manifest.KernelEntry
    needed: tuple[str, ...] = ()  # shared libraries
    undefined: dict[str, str] = field(default_factory=dict)  # symbol → library that must define it, or "" for any
    run_path: str = ""
    hazards: tuple[str, ...] = ()  # ways in which code and data are not kept apart
    build_id: bool = False
    images: tuple[Image, ...] = ()  # GPU code, in the order of the file
    sections: dict[str, int] = field(default_factory=dict)  # name → bytes in the file

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Of its GPU images, each once; ptx marks a PTX image."""
        archs = {image.arch for image in self.images}
        return tuple(sorted(archs, key=lambda arch: (arch.major, arch.minor, arch.suffix, arch.ptx, arch.name)))

    @property
    def functions(self) -> dict[str, Usage]:
        """Function of its GPU images → what it takes, at most, in any of them."""
        largest: dict[str, Usage] = {}
        for image in self.images:
            for name, usage in image.functions.items():
                largest[name] = usage.largest(largest[name]) if name in largest else usage
        return dict(sorted(largest.items()))


def inspect(path: Path) -> Inspection:
    """Read what the ELF file at `path` says.

    Raises:
        VerificationError: it is no 64-bit little-endian ELF file, or is damaged.
        StoreError: it cannot be read.
    """
    return inspect_bytes(read_file(path), str(path))


def read_file(path: Path) -> bytes:
    """The content of a file that may be inspected.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return read_regular(path, _MAX_FILE)
    except OSError as error:
        raise StoreError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


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
    if data[:4] != b"\x7fELF" or data[18:20] != CUDA.to_bytes(2, "little"):
        return None
    try:
        return next(images_in(memoryview(data), [])).arch
    except Malformed as error:
        raise VerificationError(f"damaged cubin: {error}") from error


def _inspect(data: memoryview) -> Inspection:
    if is_fatbin(data):
        images = tuple(images_in(data, []))
        return Inspection("fatbin", _MACHINES[CUDA], needs=_driver(images), images=images)
    kind, machine = kind_and_machine(data)
    sections = sections_of(data)
    images = tuple(images_in(data, sections))
    sizes = {section.name: len(section.data) for section in sections if section.name}
    if machine in _IMAGES:
        return Inspection(_IMAGES[machine], _MACHINES[machine], needs=_driver(images), images=images, sections=sizes)
    linked = _Linked(sections)
    return Inspection(
        kind="shared" if kind == _SHARED_OBJECT else "other",
        machine=_MACHINES.get(machine, str(machine)),
        exports=tuple(sorted(linked.exports)),
        needs={**linked.needs, **_driver(images, _toolkit(data, sections))},
        needed=tuple(linked.needed),
        undefined=dict(sorted(linked.undefined.items())),
        run_path=linked.run_path,
        hazards=(
            *_hazards(data),
            *(("has code that is written to when it is loaded",) if linked.text_relocations else ()),
        ),
        build_id=_has_build_id(sections),
        images=images,
        sections=sizes,
    )


def _hazards(data: memoryview) -> Iterator[str]:
    for kind, flags in segments_of(data):
        if kind == _PT_LOAD and flags & _WRITABLE and flags & _EXECUTABLE:
            yield "has a segment that can be written and executed"
        if kind == _PT_GNU_STACK and flags & _EXECUTABLE:
            yield "asks for a stack that can be executed"


def _has_build_id(sections: list[Section]) -> bool:
    notes = (note for section in sections if section.kind == SHT_NOTE for note in notes_of(section))
    return any((owner, kind) == ("GNU", _NT_GNU_BUILD_ID) for owner, kind, _ in notes)


class _Linked:
    """The part of an inspection that the dynamic linker would look at."""

    def __init__(self, sections: list[Section]) -> None:
        self.exports: set[str] = set()
        self.undefined: dict[str, str] = {}
        self.needed: list[str] = []
        self.run_path = ""
        self.text_relocations = False
        versions: dict[str, tuple[int, ...]] = {}
        libraries: dict[int, str] = {}  # number of a version → the library that has it
        for section in sections:
            if section.kind == SHT_VERNEED:
                for library, name, number in _versions(section, strings_of(sections, section)):
                    libraries[number] = library
                    family, version = _version(name)
                    versions[family] = max(version, versions.get(family, (0,)))
        numbers = next((section.data for section in sections if section.kind == _SHT_VERSYM), memoryview(b""))
        for section in sections:
            if section.kind == SHT_DYNSYM:
                self._look_at_symbols(section, strings_of(sections, section), numbers, libraries)
            elif section.kind == SHT_DYNAMIC:
                self._look_at_entries(section, strings_of(sections, section))
        self.needs = {family: ".".join(map(str, versions[family])) for family in sorted(versions) if family}
        uses = "libtvm_ffi.so" in self.needed or any(name.startswith("TVMFFI") for name in self.undefined)
        if uses or self.exports:  # who calls such a function has to lay out its arguments as it expects them
            self.needs["tvm_ffi"] = FFI_ABI.removeprefix("tvm-ffi-")
        for library in self.needed:
            if runtime := re.fullmatch(r"libcudart\.so\.(\d+)[.\d]*", library):
                self.needs["cudart"] = runtime[1]

    def _look_at_symbols(
        self, section: Section, strings: Section, numbers: memoryview, libraries: Mapping[int, str]
    ) -> None:
        for place, (name, defined, weak) in enumerate(_symbols(section, strings)):
            if defined and name.startswith(_FFI_PREFIX) and not _FFI_RESERVED.match(name):
                self.exports.add(name.removeprefix(_FFI_PREFIX))
            elif name and not defined and not weak:
                number = unpack("H", numbers, 2 * place)[0] & 0x7FFF if 2 * place + 2 <= len(numbers) else 0
                self.undefined[name] = libraries.get(number, "")

    def _look_at_entries(self, section: Section, strings: Section) -> None:
        for tag, value in dynamic_of(section):
            if tag == _DT_NEEDED:
                self.needed.append(strings.text(value))
            elif tag in (_DT_RPATH, _DT_RUNPATH):
                self.run_path = strings.text(value) or "."
            elif tag == _DT_TEXTREL or (tag == _DT_FLAGS and value & _DF_TEXTREL):
                self.text_relocations = True


def _symbols(section: Section, strings: Section) -> Iterator[tuple[str, bool, bool]]:
    """Name, whether it is defined here for others to use, whether it is weak; of every dynamic symbol.

    What is of no concern to others has no name here.
    """
    for offset in range(0, len(section.data), 24):
        name, info, other, index = unpack("IBBH", section.data, offset)
        binding, visibility = info >> 4, other & 3
        if binding in (1, 2) and visibility in (0, 3):
            yield strings.text(name), index != 0, binding == 2
        else:
            yield "", False, False


def dynamic_of(section: Section) -> Iterator[tuple[int, int]]:
    """Tag and value of every entry for the dynamic linker."""
    for offset in range(0, len(section.data), 16):
        tag, value = unpack("QQ", section.data, offset)
        if tag == 0:
            return
        yield tag, value


def _versions(section: Section, strings: Section) -> Iterator[tuple[str, str, int]]:
    """Library, version (``GLIBC_2.34``) and its number in this file: every one that this file needs."""
    left = len(section.data) // 16  # records that there can be: crafted ones overlap
    library = 0
    while True:
        _, count, name_of_library, first, following = unpack("HHIII", section.data, library)
        version = library + first
        owner = strings.text(name_of_library)
        for _ in range(count):
            left -= 1
            if left < 0:
                raise Malformed("its versions overlap")
            _, _, number, name, step = unpack("IHHII", section.data, version)
            yield owner, strings.text(name), number & 0x7FFF
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


def _driver(images: Iterable[Image], toolkit: tuple[int, int] | None = None) -> dict[str, str]:
    """The driver that will do: code of CUDA 13.x runs with every driver from 13.0 on, PTX needs the same minor too."""
    images = list(images)
    newest = max([*(image.cuda for image in images if image.cuda), *([toolkit] if toolkit else [])], default=None)
    if newest is None:
        return {}
    return {"driver": f"{newest[0]}.{newest[1] if all(image.arch.ptx for image in images) else 0}"}


def _toolkit(module: memoryview, sections: Iterable[Section]) -> tuple[int, int] | None:
    """Of which release the image that is attached, or the CUDA runtime that is linked in, are said to be.

    Cubins say so by themselves only since CUDA 13, and a runtime never does.
    """
    found = attached(module) if any(section.name == IMAGE for section in sections) else None
    notes = noted_in(module) if found is None else found[1]
    release = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", notes.get("toolkit", ""))
    return (int(release[1]), int(release[2])) if release else None
