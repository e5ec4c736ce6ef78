"""One part of a release that several machines build: what it is, what others made of it, and how it is handed in."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kartifacts.cli.flows import packing, planned, producing
from kartifacts.cli.flows.shared import Report
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.model.spec import Spec
from kartifacts.publish.buckets import Bucket, open_bucket
from kartifacts.publish.plan import MAX_SHARDS
from kartifacts.publish.shards import Compiler, Made, Shard, bring, find, hand_in, offer, place_of

if TYPE_CHECKING:
    from kartifacts.build.kept import BuiltKernel
    from kartifacts.build.toolchains import Toolchain
    from kartifacts.model.materials import Recipe

log = logging.getLogger(__name__)

_UPLOADS = 2  # kernels handed in at once, beside the compilers


# -- a part ------------------------------------------------------------------------------------------------------------


def build_shard(
    settings: Settings, *, plan: Path, name: str, shard: str, out: str, recipe: Path | None = None
) -> Report:
    """Build one part of a build of a plan, and hand it in at `out`, a directory or a bucket.

    What is there already, or was built in this workspace before, is not built again.
    """
    from kartifacts.build.partition import partition

    start = time.monotonic()
    number, of = _numbers(shard)
    planned.check_settings(settings)
    work = planned.work_of(plan)
    build = work.plan.find(name)
    planned.check_machine(build)
    if of != build.shards:
        log.warning(
            "the plan divides build %r into %d shards, and this is one of %d: a merge takes all of one division",
            build.name,
            build.shards,
            of,
        )
    specs = work.specs[build.name]
    cost, costs = planned.costs_of(work.plan, plan)
    mine = partition(specs, cost, of)[number - 1]
    toolchains = producing.toolchains_of(specs, settings)
    recipe = recipe or planned.recipe_file(work.plan, plan, build)
    environment = producing.checked_environment(toolchains, specs, recipe, build)
    empty = _document(work, build.name, (number, of), costs, toolchains, environment, settings)
    bucket = open_at(out, settings)
    bucket.preflight()
    keys = {spec.key(toolchains[spec.device.toolchain].made_with(spec)): spec for spec in mine}
    with closing(_Handing(bucket, empty, keys)) as handing:
        taken = _taken(keys, toolchains, settings, handing)
        missing = [spec for key, spec in keys.items() if key not in taken]
        built = producing.run_compilers(missing, settings, on_kernel=handing.offer) if missing else None
        kernels = {kernel.key: kernel for kernel in (*taken.values(), *(built.kernels if built else ()))}
        made = [handing.offer(kernels[key]) for key in keys]
        kernels_made = [future.result() for future in made]
    parts = packing.parts_of([(spec, kernels[key]) for key, spec in keys.items()], toolchains, settings, environment)
    document = msgspec.structs.replace(
        empty,
        kernels=sorted(kernels_made, key=lambda made: (made.uri, made.arch)),
        materials=[part.materials for part in parts],
    )
    hand_in(bucket, document, work.promises)
    report = built.report if built else {"kernels_reused": 0}
    return {
        **report,
        "library": work.plan.library,
        "build": build.name,
        "shard": f"{number}/{of}",
        "bucket": bucket.name,
        "document": place_of(document).path,
        "kernels": [{"uri": made.uri, "arch": made.arch, "bytes": made.size} for made in document.kernels],
        "of_all": len(specs),
        "taken": len(taken),
        "kept": report["kernels_reused"],
        "built": len(missing) - report["kernels_reused"],
        "skipped": [str(refusal) for refusal in work.skipped[build.name]],
        "seconds": round(time.monotonic() - start, 3),
    }


def _document(
    work: planned.Work,
    build: str,
    numbers: tuple[int, int],
    costs: Digest,
    toolchains: Mapping[str, Toolchain],
    recipe: Recipe | None,
    settings: Settings,
) -> Shard:
    """What a shard will say of itself, without its kernels."""
    number, of = numbers
    return Shard(
        version=1,
        library=work.plan.library,
        promises=work.promises.digest,
        plan=work.plan.digest,
        costs=costs,
        build=build,
        number=number,
        of=of,
        machine=os.uname().machine,
        toolchains={
            kind: Compiler(facts=dict(toolchain.fingerprint), programs=dict(toolchain.programs(settings)))
            for kind, toolchain in toolchains.items()
        },
        recipe=recipe,
        overrides=planned.calling(settings),
        kernels=[],
        materials=[],
    )


def _numbers(shard: str) -> tuple[int, int]:
    matched = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", shard)
    number, of = (int(matched[1]), int(matched[2])) if matched else (0, 0)
    if not 1 <= number <= of <= MAX_SHARDS:
        raise ConfigError(f"--shard {shard[:40]!r}: expected a number of a shard and how many there are, e.g. 2/4")
    return number, of


def open_at(place: str, settings: Settings) -> Bucket:
    """A bucket, or a directory that need not be there yet.

    Each builder writes names of its own, so that no store has to decide between two of them.
    """
    text = place if re.match(r"(dir:|[a-z0-9+]+://)", place) else f"dir:{place}"
    return open_bucket(text, settings, single_writer=True)


class _Handing:
    """Hands kernels in while others are still compiled; the first that cannot be handed in ends the build."""

    def __init__(self, bucket: Bucket, shard: Shard, keys: Mapping[Digest, Spec]) -> None:
        self.bucket = bucket
        self.makers = {kind: shard.maker(kind) for kind in shard.toolchains}
        self._kinds = {key: spec.device.toolchain for key, spec in keys.items()}
        self._pool = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="handing")
        self._offered: dict[Digest, Future[Made]] = {}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def known(self, made: Made) -> None:
        """Take note of a kernel that is there."""
        there: Future[Made] = Future()
        there.set_result(made)
        self._offered[Digest(made.key)] = there

    def offer(self, kernel: BuiltKernel, seconds: float = 0.0, memory: int = 0) -> Future[Made]:
        for other in self._offered.values():
            if other.done():
                other.result()
        if kernel.key not in self._offered:
            made = Made(
                uri=kernel.uri,
                arch=str(kernel.arch),
                key=kernel.key,
                op_digest=kernel.op_digest,
                sha256=kernel.sha256,
                size=kernel.size,
                suffix=kernel.suffix,
                exports=list(kernel.exports),
                needs=dict(kernel.needs),
                toolchain=self._kinds[kernel.key],
                maker=self.makers[self._kinds[kernel.key]],
                seconds=round(seconds, 3),
                memory=memory,
            )
            self._offered[kernel.key] = self._pool.submit(offer, self.bucket, made, kernel.path)
        return self._offered[kernel.key]


def _taken(
    keys: Mapping[Digest, Spec],
    toolchains: Mapping[str, Toolchain],
    settings: Settings,
    handing: _Handing,
) -> dict[Digest, BuiltKernel]:
    """What other builders handed in, or this one before it was stopped, once it was checked like what is built here."""
    from kartifacts.build import workspace

    workspace.usable(settings.workspace)
    with workspace.staging(settings.workspace) as staging, ThreadPoolExecutor(settings.download_threads) as pool:

        def take(key: Digest, spec: Spec) -> BuiltKernel | None:
            try:
                made = find(handing.bucket, key)
                if made is None:
                    return None
                if made.maker != handing.makers[spec.device.toolchain]:
                    log.info("%s for %s is built again: it was made in another environment", spec.uri, spec.arch)
                    return None
                kernel = _checked(made, spec, toolchains[spec.device.toolchain], handing.bucket, staging, settings)
            except (VerificationError, BuildError) as error:
                log.warning("%s for %s is built again: %s", spec.uri, spec.arch, error.message)
                return None
            handing.known(made)
            return kernel

        found = zip(keys, pool.map(take, keys, keys.values()), strict=True)
        return {key: kernel for key, kernel in found if kernel is not None}


def _checked(
    made: Made, spec: Spec, toolchain: Toolchain, bucket: Bucket, staging: Path, settings: Settings
) -> BuiltKernel:
    from kartifacts.build.checks import check, promise_of
    from kartifacts.build.kept import BuiltKernel

    what = f"{spec.uri} for {spec.arch} in {bucket.name}"
    if (made.uri, made.arch, made.op_digest) != (spec.uri, str(spec.arch), spec.op_digest):
        raise VerificationError(f"{what} says that it is {made.uri} for {made.arch}")
    path = staging / f"{made.key}{made.suffix}"  # as several kernels may have the same bytes
    bring(bucket, made, path)
    facts = check(path, promise_of(spec, settings, made.suffix), what=what)
    if facts.needs != made.needs or made.exports != list(spec.op.exports):
        raise VerificationError(f"{what} exports or needs other things than its record says")
    return BuiltKernel(
        uri=spec.uri,
        arch=spec.arch,
        path=path,
        key=Digest(made.key),
        op_digest=spec.op_digest,
        sha256=Digest(made.sha256),
        size=made.size,
        exports=tuple(made.exports),
        needs=made.needs,
        toolchain=toolchain.made_with(spec),
        suffix=made.suffix,
    )
