"""The release plan: what a release promises, as one file, held against what a repository holds."""

from __future__ import annotations

import fnmatch
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import KernelEntry, Pin
from kartifacts.publish.repository import Repository, bundle_name

MAX_PLAN = 1 << 20  # bytes
_SHOWN = 20


class Exemption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels that the release need not hold for some archs."""

    uri: str  # pattern: attention/*
    archs: list[str]
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of manifests/release.toml."""

    schema: int
    library: str
    archs: list[str]  # each op must be there for each of its kind (cpu, cuda, hip)
    limits: dict[str, str] = {}  # glibc, glibcxx, ...: highest version that a kernel may need
    exempt: list[Exemption] = []


def read_plan(path: Path) -> Plan:
    """Read a plan; a `ConfigError` says what is wrong with it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        plan = msgspec.convert(tomllib.loads(read_regular(path, MAX_PLAN).decode("utf-8")), type=Plan)
    except OSError as error:
        raise ConfigError(f"cannot read the plan {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8 and the types of fields
        raise ConfigError(f"{str(path)!r} is not a release plan: {error}") from error
    if plan.schema != 1:
        raise ConfigError(f"{str(path)!r} has schema {plan.schema}; this version reads schema 1")
    check_name(plan.library, "library")
    for arch in (*plan.archs, *(arch for exemption in plan.exempt for arch in exemption.archs)):
        parse_arch(arch)
    for name, limit in plan.limits.items():
        _number(limit, f"limits.{name} in {str(path)!r}")
    if not plan.archs:
        raise ConfigError(f"{str(path)!r} promises no archs")
    return plan


def check_plan(plan: Plan, repository: Repository, pins: Sequence[Pin]) -> None:
    """Raise a `VerificationError` that names each kernel which is missing or needs too new a system."""
    for pin in pins:
        if pin.library != plan.library:
            continue
        held: dict[Arch, dict[str, KernelEntry]] = defaultdict(dict)
        for descriptor in repository.release(pin).manifests:
            table = repository.table(repository.bundle(descriptor), f"kernel table of {bundle_name(descriptor)}")
            if table.arch != "any":
                held[parse_arch(table.arch)].update({kernel.uri: kernel for kernel in table.kernels})
        faults = [*_missing(plan, held), *_beyond_limits(plan, held)]
        if faults:
            shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
            more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise VerificationError(f"{pin.library} {pin.version} is not what its plan promises:{shown}{more}")


def _missing(plan: Plan, held: dict[Arch, dict[str, KernelEntry]]) -> Iterator[str]:
    for arch in map(parse_arch, plan.archs):
        if arch not in held:
            yield f"nothing is there for {arch}"
            continue
        wanted = {uri for other, kernels in held.items() if other.kind == arch.kind for uri in kernels}
        for uri in sorted(wanted - set(held[arch])):
            if not any(
                fnmatch.fnmatchcase(uri, exemption.uri) and arch in map(parse_arch, exemption.archs)
                for exemption in plan.exempt
            ):
                yield f"{uri} is missing for {arch}"


def _beyond_limits(plan: Plan, held: dict[Arch, dict[str, KernelEntry]]) -> Iterator[str]:
    for arch, kernels in held.items():
        for uri, kernel in sorted(kernels.items()):
            for name, limit in plan.limits.items():
                need = kernel.needs.get(name)
                if need is not None and _number(need, f"{name} of {uri}") > _number(limit, name):
                    yield f"{uri} for {arch} needs {name} {need}; the plan's limit is {limit}"


def _number(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        raise ConfigError(f"{what}: expected a version like 2.34, got {text[:50]!r}") from None
