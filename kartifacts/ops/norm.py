"""Norms over the last dimension, for numpy arrays and torch tensors."""

from __future__ import annotations

from kartifacts.ops.dispatch import Array, Op

_rmsnorm = Op("norm", "rmsnorm", "x weight out eps", written="out")
_fused_add_rmsnorm = Op("norm", "fused_add_rmsnorm", "x residual weight eps", written="x residual")
_layernorm = Op("norm", "layernorm", "x weight bias out eps", written="out")


def rmsnorm(x: Array, weight: Array, eps: float = 1e-6, out: Array | None = None) -> Array:
    """Root-mean-square norm: ``x / sqrt(mean(x²) + eps) * weight`` (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Sums and products are made in float32, whatever the element type.  No gradient is recorded.

    Args:
        x: ``(..., hidden)`` of float16, bfloat16 or float32 (numpy's bfloat16 is that of ml_dtypes), on the CPU or a
            GPU.  The last dimension must be contiguous; the others may have any strides that fold into two.
        weight: ``(hidden,)``, of the type and on the device of x.
        eps: added to the mean of squares; finite and not negative.
        out: where to write, of the shape of x; may be x itself.  A new array if not given.

    Returns:
        `out`.

    Raises:
        InputError: an argument has the wrong kind, element type, shape, device or strides.
        KartifactsError: what ``kartifacts.load("norm/rmsnorm", ...)`` raises when there is no kernel.
    """
    call, empty = _rmsnorm.take(x)
    if out is None:
        out = empty(x, None)
    call(x, weight, out, eps)
    return out


def fused_add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float = 1e-6) -> None:
    """``residual += x``, then ``x = rmsnorm(residual, weight, eps)``, both in place, as in FlashInfer.

    x is made from the sum as it is in float32, not as it is once rounded into the residual.

    Args:
        x: ``(..., hidden)`` as for `rmsnorm`; overwritten with the norm.
        residual: of the shape, type and device of x; overwritten with the sum.
        weight: ``(hidden,)``, of the type and on the device of x.
        eps: added to the mean of squares; finite and not negative.

    Raises:
        InputError: as for `rmsnorm`; also when x and residual share memory or are read-only.
        KartifactsError: what ``kartifacts.load("norm/fused_add_rmsnorm", ...)`` raises when there is no kernel.
    """
    call, _ = _fused_add_rmsnorm.take(x)
    call(x, residual, weight, eps)


def layernorm(x: Array, weight: Array, bias: Array, eps: float = 1e-5, out: Array | None = None) -> Array:
    """Layer norm: ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` (Ba et al., 2016, arXiv:1607.06450).

    The variance is that of the row itself (divided by hidden, not hidden - 1), made in float32 from centred values.

    Args:
        x: ``(..., hidden)`` as for `rmsnorm`.
        weight: ``(hidden,)``, of the type and on the device of x.
        bias: ``(hidden,)``, of the type and on the device of x.
        eps: added to the variance; finite and not negative; torch's default.
        out: where to write, of the shape of x; may be x itself.  A new array if not given.

    Returns:
        `out`.

    Raises:
        InputError: as for `rmsnorm`.
        KartifactsError: what ``kartifacts.load("norm/layernorm", ...)`` raises when there is no kernel.
    """
    call, empty = _layernorm.take(x)
    if out is None:
        out = empty(x, None)
    call(x, weight, bias, out, eps)
    return out
