"""The commands for releases that are public and signed: promote, retire, retain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.durations import Duration
from kartifacts.cli.keys import keys_option, passphrase_option, secret_of, single_writer_option


@click.command("promote")
@click.argument("bucket")
@click.argument("library")
@click.argument("version")
@click.option("--channel", required=True, help="Channel that leads to this release from now on, e.g. stable.")
@click.option("--also", is_flag=True, help="It goes on leading to other versions too.")
@keys_option
@passphrase_option
@single_writer_option
@json_option
def promote_command(
    bucket: str,
    library: str,
    version: str,
    channel: str,
    also: bool,
    keyring: Path,
    passphrase_file: Path | None,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Lead a channel to the release VERSION of LIBRARY, which is in BUCKET already."""
    from kartifacts.cli.flows import releasing

    report = releasing.promote(
        bucket,
        library,
        version,
        channel,
        keys=keyring,
        secret=secret_of(passphrase_file),
        also=also,
        single_writer=single_writer,
        settings=config.read(),
    )
    emit(as_json, report, "\n".join([f"{channel} leads to {library} {version}", *_views(report)]))


@click.command("retire")
@click.argument("bucket")
@click.argument("library")
@click.argument("version")
@keys_option
@passphrase_option
@single_writer_option
@json_option
def retire_command(
    bucket: str,
    library: str,
    version: str,
    keyring: Path,
    passphrase_file: Path | None,
    single_writer: bool,
    as_json: bool,
) -> None:
    """List the release VERSION of LIBRARY in BUCKET no more; `kartifacts retain` deletes its bytes later."""
    from kartifacts.cli.flows import releasing

    report = releasing.retire(
        bucket,
        library,
        version,
        keys=keyring,
        secret=secret_of(passphrase_file),
        single_writer=single_writer,
        settings=config.read(),
    )
    said = f"retired {library} {version}" if report["listed"] else f"{library} {version} is not listed"
    emit(as_json, report, "\n".join([said, *_views(report)]))


@click.command("retain")
@click.argument("bucket")
@keys_option
@click.option(
    "--grace", type=Duration(), default="30d", show_default=True, help="How long nothing must have reached an object."
)
@click.option(
    "--keep-metadata",
    type=Duration(),
    default="90d",
    show_default=True,
    help="Keep versions of signed metadata that are younger.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@single_writer_option
@json_option
def retain_command(
    bucket: str,
    keyring: Path,
    grace: float,
    keep_metadata: float,
    dry_run: bool,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Delete from BUCKET what nothing public has reached for a while; run it from time to time."""
    from kartifacts.cli.flows import releasing

    report = releasing.retain(
        bucket,
        keys=keyring,
        grace=grace,
        keep_metadata=keep_metadata,
        dry_run=dry_run,
        single_writer=single_writer,
        settings=config.read(),
    )
    verb = "would delete" if dry_run else "deleted"
    lines = [
        *(f"{verb} {path}" for path in report["deleted"]),
        f"{verb} {len(report['deleted'])} objects, {report['bytes']} bytes; {report['waiting']} wait for the end of "
        f"their grace, {report['reached']} stay"
        + (f"; {report['left']} are left for another run" * (report["left"] > 0)),
    ]
    emit(as_json, report, "\n".join(lines))


def _views(report: dict[str, Any]) -> list[str]:
    return [
        f"verified as a new reader: {view}: timestamp {seen['timestamp']}, good until {seen['expires']}"
        for view, seen in report["views"].items()
    ]
