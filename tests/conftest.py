"""One release of this project's own kernels, built once for all tests, and machines of users who have nothing else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from kartifacts import Registry, config
from kartifacts.build.blocks import PackInput
from kartifacts.build.library import discover
from kartifacts.build.pack import pack_bundle
from kartifacts.build.toolchains import nvcc
from kartifacts.cli import flows, main
from kartifacts.config import Settings
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import Arch, parse_arch, parse_archs
from kartifacts.model.manifest import Lock, decode_lock
from kartifacts.model.spec import FFI_ABI
from kartifacts.publish.lockfile import add_pins
from kartifacts.publish.release import make_release as publish_release
from kartifacts.publish.repository import Repository
from kartifacts.runtime import host

if TYPE_CHECKING:
    from tests.sites import Site

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CPU_ARCHS = "cpu:x86-64 cpu:x86-64-v3" if os.uname().machine == "x86_64" else "cpu:aarch64"

# Runs before anything of ours is imported, and writes down what only a process that is not warm would do.
WATCH = """
import os, sys
seen = []
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
            "os.chown", "os.utime", "os.mkfifo", "os.setxattr", "shutil.", "tempfile.")
_PROCESSES = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "os.forkpty", "pty.spawn")
def _audit(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        seen.append(("socket", event, repr(args[-1:])[:200]))
    elif event == "open" and args[2] & _WRITING and args[0] != os.devnull:
        seen.append(("write", event, repr(args[0])[:200]))
    elif event.startswith(_CHANGES):
        seen.append(("write", event, repr(args)[:200]))
    elif event.startswith(_PROCESSES):
        seen.append(("process", event, repr(args)[:200]))
sys.addaudithook(_audit)
result = None
"""
REPORT = "\nimport json\nprint(json.dumps({'seen': seen, 'result': result}))\n"

# What a user does with a kernel, and how far the answer is from float64.
CALL = """
import numpy as np
def error_of(registry, dtype="float32", device="cpu"):
    rng = np.random.default_rng()
    x, weight = (rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in ((37, 1000), (1000,)))
    out = np.full_like(x, np.nan)
    kernel = registry.load("norm/rmsnorm", device=device, dtype=dtype)
    kernel.rmsnorm(x, weight, out, 1e-6)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
    return kernel, error if np.isfinite(error) else 1e9
"""


@dataclass(frozen=True)
class Released:
    """A repository with one release, and the lock that pins it."""

    path: Path
    lock_file: Path
    archs: tuple[Arch, ...]

    @property
    def lock(self) -> Lock:
        return decode_lock(self.lock_file.read_bytes())

    @property
    def best(self) -> Arch:
        """What a process on this machine should take."""
        verdicts = [(arch.runs_on(host.cpu()), arch) for arch in self.archs]
        return min((verdict.rank, str(arch), arch) for verdict, arch in verdicts if verdict.ok)[2]


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Seen:
    """What a watched process did beyond reading and computing, and what it found."""

    seen: list[list[str]]
    result: Any

    def of(self, kind: str) -> list[list[str]]:
        return [row for row in self.seen if row[0] == kind]


class Machine:
    """A user's machine: a home of its own; of this process's environment it has PATH and where CUDA is."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def workspace(self) -> Path:
        return self.home / "workspace"

    def environ(self, settings: dict[str, Any]) -> dict[str, str]:
        """Lower-case names are settings of kartifacts, others variables as they are; None removes one."""
        environ: dict[str, Any] = {name: os.environ.get(name) for name in ("PATH", "CUDA_HOME", "CUDA_PATH")}
        environ |= {"HOME": self.home, "KARTIFACTS_STORE": self.store, "KARTIFACTS_WORKSPACE": self.workspace}
        for name, value in settings.items():
            environ[f"KARTIFACTS_{name.upper()}" if name.islower() else name] = value
        return {name: str(value) for name, value in environ.items() if value is not None}

    def settings(self, **settings: Any) -> Settings:
        return config.read(self.environ(settings))

    def registry(self, *, libraries: Sequence[Path] = (), **settings: Any) -> Registry:
        return Registry(self.settings(**settings), libraries)

    def cli(self, *arguments: object, **settings: Any) -> Answer:
        """A command, run inside this process."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            mock.patch.dict(os.environ, self.environ(settings), clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main([str(argument) for argument in arguments])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return Answer(code, out.getvalue(), err.getvalue())

    def run_cli(self, *arguments: object, **settings: Any) -> Answer:
        """The same in a process of its own, as its users see it."""
        return self._run([sys.executable, "-m", "kartifacts", *map(str, arguments)], settings)

    def python(self, code: str, *arguments: object, **settings: Any) -> Answer:
        """A Python program; `error_of` is defined."""
        return self._run([sys.executable, "-B", "-c", CALL + code, *map(str, arguments)], settings)

    def watched(self, code: str, *arguments: object, prefix: Sequence[str] = (), **settings: Any) -> Seen:
        """A Python program that leaves something in `result`, and what it did to files, sockets and processes."""
        answer = self._run(self.watching(code, *arguments, prefix=prefix), settings)
        assert answer.code == 0, answer.err
        return Seen(**json.loads(answer.out.splitlines()[-1]))

    def watching(self, code: str, *arguments: object, prefix: Sequence[str] = ()) -> list[str]:
        """The command line of `watched`."""
        return [*prefix, sys.executable, "-B", "-c", WATCH + CALL + code + REPORT, *map(str, arguments)]

    def _run(self, command: Sequence[str], settings: dict[str, Any]) -> Answer:
        environ = self.environ(settings)  # in its home: what lies where pytest was started must not be importable
        done = subprocess.run(command, env=environ, cwd=self.home, capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)


# -- a library of one small op, a compiler that counts, and releases of whatever bytes ---------------------------------

_TINY = {
    "demo/op.toml": """
schema = 1
family = "demo"

[[op]]
name = "answer"
summary = "Gives a number that depends on its size."
exports = ["answer"]
axes.size = ["1", "1000"]

[op.device.cpu]
toolchain = "cxx"
sources = ["answer_cpu.cpp"]
defines.size = { 1 = "KART_SIZE=1", 1000 = "KART_SIZE=1000" }

[op.device.cuda]
toolchain = "nvcc"
sources = ["answer_cpu.cpp"]
min_arch = "7.5"
defines.size = { 1 = "KART_SIZE=1", 1000 = "KART_SIZE=1000" }
""",
    "include/scale.h": "#pragma once\n#define SCALE 7L\n",
    "demo/answer_cpu.cpp": """#include <tvm/ffi/c_api.h>
#include "scale.h"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = SCALE * KART_SIZE;
  return 0;
}
""",
}


class Compiler:
    """A g++ that writes down each time it is started, for whatever; does what `first` says, in sh, before its work.

    It stays the same program whatever that is.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.path = folder / "g++"
        self.first = folder / "first"
        self._calls = folder / "calls"
        real = shutil.which("g++")
        assert real is not None, "these tests need g++"
        before = f'[ -e {self.first} ] && . {self.first}\necho "$*" >> {self._calls}\n'
        self.path.write_text(f'#!/bin/sh\n{before}exec {real} "$@"\n')
        self.path.chmod(0o755)

    @property
    def starts(self) -> int:
        return len(self._lines())

    @property
    def compiled(self) -> int:
        return sum(" -c " in line for line in self._lines())

    def _lines(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path / "compiler")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A library with the op demo/answer, which takes a fifth of a second to compile."""
    for name, text in _TINY.items():
        path = tmp_path / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tiny"


@pytest.fixture
def site(tmp_path: Path, tiny: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The tiny library installed as a package, a plan of it, and machines that build it."""
    from tests.sites import Site

    made = Site(tmp_path / "yard", tiny, compiler)
    monkeypatch.syspath_prepend(made.packages)
    return made


@dataclass(frozen=True)
class Content:
    """One bundle to publish: for which arch and ABI, and what each uri holds.

    `op_digest` None takes that of the op as it is installed.
    """

    arch: str
    kernels: Mapping[str, bytes]
    family: str = "norm"
    abi: str = FFI_ABI
    library: str = "kartifacts"
    needs: Mapping[str, str] = field(default_factory=dict)
    op_digest: str | None = None
    exports: tuple[str, ...] = ("rmsnorm",)


MakeRelease = Callable[..., Released]


@pytest.fixture
def make_release(tmp_path: Path) -> MakeRelease:
    """Publishes bundles of any bytes as one release; they are what no compiler here can make, or must not be opened."""

    def make(*contents: Content, name: str = "made", version: str = "1.0") -> Released:
        out, lock = tmp_path / name / "repository", tmp_path / name / "kartifacts.lock"
        raw = tmp_path / name / "raw"
        raw.mkdir(parents=True)
        bundles = []
        for content in contents:
            entries = []
            for uri, data in content.kernels.items():
                path = raw / f"{len(list(raw.iterdir()))}.so"
                path.write_bytes(data)
                digest = installed_digest(uri, content.arch) if content.op_digest is None else content.op_digest
                entries.append(
                    PackInput(uri, path, ".so", op_digest=digest, exports=content.exports, needs=dict(content.needs))
                )
            notes: dict[str, Any] = {"library": content.library, "family": content.family, "abi": content.abi}
            bundles.append(pack_bundle(entries, out, arch=content.arch, toolchain={}, **notes))
        publish_release(out, contents[0].library, version, bundles)
        add_pins(lock, Repository(out).pins())
        return Released(out, lock, tuple(parse_arch(content.arch) for content in contents if content.arch != "any"))

    return make


def installed_digest(uri: str, arch: str) -> str:
    """The op digest of a specialisation as this checkout declares it."""
    op, _, query = uri.partition("?")
    axes = dict(pair.split("=") for pair in query.split("&"))
    return discover().find(op).spec(op, axes, parse_arch(arch)).op_digest


def declared(kind: str = "cpu") -> dict[str, dict[str, str]]:
    """Every uri that this checkout declares for a kind of device, with its axes.

    Read off the op.toml files with nothing of ours, as it stands for what a build has to make of them.
    """
    found = {}
    for path in (Path(__file__).parents[1] / "kernels").rglob("op.toml"):
        content = tomllib.loads(path.read_text())
        for op in content["op"]:
            names = sorted(op["axes"])
            for values in product(*(op["axes"][name] for name in names)) if kind in op["device"] else ():
                axes = dict(zip(names, values, strict=True))
                rules = [rule["when"] for rule in op.get("unsupported", [])]
                if not any(all(axes[name] in values for name, values in rule.items()) for rule in rules):
                    query = "&".join(f"{name}={value}" for name, value in axes.items())
                    found[f"{content['family']}/{op['name']}?{query}"] = axes
    return found


@pytest.fixture
def toolkit(machine: Machine) -> Path:
    """The CUDA toolkit of this machine."""
    try:
        return nvcc.discover(machine.settings()).root
    except NoCompiler as error:
        pytest.skip(f"needs a CUDA compiler: {error.message}")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process believe that it has GPUs, and a driver of CUDA 13."""

    def pretend(*names: str) -> None:
        monkeypatch.setattr(host, "_cuda", lambda: (tuple(map(parse_arch, names)), ""))
        monkeypatch.setattr(host, "has_driver", lambda: bool(names))
        monkeypatch.setattr(host, "driver", lambda: (13, 0) if names else None)

    return pretend


# -- what most tests start from ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    """Every op of this project for two CPU archs, as `kartifacts build` makes them."""
    base = tmp_path_factory.mktemp("released")
    lock = base / "kartifacts.lock"
    settings = Machine(base / "builder").settings(archs=CPU_ARCHS, progress="off")
    flows.build(settings, ops="", out=base / "repository", library="kartifacts", version="1.0", lock=lock)
    return Released(base / "repository", lock, parse_archs(CPU_ARCHS))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine that has nothing yet."""
    return Machine(tmp_path / "home")
