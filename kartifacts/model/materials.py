"""What a bundle was made of: its sources, its compilers and how they were called, as one document about it.

It holds no time, no path of a machine and no version of the release: the same sources, compiled by the same
programs, give the same bytes in every release.  Nothing at run time reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kartifacts.errors import VerificationError
from kartifacts.model.digest import parse_digest, strict_json

MEDIA_MATERIALS = "application/vnd.kartifacts.materials.v1+json"
MAX_MATERIALS = 64 << 20  # bytes


def cuda_of(facts: Mapping[str, str]) -> str:
    """The release of CUDA, as ``13.0``, that device code was made with, by what is told of its compiler.

    That of the compiler or assembler, or of the CUDA runtime that is linked in; empty if there is none.
    """
    kind = facts.get("kind")
    if kind in ("nvcc", "nvrtc"):
        return ".".join(facts.get("version", "").split(".")[:2])
    if kind == "cutedsl" and (number := facts.get("cudart", "")).isdecimal():
        return f"{int(number) // 1000}.{int(number) % 1000 // 10}"
    return facts.get("cuda", "") if kind == "triton" else ""


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
    check_contents(found, what)
    return found


def check_contents(materials: Materials, what: str) -> None:
    """Raise a `VerificationError` if materials are of another version, or something in them is no digest or size."""
    if materials.version != 1:
        raise VerificationError(f"version of {what}: expected 1, got {materials.version}", expected="1")
    for content in (*materials.files, *materials.imported):
        parse_digest(content.sha256, what=what)
        if content.size < 0:
            raise VerificationError(f"{what} has a file of {content.size} bytes")
    for digest in (*materials.programs.values(), *([materials.recipe.sha256] if materials.recipe else ())):
        parse_digest(digest, what=what)


def joined(parts: Sequence[Materials]) -> Materials:
    """The materials of a bundle whose kernels were made in several places, of the same sources by the same programs.

    Raises:
        VerificationError: a file or an op is not the same in all of them.
    """
    files: dict[str, Content] = {}
    ops: dict[str, MadeOp] = {}
    for part in parts:
        for content in part.files:
            if files.setdefault(content.path, content) != content:
                raise VerificationError(f"{content.path} has two contents in what {part.family} was made of")
        for op in part.ops:
            before = ops.get(op.op, msgspec.structs.replace(op, kernels=[], reached=[]))
            if (before.flags, before.compile) != (op.flags, op.compile):
                raise VerificationError(f"{op.op} was compiled in two ways")
            ops[op.op] = msgspec.structs.replace(
                before,
                reached=sorted({*before.reached, *op.reached}),
                kernels=sorted([*before.kernels, *op.kernels], key=lambda made: made.uri),
            )
    return msgspec.structs.replace(
        parts[0], files=[files[path] for path in sorted(files)], ops=[ops[name] for name in sorted(ops)]
    )
