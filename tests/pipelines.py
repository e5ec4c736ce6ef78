"""The pipelines of ci/, read as the systems that run them do, and a stand-in for those that runs their jobs here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from tests.conftest import Machine

CHECKOUT = Path(__file__).parents[1]
SCRIPT = CHECKOUT / "ci/release"
STEPS = subprocess.run([SCRIPT, "--steps"], capture_output=True, text=True, check=True).stdout.split()
# What the systems themselves set.
OF_THE_SYSTEM = {
    "github.ref_name": "v1.2.0",
    "github.server_url": "https://ci.example",
    "github.repository": "project/kernels",
    "CI_COMMIT_TAG": "v1.2.0",
    "CI_PROJECT_URL": "https://ci.example/project/kernels",
    "CI_DEFAULT_BRANCH": "main",
}


@dataclass(frozen=True)
class Job:
    """A job of either system, as far as both have the same."""

    name: str
    needs: frozenset[str]
    command: str
    environ: Mapping[str, str] = field(default_factory=dict)  # with what its system replaces still in it
    place: str = ""  # the environment whose variables and secrets it may read

    @property
    def step(self) -> str:
        words = shlex.split(self.command)
        assert words[0] == "ci/release", self.command
        return words[1]


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as GitLab reads it; and `on` is a word, as GitHub takes it."""


_Yaml.add_constructor("!reference", lambda loader, node: loader.construct_sequence(node))
_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or first not in "oO"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def document(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load((CHECKOUT / "ci" / name).read_text(), Loader=_Yaml)
    return content


def github() -> list[Job]:
    read = document("github/release.yml")
    jobs = []
    for name, job in read["jobs"].items():
        needs = job.get("needs", [])
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert len(commands) == 1, f"{name} has to call ci/release once"
        environ = {**read["env"], **job.get("env", {})}
        needed = frozenset([needs] if isinstance(needs, str) else needs)
        jobs.append(Job(name, needed, commands[0], environ, job.get("environment", "")))
    return jobs


def gitlab() -> list[Job]:
    read, child = document("gitlab/release.yml"), document("gitlab/build.yml")
    jobs = []
    for name, job in read.items():
        if name in ("stages", "variables") or name.startswith("."):
            continue
        does = job
        if "trigger" in job:
            assert job["trigger"]["strategy"] == "depend", f"{name} would be done before its jobs are"
            does = child[".kartifacts-build"]
        assert len(does["script"]) == 1, f"{name} has to call ci/release once"
        environ = {**read["variables"], **does.get("variables", {})}
        place = does.get("environment", {}).get("name", "")
        jobs.append(Job(name, frozenset(job.get("needs", ())), does["script"][0], environ, place))
    return jobs


SYSTEMS: dict[str, Callable[[], list[Job]]] = {"github": github, "gitlab": gitlab}


def releasing(system: str) -> list[Job]:
    """The jobs of a release, each after those that it needs."""
    waiting = {job.name: job for job in SYSTEMS[system]() if job.step != "nightly"}
    ordered: list[Job] = []
    while waiting:
        ready = [job for job in waiting.values() if not job.needs & waiting.keys()]
        assert len(ready) == 1, f"one job after the other, not {[job.name for job in ready]}"
        ordered.append(waiting.pop(ready[0].name))
    return ordered


def run_release(*arguments: str, cwd: Path = CHECKOUT, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env={"PATH": path, **environ}, cwd=cwd, capture_output=True, text=True, check=False)


class Runner:
    """Runs the jobs of a pipeline as its system would, each on a new machine."""

    def __init__(self, system: str, root: Path) -> None:
        self.system, self.root = system, root
        (root / "ci").mkdir(parents=True)
        (root / "ci/release").write_text(f'#!/bin/sh\nexec {SCRIPT} "$@"\n')
        (root / "ci/release").chmod(0o755)
        (root / "bin").mkdir()
        (root / "bin/kartifacts").write_text(f'#!/bin/sh\nexec {sys.executable} -m kartifacts "$@"\n')
        (root / "bin/kartifacts").chmod(0o755)
        self.variables: dict[str, str] = {}

    def run(self, job: Job, **row: str) -> str:
        """One job, once; gives what it printed and what it left for others."""
        machine = Machine(self.root / "machines" / f"{len(list(self.root.glob('machines/*')))}")
        output = machine.home / "output"
        environ = {**machine.environ({}), "GITHUB_OUTPUT": str(output), "RELEASE_PLAN": str(self.root / "plan.toml")}
        environ |= {"PATH": f"{self.root / 'bin'}:{environ['PATH']}", "RELEASE_DIR": str(self.root / "release")}
        environ["PYTHONPATH"] = str(CHECKOUT)  # as on some machines; a clean one must not see it
        if self.system == "gitlab":
            environ |= {**OF_THE_SYSTEM, **self.variables, **{name.upper(): value for name, value in row.items()}}
            environ |= {name: Template(text).substitute(environ) for name, text in job.environ.items()}
            environ = {name: value for name, value in environ.items() if re.fullmatch(r"\w+", name)}
        else:
            environ |= {name: self.evaluated(text, row) for name, text in job.environ.items()}
        done = subprocess.run(
            ["bash", "-e", "-c", job.command], env=environ, cwd=self.root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{job.command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + (output.read_text() if output.exists() else "")

    def evaluated(self, text: str, row: Mapping[str, str]) -> str:
        known = {**OF_THE_SYSTEM, **{f"matrix.{name}": value for name, value in row.items()}}
        for name, value in self.variables.items():
            known |= {f"vars.{name}": value, f"secrets.{name}": value}

        def value_of(match: re.Match[str]) -> str:
            return next(filter(None, (known.get(word) for word in match[1].split(" || "))), "")

        return re.sub(r"\$\{\{ (.*?) \}\}", value_of, text)

    def matrix(self, printed: str) -> list[dict[str, str]]:
        if self.system == "github":
            rows: list[dict[str, str]] = json.loads(printed.partition("matrix=")[2])["include"]
            return rows
        (job,) = json.loads((self.root / "pipeline.yml").read_text()).values()
        return [{name.lower(): value for name, value in row.items()} for row in job["parallel"]["matrix"]]
