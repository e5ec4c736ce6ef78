"""The cluster admin's and runtime user's commands: fetch, status, verify, list, gc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.places import Repository
from kartifacts.cli.sizes import Size
from kartifacts.errors import VerificationError

if TYPE_CHECKING:
    from kartifacts.cli.flows import Selection

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
_select_options = (
    click.option("--library", default=None, help="Only this library."),
    click.option("--ops", default="", help="Only these families or ops, separated by commas."),
    click.option(
        "--archs",
        default="",
        help="Only what these archs can run, e.g. '9.0a cpu:x86-64-v3'; default: KARTIFACTS_ARCHS, else all.",
    ),
)


def _selecting(command: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(_select_options):
        command = option(command)
    return command


def _selection(
    settings: config.Settings, library: str | None, ops: str, archs: str, paths: tuple[str, ...] = ()
) -> Selection:
    from kartifacts.cli import flows

    return flows.Selection(library, ops, archs or settings.archs, paths)


@click.command("fetch")
@_selecting
@click.option("--path", "paths", multiple=True, help="Only this uri or imported path; may be repeated.")
@click.option("--out", type=_DIRECTORY, help="Also write the files under their paths into this directory.")
@json_option
def fetch_command(
    library: str | None, ops: str, archs: str, paths: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Fetch and verify what the lock pins into the store; all of it, or an error that names what is missing."""
    from kartifacts.cli import flows

    settings = config.read()
    report = flows.fetch(settings, _selection(settings, library, ops, archs, paths), out=out)
    text = (
        f"{report['kernels']} kernels present: {report['fetched']} fetched, {report['present']} were there; "
        f"{report['bytes']} bytes in {report['requests']} requests"
    )
    emit(as_json, report, text)


@click.command("status")
@_selecting
@json_option
def status_command(library: str | None, ops: str, archs: str, as_json: bool) -> None:
    """Say which pinned kernels are in the store or a local directory; opens no socket.

    Ends with 0 whatever is missing; `complete` in --json says whether all is here, and `verify` fails where it is not.
    """
    from kartifacts.cli import flows

    settings = config.read()
    report = flows.status(settings, _selection(settings, library, ops, archs))
    lines = [
        f"{row['library']} {row['version']}"
        + (f" {row['family']} for {row['arch']}" if row["family"] else "")
        + (f": {row['present']} of {row['kernels']} present" if not row["problem"] else f": unknown, {row['problem']}")
        for row in report["bundles"]
    ]
    lines += [report["advice"]] if report["advice"] else []
    lines += [f"lock: {each['age']}" for each in report["synced"]]
    lines.append(f"store {report['store']}: {report['entries']} entries, {report['bytes']} bytes")
    emit(as_json, report, "\n".join(lines))


@click.command("list")
@_selecting
@json_option
def list_command(library: str | None, ops: str, archs: str, as_json: bool) -> None:
    """List the pinned kernels whose tables are here; opens no socket."""
    from kartifacts.cli import flows

    settings = config.read()
    report = flows.listing(settings, _selection(settings, library, ops, archs))
    lines = [
        f"{row['uri']}  {row['arch']}  {row['size']} bytes  {row['place'] or 'missing'}" for row in report["kernels"]
    ]
    lines += [f"unknown: {problem}" for problem in report["unknown"]]
    emit(as_json, report, "\n".join(lines) or "no pinned kernel is listed here")


@click.command("verify")
@click.argument("repository", required=False, type=Repository())
@_selecting
@click.option("--provenance", is_flag=True, help="Every bundle must have a signed statement of how it was built.")
@click.option("--root", type=_FILE, help="Root of trust whose metadata names the keys; default: the configured one.")
@click.option("--key", "keys", type=_FILE, multiple=True, help="Public key (PEM) that may have signed; repeatable.")
@click.option("--builder-id", metavar="URI", help="Who must have built the bundles.")
@click.option("--sigstore-bundle", type=_FILE, multiple=True, help="Sigstore bundle of a release; repeatable.")
@click.option("--identity", default="", help="Who must have signed that bundle.")
@click.option("--issuer", default="", metavar="URL", help="Who must have vouched for the identity.")
@click.option("--trusted-root", type=_FILE, help="trusted_root.json of the Sigstore; none is fetched.")
@json_option
def verify_command(
    repository: Path | None,
    library: str | None,
    ops: str,
    archs: str,
    provenance: bool,
    root: Path | None,
    keys: tuple[Path, ...],
    builder_id: str | None,
    sigstore_bundle: tuple[Path, ...],
    identity: str,
    issuer: str,
    trusted_root: Path | None,
    as_json: bool,
) -> None:
    """Hash everything in the store, or in a REPOSITORY directory, and say what is damaged or missing; no network.

    Every entry of the store is read again, and so are local directories and installed wheels; what is damaged in the
    store is moved into its quarantine.  The options say which pinned kernels have to be there.  A REPOSITORY is read
    whole, and has to hold kernels for every op and arch that is named.
    """
    from kartifacts.cli import flows

    settings = config.read()
    selection = _selection(settings, library, ops, archs)
    if repository is not None:  # whose archs are not those of this machine's settings
        selection = replace(selection, archs=archs)
    demand = flows.Demand(provenance, root, keys, builder_id, sigstore_bundle, identity, issuer, trusted_root)
    report = flows.verify(settings, repository, selection, demand)
    lines = [*(f"damaged: {name}" for name in report["damaged"]), *(f"missing: {name}" for name in report["missing"])]
    lines.append(f"{report['place']}: {report['checked']} objects checked, {len(lines)} faults")
    lines += [
        f"{row['library']} {row['version']} {row['bundle']}: built by {row['builder']}"
        if "bundle" in row
        else f"{row['library']} {row['version']}: signed by {row['identity']} ({row['issuer']})"
        for row in report["proved"]
    ]
    emit(as_json, report, "\n".join(lines))
    if report["damaged"] or report["missing"]:
        found = f"{len(report['damaged'])} damaged and {len(report['missing'])} missing"
        click.echo(f"error: {found} in {report['place']}: {(report['damaged'] + report['missing'])[0]}", err=True)
        raise SystemExit(VerificationError.exit_code)


@click.command("gc")
@click.option("--max-bytes", type=Size(), default=None, help="Stop once the store is no larger than this, e.g. 10GiB.")
@click.option(
    "--unused-for", type=click.FloatRange(min=0), default=0.0, metavar="DAYS", help="Leave what was used since."
)
@click.option(
    "--keep-lock",
    "keep_locks",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Another lock whose kernels stay too, for a store that projects share; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc_command(
    max_bytes: int | None, unused_for: float, keep_locks: tuple[Path, ...], dry_run: bool, as_json: bool
) -> None:
    """Remove from the store what no pin reaches, the longest unused first, and what killed processes left."""
    from kartifacts.cli import flows

    report = flows.gc(
        config.read(), keep_locks=keep_locks, max_bytes=max_bytes, unused_for=unused_for * 86_400, dry_run=dry_run
    )
    verb = "would remove" if dry_run else "removed"
    emit(as_json, report, f"{verb} {len(report['removed'])} entries, {report['bytes']} bytes; kept {report['kept']}")
