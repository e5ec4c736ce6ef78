"""Makes data wheels: kernels as files that are used in place, the release that names them, and its pin.

    <package>/kartifacts.lock                            pins the release
    <package>/blobs/sha256/<hex>                         its index, bundle manifests and kernel tables
    <package>/v1/sha256/<2 hex>/<hex><suffix>            the kernels
    <name>-<version>.dist-info/                          METADATA, WHEEL, entry_points.txt, RECORD

Equal content gives equal bytes, wherever and whenever it is made with the same zlib.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kartifacts.errors import ConfigError, PublishConflict, StoreError, VerificationError
from kartifacts.model.arch import parse_arch, sm_name
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.layout import BUNDLE_GROUP, BUNDLE_LOCK, blob_path, loose_path
from kartifacts.model.manifest import Lock, Pin, encode
from kartifacts.publish import files

REQUIRES_PYTHON = ">=3.10"
PYPI_LIMIT = 100_000_000  # bytes of one file that PyPI takes of a project which has not asked for more: 100 MB
ANY = "any"

_PIECE = 1 << 20
_MOMENT = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can state
_MACHINES = {62: "x86_64", 183: "aarch64"}  # of host code; a cubin or a code object is no host code
_DEVICES = (190, 224)
# manylinux_2_17 is the oldest that a Python which kartifacts supports is made for.  By PEP 600 the tag speaks for
# libstdc++ too: the version that came with the distributions of each glibc.
_OLDEST = (2, 17)
_GLIBCXX = {
    (3, 4, 19): (2, 17),
    (3, 4, 22): (2, 24),
    (3, 4, 24): (2, 27),
    (3, 4, 28): (2, 31),
    (3, 4, 29): (2, 34),
    (3, 4, 30): (2, 35),
    (3, 4, 33): (2, 39),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a release, as a verified file."""

    op: str  # norm/rmsnorm, or the family of an imported file
    arch: str
    path: Path
    sha256: str
    size: int
    suffix: str
    needs: Mapping[str, str]

    @property
    def inside(self) -> str:
        """Where it lies in a bundle."""
        return loose_path(parse_digest(self.sha256), self.suffix)


@dataclass(frozen=True)
class Wheel:
    """What goes into one wheel, not written yet."""

    name: str  # as PEP 503 spells it
    version: str
    platform: str
    pin: Pin
    metadata: Mapping[Digest, bytes]  # release index, bundle manifests, kernel tables
    kernels: tuple[Kernel, ...]

    @property
    def package(self) -> str:
        """The top-level package, which is nobody else's since the name is not."""
        return self.name.replace("-", "_")

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}-py3-none-{self.platform}.whl"

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(sorted({kernel.arch for kernel in self.kernels}))


@dataclass(frozen=True)
class Written:
    """A wheel that was written: its file, and how many of its bytes each kernel takes."""

    wheel: Wheel
    path: Path
    size: int
    sha256: Digest
    compressed: Mapping[str, int] = field(repr=False)  # sha256 of a kernel → bytes

    def bytes_of(self, part: Callable[[Kernel], str]) -> dict[str, int]:
        """How many bytes each part takes, largest first; a part is what `part` calls the kernel."""
        sizes: dict[str, int] = {}
        for kernel in self.wheel.kernels:
            sizes[part(kernel)] = sizes.get(part(kernel), 0) + self.compressed[kernel.sha256 + kernel.suffix]
        return dict(sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])))


# -- which wheels ------------------------------------------------------------------------------------------------------


def plan_wheels(
    pin: Pin, metadata: Mapping[Digest, bytes], kernels: Sequence[Kernel], *, name: str = "", one_per_arch: bool = False
) -> list[Wheel]:
    """The wheels that hold `kernels`: one for each kind of host they run on, and for each arch if asked for.

    Kernels that are tied to no arch or no host are in each of them.

    Raises:
        ConfigError: no kernels, a name or version that no wheel can have, or host code of an unknown machine.
    """
    version = wheel_version(pin)
    if not kernels:
        raise ConfigError(f"no kernel of {pin.library} {pin.version} is selected: there is nothing to put into a wheel")
    base = wheel_name(name or f"kartifacts-{pin.library}")
    groups = {base: kernels}
    if one_per_arch:
        archs = sorted({kernel.arch for kernel in kernels} - {ANY}) or [ANY]
        groups = {
            wheel_name(f"{base}-{arch_name(arch)}"): [kernel for kernel in kernels if kernel.arch in (arch, ANY)]
            for arch in archs
        }
        if len(groups) < len(archs):
            raise ConfigError(f"two of the archs {', '.join(archs)} would have wheels of one name")
    return [
        Wheel(called, version, platform, pin, metadata, tuple(sorted(members, key=lambda kernel: kernel.inside)))
        for called, group in groups.items()
        for platform, members in _by_platform(group)
    ]


def wheel_version(pin: Pin) -> str:
    """The version of a release as PEP 440 spells it."""
    try:
        return str(Version(pin.version))
    except InvalidVersion as error:
        raise ConfigError(
            f"the version {pin.version!r} of {pin.library} is none that a wheel can have (PEP 440)",
            hint="give the release a version such as 1.4.0, 1.4.0rc1 or 1.4.0.dev20261130",
        ) from error


def wheel_name(text: str) -> str:
    """A name as PEP 503 spells it, which also names a package."""
    name = canonicalize_name(text)
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,98}[a-z0-9])?", name) or not name.replace("-", "_").isidentifier():
        raise ConfigError(
            f"bad name of a wheel {text[:150]!r}: expected a letter, then letters, digits and single . _ - between them"
        )
    return name


def arch_name(arch: str) -> str:
    """An arch inside a name: sm90a, sm80-ptx, gfx942, cpu-x86-64-v3."""
    if arch == ANY:
        return ANY
    parsed = parse_arch(arch)
    if parsed.kind != "cuda":
        return parsed.slug
    return sm_name(parsed).replace("_", "") + ("-ptx" if parsed.ptx else "")


def _by_platform(kernels: Iterable[Kernel]) -> Iterator[tuple[str, list[Kernel]]]:
    """The platform tag of each machine whose host code is there, with all that is of use on it."""
    by_machine: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_machine.setdefault(_machine(kernel), []).append(kernel)
    anywhere = by_machine.pop("", [])
    if not by_machine:
        yield ANY, anywhere
    for machine, members in sorted(by_machine.items()):
        major, minor = max(_manylinux(kernel) for kernel in members)
        yield f"manylinux_{major}_{minor}_{machine}", [*members, *anywhere]


def _machine(kernel: Kernel) -> str:
    """The machine that a kernel's host code is for; empty if it has none."""
    try:
        with open(kernel.path, "rb") as file:
            start = file.read(20)
    except OSError as error:
        raise _unreadable(kernel.path, error) from error
    number = int.from_bytes(start[18:20], "little")
    if start[:4] != b"\x7fELF" or number in _DEVICES:
        return ""
    if number not in _MACHINES:
        raise ConfigError(f"{kernel.op} for {kernel.arch} has code of machine {number}; wheels are for x86_64, aarch64")
    return _MACHINES[number]


def _manylinux(kernel: Kernel) -> tuple[int, ...]:
    """The glibc of the oldest distributions that have what a kernel needs."""
    glibc, glibcxx = (_numbers(kernel.needs.get(name, "0")) for name in ("glibc", "glibcxx"))
    with_glibcxx = next((glibc for version, glibc in _GLIBCXX.items() if glibcxx <= version), None)
    if with_glibcxx is None:
        raise ConfigError(
            f"{kernel.op} for {kernel.arch} needs libstdc++ {kernel.needs['glibcxx']}, for which there is no platform "
            "tag yet",
            hint="build it with an older compiler",
        )
    return max((*glibc, 0)[:2], with_glibcxx, _OLDEST)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        raise ConfigError(f"expected a version like 2.34, got {text[:50]!r}") from None


# -- writing one -------------------------------------------------------------------------------------------------------


def write_wheel(wheel: Wheel, directory: Path, *, progress: Callable[[int], object] = lambda _: None) -> Written:
    """Write a wheel into `directory`; holds a piece of a kernel in memory at a time.

    Args:
        progress: told numbers of bytes that add up to the sizes of the kernels.

    Raises:
        VerificationError: a kernel's file is not what it was when it was verified.
        StoreError: a file cannot be read or written.
    """
    path = directory / wheel.file_name
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    compressed = {}
    information = f"{wheel.package}-{wheel.version}.dist-info"
    try:
        with zipfile.ZipFile(path, "x") as archive:
            for name, content in _texts(wheel):
                rows.writerow(_add(archive, f"{wheel.package}/{name}", io.BytesIO(content), len(content))[:3])
            for kernel in {kernel.inside: kernel for kernel in wheel.kernels}.values():
                compressed[kernel.sha256 + kernel.suffix] = _add_kernel(archive, wheel, kernel, rows.writerow)
                progress(kernel.size)
            for name, text in _information(wheel).items():
                content = text.encode()
                rows.writerow(_add(archive, f"{information}/{name}", io.BytesIO(content), len(content))[:3])
            rows.writerow((f"{information}/RECORD", "", ""))
            content = record.getvalue().encode()
            _add(archive, f"{information}/RECORD", io.BytesIO(content), len(content))
        digest, size = files.digest(path)
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return Written(wheel, path, size, digest, compressed)


def _texts(wheel: Wheel) -> Iterator[tuple[str, bytes]]:
    about = (
        f'"""Kernels of {wheel.pin.library} {wheel.pin.version}: data that kartifacts finds; nothing to import."""\n'
    )
    yield "__init__.py", about.encode()
    yield BUNDLE_LOCK, encode(Lock(version=1, releases=[wheel.pin])) + b"\n"
    for digest, content in sorted(wheel.metadata.items()):
        yield blob_path(digest), content


def _add_kernel(
    archive: zipfile.ZipFile, wheel: Wheel, kernel: Kernel, note: Callable[[Sequence[object]], object]
) -> int:
    with open(kernel.path, "rb", buffering=0) as file:
        name, hashed, size, digest, compressed = _add(archive, f"{wheel.package}/{kernel.inside}", file, kernel.size)
    if (digest, size) != (kernel.sha256, kernel.size):
        raise VerificationError(
            f"{str(kernel.path)!r} changed after it was verified",
            source=str(kernel.path),
            expected=kernel.sha256,
            actual=digest,
        )
    note((name, hashed, size))
    return compressed


def _add(
    archive: zipfile.ZipFile, name: str, content: IO[bytes] | io.RawIOBase, size: int
) -> tuple[str, str, int, str, int]:
    """Add a member; gives its row of RECORD, its sha256, and how many bytes it takes."""
    member = zipfile.ZipInfo(name, _MOMENT)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.create_system = 3  # Unix, on any system
    member.external_attr = (stat.S_IFREG | 0o644) << 16
    member.file_size = size  # so that it is known before whether it needs the large format
    digest, written = hashlib.sha256(), 0
    with archive.open(member, "w") as file:
        while piece := content.read(_PIECE):
            digest.update(piece)
            written += file.write(piece)
    hashed = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return name, f"sha256={hashed}", written, digest.hexdigest(), member.compress_size


def _information(wheel: Wheel) -> dict[str, str]:
    pin = wheel.pin
    what = f"Kernels of {pin.library} {pin.version} for {', '.join(wheel.archs)}"
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\nSummary: {what}\n"
        f"Requires-Python: {REQUIRES_PYTHON}\nDescription-Content-Type: text/plain\n\n"
        f"{what}, as files that kartifacts uses where they lie.\nRelease: sha256:{pin.sha256}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: kartifacts\n"
        f"Root-Is-Purelib: {str(wheel.platform == ANY).lower()}\nTag: py3-none-{wheel.platform}\n",
        "entry_points.txt": f"[{BUNDLE_GROUP}]\n{wheel.name} = {wheel.package}\n",
    }


# -- what may be published ---------------------------------------------------------------------------------------------


def check_sizes(written: Sequence[Written], limit: int) -> None:
    """Raise a `ConfigError` that says how to split, if a wheel is larger than `limit`."""
    for made in written:
        if made.size <= limit:
            continue
        archs = made.bytes_of(lambda kernel: kernel.arch)
        shared = archs.pop(ANY, 0)
        by_arch = ", ".join(f"{_megabytes(size + shared)} for {arch}" for arch, size in archs.items())
        ops = [*made.bytes_of(lambda kernel: kernel.op).items()][:10]
        shown = "".join(f"\n  {_megabytes(size):>10} {op}" for op, size in ops)
        fewer = "--ops puts fewer ops into it, and --name gives each part a name of its own"
        split = f"--one-per-arch gives about {by_arch}; {fewer}" if len(archs) > 1 else f"{fewer}; or raise --max-bytes"
        raise ConfigError(
            f"{made.wheel.file_name} would have {_megabytes(made.size)}, and at most {_megabytes(limit)} are allowed; "
            f"nothing was written.  Its largest ops:{shown}",
            hint=split,
        )


def place(written: Sequence[Written], out: Path) -> list[Path]:
    """Put wheels into the directory `out`: all of them, or none if one stands there with other bytes.

    Raises:
        PublishConflict: a wheel of that name with other bytes is there; it stays.
        StoreError: `out` cannot be written.
    """
    targets = {out / made.wheel.file_name: made for made in written}
    try:
        for target, made in targets.items():
            _refuse_other(target, made)
        for target, made in targets.items():
            if not files.create(target, made.path):
                _refuse_other(target, made)  # another process was faster
    except OSError as error:
        raise StoreError(f"cannot write into {str(out)!r}: {error.strerror or error}") from error
    return [*targets]


def _refuse_other(target: Path, made: Written) -> None:
    try:
        found = files.digest(target)
    except FileNotFoundError:
        if not target.is_symlink():
            return
        raise PublishConflict(f"{str(target)!r} is a link to nothing; nothing was written") from None
    if found != (made.sha256, made.size):
        raise PublishConflict(
            f"{str(target)!r} is there with other bytes; nothing was written",
            hint="a file name never changes its bytes: make the wheel from another version, or give it another --name",
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot read {str(path)!r}: {error.strerror or error}")
