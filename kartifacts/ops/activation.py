"""Gated activations over the last dimension, for numpy arrays and torch tensors."""

from __future__ import annotations

from kartifacts.ops.dispatch import Array, Op

_silu_and_mul = Op("activation", "silu_and_mul", "x out", written="out")
_gelu_tanh_and_mul = Op("activation", "gelu_tanh_and_mul", "x out", written="out")


def silu_and_mul(x: Array, out: Array | None = None) -> Array:
    """``silu(x[..., :d]) * x[..., d:]``, where ``silu(v) = v / (1 + exp(-v))``.

    It gates a feed-forward layer as SwiGLU does (Shazeer, 2020, arXiv:2002.05202).  Made in float32, whatever the
    element type.  No gradient is recorded.

    Args:
        x: ``(..., 2 * d)`` of float16, bfloat16 or float32 (numpy's bfloat16 is that of ml_dtypes), on the CPU or a
            GPU.  The last dimension must be contiguous; the others may have any strides that fold into two.
        out: where to write, ``(..., d)``; may be ``x[..., :d]``.  A new array if not given.

    Returns:
        `out`.

    Raises:
        InputError: an argument has the wrong kind, element type, shape, device or strides.
        KartifactsError: what ``kartifacts.load("activation/silu_and_mul", ...)`` raises when there is no kernel.
    """
    return _gate(_silu_and_mul, x, out)


def gelu_tanh_and_mul(x: Array, out: Array | None = None) -> Array:
    """``gelu(x[..., :d]) * x[..., d:]``, with GELU's tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415).

    That is ``gelu(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v³))) / 2``.

    Args:
        x: ``(..., 2 * d)`` as for `silu_and_mul`.
        out: where to write, ``(..., d)``; may be ``x[..., :d]``.  A new array if not given.

    Returns:
        `out`.

    Raises:
        InputError: as for `silu_and_mul`.
        KartifactsError: what ``kartifacts.load("activation/gelu_tanh_and_mul", ...)`` raises when there is no kernel.
    """
    return _gate(_gelu_tanh_and_mul, x, out)


def _gate(op: Op, x: Array, out: Array | None) -> Array:
    call, empty = op.take(x)
    if out is None:
        shape = x.shape
        out = empty(x, (*shape[:-1], shape[-1] // 2) if shape else ())  # the binding refuses what has no columns
    call(x, out)
    return out
