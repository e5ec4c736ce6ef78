"""`kartifacts demo`: the main job end to end on this machine's CPU, each step printed, the result checked."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from kartifacts import config
from kartifacts.cli import emit, flows, json_option
from kartifacts.errors import ConfigError, KartifactsError, VerificationError
from kartifacts.runtime import Registry, host
from kartifacts.testing import Mirror, faults

OP, AXES = "norm/rmsnorm", {"dtype": "float32"}
TOLERANCE = 1e-5  # relative error that float32 arithmetic stays well below
_WARM = """
import sys, kartifacts.cli.demo as demo
print(demo.error_of(demo.registry(*sys.argv[1:])))
"""


def registry(root: str, mirror: str) -> Registry:
    """A registry that sees nothing of the user's own settings but the demo's directory and mirror."""
    base = Path(root)
    overrides = {"store": base / "store", "workspace": base / "jit", "lock": base / "kartifacts.lock", "jit": "never"}
    return Registry(config.read({"HOME": root}, {**overrides, "mirrors": mirror, "progress": "off"}))


def error_of(registry: Registry) -> float:
    """Call rmsnorm on fresh random input; the relative error against float64, a NaN counting as infinite."""
    rng = np.random.default_rng()
    x = rng.standard_normal((37, 1000), dtype=np.float32)
    weight = rng.standard_normal(1000, dtype=np.float32)
    out = np.full_like(x, np.nan)
    registry.load(OP, device="cpu", **AXES).rmsnorm(x, weight, out, 1e-6)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6) * weight
    error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
    return error if np.isfinite(error) else float("inf")


@click.command("demo")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Leave everything in this directory.")
@json_option
def demo_command(keep: Path | None, as_json: bool) -> None:
    """Build a kernel for this CPU, publish, serve, fetch, verify, load, call and check it; needs a C++ compiler."""
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            if any(keep.iterdir()):
                raise ConfigError(f"{str(keep)!r} is not empty; nothing was changed")
        except OSError as error:
            raise ConfigError(f"cannot write into {str(keep)!r}: {error.strerror}") from error
        _run(keep.resolve(), as_json)
        return
    with tempfile.TemporaryDirectory(prefix="kartifacts-demo-") as directory:
        _run(Path(directory), as_json)


def _run(base: Path, as_json: bool) -> None:
    steps: list[dict[str, Any]] = []

    def step(title: str, run: Callable[[], str]) -> None:
        start = time.monotonic()
        said = run()
        steps.append({"step": title, "said": said, "seconds": round(time.monotonic() - start, 3)})
        if not as_json:
            click.echo(f"{len(steps)}. {title:<9} {said}  [{steps[-1]['seconds']:.2f} s]")

    arch = host.cpu()
    repository = base / "repository"
    user = config.read()
    here = {"HOME": str(base), "PATH": user.search_path, "KARTIFACTS_CXX": user.cxx}
    environment = config.read(here, {"workspace": base / "build", "archs": str(arch)})

    def build() -> str:
        lock = base / "kartifacts.lock"
        report = flows.build(environment, ops=OP, out=base / "out", library="kartifacts", version="demo", lock=lock)
        return f"{len(report['kernels'])} kernels of {OP} for {arch}, {report['jobs']} jobs ({report['jobs_reason']})"

    def publish() -> str:
        pin = flows.publish(
            base / "out", f"dir:{repository}", library=None, version=None, plan=None, lock=None, settings=environment
        )["pins"][0]
        return f"directory repository, release sha256:{pin['sha256'][:16]}…, pinned in kartifacts.lock"

    step("build", build)
    step("publish", publish)
    with Mirror(repository) as mirror:

        def call() -> str:
            error = error_of(registry(str(base), mirror.url))
            _check(error)
            return f"{mirror.count()} requests to {mirror.url}; rmsnorm(37×1000) is right: relative error {error:.1e}"

        def warm() -> str:
            before = mirror.count()
            command = [sys.executable, "-c", _WARM, str(base), mirror.url]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                raise KartifactsError(f"the second process failed: {done.stderr.strip()}")
            error = float(done.stdout)
            _check(error)
            if mirror.count() != before:
                raise KartifactsError(f"the second process made {mirror.count() - before} requests; expected none")
            return f"second process: 0 requests, relative error {error:.1e}"

        def flipped() -> str:
            mirror.order(faults.flip())
            elsewhere = base / "elsewhere"
            elsewhere.mkdir()
            (elsewhere / "kartifacts.lock").write_bytes((base / "kartifacts.lock").read_bytes())
            try:
                error_of(registry(str(elsewhere), mirror.url))
            except VerificationError as error:
                return f"refused: {error.message.splitlines()[0][:60]}…"
            raise KartifactsError("a mirror that flips bytes was believed")

        step("fetch", call)
        step("again", warm)
        with _quietly():
            step("tampered", flipped)

    def fall_back() -> str:
        overrides = {"store": base / "jit-store", "workspace": base / "jit-workspace", "jit": "auto"}
        kernel_registry = Registry(config.read(here, overrides))
        error = error_of(kernel_registry)
        _check(error)
        return f"no mirror, no lock: compiled here from the installed sources, relative error {error:.1e}"

    step("JIT", fall_back)
    emit(
        as_json, {"arch": str(arch), "steps": steps, "ok": True}, "all steps done, every result checked against float64"
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings about a fault that the demo makes itself."""
    log = logging.getLogger("kartifacts")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _check(error: float) -> None:
    if error > TOLERANCE:
        raise KartifactsError(f"rmsnorm is wrong: relative error {error:.3e}, expected at most {TOLERANCE:.0e}")
