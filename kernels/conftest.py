"""What the families' tests share: arrays of every framework, filled with values that the reference sees as well."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Half a unit in the last place of a result, with a little more for what float32 adds; and an absolute floor.
TOLERANCE = {"float16": (5.0e-4, 1e-5), "bfloat16": (4.0e-3, 1e-5), "float32": (1e-5, 2e-6)}


class Arrays:
    """Makes and reads arrays of one framework, element type and device."""

    def __init__(self, framework: str, device: str, dtype: str) -> None:
        self.framework = framework
        self.device = device
        self.dtype = dtype
        self.random = np.random.default_rng()

    def make(self, values: Any) -> Any:
        """An array of the values, rounded to the element type."""
        if self.framework == "torch":
            import torch

            return torch.tensor(np.asarray(values, np.float64)).to(self.device, getattr(torch, self.dtype))
        if self.dtype == "bfloat16":
            ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy needs ml_dtypes for bfloat16")
            return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)
        return np.asarray(values, self.dtype)

    def normal(self, *shape: int) -> Any:
        return self.make(self.random.standard_normal(shape))

    def poisoned(self, *shape: int) -> Any:
        """What a kernel must overwrite: NaN everywhere."""
        return self.make(np.full(shape, np.nan))

    def read(self, array: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        if self.framework == "torch":
            return np.asarray(array.detach().cpu().double().numpy())
        return np.asarray(array, np.float64)

    def check(self, got: Any, expected: Any, slack: Any = 0.0) -> None:
        relative, absolute = TOLERANCE[self.dtype]
        bound = relative * np.abs(expected) + absolute + slack
        np.testing.assert_array_less(np.abs(self.read(got) - expected), bound)


@pytest.fixture(
    params=[
        "numpy",
        pytest.param("torch", marks=pytest.mark.torch),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.torch]),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The framework and the device."""
    if request.param == "numpy":
        return "numpy", "cpu"
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return "torch", "cpu" if request.param == "torch" else "cuda"


@pytest.fixture(params=["float16", "bfloat16", "float32"])
def arrays(request: pytest.FixtureRequest, place: tuple[str, str]) -> Arrays:
    return Arrays(*place, request.param)


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    """The float64 reference of an op of the family whose test asks."""
    path = Path(request.path).parent / "reference.py"
    spec = importlib.util.spec_from_file_location(f"reference_of_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda op: getattr(module, op)
