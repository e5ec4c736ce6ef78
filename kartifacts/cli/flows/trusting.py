"""The flow of readers who trust a publisher's keys: sync."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from kartifacts.cli.flows.shared import Report
from kartifacts.config import Settings
from kartifacts.fetch.sync import Exemption, Wanted, age
from kartifacts.fetch.sync import sync as synchronise


def sync(
    settings: Settings,
    *,
    root: Path | None,
    lock: Path | None,
    libraries: Sequence[str],
    version: str | None,
    channel: str | None,
    accepted: tuple[date, str] | None,
) -> Report:
    """Write a verified lock; `accepted` is the last day on which expired metadata will do, and why."""
    done = synchronise(
        settings,
        root=root,
        lock=lock,
        wanted=Wanted(tuple(libraries), version, channel),
        exemption=None if accepted is None else Exemption(*accepted),
    )
    return {
        "lock": str(done.path),
        "pins": [msgspec.to_builtins(pin) for pin in done.pins],
        "synced": msgspec.to_builtins(done.synced),
        "age": age(done.synced).text,
    }
