"""NVIDIA's run-time compiler: a library that makes images of device code, found in toolkits and beside torch's wheels.

It is loaded by a worker (see `nvrtc_worker`), so that it never meets the one that torch has loaded, and needs no host
compiler.  Where there is none, nvcc makes the images.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from shutil import which
from typing import NamedTuple

from kartifacts.build.launchers import Launchers, noted_defines
from kartifacts.build.stamps import Stamp, is_settled, stamp_of
from kartifacts.build.toolchains import CUBIN, FATBIN, Toolchain, Unit, nvcc, probe
from kartifacts.build.toolchains.options import USUAL, Options, flags_for
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler, Refusal
from kartifacts.model.arch import check_toolkit, sm_name
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

COMPILE = ("-std=c++17", "-Iinclude")
MEMORY = 200 << 20
WORKER = Path(__file__).with_name("nvrtc_worker.py")
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)")
_WHEEL = re.compile(r"cu\d+|cuda_nvrtc")
_SIGN = "cuda_fp16.h"  # lies where CUDA headers do
_SYSTEM = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_HINT = "pip install nvidia-cuda-nvrtc, or set CUDA_HOME to a CUDA toolkit"

Release = tuple[int, int]


@dataclass(frozen=True)
class Nvrtc(Toolchain):
    """One NVRTC with the CUDA headers that belong to it.

    Args:
        library: libnvrtc.so.
        builtins: the library that it opens by name, which lies beside it.
        facts: release, version, archs; of the headers cudart and cccl.
        headers: directories of CUDA headers; none, where there are none.
        launchers: of images.
        options: what the settings add.
    """

    library: Path
    builtins: Path
    facts: dict[str, str]
    headers: tuple[Path, ...]
    launchers: Launchers
    options: Options = USUAL

    kind = "nvrtc"

    @property
    def place(self) -> Path:
        return self.library

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        own = {name: self.facts[name] for name in ("version", "cudart", "cccl")}
        return {"kind": self.kind, **own, "flags": " ".join(COMPILE), **self.options.facts}

    def made_with(self, spec: Spec) -> dict[str, str]:
        return {**self.fingerprint, **self.launchers.facts(spec)}

    def programs(self, settings: Settings) -> dict[str, str]:
        own = probe.digests(settings, "nvrtc", {"libnvrtc": self.library, "libnvrtc-builtins": self.builtins})
        try:
            host = self.launchers.host.programs(settings)
        except NoCompiler:  # then every launcher came prebuilt
            host = {}
        return {**own, **{f"launcher {name}": digest for name, digest in host.items()}}

    def check(self, spec: Spec) -> None:
        release = _release(self.facts["release"])
        check_toolkit(spec.arch, release)
        listed = self.facts["archs"].split()
        if sm_name(spec.arch).removeprefix("sm_").rstrip("af") not in listed:
            raise ConfigError(
                f"{spec.uri} for {spec.arch} cannot be built: NVRTC of CUDA {self.facts['release']} in {self.library} "
                f"lists {', '.join(f'{number[:-1]}.{number[-1]}' for number in listed)}"
            )

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        ptx = ("--ptx",) if spec.arch.ptx else ()
        declared = (*spec.device.flags, *(f"-D{define}" for define in spec.defines))
        own = Unit(
            spec.device.sources[0],
            self.library,
            (*COMPILE, f"--gpu-architecture={sm_name(spec.arch)}", *ptx, *declared, *self.options.flags),
            self._places(),
            self.fingerprint,
            MEMORY,
            FATBIN if ptx else CUBIN,
            worker=worker(),
        )
        return (own, *self.launchers.units(spec))

    def _places(self) -> tuple[str, ...]:
        return (*_chosen(self.library, self.builtins), *(f"-I{directory}" for directory in self.headers))

    def link(self, objects: Sequence[str], output: str) -> tuple[str, ...]:
        return self.launchers.host.link(objects, output)

    def prebuilt(self, spec: Spec) -> Path | None:
        return self.launchers.prebuilt(spec)

    def notes(self, spec: Spec, image: Path) -> dict[str, str]:
        del image
        return {"toolkit": self.facts["release"], **noted_defines(spec)}


def worker() -> tuple[str, ...]:
    """How to start a process that does jobs of NVRTC."""
    return (sys.executable, "-I", "-S", str(WORKER))


def discover(settings: Settings) -> Toolchain:
    """Find what makes images of CUDA code: NVRTC, and nvcc where there is none; KARTIFACTS_CUDA_COMPILER may decide.

    Raises:
        ConfigError: a setting asks of it what cannot be given.
        NoCompiler: there is none; lists every place searched, with what is wrong with it.
    """
    if settings.cuda_compiler == "nvcc":
        return nvcc.discover(settings)
    try:
        return _discover(settings)
    except NoCompiler as error:
        if settings.cuda_compiler == "nvrtc":
            raise
        missing = error
    try:
        instead = nvcc.discover(settings)
    except NoCompiler as error:
        raise NoCompiler(
            "no CUDA compiler was found, neither NVRTC nor nvcc",
            searched=(*missing.searched, *error.searched),
            hint=_HINT,
        ) from None
    _explain(f"nvcc of {instead.place} makes images of device code: {missing}")
    return instead


@cache
def _explain(text: str) -> None:
    """Say something once per process."""
    log.info("%s", text)


def _discover(settings: Settings) -> Nvrtc:
    options = flags_for(settings, Nvrtc.kind)
    places = list(_places(settings))
    found, searched = _pairs(places)
    for pair in found:
        tools = [pair.library, pair.builtins]
        try:
            facts = probe.remembered(settings, "nvrtc", tools, partial(_examine, settings, pair))
        except (probe.Silent, OSError) as error:
            searched.append(Refusal(str(pair.library), str(error)))
            continue
        headers, versions = _headers(settings, pair, [place.directory for place in places if place.directory])
        return Nvrtc(pair.library, pair.builtins, {**facts, **versions}, headers, Launchers(settings), options)
    raise NoCompiler("NVRTC was not found", searched=tuple(searched), hint=_HINT)


def _examine(settings: Settings, pair: _Pair) -> tuple[probe.Facts, list[Path]]:
    said = probe.ask(settings, *worker(), *_chosen(pair.library, pair.builtins), "--facts")
    try:
        facts = {str(name): str(value) for name, value in json.loads(said).items()}
    except (ValueError, AttributeError) as error:
        raise probe.Silent(f"{pair.library} does not say what it is: {said[:200]!r}") from error
    if _release(facts["release"]) != pair.release:
        raise probe.Silent(
            f"its parts do not belong together: NVRTC is of CUDA {facts['release']}, and beside it lies "
            f"{pair.builtins.name}"
        )
    return facts, [WORKER]


def _chosen(library: Path, builtins: Path) -> tuple[str, str]:
    return f"--nvrtc={library}", f"--builtins={builtins}"


def _release(text: str) -> Release:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


# -- where it is -------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    shown: str
    directory: Path | None
    problem: str = ""
    asked_for: bool = False


class _Pair(NamedTuple):
    """NVRTC and the library that it opens, in one directory."""

    library: Path
    builtins: Path
    release: Release


def _pairs(places: Iterable[_Place]) -> tuple[list[_Pair], list[Refusal]]:
    """Every NVRTC in `places`, those asked for first, then the newest; and what is wrong with the other places."""
    asked_for: list[_Pair] = []
    others: list[_Pair] = []
    refused: list[Refusal] = []
    for place in places:
        problem = place.problem
        if place.directory is not None:
            found = list(_pairs_in(place.directory))
            (asked_for if place.asked_for else others).extend(found)
            problem = "" if found else _lacking(place.directory)
        if problem:
            refused.append(Refusal(place.shown, problem))
            if place.shown.startswith("CUDA_"):
                nvcc.warn_once(refused[-1])
    others.sort(key=lambda pair: pair.release, reverse=True)
    return [*asked_for, *others], refused


def _names_in(directory: Path) -> tuple[str, ...]:
    """The names in a directory that begin as those of NVRTC's files do."""
    stamp = stamp_of(str(directory))
    listed = _listed if is_settled(stamp) else _listed.__wrapped__  # a directory of the system has thousands of names
    return listed(str(directory), stamp)


@lru_cache(maxsize=64)
def _listed(directory: str, _: Stamp) -> tuple[str, ...]:
    return tuple(_entries(directory, "libnvrtc"))


def _entries(directory: str | Path, beginning: str = "") -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.startswith(beginning))
    except OSError:
        return []


def _pairs_in(directory: Path) -> Iterator[_Pair]:
    names = _names_in(directory)
    libraries = {int(match[1]): name for name in names if (match := _LIBRARY.fullmatch(name))}
    builtins = {(int(match[1]), int(match[2])): name for name in names if (match := _BUILTINS.fullmatch(name))}
    for release, name in sorted(builtins.items(), reverse=True):
        if release[0] in libraries:
            yield _Pair(directory / libraries[release[0]], directory / name, release)


def _lacking(directory: Path) -> str:
    names = _names_in(directory)
    if any(_LIBRARY.fullmatch(name) for name in names):
        return "it has libnvrtc.so without the libnvrtc-builtins.so of its release"
    return "it has no libnvrtc.so" if os.path.isdir(directory) else "no such directory"


def _places(settings: Settings) -> Iterator[_Place]:
    for variable, value in settings.cuda_home:
        problem = nvcc.misspelt(value) or ("" if os.path.isdir(value) else "no such directory")
        if problem:
            yield _Place(f"{variable}={value!r}", None, problem)
        else:
            yield from _of_toolkit(f"{variable}={value!r}", Path(value), asked_for=True)
    wheels = list(_of_wheels())
    yield from wheels
    if not wheels:
        yield _Place("Python packages", None, "nvidia-cuda-nvrtc is not installed")
    program = which("nvcc", path=settings.search_path)
    if program is not None:
        yield from _of_toolkit(program, Path(os.path.realpath(program)).parent.parent)
    yield from _of_toolkit(str(nvcc.USUAL), nvcc.USUAL)
    for directory in (os.path.join(sys.prefix, "lib"), *_SYSTEM):
        if os.path.isdir(directory):
            yield _Place(directory, Path(directory))


def _of_toolkit(shown: str, root: Path, *, asked_for: bool = False) -> Iterator[_Place]:
    """The directories of a toolkit in which NVRTC lies; one place that says so if there are none."""
    if not os.path.isdir(root):
        yield _Place(shown, None, "no such directory")
        return
    directories = [root / "lib64", root / "lib", nvcc.target(root) / "lib"]
    there = {os.path.realpath(directory): directory for directory in directories if os.path.isdir(directory)}
    with_nvrtc = [directory for directory in there.values() if any(map(_LIBRARY.fullmatch, _names_in(directory)))]
    for directory in with_nvrtc:
        yield _Place(f"{shown} ({directory.relative_to(root)})", directory, asked_for=asked_for)
    if not with_nvrtc:
        yield _Place(shown, None, "it has no libnvrtc.so in lib64, lib or targets")


def _of_wheels() -> Iterator[_Place]:
    """``site-packages/nvidia/cu13/lib`` and ``site-packages/nvidia/cuda_nvrtc/lib``, which torch depends on."""
    for home in nvcc.wheels():
        for name in _entries(home):
            directory = home / name / "lib"
            if _WHEEL.fullmatch(name) and any(map(_LIBRARY.fullmatch, _names_in(directory))):
                yield _Place(str(directory), directory)


# -- its headers -------------------------------------------------------------------------------------------------------


def _headers(settings: Settings, pair: _Pair, libraries: Iterable[Path]) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Where CUDA headers of NVRTC's major release are, the nearest first, and their versions; none need be there."""
    for directory in dict.fromkeys(_include_directories(pair.library.parent, libraries)):
        header = directory / "cuda_runtime_api.h"
        if not (os.path.isfile(directory / _SIGN) and os.path.isfile(header)):
            continue
        others = [place for place in _cccl_directories(directory) if os.path.isdir(place / "nv")]
        version = next((file for place in others if os.path.isfile(file := place / "cuda/std/__cccl/version.h")), None)
        files = [header, *([version] if version else ())]
        facts = probe.remembered(settings, "cuda headers", files, partial(_versions, header, version))
        if facts["cudart"].isdigit() and int(facts["cudart"]) // 1000 == pair.release[0]:
            return tuple(dict.fromkeys((directory, *others[:1]))), facts
    return (), {"cudart": "none", "cccl": "none"}


def _versions(header: Path, version: Path | None) -> tuple[probe.Facts, tuple[Path, ...]]:
    cccl = "none" if version is None else nvcc.defined(version, "CCCL_VERSION")
    return {"cudart": nvcc.defined(header, "CUDART_VERSION"), "cccl": cccl}, ()


def _include_directories(library: Path, others: Iterable[Path]) -> Iterator[Path]:
    for directory in (library, *others):
        root = directory.parent
        yield root / "include"
        yield nvcc.target(root) / "include"
        yield root.parent / "cuda_runtime" / "include"  # wheels for CUDA 12 have a directory each
    yield nvcc.USUAL / "include"


def _cccl_directories(include: Path) -> tuple[Path, ...]:
    return include / "cccl", include, include.parent.parent / "cuda_cccl" / "include"
