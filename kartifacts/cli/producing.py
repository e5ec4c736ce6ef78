"""The release engineer's commands: build, import, publish, lock, wheel, index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.keys import passphrase_option, secret_of, single_writer_option
from kartifacts.cli.places import Repository, only_one
from kartifacts.cli.sizes import Size
from kartifacts.errors import ConfigError
from kartifacts.files.directories import check_place

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("build")
@click.option(
    "--archs", default=None, help="Arch list, e.g. 'cpu:x86-64-v3 8.0 9.0a 10.0f'; default: KARTIFACTS_ARCHS."
)
@click.option("--ops", default="", help="Families or ops, separated by commas; default: all.")
@click.option("--plan", type=_FILE, help="Build what this plan says, instead of --archs, --ops and --library.")
@click.option("--build", "name", default="", help="The build of the plan to do here; `kartifacts plan` lists them.")
@click.option("--shard", default=None, metavar="I/N", help="Do this part of the build, and hand it in at --out.")
@click.option(
    "--out", required=True, help="Repository directory to write; with --shard a directory or bucket where shards meet."
)
@click.option("--library", default="kartifacts", show_default=True, help="Library whose ops are built.")
@click.option("--release-version", default="", help="Version of the release; default: that of the library's package.")
@click.option("--since", type=Repository(), help="Repository whose releases lend what has not changed; default: --out.")
@click.option("--lock", type=_FILE, help="Pin the new release in this kartifacts.lock.")
@click.option(
    "--recipe",
    type=_FILE,
    help="builder.toml of this environment: other compilers than it pins are refused; default: that of the plan.",
)
@click.option("--report", "report_file", type=_FILE, help="Write all figures of the build into this file, as JSON.")
@click.option("--costs-out", type=_FILE, help="Write what each source took to compile, for a plan to divide work by.")
@json_option
@click.pass_context
def build_command(
    context: click.Context,
    archs: str | None,
    ops: str,
    plan: Path | None,
    name: str,
    shard: str | None,
    out: str,
    library: str,
    release_version: str,
    since: Path | None,
    lock: Path | None,
    recipe: Path | None,
    report_file: Path | None,
    costs_out: Path | None,
    as_json: bool,
) -> None:
    """Compile bundles for an explicit list of architectures into a repository directory.

    Every promised op × arch is built and checked, or nothing is written and what is missing is listed.
    With --plan, --build and --shard one of several machines does its part, and `kartifacts merge` makes the release.
    """
    from kartifacts.cli import flows

    _refuse_together(context, plan, shard)
    for option, file in (("--report", report_file), ("--costs-out", costs_out)):
        if file is not None:
            check_place(file, option, directory=False)
    settings = config.read(overrides={"archs": archs})
    if shard is not None:
        assert plan is not None
        report = flows.build_shard(settings, plan=plan, name=name, shard=shard, out=out, recipe=recipe)
        lines = _shard_lines(report)
    else:
        parameter = next(parameter for parameter in context.command.params if parameter.name == "out")
        to = Repository().convert(out, parameter, context)
        where = {"out": to, "version": release_version, "lock": lock, "since": since, "recipe": recipe}
        if plan is not None:
            report = flows.build_planned(settings, plan=plan, name=name, **where)
        elif not settings.archs:
            raise ConfigError(
                "no architectures given", hint="pass --archs 'cpu:x86-64-v3 9.0a', or set KARTIFACTS_ARCHS"
            )
        else:
            report = flows.build(settings, ops=ops, library=library, **where)
        lines = _build_lines(report)
    if report_file is not None:
        flows.write_report(report_file, report)
    if costs_out is not None:
        flows.write_costs(costs_out, settings, report.get("pin", report)["library"])
    emit(as_json, report, "\n".join(lines))


def _refuse_together(context: click.Context, plan: Path | None, shard: str | None) -> None:
    """Refuse options of which one would silently count for nothing."""
    given = {
        name
        for name in ("archs", "ops", "library", "name", "release_version", "since", "lock")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    against = {"--plan": given & {"archs", "ops", "library"}} if plan is not None else {}
    if shard is not None:
        against["--shard"] = given & {"release_version", "since", "lock"}  # they are for `merge`
        if plan is None or "name" not in given:
            raise ConfigError("--shard is a part of one build of a plan: pass --plan and --build too")
    elif plan is None and "name" in given:
        raise ConfigError("--build names a build of a plan: pass --plan too")
    for option, names in against.items():
        if names:
            others = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
            raise ConfigError(f"{others} cannot be given with {option}, which decides that")


def _build_lines(report: dict[str, Any]) -> list[str]:
    pin = report["pin"]
    return [
        f"jobs: {report['jobs']} ({report['jobs_reason']})",
        *(f"skipped: {row}" for row in report["skipped"]),
        *(f"built: {row['uri']} for {row['arch']}" for row in report["kernels"]),
        *(
            f"spills: {row['uri']} for {row['arch']}, in {name}: {usage['spill_stores']} bytes of stores and "
            f"{usage['spill_loads']} of loads"
            for row in report["kernels"]
            for name, usage in row["functions"].items()
            if usage["spill_stores"] or usage["spill_loads"]
        ),
        f"{len(report['kernels'])} kernels in {len(report['bundles'])} bundles, {report['seconds']:.1f} s",
        f"release {pin['library']} {pin['version']}: sha256:{pin['sha256']}",
    ]


def _shard_lines(report: dict[str, Any]) -> list[str]:
    counts = f"taken {report['taken']}, found here {report['kept']}, built {report['built']}"
    share = f"{len(report['kernels'])} of {report['of_all']} kernels"
    return [
        *(f"skipped: {row}" for row in report["skipped"]),
        f"shard {report['shard']} of {report['build']}: {share}: {counts}; {report['seconds']:.1f} s",
        f"handed in: {report['document']} in {report['bucket']}",
    ]


@click.group("import")
def import_command() -> None:
    """Turn artifacts that others built into bundles."""


@import_command.command("checksums")
@click.argument("tree", type=_DIRECTORY)
@click.option("--out", required=True, type=Repository(), help="Repository directory to write.")
@click.option("--library", required=True, help="Library name of the release, e.g. flashinfer-cubin.")
@click.option("--release-version", required=True, help="Version of the release, e.g. 0.6.13.")
@click.option("--allow-unlisted", is_flag=True, help="Leave files out that no checksums.txt lists, instead of failing.")
@click.option("--without", multiple=True, metavar="DIR", help="Leave this directory of the tree out; may be repeated.")
@click.option("--since", type=Repository(), help="Repository whose releases lend what has not changed; default: --out.")
@click.option("--lock", type=_FILE, help="Pin the new release in this kartifacts.lock.")
@json_option
def import_checksums(
    tree: Path,
    out: Path,
    library: str,
    release_version: str,
    allow_unlisted: bool,
    without: tuple[str, ...],
    since: Path | None,
    lock: Path | None,
    as_json: bool,
) -> None:
    """Import TREE in FlashInfer's layout: <commit>/<family>/checksums.txt and the files it lists, of any suffix."""
    from kartifacts.cli import flows

    report = flows.import_checksums(
        tree,
        out,
        library=library,
        version=release_version,
        allow_unlisted=allow_unlisted,
        without=without,
        lock=lock,
        settings=config.read(),
        since=since,
    )
    lines = [f"bundle: {row['family']} for {row['arch']}: {row['kernels']} files" for row in report["bundles"]]
    lines.append(f"release {library} {release_version}: sha256:{report['pin']['sha256']}")
    emit(as_json, report, "\n".join(lines))


@click.command("publish")
@click.argument("bucket")
@click.option(
    "--from",
    "source",
    required=True,
    type=Repository(),
    multiple=True,
    callback=only_one,
    help="Repository directory that build wrote.",
)
@click.option("--library", default=None, help="Publish the releases of this library only.")
@click.option("--release-version", default=None, help="Publish this version only.")
@click.option(
    "--plan", type=_FILE, help="Refuse a release that lacks what this plan promises; see manifests/release.toml."
)
@click.option("--build", "builds", multiple=True, help="Ask for this build of the plan only; may be repeated.")
@click.option("--lock", type=_FILE, help="Pin what was published in this kartifacts.lock.")
@click.option("--keys", type=_DIRECTORY, help="Keyring that signs for the releases; without it they must be pinned.")
@passphrase_option
@click.option("--channel", "channels", multiple=True, help="Channel that leads to these releases; may be repeated.")
@click.option(
    "--builder-id",
    metavar="URI",
    default="urn:kartifacts:local",
    show_default=True,
    help="Who built the bundles, signed with what they were made of.",
)
@click.option("--no-provenance", is_flag=True, help="Sign nothing about how the bundles were built.")
@single_writer_option
@json_option
def publish_command(
    bucket: str,
    source: Path,
    library: str | None,
    release_version: str | None,
    plan: Path | None,
    builds: tuple[str, ...],
    lock: Path | None,
    keys: Path | None,
    passphrase_file: Path | None,
    channels: tuple[str, ...],
    builder_id: str,
    no_provenance: bool,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Copy releases into BUCKET: immutable blobs first, the pointer last.

    BUCKET is a directory (PATH, dir:PATH or file://PATH), s3://BUCKET/PREFIX?endpoint=URL, https://HOST/PATH of a
    server that takes PUT, oci://HOST/NAME of a registry, or oci+http://HOST/NAME of one without TLS.
    """
    from kartifacts.cli import flows

    report = flows.publish(
        source,
        bucket,
        library=library,
        version=release_version,
        plan=plan,
        builds=builds,
        lock=lock,
        settings=config.read(),
        keys=keys,
        secret=secret_of(passphrase_file),
        channels=channels,
        builder_id=None if no_provenance else builder_id,
        single_writer=single_writer,
    )
    lines = [f"published {pin['library']} {pin['version']}: sha256:{pin['sha256']}" for pin in report["pins"]]
    lines += [
        f"signed for the {view} view: timestamp {seen['timestamp']}, snapshot {seen['snapshot']}, good until "
        f"{seen['expires']}; verified as a new reader"
        for view, seen in report["views"].items()
    ] or ["unsigned: only who pins it in a lock can use it; --keys signs"]
    emit(as_json, report, "\n".join(lines))


@click.command("lock")
@click.argument("repository", type=Repository())
@click.option(
    "--out",
    "lock",
    required=True,
    type=_FILE,
    help="The kartifacts.lock to write or add to; another version of a library in it is replaced.",
)
@click.option("--library", default=None, help="Pin this library only.")
@click.option("--release-version", default=None, help="Pin this version, where the repository holds several.")
@json_option
def lock_command(repository: Path, lock: Path, library: str | None, release_version: str | None, as_json: bool) -> None:
    """Pin the releases of a REPOSITORY directory that you trust; compare the digests with the publisher's."""
    from kartifacts.cli import flows

    pins = flows.lock(repository, lock, library=library, version=release_version)
    lines = [f"pinned {pin['library']} {pin['version']}: sha256:{pin['sha256']}" for pin in pins]
    emit(as_json, {"lock": str(lock), "pins": pins}, "\n".join(lines))


@click.command("wheel")
@click.option(
    "--archs", default=None, help="Archs that the release was built for; default: KARTIFACTS_ARCHS, else all."
)
@click.option("--ops", default="", help="Families or ops, separated by commas; default: all.")
@click.option("--one-per-arch", is_flag=True, help="A wheel for each arch instead of one for all.")
@click.option(
    "--from",
    "source",
    type=Repository(),
    multiple=True,
    callback=only_one,
    help="Repository directory to take; default: what the lock pins, fetched.",
)
@click.option("--library", default=None, help="Take this library only.")
@click.option("--release-version", default=None, help="Take this version, where there are several.")
@click.option("--name", default="", help="Name of the wheel; default: kartifacts-LIBRARY.")
@click.option("--out", required=True, type=_DIRECTORY, help="Directory to put the wheels into.")
@click.option(
    "--max-bytes",
    type=Size(),
    default="100MB",
    show_default=True,
    help="Refuse to write a larger wheel; the default is what PyPI takes of a new project.",
)
@click.option("--index", is_flag=True, help="Also make the index of all wheels in --out, as `kartifacts index` does.")
@json_option
def wheel_command(
    archs: str | None,
    ops: str,
    one_per_arch: bool,
    source: Path | None,
    library: str | None,
    release_version: str | None,
    name: str,
    out: Path,
    max_bytes: int,
    index: bool,
    as_json: bool,
) -> None:
    """Make data wheels of a release: kernels that an installed kartifacts uses where they lie.

    Wheels of other versions, archs and platforms that are in --out already stay.
    """
    from kartifacts.cli import flows

    report = flows.wheel(
        config.read(overrides={"archs": archs}),
        source=source,
        library=library,
        version=release_version,
        ops=ops,
        name=name,
        one_per_arch=one_per_arch,
        out=out,
        max_bytes=max_bytes,
        index=index,
    )
    lines = [
        f"{row['file']}: {row['kernels']} kernels for {', '.join(row['archs'])}, {row['bytes']} bytes, "
        + ("no host code" if row["tag"].endswith("-any") else f"auditwheel: {row['auditwheel'] or 'not installed'}")
        for row in report["wheels"]
    ]
    if report["index"]:
        lines.append(f"index: {report['index']}")
    emit(as_json, report, "\n".join(lines))


@click.command("index")
@click.argument("directory", type=_DIRECTORY)
@json_option
def index_command(directory: Path, as_json: bool) -> None:
    """Make DIRECTORY/simple the package index (PEP 503, PEP 691) of the wheels in DIRECTORY, for any web server."""
    from kartifacts.cli import flows

    report = flows.write_index(directory)
    lines = [f"{row['project']}: {row['file']} sha256:{row['sha256']}" for row in report["files"]]
    emit(as_json, report, "\n".join([*lines, f"index: {report['index']}"]))
