"""The command of readers who trust a publisher's keys: sync."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import click
import msgspec

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.durations import Day
from kartifacts.errors import ConfigError

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("sync")
@click.option("--root", type=_FILE, help="The publisher's root.json; default: root.json beside config.toml.")
@click.option("--library", "libraries", multiple=True, help="Only this library; may be repeated.")
@click.option("--release-version", default=None, help="Pin this version instead of the newest.")
@click.option("--channel", default=None, help="Pin the newest version of this channel.")
@click.option(
    "--lock", type=_FILE, help="The lock to write; default: KARTIFACTS_LOCK, else the one beside config.toml."
)
@click.option(
    "--accept-expired-until",
    "until",
    type=Day(),
    metavar="DATE",
    help="Where no mirror has fresh metadata, take what is expired, up to this day; all else is checked as ever.",
)
@click.option("--reason", default="", metavar="TEXT", help="Why; the lock keeps it.")
@json_option
def sync_command(
    root: Path | None,
    libraries: tuple[str, ...],
    release_version: str | None,
    channel: str | None,
    lock: Path | None,
    until: date | None,
    reason: str,
    as_json: bool,
) -> None:
    """Verify what the mirrors have released, by the publisher's signatures, and pin it in the lock.

    Mirrors are asked in their order; one with wrong, old or expired metadata is complained about and passed over.  The
    lock is written only when all has been verified, and never made from an older state than before.
    """
    from kartifacts.fetch.sync import Exemption, Wanted, age, sync
    from kartifacts.trust.client_imports import import_verifiers

    if reason and until is None:
        raise ConfigError(
            "--reason says why expired metadata is accepted, and none is", hint="--accept-expired-until DATE"
        )
    import_verifiers()
    done = sync(
        config.read(),
        root=root,
        lock=lock,
        wanted=Wanted(libraries, release_version, channel),
        exemption=None if until is None else Exemption(until, reason),
    )
    told = age(done.synced).text
    report = {"lock": str(done.path), "pins": list(done.pins), "synced": done.synced, "age": told}
    lines = [f"pinned {pin.library} {pin.version}: sha256:{pin.sha256}" for pin in done.pins]
    emit(as_json, msgspec.to_builtins(report), "\n".join([*lines, f"{done.path}: {told}"]))
