"""The cluster admin's and runtime user's flows: fetch, status, list, verify, gc."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kartifacts.cli.flows.provenance import Demand, prove
from kartifacts.cli.flows.selecting import (
    Chosen,
    Selection,
    Unread,
    bundles_of,
    choose,
    devices_of,
    entries_of,
    listed_of,
    pinned_registry,
    pins_of,
    runs,
)
from kartifacts.cli.flows.shared import Report, bar
from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, ConfigError, KartifactsError, StoreError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import parse_digest
from kartifacts.model.manifest import Descriptor, KernelEntry, Pin
from kartifacts.runtime import Registry, host

log = logging.getLogger(__name__)

_NOT_HERE = "is not here"
_REMEMBERED = 1000  # kernels, at a millisecond each

if TYPE_CHECKING:
    from kartifacts.fetch import Bundle, Fetcher
    from kartifacts.store import Holdings


def fetch(settings: Settings, selection: Selection, *, out: Path | None) -> Report:
    """Have every selected kernel in the store, or raise an error that names what is missing."""
    registry = pinned_registry(settings)
    fetcher = registry.fetcher()
    unread: list[Unread] = []
    chosen = list(choose(registry, selection, unread, local=False))
    failed: list[KartifactsError] = [each.error for each in unread]
    if not failed:
        selection.check(chosen)
    if out is not None:
        _check_names(chosen)
    here = fetcher.store.holdings()
    local = any(source.local for source in fetcher.sources)
    lacking = []
    for _, bundle, entries in chosen:
        absent = here.lacking(entries)
        lacking.append((bundle, [entry for entry in absent if fetcher.find(entry) is None] if local else absent))
    try:
        fetcher.bring(lacking, "fetching")
    except (ArtifactUnavailable, VerificationError) as error:  # all that could be fetched has been
        failed.append(error)
    places: dict[str, Path] = {}
    if out is not None and not failed:
        for _, bundle, entries in chosen:  # what leaves the store is read once more, and fetched again if it is damaged
            there = fetcher.ensure(bundle, entries)
            places.update((_file_name(bundle, entry), there[entry.uri]) for entry in entries)
    if failed:
        raise _worst(failed)
    if out is not None:
        _export(places, out)
    kernels, fetched = (sum(len(row[-1]) for row in rows) for rows in (chosen, lacking))
    if fetched:
        _remember(registry, selection, chosen)
    return {
        "kernels": kernels,
        "present": kernels - fetched,
        "fetched": fetched,
        "bytes": fetcher.stats.bytes,
        "requests": fetcher.stats.requests,
        "out": None if out is None else str(out),
    }


def _remember(registry: Registry, selection: Selection, chosen: list[Chosen]) -> None:
    """Note what loads of the kernels will come to here, for a number of kernels that takes no time to speak of."""
    devices = {
        host.cpu() if device is None or device.kind == "cpu" else replace(device, suffix="", ptx=False)
        for device in devices_of(selection.archs) or [None]
    }
    loads = {
        (entry.uri, device)
        for device in devices
        for _, bundle, entries in chosen
        if runs(bundle, device) is not None
        for entry in entries
        if entry.op_digest
    }
    if len(loads) > _REMEMBERED:
        return
    for uri, device in loads:
        try:
            registry.remember(uri, device)
        except KartifactsError as error:  # a load will say it, if it matters to any
            log.debug("nothing is noted of %s: %s", uri, error.message)


def _worst(failed: list[KartifactsError]) -> KartifactsError:
    """The error to raise for several: wrong bytes before what is missing, the others named in its message."""
    first = next((error for error in failed if isinstance(error, VerificationError)), failed[0])
    others = [error.message.partition("\n")[0] for error in failed if error is not first]
    first.message = "; also: ".join([first.message, *others])
    return first


def status(settings: Settings, selection: Selection) -> Report:
    """For each pinned bundle how many of its kernels are on this machine; what cannot be told is said to be unknown."""
    registry = pinned_registry(settings)
    fetcher = registry.local_fetcher()
    here = fetcher.store.holdings()
    devices = devices_of(selection.archs) or [None]
    rows = []
    for pin in pins_of(registry, selection):
        unread: list[Unread] = []
        row: Report = {"library": pin.library, "version": pin.version, "family": "", "arch": "", "problem": ""}
        for bundle in bundles_of(fetcher, pin, unread):
            note = bundle.descriptor.note
            if all(runs(bundle, device) is None for device in devices):
                continue
            number, lacking = _counted(fetcher, here, selection, bundle, pin, unread)
            if number != 0:
                rows.append(
                    {**row, "family": note("family"), "arch": note("arch"),
                     "kernels": number,
                     "present": (number or 0) - lacking,
                     "problem": "" if number is not None else _problem(unread[-1])}
                )  # fmt: skip
            bundle.forget()
        if unread and unread[0].what.startswith("release index"):
            rows.append({**row, "kernels": None, "present": 0, "problem": _problem(unread[0])})
    return {
        "store": str(settings.store),
        "entries": here.entries,
        "bytes": here.bytes,
        "bundles": rows,
        "synced": _ages(settings),
        "advice": "run kartifacts fetch: what is unknown stands in metadata that is not here yet"
        if any(row["problem"].endswith(_NOT_HERE) for row in rows)
        else "",
        "complete": bool(rows) and all(row["kernels"] == row["present"] for row in rows),
    }


def _ages(settings: Settings) -> list[Report]:
    """How old the signed states are that the lock was made from."""
    from kartifacts.fetch.sync import age
    from kartifacts.publish.lockfile import read_lock

    synced = read_lock(settings.lock).synced if settings.lock is not None else []
    ages = [(each, age(each)) for each in synced]
    return [{**msgspec.to_builtins(each), "age": found.text, "sound": found.sound} for each, found in ages]


def _counted(
    fetcher: Fetcher, here: Holdings, selection: Selection, bundle: Bundle, pin: Pin, unread: list[Unread]
) -> tuple[int | None, int]:
    """How many kernels of a bundle are selected, or None if that cannot be told, and how many of them are not here."""
    if not (selection.words or selection.paths or fetcher.sources):
        listed = listed_of(bundle, pin, unread)
        return (None, 0) if listed is None else (len(listed), len(here.lacking(listed)))
    entries = entries_of(bundle, pin, unread)
    if entries is None:
        return None, 0
    kept = selection.of(bundle, entries)
    return len(kept), len(_lacking(fetcher, here, bundle, kept))


def _lacking(fetcher: Fetcher, here: Holdings, bundle: Bundle, entries: Sequence[KernelEntry]) -> list[KernelEntry]:
    """The entries that would have to be fetched."""
    lacking = here.lacking(entries)
    return [entry for entry in lacking if fetcher.place(bundle, entry) is None] if fetcher.sources else lacking


def _problem(unread: Unread) -> str:
    """Why something is not known, in a line."""
    kind = "cannot be used" if isinstance(unread.error, VerificationError) else _NOT_HERE
    detail = f": {unread.error.message.partition(chr(10))[0]}" if isinstance(unread.error, VerificationError) else ""
    return f"{unread.what} {kind}{detail}"


def listing(settings: Settings, selection: Selection) -> Report:
    """Every pinned kernel whose table is on this machine, and the tables that are not."""
    registry = pinned_registry(settings)
    fetcher = registry.local_fetcher()
    here = fetcher.store.holdings()
    unread: list[Unread] = []

    def place(bundle: Bundle, entry: KernelEntry) -> str | None:
        if not fetcher.sources:
            return here.place(entry)
        found = fetcher.place(bundle, entry)
        return None if found is None else str(found)

    chosen = list(choose(registry, selection, unread, local=True))
    if not unread:
        selection.check(chosen)
    rows = [
        {
            "uri": entry.uri,
            "library": pin.library,
            "version": pin.version,
            "arch": bundle.descriptor.note("arch"),
            "size": entry.size,
            "sha256": entry.sha256,
            "place": place(bundle, entry),
        }
        for pin, bundle, entries in chosen
        for entry in entries
    ]
    return {"kernels": rows, "unknown": [_problem(each) for each in unread]}


def verify(settings: Settings, repository: Path | None, selection: Selection, demand: Demand | None = None) -> Report:
    """Hash everything in a repository, or in the store, where selected kernels that are missing count too.

    Args:
        demand: who must have signed the releases of a repository that is sound.
    """
    demand = demand or Demand()
    demand.check(repository)
    if repository is not None:
        from kartifacts.publish.verify import verify_repository

        with bar(settings, "verifying", "B") as progress:
            found = verify_repository(repository, library=selection.library, deep=True, progress=progress)
        lacking = [] if found.faults else list(selection.in_vain(_held(repository, found.pins)))
        return {
            "place": str(repository),
            "checked": len(found.blobs) + found.kernels,
            "damaged": [str(fault) for fault in found.faults if not fault.missing],
            "missing": [*(str(fault) for fault in found.faults if fault.missing), *lacking],
            "proved": [] if found.faults else prove(settings, repository, selection.library, demand),
        }
    registry = Registry(settings)
    if selection.library is not None:
        pins_of(registry, selection)  # a misspelt one ends here, before anything is moved away
    fetcher = registry.local_fetcher()
    report = fetcher.store.verify()
    damaged = [f"{damage.path}: {damage.reason}" for damage in report.damaged]
    missing: list[str] = []
    unread: list[Unread] = []
    if registry.lock.releases:
        here = fetcher.store.holdings()
        chosen = list(choose(registry, selection, unread, local=True))
        for _, bundle, entries in chosen:
            if fetcher.sources:  # what lies in directories and wheels is looked at too
                deque(map(fetcher.find, entries), maxlen=0)
            missing += [
                f"{entry.uri} of {bundle.name}"
                for entry in _lacking(fetcher, here, bundle, entries)
                if entry.sha256 not in fetcher.wrong_in_place
            ]
        damaged += [error.message for error in fetcher.wrong_in_place.values()]
        if not unread:
            missing += selection.in_vain(chosen)
    for each in unread:
        if isinstance(each.error, VerificationError):
            damaged.append(_problem(each))
        else:
            missing.append(each.what)
    return {
        "place": str(settings.store),
        "checked": report.entries,
        "damaged": damaged,
        "missing": missing,
        "proved": [],
    }


class _Held(NamedTuple):
    """A bundle of a repository."""

    descriptor: Descriptor


def _held(repository: Path, pins: Sequence[Pin]) -> list[tuple[Pin, _Held, list[KernelEntry]]]:
    """What a repository that was found sound holds."""
    from kartifacts.publish.repository import Repository

    shelf = Repository(repository)
    return [
        (pin, _Held(descriptor), shelf.table(shelf.bundle(descriptor), "a kernel table").kernels)
        for pin in pins
        for descriptor in shelf.release(pin).manifests
    ]


def gc(
    settings: Settings, *, keep_locks: Sequence[Path], max_bytes: int | None, unused_for: float, dry_run: bool
) -> Report:
    """Remove from the store what neither the lock nor one of `keep_locks` reaches."""
    from kartifacts.publish.lockfile import read_lock

    registry = pinned_registry(settings)
    if settings.lock is None:  # the pins of an installed wheel say nothing of what the store is for
        raise ConfigError(
            "no lock says what stays, so nothing was removed", hint="set KARTIFACTS_LOCK to the lock of this project"
        )
    pins = [*registry.lock.releases, *(pin for path in keep_locks for pin in read_lock(path).releases)]
    keep: set[str] = set()
    for pin in {pin.sha256: pin for pin in pins}.values():
        keep.add(parse_digest(pin.sha256))
        try:
            for bundle in registry.fetcher().bundles(pin):  # metadata that is not here is fetched, to be sure
                keep.add(bundle.descriptor.sha256)
                keep.add(bundle.manifest.config.sha256)
                keep.update(entry.sha256[-64:] for entry in bundle.table.kernels)  # the hex digits, without `sha256:`
                bundle.forget()
        except KartifactsError as error:
            raise StoreError(
                f"nothing was removed: which kernels {pin.library} {pin.version} pins cannot be read: {error.message}",
                hint="fetch it first, or take the release out of the lock if its kernels may go",
            ) from error
    report = registry.local_fetcher().store.gc(keep, max_bytes=max_bytes, unused_for=unused_for, dry_run=dry_run)
    return {
        "removed": list(report.removed),
        "bytes": report.freed,
        "kept": report.kept,
        "kept_bytes": report.kept_bytes,
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
