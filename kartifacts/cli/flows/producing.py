"""The release engineer's flows: build, import, publish, lock."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kartifacts import __version__
from kartifacts.cli.flows.shared import Report, bar, native
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, NoCompiler, Refusal
from kartifacts.model.arch import Arch, parse_archs
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import Descriptor
from kartifacts.model.spec import FFI_ABI, Spec

if TYPE_CHECKING:
    from kartifacts.build.kept import BuiltKernel
    from kartifacts.build.reuse import Earlier
    from kartifacts.build.toolchains import Toolchain
    from kartifacts.model.materials import Materials, Recipe
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
    from kartifacts.build import library as libraries
    from kartifacts.build.compile import compile_specs
    from kartifacts.build.materials import read_recipe
    from kartifacts.build.toolchains import find
    from kartifacts.publish.lockfile import read_lock
    from kartifacts.publish.release import make_release

    start = time.monotonic()
    if lock is not None and os.path.lexists(lock):
        read_lock(lock)  # this and the version now, not after hours of compiling
    _check_since(since, library)
    source = next((found for found in libraries.discover() if found.name == library), None)
    if source is None:
        raise ConfigError(f"no kernel library {library!r} is installed", hint="kartifacts doctor lists those there are")
    version = check_name(version or (__version__ if library == libraries.BUILTIN else source.version), "version")
    archs = parse_archs(settings.archs, native=native(settings.archs))
    names = _op_names(ops, source.ops)
    specs, skipped = source.specs(names, archs)
    _check_each(names, archs, specs, skipped)
    toolchains = {kind: find(kind, settings) for kind in sorted({spec.device.toolchain for spec in specs})}
    environment = None if recipe is None else read_recipe(recipe, toolchains.values())
    try:
        with bar(settings, f"building {len(specs)} kernels", "step") as progress:
            built = compile_specs(specs, settings, progress=lambda done, total, _: progress(done, total))
    except BuildError as error:
        if not isinstance(error, NoCompiler):
            error.refusals = _unbuilt(specs, settings)
        raise
    made_of = _materials(list(zip(specs, built.kernels, strict=True)), toolchains, settings, environment)
    bundles = _pack(out, library, made_of, settings, since or out)
    materials = {bundle.digest: of for bundle, (of, _) in zip(bundles, made_of, strict=True)}
    made = make_release(out, library, version, bundles, materials)
    pin = _pinned(out, library, version, lock)
    return {
        **built.report,
        "skipped": [str(refusal) for refusal in skipped],
        "kernels": [
            {"uri": kernel.uri, "arch": str(kernel.arch), "key": kernel.key, "bytes": kernel.size}
            for kernel in built.kernels
        ],
        "bundles": [_described(bundle) for bundle in bundles],
        "release": made.digest,
        "pin": pin,
        "seconds": round(time.monotonic() - start, 3),
    }


def _check_each(names: Sequence[str], archs: Sequence[Arch], specs: Sequence[Spec], skipped: Sequence[Refusal]) -> None:
    """Refuse a named op or arch for which nothing would be built: a release must hold what was asked for by name."""
    reasons = "; ".join(map(str, skipped[:_SHOWN]))
    for arch in archs:
        if not any(spec.arch == arch for spec in specs):
            raise ConfigError(f"none of the ops can be built for {arch}; nothing was built", hint=reasons)
    for name in names:
        if not any(name in (spec.op.name, f"{spec.family}/{spec.op.name}") for spec in specs):
            raise ConfigError(f"{name} can be built for none of these archs; nothing was built", hint=reasons)


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

    _check_since(since, library)
    with bar(settings, "importing", "B") as progress:
        imported = foreign.import_checksums(
            tree,
            out,
            library=library,
            version=version,
            allow_unlisted=allow_unlisted,
            without=without,
            earlier=partial(earlier, since or out, library),
            jobs=settings.jobs,
            progress=progress,
        )
    bundles = [bundle for bundle, _ in imported]
    made = make_release(out, library, version, bundles, {bundle.digest: materials for bundle, materials in imported})
    pin = _pinned(out, library, version, lock)
    return {"bundles": [_described(bundle) for bundle in bundles], "release": made.digest, "pin": pin}


def publish(
    source: Path,
    bucket: str,
    *,
    library: str | None,
    version: str | None,
    plan: Path | None,
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
    from kartifacts.cli.flows.keys import open_keyring
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.plan import read_plan
    from kartifacts.publish.protocol import publish as send

    promised = None if plan is None else read_plan(plan)
    keyring = None if keys is None else open_keyring(keys, secret)
    opened = open_bucket(bucket, settings, single_writer=single_writer)
    with bar(settings, "publishing", "B") as progress:
        sent = send(
            source,
            opened,
            library=library,
            version=version,
            plan=promised,
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


def _op_names(ops: str, known: tuple[str, ...]) -> list[str]:
    """Names of ops; a family stands for all of its ops."""
    names: list[str] = []
    for word in ops.replace(",", " ").split():
        family = [name for name in known if name.rpartition("/")[0] == word]
        names.extend(family or [word])
    return names


def _check_since(since: Path | None, library: str) -> None:
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


def _materials(
    made: list[tuple[Spec, BuiltKernel]],
    toolchains: dict[str, Toolchain],
    settings: Settings,
    recipe: Recipe | None,
) -> list[tuple[Materials, list[BuiltKernel]]]:
    """The kernels of each family and arch, with what they were made of."""
    from kartifacts.build.materials import compiled

    programs = {kind: toolchain.programs(settings) for kind, toolchain in toolchains.items()}
    groups: dict[tuple[str, Arch], list[tuple[Spec, BuiltKernel]]] = {}
    for spec, kernel in made:
        groups.setdefault((spec.family, spec.arch), []).append((spec, kernel))
    return [
        (
            compiled(
                members,
                arch=str(arch),
                abi=FFI_ABI,
                programs=programs[members[0][0].device.toolchain],
                recipe=recipe,
            ),
            [kernel for _, kernel in members],
        )
        for (_, arch), members in groups.items()
    ]


def _pack(
    out: Path,
    library: str,
    made_of: list[tuple[Materials, list[BuiltKernel]]],
    settings: Settings,
    since: Path,
) -> list[Descriptor]:
    """One bundle for each family and arch."""
    from kartifacts.build.blocks import PackInput
    from kartifacts.build.pack import pack_bundle

    return [
        pack_bundle(
            [
                PackInput(
                    uri=kernel.uri,
                    path=kernel.path,
                    suffix=kernel.suffix,
                    key=kernel.key,
                    op_digest=kernel.op_digest,
                    exports=kernel.exports,
                    needs=kernel.needs,
                    sha256=kernel.sha256,
                )
                for kernel in kernels
            ],
            out,
            library=library,
            family=materials.family,
            arch=materials.arch,
            abi=materials.abi,
            toolchain=materials.toolchain,
            earlier=earlier(since, library, materials.arch, materials.abi),
            jobs=settings.jobs,
        )
        for materials, kernels in made_of
    ]


def _pinned(out: Path, library: str, version: str, lock: Path | None) -> dict[str, Any]:
    from kartifacts.publish.lockfile import add_pins
    from kartifacts.publish.repository import Repository

    pins = Repository(out).pins(library, version)
    if lock is not None:
        add_pins(lock, pins)
    made: dict[str, Any] = msgspec.to_builtins(pins[0])
    return made


def _described(bundle: Descriptor) -> dict[str, Any]:
    return {
        "family": bundle.note("family"),
        "arch": bundle.note("arch"),
        "kernels": int(bundle.note("kernels") or 0),
        "digest": bundle.digest,
    }
