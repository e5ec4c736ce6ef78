"""What ci/gpu does: fetches published kernels, checks and times them on this GPU, compiles others, prints a table."""

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
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent.parent
SETTINGS = "KARTIFACTS_"
ROWS, HIDDEN, GATED = 32768, 4096, (16384, 14336)
ROPE = (32768, 32, 8, 128)  # tokens, heads of queries and of keys, elements of a head
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
        python_kernels = step("python_kernels", with_page(Path(scratch), published))
    with tempfile.TemporaryDirectory() as scratch:
        compiled = step("jit", without_tools(environment(Path(scratch), JIT="always", CUDA_COMPILER="nvrtc")))
    with tempfile.TemporaryDirectory() as scratch:
        launched = step("forms", environment(Path(scratch), JIT="always"), scratch)
    with tempfile.TemporaryDirectory() as scratch:
        by_triton = step("triton", with_page(Path(scratch), environment(Path(scratch), JIT="always")))
    print_table([Line(*line) for line in timed["lines"]], commit)
    print_python_kernels(python_kernels, by_triton)
    print_facts(compiled, {**launched, "ops.rmsnorm": timed["call"]})


# -- steps, each a process of its own, since settings are read once ----------------------------------------------------


def environment(scratch: Path, **settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    own = {"STORE": str(scratch / "store"), "WORKSPACE": str(scratch / "workspace"), **settings}
    return {**kept, **{SETTINGS + name: value for name, value in own.items()}}


def without_tools(env: dict[str, str]) -> dict[str, str]:
    """No program can be found, and kartifacts is the installed one where there is one, which brings its launchers."""
    places = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if Path(place) != HERE]
    installed = any(Path(place, "kartifacts/_kernels").is_dir() for place in places)
    if not installed:
        return env
    return {**env, "PYTHONPATH": os.pathsep.join(places), "PATH": ""}


def step(name: str, env: dict[str, str], *arguments: str) -> Any:
    """Run one of STEPS in a new process; gives what it returned."""
    command = [sys.executable, __file__, f"--{name}", *arguments]
    done = subprocess.run(command, cwd=HERE / "ci", env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def with_page(scratch: Path, env: dict[str, str]) -> dict[str, str]:
    """Installs the library of the page about kernels in Python."""
    sys.path.insert(0, str(HERE))
    import gpu_python_kernels

    return gpu_python_kernels.site_of(scratch, env)


def python_kernels() -> Any:
    import gpu_python_kernels

    return gpu_python_kernels.published()


def triton() -> Any:
    import gpu_python_kernels

    return gpu_python_kernels.compiled()


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
    """Compile two kernels on this machine, and compare them with the reference."""
    import numpy as np
    import torch

    import kartifacts
    from kartifacts import ops

    sys.path.insert(0, str(HERE / "kernels/norm"))
    from reference import rmsnorm  # type: ignore[import-not-found]

    seconds = []
    for dtype in ("bfloat16", "float16"):
        x = torch.randn(64, 4097, device="cuda", dtype=getattr(torch, dtype))
        weight = torch.randn(4097, device="cuda", dtype=x.dtype)
        out = torch.full_like(x, float("nan"))
        start = time.monotonic()
        kernel = kartifacts.load("norm/rmsnorm", device="cuda", dtype=dtype)
        seconds.append(time.monotonic() - start)
        ops.rmsnorm(x, weight, out=out)
        expected = rmsnorm(x.double().cpu().numpy(), weight.double().cpu().numpy(), 1e-6)
        np.testing.assert_allclose(out.double().cpu().numpy(), expected, rtol=4e-3, atol=1e-5)
    return {
        "seconds": seconds,
        "origin": kernel.origin,
        "arch": str(kernel.arch),
        "from": "a checkout" if Path(kartifacts.__file__).is_relative_to(HERE) else "the installed wheel",
        "path": os.environ.get("PATH", ""),
    }


# -- launching ---------------------------------------------------------------------------------------------------------


def forms(scratch: str) -> Any:
    """What a launch costs the host, through an attached image and through the CUDA runtime that an object holds."""
    import torch

    import kartifacts

    sys.path.insert(0, str(HERE))
    from tests.cli.test_guide import link_objects, write_library

    calls: dict[str, Callable[[], Any]] = {}
    x, out = torch.ones(1, 64, device="cuda"), torch.empty(1, 64, device="cuda")
    for form in ("image", "object"):
        library = Path(scratch, form)
        write_library(library)
        if form == "object":
            link_objects(library)
        scale = kartifacts.Registry(libraries=[library]).load("scale/scale", device="cuda", dtype="float32").scale
        scale(x, 1.5, out)
        torch.testing.assert_close(out, 1.5 * x)
        calls[form] = lambda scale=scale: scale(x, 1.5, out)
    seconds: dict[str, list[float]] = {}
    for _ in range(15):
        for form, call in calls.items():
            seconds.setdefault(form, []).append(host_seconds(call, 800))
            torch.cuda.synchronize()
            with ThreadPool(1) as elsewhere:  # where no context is current, until the CUDA runtime makes one so
                seconds.setdefault(f"{form}, in a thread of its own", []).append(elsewhere.apply(queue, (call, 800)))
            torch.cuda.synchronize()
    return {form: min(taken) for form, taken in seconds.items()}


# -- times -------------------------------------------------------------------------------------------------------------


def times() -> Any:
    import torch

    from kartifacts import ops

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, weight = normal(1, HIDDEN), normal(HIDDEN)
    return {
        "lines": norm_times(normal) + gated_times(normal) + rope_times(normal),
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


def rope_times(normal: Callable[..., Any]) -> list[Line]:
    import torch

    from kartifacts import ops

    tokens, q_heads, k_heads, head_dim = ROPE
    size = tokens * (q_heads + k_heads) * head_dim * 2
    heads = [(normal(tokens, q_heads, head_dim), normal(tokens, k_heads, head_dim)) for _ in range(MEMORY // size)]
    positions = torch.arange(tokens, device="cuda")
    angles = torch.outer(positions.float(), 10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim))
    cache = torch.cat((angles.cos(), angles.sin()), -1)

    def torch_rope(*given: Any) -> None:
        cos, sin = cache[positions][:, None].to(torch.bfloat16).chunk(2, -1)
        for x in given:
            a, b = x.chunk(2, -1)
            x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))

    shape = f"{tokens} × {q_heads} + {k_heads} × {head_dim}"
    return [
        Line(
            f"apply_rope, {style}",
            shape,
            median_seconds(lambda q, k, style=style: ops.apply_rope(q, k, positions, cache, style), heads),
            2 * size + positions.nbytes + cache.nbytes,
            median_seconds(torch_rope, heads) if style == "neox" else None,
        )
        for style in ("neox", "interleaved")
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
    return queue(call, repeats)


def queue(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


# -- the table ---------------------------------------------------------------------------------------------------------


def print_table(lines: list[Line], commit: str) -> None:
    copy = max(line.bytes / line.seconds for line in lines if line.what.startswith("copy"))
    print(f"\n{facts()}, commit {commit}.  All kernels agree with the float64 reference.\n")
    print("| bfloat16 | shape | µs | TB/s | of copy | torch µs | torch / ours |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for line in lines:
        speed = line.bytes / line.seconds
        torch = f"{line.torch * 1e6:.1f} | {line.torch / line.seconds:.2f}" if line.torch else " | "
        row = f"{line.seconds * 1e6:.1f} | {speed / 1e12:.2f} | {speed / copy:.1%} | {torch}"
        print(f"| {line.what} | {line.shape} | {row} |")


def print_facts(compiled: dict[str, Any], launched: dict[str, float]) -> None:
    first, second = compiled["seconds"]
    print(
        f"\nrmsnorm compiled there for {compiled['arch']} by NVRTC ({compiled['origin']}) from {compiled['from']}, "
        f"PATH={compiled['path']!r}, agrees too: {first:.2f} s, and {second:.2f} s for another element type."
    )
    for what, seconds in launched.items():
        print(f"a call of {what}: {seconds * 1e9:.0f} ns of the host")


def print_python_kernels(published: dict[str, str], by_triton: dict[str, Any]) -> None:
    for op, found in published.items():
        print(f"\n{op}, in Python, built elsewhere ({found}), agrees with the float64 reference.", end="")
    if "triton" in by_triton:
        print(
            f"\nsoftmax/softmax compiled there for {by_triton['arch']} by Triton {by_triton['triton']}, agrees too: "
            f"{by_triton['seconds']:.2f} s."
        )
    else:
        print(f"\nNo kernel of Triton was compiled there: {by_triton['reason']}")


def facts() -> str:
    card = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()[0]
    name, driver = card.split(", ")
    return f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}, {name}, driver {driver}"


STEPS: dict[str, Callable[..., Any]] = {
    "--fetch": fetch,
    "--times": times,
    "--jit": jit,
    "--forms": forms,
    "--python_kernels": python_kernels,
    "--triton": triton,
}

if __name__ == "__main__":
    if sys.argv[1] in STEPS:
        print(json.dumps(STEPS[sys.argv[1]](*sys.argv[2:])))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "unknown")
