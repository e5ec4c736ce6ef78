"""Scalars that a binding takes: each arrives as it was given, and what is none is refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm_ffi

from kartifacts.build.compile import compile_specs
from kartifacts.build.library import open_library
from kartifacts.model.arch import parse_arch
from tests.conftest import CPU_ARCHS, Machine

FILES = {
    "taken/op.toml": """
schema = 1
family = "taken"

[[op]]
name = "scalars"
summary = "Writes down its scalars."
exports = ["scalars"]
axes.dtype = ["float32"]

[op.device.cpu]
toolchain = "cxx"
sources = ["scalars_cpu.cpp"]
host_sources = ["scalars_binding.cpp"]
defines.dtype = { float32 = "KART_DTYPE=3" }
""",
    "taken/scalars.h": """
#include "kart/launch.h"
struct scalars_args { kart_rows out; float factor; float eps; int64_t window; int64_t any; bool causal; };
KART_LAUNCHER(scalars_args)
""",
    "taken/scalars_cpu.cpp": """
#include "kart/scalar.h"
#include "scalars.h"
int kart_launch(const scalars_args* args, void*) {
  float* out = kart::writable_row(args->out, 0);
  out[0] = args->factor, out[1] = args->eps, out[2] = args->window, out[3] = args->any, out[4] = args->causal;
  return 0;
}
""",
    "taken/scalars_binding.cpp": """
#include "kart/ffi.h"
#include "scalars.h"
static void scalars(kart::Call& call) {
  const kart::Rows out = call.vector(0, 5);
  const float factor = call.number(1), eps = call.epsilon(2);
  const int64_t window = call.integer(3, -1, 4096), any = call.integer(4);
  const bool causal = call.flag(5);
  call.launch(kart_launch, scalars_args{out.layout, factor, eps, window, any, causal});
}
KART_EXPORT(scalars, "out", "factor", "eps", "window", "any", "causal")
""",
}
GIVEN: dict[str, Any] = {"factor": -1.5, "eps": 0.25, "window": 7, "any": -3, "causal": True}
LARGEST = float(np.finfo(np.float32).max)


@pytest.fixture(scope="module")
def scalars(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The function of a kernel that takes one scalar of each kind."""
    root = tmp_path_factory.mktemp("scalars")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    spec = open_library(root).spec("taken/scalars", {"dtype": "float32"}, parse_arch(CPU_ARCHS.split()[0]))
    (kernel,) = compile_specs([spec], Machine(tmp_path_factory.mktemp("home")).settings()).kernels
    return tvm_ffi.load_module(str(kernel.path)).get_function("scalars")


def written(scalars: Any, **changed: Any) -> list[float]:
    out = np.zeros(5, np.float32)
    scalars(tvm_ffi.from_dlpack(out), *{**GIVEN, **changed}.values())
    return out.tolist()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [-1.5, 0.25, 7, -3, 1]),
        ({"factor": -2, "eps": 0, "window": -1, "any": 5, "causal": False}, [-2, 0, -1, 5, 0]),
        ({"factor": -LARGEST, "eps": LARGEST, "window": 4096}, [-LARGEST, LARGEST, 4096, -3, 1]),
        ({"any": -(2**63)}, [-1.5, 0.25, 7, -(2.0**63), 1]),
        ({"factor": np.float64(0.5), "window": np.int64(9)}, [0.5, 0.25, 9, -3, 1]),
    ],
)
def test_scalars_arrive_as_they_were_given(scalars: Any, changed: dict[str, Any], expected: list[float]) -> None:
    assert written(scalars, **changed) == expected


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("factor", True, TypeError, "factor must be a number"),
        ("factor", "1", TypeError, "factor must be a number"),
        ("factor", None, TypeError, "factor must be a number"),
        ("factor", float("nan"), ValueError, "factor must be finite in float32, got nan"),
        ("factor", float("-inf"), ValueError, "factor must be finite in float32, got -inf"),
        ("factor", -1e39, ValueError, "factor must be finite in float32, got -1e+39"),
        ("eps", 1e39, ValueError, "eps must be finite and not negative, got 1e+39"),
        ("eps", -0.5, ValueError, "eps must be finite and not negative, got -0.5"),
        ("window", 7.0, TypeError, "window must be an integer"),
        ("window", True, TypeError, "window must be an integer"),
        ("window", -2, ValueError, "window must be from -1 to 4096, got -2"),
        ("window", 4097, ValueError, "window must be from -1 to 4096, got 4097"),
        ("any", None, TypeError, "any must be an integer"),
        ("causal", 1, TypeError, "causal must be True or False"),
        ("causal", 0.0, TypeError, "causal must be True or False"),
        ("causal", None, TypeError, "causal must be True or False"),
    ],
)
def test_what_is_no_such_scalar_is_named(
    scalars: Any, name: str, value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        written(scalars, **{name: value})
    assert str(caught.value).splitlines()[0] == f"scalars: {message}"
