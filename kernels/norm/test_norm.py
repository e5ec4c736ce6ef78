"""The norms against their float64 reference, on every device, element type and awkward size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kartifacts import ops

# 1; less than, as much as and more than a vector, a warp, a block; odd; held in registers and read again.
COLUMNS = [1, 2, 7, 8, 17, 31, 33, 64, 100, 128, 257, 1000, 1023, 1032, 2048, 4096, 4097, 5120, 8192]
COLUMNS += [14336, 24576, 32776]
SHAPES = [(3, columns) for columns in COLUMNS] + [(1, 64), (17, 1000), (5000, 8), (2, 3, 5, 64), (4096,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["rmsnorm", "fused_add_rmsnorm", "layernorm"])
def test_it_agrees_with_the_reference(arrays: Any, reference: Any, op: str, shape: tuple[int, ...]) -> None:
    x, weight, bias = arrays.normal(*shape), arrays.normal(shape[-1]), arrays.normal(shape[-1])
    before = arrays.read(x)
    if op == "fused_add_rmsnorm":
        residual = arrays.normal(*shape)
        expected, total = reference(op)(before, arrays.read(residual), arrays.read(weight), 1e-5)
        ops.fused_add_rmsnorm(x, residual, weight, 1e-5)
        arrays.check(residual, total)
        arrays.check(x, expected)
        return
    given = [weight] if op == "rmsnorm" else [weight, bias]
    out = arrays.poisoned(*shape)
    assert getattr(ops, op)(x, *given, eps=1e-5, out=out) is out
    expected = reference(op)(before, *map(arrays.read, given), 1e-5)
    slack = rounding_of_the_mean(before, arrays.read(weight), 1e-5) if op == "layernorm" else 0.0
    arrays.check(out, expected, slack)
    arrays.check(getattr(ops, op)(x, *given, eps=1e-5), expected, slack)
    np.testing.assert_array_equal(arrays.read(x), before)


def rounding_of_the_mean(x: Any, weight: Any, eps: float) -> Any:
    """What a row of nearly equal elements may be off: one float32 rounding of its mean, magnified."""
    rounding = 2.0**-23 * np.abs(x).max(-1, keepdims=True)
    return rounding / np.sqrt(x.var(-1, keepdims=True) + eps) * np.abs(weight)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 5), (0,)], ids=str)
def test_an_empty_tensor_is_fine(arrays: Any, shape: tuple[int, ...]) -> None:
    x, weight = arrays.normal(*shape), arrays.normal(shape[-1])
    assert tuple(ops.rmsnorm(x, weight).shape) == shape
    assert tuple(ops.layernorm(x, weight, weight).shape) == shape
    assert ops.fused_add_rmsnorm(x, arrays.normal(*shape), weight) is None


@pytest.mark.parametrize("columns", [8, 33, 512, 4096, 5000])
def test_rows_may_be_strided_and_nothing_else_is_touched(arrays: Any, reference: Any, columns: int) -> None:
    """The middle of a wider tensor, as one third of a fused projection is."""
    whole, weight, around = arrays.normal(2, 4, 3 * columns), arrays.normal(columns), arrays.poisoned(2, 4, 3 * columns)
    x, out = whole[:, ::2, columns : 2 * columns], around[:, ::2, columns : 2 * columns]
    ops.rmsnorm(x, weight, out=out)
    arrays.check(out, reference("rmsnorm")(arrays.read(x), arrays.read(weight), 1e-6))
    written = np.isfinite(arrays.read(around))
    assert written[:, ::2, columns : 2 * columns].all()
    assert written.sum() == 2 * 2 * columns


def test_heads_of_a_fused_projection_need_no_copy(arrays: Any, reference: Any) -> None:
    projection, weight = arrays.normal(5, 24, 64), arrays.normal(64)
    query = projection[:, :16]
    expected = reference("rmsnorm")(arrays.read(query), arrays.read(weight), 1e-6)
    rest = arrays.read(projection[:, 16:])
    ops.rmsnorm(query, weight, out=query)
    arrays.check(query, expected)
    np.testing.assert_array_equal(arrays.read(projection[:, 16:]), rest)


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("columns", [64, 1024, 4096])
def test_pointers_need_no_more_than_the_alignment_of_an_element(
    arrays: Any, reference: Any, columns: int, offset: int
) -> None:
    def shifted(*shape: int) -> Any:
        return arrays.normal(int(np.prod(shape)) + offset)[offset:].reshape(*shape)

    x, weight, bias = shifted(3, columns), shifted(columns), shifted(columns)
    out = arrays.poisoned(3 * columns + offset)
    ops.layernorm(x, weight, bias, out=out[offset:].reshape(3, columns))
    expected = reference("layernorm")(*map(arrays.read, (x, weight, bias)), 1e-5)
    arrays.check(out[offset:].reshape(3, columns), expected)
    assert np.isnan(arrays.read(out)[:offset]).all()


@pytest.mark.parametrize("columns", [33, 4096])
def test_out_may_be_x(arrays: Any, reference: Any, columns: int) -> None:
    x, weight = arrays.normal(7, columns), arrays.normal(columns)
    expected = reference("layernorm")(arrays.read(x), arrays.read(weight), arrays.read(weight), 1e-5)
    assert ops.layernorm(x, weight, weight, out=x) is x
    arrays.check(x, expected)


def test_the_sums_are_made_in_float32(arrays: Any, reference: Any) -> None:
    """Squares of 300 overflow float16, and 4096 of them lose all their digits in bfloat16."""
    x, weight = arrays.make(300 + 10 * arrays.random.standard_normal((4, 4096))), arrays.normal(4096)
    arrays.check(ops.rmsnorm(x, weight), reference("rmsnorm")(arrays.read(x), arrays.read(weight), 1e-6))


def test_a_large_mean_does_not_drown_the_variance(arrays: Any, reference: Any) -> None:
    x, weight = arrays.make(100 + arrays.random.standard_normal((4, 1024))), arrays.normal(1024)
    expected = reference("layernorm")(*map(arrays.read, (x, weight, weight)), 1e-5)
    np.testing.assert_allclose(arrays.read(ops.layernorm(x, weight, weight)), expected, rtol=0.01, atol=1e-3)


def test_nan_stays_in_its_row(arrays: Any) -> None:
    values = arrays.random.standard_normal((5, 300))
    values[2, 7] = np.nan
    finite = np.isfinite(arrays.read(ops.rmsnorm(arrays.make(values), arrays.make(np.ones(300)))))
    assert finite[[0, 1, 3, 4]].all()
    assert not finite[2].any()


def test_zeros_give_zeros(arrays: Any) -> None:
    x, weight = arrays.make(np.zeros((3, 128))), arrays.normal(128)
    assert not arrays.read(ops.rmsnorm(x, weight)).any()


def test_results_are_rounded_to_nearest_even_over_the_whole_range(arrays: Any) -> None:
    """The residual is one float32 sum, so its every bit is known: subnormals, ties, infinities."""
    size = 1 << 16
    if arrays.dtype == "float32":
        x, residual = arrays.normal(64, 1024), arrays.normal(64, 1024)
    else:
        bits = np.arange(size, dtype=np.uint16)
        values = (bits.view(np.float16) if arrays.dtype == "float16" else (bits.astype("u4") << 16).view("f4")).copy()
        values[~np.isfinite(values)] = 1
        x = arrays.make(values.reshape(64, 1024))
        residual = arrays.make(arrays.random.permutation(values).reshape(64, 1024))
    with np.errstate(over="ignore"):
        expected = arrays.read(x).astype("f4") + arrays.read(residual).astype("f4")
        expected = arrays.read(arrays.make(expected))
    ops.fused_add_rmsnorm(x, residual, arrays.normal(1024))
    np.testing.assert_array_equal(arrays.read(residual), expected)
