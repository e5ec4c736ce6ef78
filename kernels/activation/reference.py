"""The gated activations in float64: what every kernel of this family is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def silu_and_mul(x: Array) -> Array:
    """``silu(x[..., :d]) * x[..., d:]``, where ``silu(v) = v / (1 + exp(-v))``."""
    gate, factor = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * factor


def gelu_tanh_and_mul(x: Array) -> Array:
    """``gelu(x[..., :d]) * x[..., d:]``, where ``gelu(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v³))) / 2``."""
    gate, factor = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * factor
