"""The release engineer's flows: build, import, publish, lock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kartifacts.cli.flows import packing, planned
from kartifacts.cli.flows.building import build_line, ended_by_signals
from kartifacts.cli.flows.shared import Report, bar, native
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, NoCompiler, Refusal
from kartifacts.model.arch import parse_archs
from kartifacts.model.layout import check_name
from kartifacts.model.spec import Spec

if TYPE_CHECKING:
    from kartifacts.build.compile import Build, OnKernel
    from kartifacts.build.toolchains import Toolchain
    from kartifacts.model.materials import Recipe
    from kartifacts.publish.plan import Build as PlannedBuild
    from kartifacts.trust.keysigner import Secret

_SHOWN = 20


def build(
    settings: Settings,
    *,
    ops: str,
    out: Path,
    library: str,
    version: str,
    lock: Path | None,
    since: Path | None = None,
    recipe: Path | None = None,
) -> Report:
    """Compile `ops` for the archs of the settings and write them as a release into the repository `out`.

    An empty `version` is that of the package which brings the library.
    """
    start = time.monotonic()
    packing.check_since(since, library)
    source, own = planned.installed(library, settings.workspace)
    of = packing.Release(out, library, check_name(version or own, "version"), lock, since)
    of.check()
    archs = parse_archs(settings.archs, native=native(settings.archs))
    names = planned.op_names(ops, source.ops)
    planned.check_declared(source, names)
    planned.check_variants(source, names, archs, None)
    specs, skipped = source.specs(names, archs)
    planned.check_each(names, archs, specs, skipped)
    built, parts = compiled(specs, settings, recipe)
    return _report(built, packing.release(parts, of, settings), skipped, start)


def build_planned(
    settings: Settings,
    *,
    plan: Path,
    name: str,
    out: Path,
    version: str,
    lock: Path | None,
    since: Path | None = None,
    recipe: Path | None = None,
) -> Report:
    """Compile one build of a plan on this machine, and write it as a release into the repository `out`."""
    start = time.monotonic()
    planned.check_settings(settings)
    work = planned.work_of(plan, [name] if name else [])
    build, *others = work.plan.builds
    if others:
        raise ConfigError("the plan has several builds", hint="name one with --build; `kartifacts plan` lists them")
    planned.check_machine(build)
    version = check_name(version or work.version, "version")
    of = packing.Release(out, work.plan.library, version, lock, since, work.plan, work.promises)
    of.check()
    recipe = recipe or planned.recipe_file(work.plan, plan, build)
    built, parts = compiled(work.specs[build.name], settings, recipe, build=build)
    return _report(built, packing.release(parts, of, settings), work.skipped[build.name], start)


def compiled(
    specs: Sequence[Spec], settings: Settings, recipe: Path | None, *, build: PlannedBuild | None = None
) -> tuple[Build, list[packing.Part]]:
    """Compile specs here, with the compilers that a recipe and a plan name, and sort the kernels into bundles."""
    toolchains = toolchains_of(specs, settings)
    environment = checked_environment(toolchains, specs, recipe, build)
    built = run_compilers(specs, settings)
    return built, packing.parts_of(list(zip(specs, built.kernels, strict=True)), toolchains, settings, environment)


def toolchains_of(specs: Sequence[Spec], settings: Settings) -> dict[str, Toolchain]:
    from kartifacts.build.toolchains import find

    found = {}
    for kind in sorted({spec.device.toolchain for spec in specs}):
        try:
            found[kind] = find(kind, settings)
        except NoCompiler as error:
            ops = sorted({f"{spec.family}/{spec.op.name}" for spec in specs if spec.device.toolchain == kind})
            more = f" and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else ""
            others = "; or name other ops with --ops, of a plan in `ops` of its builds"
            raise NoCompiler(
                f"{error.message}; it is needed for {', '.join(ops[:_SHOWN])}{more}",
                searched=error.searched,
                hint=f"{error.hint or 'install it'}{others}",
            ) from error
    return found


def checked_environment(
    toolchains: Mapping[str, Toolchain], specs: Sequence[Spec], recipe: Path | None, build: PlannedBuild | None
) -> Recipe | None:
    """The recipe of this environment, once the compilers are those that it and the plan name."""
    from kartifacts.build.recipes import read_recipe

    if build is not None:
        planned.check_toolkit_of(build, toolchains, specs)
    return None if recipe is None else read_recipe(recipe, toolchains.values(), specs)


def run_compilers(specs: Sequence[Spec], settings: Settings, on_kernel: OnKernel | None = None) -> Build:
    """Build what is not built yet; a failure names what was promised and is not there."""
    from kartifacts.build.compile import compile_specs

    try:
        with ended_by_signals(), build_line(settings, len(specs)) as progress:
            return compile_specs(specs, settings, progress=progress, on_kernel=on_kernel)
    except BuildError as error:
        if not isinstance(error, NoCompiler):
            error.refusals = _unbuilt(specs, settings)
        raise


def _report(built: Build, released: Report, skipped: Sequence[Refusal], start: float) -> Report:
    return {
        **built.report,
        "skipped": [str(refusal) for refusal in skipped],
        **released,
        "seconds": round(time.monotonic() - start, 3),
    }


def write_report(path: Path, report: Report) -> None:
    """Keep the figures of a build as one JSON file."""
    from kartifacts.build.workspace import replace_file

    replace_file(path.absolute(), json.dumps(report, indent=2, sort_keys=True, default=str).encode() + b"\n")


def write_costs(path: Path, settings: Settings, library: str) -> None:
    """Keep what this workspace has learned of what the sources of a library take to compile, and nothing older."""
    from kartifacts.build.costs import FILE, Costs
    from kartifacts.build.workspace import replace_file

    replace_file(path.absolute(), Costs.read(settings.workspace / FILE).only(library).encoded)


def _unbuilt(specs: Sequence[Spec], settings: Settings) -> tuple[Refusal, ...]:
    """The promised kernels that a build which failed did not make."""
    from kartifacts.build.jit import find_built

    lacking = [spec for spec in specs if find_built(spec, settings) is None]
    named = [Refusal(f"{spec.uri} for {spec.arch}", "promised and not built") for spec in lacking[:_SHOWN]]
    more = len(lacking) - len(named)
    return (*named, *([Refusal(f"{more} more", "promised and not built")] if more else []))


def import_checksums(
    tree: Path,
    out: Path,
    *,
    library: str,
    version: str,
    allow_unlisted: bool,
    without: tuple[str, ...],
    lock: Path | None,
    settings: Settings,
    since: Path | None = None,
) -> Report:
    """Turn a tree in FlashInfer's layout into a release in the repository `out`."""
    from kartifacts.build import foreign
    from kartifacts.publish.release import make_release

    packing.check_written(out, lock)
    packing.check_since(since, library)
    with bar(settings, "importing", "B") as progress:
        imported = foreign.import_checksums(
            tree,
            out,
            library=library,
            version=version,
            allow_unlisted=allow_unlisted,
            without=without,
            earlier=partial(packing.earlier, since or out, library),
            jobs=settings.jobs,
            progress=progress,
        )
    bundles = [bundle for bundle, _ in imported]
    made = make_release(out, library, version, bundles, {bundle.digest: materials for bundle, materials in imported})
    pin = packing.pinned(out, library, version, lock)
    return {"bundles": [packing.described(bundle) for bundle in bundles], "release": made.digest, "pin": pin}


def publish(
    source: Path,
    bucket: str,
    *,
    library: str | None,
    version: str | None,
    plan: Path | None,
    builds: Sequence[str] = (),
    lock: Path | None,
    settings: Settings,
    keys: Path | None = None,
    secret: Secret | None = None,
    channels: Sequence[str] = (),
    builder_id: str | None = None,
    single_writer: bool = False,
) -> Report:
    """Copy releases of a repository directory into a bucket.

    Args:
        keys: keyring that signs for them.
        channels: lead to these releases from now on.
        builder_id: who built them, to be signed for; None: nothing is said about how they were built.
        single_writer: nobody else writes to the bucket meanwhile.
    """
    from kartifacts.build.checks import judge
    from kartifacts.cli.flows.keys import open_keyring
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.plan import read_plan
    from kartifacts.publish.protocol import publish as send

    promised = None if plan is None else read_plan(plan).only(builds)
    keyring = None if keys is None else open_keyring(keys, secret)
    opened = open_bucket(bucket, settings, single_writer=single_writer)
    with bar(settings, "publishing", "B") as progress:
        sent = send(
            source,
            opened,
            library=library,
            version=version,
            plan=promised,
            sources=None if plan is None else lambda: planned.promised(plan, builds)[1],
            judge=None if promised is None else judge(promised.limits),
            lock=lock,
            keyring=keyring,
            channels=channels,
            builder_id=None if keyring is None else builder_id,
            progress=progress,
        )
    return {
        "bucket": opened.name,
        "pins": [msgspec.to_builtins(pin) for pin in sent.pins],
        "views": {view: msgspec.to_builtins(seen) for view, seen in sent.seen.items()},
    }


def lock(repository: Path, path: Path, *, library: str | None, version: str | None) -> list[dict[str, Any]]:
    """Pin the releases of a repository, after checking that it is complete and undamaged."""
    from kartifacts.publish.lockfile import add_pins
    from kartifacts.publish.verify import verify_repository

    report = verify_repository(repository, library=library, version=version)
    report.check(str(repository))
    add_pins(path, report.pins)
    return [msgspec.to_builtins(pin) for pin in report.pins]
