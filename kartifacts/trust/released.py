"""What signed metadata says of a library: who may release it, and what they have released."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import ConfigError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import Pin

if TYPE_CHECKING:
    from securesystemslib.signer import Key

TOP_LEVEL = ("root", "targets", "snapshot", "timestamp")


class Released(NamedTuple):
    """One release, as a library's role lists it."""

    pin: Pin
    channels: tuple[str, ...] = ()
    published: str = ""  # ISO date
    provenance: tuple[Digest, int] | None = None  # sha256 and size of the statement of how it was built


class Library(NamedTuple):
    """A library's role as it was verified."""

    name: str
    version: int  # of the role's metadata
    keys: tuple[Key, ...]
    threshold: int
    releases: tuple[Released, ...]


def check_library(name: str) -> str:
    """Give back `name` if a library may have it: roles are named after libraries, and four names are taken."""
    if name in TOP_LEVEL:
        raise ConfigError(f"a library cannot be called {name!r}: that is a role of the metadata itself")
    return check_name(name, "library")
