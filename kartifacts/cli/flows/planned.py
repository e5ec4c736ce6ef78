"""What a release plan asks of the library and the machine that are here; what cannot be is refused before any work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, Refusal
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch, buildable, parse_arch, supported
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.materials import cuda_of
from kartifacts.model.spec import OpDecl, Spec
from kartifacts.publish.plan import Build, Plan, listed, read_plan
from kartifacts.publish.promises import Promised, Promises, line_of

if TYPE_CHECKING:
    from kartifacts.build.library import Library
    from kartifacts.build.toolchains import Toolchain

_SHOWN = 20
_CHANGING = ("debug", "lineinfo", "cxx_flags", "cuda_flags")  # settings that a release is never built with
_CALLING = ("cxx_launcher", "cuda_launcher")  # settings that change how compilers are called, and no byte


@dataclass(frozen=True)
class Work:
    """What a plan asks of the library that is installed here."""

    plan: Plan
    path: Path
    library: Library
    version: str  # of the package that brings the library
    specs: Mapping[str, Sequence[Spec]]  # by build
    skipped: Mapping[str, Sequence[Refusal]]
    promises: Promises


def installed(name: str, workspace: Path | None = None) -> tuple[Library, str]:
    """A library of this machine, and the version of the package that brings it.

    Args:
        workspace: where what was read of it before is remembered.
    """
    from kartifacts import __version__
    from kartifacts.build.library import BUILTIN, discover

    found = next((library for library in discover(workspace=workspace) if library.name == name), None)
    if found is None:
        raise ConfigError(f"no kernel library {name!r} is installed", hint="kartifacts doctor lists those there are")
    return found, __version__ if name == BUILTIN else found.version


def work_of(path: Path, builds: Sequence[str] = ()) -> Work:
    """Read a plan, all of it or some of its builds, and hold it against the library.

    Raises:
        ConfigError: the plan is wrong, or asks for what no op can be built for; says which lists would do.
    """
    plan = read_plan(path).only(builds)
    library, version = installed(plan.library)
    specs, skipped = {}, {}
    exempted: list[Spec] = []
    for build in plan.builds:
        names = op_names(",".join(build.ops), library.ops)
        archs = build.parsed
        check_variants(library, names, archs, build.toolkit if build.cuda else None, f"build {build.name!r}: ")
        found, left = library.specs(names, archs)
        check_each(names, archs, found, left)
        specs[build.name] = [spec for spec in found if not plan.exempts(spec.uri, spec.arch)]
        exempted += [spec for spec in found if plan.exempts(spec.uri, spec.arch)]
        skipped[build.name] = [*left, *_exempted(plan, found)]
    _check_apart(plan, specs)
    _check_exemptions(plan, specs, exempted, whole=not builds)
    promises = Promises(
        version=1,
        library=plan.library,
        library_version=version,
        plan=plan.digest,
        exempt=plan.exempt,
        builds=[
            line_of(
                build,
                [Promised(spec.uri, str(spec.arch), spec.op_digest, spec.libraries) for spec in specs[build.name]],
            )
            for build in plan.builds
        ],
    )
    return Work(plan, path, library, version, specs, skipped, promises)


def promised(path: Path, builds: Sequence[str] = ()) -> tuple[Plan, Promises | None]:
    """A plan, and what it promises; None where the library is not installed, so that only others can say."""
    from kartifacts.build.library import discover

    plan = read_plan(path).only(builds)
    if not any(library.name == plan.library for library in discover()):
        return plan, None
    return plan, work_of(path, builds).promises


def op_names(ops: str, known: Sequence[str]) -> list[str]:
    """Names of ops; a family stands for all of its ops."""
    names: list[str] = []
    words = ops.replace(",", " ").split()
    if ops and not words:
        raise ConfigError(f"{ops[:100]!r} names no ops", hint="leave it out for all ops")
    for word in words:
        family = [name for name in known if name.rpartition("/")[0] == word]
        names.extend(family or [word])
    return names


def check_declared(library: Library, names: Sequence[str]) -> None:
    """Say of an op that the library does not have, which other library of this machine does."""
    from kartifacts.build.library import discover

    for name in names:
        if library.matches(name):
            continue
        others = [other.name for other in discover() if any(map(other.matches, op_names(name, other.ops)))]
        if others:
            raise ConfigError(
                f"no op {name[:100]!r} is declared in library {library.name!r}, but in {', '.join(others)}",
                hint=f"--library {others[0]}",
            )


def check_each(names: Sequence[str], archs: Sequence[Arch], specs: Sequence[Spec], skipped: Sequence[Refusal]) -> None:
    """Refuse a named op or arch for which nothing would be built: a release must hold what was asked for by name."""
    reasons = "; ".join(map(str, skipped[:_SHOWN]))
    for arch in archs:
        if not any(spec.arch == arch for spec in specs):
            raise ConfigError(f"none of the ops can be built for {arch}; nothing was built", hint=reasons)
    for name in names:
        if not any(name in (spec.op.name, f"{spec.family}/{spec.op.name}") for spec in specs):
            raise ConfigError(f"{name} can be built for none of these archs; nothing was built", hint=reasons)


def check_variants(
    library: Library, names: Sequence[str], archs: Sequence[Arch], toolkit: tuple[int, int] | None, where: str = ""
) -> None:
    """Refuse a list that means a device which an op supports, and misses it by a suffix: `12.0` for code of `12.0a`.

    Nobody who lists 12.0 wants the ops that need 12.0a to be left out without a word.
    """
    right = dict.fromkeys(archs)
    faults = []
    for name in names or library.ops:
        _, decl = library.find(name)
        for arch in archs:
            better = _better(decl, arch, archs, toolkit)
            if better is not None:
                faults.append(f"{name} is not for {arch}: it needs {better}")
                right = dict.fromkeys(better if other == arch else other for other in right)
    if faults:
        shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        raise ConfigError(
            f"{where}some ops need another variant of a listed arch; nothing was built:{shown}",
            hint=f"{listed(right)}, or name the other ops",
        )


def _better(decl: OpDecl, arch: Arch, archs: Sequence[Arch], toolkit: tuple[int, int] | None) -> Arch | None:
    """The variant of `arch` that an op needs, if only the suffix stands between them and no other on the list fits."""
    device = decl.device.get(arch.kind)
    if arch.kind != "cuda" or device is None or not device.min_arch:
        return None
    least = parse_arch(device.min_arch)
    fits = partial(supported, majors=device.majors, min_arch=least)
    if fits([arch])[0] or any(
        fits([other])[0] for other in archs if (other.major, other.minor) == (arch.major, arch.minor)
    ):
        return None
    better = replace(arch, suffix=least.suffix)
    exists = toolkit is None or buildable(better, toolkit) == better
    return better if fits([better])[0] and exists else None


def _exempted(plan: Plan, specs: Sequence[Spec]) -> Iterator[Refusal]:
    """What each exemption of a plan takes out of a build, if anything."""
    for exemption in plan.exempt:
        alone = msgspec.structs.replace(plan, exempt=[exemption])
        number = sum(alone.exempts(spec.uri, spec.arch) for spec in specs)
        if number:
            where = f"{exemption.uri} for {', '.join(exemption.archs)}"
            yield Refusal(where, f"exempt, {number} kernels: {exemption.reason}")


def _check_apart(plan: Plan, specs: Mapping[str, Sequence[Spec]]) -> None:
    """Refuse two builds that would make the same kernel."""
    made: dict[tuple[object, ...], str] = {}
    for build in plan.builds:
        for spec in specs[build.name]:
            how = (spec.uri, spec.arch, build.machine, build.cuda if spec.arch.kind == "cuda" else "")
            other = made.setdefault(how, build.name)
            if other != build.name:
                raise ConfigError(f"builds {other!r} and {build.name!r} both make {spec.uri} for {spec.arch}")


def _check_exemptions(
    plan: Plan, specs: Mapping[str, Sequence[Spec]], exempted: Sequence[Spec], *, whole: bool
) -> None:
    """Refuse exemptions that exempt no kernel, or all that a build has for an arch; the first for a `whole` plan."""
    for number, exemption in enumerate(plan.exempt, 1) if whole else ():
        for text in exemption.archs:
            alone = msgspec.structs.replace(plan, exempt=[msgspec.structs.replace(exemption, archs=[text])])
            if not any(alone.exempts(spec.uri, spec.arch) for spec in exempted):
                raise ConfigError(
                    f"exemption {number} of the plan, of {exemption.uri!r}, exempts nothing for {text}: no op that can "
                    "be built for it has such a uri",
                    hint="a uri has the axes too: norm/rmsnorm?* or norm/rmsnorm*",
                )
    for build in plan.builds:
        for arch in build.parsed:
            if not any(spec.arch == arch for spec in specs[build.name]):
                raise ConfigError(
                    f"build {build.name!r} has no kernels for {arch}: all of them are exempt",
                    hint="take the arch out of the build, or exempt less",
                )


# -- whether this machine is the one -----------------------------------------------------------------------------------


def check_machine(build: Build) -> None:
    own = os.uname().machine
    if build.machine and build.machine != own:
        raise ConfigError(
            f"build {build.name!r} is for {build.machine} machines; this one is {own}",
            hint=f"run it on a {build.machine} machine"
            + (f", in the environment of builders/{build.builder}" * bool(build.builder)),
        )


def check_settings(settings: Settings) -> None:
    """Refuse to build a release otherwise than others can."""
    changed = [name for name in _CHANGING if getattr(settings, name)]
    if changed:
        names = ", ".join(f"KARTIFACTS_{name.upper()}" for name in changed)
        raise ConfigError(f"a release is built with the declared flags alone, and {names} is set", hint="unset it")


def calling(settings: Settings) -> dict[str, str]:
    """The settings that a shard says it was made with."""
    return {name: str(value) for name in (*_CHANGING, *_CALLING) if (value := getattr(settings, name))}


def check_toolkit_of(build: Build, toolchains: Mapping[str, Toolchain], specs: Sequence[Spec]) -> None:
    """Refuse compilers that make code of another CUDA for `specs` than the plan says."""
    if not build.cuda:
        return
    one = {(spec.device.toolchain, spec.arch): spec for spec in specs if spec.arch.kind == "cuda"}
    made = {which: cuda_of(toolchains[which[0]].made_with(spec)) for which, spec in one.items()}
    for (kind, arch), cuda in made.items():
        if cuda == build.cuda:
            continue
        toolchain = toolchains[kind]
        version = toolchain.fingerprint.get("version", "")
        if kind in ("nvcc", "nvrtc"):
            what, hint = f"{kind} in {toolchain.place} is of CUDA {version}", "set CUDA_HOME"
        else:  # which assembler a package brings, or which runtime is linked in, nobody chooses by a toolkit alone
            what = f"what {kind} {version} makes for {arch} is of CUDA {cuda or 'unknown'}"
            archs = listed([other for (of, other), its in made.items() if (of, its) == (kind, cuda)])
            ops = sorted({f"{spec.family}/{spec.op.name}" for spec in specs if spec.device.toolchain == kind})
            names = ", ".join(f'"{name}"' for name in ops[:_SHOWN])
            hint = f'give it a build of its own: cuda = "{cuda}", {archs}, ops = [{names}]'
            hint += "; or set CUDA_HOME to the toolkit whose runtime is to be linked in" * (kind == "cutedsl")
        raise ConfigError(
            f"build {build.name!r} is for CUDA {build.cuda}; {what}",
            hint=f"use the environment of builders/{build.builder}" if build.builder else hint,
        )


# -- the builders' folders ---------------------------------------------------------------------------------------------


def recipe_file(plan: Plan, path: Path, build: Build) -> Path | None:
    """The builder.toml of a build, if it names a builder."""
    return path.parent / plan.builders / build.builder / "builder.toml" if build.builder else None


Cost = Callable[[Spec], float]


def costs_of(plan: Plan, path: Path) -> tuple[Cost, Digest]:
    """What a kernel is expected to take, in seconds, and the digest of the file that says so."""
    from kartifacts.build.costs import MAX_TABLE, Costs

    if not plan.costs:
        return Costs().of, sha256(b"")
    file = path.parent / plan.costs
    try:
        data = read_regular(file, MAX_TABLE)
    except OSError as error:
        raise ConfigError(
            f"cannot read the costs {str(file)!r}: {error.strerror or error}",
            hint="`kartifacts build --costs-out FILE` measures them; a plan need not name any",
        ) from error
    costs = Costs.decode(data, str(file))
    if not costs.known:
        raise ConfigError(f"{str(file)!r} holds no costs", hint="`kartifacts build --costs-out FILE` measures them")
    return costs.of, sha256(data)
