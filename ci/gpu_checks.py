"""What ci/gpu does: fetches published kernels, checks and times them on this GPU, compiles one here, prints a table."""

from __future__ import annotations

import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent.parent
SETTINGS = "KARTIFACTS_"
ROWS, HIDDEN, GATED = 32768, 4096, (16384, 14336)
MEMORY = 4 << 30  # bytes over which each timing rotates, so that nothing is found in a cache


class Line(NamedTuple):
    """One row of the table: bytes are read and written ones."""

    what: str
    shape: str
    seconds: float
    bytes: int
    torch: float | None = None


def main(repository: Path, lock: Path, commit: str) -> None:
    with tempfile.TemporaryDirectory() as scratch, mirror_of(repository) as (url, requests):
        published = environment(Path(scratch), MIRRORS=url, LOCK=str(lock.resolve()), JIT="never")
        report = step("fetch", published)
        print(f"fetched {report['kernels']} kernels, {report['bytes']} bytes in {requests()} requests of the mirror")
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "kernels", "tests/ops"]
        subprocess.run(tests, cwd=HERE, env=published, check=True)
        timed = step("times", published)
    with tempfile.TemporaryDirectory() as scratch:
        compiled = step("jit", environment(Path(scratch), JIT="always"))
    print_table([Line(*line) for line in timed["lines"]], compiled, timed["call"], commit)


# -- steps, each a process of its own, since settings are read once ----------------------------------------------------


def environment(scratch: Path, **settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    own = {"STORE": str(scratch / "store"), "WORKSPACE": str(scratch / "workspace"), **settings}
    return {**kept, **{SETTINGS + name: value for name, value in own.items()}}


def step(name: str, env: dict[str, str]) -> Any:
    """Run one of STEPS in a new process; gives what it returned."""
    done = subprocess.run(
        [sys.executable, __file__, f"--{name}"], cwd=HERE, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


@contextmanager
def mirror_of(repository: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    from kartifacts.testing.mirror import Mirror

    with Mirror(repository) as mirror:
        yield mirror.url, mirror.count


def fetch() -> Any:
    from kartifacts import config
    from kartifacts.cli import flows

    return flows.fetch(config.read(), flows.Selection(None, "", "", ()), out=None)


def jit() -> Any:
    """Compile one kernel on this machine and compare it with the reference."""
    import numpy as np
    import torch

    import kartifacts
    from kartifacts import ops

    sys.path.insert(0, str(HERE / "kernels/norm"))
    from reference import rmsnorm  # type: ignore[import-not-found]

    x = torch.randn(64, 4097, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4097, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    start = time.monotonic()
    kernel = kartifacts.load("norm/rmsnorm", device="cuda", dtype="bfloat16")
    seconds = time.monotonic() - start
    ops.rmsnorm(x, weight, out=out)
    expected = rmsnorm(x.double().cpu().numpy(), weight.double().cpu().numpy(), 1e-6)
    np.testing.assert_allclose(out.double().cpu().numpy(), expected, rtol=4e-3, atol=1e-5)
    return {"seconds": seconds, "origin": kernel.origin, "arch": str(kernel.arch)}


# -- times -------------------------------------------------------------------------------------------------------------


def times() -> Any:
    import torch

    from kartifacts import ops

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, weight = normal(1, HIDDEN), normal(HIDDEN)
    return {
        "lines": norm_times(normal) + gated_times(normal),
        "call": host_seconds(lambda: ops.rmsnorm(x, weight, out=x)),
    }


def norm_times(normal: Callable[..., Any]) -> list[Line]:
    from torch.nn import functional

    from kartifacts import ops

    weight, bias = normal(HIDDEN), normal(HIDDEN)
    size = ROWS * HIDDEN * 2
    pairs = [(normal(ROWS, HIDDEN), normal(ROWS, HIDDEN)) for _ in range(MEMORY // (2 * size))]

    def line(what: str, moved: int, call: Callable[[Any, Any], Any], torch: Callable[[Any, Any], Any] | None) -> Line:
        theirs = None if torch is None else median_seconds(torch, pairs)
        return Line(what, f"{ROWS} × {HIDDEN}", median_seconds(call, pairs), moved, theirs)

    def torch_fused(x: Any, residual: Any) -> None:
        residual.add_(x)
        x.copy_(functional.rms_norm(residual, (HIDDEN,), weight, 1e-6))

    return [
        line("copy, device to device", 2 * size, lambda x, out: out.copy_(x), None),
        line(
            "rmsnorm",
            2 * size,
            lambda x, out: ops.rmsnorm(x, weight, out=out),
            lambda x, _: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
        ),
        line(
            "layernorm",
            2 * size,
            lambda x, out: ops.layernorm(x, weight, bias, out=out),
            lambda x, _: functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-5),
        ),
        line(
            "fused_add_rmsnorm",
            4 * size,
            lambda x, residual: ops.fused_add_rmsnorm(x, residual, weight),
            torch_fused,
        ),
        line("copy again", 2 * size, lambda x, out: out.copy_(x), None),
    ]


def gated_times(normal: Callable[..., Any]) -> list[Line]:
    import torch
    from torch.nn import functional

    from kartifacts import ops

    count, columns = GATED
    size = count * columns * 2
    sets = [(normal(count, 2 * columns), normal(count, columns)) for _ in range(max(2, MEMORY // (3 * size)))]

    def torch_gate(activation: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda x, out: torch.mul(activation(x[:, :columns]), x[:, columns:], out=out)

    return [
        Line(
            op.__name__,
            f"{count} × 2·{columns}",
            median_seconds(lambda x, out, op=op: op(x, out=out), sets),
            3 * size,
            median_seconds(torch_gate(activation), sets),
        )
        for op, activation in (
            (ops.silu_and_mul, functional.silu),
            (ops.gelu_tanh_and_mul, lambda gate: functional.gelu(gate, approximate="tanh")),
        )
    ]


def median_seconds(call: Callable[..., Any], sets: list[tuple[Any, ...]], repeats: int = 60) -> float:
    """The median of what the device took, each time with the next of `sets` as arguments."""
    import torch

    seconds = []
    for number, arguments in zip(range(repeats + 10), cycle(sets), strict=False):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(*arguments)
        end.record()
        end.synchronize()
        if number >= 10:  # the first ones load code and wake the device
            seconds.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds))


def host_seconds(call: Callable[[], Any], repeats: int = 2000) -> float:
    """What the host takes to queue one call."""
    import torch

    for _ in range(100):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


# -- the table ---------------------------------------------------------------------------------------------------------


def print_table(lines: list[Line], compiled: dict[str, Any], call: float, commit: str) -> None:
    copy = max(line.bytes / line.seconds for line in lines if line.what.startswith("copy"))
    print("\n| bfloat16 | shape | µs | TB/s | of copy | torch µs | torch / ours |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for line in lines:
        speed = line.bytes / line.seconds
        torch = f"{line.torch * 1e6:.1f} | {line.torch / line.seconds:.2f}" if line.torch else " | "
        row = f"{line.seconds * 1e6:.1f} | {speed / 1e12:.2f} | {speed / copy:.1%} | {torch}"
        print(f"| {line.what} | {line.shape} | {row} |")
    print(
        f"\nAll kernels agree with the float64 reference.  rmsnorm compiled there with nvcc for {compiled['arch']} "
        f"({compiled['origin']}) in {compiled['seconds']:.2f} s agrees too.  "
        f"The host queues a call in {call * 1e6:.1f} µs.  {facts()}, commit {commit}."
    )


def facts() -> str:
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()[0]
    name, driver = card.split(", ")
    return f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}, {name}, driver {driver}"


STEPS = {"--fetch": fetch, "--times": times, "--jit": jit}

if __name__ == "__main__":
    if sys.argv[1] in STEPS:
        print(json.dumps(STEPS[sys.argv[1]]()))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "unknown")
