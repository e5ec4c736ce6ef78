"""From specs to shared objects: plan what is missing, compile, link, check, keep.

Objects lie under ``objects/`` by what they were made of and what they are, finished kernels under ``kernels/`` by their
key; whatever is there and undamaged is not made again, and no time of a file is ever looked at.  The AOT build and the
JIT both come here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kartifacts.build import jobs as parallel
from kartifacts.build import kept, workspace
from kartifacts.build.costs import FILE, Costs
from kartifacts.build.failures import of_made
from kartifacts.build.jobs import Jobs
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.outside import Seen
from kartifacts.build.planner import LINK_MEMORY, Plan
from kartifacts.build.room import Room
from kartifacts.build.run import Limits, run
from kartifacts.build.steps import Ran, Step
from kartifacts.build.toolchains import find
from kartifacts.config import Settings
from kartifacts.errors import BuildError, StoreError
from kartifacts.model.digest import Digest
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a build is.

    Args:
        done, total: steps.
        title, op, arch: of the step that has run longest, which is what one waits for.
        elapsed: seconds since the first step began.
        left: seconds that the rest will take, as earlier builds did.
        memory: bytes that the hungriest process took so far.
        jobs: how many run at once.
    """

    done: int
    total: int
    title: str
    op: str
    arch: str
    elapsed: float
    left: float
    memory: int
    jobs: Jobs


Told = Callable[[Progress], None]
"""Called when a step begins or has ended, and every second meanwhile."""

OnKernel = Callable[[BuiltKernel, float, int], object]
"""Told of a kernel, the CPU seconds that its own steps took, and the bytes of the hungriest of them."""


@dataclass(frozen=True)
class Build:
    """What `compile_specs` made: one kernel per spec, in their order, and figures about the run."""

    kernels: tuple[BuiltKernel, ...]
    report: dict[str, Any]


def compile_specs(
    specs: Sequence[Spec],
    settings: Settings,
    *,
    progress: Told | None = None,
    on_kernel: OnKernel | None = None,
) -> Build:
    """Build every spec that is not built yet, in the workspace of `settings`.

    Args:
        on_kernel: told of each kernel as soon as it is made, while others are not yet; what it raises ends the build.

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
    made = {key: kernel for key, kernel in _kept(settings.workspace, wanted) if kernel is not None}
    missing = {key: spec for key, spec in wanted.items() if key not in made}
    report: dict[str, Any] = {"kernels": len(wanted), "kernels_reused": len(made)}
    if missing:
        with workspace.staging(settings.workspace) as place, workspace.plainly(place) as staging:
            run = _Run(settings, staging, progress, on_kernel)
            for key, spec in missing.items():
                run.plan.add(key, spec, toolchains[spec.device.toolchain])
            run.all()
            made |= run.plan.made
            report |= run.figures()
    kernels = [made[key] for key in keys if key in made]
    check_complete(specs, kernels)
    return Build(tuple(kernels), {**_NOTHING_DONE, **report, **_totals(kernels, started)})


def _kept(place: Path, wanted: Mapping[Digest, Spec]) -> Iterator[tuple[Digest, BuiltKernel | None]]:
    looked: dict[Seen, bool] = {}
    for key, spec in wanted.items():
        yield key, kept.find(place, spec, key, looked=looked)


def check_complete(plan: Sequence[Spec], built: Iterable[BuiltKernel]) -> None:
    """Raise `BuildError` naming every (op × axes × arch) of `plan` that is not among `built`."""
    there = {(kernel.uri, kernel.arch, kernel.op_digest) for kernel in built}
    lacking = [f"{spec.uri} for {spec.arch}" for spec in plan if (spec.uri, spec.arch, spec.op_digest) not in there]
    if lacking:
        shown = "; ".join(lacking[:20]) + (f" and {len(lacking) - 20} more" if len(lacking) > 20 else "")
        raise BuildError(f"{len(lacking)} of {len(plan)} promised kernels were not built: {shown}")


class _Run:
    """A plan that is run: what is done is kept at once, so that a build that is killed goes on where it was."""

    def __init__(self, settings: Settings, staging: Path, progress: Told | None, on_kernel: OnKernel | None) -> None:
        self.settings = settings
        self.progress = progress
        self.on_kernel = on_kernel
        self.table = settings.workspace / FILE
        self.costs = Costs.read(self.table)
        self.plan = Plan(settings, self.costs, staging)
        self.ran: list[Ran] = []
        self.taken = self.expected = 0.0  # seconds of all that ran
        self.memory = 0  # bytes that the hungriest process took so far
        self.own: dict[tuple[str, str], tuple[float, int]] = {}  # op and arch → CPU seconds and bytes of its steps
        self.began = time.monotonic()
        self.jobs = Jobs(1, "nothing to do")
        self.left = 0.0  # seconds that all steps not done yet are expected to take, one after the other

    def all(self) -> None:
        limits = self._limits()
        log.info("%d steps, jobs=%d (%s)", len(self.plan.steps), limits.jobs.n, limits.jobs.reason)
        self.left = sum(step.cost for step in self.plan.steps)
        self.jobs = limits.jobs
        try:
            self.jobs = run(self.plan.steps, limits, self.settings, staging=self.plan.staging, listener=self)
        finally:
            self._keep_costs()

    def _limits(self) -> Limits:
        here = parallel.machine()
        demands = [step.memory for step in self.plan.steps if step.known_as] or [LINK_MEMORY]
        stated, setting = self.settings.max_jobs, self.settings.jobs
        jobs = parallel.jobs(here, per_job=min(demands), max_jobs=stated, setting=setting)
        limited = not stated and setting is None
        staging = self.plan.staging.resolve()
        return Limits(jobs, Room(self.settings.workspace, staging, parallel.memory_now, limited=limited))

    def _keep_costs(self) -> None:
        try:
            if self.costs.learned:
                self.costs.write(self.table)
        except StoreError as error:
            log.debug("what this build has cost is not kept: %s", error)

    # -- as a listener -------------------------------------------------------------------------------------------------

    def running(self, steps: Sequence[tuple[Step, float]]) -> None:
        if self.progress is None:
            return
        step, _ = steps[0]
        pace = self.taken / self.expected if self.expected else 1.0
        begun = sum(min(step.cost, seconds / pace) for step, seconds in steps)
        self.progress(
            Progress(
                done=len(self.ran),
                total=len(self.plan.steps),
                title=step.title,
                op=step.op,
                arch=step.arch,
                elapsed=time.monotonic() - self.began,
                left=max(0.0, self.left - begun) * pace / self.jobs.n,
                memory=self.memory,
                jobs=self.jobs,
            )
        )

    def done(self, ran: Ran) -> None:
        with workspace.storage_errors(self.settings.workspace):
            try:
                self.plan.keep(ran)
            except BuildError as error:
                raise of_made(error, ran, self.settings.workspace / "logs") from error.__cause__
        self.ran.append(ran)
        self.taken += ran.wall
        self.expected += ran.step.cost
        self.memory = max(self.memory, ran.memory)
        self.left -= ran.step.cost
        cpu, memory = self.own.get((ran.step.op, ran.step.arch), (0.0, 0))
        self.own[ran.step.op, ran.step.arch] = (cpu + ran.cpu, max(memory, ran.memory))
        if ran.step.known_as:
            self.costs.learn(ran.step.known_as, ran.cpu, ran.memory)
        kernel = self.plan.made.get(Digest(ran.step.name))
        if kernel is not None and self.on_kernel is not None:
            self.on_kernel(kernel, *self.own[ran.step.op, ran.step.arch])
        self.running([(ran.step, ran.wall)])

    def killed(self, step: Step) -> None:
        if step.known_as:
            self.costs.expect(step.known_as, step.memory)

    # -- what is told at the end ---------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        names = {ran.step.name for ran in self.ran}
        taken = time.monotonic() - self.began
        return {
            "compiled": len(names & self.plan.compiled),
            "linked": len(names & self.plan.linked),
            "objects_reused": len(self.plan.objects_reused),
            "jobs": self.jobs.n,
            "jobs_reason": self.jobs.reason,
            "cpu_seconds": round(sum(ran.cpu for ran in self.ran), 3),
            "efficiency": round(self.taken / (self.jobs.n * taken), 3),
            "peak_memory": self.memory,
            "steps": [
                {
                    "title": ran.step.title,
                    "op": ran.step.op,
                    "arch": ran.step.arch,
                    "cpu_seconds": round(ran.cpu, 4),
                    "seconds": round(ran.wall, 4),
                    "memory": ran.memory,
                }
                for ran in self.ran
            ],
        }


_NOTHING_DONE: dict[str, Any] = {
    "compiled": 0,
    "linked": 0,
    "objects_reused": 0,
    "jobs": 0,
    "jobs_reason": "nothing to do",
    "cpu_seconds": 0.0,
    "efficiency": 1.0,
    "peak_memory": 0,
    "steps": [],
}


def _totals(kernels: Sequence[BuiltKernel], started: float) -> dict[str, Any]:
    coverage: dict[str, list[str]] = {}
    for kernel in kernels:
        coverage.setdefault(kernel.uri, []).append(str(kernel.arch))
    return {
        "coverage": {uri: sorted(set(archs)) for uri, archs in sorted(coverage.items())},
        "bytes": sum({kernel.key: kernel.size for kernel in kernels}.values()),
        "seconds": round(time.monotonic() - started, 3),
    }
