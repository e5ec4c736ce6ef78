"""The release plan as one file: which archs are built where with what, and what the result may need; read and judged.

A plan is refused before anything is compiled, with all that is wrong with it and the lists that would do.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch, Toolkit, buildable, check_toolkit, parse_arch
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.layout import check_name

MAX_PLAN = 1 << 20  # bytes
MAX_SHARDS = 1000
VERSIONS = ("glibc", "glibcxx", "cxxabi", "cudart", "driver", "tvm_ffi")  # limits of what a kernel may need
SIZES = ("release_bytes", "pack_bytes")  # limits of what is published
OF_KERNELS = ("kernel_bytes", "local_bytes", "spill_bytes")  # limits of one kernel, judged by who looks into it
_MACHINES = {"x86_64": "x86-64", "aarch64": "aarch64"}  # → how the names of its CPU archs begin
_SHOWN = 20


class Exemption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels that the release need not hold for some archs."""

    uri: str  # pattern: attention/*
    archs: list[str]
    reason: str


class Build(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the matrix: what is built on one kind of machine with one compiler."""

    name: str
    archs: list[str]
    machine: str = ""  # x86_64 | aarch64; empty in plans of schema 1: whichever builds
    cuda: str = ""  # version of the toolkit, e.g. 13.0
    builder: str = ""  # folder with the builder.toml that pins the compilers
    ops: list[str] = []  # families or ops; empty: all that support an arch
    shards: int = 1  # jobs that share the work

    @property
    def parsed(self) -> tuple[Arch, ...]:
        return tuple(map(parse_arch, self.archs))

    @property
    def toolkit(self) -> Toolkit:
        major, minor = self.cuda.split(".")
        return int(major), int(minor)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of manifests/release.toml."""

    schema: int
    library: str
    build: list[Build] = []
    archs: list[str] = []  # of schema 1, instead of builds
    limits: dict[str, str | int] = {}  # highest versions that a kernel may need, most bytes of a release or pack
    exempt: list[Exemption] = []
    costs: str = ""  # file of measured costs, relative to the plan
    builders: str = "../builders"  # directory of the builders' folders, relative to the plan

    @property
    def builds(self) -> list[Build]:
        """The lines of the matrix; a plan of schema 1 has one."""
        return self.build if self.schema > 1 else [Build(name="all", archs=self.archs)]

    def find(self, name: str) -> Build:
        found = next((build for build in self.builds if build.name == name), None)
        if found is None:
            known = ", ".join(build.name for build in self.builds)
            raise ConfigError(f"the plan has no build {name[:100]!r}", hint=f"its builds are: {known}")
        return found

    def only(self, names: Sequence[str]) -> Plan:
        """The part of the plan with these builds; all of it, if none are named."""
        if not names:
            return self
        return msgspec.structs.replace(
            self, schema=2, archs=[], build=[self.find(name) for name in dict.fromkeys(names)]
        )

    def exempts(self, uri: str, arch: Arch) -> bool:
        return any(
            fnmatch.fnmatchcase(uri, exemption.uri) and arch in map(parse_arch, exemption.archs)
            for exemption in self.exempt
        )

    @property
    def digest(self) -> Digest:
        """Of what decides which kernels are made where; limits, costs and comments do not."""
        said = [msgspec.to_builtins(value) for value in (self.library, self.builds, self.exempt)]
        return sha256(canonical_json(said))


def read_plan(path: Path) -> Plan:
    """Read a plan; a `ConfigError` says all that is wrong with it."""
    plan = _convert(path)
    faults = list(_faults(plan))
    if faults:
        shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        hints = [hint for build in plan.builds if (hint := _corrected(build))]
        raise ConfigError(f"the plan {str(path)!r} cannot be built:{shown}", hint="; ".join(hints) or None)
    return plan


def _convert(path: Path) -> Plan:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content: dict[str, Any] = tomllib.loads(read_regular(path, MAX_PLAN).decode("utf-8"))
        if content.get("schema") == 2 and "archs" in content:
            raise ConfigError(
                f"{str(path)!r}: in schema 2 each [[build]] has its own archs; there are none for all of them",
                hint="move them into a [[build]] with name, machine, cuda and archs",
            )
        plan = msgspec.convert(content, type=Plan)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read the plan {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8 and the types of fields
        raise ConfigError(f"{str(path)!r} is not a release plan: {error}") from error
    if plan.schema not in (1, 2):
        raise ConfigError(f"{str(path)!r} has schema {plan.schema}; this version reads schema 1 and 2")
    if plan.schema == 1 and plan.build:
        raise ConfigError(f"{str(path)!r} has [[build]] entries, which are of schema 2", hint="write schema = 2")
    check_name(plan.library, "library")
    _check_limits(plan.limits, str(path))
    if not any(build.archs for build in plan.builds):
        raise ConfigError(f"{str(path)!r} promises no archs")
    return plan


def _check_limits(limits: dict[str, str | int], what: str) -> None:
    for name, limit in limits.items():
        if name in (*SIZES, *OF_KERNELS):
            if isinstance(limit, str) or limit < (name in SIZES):
                raise ConfigError(f"limits.{name} in {what!r}: expected a number of bytes, got {str(limit)[:50]!r}")
        elif name in VERSIONS:
            version_of(str(limit), f"limits.{name} in {what!r}")
        else:
            known = ", ".join((*VERSIONS, *SIZES, *OF_KERNELS))
            raise ConfigError(f"{what!r} limits {name[:50]!r}, which nothing is measured by; known: {known}")


def version_of(text: str, what: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}){0,5}", text):
        raise ConfigError(f"{what}: expected a version like 2.34, got {text[:50]!r}")
    return tuple(map(int, text.split(".")))


# -- what is wrong with it ---------------------------------------------------------------------------------------------


def _faults(plan: Plan) -> Iterator[str]:
    for exemption in plan.exempt:
        yield from _exemption_faults(exemption, plan)
    sound = []
    for build in plan.builds:
        faults = list(_build_faults(build, schema=plan.schema))
        yield from faults
        sound += [build] * (not faults)
    names = [build.name for build in plan.builds]
    yield from (f"two builds are called {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1)
    yield from _built_twice(sound)


def _exemption_faults(exemption: Exemption, plan: Plan) -> Iterator[str]:
    where = f"the exemption of {exemption.uri[:100]!r}"
    for name, value in (
        ("uri", exemption.uri.strip()),
        ("archs", exemption.archs),
        ("reason", exemption.reason.strip()),
    ):
        if not value:
            yield f"{where} has no {name}"
    if unreadable := [fault for text in exemption.archs for fault in _unreadable(text, where)]:
        yield from unreadable
        return
    sound = [text for build in plan.builds for text in build.archs if not list(_unreadable(text, ""))]
    built = {*map(parse_arch, sound)}
    for text in exemption.archs:
        if built and parse_arch(text) not in built:
            yield f"{where} is for {text}, which no build lists"


def _build_faults(build: Build, *, schema: int) -> Iterator[str]:
    name = f"build {build.name[:100]!r}" if schema > 1 else "the arch list"
    for text, what in ((build.name, "build"), *([(build.builder, "builder")] if build.builder else [])):
        try:
            check_name(text, what)
        except ConfigError as error:
            yield error.message
    if schema > 1 and build.machine not in _MACHINES:
        yield f"{name}: machine is {build.machine[:50]!r}, expected {' or '.join(_MACHINES)}"
    if not 1 <= build.shards <= MAX_SHARDS:
        yield f"{name}: shards is {build.shards}, expected 1 to {MAX_SHARDS}"
    if build.cuda and not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", build.cuda):
        yield f"{name}: cuda is {build.cuda[:50]!r}, expected a version such as 13.0"
        return
    unreadable = [fault for text in build.archs for fault in _unreadable(text, name)]
    yield from unreadable
    if not build.archs:
        yield f"{name} lists no archs"
    if any(not word.strip(" ,") for word in build.ops):
        yield f"{name}: ops holds an empty name; leave ops out for all of them"
    if not unreadable:
        yield from (f"{name}: {fault}" for fault in _arch_faults(build, schema=schema))


def _unreadable(text: str, where: str) -> Iterator[str]:
    try:
        parse_arch(text)
    except ConfigError as error:
        yield f"{where}: {error.message}"


def _arch_faults(build: Build, *, schema: int) -> Iterator[str]:
    seen: dict[Arch, str] = {}
    for text, arch in zip(build.archs, build.parsed, strict=True):
        if arch in seen:
            yield f"{text} is listed twice" + (f", also as {seen[arch]}" if seen[arch] != text else "")
        seen.setdefault(arch, text)
        if arch.kind == "cpu" and build.machine and not arch.name.startswith(_MACHINES.get(build.machine, "")):
            yield f"{arch} is not an arch of {build.machine} machines"
        if arch.kind == "cuda" and build.cuda:
            try:
                check_toolkit(arch, build.toolkit)
            except ConfigError as error:
                yield error.message
        elif arch.kind == "cuda" and schema > 1:
            yield f"{arch} needs CUDA, and the build names no version of it"


def _corrected(build: Build) -> str:
    """The list of a build without what is wrong with it, as one may copy it; nothing where that is not clear."""
    try:
        archs = list(build.parsed)
        toolkit = build.toolkit if build.cuda else None
    except ValueError:  # a ConfigError is one too
        return ""
    right = dict.fromkeys(
        nearest
        for arch in archs
        if (nearest := buildable(arch, toolkit) if toolkit and arch.kind == "cuda" else arch)
        and not (arch.kind == "cpu" and not arch.name.startswith(_MACHINES.get(build.machine, "")))
    )
    return f"build {build.name!r} could list {listed(right)}" if right and list(right) != archs else ""


def listed(archs: Sequence[Arch] | dict[Arch, None]) -> str:
    """Archs as a plan lists them."""
    return "archs = [" + ", ".join(f'"{arch}"' for arch in archs) + "]"


def _built_twice(builds: Sequence[Build]) -> Iterator[str]:
    """Two builds may make kernels for one arch only with different versions of CUDA, or on different machines.

    Those that name ops are looked at where the ops are known.
    """
    made: dict[tuple[Arch, str, str], Build] = {}
    for build in builds:
        for arch in dict.fromkeys(build.parsed):
            how = (arch, build.machine, build.cuda if arch.kind == "cuda" else "")
            other = made.setdefault(how, build)
            if other is not build and not (other.ops and build.ops):
                cuda = f" with CUDA {build.cuda}" if how[2] else ""
                yield f"builds {other.name!r} and {build.name!r} both make {arch}{cuda}"
