"""The norms in float64: what every kernel of this family is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def fused_add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """The new x and the new residual: ``residual + x`` normalised, and ``residual + x``."""
    total = np.asarray(x, np.float64) + residual
    return rmsnorm(total, weight, eps), total


def layernorm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last dimension."""
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float64)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * weight + bias
