"""The cluster admin's and runtime user's flows: fetch, status, list, verify, gc."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kartifacts.cli.flows.selecting import (
    Chosen,
    Selection,
    choose,
    devices_of,
    entries_here,
    pinned_registry,
    pins_of,
    runs,
)
from kartifacts.cli.flows.shared import Report, bar
from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, ConfigError, KartifactsError, StoreError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.manifest import KernelEntry
from kartifacts.runtime import Registry

if TYPE_CHECKING:
    from kartifacts.fetch import Bundle


def fetch(settings: Settings, selection: Selection, *, out: Path | None) -> Report:
    """Have every selected kernel in the store, or raise an error that names what is missing."""
    registry = pinned_registry(settings)
    fetcher = registry.fetcher()
    chosen = list(choose(registry, selection, local=False))
    selection.check(chosen)
    if out is not None:
        _check_names(chosen)
    present = sum(fetcher.find(entry) is not None for _, _, entries in chosen for entry in entries)
    files: dict[str, Path] = {}
    failed: list[KartifactsError] = []
    for _, bundle, entries in chosen:
        try:
            places = fetcher.ensure(bundle, entries)
        except (ArtifactUnavailable, VerificationError) as error:  # the rest is fetched, so that it need not be again
            failed.append(error)
        else:
            files.update({_file_name(bundle, entry): places[entry.uri] for entry in entries})
    if failed:
        raise _worst(failed)
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


def _worst(failed: list[KartifactsError]) -> KartifactsError:
    """The error to raise for several: wrong bytes before what is missing, the others named in its message."""
    first = next((error for error in failed if isinstance(error, VerificationError)), failed[0])
    others = [error.message.partition("\n")[0] for error in failed if error is not first]
    first.message = "; also: ".join([first.message, *others])
    return first


def status(settings: Settings, selection: Selection) -> Report:
    """For each pinned bundle how many of its kernels are on this machine."""
    registry = pinned_registry(settings)
    fetcher = registry.local_fetcher()
    devices = devices_of(selection.archs) or [None]
    rows = []
    for pin in pins_of(registry, selection):
        for bundle in fetcher.bundles(pin):
            entries = entries_here(bundle)
            kept = None if entries is None else [entry for entry in entries if selection.takes(bundle, entry)]
            if kept == [] or all(runs(bundle, device) is None for device in devices):
                continue
            rows.append(
                {
                    "library": pin.library,
                    "version": pin.version,
                    "family": bundle.descriptor.note("family"),
                    "arch": bundle.descriptor.note("arch"),
                    "kernels": None if kept is None else len(kept),
                    "present": sum(fetcher.place(bundle, entry) is not None for entry in kept or ()),
                }
            )
    stored = list(fetcher.store.entries())
    return {
        "store": str(settings.store),
        "entries": len(stored),
        "bytes": sum(entry.size for entry in stored),
        "bundles": rows,
        "complete": bool(rows) and all(row["kernels"] == row["present"] for row in rows),
    }


def listing(settings: Settings, selection: Selection) -> list[dict[str, Any]]:
    """Every pinned kernel whose table is on this machine."""
    registry = pinned_registry(settings)
    fetcher = registry.local_fetcher()
    return [
        {
            "uri": entry.uri,
            "library": pin.library,
            "version": pin.version,
            "arch": bundle.descriptor.note("arch"),
            "size": entry.size,
            "sha256": entry.sha256,
            "place": str(place) if (place := fetcher.place(bundle, entry)) is not None else None,
        }
        for pin, bundle, entries in choose(registry, selection, local=True)
        for entry in entries
    ]


def verify(settings: Settings, repository: Path | None, selection: Selection) -> Report:
    """Hash everything in a repository, or in the store, where selected kernels that are missing count too."""
    if repository is not None:
        from kartifacts.publish.verify import verify_repository

        with bar(settings, "verifying", "B") as progress:
            found = verify_repository(repository, deep=True, progress=progress)
        return {
            "place": str(repository),
            "checked": len(found.blobs) + found.kernels,
            "damaged": [str(fault) for fault in found.faults if not fault.missing],
            "missing": [str(fault) for fault in found.faults if fault.missing],
        }
    registry = Registry(settings)
    fetcher = registry.local_fetcher()
    report = fetcher.store.verify()
    missing = []
    devices = devices_of(selection.archs) or [None]
    for pin in pins_of(registry, selection) if registry.lock.releases else ():
        one = replace(selection, library=pin.library)
        try:
            missing += [
                f"kernel table of {bundle.name}"
                for bundle in fetcher.bundles(pin)
                if entries_here(bundle) is None and any(runs(bundle, device) is not None for device in devices)
            ]
            missing += [
                f"{entry.uri} of {bundle.name}"
                for _, bundle, entries in choose(registry, one, local=True)
                for entry in entries
                if fetcher.place(bundle, entry) is None
            ]
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
    registry = pinned_registry(settings)
    fetcher = registry.local_fetcher()
    keep: set[Digest] = set()
    for pin in registry.lock.releases:
        keep.add(parse_digest(pin.sha256))
        try:
            for bundle in registry.fetcher().bundles(pin):  # metadata that is not here is fetched, to be sure
                keep.add(bundle.descriptor.sha256)
                keep.add(bundle.manifest.config.sha256)
                keep.update(parse_digest(entry.sha256) for entry in bundle.table.kernels)
        except KartifactsError as error:
            raise StoreError(
                f"nothing was removed: which kernels {pin.library} {pin.version} pins cannot be read: {error.message}",
                hint="fetch it first, or take the release out of the lock if its kernels may go",
            ) from error
    report = fetcher.store.gc(keep, max_bytes=max_bytes, dry_run=dry_run)
    return {
        "removed": [str(path) for path in report.removed],
        "bytes": report.freed,
        "kept": report.kept,
        "dry_run": dry_run,
    }


def _file_name(bundle: Bundle, entry: KernelEntry) -> str:
    """Where a kernel is written out: under its own path if it was imported, else by arch and its uri, spelt safely."""
    if not entry.op_digest:
        return entry.uri
    name = entry.uri.replace("?", "@").replace("&", ",")
    return f"{parse_arch(bundle.descriptor.note('arch')).slug}/{name}{entry.suffix}"


def _check_names(chosen: list[Chosen]) -> None:
    """Refuse to write two contents under one name."""
    names: dict[str, str] = {}
    for _, bundle, entries in chosen:
        for entry in entries:
            if names.setdefault(_file_name(bundle, entry), entry.sha256) != entry.sha256:
                raise ConfigError(
                    f"two pinned releases hold other bytes under {entry.uri!r}; nothing was fetched",
                    hint="choose one of them with --library",
                )


def _export(files: dict[str, Path], out: Path) -> None:
    """Write files under their paths; each appears whole or not at all."""
    try:
        for name, path in files.items():
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".partial-", delete=False) as partial:
                try:
                    with open(path, "rb") as content:
                        shutil.copyfileobj(content, partial, 1 << 20)
                    os.chmod(partial.name, 0o644)
                    os.replace(partial.name, target)
                except BaseException:
                    os.unlink(partial.name)
                    raise
    except OSError as error:
        raise StoreError(f"cannot write into {str(out)!r}: {error}") from error
