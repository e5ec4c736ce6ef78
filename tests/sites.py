"""A place where a small library is installed as a package, with a release plan and the machines that build it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import Answer, Compiler, Machine

ARCHS = ["cpu:x86-64", "cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:x86-64-v4"]  # two kernels each
CPU: dict[str, Any] = {"name": "cpu", "machine": "x86_64", "archs": ARCHS, "shards": 4}


def plan_text(library: str, *builds: dict[str, Any], more: str = "") -> str:
    """A release plan."""
    text = f'schema = 2\nlibrary = "{library}"\n{more}'
    for build in builds:
        text += "[[build]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in build.items())
    return text


class Site:
    """A place where the tiny library is installed as a package, a plan of it, and machines that build it."""

    def __init__(self, root: Path, library: Path, compiler: Compiler) -> None:
        self.root = root
        self.packages = root / "site"
        self.library = self.packages / "tinyops"
        self.compiler = compiler
        shutil.copytree(library, self.library)
        (self.library / "__init__.py").touch()
        meta = self.packages / "tinyops-1.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyops\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text("[kartifacts.libraries]\ntinyops = tinyops\n")
        self.plan = root / "plan.toml"
        self.write(CPU)

    def write(self, *builds: dict[str, Any], more: str = "") -> None:
        self.plan.write_text(plan_text("tinyops", *builds, more=more))

    def machine(self, name: str) -> Machine:
        return Machine(self.root / "homes" / name)

    def cli(self, machine: str, *arguments: object, **settings: Any) -> Answer:
        return self.machine(machine).cli(*arguments, cxx=self.compiler.path, jobs=1, **settings)

    def shard(self, machine: str, shard: str, *, build: str = "cpu", meet: str = "meet", **settings: Any) -> Answer:
        where = self.place(meet)
        options = ("--plan", self.plan, "--build", build, "--shard", shard, "--out", where, "--json")
        return self.cli(machine, "build", *options, **settings)

    def merge(self, out: str, *options: object, meet: str = "meet", **settings: Any) -> Answer:
        where = ("--plan", self.plan, "--from", self.place(meet), "--out", self.root / out)
        return self.cli("merger", "merge", *where, *options, "--json", **settings)

    def gate(self, repository: str, *options: object) -> Answer:
        return self.cli("gate", "gate", self.root / repository, "--plan", self.plan, *options, PATH="/nonexistent")

    def place(self, name: str) -> str:
        """A directory of this site, or a bucket elsewhere."""
        return name if "://" in name else str(self.root / name)

    def start(self, machine: str, shard: str, *, meet: str = "meet", **settings: Any) -> subprocess.Popen[str]:
        """A shard in a process of its own."""
        environ = self.machine(machine).environ(
            {"cxx": self.compiler.path, "jobs": 1, "PYTHONPATH": self.packages, **settings}
        )
        options = ["--plan", self.plan, "--build", "cpu", "--shard", shard, "--out", self.place(meet), "--json"]
        command = [sys.executable, "-m", "kartifacts", "build", *map(str, options)]
        return subprocess.Popen(command, env=environ, cwd=self.root, stdout=subprocess.PIPE, text=True)

    def files(self, place: str) -> dict[str, bytes]:
        root = self.root / place
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and not path.name.startswith(".partial-")
        }
