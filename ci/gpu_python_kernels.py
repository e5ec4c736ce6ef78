"""The part of ci/gpu about kernels in Python: the calls that their page shows, and many more against float64."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.build.pythons import DESCRIPTORS, write
from tests.cli.test_python_guide import calls, write_package

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
ROWS, STRIDE = 37, 4352
WRONG = (TypeError, ValueError, RuntimeError)


def site_of(scratch: Path, env: dict[str, str]) -> dict[str, str]:
    """The environment of a process in which the page's library is installed."""
    write_package(scratch / "site")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(scratch / "site"))))}


def published() -> dict[str, Any]:
    """Kernels that were built where there is no GPU, by compilers that this machine need not have."""
    import kartifacts

    for text in calls():
        exec(text, {})
    kernels = {
        op: kartifacts.load(op, device="cuda", **axes)
        for op, axes in (
            ("softmax/softmax", {"dtype": "float16", "width": 1024}),
            ("saxpy/saxpy", {"dtype": "float16"}),
        )
    }
    softmax_agrees(kartifacts.load)
    saxpy_agrees(kartifacts.load)
    return {op: f"{kernel.origin}, {kernel.arch}" for op, kernel in kernels.items()}


def compiled() -> dict[str, Any]:
    """Triton as torch brings it, which compiles for the GPU that it runs on."""
    from importlib.metadata import version

    import kartifacts
    from kartifacts import config
    from kartifacts.build import toolchains
    from kartifacts.errors import NoCompiler

    try:
        toolchains.find("triton", config.read())
    except NoCompiler as error:
        return {"reason": str(error)}
    start = time.monotonic()
    kernel = kartifacts.load("softmax/softmax", device="cuda", dtype="bfloat16", width=4096)
    seconds = time.monotonic() - start
    assert kernel.origin == "jit", kernel.origin
    softmax_agrees(kartifacts.load, dtypes=("bfloat16",))
    with tempfile.TemporaryDirectory() as scratch:
        twice_agrees(kartifacts.Registry(libraries=[write(Path(scratch, "lib"), DESCRIPTORS)]).load)
    return {"triton": version("triton"), "seconds": seconds, "arch": str(kernel.arch)}


# -- each op -----------------------------------------------------------------------------------------------------------


def softmax_agrees(load: Callable[..., Any], dtypes: tuple[str, ...] = tuple(TOLERANCES)) -> None:
    import torch

    for name in dtypes:
        for width in (1024, 4096):
            kernel = load("softmax/softmax", device="cuda", dtype=name, width=width)
            for columns in (1, 17, width - 3, width):
                dtype = getattr(torch, name)
                x = 3 * torch.randn(ROWS, STRIDE, device="cuda", dtype=dtype)
                out = torch.full_like(x, float("nan"))
                kernel.softmax(ROWS, 1, 1, x, out, columns, STRIDE)
                agrees(out[:, :columns], torch.softmax(x[:, :columns].double(), -1), name)
                assert out[:, columns:].isnan().all(), f"{name}: it wrote behind its {columns} columns"
    with pytest.raises(WRONG, match="x must lie at a multiple of 16 bytes"):
        kernel.softmax(ROWS, 1, 1, x[:, 1:], out, 64, STRIDE)
    with pytest.raises(WRONG, match="columns"):
        kernel.softmax(ROWS, 1, 1, x, out, 1 << 40, STRIDE)
    kernel.softmax(0, 1, 1, x, out, 64, STRIDE)  # nothing to do
    in_streams_and_graphs(lambda: kernel.softmax(ROWS, 1, 1, x, out, 64, STRIDE), out[:, :64], x)
    agrees(out[:, :64], torch.softmax(x[:, :64].double(), -1), name)


def twice_agrees(load: Callable[..., Any]) -> None:
    """A kernel that is given memory for its blocks, in the order of the stream."""
    import torch

    kernel = load("demo/twice", device="cuda")
    x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    out = torch.full_like(x, float("nan"))
    kernel.twice(1, 1, 1, x, out, 64)
    assert torch.equal(out, 2 * x)
    in_streams_and_graphs(lambda: kernel.twice(1, 1, 1, x, out, 64), out, x)
    assert torch.equal(out, 2 * x)


def saxpy_agrees(load: Callable[..., Any]) -> None:
    import torch

    for name in ("float32", "float16"):
        kernel = load("saxpy/saxpy", device="cuda", dtype=name)
        for n in (1, 255, 256, 100_003):
            dtype = getattr(torch, name)
            x, y = torch.randn(2, n + 1, device="cuda", dtype=dtype)
            out = torch.full_like(x, float("nan"))
            kernel.saxpy(x[1:], y[1:], out[1:], -1.5)  # aligned to one element only
            agrees(out[1:], -1.5 * x[1:].double() + y[1:].double(), name)
            assert out[0].isnan()
    with pytest.raises(WRONG):
        kernel.saxpy(x, y, out.float(), 1.0)
    with pytest.raises(WRONG):
        kernel.saxpy(x, y[1:], out, 1.0)
    with pytest.raises(WRONG):
        kernel.saxpy(x[::2], y[::2], out[::2], 1.0)
    in_streams_and_graphs(lambda: kernel.saxpy(x, y, out, 3.0), out, x)
    agrees(out, 3.0 * x.double() + y.double(), name)


def agrees(found: Any, expected: Any, dtype: str) -> None:
    import torch

    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def in_streams_and_graphs(call: Callable[[], None], out: Any, x: Any) -> None:
    """The call goes to the caller's stream, be it captured; afterwards `out` is the answer for what `x` then holds."""
    import torch

    call()
    torch.cuda.synchronize()
    expected = out.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out.fill_(float("nan"))
        torch.cuda._sleep(20_000_000)  # noqa: SLF001  what is launched elsewhere would come first
        out.fill_(float("nan"))
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert torch.equal(out, expected), "the kernel did not wait for its stream"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    x.copy_(torch.randn_like(x))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(out, expected), "a captured launch is not replayed"
