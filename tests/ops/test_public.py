"""The functions in kartifacts.ops and the declarations in kernels/ say the same, and calling is cheap."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kartifacts.runtime
from kartifacts import ops
from kartifacts.build import library
from kartifacts.ops import dispatch

KERNELS = Path(__file__).parents[2] / "kernels"
DECLARED = next(found for found in library.discover() if found.name == "kartifacts")


@pytest.mark.parametrize("op", DECLARED.ops)
def test_every_declared_op_has_a_documented_function(op: str) -> None:
    family, decl = DECLARED.find(op)
    function = getattr(ops, decl.name)
    assert decl.name in ops.__all__
    assert decl.exports == [decl.name]
    dispatched = [value for value in vars(sys.modules[function.__module__]).values() if isinstance(value, dispatch.Op)]
    (axes,) = [value.axes for value in dispatched if value.name == decl.name]
    assert {axis: list(values) for axis, values in axes.items()} == decl.axes
    for said in ("Args:", "Raises:", "InputError", f"{family}/{decl.name}", *inspect.signature(function).parameters):
        assert said in (inspect.getdoc(function) or ""), said


@pytest.mark.parametrize("op", DECLARED.ops)
def test_every_declared_reference_exists(op: str) -> None:
    family, decl = DECLARED.find(op)
    file, _, name = decl.reference.partition(":")
    assert re.search(rf"^def {name}\(", (KERNELS / family / file).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("source", sorted(KERNELS.rglob("*.cu*")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_device_code_includes_nothing_from_outside(source: Path) -> None:
    """An FFI header in a .cu costs seconds; one of the toolkit's, half of the launcher's compile time."""
    included = re.findall(r"^\s*#\s*include\s*(\S+)", source.read_text(encoding="utf-8"), re.MULTILINE)
    for name in included:
        assert name.startswith('"'), name
        assert (source.parent / name.strip('"')).is_file() or (KERNELS / "include" / name.strip('"')).is_file(), name


def test_importing_the_ops_imports_no_framework() -> None:
    heavy = "{'numpy', 'torch', 'tvm_ffi', 'requests', 'zstandard'}"
    code = (
        f"import sys, kartifacts.ops; sys.exit(repr({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kernel_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    load = kartifacts.runtime.load

    def counting(*args: Any, **axes: Any) -> Any:
        asked.append((args, axes))
        return load(*args, **axes)

    monkeypatch.setattr(kartifacts.runtime, "load", counting)
    monkeypatch.setattr("kartifacts.ops.activation._silu_and_mul._known", {})
    for _ in range(3):
        ops.silu_and_mul(np.ones((2, 8), np.float32))
    ops.silu_and_mul(np.ones((2, 8), np.float16))
    assert asked == [
        (("activation/silu_and_mul",), {"device": "cpu", "dtype": "float32"}),
        (("activation/silu_and_mul",), {"device": "cpu", "dtype": "float16"}),
    ]


def test_a_kernel_that_cannot_be_had_is_no_wrong_input(tmp_path: Path) -> None:
    """The caller's tensors are fine: what is missing is said as what it is, each time."""
    code = """
import numpy as np
from kartifacts import ops
from kartifacts.errors import MissingKernel
for _ in range(2):
    try:
        ops.rmsnorm(np.ones((2, 8), np.float32), np.ones(8, np.float32))
    except MissingKernel as error:
        print(error.uri)
"""
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "KARTIFACTS_STORE": str(tmp_path / "store"),
        "KARTIFACTS_WORKSPACE": str(tmp_path / "workspace"),
        "KARTIFACTS_JIT": "never",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["norm/rmsnorm?dtype=float32"] * 2
