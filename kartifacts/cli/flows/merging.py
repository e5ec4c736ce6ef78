"""One release of the parts that several machines built, in a repository directory, as if one had built it all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kartifacts.cli.flows import packing, planned, sharding
from kartifacts.cli.flows.shared import Report, bar
from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import canonical_json
from kartifacts.model.layout import check_name
from kartifacts.model.materials import Materials, joined
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.merging import gather
from kartifacts.publish.shards import Shard, bring


def merge(
    settings: Settings,
    *,
    plan: Path,
    builds: Sequence[str],
    source: str,
    out: Path,
    version: str,
    lock: Path | None = None,
    since: Path | None = None,
) -> Report:
    """Make a release of the parts that were handed in at `source`, as if it had been built here at once."""
    start = time.monotonic()
    asked, promises = planned.promised(plan)
    chosen = asked.only(builds)
    of = packing.Release(out, chosen.library, version and check_name(version, "version"), lock, since, chosen)
    of.check()
    bucket = sharding.open_at(source, settings)
    if isinstance(bucket, DirectoryBucket) and not bucket.root.is_dir():
        raise ConfigError(f"--from {source!r}: there is no such directory", hint="name where the shards were handed in")
    gathered = gather(bucket, asked, promises, builds)
    of = replace(of, version=version or gathered.promises.library_version, promises=gathered.promises)
    with _brought(bucket, gathered.shards, settings) as paths:
        parts = [
            part
            for build in chosen.builds
            for part in _parts([s for s in gathered.shards if s.build == build.name], paths)
        ]
        report = packing.release(parts, of, settings)
    return {
        **report,
        "shards": [shard.name for shard in gathered.shards],
        "seconds": round(time.monotonic() - start, 3),
    }


@contextmanager
def _brought(bucket: Bucket, shards: Sequence[Shard], settings: Settings) -> Iterator[Mapping[str, Path]]:
    """The bytes of all kernels as files, by their digests."""
    from kartifacts.build import workspace

    wanted = {made.sha256: made for shard in shards for made in shard.kernels}
    total = sum(made.size for made in wanted.values())
    workspace.usable(settings.workspace)
    with (
        workspace.staging(settings.workspace) as staging,
        bar(settings, "bringing kernels", "B") as progress,
        ThreadPoolExecutor(settings.download_threads) as pool,
    ):
        paths = {digest: staging / f"{digest}{made.suffix}" for digest, made in wanted.items()}
        pending = [(made, pool.submit(bring, bucket, made, paths[digest])) for digest, made in wanted.items()]
        done = 0
        try:
            for made, future in pending:
                future.result()
                done += made.size
                progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        yield paths


def _parts(shards: Sequence[Shard], paths: Mapping[str, Path]) -> Iterator[packing.Part]:
    """The bundles of one build: what its shards made of one family for one arch with one compiler belongs together."""

    made = {(kernel.uri, kernel.arch): (kernel, shard.machine) for shard in shards for kernel in shard.kernels}
    groups: dict[tuple[str, str, bytes, str], list[Materials]] = {}
    for shard in shards:
        for materials in shard.materials:
            first, machine = made[materials.ops[0].kernels[0].uri, materials.arch]
            tied = packing.machine_of(parse_arch(materials.arch), first.suffix, machine)
            facts = canonical_json(materials.toolchain)
            groups.setdefault((materials.family, materials.arch, facts, tied), []).append(materials)
    for (_, arch, _, tied), members in groups.items():
        whole = joined(members)
        kernels = [made[described.uri, arch][0] for op in whole.ops for described in op.kernels]
        yield packing.Part(
            whole,
            [packing.packed(kernel, paths[kernel.sha256]) for kernel in kernels],
            tied,
        )
