"""Two small libraries of kernels in Python, for Triton and for CuTe DSL, and where tests of these compilers end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kartifacts.build import toolchains
from kartifacts.build.toolchains import Toolchain
from kartifacts.config import Settings
from kartifacts.errors import NoCompiler

from .conftest import write_files

TRITON = {
    "demo/op.toml": """
schema = 1
family = "demo"

[[op]]
name = "scale"
summary = "out = x * factor + BIAS."
exports = ["scale"]
axes.dtype = ["float16", "float32"]
axes.block = ["128", "1024"]

[op.device.cuda]
toolchain = "triton"
sources = ["scale.py"]

[op.device.cuda.kernel]
function = "scale"
arguments = { x = "*dtype:16", out = "*dtype:16", n = "int32", factor = "float32" }
constants = { BLOCK = "block", EVEN = false }
options = { num_warps = { block = { 128 = 1, 1024 = 8 } } }

[op.device.hip]
toolchain = "triton"
sources = ["scale.py"]

[op.device.hip.kernel]
function = "scale"
arguments = { x = "*dtype:16", out = "*dtype:16", n = "int32", factor = "float32" }
constants = { BLOCK = "block", EVEN = false }
options = { num_warps = 2 }
""",
    "demo/scale.py": """
import triton
import triton.language as tl
from shift import shifted
from shared.bias import BIAS

WIDTH = tl.constexpr(2)


@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at) if EVEN else tl.load(x + at, mask=inside)
    value = shifted(value.to(tl.float32), factor, BIAS * WIDTH).to(out.dtype.element_ty)
    if EVEN:
        tl.store(out + at, value)
    else:
        tl.store(out + at, value, mask=inside)
""",
    "demo/shift.py": """
import triton


@triton.jit
def shifted(value, factor, bias):
    return value * factor + bias
""",
    "include/shared/__init__.py": "",
    "include/shared/bias.py": "import triton.language as tl\n\nBIAS = tl.constexpr(0.5)\n",
    "include/shared/unused.py": "BIAS = 1\n",
}
DESCRIPTORS = {  # a kernel that wants memory for its blocks, where descriptors of tensors lie; from 9.0 on
    "demo/op.toml": """
schema = 1
family = "demo"

[[op]]
name = "twice"
summary = "out = 2 * x, of 64 x 64 elements."
exports = ["twice"]
axes = {}

[op.device.cuda]
toolchain = "triton"
sources = ["twice.py"]

[op.device.cuda.kernel]
function = "twice"
arguments = { x = "*float16:16", out = "*float16:16", rows = "int32" }
""",
    "demo/twice.py": """
import triton
import triton.language as tl


@triton.jit
def twice(x, out, rows, M: tl.constexpr = 64, N: tl.constexpr = 64):
    source = tl.make_tensor_descriptor(x, [rows, N], [N, 1], [M, N])
    target = tl.make_tensor_descriptor(out, [rows, N], [N, 1], [M, N])
    target.store([0, 0], source.load([0, 0]) * 2.0)
""",
}
CUTEDSL = {
    "demo/op.toml": """
schema = 1
family = "demo"

[[op]]
name = "scale"
summary = "out = x * factor + BIAS."
exports = ["scale"]
axes.dtype = ["float16", "float32"]

[op.device.cuda]
toolchain = "cutedsl"
sources = ["scale.py"]

[op.device.cuda.kernel]
function = "scale"
arguments = { x = "dtype(n)", out = "dtype(n)", factor = "float32", stream = "stream" }
constants = { THREADS = 128 }
""",
    "demo/scale.py": """
import cutlass
import cutlass.cute as cute
from bias import BIAS


@cute.kernel
def each(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32, THREADS: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * THREADS + thread
    if at < cute.size(x):
        out[at] = (x[at].to(cutlass.Float32) * factor + BIAS).to(out.element_type)


@cute.jit
def scale(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32, stream, THREADS: cutlass.Constexpr):
    blocks = cute.ceil_div(cute.size(x), THREADS)
    each(x, out, factor, THREADS).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)
""",
    "include/bias.py": "BIAS = 0.5\n",
    "include/unused.py": "BIAS = 1\n",
}


def found(kind: str, settings: Settings) -> Toolchain:
    """The compiler; skips where it is not installed, and fails where both must be there (as ci/toolchains says)."""
    try:
        return toolchains.find(kind, settings)
    except NoCompiler as error:
        if os.environ.get("KART_REQUIRE_TOOLCHAINS"):
            pytest.fail(str(error))
        pytest.skip(f"needs {kind}: {error}")


def edit(root: Path, name: str, old: str, new: str) -> None:
    """Change a file of a library; what is to be changed stands in it once."""
    text = (root / name).read_text()
    assert text.count(old) == 1, (name, old)
    (root / name).write_text(text.replace(old, new))


def write(root: Path, files: dict[str, str], **changed: str) -> Path:
    """Write a library; files that are changed are given by their names, `__` for `/`."""
    return write_files(root, {**files, **{name.replace("__", "/") + ".py": text for name, text in changed.items()}})
