"""Decides whether shards make up what was promised: no gap, no overlap, and all of one build made alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.materials import cuda_of
from kartifacts.publish.buckets import Bucket, Unlisted
from kartifacts.publish.plan import Build, Plan
from kartifacts.publish.promises import Line, Promises, check_same
from kartifacts.publish.shards import Made, Place, Shard, places, read_all_promises, read_shard

_SHOWN = 20
_ALIKE = ("plan", "costs", "machine", "recipe")  # in all shards of a build
_HARMLESS = ("cxx_launcher", "cuda_launcher")  # overrides that change no byte


class Gathered(NamedTuple):
    """What all builders made."""

    promises: Promises
    shards: Sequence[Shard]


def gather(bucket: Bucket, plan: Plan, promises: Promises | None = None, builds: Sequence[str] = ()) -> Gathered:
    """The shards in a bucket that make up what a plan promises, or these builds of it.

    Args:
        promises: of the sources that are installed here; None: those that the shards of this plan name.

    Raises:
        VerificationError: names every shard and kernel that is missing, stands twice or was made otherwise.
        ConfigError: without sources it cannot be told which of several runs is meant.
    """
    there = _listed(bucket)
    wanted = promises.digest if promises is not None else _only_run(bucket, plan, there)
    shards: list[Shard] = []
    faults: list[str] = []
    part = plan.only(builds)
    chosen = part.builds
    for build in chosen:
        found, wrong = _shards_of(bucket, build, wanted, there)
        shards += found
        faults += wrong
    if not faults and promises is None:
        promises = read_all_promises(bucket, wanted)
        check_same(promises, plan)
    for build in chosen:
        mine = [shard for shard in shards if shard.build == build.name]
        faults += _differences(mine)
        if promises is not None and not faults:
            faults += _kernel_faults(promises.find(build.name), mine)
    if faults:
        shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise VerificationError(f"the shards in {bucket.name} do not make up the release:{shown}{more}")
    assert promises is not None
    told = promises.only([build.name for build in chosen])
    return Gathered(msgspec.structs.replace(told, plan=part.digest), shards)


def _listed(bucket: Bucket) -> list[Place] | None:
    """None where the bucket cannot say what it holds; then the plan's own numbers of shards are looked for."""
    try:
        return places(bucket)
    except Unlisted:
        return None


def _only_run(bucket: Bucket, plan: Plan, there: list[Place] | None) -> str:
    """The promises of the one set of shards in a bucket that was made by this plan."""
    if there is None:
        raise ConfigError(
            f"{bucket.name} cannot say what it holds, and the sources of {plan.library!r} are not installed here",
            hint="install them, or merge from a bucket that can be listed",
        )
    first = {place.promises: place for place in reversed(there)}
    runs = {name: shard for name, place in sorted(first.items()) if (shard := read_shard(bucket, place)) is not None}
    mine = [name for name, shard in runs.items() if shard.plan == plan.digest and shard.library == plan.library]
    if len(mine) == 1:
        return mine[0]
    if mine:
        raise ConfigError(
            f"{bucket.name} holds shards of {len(mine)} states of the sources that were made by this plan: "
            f"{', '.join(name[:12] for name in mine)}",
            hint="merge where the sources are installed, which tell them apart, or from a bucket of one run",
        )
    raise VerificationError(
        f"{bucket.name} holds no shards that were made by this plan"
        + (
            f"; those there were made by other plans: {', '.join(shard.plan[:12] for shard in runs.values())}"
            * bool(runs)
        ),
        expected=f"plan {plan.digest}",
    )


# -- shards ------------------------------------------------------------------------------------------------------------


def _shards_of(bucket: Bucket, build: Build, promises: str, there: list[Place] | None) -> tuple[list[Shard], list[str]]:
    mine = [place for place in there or () if (place.promises, place.build) == (promises, build.name)]
    totals = sorted({place.of for place in mine}) or [build.shards]
    if len(totals) > 1:
        mixed = ", ".join(f"{place.number}/{place.of}" for place in mine)
        return [], [
            f"the shards of build {build.name!r} are parts of different divisions: {mixed}; remove those not meant"
        ]
    found, faults = [], []
    for number in range(1, totals[0] + 1):
        shard = read_shard(bucket, Place(promises, build.name, number, totals[0]))
        if shard is not None:
            found.append(shard)
        else:
            faults.append(_gap(bucket, build, number, totals[0], there or []))
    return found, faults


def _gap(bucket: Bucket, build: Build, number: int, of: int, there: Sequence[Place]) -> str:
    """That a shard is missing; and if there is one of another plan or other sources, what is other."""
    said = f"shard {number}/{of} of build {build.name!r} is missing"
    others = [place for place in there if (place.build, place.number, place.of) == (build.name, number, of)]
    if not others:
        command = f"kartifacts build --build {build.name} --shard {number}/{of} --out {bucket.name}"
        return f"{said}: run `{command}` with this --plan"
    shard = read_shard(bucket, others[-1])
    made = shard.promises[:12] if shard is not None else ""
    return f"{said}; the one that is there was made of other sources or by another plan (promises {made})"


def _differences(shards: Sequence[Shard]) -> Iterator[str]:
    """In what shards of one build were not made alike."""
    for shard in shards:
        if changed := sorted(set(shard.overrides) - set(_HARMLESS)):
            yield f"{shard.name} was made with other settings than a release: {', '.join(changed)}"
    for shard in shards[1:]:
        first = shards[0]
        for name in _ALIKE:
            ours, theirs = (getattr(each, name) for each in (shard, first))
            if ours != theirs:
                yield f"{shard.name} has another {name} than {first.name}: {_short(ours)}, {_short(theirs)}"
        for kind in sorted({*shard.toolchains, *first.toolchains}):
            if kind not in shard.toolchains or kind not in first.toolchains:
                yield f"{shard.name} and {first.name} were not both made with {kind}"
                continue
            for part in ("facts", "programs"):
                mine, other = (getattr(each.toolchains[kind], part) for each in (shard, first))
                yield from _other_compiler(shard, first, kind, mine, other)


def _other_compiler(
    shard: Shard, first: Shard, kind: str, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterator[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield (
                f"{shard.name} was made with another {kind} than {first.name}: "
                f"{name} is {_short(ours.get(name, 'none'))}, {_short(theirs.get(name, 'none'))}"
            )


def _short(value: object) -> str:
    text = getattr(value, "name", None) or str(value)
    return repr(text[:12] if len(text) == 64 else text[:100])


# -- kernels -----------------------------------------------------------------------------------------------------------


def _kernel_faults(line: Line, shards: Sequence[Shard]) -> Iterator[str]:
    made: dict[tuple[str, str], tuple[Made, Shard]] = {}
    for shard in shards:
        yield from _undescribed(shard)
        yield from _of_another_cuda(line, shard)
        for kernel in shard.kernels:
            _, other = made.setdefault((kernel.uri, kernel.arch), (kernel, shard))
            if other is not shard:
                yield f"{kernel.uri} for {kernel.arch} is in {other.name} and in {shard.name}"
            if kernel.maker != shard.maker(kernel.toolchain):
                yield f"{kernel.uri} for {kernel.arch} in {shard.name} was not made with the compilers that it names"
    promised = {(kernel.uri, kernel.arch): kernel.op_digest for kernel in line.kernels}
    for (uri, arch), digest in promised.items():
        if (uri, arch) not in made:
            yield f"{uri} for {arch} is missing: it is in no shard of build {line.name!r}"
        elif (there := made[uri, arch])[0].op_digest != digest:
            yield f"{uri} for {arch} in {there[1].name} was made of other sources than were promised"
    for (uri, arch), (_, shard) in made.items():
        if (uri, arch) not in promised:
            yield f"{uri} for {arch} in {shard.name} was not promised"


def _of_another_cuda(line: Line, shard: Shard) -> Iterator[str]:
    """Code that drivers of the build's CUDA may not run."""
    for materials in shard.materials:
        made = cuda_of(materials.toolchain) if parse_arch(materials.arch).kind == "cuda" else ""
        if line.cuda and made and made != line.cuda:
            what = f"what {shard.name} made of {materials.family} for {materials.arch}"
            yield f"{what} is of CUDA {made}; the build is for CUDA {line.cuda}"


def _undescribed(shard: Shard) -> Iterator[str]:
    """Kernels of which a shard does not say, once, what they were made of."""
    said = [
        (made.uri, materials.arch, made.key)
        for materials in shard.materials
        for op in materials.ops
        for made in op.kernels
    ]
    made = [(kernel.uri, kernel.arch, kernel.key) for kernel in shard.kernels]
    if sorted(said) != sorted(made):
        wrong = sorted({*said} ^ {*made}) or sorted(said)
        yield f"{shard.name} does not say what {wrong[0][0]} for {wrong[0][1]} was made of"
