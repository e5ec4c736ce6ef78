"""What a bundle was made of: its sources, its compilers and how they were called, as one document about it.

It holds no time, no path of a machine and no version of the release: the same sources, compiled by the same
programs, give the same bytes in every release.  Nothing at run time reads it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kartifacts.errors import VerificationError
from kartifacts.model.digest import parse_digest, strict_json

MEDIA_MATERIALS = "application/vnd.kartifacts.materials.v1+json"
MAX_MATERIALS = 64 << 20  # bytes


class Content(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file: its path in the library or tree, and its bytes."""

    path: str
    sha256: str
    size: int
    sha1: str = ""  # only because SPDX asks for it: it proves nothing


class Made(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kernel that was compiled."""

    uri: str
    key: str
    op_digest: str
    defines: list[str] = []


class MadeOp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the kernels of one op were compiled."""

    op: str
    flags: list[str]  # the op's own; the toolchain's stand in its facts
    compile: list[list[str]]  # what was compiled: per kernel, and once for all of them
    reached: list[str]  # those and all that they include: paths among the files
    kernels: list[Made]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the build environment that the compilers were held against."""

    name: str
    sha256: str


class Materials(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that went into one bundle."""

    version: int
    kind: Literal["build", "import"]
    library: str
    family: str
    arch: str
    abi: str
    files: list[Content]  # sources, headers included; of an import the lists that promise its files
    ops: list[MadeOp] = []
    toolchain: dict[str, str] = {}  # the facts that the keys of the kernels are made of
    programs: dict[str, str] = {}  # compilers, linkers and what they bring: name → sha256
    recipe: Recipe | None = None
    imported: list[Content] = []


def decode_materials(data: bytes, *, what: str = "materials") -> Materials:
    """Read materials, after their digest was checked."""
    try:
        found = msgspec.convert(strict_json(data, what=what), type=Materials)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    if found.version != 1:
        raise VerificationError(f"version of {what}: expected 1, got {found.version}", expected="1")
    for content in (*found.files, *found.imported):
        parse_digest(content.sha256, what=what)
        if content.size < 0:
            raise VerificationError(f"{what} has a file of {content.size} bytes")
    for digest in (*found.programs.values(), *([found.recipe.sha256] if found.recipe else ())):
        parse_digest(digest, what=what)
    return found
