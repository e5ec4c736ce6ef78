"""Holds what a repository really contains against what a plan promises, and names every difference.

What is there is read from tables, packs and the kernels themselves, never from what was said to be there.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kartifacts.errors import VerificationError
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import sha256
from kartifacts.model.frames import decompress
from kartifacts.model.manifest import BundleManifest, Descriptor, KernelEntry, Pin, Table
from kartifacts.model.materials import Materials, cuda_of
from kartifacts.publish.plan import SIZES, VERSIONS, Plan, version_of
from kartifacts.publish.promises import Promised, Promises, check_same, place_of, read_promises
from kartifacts.publish.referrers import MATERIALS, by_bundle
from kartifacts.publish.repository import Repository, bundle_name

log = logging.getLogger(__name__)

_SHOWN = 20
_LARGEST = 10
_NATIVE = re.compile(r"-m(arch|tune|cpu)=native\b")

Judge = Callable[[bytes, KernelEntry, Arch, Sequence[str]], Sequence[str]]
"""What is wrong with the content of a kernel that is published for an arch, and may need these libraries."""


@dataclass(frozen=True)
class _Held:
    """One bundle of a release, and what it was made of, if that is known here."""

    descriptor: Descriptor
    manifest: BundleManifest
    table: Table
    materials: Materials | None

    @property
    def arch(self) -> Arch:
        return parse_arch(self.table.arch)

    @property
    def cuda(self) -> str:
        """The version of CUDA that its device code was made with; empty if that is not told."""
        return cuda_of(self.table.toolchain) if self.arch.kind == "cuda" else ""

    def may_be(self, machine: str, cuda: str) -> bool:
        """Whether it may have been made on such a machine with such a CUDA, as far as it tells."""
        own = self.descriptor.note("machine")
        return (not own or not machine or own == machine) and (not self.cuda or not cuda or self.cuda == cuda)


def check_plan(
    plan: Plan,
    repository: Repository,
    pins: Sequence[Pin],
    *,
    sources: Callable[[], Promises | None] | None = None,
    judge: Judge | None = None,
) -> None:
    """Look at every release of the plan's library.

    Args:
        sources: gives what the sources that are here promise by this plan, None if there are none; asked where nothing
            beside a release says what was promised.
        judge: looks into each kernel.

    Raises:
        VerificationError: names each kernel that is missing, needs too new a system, was made as no release is, or is
            not what its table says, and what is too large; or nobody says what was promised.
    """
    for pin in pins:
        if pin.library != plan.library:
            continue
        promises = _promised(plan, repository, pin, sources)
        held = list(_held(repository, pin))
        faults = [
            *_missing(promises, held),
            *_of_another_cuda(plan, held),
            *_beyond_limits(plan, held),
            *_too_large(plan, held),
            *_made_otherwise(held),
            *(_not_what_it_says(repository, held, promises, judge) if judge else ()),
        ]
        if faults:
            shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
            more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise VerificationError(f"{pin.library} {pin.version} is not what its plan promises:{shown}{more}")


def _held(repository: Repository, pin: Pin) -> Iterator[_Held]:
    bundles = repository.release(pin).manifests
    listed = repository.made_of(pin)
    told = {} if listed is None else by_bundle(MATERIALS, listed, pin, bundles, repository.read)
    for descriptor in bundles:
        what = bundle_name(descriptor)
        manifest = repository.bundle(descriptor)
        table = repository.table(manifest, f"kernel table of {what}")
        if table.arch == "any":
            continue
        referrer = told.get(descriptor.sha256)
        materials = None
        if referrer is not None:
            materials = repository.materials(referrer.layers[-1], f"materials of {what}")
        yield _Held(descriptor, manifest, table, materials)


# -- what is there -----------------------------------------------------------------------------------------------------


def _promised(plan: Plan, repository: Repository, pin: Pin, sources: Callable[[], Promises | None] | None) -> Promises:
    """What a release was to hold: as is written beside it, else by the sources that are here."""
    promises = read_promises(repository.path, pin.library, pin.version)
    if promises is None:
        promises = sources() if sources is not None else None
        if promises is None:
            raise VerificationError(
                f"nothing says what {pin.library} {pin.version} was to hold: "
                f"{place_of(pin.library, pin.version)} is not in {str(repository.path)!r}, and the sources of "
                f"{pin.library!r} are not installed here",
                hint="build or merge with --plan, which writes it, or ask where the library is installed",
            )
        log.info("what %s %s was to hold is told by the sources that are installed here", pin.library, pin.version)
    check_same(promises, plan)
    return promises


def _missing(promises: Promises, held: Sequence[_Held]) -> Iterator[str]:
    promised: set[tuple[str, str]] = set()
    for line in promises.builds:
        there = [bundle for bundle in held if bundle.may_be(line.machine, line.cuda)]
        have = {
            (kernel.uri, bundle.table.arch): kernel.op_digest for bundle in there for kernel in bundle.table.kernels
        }
        promised |= {(kernel.uri, kernel.arch) for kernel in line.kernels}
        yield from _lacking(line.archs, line.kernels, have, f" by the build {line.name!r}" * (len(promises.builds) > 1))
    for bundle in held:
        for kernel in bundle.table.kernels:
            if (kernel.uri, bundle.table.arch) not in promised:
                yield f"{kernel.uri} for {bundle.table.arch} is there, and nobody promised it"


def _lacking(
    archs: Sequence[str], kernels: Sequence[Promised], have: Mapping[tuple[str, str], str], by: str
) -> Iterator[str]:
    held = {arch for _, arch in have}
    for arch in archs:
        if arch not in held:
            yield f"nothing is there for {arch}{by}"
    for kernel in kernels:
        found = have.get((kernel.uri, kernel.arch))
        if found is None and kernel.arch in held:
            yield f"{kernel.uri} is missing for {kernel.arch}{by}"
        elif found not in (None, kernel.op_digest):
            yield f"{kernel.uri} for {kernel.arch} was built from other sources than were promised{by}"


# -- what it needs, what it weighs, how it was made --------------------------------------------------------------------


def _of_another_cuda(plan: Plan, held: Sequence[_Held]) -> Iterator[str]:
    """Kernels that need another CUDA runtime than they were built with: each needs that of its own major version."""
    for bundle in held:
        builds = [build for build in plan.builds if bundle.arch in build.parsed]
        made = [bundle.cuda] if bundle.cuda else [build.cuda for build in builds if build.cuda]
        majors = {version.partition(".")[0] for version in made}
        for kernel in bundle.table.kernels:
            need = kernel.needs.get("cudart")
            if need is not None and majors and need not in majors:
                what = f"{kernel.uri} for {bundle.table.arch}"
                yield f"{what} needs the runtime of CUDA {need}, and was built with {' or '.join(sorted(set(made)))}"


def _beyond_limits(plan: Plan, held: Sequence[_Held]) -> Iterator[str]:
    limits = {name: str(plan.limits[name]) for name in VERSIONS if name in plan.limits}
    for bundle in held:
        for kernel in sorted(bundle.table.kernels, key=lambda kernel: kernel.uri):
            for name, limit in limits.items():
                need = kernel.needs.get(name)
                if need is not None and version_of(need, f"{name} of {kernel.uri}") > version_of(limit, name):
                    yield f"{kernel.uri} for {bundle.table.arch} needs {name} {need}; the plan's limit is {limit}"


def _too_large(plan: Plan, held: Sequence[_Held]) -> Iterator[str]:
    release, pack = (int(plan.limits.get(name, 0)) for name in SIZES)
    blobs = {
        blob.digest: (blob.size, number, bundle)
        for bundle in held
        for number, blob in enumerate((*bundle.manifest.layers, bundle.manifest.config))
    }
    total = sum(size for size, _, _ in blobs.values())
    over = [each for each in blobs.values() if pack and each[0] > pack]
    for size, number, bundle in sorted(over, key=lambda each: -each[0]):
        what = f"pack {number} of {bundle_name(bundle.descriptor)}"
        yield f"{what} has {size:,} bytes; the plan's limit is {pack:,}"
    if release and total > release:
        yield f"the release has {total:,} bytes; the plan's limit is {release:,}"
    if over or (release and total > release):
        yield from (f"  {size:>15,} bytes: {op}" for op, size in largest_ops(held))


def largest_ops(held: Sequence[_Held], count: int = _LARGEST) -> list[tuple[str, int]]:
    """The ops that take most of the published bytes: each kernel has its share of its block."""
    sizes: dict[str, float] = defaultdict(float)
    for bundle in held:
        blocks = bundle.table.blocks
        for kernel in bundle.table.kernels:
            block = blocks[kernel.block]
            sizes[kernel.uri.partition("?")[0]] += block.length * kernel.size / max(block.size, 1)
    return [(op, round(size)) for op, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0]))[:count]]


def _made_otherwise(held: Sequence[_Held]) -> Iterator[str]:
    """What was compiled for debugging, with flags of the builder's own, or for the CPU that happened to compile it."""
    for bundle in held:
        facts = bundle.materials.toolchain if bundle.materials else bundle.table.toolchain
        for name, value in facts.items():
            if name.endswith("overrides"):
                yield f"{bundle_name(bundle.descriptor)} was built with further flags: {value[:200]!r}"
            elif _NATIVE.search(value):
                yield f"{bundle_name(bundle.descriptor)} was built for the CPU of its builder: {value[:200]!r}"
        for op in bundle.materials.ops if bundle.materials else ():
            if native := [flag for flag in op.flags if _NATIVE.match(flag)]:
                yield f"{op.op} for {bundle.table.arch} was built for the CPU of its builder: {native[0]!r}"


# -- the kernels themselves --------------------------------------------------------------------------------------------


def _not_what_it_says(repository: Repository, held: Sequence[_Held], promises: Promises, judge: Judge) -> Iterator[str]:
    libraries = {(kernel.uri, kernel.arch): kernel.libraries for line in promises.builds for kernel in line.kernels}
    for bundle in held:
        for kernel, content in contents(repository, bundle.manifest, bundle.table):
            if sha256(content) != kernel.sha256:
                yield f"{kernel.uri} for {bundle.table.arch} is damaged: its sha256 is {sha256(content)}"
                continue
            linked = libraries.get((kernel.uri, bundle.table.arch), ())
            yield from (
                f"{kernel.uri} for {bundle.table.arch} {fault}" for fault in judge(content, kernel, bundle.arch, linked)
            )


def contents(repository: Repository, bundle: BundleManifest, table: Table) -> Iterator[tuple[KernelEntry, bytes]]:
    """Every kernel of a bundle with its bytes, a block at a time."""
    inside: dict[int, list[KernelEntry]] = defaultdict(list)
    for kernel in table.kernels:
        inside[kernel.block].append(kernel)
    for number in sorted(inside):
        block = table.blocks[number]
        what = f"block {number} of {table.family} for {table.arch}"
        frame = repository.part(bundle.layers[block.pack].sha256, block.offset, block.length, what)
        raw = decompress(frame, block.size, what=what)
        for kernel in inside[number]:
            yield kernel, raw[kernel.offset : kernel.offset + kernel.size]
