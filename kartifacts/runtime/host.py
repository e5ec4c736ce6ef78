"""Facts of this machine, each found when it is first asked for and once per process: CPU level, GPUs, ABI versions.

Asking for the CPU never touches the NVIDIA driver.  Asking for GPUs calls `cuInit`, which makes no context; as with any
use of CUDA, a child forked afterwards cannot use the driver.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kartifacts.errors import ConfigError
from kartifacts.files import installed
from kartifacts.model.arch import Arch
from kartifacts.model.arch import build_arch as build_arch  # what the JIT compiles for a device

if TYPE_CHECKING:
    import ctypes

log = logging.getLogger(__name__)

Version = tuple[int, ...]
_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")  # of servers, containers, WSL, Tegra
_MAX_NAME = 256  # bytes of the name of a symbol version


@dataclass(frozen=True)
class Host:
    """All facts at once, for showing; a version is None where the machine has no such thing."""

    cpu: Arch
    gpus: tuple[Arch, ...]
    no_gpu: str  # why there is no GPU, if there is none
    driver: Version | None  # the CUDA version that the driver supports
    glibc: Version | None
    glibcxx: Version | None
    cxxabi: Version | None
    tvm_ffi: Version | None


@functools.cache
def detect() -> Host:
    """Look at everything, the NVIDIA driver included."""
    return Host(cpu(), gpus(), _cuda()[1], driver(), glibc(), _libstdcxx("GLIBCXX"), _libstdcxx("CXXABI"), tvm_ffi())


def device_arch(device: str | None, kinds: Collection[str] = ("cuda", "cpu")) -> Arch:
    """The arch of a device of this machine.

    Args:
        device: ``cpu``, ``cuda`` (the first GPU) or ``cuda:N``; None takes the first GPU, if `kinds` has ``cuda`` and
            there is one, else the CPU.
        kinds: the kinds of device to choose from.

    Raises:
        ConfigError: there is no such device, with the reason.
    """
    if device is None:
        if "cuda" in kinds and gpus():
            return gpus()[0]
        if "cpu" in kinds or "cuda" not in kinds:
            return cpu()
        device = "cuda"
    if device == "cpu":
        return cpu()
    match = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device)
    if match is None:
        raise ConfigError(f"unknown device {device[:80]!r}; expected cpu, cuda or cuda:N")
    found, why = _cuda()
    index = int(match[1] or 0)
    if index >= len(found):
        have = why or f"this process sees {len(found)}"
        raise ConfigError(f"there is no GPU {index}: {have}", hint="CUDA_VISIBLE_DEVICES limits what a process sees")
    return found[index]


# -- needs -------------------------------------------------------------------------------------------------------------


def unmet(needs: Mapping[str, str], machine: str = "") -> str | None:
    """What this machine lacks of a kernel's needs, as a sentence; None if it lacks nothing.

    Args:
        needs: as in `KernelEntry.needs`.
        machine: whose host code it holds, e.g. ``aarch64``; empty if it holds none.
    """
    if machine not in ("", here := os.uname().machine):
        return f"its host code is for {machine}; this machine is {here}"
    return fits(needs, _version_here)


def fits(needs: Mapping[str, str], have: Callable[[str, Version], Version | None]) -> str | None:
    """Why a kernel's needs are not met, or None if they are.

    Args:
        needs: as in `KernelEntry.needs`: name → the lowest version that will do.
        have: given a name and what is wanted of it, the version that there is, or None.
    """
    for name, text in needs.items():
        if name not in _ENOUGH:
            return f"needs {name[:40]!r} {text[:40]!r}, which this version of kartifacts cannot judge"
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}){0,5}", text):
            return f"needs {name} {text[:40]!r}, which is not a version"
        wanted = _version(text)
        found = have(name, wanted)
        if found is None:
            return f"needs {name} {text}; there is none here"
        if not _ENOUGH[name](found, wanted):
            return f"needs {name} {text}; here it is {'.'.join(map(str, found))}"
    return None


def _version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text))


def _at_least(found: Version, wanted: Version) -> bool:
    width = max(len(found), len(wanted))
    return found + (0,) * (width - len(found)) >= wanted + (0,) * (width - len(wanted))


_ENOUGH: dict[str, Callable[[Version, Version], bool]] = {
    **dict.fromkeys(("glibc", "glibcxx", "cxxabi", "driver"), _at_least),
    # The file name libcudart.so.13 holds the major version, so a later one is another library.
    "cudart": lambda found, wanted: found[:1] == wanted[:1],
    # Before 1.0 each minor version has its own ABI.
    "tvm_ffi": lambda found, wanted: found[:2] == wanted[:2] and _at_least(found, wanted),
}


def _version_here(name: str, wanted: Version) -> Version | None:
    if name in ("glibcxx", "cxxabi"):
        return _libstdcxx(name.upper())
    if name == "cudart":
        return wanted[:1] if _loadable(f"libcudart.so.{wanted[0]}") else None
    return {"glibc": glibc, "driver": driver, "tvm_ffi": tvm_ffi}[name]()


@functools.cache
def glibc() -> Version | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another C library
        return None
    return _version(text) or None


@functools.cache
def tvm_ffi() -> Version | None:
    """The version of the installed TVM-FFI, found without importing it."""
    imported = sys.modules.get("tvm_ffi")
    if imported is not None:
        return _version(str(imported.__version__).partition(".post")[0])
    found = installed.version("apache-tvm-ffi")
    return None if found is None else _version(found.partition(".post")[0])


@functools.cache
def _loadable(library: str) -> bool:
    """Whether the loader finds a library.  Loading it is the one way to ask that follows all of the loader's rules."""
    import ctypes

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@functools.cache
def _libstdcxx(prefix: str) -> Version | None:
    """The highest ``GLIBCXX`` or ``CXXABI`` version of the libstdc++ that this process uses."""
    soname = "libstdc++.so.6"
    path = _mapped(soname)
    if path is None and _loadable(soname):
        path = _mapped(soname)
    if path is None:
        return None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            names = defined_versions(image)
    except (OSError, ValueError, struct.error) as error:
        log.warning("cannot read the versions of %s: %s", path, error)
        return None
    return max((_version(name) for name in names if re.fullmatch(rf"{prefix}_[0-9.]+", name)), default=None)


def _mapped(soname: str) -> str | None:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                path = line.rstrip("\n").partition("/")[2]
                if path.rpartition("/")[2].startswith(soname):
                    return f"/{path}"
    except OSError:
        pass
    return None


def defined_versions(image: mmap.mmap | bytes) -> list[str]:
    """The symbol versions that a 64-bit little-endian ELF library defines, e.g. ``GLIBCXX_3.4.30``.

    Read from its version definitions: a twentieth of a scan of the whole file.

    Raises:
        ValueError, struct.error: it is not such a file.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = _unpack("<Q", image, 0x28)
    size, count = _unpack("<HH", image, 0x3A)
    left = len(image) // 20  # records that there can be: crafted ones overlap
    names = []
    for index in range(count):
        _, kind, _, _, offset, _, link, entries, _, _ = _unpack("<IIQQQQIIQQ", image, table + index * size)
        if kind != 0x6FFFFFFD:  # SHT_GNU_verdef
            continue
        (strings,) = _unpack("<Q", image, table + link * size + 24)
        for _ in range(entries):
            left -= 1
            if left < 0:
                raise ValueError("its version definitions overlap")
            first, step = _unpack("<12xII", image, offset)
            start = min(strings + _unpack("<I", image, offset + first)[0], len(image))
            names.append(bytes(image[start : start + _MAX_NAME]).partition(b"\0")[0].decode("ascii", "replace"))
            if step == 0:
                break
            offset += step
    return names


def _unpack(layout: str, image: mmap.mmap | bytes, offset: int) -> tuple[int, ...]:
    if offset > len(image):  # a number that struct itself cannot even compare
        raise ValueError(f"an offset of {offset} in a file of {len(image)} bytes")
    return struct.unpack_from(layout, image, offset)


# -- devices -----------------------------------------------------------------------------------------------------------

_X86_LEVELS = (  # of the x86-64 psABI, with the names that Linux gives the features
    ("x86-64-v2", "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
    ("x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
    ("x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
)


@functools.cache
def cpu() -> Arch:
    flags = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            # The first processor speaks for all; on a large machine the rest takes milliseconds to read.
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        pass  # the baseline of the instruction set is always safe
    return cpu_arch(os.uname().machine, flags)


def cpu_arch(machine: str, cpuinfo: str) -> Arch:
    """The arch of a CPU, given what the kernel calls the machine and the text of /proc/cpuinfo."""
    if machine.lower() not in ("x86_64", "amd64"):
        return Arch("cpu", name={"arm64": "aarch64"}.get(machine.lower(), machine.lower()))
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    name = "x86-64"
    for level, wanted in _X86_LEVELS:
        if not flags.issuperset(wanted.split()):
            break
        name = level
    return Arch("cpu", name=name)


def has_driver() -> bool:
    """Whether a GPU driver may be installed, found without waking it."""
    return any(map(os.path.exists, _DRIVERS))


def gpus() -> tuple[Arch, ...]:
    """The GPUs that this process may use, in CUDA's order; none without a driver."""
    return _cuda()[0]


@functools.cache
def driver() -> Version | None:
    """The CUDA version that the installed driver supports.  Does not initialise the driver."""
    import ctypes

    number = ctypes.c_int()
    try:
        failed = _libcuda().cuDriverGetVersion(ctypes.byref(number)) != 0
    except (OSError, AttributeError):
        return None
    return None if failed or number.value <= 0 else (number.value // 1000, number.value % 1000 // 10)


def _libcuda() -> ctypes.CDLL:
    import ctypes

    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _cuda() -> tuple[tuple[Arch, ...], str]:
    """The GPUs, and why there are none."""
    try:
        library = _libcuda()
    except OSError as error:
        return (), f"there is no NVIDIA driver ({error})"
    found, why = _devices(library)
    if not found and not why.endswith(_NO_DEVICE):
        log.warning("the NVIDIA driver is installed but does not work: %s", why)
    return found, why


_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


def _devices(library: ctypes.CDLL) -> tuple[tuple[Arch, ...], str]:
    """The arch of each device, or the call that failed."""
    import ctypes

    def call(name: str, *arguments: object) -> str:
        try:
            code = getattr(library, name)(*arguments)
        except AttributeError:
            return f"libcuda.so.1 has no {name}"
        if code == 0:
            return ""
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        return f"{name} failed: {code} {(text.value or b'').decode('ascii', 'replace')}"

    count, device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if why := call("cuInit", 0) or call("cuDeviceGetCount", ctypes.byref(count)):
        return (), why
    found = []
    for index in range(count.value):
        if why := (
            call("cuDeviceGet", ctypes.byref(device), index)
            or call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
            or call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        ):
            return (), why
        found.append(Arch("cuda", major.value, minor.value))
    return tuple(found), "" if found else _NO_DEVICE
