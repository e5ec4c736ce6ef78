"""The cluster admin's flows for mirrors: pull, verify, export, list, import."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kartifacts.cli.flows.shared import Report, bar, native
from kartifacts.config import Settings, read
from kartifacts.errors import ConfigError
from kartifacts.files.directories import directory_in
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.pull import Trust
from kartifacts.model.arch import parse_archs
from kartifacts.publish.buckets import open_bucket

if TYPE_CHECKING:
    from kartifacts.mirror.contents import Contents
    from kartifacts.mirror.promote import Promotion
    from kartifacts.sources import Source


def trust_of(roots: Sequence[Path], lock: Path | None, settings: Settings | None = None) -> Trust:
    """Whom to believe, as the command line says; with `settings` the root of this machine if it says nothing."""
    from kartifacts.publish.lockfile import read_lock
    from kartifacts.trust.roots import read_root

    if not roots and lock is None and settings is not None and settings.root is not None:
        roots = [settings.root]
    return Trust(tuple(map(read_root, roots)), None if lock is None else read_lock(lock))


def filter_of(libraries: Sequence[str], versions: Sequence[str], channels: Sequence[str], archs: str | None) -> Filter:
    """What is to be mirrored; archs become canonical, so that `native` means this machine elsewhere too."""
    devices = () if archs is None else parse_archs(archs, native=native(archs))
    return Filter(
        libraries=tuple(sorted(set(libraries))),
        versions=tuple(sorted(set(versions))),
        channels=tuple(sorted(set(channels))),
        archs=tuple(map(str, devices)),
    )


def pull(
    source: str,
    bucket: str,
    trust: Trust,
    chosen: Filter,
    settings: Settings,
    *,
    refilter: bool = False,
    single_writer: bool = False,
) -> Report:
    """Bring a mirror to the state of `source`."""
    from kartifacts.mirror.pull import pull

    target = open_bucket(bucket, settings, single_writer=single_writer)
    with bar(settings, "mirroring", "B") as progress:
        contents, done = pull(
            _open(source, settings), target, trust, chosen, settings, refilter=refilter, progress=progress
        )
    return _brought(target.name, contents, done)


def verify(bucket: str, trust: Trust, chosen: Filter, settings: Settings, *, max_age: timedelta | None) -> Report:
    """Prove a mirror, or say what is wrong with it."""
    from kartifacts.mirror.verify import verify

    mirror, now = open_bucket(bucket, settings), datetime.now(timezone.utc)
    with bar(settings, "verifying", "B") as progress:
        found = verify(mirror, trust, None if chosen == Filter() else chosen, settings, progress=progress)
    return {
        "mirror": mirror.name,
        "pins": [msgspec.to_builtins(release.pin) for release in found.contents.releases],
        "filter": str(found.chosen),
        "checked": found.checked,
        "damaged": [str(fault) for fault in found.faults if not fault.missing],
        "missing": [str(fault) for fault in found.faults if fault.missing],
        "stale": [text for each in found.freshness if (text := each.stale(now, max_age))],
        "views": [
            {
                "view": each.view,
                "timestamp": each.timestamp,
                "snapshot": each.snapshot,
                "age_days": round(each.age / timedelta(days=1), 2),
                "expires": each.expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            for each in found.freshness
        ],
    }


def export(
    source: str, target: Path, trust: Trust, chosen: Filter, settings: Settings, *, since: Path | None
) -> Report:
    """Write what the other side of an air gap lacks."""
    from kartifacts.mirror.carry import export, read_listing

    held = None if since is None else read_listing(since)
    with bar(settings, "exporting", "B") as progress:
        done = export(_open(source, settings), target, trust, chosen, settings, since=held, progress=progress)
    return {
        "target": str(target),
        "files": done.files,
        "bytes": done.bytes,
        "pins": [msgspec.to_builtins(release.pin) for release in done.contents.releases],
    }


def listing(bucket: str, settings: Settings) -> str:
    """What a mirror holds."""
    from kartifacts.mirror.carry import listing

    return listing(open_bucket(bucket, settings))


def import_(
    archive: Path,
    bucket: str,
    trust: Trust,
    chosen: Filter,
    settings: Settings,
    *,
    refilter: bool = False,
    single_writer: bool = False,
) -> Report:
    """Bring a mirror to the state that was carried here."""
    from kartifacts.mirror.carry import import_

    target = open_bucket(bucket, settings, single_writer=single_writer)
    with bar(settings, "importing", "B") as progress:
        contents, done = import_(
            archive,
            target,
            trust,
            settings,
            chosen=None if chosen == Filter() else chosen,
            refilter=refilter,
            progress=progress,
        )
    return _brought(target.name, contents, done)


def _open(text: str, settings: Settings) -> Source:
    """The source that `text` names: a directory, or a mirror as in KARTIFACTS_MIRRORS."""
    from kartifacts.sources import open_mirror
    from kartifacts.sources.directory import DirectorySource

    if not text:
        raise ConfigError("no source was given: expected a directory, or a mirror as in KARTIFACTS_MIRRORS, got ''")
    path = directory_in(text) or (Path(text) if ":" not in text else None)
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"there is no directory {str(path)!r} to mirror")
        return DirectorySource(path, mirror=True)
    mirrors = read({}, {"mirrors": text}).mirrors
    if len(mirrors) != 1:
        raise ConfigError(f"one source is mirrored at a time, got {len(mirrors)}")
    return open_mirror(mirrors[0], settings)


def _brought(name: str, contents: Contents, done: Promotion) -> Report:
    return {
        "mirror": name,
        "pins": [msgspec.to_builtins(release.pin) for release in contents.releases],
        "blobs": len(contents.blobs),
        "bytes": contents.size,
        "sent": done.blobs,
        "sent_bytes": done.bytes,
        "metadata": done.metadata,
        "changed": done.changed,
    }
