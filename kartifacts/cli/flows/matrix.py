"""The jobs that build a plan, as the matrix that a CI system reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kartifacts.cli.flows import planned
from kartifacts.cli.flows.shared import Report
from kartifacts.errors import ConfigError
from kartifacts.publish.plan import Build, read_plan

MAX_GITHUB = 256  # jobs of one matrix
MAX_GITLAB = 200
MAX_GITLAB_NAME = 255  # characters; a longer name lets the whole pipeline fail without a word
_FOR_GITLAB = ("build", "shard", "builder", "image", "machine")


@dataclass(frozen=True)
class Job:
    """One job of the matrix."""

    build: str
    shard: str  # 1/4
    builder: str
    image: str  # container image that the builder's recipe begins with
    cuda: str
    machine: str
    archs: str
    ops: str = field(default="")

    def row(self) -> dict[str, str]:
        return dict(vars(self))


def jobs_of(path: Path, builds: Sequence[str] = ()) -> list[Job]:
    """Every job that builds a part of the plan; reads the plan and the builders' recipes, no sources."""
    from kartifacts.build.recipes import read_builder

    plan = read_plan(path).only(builds)
    jobs = []
    for build in plan.builds:
        recipe = planned.recipe_file(plan, path, build)
        image = "" if recipe is None else read_builder(recipe).image
        archs, ops = " ".join(map(str, build.parsed)), " ".join(build.ops)
        jobs += [
            Job(build.name, f"{number}/{build.shards}", build.builder, image, build.cuda, build.machine, archs, ops)
            for number in range(1, build.shards + 1)
        ]
    return jobs


def matrix(path: Path, *, form: str, builds: Sequence[str] = (), check: bool = False) -> tuple[Report, str]:
    """The build matrix as data, and as a text in the form that a CI system reads."""
    jobs = jobs_of(path, builds)
    report: Report = {"jobs": [job.row() for job in jobs]}
    if check:
        work = planned.work_of(path, builds)
        report["builds"] = [
            {
                "build": build.name,
                "kernels": len(work.specs[build.name]),
                "skipped": [str(refusal) for refusal in work.skipped[build.name]],
                "shards": _shares(work, build),
            }
            for build in work.plan.builds
        ]
        report["promises"] = work.promises.digest
    return report, "\n".join(_FORMS[form](report))


def _shares(work: planned.Work, build: Build) -> list[dict[str, Any]]:
    """What each shard of a build gets: how many kernels, and seconds of one CPU that they are expected to take."""
    from kartifacts.build.partition import partition

    cost, _ = planned.costs_of(work.plan, work.path)
    parts = partition(work.specs[build.name], cost, build.shards)
    return [{"kernels": len(part), "seconds": round(sum(map(cost, part)), 3)} for part in parts]


def _table(report: Report) -> Iterator[str]:
    names = ("build", "shard", "builder", "image", "cuda", "machine", "archs")
    rows = [names, *(tuple(row[name] or "-" for name in names) for row in report["jobs"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    yield from ("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    for build in report.get("builds", ()):
        yield f"{build['build']}: {build['kernels']} kernels"
        of = len(build["shards"])
        for number, share in enumerate(build["shards"], 1):
            yield f"  shard {number}/{of}: {share['kernels']} kernels, {share['seconds']:.1f} s of a CPU"
        yield from (f"  left out: {reason}" for reason in build["skipped"])


def _json(report: Report) -> Iterator[str]:
    yield json.dumps(report, indent=2, sort_keys=True)


def _github(report: Report) -> Iterator[str]:
    """One line, for `echo "matrix=$(...)" >> "$GITHUB_OUTPUT"` and `strategy.matrix: ${{ fromJSON(...) }}`."""
    _check_count(report, "GitHub Actions", MAX_GITHUB)
    yield json.dumps({"include": report["jobs"]}, separators=(",", ":"))


def _gitlab(report: Report) -> Iterator[str]:
    """A child pipeline; JSON is YAML.  What a job does stands in `.kartifacts-build`, in a file included beside it.

    GitLab puts all values into the name of the job, so there are only those that a job cannot do without.
    """
    _check_count(report, "GitLab", MAX_GITLAB)
    rows: list[Mapping[str, Any]] = [{name.upper(): row[name] for name in _FOR_GITLAB} for row in report["jobs"]]
    for row in rows:
        name = f"build: [{', '.join(row.values())}]"
        if len(name) > MAX_GITLAB_NAME:
            raise ConfigError(
                f"GitLab would call a job {name!r}: {len(name)} characters, of which it takes {MAX_GITLAB_NAME}",
                hint="shorten the name of the build, or that of the image in its builder.toml",
            )
    yield json.dumps({"build": {"extends": ".kartifacts-build", "parallel": {"matrix": rows}}}, indent=2)


def _check_count(report: Report, system: str, most: int) -> None:
    if len(report["jobs"]) > most:
        raise ConfigError(
            f"the plan has {len(report['jobs'])} jobs, and a matrix of {system} at most {most}",
            hint="lower the number of shards, or make a matrix for each build with --build",
        )


_FORMS = {"table": _table, "json": _json, "github": _github, "gitlab": _gitlab}
FORMS = tuple(_FORMS)
