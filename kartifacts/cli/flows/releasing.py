"""What becomes of releases that are public and signed: channels lead to them, they are retired, their bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kartifacts.cli.flows.keys import open_keyring
from kartifacts.cli.flows.shared import Report
from kartifacts.config import Settings
from kartifacts.model.layout import View
from kartifacts.model.manifest import Synced

if TYPE_CHECKING:
    from kartifacts.publish.commit import Change, Edit
    from kartifacts.trust.keysigner import Secret
    from kartifacts.trust.released import Released


def promote(
    bucket: str,
    library: str,
    version: str,
    channel: str,
    *,
    keys: Path,
    secret: Secret | None,
    also: bool,
    single_writer: bool,
    settings: Settings,
) -> Report:
    """Lead a channel to a release, and unless `also` away from others."""
    from kartifacts.publish.editing import promoting

    return _changed(bucket, promoting(library, version, channel, also=also), keys, secret, single_writer, settings)


def retire(
    bucket: str,
    library: str,
    version: str,
    *,
    keys: Path,
    secret: Secret | None,
    single_writer: bool,
    settings: Settings,
) -> Report:
    """List a release no more, and say whether it was listed."""
    from kartifacts.publish.editing import retiring

    listed = False
    retire = retiring(library, version)[library]

    def change(current: Sequence[Released]) -> Edit:
        nonlocal listed
        listed = any(release.pin.version == version for release in current)
        return retire(current)

    return {**_changed(bucket, {library: change}, keys, secret, single_writer, settings), "listed": listed}


def _changed(
    bucket: str,
    changes: Mapping[str, Change],
    keys: Path,
    secret: Secret | None,
    single_writer: bool,
    settings: Settings,
) -> Report:
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.commit import commit
    from kartifacts.publish.continuity import check_begun

    keyring = open_keyring(keys, secret)
    opened = open_bucket(bucket, settings, single_writer=single_writer)
    check_begun(opened)
    opened.preflight()
    return {"bucket": opened.name, "views": _seen(commit(opened, keyring, changes))}


def _seen(views: Mapping[View, Synced]) -> dict[str, Report]:
    return {view: msgspec.to_builtins(seen) for view, seen in views.items()}


def retain(
    bucket: str,
    *,
    keys: Path,
    grace: float,
    keep_metadata: float,
    dry_run: bool,
    single_writer: bool,
    settings: Settings,
) -> Report:
    """Delete what nothing public reaches since `grace` seconds, and metadata that is older than `keep_metadata`."""
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.continuity import check_begun
    from kartifacts.publish.retention import retain

    opened = open_bucket(bucket, settings, single_writer=single_writer)
    check_begun(opened)
    if not dry_run:
        opened.preflight()
    done = retain(
        opened,
        open_keyring(keys),
        grace=timedelta(seconds=grace),
        keep_metadata=timedelta(seconds=keep_metadata),
        dry_run=dry_run,
    )
    return {
        "bucket": opened.name,
        "dry_run": dry_run,
        "reached": done.reached,
        "waiting": done.waiting,
        "deleted": [entry.path for entry in done.deleted],
        "bytes": sum(entry.size for entry in done.deleted),
        "left": done.left,
    }
