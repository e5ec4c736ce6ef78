"""The gated activations against their float64 reference, on every device, element type and awkward size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kartifacts import ops

COLUMNS = [1, 2, 7, 8, 17, 31, 33, 64, 100, 128, 257, 1000, 1023, 2048, 4096, 4097, 11008, 14336, 20000]
SHAPES = [(3, 2 * columns) for columns in COLUMNS] + [(1, 64), (17, 1000), (5000, 16), (2, 3, 5, 64), (4096,)]

pytestmark = pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_reference(arrays: Any, reference: Any, op: str, shape: tuple[int, ...]) -> None:
    x = arrays.make(3 * arrays.random.standard_normal(shape))
    before = arrays.read(x)
    expected = reference(op)(before)
    out = arrays.poisoned(*shape[:-1], shape[-1] // 2)
    assert getattr(ops, op)(x, out=out) is out
    arrays.check(out, expected)
    arrays.check(getattr(ops, op)(x), expected)
    np.testing.assert_array_equal(arrays.read(x), before)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 6), (0,)], ids=str)
def test_an_empty_tensor_is_fine(arrays: Any, op: str, shape: tuple[int, ...]) -> None:
    assert tuple(getattr(ops, op)(arrays.normal(*shape)).shape) == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize("columns", [8, 33, 512, 4096])
def test_rows_may_be_strided_and_nothing_else_is_touched(arrays: Any, reference: Any, op: str, columns: int) -> None:
    whole, around = arrays.normal(4, 5, 4 * columns), arrays.poisoned(4, 5, 2 * columns)
    x, out = whole[::2, :, columns : 3 * columns], around[::2, :, columns:]
    getattr(ops, op)(x, out=out)
    arrays.check(out, reference(op)(arrays.read(x)))
    assert np.isfinite(arrays.read(around)).sum() == 2 * 5 * columns


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_pointers_need_no_more_than_the_alignment_of_an_element(
    arrays: Any, reference: Any, op: str, offset: int
) -> None:
    x = arrays.normal(3 * 512 + offset)[offset:].reshape(3, 512)
    out = arrays.poisoned(3 * 256 + offset)
    getattr(ops, op)(x, out=out[offset:].reshape(3, 256))
    arrays.check(out[offset:].reshape(3, 256), reference(op)(arrays.read(x)))
    assert np.isnan(arrays.read(out)[:offset]).all()


def test_out_may_be_the_first_half_of_x(arrays: Any, reference: Any, op: str) -> None:
    x = arrays.normal(7, 600)
    expected, factors = reference(op)(arrays.read(x)), arrays.read(x[:, 300:])
    getattr(ops, op)(x, out=x[:, :300])
    arrays.check(x[:, :300], expected)
    np.testing.assert_array_equal(arrays.read(x[:, 300:]), factors)


def test_the_tails_neither_overflow_nor_turn_into_nan(arrays: Any, op: str) -> None:
    """Far to the left the result is zero, far to the right it is x."""
    gate = np.array([-6e4, -1e3, -200.0, -100.0, -89.0, 0.0, 89.0, 100.0, 200.0, 1e3, 6e4])
    out = arrays.read(getattr(ops, op)(arrays.make(np.concatenate([gate, np.ones_like(gate)]))))
    np.testing.assert_allclose(out, arrays.read(arrays.make(np.maximum(gate, 0))), rtol=1e-6, atol=1e-30)


def test_nan_stays_where_it_is(arrays: Any, op: str) -> None:
    values = arrays.random.standard_normal((5, 300))
    values[2, 7] = np.nan
    finite = np.isfinite(arrays.read(getattr(ops, op)(arrays.make(values))))
    assert not finite[2, 7]
    assert finite.sum() == finite.size - 1
