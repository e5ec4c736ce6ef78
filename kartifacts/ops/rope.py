"""Rotary position embedding, for numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Literal

from kartifacts.ops.dispatch import Array, HasShape, Op

_apply_rope = Op(
    "rope",
    "apply_rope",
    "q k positions cos_sin_cache",
    written="q k",
    typed="positions cos_sin_cache",
    axes={"head_dim": ("64", "128", "256"), "style": ("neox", "interleaved")},
)


def apply_rope(
    q: Array,
    k: Array,
    positions: HasShape,
    cos_sin_cache: HasShape,
    style: Literal["neox", "interleaved"] = "neox",
) -> None:
    """Rotary position embedding of queries and keys, in place (RoFormer, Su et al., 2021, arXiv:2104.09864).

    Pair i of a head at position p, ``(a, b)``, becomes ``(a cos - b sin, b cos + a sin)`` of the angle that the cache
    has for p and i; usually ``p * base ** (-2 * i / head_dim)`` with a base of 10000.  Made in float32, whatever the
    element type.  To turn only a part of each head, pass that part: ``q[..., :64]``.  No gradient is recorded.

    Args:
        q: ``(..., tokens, heads, head_dim)`` of float16, bfloat16 or float32 (numpy's bfloat16 is that of ml_dtypes),
            on the CPU or a GPU; overwritten.  A head is 64, 128 or 256 contiguous elements; the other dimensions may
            have any strides that fold into two, so that parts of a fused projection need no copy.
        k: as q, but for the number of heads, which may be zero; overwritten.
        positions: ``(..., tokens)`` of int32 or int64, contiguous, on the device of q.  One that the cache does not
            have is refused on a CPU; on a GPU its token becomes NaN.
        cos_sin_cache: ``(positions, head_dim)`` of float32, on the device of q: in each row the cosines of all pairs,
            then their sines, as vLLM and FlashInfer keep them.
        style: ``neox`` pairs elements i and ``i + head_dim / 2``; ``interleaved`` pairs ``2 * i`` and ``2 * i + 1``,
            in heads of 64 and 128.

    Raises:
        InputError: an argument has the wrong kind, element type, shape, device or strides; q and k share memory.
        ConfigError: no kernel is declared for this head_dim and style; says why.
        KartifactsError: what ``kartifacts.load("rope/apply_rope", ...)`` raises when there is no kernel.
    """
    shape = getattr(q, "shape", ())
    call, _ = _apply_rope.take(q, shape[-1] if shape else 0, style)
    call(q, k, positions, cos_sin_cache)
