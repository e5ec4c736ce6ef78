"""Rotary position embedding in float64: what every kernel of this family is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cos_sin_cache(count: int, head_dim: int, base: float = 10000.0) -> NDArray[np.float32]:
    """For every position below `count` the cosines of its angles, then their sines; pair i turns by base^(-2i / d)."""
    angles = np.outer(np.arange(count), base ** (-np.arange(0, head_dim, 2) / head_dim))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def apply_rope(x: Array, positions: NDArray[np.int64], cache: Array, style: str) -> Array:
    """Every head of x, ``(..., tokens, heads, head_dim)``, turned by the angles of its token's position.

    A pair (a, b) becomes ``(a cos - b sin, b cos + a sin)``: elements i and ``i + head_dim / 2`` in the style ``neox``,
    ``2 i`` and ``2 i + 1`` in the style ``interleaved``.
    """
    cosines, sines = np.split(np.asarray(cache, np.float64)[positions][..., None, :], 2, axis=-1)
    pairs = (2, -1) if style == "neox" else (-1, 2)
    axis = -2 if style == "neox" else -1
    first, second = np.moveaxis(np.reshape(np.asarray(x, np.float64), (*x.shape[:-1], *pairs)), axis, 0)
    turned = np.stack([first * cosines - second * sines, second * cosines + first * sines], axis=axis)
    return turned.reshape(x.shape)
