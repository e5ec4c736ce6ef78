"""From specs to shared objects: plan what is missing, compile, link, check, keep.

Objects lie under ``objects/`` by what they were made of and what they are, finished kernels under ``kernels/`` by their
key; whatever is there and undamaged is not made again, and no time of a file is ever looked at.  The AOT build and the
JIT both come here.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kartifacts.build import closure, elf, kept, ninja, workspace
from kartifacts.build import jobs as parallel
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.ninja import Step
from kartifacts.build.toolchains import Toolchain, Unit, find
from kartifacts.config import Settings
from kartifacts.errors import BuildError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.spec import Source, Spec

log = logging.getLogger(__name__)

MAX_OBJECT = 2 << 30  # bytes

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
            plan = _Plan(toolchains, settings.workspace, staging)
            for key, spec in missing.items():
                plan.add(key, spec)
            run = _Run(plan, settings, progress)
            run.execute()
            made |= run.made
            report |= run.figures
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


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Object:
    """An object to be made: where it is kept, and the files of the library that it may depend on."""

    home: Path
    root: str
    reached: frozenset[str]
    depfile: Path


class _Plan:
    """Every step to run, and what becomes of its output."""

    def __init__(self, toolchains: Mapping[str, Toolchain], place: Path, staging: Path) -> None:
        self.toolchains = toolchains
        self.place = place
        self.staging = staging
        self.steps: list[Step] = []
        self.objects: dict[str, _Object] = {}  # name of the step →
        self.links: dict[str, Spec] = {}  # name of the step, which is the key → what it makes
        self.objects_reused: set[Path] = set()
        self.memory = 0  # that the hungriest step needs
        self._closures: dict[tuple[str, str], tuple[Source, ...]] = {}

    def add(self, key: Digest, spec: Spec) -> None:
        toolchain = self.toolchains[spec.device.toolchain]
        shared = closure.shared_include(Path(spec.root))
        places = ("-isystem", str(shared)) if shared else ()
        units = [replace(unit, places=(*unit.places, *places)) for unit in toolchain.units(spec)]
        objects = [self._object(spec, unit) for unit in units]
        output = self.staging / "kernels" / key / kept.FILE
        command = toolchain.link([str(path) for path in objects], str(output))
        new = tuple(path for path in objects if path not in self.objects_reused)
        self.links[key] = spec
        self.steps.append(Step(key, f"linking {spec.uri} for {spec.arch}", spec.root, command, output, new))

    def _object(self, spec: Spec, unit: Unit) -> Path:
        """Where the object of `unit` lies, or will lie once the step that is added here has run."""
        closure = self._closure(spec, unit.source)
        identity = {
            "source": unit.source,
            "reached": {source.path: source.sha256 for source in closure},
            "flags": unit.flags,
            "compiler": dict(unit.fingerprint),
        }
        name = sha256(canonical_json(identity))
        output = self.staging / "objects" / f"{name}.o"
        if name in self.objects:
            return output
        home = self.place / "objects" / name[:2] / name
        kept_before = _sound_in(home)
        if kept_before is not None:
            self.objects_reused.add(kept_before)
            return kept_before
        depfile = output.with_suffix(".d")
        shared = unit.source in spec.device.host_sources
        title = f"compiling {unit.source}" + ("" if shared else f" of {spec.uri} for {spec.arch}")
        self.objects[name] = _Object(home, spec.root, frozenset(source.path for source in closure), depfile)
        self.steps.append(Step(name, title, spec.root, unit.command(str(output), str(depfile)).line, output))
        self.memory = max(self.memory, unit.memory)
        return output

    def _closure(self, spec: Spec, source: str) -> tuple[Source, ...]:
        found = self._closures.get((spec.root, source))
        if found is None:
            found = self._closures[spec.root, source] = closure.reached(Path(spec.root), [source])
        if not set(found) <= set(spec.sources):
            raise BuildError(f"the sources of {spec.uri} have changed since they were read", hint="run it again")
        return found


def _made(path: Path) -> bool:
    """Whether a step has made something."""
    with suppress(OSError):
        return path.is_file() and path.stat().st_size > 0
    return False


def _sound_in(home: Path) -> Path | None:
    """The object in its directory that may be linked; None if there is none.  Each is called by its digest."""
    with suppress(OSError):
        for path in sorted(home.iterdir()):
            if path.suffix == ".o" and _sound(path):
                return path
    return None


def _sound(path: Path) -> bool:
    """Whether an object that was kept is what it was, and nobody else's to change."""
    with suppress(OSError):
        found = path.lstat()
        planted = found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISREG(found.st_mode) and not planted and sha256(read_regular(path, MAX_OBJECT)) == path.stem:
            return True
    log.warning("the object %s is damaged or somebody else's: it is not used", path)
    return False


# -- the run -----------------------------------------------------------------------------------------------------------


class _Run:
    """Runs a plan; what is done is kept at once, so that a build that is killed goes on where it was."""

    def __init__(self, plan: _Plan, settings: Settings, progress: Progress | None) -> None:
        self.plan = plan
        self.settings = settings
        self.progress = progress
        self.done: set[str] = set()
        self.made: dict[Digest, BuiltKernel] = {}
        self.jobs = parallel.Jobs(1, "nothing to compile")

    def execute(self) -> None:
        self.jobs = parallel.jobs(
            parallel.machine(),
            per_job=self.plan.memory or parallel.LINK_MEMORY,
            max_jobs=self.settings.max_jobs,
            setting=self.settings.jobs,
        )
        log.info("%d steps, jobs=%d (%s)", len(self.plan.steps), self.jobs.n, self.jobs.reason)
        try:
            self._attempt("first")
        except ninja.Killed as error:
            fewer = max(1, self.jobs.n // 2)
            log.warning("%s; trying again with jobs=%d", error.message, fewer)
            self.jobs = parallel.Jobs(fewer, f"halved, since a compiler was killed; before: {self.jobs.reason}")
            self._attempt("second")

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "compiled": len(self.done & self.plan.objects.keys()),
            "linked": len(self.done & self.plan.links.keys()),
            "objects_reused": len(self.plan.objects_reused),
            "jobs": self.jobs.n,
            "jobs_reason": self.jobs.reason,
        }

    def _attempt(self, name: str) -> None:
        steps = [step for step in self.plan.steps if step.name not in self.done]
        remaining = {step.output for step in steps}
        steps = [replace(step, inputs=tuple(path for path in step.inputs if path in remaining)) for step in steps]
        ninja.run(
            steps,
            folder=self.plan.staging / name,
            jobs=self.jobs.n,
            settings=self.settings,
            on_done=self._keep,
        )

    def _keep(self, step: Step) -> None:
        with workspace.storage_errors(self.settings.workspace):
            self._keep_output(step)
        self.done.add(step.name)
        if self.progress is not None:
            self.progress(len(self.done), len(self.plan.steps), step.title)

    def _keep_output(self, step: Step) -> None:
        if not _made(step.output):
            raise BuildError(
                f"{step.title}: the command succeeded but made no file, or an empty one",
                command=step.shell,
                exit_status=0,
            )
        if step.name in self.plan.objects:
            made = self.plan.objects[step.name]
            _check_reads(made, step)
            digest = sha256(read_regular(step.output, MAX_OBJECT))
            workspace.share_file(step.output, made.home / f"{digest}.o")
        else:
            key = Digest(step.name)
            self.made[key] = self._keep_kernel(key, self.plan.links[key], step)

    def _keep_kernel(self, key: Digest, spec: Spec, step: Step) -> BuiltKernel:
        needs = _check_kernel(spec, step)
        content = step.output.read_bytes()
        toolchain = self.plan.toolchains[spec.device.toolchain]
        record = kept.Record(
            uri=spec.uri,
            arch=str(spec.arch),
            key=key,
            op_digest=spec.op_digest,
            sha256=sha256(content),
            size=len(content),
            exports=list(spec.op.exports),
            needs=needs,
            parts=spec.key_parts(toolchain.made_with(spec)),
        )
        return kept.keep(step.output.parent, self.settings.workspace, spec, record)


# -- checks on what was made -------------------------------------------------------------------------------------------


def _check_reads(made: _Object, step: Step) -> None:
    """Refuse an object that depends on a file of the library that its identity does not cover."""
    if not made.depfile.is_file():
        raise BuildError(f"{step.title}: the compiler did not list the files that it read", command=step.shell)
    listed = made.depfile.read_bytes().decode("utf-8", "surrogateescape")
    read = re.split(r"(?<!\\)\s+", listed.partition(": ")[2].replace("\\\n", " "))
    for name in filter(None, read):
        path = closure.relative(Path(made.root), name.replace("\\ ", " "))
        if path is not None and path not in made.reached:
            raise BuildError(
                f"{step.title}: the compiler read {path!r}, which the op's identity does not cover",
                command=step.shell,
                hint=f'include it with a plain line: #include "{path}"',
            )


def _check_kernel(spec: Spec, step: Step) -> dict[str, str]:
    """Refuse a shared object that is not what `spec` promises; gives what it needs of its host."""
    what = f"{spec.uri} for {spec.arch} is not what was promised"
    try:
        found = elf.inspect(step.output)
    except VerificationError as error:
        raise BuildError(f"{what}: {error.message}", command=step.shell) from error
    promised: set[Arch] = set()
    if spec.arch.kind == "cuda":
        promised = {replace(spec.arch, ptx=False)} | ({spec.arch} if spec.arch.ptx else set())
    problems = []
    if lacking := sorted(set(spec.op.exports) - set(found.exports)):
        problems.append(f"it does not export {', '.join(lacking)} (it exports {', '.join(found.exports) or 'nothing'})")
    if set(found.archs) != promised:
        problems.append(f"it holds GPU code for {_named(found.archs)}, expected {_named(promised)}")
    if found.run_path:
        problems.append("it has a run path of this machine")
    if problems:
        raise BuildError(f"{what}: {'; '.join(problems)}", command=step.shell)
    return dict(found.needs)


def _named(archs: Iterable[Arch]) -> str:
    return ", ".join(sorted(f"{arch} (PTX)" if arch.ptx else str(arch) for arch in archs)) or "no arch"
