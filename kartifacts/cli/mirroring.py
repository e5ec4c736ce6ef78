"""The cluster admin's commands for mirrors: pull, verify, and export, list, import to cross an air gap."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.keys import single_writer_option
from kartifacts.errors import ExpiredMetadata, VerificationError


class _Place(click.Path):
    """A path; no name at all is none, though Python takes it for the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("a path is expected, got ''", param, ctx)
        return super().convert(value, param, ctx)


_FILE = _Place(dir_okay=False, path_type=Path)
_ANY = _Place(path_type=Path)


class _Age(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A span of time such as 36h or 7d."""

    name = "age"
    _UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}  # noqa: RUF012

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        matched = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?([mhdw])", str(value).strip().lower())
        if matched is None:
            self.fail(f"{str(value)[:50]!r} is not a span of time such as 36h, 7d or 2w", param, ctx)
        return timedelta(seconds=float(matched[1]) * self._UNITS[matched[2]])


_TRUSTING = (
    click.option(
        "--root",
        "roots",
        multiple=True,
        type=_FILE,
        help="Root of trust; once for each view (online, airgap) that the mirror is to have.",
    ),
    click.option("--lock", type=_FILE, help="Instead of roots: a kartifacts.lock, whose pins are the trust."),
)
_FILTERING = (
    click.option("--library", "libraries", multiple=True, help="Only this library; may be repeated."),
    click.option("--release-version", "versions", multiple=True, help="Only this version; may be repeated."),
    click.option("--channel", "channels", multiple=True, help="Only releases in this channel; may be repeated."),
    click.option("--archs", default=None, help="Only bundles that these archs can run, e.g. '9.0a cpu:x86-64-v3'."),
)


def _trusting(command: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(_TRUSTING):
        command = option(command)
    return command


def _filtering(command: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(_FILTERING):
        command = option(command)
    return command


_change_filter = click.option(
    "--change-filter", is_flag=True, help="BUCKET may hold less from now on than mirror.json there says."
)
_threads = click.option("--threads", default=None, help="Parallel transfers; default: KARTIFACTS_DOWNLOAD_THREADS.")


@click.group("mirror")
def mirror_command() -> None:
    """Keep a copy of a repository that holds no keys; carry it across an air gap."""


@mirror_command.command("pull")
@click.argument("source")
@click.argument("bucket")
@_trusting
@_filtering
@_change_filter
@single_writer_option
@_threads
@json_option
def pull_command(
    source: str,
    bucket: str,
    roots: tuple[Path, ...],
    lock: Path | None,
    libraries: tuple[str, ...],
    versions: tuple[str, ...],
    channels: tuple[str, ...],
    archs: str | None,
    change_filter: bool,
    single_writer: bool,
    threads: str | None,
    as_json: bool,
) -> None:
    """Copy what SOURCE has released into BUCKET: all that is verified, byte for byte, the timestamp last.

    SOURCE is a directory, or as in KARTIFACTS_MIRRORS; BUCKET is as for `publish` (a directory, s3://...).  Running
    it again sends only what is missing.
    """
    from kartifacts.cli.flows import mirroring

    report = mirroring.pull(
        source,
        bucket,
        mirroring.trust_of(roots, lock),
        mirroring.filter_of(libraries, versions, channels, archs),
        config.read(overrides={"download_threads": threads}),
        refilter=change_filter,
        single_writer=single_writer,
    )
    emit(as_json, report, _brought(report))


@mirror_command.command("verify")
@click.argument("bucket")
@_trusting
@_filtering
@click.option("--max-age", type=_Age(), default=None, help="How long ago the metadata may have been signed, e.g. 7d.")
@_threads
@json_option
def verify_command(
    bucket: str,
    roots: tuple[Path, ...],
    lock: Path | None,
    libraries: tuple[str, ...],
    versions: tuple[str, ...],
    channels: tuple[str, ...],
    archs: str | None,
    max_age: timedelta | None,
    threads: str | None,
    as_json: bool,
) -> None:
    """Read all of the mirror BUCKET: signatures, age, and every byte of what was mirrored.

    Without a filter it looks for what mirror.json there says was mirrored; without --root and --lock it believes the
    root.json next to config.toml.
    """
    from kartifacts.cli.flows import mirroring

    settings = config.read(overrides={"download_threads": threads})
    report = mirroring.verify(
        bucket,
        mirroring.trust_of(roots, lock, settings),
        mirroring.filter_of(libraries, versions, channels, archs),
        settings,
        max_age=max_age,
    )
    faults = [*report["damaged"], *report["missing"], *report["stale"]]
    lines = [f"{kind}: {text}" for kind in ("damaged", "missing", "stale") for text in report[kind]]
    lines += [
        f"{view['view']}: timestamp {view['timestamp']}, snapshot {view['snapshot']}, "
        f"signed {view['age_days']} days ago, expires {view['expires']}"
        for view in report["views"]
    ]
    if report["filter"] != "everything":
        lines.append(f"{report['mirror']} was looked at for a part: {report['filter']}")
    lines.append(f"{report['mirror']}: {len(report['pins'])} releases, {report['checked']} files, {len(faults)} faults")
    emit(as_json, report, "\n".join(lines))
    if faults:
        click.echo(f"error: {report['mirror']}: {faults[0]}; {len(faults)} faults in all", err=True)
        wrong = report["damaged"] or report["missing"]
        raise SystemExit((VerificationError if wrong else ExpiredMetadata).exit_code)


@mirror_command.command("export")
@click.argument("source")
@click.argument("target", type=_ANY)
@_trusting
@click.option("--since", type=_FILE, help="What the other side holds, as `kartifacts mirror list` wrote it there.")
@_filtering
@json_option
def export_command(
    source: str,
    target: Path,
    roots: tuple[Path, ...],
    lock: Path | None,
    since: Path | None,
    libraries: tuple[str, ...],
    versions: tuple[str, ...],
    channels: tuple[str, ...],
    archs: str | None,
    as_json: bool,
) -> None:
    """Write what SOURCE has released into TARGET: one file if it ends with .tar, else a new directory."""
    from kartifacts.cli.flows import mirroring

    report = mirroring.export(
        source,
        target,
        mirroring.trust_of(roots, lock),
        mirroring.filter_of(libraries, versions, channels, archs),
        config.read(),
        since=since,
    )
    emit(as_json, report, f"{report['target']}: {report['files']} files, {report['bytes']} bytes; {_named(report)}")


@mirror_command.command("list")
@click.argument("bucket")
@json_option
def list_command(bucket: str, as_json: bool) -> None:
    """Say what the mirror BUCKET holds, size and path, for `mirror export --since` on the other side."""
    from kartifacts.cli.flows import mirroring

    text = mirroring.listing(bucket, config.read())
    _, *lines = text.splitlines()
    files = [{"path": path, "size": int(size)} for size, _, path in (line.partition(" ") for line in lines)]
    emit(as_json, {"mirror": bucket, "files": files}, text)


@mirror_command.command("import")
@click.argument("archive", type=_ANY)
@click.argument("bucket")
@_trusting
@_filtering
@_change_filter
@single_writer_option
@_threads
@json_option
def import_command(
    archive: Path,
    bucket: str,
    roots: tuple[Path, ...],
    lock: Path | None,
    libraries: tuple[str, ...],
    versions: tuple[str, ...],
    channels: tuple[str, ...],
    archs: str | None,
    change_filter: bool,
    single_writer: bool,
    threads: str | None,
    as_json: bool,
) -> None:
    """Bring the mirror BUCKET to the state that ARCHIVE (a file or directory of `mirror export`) carries.

    Nothing changes for readers unless all of it is verified; an archive that is older than the mirror is refused.
    Without a filter BUCKET holds what mirror.json there says, and everything if it is new: whatever the archive says
    of itself, it has to bring all of that.
    """
    from kartifacts.cli.flows import mirroring

    report = mirroring.import_(
        archive,
        bucket,
        mirroring.trust_of(roots, lock),
        mirroring.filter_of(libraries, versions, channels, archs),
        config.read(overrides={"download_threads": threads}),
        refilter=change_filter,
        single_writer=single_writer,
    )
    emit(as_json, report, _brought(report))


def _brought(report: dict[str, Any]) -> str:
    news = "readers see the new state" if report["changed"] else "readers see what they saw before"
    sent = f"{report['sent']} of {report['blobs']} blobs were not there yet, {report['sent_bytes']} bytes"
    return f"{report['mirror']}: {_named(report)}\n{sent}; {news}"


def _named(report: dict[str, Any]) -> str:
    return ", ".join(f"{pin['library']} {pin['version']}" for pin in report["pins"])
