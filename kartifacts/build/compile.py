"""From specs to shared objects: plan what is missing, compile, link, check, keep.

Objects lie under ``objects/`` by what they were made of and what they are, finished kernels under ``kernels/`` by their
key; whatever is there and undamaged is not made again, and no time of a file is ever looked at.  The AOT build and the
JIT both come here.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kartifacts.build import jobs as parallel
from kartifacts.build import kept, workspace
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.planner import Plan
from kartifacts.build.run import Limits, run
from kartifacts.build.steps import Ran
from kartifacts.build.toolchains import find
from kartifacts.config import Settings
from kartifacts.errors import BuildError
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, of all steps, and the title of the last one."""


@dataclass(frozen=True)
class Build:
    """What `compile_specs` made: one kernel per spec, in their order, and figures about the run."""

    kernels: tuple[BuiltKernel, ...]
    report: dict[str, Any]


def compile_specs(specs: Sequence[Spec], settings: Settings, *, progress: Progress | None = None) -> Build:
    """Build every spec that is not built yet, in the workspace of `settings`.

    Raises:
        ConfigError: an arch cannot be built by the compiler found; nothing was compiled.
        NoCompiler: there is no compiler for one of them; nothing was compiled.
        BuildError: a compiler failed, or what it made is not what its spec promises.
        StoreError: the workspace cannot be written.
    """
    started = time.monotonic()
    settings = workspace.apart(settings)
    toolchains = {kind: find(kind, settings) for kind in sorted({spec.device.toolchain for spec in specs})}
    for spec in specs:
        toolchains[spec.device.toolchain].check(spec)
    workspace.usable(settings.workspace)
    keys = [spec.key(toolchains[spec.device.toolchain].made_with(spec)) for spec in specs]
    wanted = dict(zip(keys, specs, strict=True))
    made = {key: kernel for key, spec in wanted.items() if (kernel := kept.find(settings.workspace, spec, key))}
    missing = {key: spec for key, spec in wanted.items() if key not in made}
    report: dict[str, Any] = {"kernels": len(wanted), "kernels_reused": len(made)}
    if missing:
        with workspace.staging(settings.workspace) as staging:
            plan = Plan(settings.workspace, settings.generated, staging)
            for key, spec in missing.items():
                plan.add(key, spec, toolchains[spec.device.toolchain])
            report |= _run(plan, settings, progress)
            made |= plan.made
    kernels = [made[key] for key in keys if key in made]
    check_complete(specs, kernels)
    return Build(tuple(kernels), {**_NOTHING_DONE, **report, **_totals(kernels, started)})


def check_complete(plan: Sequence[Spec], built: Iterable[BuiltKernel]) -> None:
    """Raise `BuildError` naming every (op × axes × arch) of `plan` that is not among `built`."""
    there = {(kernel.uri, kernel.arch, kernel.op_digest) for kernel in built}
    lacking = [f"{spec.uri} for {spec.arch}" for spec in plan if (spec.uri, spec.arch, spec.op_digest) not in there]
    if lacking:
        shown = "; ".join(lacking[:20]) + (f" and {len(lacking) - 20} more" if len(lacking) > 20 else "")
        raise BuildError(f"{len(lacking)} of {len(plan)} promised kernels were not built: {shown}")


def _run(plan: Plan, settings: Settings, progress: Progress | None) -> dict[str, Any]:
    """Run the steps of a plan; what is done is kept at once, so that a build that is killed goes on where it was."""
    jobs = parallel.jobs(
        parallel.machine(),
        per_job=max((step.memory for step in plan.steps), default=1) or 1,
        max_jobs=settings.max_jobs,
        setting=settings.jobs,
    )
    log.info("%d steps, jobs=%d (%s)", len(plan.steps), jobs.n, jobs.reason)
    done: set[str] = set()

    def keep(ran: Ran) -> None:
        with workspace.storage_errors(settings.workspace):
            plan.keep(ran)
        done.add(ran.step.name)
        if progress is not None:
            progress(len(done), len(plan.steps), ran.step.title)

    jobs = run(plan.steps, Limits(jobs), settings, staging=plan.staging, on_done=keep)
    return {
        "compiled": len(done & plan.compiled),
        "linked": len(done & plan.linked),
        "objects_reused": len(plan.objects_reused),
        "jobs": jobs.n,
        "jobs_reason": jobs.reason,
    }


_NOTHING_DONE = {"compiled": 0, "linked": 0, "objects_reused": 0, "jobs": 0, "jobs_reason": "nothing to do"}


def _totals(kernels: Sequence[BuiltKernel], started: float) -> dict[str, Any]:
    coverage: dict[str, list[str]] = {}
    for kernel in kernels:
        coverage.setdefault(kernel.uri, []).append(str(kernel.arch))
    return {
        "coverage": {uri: sorted(set(archs)) for uri, archs in sorted(coverage.items())},
        "bytes": sum({kernel.key: kernel.size for kernel in kernels}.values()),
        "seconds": round(time.monotonic() - started, 3),
        "peak_memory": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10,  # of the largest compiler ever
    }
