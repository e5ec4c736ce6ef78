"""Rotary embedding against its float64 reference, on every device, element type, size of head and style."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kartifacts import ops
from kartifacts.errors import ConfigError, InputError

KINDS = [(64, "neox"), (64, "interleaved"), (128, "neox"), (128, "interleaved"), (256, "neox")]
MOST = 500  # positions in a cache

every_kind = pytest.mark.parametrize(("head_dim", "style"), KINDS)


def like(arrays: Any, values: Any) -> Any:
    """An array of the framework with a type of its own: positions, or the cache."""
    if arrays.framework == "numpy":
        return values
    import torch

    return torch.from_numpy(values).to(arrays.device)


@pytest.fixture
def cache(reference: Any) -> Any:
    return lambda head_dim: reference("cos_sin_cache")(MOST, head_dim)


@pytest.mark.parametrize(
    ("shape", "integer"),
    [
        ((1, 1, 1), "int64"),
        ((1, 32, 8), "int32"),
        ((7, 3, 1), "int64"),
        ((33, 8, 8), "int64"),
        ((700, 5, 2), "int32"),
        ((2, 3, 20, 4), "int64"),
    ],
    ids=str,
)
@every_kind
def test_it_agrees_with_the_reference(
    arrays: Any, reference: Any, cache: Any, head_dim: int, style: Any, shape: tuple[int, ...], integer: str
) -> None:
    *tokens, q_heads, k_heads = shape
    q, k = arrays.normal(*tokens, q_heads, head_dim), arrays.normal(*tokens, k_heads, head_dim)
    positions = arrays.random.integers(0, MOST, tokens).astype(integer)
    expected = [reference("apply_rope")(arrays.read(x), positions, cache(head_dim), style) for x in (q, k)]
    assert ops.apply_rope(q, k, like(arrays, positions), like(arrays, cache(head_dim)), style) is None
    arrays.check(q, expected[0])
    arrays.check(k, expected[1])


@every_kind
def test_parts_of_a_fused_projection_need_no_copy(
    arrays: Any, reference: Any, cache: Any, head_dim: int, style: Any
) -> None:
    """Queries, keys and values of one matrix product: the values stay as they are."""
    whole, positions = arrays.normal(9, 6 + 2 + 2, head_dim), np.arange(9)
    q, k, before = whole[:, :6], whole[:, 6:8], arrays.read(whole)
    ops.apply_rope(q, k, like(arrays, positions), like(arrays, cache(head_dim)), style)
    arrays.check(whole[:, :8], reference("apply_rope")(before[:, :8], positions, cache(head_dim), style))
    np.testing.assert_array_equal(arrays.read(whole)[:, 8:], before[:, 8:])


@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_a_part_of_each_head_may_be_turned(arrays: Any, reference: Any, cache: Any, style: Any) -> None:
    q, k, positions = arrays.normal(4, 3, 96), arrays.normal(4, 1, 96), np.array([3, 0, 499, 17])
    before = arrays.read(q)
    ops.apply_rope(q[..., :64], k[..., :64], like(arrays, positions), like(arrays, cache(64)), style)
    arrays.check(q[..., :64], reference("apply_rope")(before[..., :64], positions, cache(64), style))
    np.testing.assert_array_equal(arrays.read(q)[..., 64:], before[..., 64:])


@pytest.mark.parametrize("offset", [1, 2, 4])
@every_kind
def test_pointers_need_no_more_than_the_alignment_of_an_element(
    arrays: Any, reference: Any, cache: Any, head_dim: int, style: Any, offset: int
) -> None:
    room, positions = arrays.normal(5 * 2 * head_dim + offset), np.arange(5)
    table = np.zeros(MOST * head_dim + offset, np.float32)
    table[offset:] = cache(head_dim).reshape(-1)
    q, k = room[offset:].reshape(5, 2, head_dim), arrays.normal(5, 1, head_dim)
    expected = [reference("apply_rope")(arrays.read(x), positions, cache(head_dim), style) for x in (q, k)]
    ops.apply_rope(q, k, like(arrays, positions), like(arrays, table)[offset:].reshape(MOST, head_dim), style)
    arrays.check(q, expected[0])
    arrays.check(k, expected[1])


def test_nothing_to_turn_is_fine(arrays: Any, cache: Any) -> None:
    table = like(arrays, cache(64))
    ops.apply_rope(arrays.normal(0, 4, 64), arrays.normal(0, 4, 64), like(arrays, np.arange(0)), table)
    q = arrays.normal(3, 2, 64)
    before = arrays.read(q)
    ops.apply_rope(q, arrays.normal(3, 0, 64), like(arrays, np.zeros(3, np.int64)), table)
    np.testing.assert_array_equal(arrays.read(q), before)  # the angles of position 0 are zero
    ops.apply_rope(arrays.normal(3, 0, 64), q, like(arrays, np.zeros(3, np.int64)), table)
    np.testing.assert_array_equal(arrays.read(q), before)


@pytest.mark.parametrize("wrong", [-1, MOST, 1 << 40])
def test_a_position_that_the_cache_lacks_never_reads_elsewhere(arrays: Any, cache: Any, wrong: int) -> None:
    """A CPU refuses it before it writes; a GPU cannot look, and its tokens become NaN."""
    q, k, positions = arrays.normal(3, 2, 64), arrays.normal(3, 1, 64), np.array([0, wrong, 1])
    before = arrays.read(q)
    table = like(arrays, cache(64))
    if arrays.device == "cpu":
        with pytest.raises(InputError, match=rf"^apply_rope: positions must be at least 0 and below 500, .* {wrong}$"):
            ops.apply_rope(q, k, like(arrays, positions), table)
        np.testing.assert_array_equal(arrays.read(q), before)
    else:
        ops.apply_rope(q, k, like(arrays, positions), table)
        assert np.isnan(arrays.read(q)[1]).all()
        assert np.isfinite(arrays.read(q)[[0, 2]]).all()
        assert np.isnan(arrays.read(k)[1]).all()


def test_turning_keeps_lengths_and_relative_positions(arrays: Any, cache: Any) -> None:
    """What the embedding is for: the product of a query and a key depends on how far they are apart alone."""
    q, k = arrays.normal(1, 1, 128), arrays.normal(1, 1, 128)
    products = []
    for shift in (0, 100, 300):
        turned = [arrays.make(arrays.read(x)) for x in (q, k)]
        for x, position in zip(turned, (shift + 7, shift), strict=True):
            ops.apply_rope(x, x[:, :0], like(arrays, np.array([position])), like(arrays, cache(128)))
        a, b = map(arrays.read, turned)
        np.testing.assert_allclose((a * a).sum(), (arrays.read(q) ** 2).sum(), rtol=0.01)
        products.append((a * b).sum())
    np.testing.assert_allclose(products, products[0], rtol=0.02, atol=0.5 if arrays.dtype != "float32" else 1e-4)


def test_a_combination_that_no_kernel_has_is_refused_with_its_reason(arrays: Any, cache: Any) -> None:
    q = arrays.normal(1, 1, 256)
    with pytest.raises(
        ConfigError, match=r"^rope/apply_rope has no kernel for head_dim=256, style=interleaved: models"
    ):
        ops.apply_rope(q, q[:, :0], like(arrays, np.array([0])), like(arrays, cache(256)), "interleaved")
