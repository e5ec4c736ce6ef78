"""The host C++ compiler: found by setting or name, compiles CPU kernels and bindings, links every kernel."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from kartifacts.build.closure import SHARED, place_of
from kartifacts.build.toolchains import Toolchain, Unit, probe
from kartifacts.build.toolchains.options import USUAL, Options, flags_for
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler, Refusal
from kartifacts.files import installed
from kartifacts.model.arch import Arch
from kartifacts.model.spec import Spec

NAMES = ("g++", "clang++", "c++")
COMPILE = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Werror=date-time", "-Iinclude")
LINK = ("-shared", "-s", "-Wl,--build-id=none", "-Wl,--exclude-libs,ALL", "-Wl,-z,defs", "-Wl,-z,noexecstack")
MEMORY = 250 << 20
_MARCH = {"aarch64": "armv8-a"}  # others are called by gcc and clang as we call them
_FFI = "tvm_ffi/include"
_HINT = "install g++ or clang++, or name one in KARTIFACTS_CXX"


@dataclass(frozen=True)
class Cxx(Toolchain):
    """A host compiler with the TVM-FFI that it compiles against.

    Args:
        path: as found: what a link of ccache calls depends on its name.
        facts: version, machine, linker.
        ffi: directory of the tvm_ffi package.
        options: what the settings add.
    """

    path: Path
    facts: dict[str, str]
    ffi: Path
    options: Options = USUAL

    kind = "cxx"

    @property
    def place(self) -> Path:
        return self.path

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        flags = " ".join((*COMPILE, "-ffile-prefix-map", *LINK))
        return {"kind": self.kind, **self.facts, "flags": flags, **self.options.facts}

    def programs(self, settings: Settings) -> dict[str, str]:
        asked = {name: _part(settings, self.path, name) for name in ("cc1plus", "as", "collect2", "ld")}
        files = {"compiler": self.path, **{name: path for name, path in asked.items() if path is not None}}
        files |= {name: self.ffi / name for name in ("lib/libtvm_ffi.so", "include/tvm/ffi/c_api.h")}
        files |= self.options.programs
        return probe.digests(settings, "host compiler", files)

    def check(self, spec: Spec) -> None:
        isa, own = _isa(spec.arch), self.facts["machine"].partition("-")[0]
        if spec.arch.kind != "cpu" or isa != own:
            raise ConfigError(
                f"{spec.uri} for {spec.arch} cannot be built: {self.path.name} makes code for {self.facts['machine']}",
                hint=f"name a compiler for {isa} in KARTIFACTS_CXX, or leave {spec.arch} out",
            )

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        march = f"-march={_MARCH.get(spec.arch.name, spec.arch.name)}"
        own = (*COMPILE, march, *spec.device.flags, *(f"-D{define}" for define in spec.defines))
        return (
            *(self._unit(source, own) for source in spec.device.sources),
            *self.host_units(spec),
        )

    def host_units(self, spec: Spec) -> tuple[Unit, ...]:
        """The objects that all specs of an op share."""
        units = (self._unit(source, COMPILE) for source in spec.device.host_sources)
        return tuple(
            replace(unit, file=str(place_of(Path(spec.root), unit.source))) if unit.source.startswith(SHARED) else unit
            for unit in units
        )

    def _unit(self, source: str, flags: tuple[str, ...]) -> Unit:
        flags, places = (*flags, *self.options.flags), headers_in(str(self.ffi / "include"), _FFI)
        launcher = self.options.launcher
        return Unit(source, self.path, flags, places, self.fingerprint, MEMORY, launcher=launcher, headers=headers_in)

    def link(self, objects: Sequence[str], output: str, libraries: Iterable[str] = ()) -> tuple[str, ...]:
        # No RPATH: libtvm_ffi.so is in the process before any kernel is opened.
        ffi = (f"-L{self.ffi / 'lib'}", "-ltvm_ffi")
        usual = (flag for flag in LINK if flag != "-s" or not self.options.symbols)
        return (str(self.path), *usual, *self.options.flags, "-o", output, *objects, *libraries, *ffi)


def headers_in(directory: str, name: str) -> tuple[str, ...]:
    """Flags by which the headers in `directory` are found, and called `name` by what they say of themselves."""
    return ("-isystem", directory, f"-ffile-prefix-map={directory}={name}")


def discover(settings: Settings) -> Cxx:
    """Find the host compiler.

    Raises:
        ConfigError: a setting asks of it what cannot be given.
        NoCompiler: there is none, or no TVM-FFI to compile against; lists what was searched.
    """
    options = flags_for(settings, Cxx.kind)
    searched: list[Refusal] = []
    for name in (settings.cxx,) if settings.cxx else NAMES:
        found = shutil.which(name, path=settings.search_path)
        if found is None:
            place = "KARTIFACTS_CXX" if settings.cxx else "PATH"
            looked = f"; PATH is {settings.search_path!r}" if os.sep not in name else ""
            searched.append(Refusal(place, f"no program {name!r}{looked}"))
            continue
        try:
            path = Path(os.path.abspath(found))
            facts = probe.remembered(settings, "host compiler", [path], partial(_examine, settings, path))
        except probe.Silent as error:
            place = f"KARTIFACTS_CXX={settings.cxx}" if settings.cxx else str(found)
            searched.append(Refusal(place, str(error)))
            continue
        ffi, version = _ffi()
        return Cxx(path, {**facts, "tvm_ffi": version}, ffi, options)
    raise NoCompiler("no host C++ compiler was found", searched=tuple(searched), hint=_HINT)


def _examine(settings: Settings, path: Path) -> tuple[probe.Facts, list[Path]]:
    """Version, machine and linker of a compiler, and the programs that these depend on."""
    banner = probe.ask(settings, path, "--version").strip().partition("\n")[0]
    # A compiler calls itself by the name it was started by.
    version = banner if banner.startswith(("clang", "Apple", "Debian clang", "Ubuntu clang")) else _without_name(banner)
    machine = probe.ask(settings, path, "-dumpmachine").strip()
    if not banner or not machine:
        raise probe.Silent(f"{path} is no compiler: it does not say {'for which machine' if banner else 'its version'}")
    parts = {name: _part(settings, path, name) for name in ("cc1plus", "ld")}
    linker = "unknown"
    if parts["ld"] is not None:
        linker = probe.ask(settings, parts["ld"], "--version").partition("\n")[0].strip()
    facts = {"version": version, "machine": machine, "linker": linker}
    return facts, [part for part in parts.values() if part is not None]


def _part(settings: Settings, path: Path, name: str) -> Path | None:
    """The program that the compiler at `path` uses as `name`; None if it has it built in."""
    said = probe.ask(settings, path, f"-print-prog-name={name}").strip()
    found = shutil.which(said, path=probe.tools_path(settings))
    return None if found is None else Path(found)


def _without_name(banner: str) -> str:
    return re.sub(r"^\S+ ", "gcc ", banner)


def _isa(arch: Arch) -> str:
    return "x86_64" if arch.name.startswith("x86-64") else arch.name


def _ffi() -> tuple[Path, str]:
    """Directory and version of the installed TVM-FFI; it is not imported, which may import torch."""
    from importlib.util import find_spec

    spec = find_spec("tvm_ffi")
    for place in (spec.submodule_search_locations if spec else None) or ():
        home = Path(place)
        if (home / "include/tvm/ffi/c_api.h").is_file() and (home / "lib/libtvm_ffi.so").is_file():
            if (version := installed.version("apache-tvm-ffi")) is not None:
                return home, version
            break
    raise NoCompiler(
        "TVM-FFI was not found, whose headers and library every kernel needs",
        searched=(Refusal("Python package tvm_ffi", "not installed, or without include/ and lib/"),),
        hint="pip install apache-tvm-ffi",
    )
