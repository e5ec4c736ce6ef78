"""Compilers behind one interface: what they are, and the commands by which sources of a spec become objects or images.

What goes wrong leaves every subclass in the same way:

    discovery       NoCompiler, with every place searched and what is wrong with it; nothing was compiled
    check, units    ConfigError: this compiler cannot make this spec, and the message says which rule it breaks
    a command       BuildError, raised by who runs it, with the first real complaint and the full log
    programs        StoreError: a file of the compiler cannot be read
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.spec import Spec

KINDS = ("cutedsl", "cxx", "nvcc", "nvrtc", "triton")  # each is a module here

OBJECT = ".o"
CUBIN = ".cubin"
FATBIN = ".fatbin"  # a cubin and PTX, of which the driver takes what fits
HSACO = ".hsaco"
IMAGES = (CUBIN, FATBIN, HSACO)  # device code alone: attached to a launcher, or loaded by the driver as it is


@dataclass(frozen=True)
class Command:
    """What makes one file.

    Args:
        arguments: of a program, or of a job for a worker.
        worker: how to start a process that takes such jobs one after the other (see `worker`), so that what it takes
            to start is spent once; empty: `arguments` is a command line of its own.
    """

    arguments: tuple[str, ...]
    worker: tuple[str, ...] = ()

    @property
    def line(self) -> tuple[str, ...]:
        """The same as one command line: a worker does the single job that it is given as arguments."""
        return (*self.worker, *self.arguments)


def headers_in(directory: str, name: str) -> tuple[str, ...]:
    """Flags by which a compiler that never says where it found a header finds those in `directory`."""
    del name
    return ("-isystem", directory)


@dataclass(frozen=True)
class Unit:
    """One source file that becomes one object or image.

    `source`, `flags` and `fingerprint`, with the content of the files reached, are its identity.
    """

    source: str  # relative to the library's root, which is the compiler's working directory
    compiler: Path
    flags: tuple[str, ...]
    places: tuple[str, ...]  # flags that say where this machine keeps things: no part of the identity
    fingerprint: Mapping[str, str]
    memory: int  # bytes that one such compilation may need, until it has been measured
    suffix: str = OBJECT
    worker: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()  # ccache or sccache, before the compiler: no part of the identity
    headers: Callable[[str, str], tuple[str, ...]] = headers_in
    file: str = ""  # where the source lies, if not in the library: one of our own that its launcher is made of

    def seeing(self, directory: Path, name: str) -> Unit:
        """This, which finds headers in `directory` too, and whose bytes call that `name` wherever it lies."""
        return replace(self, places=(*self.places, *self.headers(str(directory), name)))

    def command(self, output: str, depfile: str) -> Command:
        """Makes `output`, and `depfile`: every file that was read, as make writes it."""
        if self.worker:
            own = (*self.flags, *self.places, "--depfile", depfile, "--output", output, self.file or self.source)
            return Command(own, self.worker)
        # An image has a flag of its own that says so; launchers go by the last such flag, nvcc by the first.
        made = ("-c",) if self.suffix == OBJECT else ()
        own = ("-MD", "-MF", depfile, *made, self.file or self.source, "-o", output)
        return Command((*self.launcher, str(self.compiler), *self.flags, *self.places, *own))


class Toolchain(ABC):
    """A compiler of one kind, found and examined."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def place(self) -> Path:
        """Where it was found; for people, and part of no identity."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """All that can change its output and nothing else: never where it is installed."""

    def made_with(self, spec: Spec) -> dict[str, str]:
        """The fingerprint of all that makes the kernel of `spec`: what its key is made of."""
        del spec
        return self.fingerprint

    @abstractmethod
    def programs(self, settings: Settings) -> dict[str, str]:
        """The sha256 of every program that it consists of, and of what it links or includes of its own, by name.

        They are in no key, and hashed only where a release says what it was made with.
        """

    @abstractmethod
    def check(self, spec: Spec) -> None:
        """Raise `ConfigError` if this compiler cannot build for the arch of `spec`."""

    @abstractmethod
    def units(self, spec: Spec) -> tuple[Unit, ...]:
        """What to compile for `spec`: its own sources first, then those that all specs of its op share.

        At most one is an image; its objects are then those of its launcher.
        """

    @abstractmethod
    def link(self, objects: Sequence[str], output: str) -> tuple[str, ...]:
        """The command that makes the shared object of a kernel."""

    def libraries(self, spec: Spec) -> tuple[str, ...]:
        """What `spec` says to the linker, and where to look for what that names."""
        return tuple(spec.device.link_flags)

    def prebuilt(self, spec: Spec) -> Path | None:
        """A launcher for `spec` that came with its sources; then `units` gives the image alone."""
        del spec
        return None

    def notes(self, spec: Spec, image: Path) -> dict[str, str]:
        """What the launcher has to know of an image, which is attached beside it."""
        del spec, image
        return {}


def find(kind: str, settings: Settings) -> Toolchain:
    """The compiler of this kind.

    Raises:
        NoCompiler: there is none; lists every place searched.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown toolchain {kind!r}; known: {', '.join(KINDS)}")
    found: Toolchain = import_module(f"{__name__}.{kind}").discover(settings)
    return found
