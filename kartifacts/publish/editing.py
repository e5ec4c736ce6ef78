"""Decides what a release, a promotion or a retirement changes in the roles of libraries; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from kartifacts.errors import ConfigError, PublishConflict
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import Pin
from kartifacts.publish.commit import Change, Edit
from kartifacts.publish.lockfile import one_version_each
from kartifacts.trust.released import Released


def releasing(
    pins: Sequence[Pin],
    channels: Sequence[str] = (),
    provenance: Mapping[tuple[str, str], tuple[Digest, int]] | None = None,
) -> dict[str, Change]:
    """List releases, and lead channels to them; by library.

    Raises:
        ConfigError: a channel would lead to two versions of a library.
    """
    for channel in channels:
        check_name(channel, "channel")
    if channels:
        one_version_each(pins)
    today = datetime.now(timezone.utc).date().isoformat()
    statements = provenance or {}
    wanted: dict[str, list[Released]] = {}
    for pin in pins:
        statement = statements.get((pin.library, pin.version))
        wanted.setdefault(pin.library, []).append(Released(pin, tuple(channels), today, statement))
    return {library: _releasing(releases, channels) for library, releases in wanted.items()}


def _releasing(wanted: Sequence[Released], channels: Sequence[str]) -> Change:
    def change(current: Sequence[Released]) -> Edit:
        held = {release.pin.version: release for release in current}
        add = []
        for release in wanted:
            before = held.get(release.pin.version)
            if before is not None and before.pin != release.pin:
                raise PublishConflict(
                    f"{before.pin.library} {before.pin.version} is released with another content, "
                    f"sha256:{before.pin.sha256}; nothing was changed",
                    hint="a version never changes: publish these bundles under another one, with --release-version",
                )
            if before is not None and before.provenance is not None:
                release = release._replace(provenance=None)  # what was signed about it first stays
            if before is None or release.provenance or not {*release.channels} <= {*before.channels}:
                add.append(release)
        versions = {release.pin.version for release in wanted}
        return Edit(add=tuple(add), channels=_without(current, channels, versions))

    return change


def promoting(library: str, version: str, channel: str, *, also: bool = False) -> dict[str, Change]:
    """Lead a channel to a release; `also`: as well as to those that it leads to already."""
    check_name(channel, "channel")

    def change(current: Sequence[Released]) -> Edit:
        release = _release(current, library, version)
        channels = {} if also else _without(current, [channel], {version})
        if channel not in release.channels:
            channels[version] = [*release.channels, channel]
        return Edit(channels=channels)

    return {library: change}


def retiring(library: str, version: str) -> dict[str, Change]:
    """List a release no more; nothing changes if it is not listed, so that who was cut off can do it again."""

    def change(current: Sequence[Released]) -> Edit:
        return Edit(remove=[release.pin.version for release in current if release.pin.version == version])

    return {library: change}


def _without(current: Sequence[Released], channels: Sequence[str], but: set[str]) -> dict[str, list[str]]:
    """The channels of all other releases that are in one of `channels`, less these."""
    return {
        release.pin.version: [channel for channel in release.channels if channel not in channels]
        for release in current
        if release.pin.version not in but and {*release.channels} & {*channels}
    }


def _release(current: Sequence[Released], library: str, version: str) -> Released:
    for release in current:
        if release.pin.version == version:
            return release
    there = ", ".join(release.pin.version for release in current) or "none"
    raise ConfigError(f"{library} {version} is not released here; there are: {there}")
