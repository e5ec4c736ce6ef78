"""What the commands do, as functions: each composes the packages below it and returns a report that is plain data."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, ConfigError, KartifactsError, StoreError
from kartifacts.model.arch import Arch, parse_arch, parse_archs
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.manifest import Descriptor, KernelEntry, Pin
from kartifacts.model.spec import FFI_ABI

if TYPE_CHECKING:
    from kartifacts.build.kept import BuiltKernel
    from kartifacts.fetch import Bundle
    from kartifacts.runtime import Registry

Report = dict[str, Any]


# -- producing ---------------------------------------------------------------------------------------------------------


def build(settings: Settings, *, ops: str, out: Path, library: str, version: str, lock: Path | None) -> Report:
    """Compile `ops` for the archs of the settings and write them as a release into the repository `out`."""
    from kartifacts.build import library as libraries
    from kartifacts.build.compile import compile_specs
    from kartifacts.publish.release import make_release
    from kartifacts.runtime import host

    start = time.monotonic()
    source = next((found for found in libraries.discover() if found.name == library), None)
    if source is None:
        raise ConfigError(f"no kernel library {library!r} is installed", hint="kartifacts doctor lists those there are")
    archs = parse_archs(settings.archs, native=_native(settings.archs, host))
    specs, skipped = source.specs(_op_names(ops, source.ops), archs)
    with _bar(settings, f"building {len(specs)} kernels", "step") as progress:
        built = compile_specs(specs, settings, progress=lambda done, total, _: progress(done, total))
    bundles = _pack(out, library, {spec.uri: spec.family for spec in specs}, built.kernels, settings)
    made = make_release(out, library, version, bundles)
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


def import_checksums(
    tree: Path, out: Path, *, library: str, version: str, allow_unlisted: bool, lock: Path | None, settings: Settings
) -> Report:
    """Turn a tree in FlashInfer's layout into a release in the repository `out`."""
    from kartifacts.build import foreign
    from kartifacts.publish.release import make_release

    with _bar(settings, "importing", "B") as progress:
        bundles = foreign.import_checksums(
            tree, out, library=library, version=version, allow_unlisted=allow_unlisted, progress=progress
        )
    made = make_release(out, library, version, bundles)
    pin = _pinned(out, library, version, lock)
    return {"bundles": [_described(bundle) for bundle in bundles], "release": made.digest, "pin": pin}


def publish(
    source: Path, bucket: str, *, library: str | None, version: str | None, lock: Path | None, settings: Settings
) -> Report:
    """Copy releases of a repository directory into a bucket."""
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.protocol import publish as send

    with _bar(settings, "publishing", "B") as progress:
        pins = send(source, open_bucket(bucket), library=library, version=version, lock=lock, progress=progress)
    return {"bucket": bucket, "pins": [msgspec.to_builtins(pin) for pin in pins]}


def lock(repository: Path, path: Path, *, library: str | None, version: str | None) -> list[dict[str, Any]]:
    """Pin the releases of a repository, after checking that it is complete and undamaged."""
    from kartifacts.publish.lockfile import add_pins
    from kartifacts.publish.verify import verify_repository

    report = verify_repository(repository, library=library, version=version)
    report.check(str(repository))
    add_pins(path, report.pins)
    return [msgspec.to_builtins(pin) for pin in report.pins]


def _native(text: str, host: Any) -> tuple[Arch, ...]:
    """This machine's devices, looked at only if the list asks for them: a GPU that hangs must not hang a build."""
    folded = text.lower()
    if "native" in folded.replace("cpu:native", ""):
        return (*(host.build_arch(gpu) for gpu in host.gpus()), host.cpu())
    return (host.cpu(),)


def _op_names(ops: str, known: tuple[str, ...]) -> list[str]:
    """Names of ops; a family stands for all of its ops."""
    names: list[str] = []
    for word in ops.replace(",", " ").split():
        family = [name for name in known if name.rpartition("/")[0] == word]
        names.extend(family or [word])
    return names


def _pack(
    out: Path, library: str, families: dict[str, str], kernels: tuple[BuiltKernel, ...], settings: Settings
) -> list[Descriptor]:
    """One bundle for each family and arch."""
    from kartifacts.build.pack import PackInput, pack_bundle

    groups: dict[tuple[str, Arch], list[BuiltKernel]] = {}
    for kernel in kernels:
        groups.setdefault((families[kernel.uri], kernel.arch), []).append(kernel)
    bundles = []
    for (family, arch), members in groups.items():
        entries = [
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
            for kernel in members
        ]
        toolchain = members[0].toolchain
        bundles.append(
            pack_bundle(
                entries,
                out,
                library=library,
                family=family,
                arch=str(arch),
                abi=FFI_ABI,
                toolchain=toolchain,
                jobs=settings.jobs,
            )
        )
    return bundles


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


# -- consuming ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which pinned kernels a command is about; what is empty selects everything."""

    library: str | None = None
    ops: str = ""
    archs: str = ""
    paths: tuple[str, ...] = ()

    def takes(self, entry: KernelEntry) -> bool:
        name = entry.uri.partition("?")[0]
        words = self.ops.replace(",", " ").split()
        named = not words or any(name == op or name.startswith(op + "/") or name.endswith("/" + op) for op in words)
        return named and (not self.paths or entry.uri in self.paths)

    def check(self, seen: set[str]) -> None:
        """Complain about a path or an op that selected nothing: a misspelt one must not pass as done."""
        for path in self.paths:
            if path not in seen:
                raise ArtifactUnavailable(
                    f"no pinned release holds {path!r}", hint="kartifacts list shows what is pinned"
                )
        if not seen:
            raise ArtifactUnavailable(
                "nothing that is pinned matches the selection", hint="kartifacts list shows what is pinned"
            )


Chosen = tuple[Pin, "Bundle", list[KernelEntry]]


def fetch(settings: Settings, selection: Selection, *, out: Path | None) -> Report:
    """Have every selected kernel in the store, or raise an error that names what is missing."""
    registry = _pinned_registry(settings)
    fetcher = registry.fetcher()
    chosen = list(_choose(registry, selection, local=False))
    selection.check({entry.uri for _, _, entries in chosen for entry in entries})
    present = sum(fetcher.find(entry) is not None for _, _, entries in chosen for entry in entries)
    files: dict[str, Path] = {}
    for _, bundle, entries in chosen:
        files.update({_file_name(entry): path for entry, path in _ensured(fetcher, bundle, entries)})
    if out is not None:
        _export(files, out)
    kernels = sum(len(entries) for _, _, entries in chosen)
    return {
        "kernels": kernels,
        "present": present,
        "fetched": kernels - present,
        "bytes": fetcher.stats.bytes,
        "requests": fetcher.stats.requests,
        "out": None if out is None else str(out),
    }


def _ensured(fetcher: Any, bundle: Bundle, entries: list[KernelEntry]) -> Iterator[tuple[KernelEntry, Path]]:
    places = fetcher.ensure(bundle, entries)
    for entry in entries:
        yield entry, places[entry.uri]


def status(settings: Settings, selection: Selection) -> Report:
    """For each pinned bundle how many of its kernels are on this machine."""
    registry = _pinned_registry(settings)
    fetcher = registry.local_fetcher()
    rows = []
    for pin in _pins(registry, selection):
        for bundle in fetcher.bundles(pin):
            entries = _entries_here(bundle)
            kept = None if entries is None else [entry for entry in entries if selection.takes(entry)]
            if _runs(bundle, _devices(selection.archs)) is None or kept == []:
                continue
            rows.append(
                {
                    "library": pin.library,
                    "version": pin.version,
                    "family": bundle.descriptor.note("family"),
                    "arch": bundle.descriptor.note("arch"),
                    "kernels": None if kept is None else len(kept),
                    "present": sum(fetcher.find(entry) is not None for entry in kept or ()),
                }
            )
    stored = list(fetcher.store.entries())
    return {
        "store": str(settings.store),
        "entries": len(stored),
        "bytes": sum(entry.size for entry in stored),
        "bundles": rows,
        "complete": all(row["kernels"] == row["present"] for row in rows),
    }


def listing(settings: Settings, selection: Selection) -> list[dict[str, Any]]:
    """Every pinned kernel whose table is on this machine."""
    registry = _pinned_registry(settings)
    fetcher = registry.local_fetcher()
    return [
        {
            "uri": entry.uri,
            "library": pin.library,
            "version": pin.version,
            "arch": bundle.descriptor.note("arch"),
            "size": entry.size,
            "sha256": entry.sha256,
            "place": str(place) if (place := fetcher.find(entry)) is not None else None,
        }
        for pin, bundle, entries in _choose(registry, selection, local=True)
        for entry in entries
    ]


def verify(settings: Settings, repository: Path | None) -> Report:
    """Hash everything in a repository, or in the store, where pinned kernels that are missing count too."""
    if repository is not None:
        from kartifacts.publish.verify import verify_repository

        with _bar(settings, "verifying", "B") as progress:
            found = verify_repository(repository, deep=True, progress=progress)
        return {
            "place": str(repository),
            "checked": len(found.blobs) + found.kernels,
            "damaged": [str(fault) for fault in found.faults],
            "missing": [],
        }
    registry = _registry(settings)
    fetcher = registry.local_fetcher()
    report = fetcher.store.verify()
    missing = []
    for pin in registry.lock.releases:
        try:
            for bundle in fetcher.bundles(pin):
                entries = _entries_here(bundle)
                if entries is None:
                    missing.append(f"kernel table of {bundle.name}")
                missing += [f"{entry.uri} of {bundle.name}" for entry in entries or () if fetcher.find(entry) is None]
        except ArtifactUnavailable:
            missing.append(f"release index of {pin.library} {pin.version}")
    return {
        "place": str(settings.store),
        "checked": report.entries,
        "damaged": [f"{damage.path}: {damage.reason}" for damage in report.damaged],
        "missing": missing,
    }


def gc(settings: Settings, *, max_bytes: int | None, dry_run: bool) -> Report:
    """Remove from the store what the lock does not reach."""
    registry = _pinned_registry(settings)
    fetcher = registry.local_fetcher()
    keep: set[Digest] = set()
    for pin in registry.lock.releases:
        keep.add(parse_digest(pin.sha256))
        try:
            for bundle in fetcher.bundles(pin):
                keep.add(bundle.descriptor.sha256)
                entries = _entries_here(bundle)
                if entries is not None:
                    keep.add(bundle.manifest.config.sha256)
                    keep.update(parse_digest(entry.sha256) for entry in entries)
        except ArtifactUnavailable:
            continue  # not fetched yet: nothing of it can be here
    report = fetcher.store.gc(keep, max_bytes=max_bytes, dry_run=dry_run)
    return {
        "removed": [str(path) for path in report.removed],
        "bytes": report.freed,
        "kept": report.kept,
        "dry_run": dry_run,
    }


def _registry(settings: Settings) -> Registry:
    from kartifacts.runtime import Registry

    return Registry(settings)


def _pinned_registry(settings: Settings) -> Registry:
    registry = _registry(settings)
    if not registry.lock.releases:
        raise ConfigError(
            "no release is pinned, so there is nothing to fetch, list or keep",
            hint="set KARTIFACTS_LOCK to a kartifacts.lock; kartifacts lock REPOSITORY --out FILE writes one",
        )
    return registry


def _pins(registry: Registry, selection: Selection) -> list[Pin]:
    pins = [pin for pin in registry.lock.releases if selection.library in (None, pin.library)]
    if not pins:
        pinned = ", ".join(pin.library for pin in registry.lock.releases)
        raise ConfigError(f"no release of {selection.library!r} is pinned; pinned: {pinned}")
    return pins


def _choose(registry: Registry, selection: Selection, *, local: bool) -> Iterator[Chosen]:
    """For each arch and each kernel the bundle that `load` would take; without archs all of them."""
    fetcher = registry.local_fetcher() if local else registry.fetcher()
    devices = _devices(selection.archs)
    for pin in _pins(registry, selection):
        bundles = fetcher.bundles(pin)
        taken: set[tuple[str, str]] = set()  # bundle and uri
        for only in [None] if devices is None else [[device] for device in devices]:
            ranked = [(rank, bundle) for bundle in bundles if (rank := _runs(bundle, only)) is not None]
            done: set[str] = set()
            for _, bundle in sorted(ranked, key=lambda pair: pair[0]):
                entries = _entries_here(bundle) if local else bundle.table.kernels
                new = [
                    entry
                    for entry in entries or ()
                    if selection.takes(entry)
                    and (only is None or entry.uri not in done)
                    and (bundle.descriptor.digest, entry.uri) not in taken
                ]
                done.update(entry.uri for entry in entries or ())
                taken.update((bundle.descriptor.digest, entry.uri) for entry in new)
                if new:
                    yield pin, bundle, new


def _devices(archs: str) -> list[Arch] | None:
    from kartifacts.runtime import host

    return list(parse_archs(archs, native=_native(archs, host))) if archs.strip() else None


def _runs(bundle: Bundle, devices: list[Arch] | None) -> int | None:
    """How well a bundle fits the best of `devices`; None if it runs on none of them."""
    built_for = bundle.descriptor.note("arch")
    if devices is None or built_for == "any":
        return 0
    verdicts = [parse_arch(built_for).runs_on(device) for device in devices]
    return min((verdict.rank for verdict in verdicts if verdict.ok), default=None)


def _entries_here(bundle: Bundle) -> list[KernelEntry] | None:
    """The entries of a bundle of a local fetcher; None if its table is not on this machine."""
    try:
        return bundle.table.kernels
    except ArtifactUnavailable:
        return None


def _file_name(entry: KernelEntry) -> str:
    """The path under which a kernel is written out: its own if it was imported, else a safe spelling of its uri."""
    name = entry.uri.replace("?", "@").replace("&", ",")
    return name if name.endswith(entry.suffix) else name + entry.suffix


def _export(files: dict[str, Path], out: Path) -> None:
    """Write files under their paths; each appears whole or not at all."""
    try:
        for name, path in files.items():
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.partial")
            shutil.copyfile(path, partial)
            partial.replace(target)
    except OSError as error:
        raise StoreError(f"cannot write into {str(out)!r}: {error}") from error


# -- asking ------------------------------------------------------------------------------------------------------------


def explain_key(settings: Settings, op: str, axes: dict[str, str], arch: str) -> Report:
    """Every ingredient of both digests; the key is unknown where there is no compiler."""
    from kartifacts.build import library, toolchains
    from kartifacts.runtime import host

    archs = parse_archs(arch, native=_native(arch, host))
    if len(archs) != 1:
        raise ConfigError(f"{arch!r} names {len(archs)} archs; expected one")
    spec = library.discover().find(op).spec(op, axes, archs[0])
    found: Report = {"uri": spec.uri, "op_digest": spec.op_digest, "key": None, "key_unknown": ""}
    try:
        fingerprint = toolchains.find(spec.device.toolchain, settings).fingerprint
    except KartifactsError as error:
        return {**found, "key_unknown": error.message, "parts": {**spec.identity(), "arch": str(spec.arch)}}
    return {**found, "key": spec.key(fingerprint), "parts": spec.key_parts(fingerprint)}


# -- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def _bar(settings: Settings, title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that is told what is done and how much there is in all."""
    from tqdm import tqdm

    hidden = {"on": False, "off": True}.get(settings.progress)  # None: tqdm hides it where stderr is no terminal
    with tqdm(desc=title, unit=unit, unit_scale=unit == "B", disable=hidden, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
