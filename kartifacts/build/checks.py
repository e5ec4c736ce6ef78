"""Holds what was built against what was promised, by its bytes alone: nothing is loaded, and every fault is named.

A fault is a phrase that goes on after the name of the kernel: "exports no function 'scale'".
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kartifacts.build import elf
from kartifacts.build.cubins import Image
from kartifacts.build.elf import Inspection
from kartifacts.build.sections import Malformed, sections_of
from kartifacts.config import Settings
from kartifacts.errors import BuildError, VerificationError
from kartifacts.model.arch import Arch
from kartifacts.model.manifest import KernelEntry
from kartifacts.model.spec import Spec

LIMITS = ("kernel_bytes", "local_bytes", "spill_bytes")  # of one kernel; the last two of one function of it
_SHOWN = 5

_KINDS = {".so": "shared", ".cubin": "cubin", ".fatbin": "fatbin", ".hsaco": "hsaco"}
_USUAL = re.compile(
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so(\.\d+)*|ld-linux[a-z0-9-]*\.so\.\d+|libc\.musl-\w+\.so\.\d+"
    r"|libtvm_ffi\.so"
)
_UNVERSIONED = re.compile(r"libc\.musl-.*")  # of these, the one that puts no versions on what it defines
_FFI_SYMBOL = re.compile(r"TVMFFI\w+|_Z\w*3tvm3ffi\w*")  # defined by libtvm_ffi, which has no versions either
_SYSTEM = {"/", "/usr", "/usr/local", "/opt", "/tmp", "/home"}  # noqa: S108 - these are the same on many machines
_TEMPORARY = rb"tmpxft_[0-9a-f]{8}_\w*|/cc[A-Za-z0-9]{6}\.(?:s|o|res)\b|/proc/\d+/fd/\d+"  # of nvcc, of gcc, ours
# Where people and CI systems work, with a name in it: none of them is where a library is installed or a device lies.
_WORKPLACES = (
    rb"/(?:home|Users|root|tmp|var/tmp|private/(?:tmp|var)|run/user|builds|__w|github/(?:workspace|home)"
    rb"|workspaces?|workdir|scratch|var/(?:jenkins_home|lib/(?:jenkins|buildkite-agent)))/[\w.+@-]"
)
_PATH = re.compile(rb"[^\0-\x1f\x7f-\xff\"'<>|]*")


@dataclass(frozen=True)
class Promise:
    """What a file has to be.

    Args:
        arch: every image in it is for this, or its PTX where the arch asks for that too.
        exports: functions that others call: of a shared object by TVM-FFI, of an image by the driver.
        suffix: ``.so``, ``.cubin``, ``.fatbin`` or ``.hsaco``.
        libraries: those that it may need besides the usual, as named after -l.
        private: directories of this machine, whose names its bytes must not hold.
        elsewhere: another machine made it, of which only the kinds of such directories are known.
    """

    arch: Arch
    exports: tuple[str, ...]
    suffix: str = ".so"
    libraries: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    elsewhere: bool = False


@dataclass(frozen=True)
class Facts:
    """What a file says of itself, and its size."""

    size: int
    found: Inspection

    @property
    def needs(self) -> dict[str, str]:
        return dict(self.found.needs)

    def report(self) -> dict[str, Any]:
        """Plain data, for a build report and for people."""
        return {
            "bytes": self.size,
            "kind": self.found.kind,
            "machine": self.found.machine,
            "archs": [str(arch) for arch in self.found.archs],
            "exports": list(self.found.exports),
            "needs": self.needs,
            "libraries": list(self.found.needed),
            "functions": {name: dict(vars(usage)) for name, usage in self.found.functions.items()},
        }


def promise_of(spec: Spec, settings: Settings, suffix: str = ".so") -> Promise:
    """What the kernel of `spec` has to be, built with these settings."""
    told = settings.debug or settings.lineinfo  # where the sources are is what such a build is for
    return Promise(
        arch=spec.arch,
        exports=tuple(spec.op.exports),
        suffix=suffix,
        libraries=spec.libraries,
        private=() if told else _private(spec, settings),
    )


def _private(spec: Spec, settings: Settings) -> tuple[str, ...]:
    places = (spec.root, settings.workspace, settings.generated, settings.user_home, sys.prefix)
    named = {os.path.normpath(text) for place in places if place for text in (str(place), os.path.realpath(place))}
    return tuple(sorted(place for place in named if os.path.isabs(place) and place not in _SYSTEM))


def check(path: Path, promise: Promise, *, what: str, command: str = "") -> Facts:
    """Look at the file at `path`, called `what`, which `command` has made.

    Raises:
        BuildError: it is not what was promised; names every fault.
        StoreError: it cannot be read.
    """
    data = elf.read_file(path)
    try:
        facts = Facts(len(data), elf.inspect_bytes(data, str(path)))
    except VerificationError as error:
        raise BuildError(f"{what} is not what was promised: {error.message}", command=command) from error
    if found := faults(data, facts.found, promise):
        raise BuildError(f"{what} is not what was promised: it {'; it '.join(found)}", command=command)
    return facts


def facts_of(path: Path) -> Facts:
    """What the file at `path` says of itself.

    Raises:
        VerificationError: it is no sound ELF file.
        StoreError: it cannot be read.
    """
    data = elf.read_file(path)
    return Facts(len(data), elf.inspect_bytes(data, str(path)))


def faults(data: bytes, found: Inspection, promise: Promise) -> list[str]:
    """All that is wrong with a file of which `inspect_bytes` found this."""
    return [
        *_wrong_kind(found, promise),
        *_wrong_code(found, promise.arch),
        *_lacking(found, promise),
        *_foreign(found, promise.libraries),
        *_unsafe(found),
        *_local_paths(data, found.images, promise),
    ]


# -- each fault --------------------------------------------------------------------------------------------------------


def _wrong_kind(found: Inspection, promise: Promise) -> Iterator[str]:
    if found.kind != _KINDS[promise.suffix]:
        yield f"is of the kind {found.kind!r}, expected {_KINDS[promise.suffix]!r}"
    machine = "x86_64" if promise.arch.name.startswith("x86-64") else promise.arch.name
    if promise.arch.kind == "cpu" and found.machine != machine:
        yield f"is code for {found.machine}, and not for {machine}"


def _wrong_code(found: Inspection, arch: Arch) -> Iterator[str]:
    wanted: tuple[Arch, ...] = ()
    if arch.kind != "cpu":
        wanted = (replace(arch, ptx=False), *((arch,) if arch.ptx else ()))
    lacking = [each for each in wanted if not any(image.is_for(each) for image in found.images)]
    surplus = [image for image in found.images if not any(image.is_for(each) for each in wanted)]
    if lacking or surplus:
        yield f"holds GPU code for {_named(found.archs)}, expected {_named(wanted)}"


def _named(archs: Iterable[Arch]) -> str:
    return ", ".join(sorted(f"{arch} (PTX)" if arch.ptx else str(arch) for arch in archs)) or "no arch"


def _lacking(found: Inspection, promise: Promise) -> Iterator[str]:
    exported = found.exports if promise.suffix == ".so" else tuple(found.functions)
    if lacking := sorted(set(promise.exports) - set(exported)):
        yield f"does not export {', '.join(lacking)} (it exports {', '.join(exported) or 'nothing'})"


def _foreign(found: Inspection, libraries: Sequence[str]) -> Iterator[str]:
    """Libraries and symbols that nobody can count on where it will run."""
    foreign = [name for name in found.needed if not _USUAL.fullmatch(name)]
    declared = [name for name in foreign if any(name.startswith(f"lib{each}.so") for each in libraries)]
    undeclared = [name for name in foreign if name not in declared]
    if runtimes := [name for name in undeclared if name.startswith("libcudart.so")]:
        yield f"needs {runtimes[0]}: the CUDA runtime belongs into the kernel, or is declared by -lcudart in link_flags"
    if others := [name for name in undeclared if name not in runtimes]:
        yield f"needs {', '.join(others)}, which link_flags do not declare"
    anywhere = bool(foreign) or any(map(_UNVERSIONED.fullmatch, found.needed))  # may be defined by one of these
    nowhere = [
        name
        for name, library in found.undefined.items()
        if not library and not anywhere and not ("libtvm_ffi.so" in found.needed and _FFI_SYMBOL.fullmatch(name))
    ]
    if nowhere:
        more = f" and {len(nowhere) - _SHOWN} more" if len(nowhere) > _SHOWN else ""
        yield f"uses {', '.join(nowhere[:_SHOWN])}{more}, which no library that it needs defines"


def _unsafe(found: Inspection) -> Iterator[str]:
    if found.run_path:
        yield f"has a run path, {found.run_path[:100]!r}, where other libraries may lie in wait"
    if found.build_id:
        yield "has a build-id, which is another for the same code"
    yield from dict.fromkeys(found.hazards)


def _local_paths(data: bytes, images: Iterable[Image], promise: Promise) -> Iterator[str]:
    """Names of directories and of files in between that say where it was built."""
    named = _TEMPORARY
    if places := rb"|".join(re.escape(os.fsencode(place)) for place in promise.private):
        named += rb"|(?:(?<![\w.-])|(?<=-[BIL]))(?:" + places + rb")(?![\w.-])"
    if promise.elsewhere:
        named += rb"|(?:(?<![\w.~$%*)}\]-])|(?<=-[BIL]))" + _WORKPLACES
    whose = "a machine that builds" if promise.elsewhere else "this machine"
    contents: list[bytes | memoryview] = [data]
    contents += [image.content for image in images if image.content.obj is not data]
    for content in contents:
        if match := re.search(named, content):
            text = _PATH.match(content, match.start())
            shown = (text[0] if text else b"")[:100].decode(errors="backslashreplace")
            yield f"holds {shown!r}, a path of {whose}{_where(content, match.start())}"
            return


def _where(content: bytes | memoryview, place: int) -> str:
    try:
        sections = sections_of(memoryview(content))
    except Malformed:  # PTX, which is text
        return ""
    inside = (section for section in sections if section.offset <= place < section.offset + len(section.data))
    return next((f", in its section {section.name}" for section in inside), "")


# -- limits, and kernels that are published ----------------------------------------------------------------------------


def over(facts: Facts, limits: Mapping[str, str | int]) -> list[str]:
    """What exceeds the limits of a plan, as far as they are among `LIMITS`."""
    most = {name: int(limits[name]) for name in LIMITS if name in limits}
    found = []
    if "kernel_bytes" in most and facts.size > most["kernel_bytes"]:
        found.append(f"has {facts.size:,} bytes; the plan's limit is {most['kernel_bytes']:,}")
    for name, usage in facts.found.functions.items():
        if "local_bytes" in most and usage.stack > most["local_bytes"]:
            limit = most["local_bytes"]
            found.append(f"takes {usage.stack} bytes of local memory per thread in {name}; the plan's limit is {limit}")
        if "spill_bytes" in most and usage.spills > most["spill_bytes"]:
            found.append(
                f"spills registers in {name}, {usage.spill_stores} bytes of stores and {usage.spill_loads} of loads; "
                f"the plan's limit is {most['spill_bytes']}"
            )
    return found


def judge(limits: Mapping[str, str | int]) -> Callable[[bytes, KernelEntry, Arch, Sequence[str]], list[str]]:
    """Says what is wrong with the content of a published kernel, which may need these libraries besides the usual.

    Imported files were promised by somebody else.
    """

    def look(content: bytes, entry: KernelEntry, arch: Arch, libraries: Sequence[str] = ()) -> list[str]:
        if not entry.key:
            return []
        promise = Promise(arch, tuple(entry.exports), entry.suffix, tuple(libraries), elsewhere=True)
        try:
            facts = Facts(len(content), elf.inspect_bytes(content, entry.uri))
        except VerificationError as error:
            return [f"cannot be read: {error.message}"]
        found = faults(content, facts.found, promise)
        if facts.needs != entry.needs:
            found.append(f"needs {_needs(facts.needs)}, and its table says {_needs(entry.needs)}")
        return [*found, *over(facts, limits)]

    return look


def _needs(needs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {needs[name]}" for name in sorted(needs)) or "nothing"
