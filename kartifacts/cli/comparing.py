"""Commands that look at what was built: inspect, diff."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kartifacts.cli import emit, json_option
from kartifacts.errors import ConfigError
from kartifacts.files.directories import directory_in


def _place(text: str) -> Path:
    """A file or directory in any of the spellings that repositories have."""
    found = directory_in(text)
    if found is None and (not text or "://" in text):
        raise ConfigError(
            f"{text[:200]!r} names no file or directory of this machine, and only these are read",
            hint="kartifacts mirror copies what a bucket holds into a directory" if text else None,
        )
    return found or Path(text)


@click.command("inspect")
@click.argument("place")
@click.argument("kernel", default="")
@click.option("--library", default=None, help="Of a repository, look at this library only.")
@click.option("--release-version", default=None, help="Of a repository, look at this version only.")
@click.option("--arch", default=None, help="Of a repository, look at bundles for this arch only.")
@json_option
def inspect_command(
    place: str, kernel: str, library: str | None, release_version: str | None, arch: str | None, as_json: bool
) -> None:
    """Print what the bytes of PLACE, a kernel or an image, say: archs, exports, needs, and what functions take.

    If PLACE is a repository directory, print what its bundles hold and were made with, or what the bytes of one KERNEL
    say, norm/rmsnorm or with its axes.  Nothing is loaded.  Spills are counted in the machine code.
    """
    from kartifacts.cli import flows

    report = flows.inspect(_place(place), kernel, library=library, version=release_version, arch=arch)
    if "bundles" in report:
        lines = [line for row in report["bundles"] for line in _bundle_lines(row)]
    elif "kernels" in report:
        lines = [line for row in report["kernels"] for line in _kernel_lines(row)]
    else:
        lines = [*_file_lines(report)]
    emit(as_json, report, "\n".join(lines))


def _bundle_lines(row: Mapping[str, Any]) -> Iterator[str]:
    on = f" on {row['machine']}" if row["machine"] else ""
    yield (
        f"{row['library']} {row['version']}: {row['family']} for {row['arch']}{on}: {row['kernels']} kernels, "
        f"{row['bytes']:,} bytes, ABI {row['abi']}"
    )
    yield f"  needs: {_listed(row['needs'])}"
    yield from (f"  {name}: {value}" for name, value in sorted(row["toolchain"].items()))
    yield from ([f"  recipe: {row['recipe']}"] if row["recipe"] else [])


def _kernel_lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{row['uri']} for {row['arch']}, of {row['library']} {row['version']}:"
    yield f"  sha256: {row['sha256']}"
    yield from ([f"  key: {row['key']}"] if row["key"] else [])
    yield from (f"  {line}" for line in _file_lines(row))


def _file_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{report['kind']} for {report['machine']}, {report['bytes']:,} bytes"
    yield f"GPU code: {', '.join(report['archs']) or 'none'}"
    yield f"exports: {', '.join(report['exports']) or 'nothing'}"
    yield f"needs: {_listed(report['needs'])}"
    yield f"libraries: {', '.join(report['libraries']) or 'none'}"
    yield from ([f"run path: {report['run_path']}"] if report["run_path"] else [])
    yield from (["build-id: yes"] if report["build_id"] else [])
    yield from (f"it {hazard}" for hazard in report["hazards"])
    yield from (f"note {name}: {value}" for name, value in report["notes"].items())
    for name, usage in report["functions"].items():
        yield f"function {name}: " + ", ".join(f"{what.replace('_', ' ')} {figure}" for what, figure in usage.items())


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) or "nothing"


@click.command("diff")
@click.argument("first")
@click.argument("second")
@click.option("--library", default=None, help="Compare the releases of this library only.")
@click.option("--versions", nargs=2, default=("", ""), help="Compare these versions: of FIRST, and of SECOND.")
@click.option("--family", default="", help="Compare bundles of this family only.")
@click.option("--arch", default="", help="Compare bundles for this arch only.")
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="In how many kernels of a bundle it is looked how their bytes differ.",
)
@json_option
def diff_command(
    first: str,
    second: str,
    library: str | None,
    versions: tuple[str, str],
    family: str,
    arch: str,
    depth: int,
    as_json: bool,
) -> None:
    """Explain how SECOND differs from FIRST: by section, symbol and image; and by what their keys are made of.

    Both are kernels or images, reports of builds or shards (JSON), or repository directories.  Ends with 0 if they are
    the same, and with 1 if they differ.  What was measured in a build, as its time, is not compared.
    """
    from kartifacts.cli import flows
    from kartifacts.publish.changes import Scope

    scope = Scope(depth, library, versions, family, arch)
    report = flows.diff(_place(first), _place(second), scope)
    rows = [((*row["where"].split(": "), row["text"])) for row in report["differences"]]
    emit(as_json, report, "\n".join(_tree(rows)) or f"the same {report['kind']}")
    if not report["same"]:
        raise SystemExit(1)


def _tree(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """What rows have in common with the one before is not said again."""
    before: Sequence[str] = ()
    for row in rows:
        *path, text = row
        same = next(
            (at for at, (one, other) in enumerate(zip(path, before, strict=False)) if one != other), len(before)
        )
        same = min(same, len(path) - 1)
        for depth in range(same, len(path) - 1):
            yield f"{'  ' * depth}{path[depth]}:"
        yield f"{'  ' * (len(path) - 1)}{path[-1]}: {text}"
        before = path
