"""From kernels to a release in a repository directory; who built them, here or elsewhere, makes no difference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kartifacts.config import Settings
from kartifacts.files.directories import check_place
from kartifacts.model.arch import Arch
from kartifacts.model.digest import canonical_json
from kartifacts.model.manifest import Descriptor
from kartifacts.model.spec import FFI_ABI, Spec

if TYPE_CHECKING:
    from kartifacts.build.blocks import PackInput
    from kartifacts.build.kept import BuiltKernel
    from kartifacts.build.reuse import Earlier
    from kartifacts.build.toolchains import Toolchain
    from kartifacts.model.materials import Materials, Recipe
    from kartifacts.publish.plan import Plan
    from kartifacts.publish.promises import Promises
    from kartifacts.publish.shards import Made


@dataclass(frozen=True)
class Part:
    """One bundle to be: kernels of one family and arch that were made with the same compilers for the same machine."""

    materials: Materials
    kernels: Sequence[PackInput]
    machine: str  # that their host code runs on; empty if the arch says it, or there is none


@dataclass(frozen=True)
class Release:
    """What a release is to be called, where it goes, and what it may use again."""

    out: Path
    library: str
    version: str
    lock: Path | None = None
    since: Path | None = None
    plan: Plan | None = None
    promises: Promises | None = None

    def check(self) -> None:
        """Find out before hours of work what would be wrong after them."""
        check_written(self.out, self.lock)
        check_since(self.since, self.library)


def machine_of(arch: Arch, suffix: str, machine: str) -> str:
    """The machine that a kernel of this arch is tied to beyond what the arch says."""
    return machine if suffix == ".so" and arch.kind != "cpu" else ""


def packed(kernel: BuiltKernel | Made, path: Path) -> PackInput:
    """A kernel, which lies at `path`, as it goes into a bundle."""
    from kartifacts.build.blocks import PackInput

    return PackInput(
        uri=kernel.uri,
        path=path,
        suffix=kernel.suffix,
        key=kernel.key,
        op_digest=kernel.op_digest,
        exports=kernel.exports,
        needs=kernel.needs,
        sha256=kernel.sha256,
    )


def parts_of(
    made: Sequence[tuple[Spec, BuiltKernel]],
    toolchains: Mapping[str, Toolchain],
    settings: Settings,
    recipe: Recipe | None,
) -> list[Part]:
    """Kernels that were built here, by the bundles that they will be in."""
    from kartifacts.build.materials import compiled

    programs = {kind: toolchain.programs(settings) for kind, toolchain in toolchains.items()}
    groups: dict[tuple[str, Arch, str, bytes, str], list[tuple[Spec, BuiltKernel]]] = {}
    for spec, kernel in made:
        tied = machine_of(spec.arch, kernel.suffix, os.uname().machine)
        facts = canonical_json(dict(kernel.toolchain))
        groups.setdefault((spec.family, spec.arch, spec.device.toolchain, facts, tied), []).append((spec, kernel))
    return [
        Part(
            compiled(members, arch=str(arch), abi=FFI_ABI, programs=programs[kind], recipe=recipe),
            [packed(kernel, kernel.path) for _, kernel in members],
            tied,
        )
        for (_, arch, kind, _, tied), members in groups.items()
    ]


def _reported(kernel: PackInput, arch: str) -> dict[str, Any]:
    """What the bytes of a kernel say of it; names the kernel, and no file, if they cannot be read."""
    from kartifacts.build.checks import Facts
    from kartifacts.build.elf import inspect_bytes, read_file

    content = read_file(kernel.path)
    facts = Facts(len(content), inspect_bytes(content, f"{kernel.uri} for {arch}"))
    return {"uri": kernel.uri, "arch": arch, "key": kernel.key, **facts.report()}


def release(parts: Sequence[Part], of: Release, settings: Settings) -> dict[str, Any]:
    """Pack the kernels, name the release, say what it promised, pin it; gives what became of it."""
    from kartifacts.build.pack import PACK_BYTES, pack_bundle
    from kartifacts.publish.promises import write_promises
    from kartifacts.publish.release import make_release

    kernels = [_reported(kernel, part.materials.arch) for part in parts for kernel in part.kernels]
    limit = 0 if of.plan is None else int(of.plan.limits.get("pack_bytes", 0))
    bundles = [
        pack_bundle(
            part.kernels,
            of.out,
            library=of.library,
            family=part.materials.family,
            arch=part.materials.arch,
            abi=part.materials.abi,
            toolchain=part.materials.toolchain,
            machine=part.machine,
            earlier=earlier(of.since or of.out, of.library, part.materials.arch, part.materials.abi),
            pack_bytes=min(limit or PACK_BYTES, PACK_BYTES),
            jobs=settings.jobs,
        )
        for part in parts
    ]
    materials = {bundle.digest: part.materials for bundle, part in zip(bundles, parts, strict=True)}
    made = make_release(of.out, of.library, of.version, bundles, materials)
    if of.promises is not None:
        write_promises(of.out, of.promises, of.version)
    return {
        "kernels": kernels,
        "bundles": [described(bundle) for bundle in bundles],
        "packed_bytes": sum({layer.digest: layer.size for layer in _layers(of.out, bundles)}.values()),
        "release": made.digest,
        "pin": pinned(of.out, of.library, of.version, of.lock),
    }


def _layers(out: Path, bundles: Sequence[Descriptor]) -> Iterator[Descriptor]:
    from kartifacts.publish.repository import Repository

    for bundle in bundles:
        yield from Repository(out).bundle(bundle).layers


def check_written(out: Path, lock: Path | None) -> None:
    """Refuse a repository and a lock that could not be written, or a lock that is none, before hours of work."""
    from kartifacts.publish.lockfile import read_lock

    check_place(out, "--out", directory=True)
    if lock is not None:
        if os.path.lexists(lock):
            read_lock(lock)
        check_place(lock, "--lock", directory=False)


def check_since(since: Path | None, library: str) -> None:
    """Refuse a repository that was named and lends nothing, before hours of work."""
    from kartifacts.publish.repository import Repository

    if since is not None:
        Repository(since).pins(library)


def earlier(repository: Path, library: str, arch: str, abi: str) -> list[Earlier]:
    """The bundles for one arch and ABI in all releases of `library` that a repository holds, if it is one."""
    from kartifacts.build.reuse import Earlier
    from kartifacts.publish.repository import Repository

    shelf = Repository(repository)
    if not shelf.holds(library):
        return []
    found: dict[str, Earlier] = {}
    for pin in shelf.pins(library):
        for descriptor in shelf.release(pin).manifests:
            if (descriptor.note("arch"), descriptor.note("abi")) == (arch, abi) and descriptor.digest not in found:
                bundle = shelf.bundle(descriptor)
                table = shelf.table(bundle, f"kernel table of {library} {pin.version}")
                found[descriptor.digest] = Earlier(repository, bundle, table)
    return list(found.values())


def pinned(out: Path, library: str, version: str, lock: Path | None) -> dict[str, Any]:
    from kartifacts.publish.lockfile import add_pins
    from kartifacts.publish.repository import Repository

    pins = Repository(out).pins(library, version)
    if lock is not None:
        add_pins(lock, pins)
    made: dict[str, Any] = msgspec.to_builtins(pins[0])
    return made


def described(bundle: Descriptor) -> dict[str, Any]:
    return {
        "family": bundle.note("family"),
        "arch": bundle.note("arch"),
        "kernels": int(bundle.note("kernels") or 0),
        "digest": bundle.digest,
    }
