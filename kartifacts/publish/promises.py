"""What a release promises, kernel by kernel: written down where the sources are, for everybody who has none.

The same plan and sources give the same bytes, so their digest says that two machines work on the same release.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest, parse_digest, sha256, strict_json
from kartifacts.model.layout import check_name, check_path
from kartifacts.model.manifest import encode
from kartifacts.publish.buckets import MAX_SMALL, update
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.plan import Build, Exemption, Plan

MAX_PROMISES = MAX_SMALL


class Promised(msgspec.Struct, frozen=True, array_like=True):
    """One kernel."""

    uri: str
    arch: str
    op_digest: str
    libraries: tuple[str, ...] = ()  # that it may need besides the usual, as named after -l


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What one build of the plan makes."""

    name: str
    machine: str
    cuda: str
    archs: list[str]
    ops: list[str]
    kernels: list[Promised]


class Promises(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Every kernel that a release is to hold."""

    version: int
    library: str
    library_version: str  # of the package that brings the sources
    plan: str  # digest of the plan
    exempt: list[Exemption]
    builds: list[Line]

    @cached_property
    def encoded(self) -> bytes:
        return encode(self)

    @cached_property
    def digest(self) -> Digest:
        return sha256(self.encoded)

    def find(self, name: str) -> Line:
        found = next((line for line in self.builds if line.name == name), None)
        if found is None:
            known = ", ".join(line.name for line in self.builds)
            raise ConfigError(f"nothing was promised of a build {name[:100]!r}", hint=f"builds are: {known}")
        return found

    def only(self, names: Sequence[str]) -> Promises:
        """What these builds promise; all, if none are named."""
        return msgspec.structs.replace(self, builds=[self.find(name) for name in names]) if names else self


def line_of(build: Build, kernels: Sequence[Promised]) -> Line:
    return Line(
        name=build.name,
        machine=build.machine,
        cuda=build.cuda,
        archs=[str(arch) for arch in build.parsed],
        ops=build.ops,
        kernels=sorted(kernels, key=lambda kernel: (kernel.uri, kernel.arch)),
    )


def check_same(promises: Promises, plan: Plan) -> None:
    """Raise a `VerificationError` if promises were made by a plan that says something else of what is to be there."""
    made, asked = (_said(each) for each in (promises.builds, [line_of(build, []) for build in plan.builds]))
    for name in dict.fromkeys((*asked, *made)):
        if made.get(name) != asked.get(name):
            here = "other archs, ops, machine or CUDA" if name in made and name in asked else "no build"
            raise VerificationError(
                f"the release was made by a plan that has {here} {name!r}"
                if name in asked
                else f"the release holds the build {name!r}, which the plan does not have",
                hint="build and merge with this plan; --build NAME takes a part of it",
            )
    if promises.library != plan.library or promises.exempt != plan.exempt:
        raise VerificationError("the release was made by a plan with another library or other exemptions")


def _said(lines: Sequence[Line]) -> dict[str, tuple[object, ...]]:
    return {line.name: (line.machine, line.cuda, sorted(line.archs), sorted(line.ops)) for line in lines}


def decode_promises(data: bytes, *, what: str) -> Promises:
    """Read promises that somebody else wrote; their digest was checked, or nobody vouches for them."""
    try:
        promises = msgspec.convert(strict_json(data, what=what), type=Promises)
        if promises.version != 1:
            raise VerificationError(f"version of {what}: expected 1, got {promises.version}", expected="1")
        check_name(promises.library, "library")
        parse_digest(promises.plan, what=what)
        for line in promises.builds:
            check_name(line.name, "build")
            for kernel in line.kernels:
                check_path(kernel.uri.partition("?")[0], what=f"a uri in {what}")
                parse_digest(kernel.op_digest, what=what)
            for arch in {*line.archs, *(kernel.arch for kernel in line.kernels)}:
                parse_arch(arch)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    except ConfigError as error:
        raise VerificationError(f"{what} is malformed: {error.message}") from error
    return promises


# -- in a repository directory -----------------------------------------------------------------------------------------


def place_of(library: str, version: str) -> str:
    return f"promises/{check_name(library, 'library')}/{check_name(version, 'version')}.json"


def write_promises(repository: Path, promises: Promises, version: str) -> None:
    """Say beside a release what it promised; who builds it again under other promises says so."""
    update(DirectoryBucket(repository), place_of(promises.library, version), lambda _: promises.encoded)


def read_promises(repository: Path, library: str, version: str) -> Promises | None:
    """What a release in a repository directory promised; None if it was made without a plan."""
    place = place_of(library, version)
    try:
        data = DirectoryBucket(repository).get(place, MAX_PROMISES)
    except SourceError as error:
        if error.missing:
            return None
        raise
    return decode_promises(data, what=f"{place} in {str(repository)!r}")
