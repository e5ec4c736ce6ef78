"""What a full AOT build takes beside a perfect packing of its steps and beside ninja, and what it takes to do nothing.

    python bench/aot.py [--archs ARCHS] [--jobs 2] [--rounds 3] [--idle-rounds 15] [--json FILE]

Every op of this checkout for every arch, each build a process of its own.  Compiling builds begin with an empty
workspace and take turns with ninja; those with nothing to do come after them.  CPU is that of a process and all its
children.

    perfect        the seconds of all steps, divided by the jobs: no schedule of the same steps ends sooner
    build          `kartifacts build`, from its first import to the release it has written
    its steps      from when the first may begin to when the last has been checked and kept
    ninja          the same command lines without workers, checks, attaching and packing: what makes the objects alone;
                   beside the perfect packing of its own steps
    nothing to do  the same command once more: every kernel is looked for, its headers compared, its bytes hashed; the
                   release is made again and found to be the one that is there
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
ARCHS = "cpu:x86-64-v3 8.0 8.6 8.9 9.0a 10.0f"
PACKING, IDLE = 1.10, 1.0  # goals: of perfect, and seconds

Run = dict[str, float]


def timed(command: list[str], environ: dict[str, str], folder: Path) -> Run:
    before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - since, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu}


def environment(folder: Path, jobs: int) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KARTIFACTS_")}
    own = {"HOME": str(folder), "PYTHONPATH": str(CHECKOUT), "KARTIFACTS_WORKSPACE": str(folder / "workspace")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    return {**environ, **own, "KARTIFACTS_JOBS": str(jobs)}


def build_command(folder: Path, archs: str) -> list[str]:
    what = ("build", "--archs", archs, "--out", str(folder / "repository"), "--report", str(folder / "report.json"))
    return [sys.executable, "-m", "kartifacts", *what]


def built(folder: Path, archs: str, jobs: int) -> Run:
    """One build in an empty workspace, with what its report says of the steps."""
    run = timed(build_command(folder, archs), environment(folder, jobs), folder)
    report = json.loads((folder / "report.json").read_text())
    steps = report["steps"]
    taken = sum(step["seconds"] for step in steps)
    return {
        **run,
        "kernels": len(report["kernels"]),
        "steps": len(steps),
        "perfect": taken / jobs,
        "perfect cpu": sum(step["cpu_seconds"] for step in steps),
        "steps wall": taken / jobs / report["efficiency"],
        "memory": report["peak_memory"],
    }


def write_ninja(folder: Path, archs: str) -> Path:
    """The compilations and links of the same build as a file for ninja."""
    from kartifacts import config
    from kartifacts.build import workspace
    from kartifacts.build.costs import Costs
    from kartifacts.build.library import open_library
    from kartifacts.build.planner import Plan
    from kartifacts.build.toolchains import find
    from kartifacts.model.arch import parse_archs

    settings = config.read(overrides={"workspace": folder / "workspace"})
    workspace.usable(settings.workspace)
    plan = Plan(settings, Costs(), folder / "made")
    for spec in open_library(CHECKOUT / "kernels", "kartifacts").specs((), parse_archs(archs))[0]:
        toolchain = find(spec.device.toolchain, settings)
        plan.add(spec.key(toolchain.made_with(spec)), spec, toolchain)
    lines = ["rule run", "  command = $line", "  description = $out"]
    for step in plan.steps:
        if step.command is None:
            continue
        step.output.parent.mkdir(parents=True, exist_ok=True)
        lines.append(f"build {step.output}: run {' '.join(map(str, step.inputs))}")
        lines.append(f"  line = {step.shell.replace('$', '$$')}")
    file = folder / "build.ninja"
    file.write_text("\n".join(lines) + "\n")
    return file


def packed_by_ninja(command: list[str], folder: Path, jobs: int) -> Run:
    """One run of ninja, with what its log says of the steps: milliseconds of beginning and end."""
    run = timed(command, environment(folder, jobs), folder)
    steps = [line.split("\t") for line in (folder / ".ninja_log").read_text().splitlines() if not line.startswith("#")]
    return {**run, "perfect": sum(int(end) - int(begin) for begin, end, *_ in steps) / 1000 / jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--archs", default=ARCHS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every run into this file")
    args = parser.parse_args()
    ninja = shutil.which("ninja")
    runs: dict[str, list[Run]] = {"build": [], "ninja": [], "idle": [], "ninja idle": []}
    with tempfile.TemporaryDirectory() as place:
        timed([sys.executable, "-m", "kartifacts", "--version"], environment(Path(place), 1), Path(place))
        for number in range(args.rounds):
            folder = Path(place, f"ours{number}")
            folder.mkdir()
            runs["build"].append(built(folder, args.archs, args.jobs))
            if ninja:
                theirs = Path(place, f"ninja{number}")
                theirs.mkdir()
                command = [ninja, "-f", str(write_ninja(theirs, args.archs)), "-j", str(args.jobs)]
                runs["ninja"].append(packed_by_ninja(command, theirs, args.jobs))
        for _ in range(args.idle_rounds):
            runs["idle"].append(timed(build_command(folder, args.archs), environment(folder, args.jobs), folder))
            if ninja:
                runs["ninja idle"].append(timed(command, environment(theirs, args.jobs), theirs))
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))
    table(runs, args.archs, args.jobs)


def table(runs: dict[str, list[Run]], archs: str, jobs: int) -> None:
    first = runs["build"][0]
    print(
        f"{first['kernels']} kernels for {archs}: {first['steps']} steps, jobs={jobs}, "
        f"{first['memory'] / 1e6:.0f} MB the hungriest; medians of {len(runs['build'])} and {len(runs['idle'])} runs"
    )
    print(f"\n| {'':<34} | wall s | CPU s | wall / perfect | CPU / that of the steps | goal |")
    print("| --- | --: | --: | --: | --: | --: |")
    row("perfect packing of its steps", middle(runs, "build", "perfect"), middle(runs, "build", "perfect cpu"))
    build = runs["build"]
    row(
        "its steps, checked and kept",
        middle(runs, "build", "steps wall"),
        None,
        ratio(build, "steps wall", "perfect"),
        None,
        f"≤ {PACKING:.2f}",
    )
    row(
        "kartifacts build, all of it",
        middle(runs, "build", "wall"),
        middle(runs, "build", "cpu"),
        ratio(build, "wall", "perfect"),
        ratio(build, "cpu", "perfect cpu"),
    )
    if runs["ninja"]:
        row(
            "ninja, the same command lines",
            middle(runs, "ninja", "wall"),
            middle(runs, "ninja", "cpu"),
            ratio(runs["ninja"], "wall", "perfect"),
            middle(runs, "ninja", "cpu") / middle(runs, "build", "perfect cpu"),
        )
    row(
        "kartifacts build, nothing to do",
        middle(runs, "idle", "wall"),
        middle(runs, "idle", "cpu"),
        None,
        None,
        f"≤ {IDLE:.0f} s",
    )
    if runs["ninja idle"]:
        row("ninja, nothing to do", middle(runs, "ninja idle", "wall"), middle(runs, "ninja idle", "cpu"))
    idle = sorted(run["wall"] for run in runs["idle"])
    print(f"\nnothing to do: {idle[0]:.2f} to {idle[-1]:.2f} s, load of this machine now {os.getloadavg()[0]:.1f}")


def row(what: str, wall: float, cpu: float | None, packed: float | None = None, spent: float | None = None,
        goal: str = "") -> None:  # fmt: skip
    cells = [f"{wall:.2f}", *("" if value is None else f"{value:.2f}" for value in (cpu, packed, spent)), goal]
    print(f"| {what:<34} | {' | '.join(cells)} |")


def middle(runs: dict[str, list[Run]], which: str, what: str) -> float:
    return statistics.median(run[what] for run in runs[which])


def ratio(runs: list[Run], one: str, other: str) -> float:
    """The median of the ratios within a run, whatever else the machine did meanwhile."""
    return statistics.median(run[one] / run[other] for run in runs)


if __name__ == "__main__":
    main()
