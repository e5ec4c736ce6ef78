"""The command that keeps what is public from expiring: `timestamp refresh`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.keys import CHOICES, keys_option, passphrase_option, secret_of, single_writer_option, views_shown


def _soon(row: dict[str, Any]) -> str:
    """What expires, and what to do; targets and libraries are the same for both views."""
    role = row["role"]
    if role == "root":
        return (
            f"{role} of the view {row['view']} expires {row['expires']}: `kartifacts keys renew`, then `keys publish`"
        )
    if role == "targets":
        return f"{role} expires {row['expires']}: `kartifacts keys renew`, then `keys publish`"
    return f"the library {role} expires {row['expires']}: who holds its keys runs `kartifacts timestamp refresh`"


@click.group("timestamp")
def timestamp_command() -> None:
    """Keep what is public from expiring."""


@timestamp_command.command("refresh")
@click.argument("bucket")
@keys_option
@click.option(
    "--view",
    type=click.Choice(list(CHOICES)),
    default=None,
    help="Default: those whose timestamp key is in the keyring.",
)
@click.option(
    "--library",
    "libraries",
    multiple=True,
    help="Sign the role of this library anew too, however old it is; may be repeated.  Default: those in the last "
    "quarter of their life whose keys are in the keyring.",
)
@click.option(
    "--clock-is-right", is_flag=True, help="Sign though what is public was signed later than now, by a wrong clock."
)
@single_writer_option
@passphrase_option
@json_option
def refresh_command(
    bucket: str,
    keyring: Path,
    view: str | None,
    libraries: tuple[str, ...],
    clock_is_right: bool,
    single_writer: bool,
    passphrase_file: Path | None,
    as_json: bool,
) -> None:
    """Sign the timestamp of BUCKET anew, and a snapshot or a library's role that grows old; to be run daily.

    Warns if something that people renew expires within 60 days, or has expired; fails only if it could not sign.
    """
    from kartifacts.cli.flows import keys as flow

    report = flow.refresh_timestamp(
        bucket,
        keyring,
        CHOICES[view] if view else (),
        config.read(),
        libraries=libraries,
        clock_is_right=clock_is_right,
        single_writer=single_writer,
        secret=secret_of(passphrase_file),
    )
    for warning in dict.fromkeys(_soon(row) for row in report["soon"]):
        click.echo(f"warning: {warning}", err=True)
    lines = [*views_shown(report), *(f"{row['expires']} {row['view']} {row['role']}" for row in report["expires"])]
    emit(as_json, report, "\n".join(lines))
