"""The commands about a release plan and about builds on several machines: plan, merge, gate."""

from __future__ import annotations

from pathlib import Path

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.cli.places import Repository, only_one

_FILE = click.Path(dir_okay=False, path_type=Path)
_PLAN = "manifests/release.toml"
_builds_option = click.option(
    "--build", "builds", multiple=True, help="Take this build of the plan only; may be repeated."
)


@click.command("plan")
@click.argument("plan", type=_FILE, default=_PLAN)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "github", "gitlab"]),
    default="table",
    show_default=True,
    help="github: one line for strategy.matrix; gitlab: a child pipeline whose job extends .kartifacts-build.",
)
@_builds_option
@click.option("--check", is_flag=True, help="Hold the plan against the library that is installed here, too.")
@json_option
def plan_command(plan: Path, form: str, builds: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Print the jobs that build PLAN, one line for each shard of each build; default: manifests/release.toml.

    A plan that cannot be built is refused, with the arch lists that would do.
    """
    from kartifacts.cli import flows

    report, text = flows.matrix(plan, form=form, builds=builds, check=check)
    emit(as_json, report, text)


@click.command("merge")
@click.option("--plan", type=_FILE, required=True, help="The plan that the shards were built by.")
@click.option(
    "--from",
    "source",
    required=True,
    multiple=True,
    callback=only_one,
    help="Directory or bucket where all shards were handed in.",
)
@click.option("--out", required=True, type=Repository(), help="Repository directory to write.")
@_builds_option
@click.option("--release-version", default="", help="Version of the release; default: that of the library's package.")
@click.option("--since", type=Repository(), help="Repository whose releases lend what has not changed; default: --out.")
@click.option("--lock", type=_FILE, help="Pin the new release in this kartifacts.lock.")
@json_option
def merge_command(
    plan: Path,
    source: str,
    out: Path,
    builds: tuple[str, ...],
    release_version: str,
    since: Path | None,
    lock: Path | None,
    as_json: bool,
) -> None:
    """Make one release of the shards that several machines built, as if one machine had built it.

    Missing shards and kernels are named, and so is what was made twice, of other sources or with other compilers.
    """
    from kartifacts.cli import flows

    report = flows.merge(
        config.read(),
        plan=plan,
        builds=builds,
        source=source,
        out=out,
        version=release_version,
        lock=lock,
        since=since,
    )
    pin = report["pin"]
    lines = [
        *(f"merged: {name}" for name in report["shards"]),
        f"{len(report['kernels'])} kernels in {len(report['bundles'])} bundles, {report['seconds']:.1f} s",
        f"release {pin['library']} {pin['version']}: sha256:{pin['sha256']}",
    ]
    emit(as_json, report, "\n".join(lines))


@click.command("gate")
@click.argument("repository", type=Repository())
@click.option("--plan", type=_FILE, default=_PLAN, show_default=True, help="The plan that the release was built by.")
@_builds_option
@click.option("--release-version", default=None, help="Look at this version, where the repository holds several.")
@json_option
def gate_command(
    repository: Path, plan: Path, builds: tuple[str, ...], release_version: str | None, as_json: bool
) -> None:
    """Refuse the release in REPOSITORY if it is not what PLAN promises; to be asked before anything is signed.

    Looks into every kernel. Names what is missing by op and arch, what needs too new a system, is too large or spills
    registers, what was built for debugging, with flags of the builder's own or for the builder's CPU, and what holds
    paths of the machine that built it. Needs neither sources nor compilers. `publish --plan` asks the same.
    """
    from kartifacts.cli import flows

    report = flows.gate(repository, plan=plan, builds=builds, version=release_version)
    lines = [
        f"{pin['library']} {pin['version']} is what the plan promises: sha256:{pin['sha256']}" for pin in report["pins"]
    ]
    lines.append(f"{report['kernels']} kernels, {report['bytes']} bytes; builds: {', '.join(report['builds'])}")
    emit(as_json, report, "\n".join(lines))
