"""Commands that look at what was built: inspect, diff."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from kartifacts.cli import emit, json_option
from kartifacts.files.directories import directory_in

_FILE = click.Path(dir_okay=False, path_type=Path)


def _place(text: str) -> Path:
    """A file or directory in any of the spellings that repositories have."""
    return Path(directory_in(text) or text)


@click.command("inspect")
@click.argument("file", type=_FILE)
@json_option
def inspect_command(file: Path, as_json: bool) -> None:
    """Print what the bytes of FILE, a kernel or an image, say: archs, exports, needs, and what functions take.

    Nothing is loaded.  Spills are those that the assembler marked: what it would print is written into no image.
    """
    from kartifacts.cli import flows

    report = flows.inspect(file)
    lines = [
        f"{report['kind']} for {report['machine']}, {report['bytes']:,} bytes",
        f"GPU code: {', '.join(report['archs']) or 'none'}",
        f"exports: {', '.join(report['exports']) or 'nothing'}",
        f"needs: {', '.join(f'{name} {text}' for name, text in sorted(report['needs'].items())) or 'nothing'}",
        f"libraries: {', '.join(report['libraries']) or 'none'}",
        *([f"run path: {report['run_path']}"] if report["run_path"] else []),
        *(["build-id: yes"] if report["build_id"] else []),
        *(f"it {hazard}" for hazard in report["hazards"]),
        *(
            f"function {name}: " + ", ".join(f"{what.replace('_', ' ')} {figure}" for what, figure in usage.items())
            for name, usage in report["functions"].items()
        ),
    ]
    emit(as_json, report, "\n".join(lines))


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
