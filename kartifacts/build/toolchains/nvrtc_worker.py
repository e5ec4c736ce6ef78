"""Compiles CUDA device code with NVRTC, which never gets into the user's process: see `worker` for how jobs come.

    --nvrtc=FILE --builtins=FILE --facts                                        says what the library is, as JSON
    --nvrtc=FILE --builtins=FILE FLAG... --depfile FILE --output FILE SOURCE    makes an image

Flags are NVRTC's own and two of nvcc's: `-isystem DIRECTORY`, and lists for ptxas.  `--ptx` makes a fat binary, which
has the PTX beside the binary code.  Paths are as the driver of the job wrote them, relative to where the library lies.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator

TYPE_CHECKING = False  # importing it takes a tenth of what a worker needs to start
if TYPE_CHECKING:
    from kartifacts.build.toolchains import directives, worker
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import directives
    import worker

_INVALID_OPTION = 5
_SINCE_NO_CACHE = (12, 9)
_LOCATED = ("--device-debug", "-G", "--generate-line-info", "-lineinfo")  # who asks for these wants to find sources
_DIRECTORIES = "/proc/self/fd"
_FIRST = 100  # number of the first descriptor that stands for a directory of headers
_MISSING = re.compile(r'(open source file "([^"\n]+)".*)')
_LIBC = re.compile(
    r"(assert|ctype|errno|float|inttypes|limits|math|signal|stdarg|stdbool|stddef|stdint|stdio|stdlib|string|time)\.h"
    r"|(pthread|unistd|sys/\w+)\.h|c(assert|float|inttypes|limits|math|stdarg|stddef|stdint|stdio|stdlib|string|time)"
)
_LIBCXX = re.compile(r"[a-z]\w*")  # vector, type_traits
_HOST = re.compile(r"(.* host functions are not allowed in JIT mode)\..*")
_SIGN = "cuda_fp16.h"  # lies where CUDA headers do
_FATBIN_MAGIC, _FATBIN_VERSION = 0xBA55ED50, 1
_ENTRY_VERSION, _PTX, _CUBIN = 0x101, 1, 2
_FLAGS = {"": 0x11, "a": 0x100011, "f": 0x200011}  # 64 bits, Linux; of one arch, of a family


def run(arguments: list[str]) -> str:
    """Do one job; gives what NVRTC said, or the facts."""
    job = _Job(arguments)
    library = _library(job.nvrtc, job.builtins)
    if job.facts:
        return json.dumps(library.facts())
    files = reached(job.source, job.places)
    with open(job.source, "rb") as file:
        source = file.read()
    places = _Places(job.flags)
    try:
        image, text = library.compiled(source, job.source, places.flags, "CUBIN")
        if job.ptx:
            virtual = [flag.replace("-architecture=sm_", "-architecture=compute_") for flag in places.flags]
            ptx, _ = library.compiled(source, job.source, virtual, "PTX")
            image = fat_binary(image, ptx, _architecture(job.flags))
    except worker.Failed as error:
        raise worker.Failed(_explained(places.named(error.text), job.places), error.status) from None
    with open(job.output, "wb") as file:
        file.write(image)
    with open(job.depfile, "wb") as file:
        file.write(_rule(job.output, files))
    return places.named(text)


class _Job:
    """What the arguments say."""

    def __init__(self, arguments: list[str]) -> None:
        self.nvrtc = self.builtins = self.depfile = self.output = self.source = ""
        self.facts = self.ptx = False
        self.flags: list[str] = []
        left = iter(arguments)
        for argument in left:
            name, _, value = argument.partition("=")
            if name in ("--nvrtc", "--builtins"):
                setattr(self, name[2:], value)
            elif name in ("--depfile", "--output"):
                setattr(self, name[2:], next(left))
            elif name in ("--facts", "--ptx"):
                setattr(self, name[2:], True)
            elif name == "-isystem":
                self.flags.append(f"-I{next(left)}")
            elif name in ("-Xptxas", "--ptxas-options"):
                self.flags += [f"--ptxas-options={part}" for part in value.split(",")]
            elif argument.startswith("-"):
                self.flags.append(argument)
            else:
                self.source = argument

    @property
    def places(self) -> list[str]:
        return [flag[2:] for flag in self.flags if flag.startswith("-I")]


class _Places:
    """Gives directories of headers names that are the same on every machine, since __FILE__ tells them."""

    def __init__(self, flags: list[str]) -> None:
        self.flags = [*flags]
        self._names: dict[str, str] = {}
        if any(flag in _LOCATED for flag in flags) or not os.path.isdir(_DIRECTORIES):
            return
        for place, flag in enumerate(flags):
            if flag.startswith("-I/") and os.path.isdir(flag[2:]):
                number = _FIRST + len(self._names)
                handle = os.open(flag[2:], os.O_RDONLY | os.O_DIRECTORY)
                os.dup2(handle, number, inheritable=False)  # takes the place of what the last job had there
                os.close(handle)
                self.flags[place] = f"-I{_DIRECTORIES}/{number}"
                self._names[f"{_DIRECTORIES}/{number}"] = flag[2:]

    def named(self, text: str) -> str:
        """What NVRTC said, with the directories called as the user knows them."""
        return re.sub(rf"{_DIRECTORIES}/\d+", lambda match: self._names.get(match[0], match[0]), text)


# -- the library -------------------------------------------------------------------------------------------------------

_loaded: dict[str, _Library] = {}


def _library(nvrtc: str, builtins: str) -> _Library:
    if nvrtc not in _loaded:
        _loaded[nvrtc] = _Library(nvrtc, builtins)
    return _loaded[nvrtc]


class _Library:
    def __init__(self, nvrtc: str, builtins: str) -> None:
        try:
            ctypes.CDLL(builtins)  # NVRTC opens it by its bare name, and gets this one
            self._nvrtc = ctypes.CDLL(nvrtc)
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError) as error:
            raise worker.Failed(f"{nvrtc} cannot be used: {error}") from None
        self._version = major.value, minor.value

    def facts(self) -> dict[str, str]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        # Only what it writes at the top of PTX tells its whole version.
        ptx, _ = self.compiled(b"", "empty.cu", [f"--gpu-architecture=compute_{max(archs)}"], "PTX")
        banner = re.search(rb"release \d+\.\d+, V(\d+(?:\.\d+)+)", ptx)
        if banner is None:
            raise worker.Failed("NVRTC does not say its version in the PTX that it makes")
        release = ".".join(map(str, self._version))
        return {"release": release, "version": banner[1].decode(), "archs": " ".join(map(str, sorted(archs)))}

    def compiled(self, source: bytes, name: str, flags: list[str], kind: str) -> tuple[bytes, str]:
        """An image of `kind`, ``CUBIN`` or ``PTX``, and the compiler's remarks."""
        if self._version >= _SINCE_NO_CACHE:
            flags = [*flags, "--no-cache"]  # else it opens the driver, and writes into the user's home
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, os.fsencode(name), 0, None, None)
        try:
            options = (ctypes.c_char_p * len(flags))(*map(os.fsencode, flags))
            status = self._nvrtc.nvrtcCompileProgram(program, len(flags), options)
            text = self._read("ProgramLog", program).rstrip(b"\0").decode("utf-8", "surrogateescape")
            if status:
                raise worker.Failed(text or self._error(status))
            return self._read(kind, program), text
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nvrtc, name)(*arguments)
        if status:
            raise worker.Failed(f"{name}: {self._error(status)}")

    def _error(self, status: int) -> str:
        self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        return f"error: {(self._nvrtc.nvrtcGetErrorString(status) or b'').decode()} ({status})"


def _explained(text: str, places: list[str]) -> str:
    """What NVRTC said, with the rule that was broken, in the line that complains."""

    def why(match: re.Match[str]) -> str:
        name = match[2]
        if _LIBC.fullmatch(name):
            return f"{match[1]} (NVRTC has no headers of a C library: leave it out where __CUDACC_RTC__ is defined)"
        if _LIBCXX.fullmatch(name):
            return f"{match[1]} (NVRTC has no headers of a C++ library: look for what is needed in <cuda/std/{name}>)"
        if not any(os.path.isfile(os.path.join(place, _SIGN)) for place in places):
            return f"{match[1]} (and no CUDA headers belong to this NVRTC: nvidia-cuda-runtime has them)"
        return match[1]

    host = r'\1 (NVRTC compiles device code alone: host code is for host_sources, or for toolchain = "nvcc")'
    return _HOST.sub(host, _MISSING.sub(why, text))


# -- what was read -----------------------------------------------------------------------------------------------------


def reached(source: str, places: Iterable[str]) -> list[str]:
    """`source` and every file that it may include, directly or not, found as NVRTC finds them.

    NVRTC does not tell.  No condition is looked at, so that these may be more than it read, and never less, unless a
    macro stands for a name.  Raises `Failed` for one that would tell when it was compiled.
    """
    found: dict[str, None] = {}
    waiting = [os.path.normpath(source)]
    places = tuple(places)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        with open(path, "rb") as file:
            content = file.read()
        _refuse_clocks(path, content)
        for wanted in directives.wanted(content):
            name = os.fsdecode(wanted.name)
            for place in (*((os.path.dirname(path),) if wanted.quoted else ()), *places) if wanted.plain else ():
                if os.path.isfile(there := os.path.join(place, name)):
                    waiting.append(_plain(there))
                    if not wanted.further:
                        break
    return list(found)


def _plain(path: str) -> str:
    """Without `..`, unless that leads elsewhere."""
    short = os.path.normpath(path)
    return short if ".." not in path or (os.path.isfile(short) and os.path.samefile(path, short)) else path


def _refuse_clocks(path: str, content: bytes) -> None:
    """What -Werror=date-time does in other compilers; NVRTC lets nobody define these macros."""
    if clock := directives.clock(content):
        name, line = clock
        raise worker.Failed(f"{path}({line}): error: {name} makes another image each time that it is compiled")


def _rule(output: str, files: Iterable[str]) -> bytes:
    """The files as make writes them."""
    names = (re.sub(r"([\s#])", r"\\\1", name).replace("$", "$$") for name in (output, *files))
    target, *others = names
    return os.fsencode(f"{target}: " + " \\\n ".join(others) + "\n")


# -- PTX beside binary code --------------------------------------------------------------------------------------------


def fat_binary(cubin: bytes, ptx: bytes, architecture: str) -> bytes:
    """What the driver takes the best of: binary code and PTX for ``90a``, in the container that nvcc makes too."""
    number, suffix = architecture.rstrip("af"), architecture[len(architecture.rstrip("af")) :]
    version = re.search(rb"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)
    assert version is not None
    entries = (
        _entry(_CUBIN, cubin, (1, cubin[8]), int(number), suffix),
        _entry(_PTX, ptx.rstrip(b"\0") + b"\0", (int(version[1]), int(version[2])), int(number), suffix),
    )
    content = b"".join(part for entry in entries for part in entry)
    return struct.pack("<IHHQ", _FATBIN_MAGIC, _FATBIN_VERSION, 16, len(content)) + content


def _entry(kind: int, image: bytes, version: tuple[int, int], number: int, suffix: str) -> Iterator[bytes]:
    major, minor = version
    size = len(image) + -len(image) % 8
    yield struct.pack("<HHIQIIHHI", kind, _ENTRY_VERSION, 64, size, 0, 0, minor, major, number)
    yield struct.pack("<QQQQ", 0, _FLAGS[suffix], 0, 0)
    yield image.ljust(size, b"\0")


def _architecture(flags: Iterable[str]) -> str:
    return next(flag.partition("=sm_")[2] for flag in flags if flag.startswith("--gpu-architecture=sm_"))


if __name__ == "__main__":
    worker.serve(run)
