"""What only a GPU can show of launching: graphs, threads and processes without a context, broken images, bare ones."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kartifacts
from kartifacts import ops
from kartifacts.build import images
from kartifacts.errors import InputError, LoadError

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(autouse=True)
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch


def fresh(code: str, **environ: str) -> Any:
    """What `code` leaves in `out`, run by a process that has launched nothing yet."""
    import os

    program = f"import json\n{code}\nprint(json.dumps(out))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FIRST_IN_A_GRAPH = """
import torch
from kartifacts import ops
x, weight, gate = (torch.randn(*shape, device="cuda") for shape in ((64, 4096), (4096,), (64, 8192)))
q, k = torch.randn(64, 8, 128, device="cuda"), torch.randn(64, 2, 128, device="cuda")
cache, positions = torch.randn(64, 128, device="cuda"), torch.arange(64, device="cuda")
residual, out, gated = torch.zeros_like(x), torch.empty_like(x), torch.empty_like(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=MODE):
    ops.rmsnorm(x, weight, out=out)
    ops.silu_and_mul(gate, out=gated)
    ops.layernorm(out, weight, weight, out=out)
    ops.fused_add_rmsnorm(out, residual, weight)
    ops.apply_rope(q, k, positions, cache)
x.normal_(); gate.normal_(); residual.zero_()
before = q.clone()
graph.replay()
torch.cuda.synchronize()
norm = torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)
norm = torch.nn.functional.layer_norm(norm, (4096,), weight, weight, 1e-5)
cos, sin = cache[:, None].chunk(2, -1)
a, b = before.chunk(2, -1)
turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
gates = torch.nn.functional.silu(gate[:, :4096]) * gate[:, 4096:]
close = lambda x, y: torch.allclose(x, y, rtol=1e-4, atol=1e-4)
out = [close(residual, norm), close(gated, gates), close(q, turned)]
"""


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
@pytest.mark.parametrize("mode", ["global", "relaxed"])
def test_the_first_launch_of_a_process_may_be_captured(mode: str, loading: str) -> None:
    """Loading code while a graph is captured is what the driver forbids, unless it is asked."""
    code = FIRST_IN_A_GRAPH.replace("MODE", repr(mode))
    assert fresh(code, CUDA_MODULE_LOADING=loading) == [True, True, True]


def test_a_thread_needs_no_context_and_is_left_without(torch: Any) -> None:
    x, weight = torch.randn(64, 512, device="cuda"), torch.randn(512, device="cuda")
    expected = torch.nn.functional.rms_norm(x, (512,), weight, 1e-6)
    out = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    contexts: list[Any] = []

    def work() -> None:
        context = ctypes.c_void_p()
        kernel = kartifacts.load("norm/rmsnorm", device="cuda", dtype="float32")
        for _ in range(3):
            kernel.rmsnorm(x, weight, out, 1e-6)
            driver.cuCtxGetCurrent(ctypes.byref(context))
            contexts.append(context.value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert contexts == [None] * 3


def test_a_process_without_torch_launches_on_the_memory_of_others() -> None:
    pytest.importorskip("cupy", reason="cupy is not installed")
    code = """
import sys
sys.modules["torch"] = None
import cupy, numpy as np, kartifacts
x, weight = (cupy.asarray(np.random.default_rng().standard_normal(shape, dtype="f4")) for shape in ((8, 512), (512,)))
got = cupy.full_like(x, np.nan)
kartifacts.load("norm/rmsnorm", device="cuda", dtype="float32").rmsnorm(x, weight, got, 1e-6)
cupy.cuda.Device().synchronize()
wide = cupy.asnumpy(x).astype("f8")
wide = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * cupy.asnumpy(weight)
out = [float(np.abs(cupy.asnumpy(got) - wide).max()), sys.modules["torch"] is None]
"""
    error, without = fresh(code)
    assert error < 1e-4
    assert without


def test_work_follows_the_stream_that_is_current(torch: Any) -> None:
    """Each launch waits for the copy before it on its own stream, and none for the other's."""
    weight = torch.ones(4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [torch.zeros(8192, 4096, device="cuda") for _ in streams]
    outs = [torch.empty_like(x) for x in xs]
    torch.cuda.synchronize()
    for stream, x, out in zip(streams, xs, outs, strict=True):
        with torch.cuda.stream(stream):
            for value in (3.0, 2.0, 1.0):
                x.fill_(value)
            ops.rmsnorm(x, weight, out=out)
            x.fill_(0.0)
    torch.cuda.synchronize()
    for out in outs:
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=1e-5)


def test_the_device_of_the_tensors_is_where_it_runs_whichever_is_current(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, weight = torch.randn(64, 512, device="cuda:1"), torch.randn(512, device="cuda:1")
    with torch.cuda.device(0):
        out = ops.rmsnorm(x, weight)
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (512,), weight, 1e-6), rtol=1e-5, atol=1e-5)


def _rebuilt(tmp_path: Path, image: bytes) -> Any:
    """The kernel of rmsnorm with another image attached."""
    import tvm_ffi

    module = kartifacts.load("norm/rmsnorm", device="cuda", dtype="float32").path.read_bytes()
    found = images.attached(module)
    assert found is not None
    start = module.index(found[0])
    broken = bytearray(module)
    broken[start : start + len(found[0])] = image.ljust(len(found[0]), b"\0")[: len(found[0])]
    (tmp_path / "broken.so").write_bytes(broken)
    return tvm_ffi.load_module(str(tmp_path / "broken.so"))


@pytest.mark.parametrize("case", ["garbage", "another GPU's"])
def test_an_image_that_the_driver_does_not_take_is_an_error_that_says_so(torch: Any, tmp_path: Path, case: str) -> None:
    module = kartifacts.load("norm/rmsnorm", device="cuda", dtype="float32").path.read_bytes()
    found = images.attached(module)
    assert found is not None
    if case == "garbage":
        image = b"no image at all"
    else:
        (flags,) = np.frombuffer(found[0][48:52], "<u4")
        other = (int(flags) & ~0xFF00) | (75 << 8)  # the base of its arch, as ptxas of CUDA 13 writes it
        image = found[0][:48] + other.to_bytes(4, "little") + found[0][52:]
    x = torch.ones(4, 64, device="cuda")
    with pytest.raises(RuntimeError, match=r"^rmsnorm: the launch on cuda:0 failed: .*image.*: .*\(\d+\)"):
        _rebuilt(tmp_path, image).rmsnorm(x, torch.ones(64, device="cuda"), torch.empty_like(x), 1e-6)
    torch.testing.assert_close(ops.rmsnorm(x, torch.ones(64, device="cuda")), x, rtol=1e-5, atol=1e-5)


def test_a_kernel_may_be_dropped_and_loaded_again(torch: Any, tmp_path: Path) -> None:
    """Work that is queued and graphs that are captured outlive the module whose code they run."""
    import gc

    import tvm_ffi

    content = kartifacts.load("norm/rmsnorm", device="cuda", dtype="float32").path.read_bytes()
    x, weight = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, device="cuda")
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    for number in range(3):
        path = tmp_path / f"kernel{number}.so"
        path.write_bytes(content)
        module = tvm_ffi.load_module(str(path))
        with torch.cuda.graph(graph) if number == 0 else torch.cuda.stream(torch.cuda.current_stream()):
            module.rmsnorm(x, weight, out, 1e-6)
        del module
        gc.collect()
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6), rtol=1e-5, atol=1e-5)


BARE = {
    "bare/op.toml": """
schema = 1
family = "bare"

[[op]]
name = "axpy"
summary = "y += a x, by a kernel that has no launcher."
exports = ["axpy"]
axes.dtype = ["float32"]

[op.device.cuda]
toolchain = "nvrtc"
sources = ["axpy.cu"]
""",
    "bare/axpy.cu": """
extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
  extern __shared__ float room[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  room[threadIdx.x] = i < n ? a * x[i] : 0.0f;
  if (i < n) y[i] += room[threadIdx.x];
}
""",
}


def test_an_image_without_a_launcher_is_launched_by_its_caller(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kartifacts import config
    from kartifacts.errors import NoCompiler

    for name, text in BARE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = config.read(overrides={"workspace": tmp_path / "workspace", "jit": "always"})
    registry = kartifacts.Registry(settings, libraries=[tmp_path])
    try:
        kernel = registry.load("bare/axpy", device="cuda", dtype="float32")
    except NoCompiler as error:
        pytest.skip(str(error))
    assert kernel.path.suffix == ".cubin"
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    expected = y + 2.5 * x
    kernel.axpy.launch(8, 128, y, x, 2.5, 1000, shared=512, stream=torch.cuda.current_stream())
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.axpy.launch(8, (128, 1, 1), y, x, 2.5, 1000, shared=100 << 10, stream=torch.cuda.current_stream())
    graph.replay()
    torch.testing.assert_close(y, expected + 2.5 * x, rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError):
        kernel.axpy.launch(8, 2048, y, x, 2.5, 1000)
    with pytest.raises(LoadError):
        kernel.axpy.launch(8, 128, y, x, 2.5, 1000, shared=1 << 20)
