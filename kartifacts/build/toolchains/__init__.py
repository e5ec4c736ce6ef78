"""Compilers behind one protocol: what they are, and with which flags each source of a spec becomes an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.spec import Spec


@dataclass(frozen=True)
class Unit:
    """One source file that becomes one object.

    `source`, `flags` and `fingerprint`, with the content of the files reached, are the object's identity.
    """

    source: str  # relative to the library's root, which is the compiler's working directory
    compiler: Path
    flags: tuple[str, ...]
    places: tuple[str, ...]  # flags that say where this machine keeps things: no part of the identity
    fingerprint: Mapping[str, str]
    memory: int  # bytes that one such compilation may need

    def command(self, output: str, depfile: str) -> tuple[str, ...]:
        own = ("-MMD", "-MF", depfile, "-c", self.source, "-o", output)
        return (str(self.compiler), *self.flags, *self.places, *own)


class Toolchain(Protocol):
    """A compiler of one kind, found and examined.

    `fingerprint` holds all that can change its output and nothing else: never where it is installed.
    """

    @property
    def kind(self) -> str: ...

    @property
    def place(self) -> Path:
        """Where it was found; for people, and part of no identity."""
        ...

    @property
    def fingerprint(self) -> dict[str, str]: ...

    def programs(self, settings: Settings) -> dict[str, str]:
        """The sha256 of every program that it consists of, and of what it links or includes of its own, by name.

        They are in no key, and hashed only where a release says what it was made with.
        """
        ...

    def check(self, spec: Spec) -> None:
        """Raise `ConfigError` if this compiler cannot build for the arch of `spec`."""
        ...

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        """What to compile for `spec`: its own sources first, then those that all specs of its op share."""
        ...

    def link(self, objects: Sequence[str], output: str) -> tuple[str, ...]:
        """The command that makes the kernel's shared object."""
        ...


def find(kind: str, settings: Settings) -> Toolchain:
    """The compiler of this kind.

    Raises:
        NoCompiler: there is none; lists every place searched.
    """
    from kartifacts.build.toolchains import cxx, nvcc

    known: dict[str, Callable[[Settings], Toolchain]] = {"cxx": cxx.discover, "nvcc": nvcc.discover}
    if kind not in known:
        raise ConfigError(f"unknown toolchain {kind!r}; known: {', '.join(sorted(known))}")
    return known[kind](settings)
