"""A wrong call is refused with one sentence that names the argument, what was expected and what was got."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kartifacts import ops
from kartifacts.errors import InputError

X = np.ones((4, 64), np.float32)
W = np.ones(64, np.float32)


SMALL: Any = "small"
NO_ARRAYS: list[Any] = [[1.0], None, np.float32(1), 1.0]  # Any: they are meant to be wrong


def fresh() -> Any:
    return np.ones((4, 64), np.float32)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


POSITIONS = np.arange(4)
CACHE = np.ones((9, 64), np.float32)
STYLE: Any = ["neox"]


def heads(count: int = 2, size: int = 64, tokens: int = 4) -> Any:
    return np.ones((tokens, count, size), np.float32)


def rope(**changed: Any) -> None:
    given = {"q": heads(), "k": heads(1), "positions": POSITIONS, "cos_sin_cache": CACHE, **changed}
    ops.apply_rope(**given)


def unaligned() -> Any:
    return np.zeros(4 * 64 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 64)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: ops.rmsnorm(NO_ARRAYS[0], W), "rmsnorm: x must be a numpy array or a torch tensor, got list"),
    "None": (
        lambda: ops.silu_and_mul(NO_ARRAYS[1]),
        "silu_and_mul: x must be a numpy array or a torch tensor, got NoneType",
    ),
    "a scalar": (
        lambda: ops.rmsnorm(NO_ARRAYS[2], W),
        "rmsnorm: x must be a numpy array or a torch tensor, got numpy.float32",
    ),
    "a weight that is no array": (lambda: ops.rmsnorm(X, NO_ARRAYS[3]), "rmsnorm: weight must be a tensor"),
    "float64": (
        lambda: ops.rmsnorm(np.ones((2, 8)), np.ones(8)),
        "rmsnorm: x must be one of float16, bfloat16, float32, got float64",
    ),
    "uint16, which is how bfloat16 travels": (
        lambda: ops.silu_and_mul(np.ones((2, 8), np.uint16)),
        "silu_and_mul: x must be one of float16, bfloat16, float32, got uint16",
    ),
    "objects": (
        lambda: ops.layernorm(np.array([[None]]), W, W),
        "layernorm: x must be one of float16, bfloat16, float32, got object",
    ),
    "foreign byte order": (
        lambda: ops.rmsnorm(X.astype(">f4"), W),
        "rmsnorm: x must be in native byte order, got '>f4'",
    ),
    "a weight of another type": (
        lambda: ops.rmsnorm(X, W.astype(np.float16)),
        "rmsnorm: weight must be float32, got float16",
    ),
    "a weight of another size": (
        lambda: ops.rmsnorm(X, np.ones(128, np.float32)),
        "rmsnorm: weight must have shape (64,), got (128,)",
    ),
    "a weight of two dimensions": (
        lambda: ops.rmsnorm(X, np.ones((1, 64), np.float32)),
        "rmsnorm: weight must have shape (64,), got (1, 64)",
    ),
    "a bias of another size": (
        lambda: ops.layernorm(X, W, np.ones(1, np.float32)),
        "layernorm: bias must have shape (64,), got (1,)",
    ),
    "a strided weight": (
        lambda: ops.rmsnorm(X, np.ones(128, np.float32)[::2]),
        "rmsnorm: the last dimension of weight must be contiguous, got stride 2",
    ),
    "strided columns": (
        lambda: ops.rmsnorm(np.ones((4, 128), np.float32)[:, ::2], W),
        "rmsnorm: the last dimension of x must be contiguous, got stride 2",
    ),
    "Fortran order": (
        lambda: ops.silu_and_mul(np.asfortranarray(X)),
        "silu_and_mul: the last dimension of x must be contiguous, got stride 4",
    ),
    "three strides": (
        lambda: ops.rmsnorm(np.ones((4, 4, 4, 4, 4, 64), np.float32)[:, ::2, ::2, ::2, ::2], W),
        "rmsnorm: the strides of x do not fold into two; make a contiguous copy",
    ),
    "no dimension": (
        lambda: ops.rmsnorm(np.ones((), np.float32), W),
        "rmsnorm: x must have at least one dimension",
    ),
    "no dimension to halve": (
        lambda: ops.silu_and_mul(np.ones((), np.float32)),
        "silu_and_mul: x must have at least one dimension",
    ),
    "an odd dimension to halve": (
        lambda: ops.gelu_tanh_and_mul(np.ones((2, 7), np.float32)),
        "gelu_tanh_and_mul: the last dimension of x must be even, got shape (2, 7)",
    ),
    "out of another shape": (
        lambda: ops.rmsnorm(X, W, out=np.ones((4, 63), np.float32)),
        "rmsnorm: out must have shape (4, 64), got (4, 63)",
    ),
    "out as wide as x": (
        lambda: ops.silu_and_mul(X, out=fresh()),
        "silu_and_mul: out must have shape (4, 32), got (4, 64)",
    ),
    "out of another type": (
        lambda: ops.rmsnorm(X, W, out=np.ones((4, 64), np.float16)),
        "rmsnorm: out must be float32, got float16",
    ),
    "a residual of another shape": (
        lambda: ops.fused_add_rmsnorm(fresh(), np.ones((1, 64), np.float32), W),
        "fused_add_rmsnorm: residual must have shape (4, 64), got (1, 64)",
    ),
    "out that is read-only": (
        lambda: ops.rmsnorm(X, W, out=read_only(fresh())),
        "rmsnorm: out is written, but it is a read-only array",
    ),
    "x that is read-only and written": (
        lambda: ops.fused_add_rmsnorm(read_only(fresh()), fresh(), W),
        "fused_add_rmsnorm: x is written, but it is a read-only array",
    ),
    "an address between elements": (
        lambda: ops.rmsnorm(unaligned(), W),
        "rmsnorm: x must be aligned to its elements of 4 bytes",
    ),
    "a negative eps": (lambda: ops.rmsnorm(X, W, -1.0), "rmsnorm: eps must be finite and not negative, got -1"),
    "an eps of NaN": (
        lambda: ops.layernorm(X, W, W, float("nan")),
        "layernorm: eps must be finite and not negative, got nan",
    ),
    "an eps that is no number": (lambda: ops.rmsnorm(X, W, SMALL), "rmsnorm: eps must be a number"),
    "queries that are a list": (
        lambda: rope(q=[1.0]),
        "apply_rope: q must be a numpy array or a torch tensor, got list",
    ),
    "a size of heads that no kernel has": (
        lambda: rope(q=heads(size=72)),
        "apply_rope: head_dim must be one of 64, 128, 256, got 72",
    ),
    "queries without dimensions": (
        lambda: rope(q=np.ones((), np.float32)),
        "apply_rope: head_dim must be one of 64, 128, 256, got 0",
    ),
    "a style that is none": (
        lambda: rope(style="gptj"),
        "apply_rope: style must be one of neox, interleaved, got gptj",
    ),
    "a style that is a list": (
        lambda: rope(style=STYLE),
        "apply_rope: style must be one of neox, interleaved, got ['neox']",
    ),
    "queries without tokens": (
        lambda: rope(q=X, k=X),
        "apply_rope: q must have the shape (..., tokens, heads, head_dim), got (4, 64)",
    ),
    "keys of other tokens": (
        lambda: rope(k=heads(tokens=3)),
        "apply_rope: k must have the shape of q, but for the number of heads: q has (4, 2, 64), k has (3, 2, 64)",
    ),
    "keys of another size": (
        lambda: rope(k=heads(size=128)),
        "apply_rope: k must have the shape of q, but for the number of heads: q has (4, 2, 64), k has (4, 2, 128)",
    ),
    "keys of another type": (
        lambda: rope(k=heads().astype(np.float16)),
        "apply_rope: k must be float32, got float16",
    ),
    "positions that are no integers": (
        lambda: rope(positions=np.ones(4, np.float32)),
        "apply_rope: positions must be int32 or int64, got float32",
    ),
    "positions of other tokens": (
        lambda: rope(positions=np.arange(5)),
        "apply_rope: positions must have shape (4,), got (5,)",
    ),
    "positions of too many dimensions": (
        lambda: rope(positions=np.ones((1, 4), np.int64)),
        "apply_rope: positions must have shape (4,), got (1, 4)",
    ),
    "strided positions": (
        lambda: rope(positions=np.arange(8)[::2]),
        "apply_rope: positions must be contiguous",
    ),
    "a negative position": (
        lambda: rope(positions=POSITIONS - 1),
        "apply_rope: positions must be at least 0 and below 9, the rows of cos_sin_cache, got -1",
    ),
    "a position beyond the cache": (
        lambda: rope(positions=POSITIONS + 6),
        "apply_rope: positions must be at least 0 and below 9, the rows of cos_sin_cache, got 9",
    ),
    "a cache of another type": (
        lambda: rope(cos_sin_cache=CACHE.astype(np.float16)),
        "apply_rope: cos_sin_cache must be float32, got float16",
    ),
    "a cache of half a head": (
        lambda: rope(cos_sin_cache=CACHE[:, :32]),
        "apply_rope: cos_sin_cache must have shape (9, 64), got (9, 32)",
    ),
    "an empty cache": (
        lambda: rope(cos_sin_cache=CACHE[:0]),
        "apply_rope: cos_sin_cache must have at least one row",
    ),
    "a cache of one dimension": (
        lambda: rope(cos_sin_cache=CACHE[0]),
        "apply_rope: cos_sin_cache must have shape (64, 64), got (64,)",
    ),
    "queries that are read-only": (
        lambda: rope(q=read_only(heads())),
        "apply_rope: q is written, but it is a read-only array",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message


def test_a_scalar_is_refused_alike_before_and_after_the_kernel_is_loaded() -> None:
    ops.rmsnorm(X, W)
    test_a_wrong_argument_is_named("a scalar")


def overlapping_rows() -> Any:
    return np.lib.stride_tricks.as_strided(np.ones(67, np.float32), (4, 64), (4, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: ops.rmsnorm(a[:4], W, out=a[1:5]), "rmsnorm: out overlaps x in memory"),
        (lambda a: ops.rmsnorm(a[:4], W, out=a[3::-1]), "rmsnorm: out overlaps x in memory"),
        (lambda a: ops.rmsnorm(a[:1], a[0], out=a[:4]), "rmsnorm: out must have shape (1, 64), got (4, 64)"),
        (lambda a: ops.rmsnorm(a[:4], a[9], out=a[8:12]), "rmsnorm: out overlaps weight in memory"),
        (lambda a: ops.rmsnorm(a[:4], W, out=overlapping_rows()), "rmsnorm: out is written, but its rows overlap"),
        (lambda a: ops.fused_add_rmsnorm(a[:4], a[:4], W), "fused_add_rmsnorm: x overlaps residual in memory"),
        (lambda a: ops.fused_add_rmsnorm(a[:4], a[2:6], W), "fused_add_rmsnorm: x overlaps residual in memory"),
        (lambda a: ops.silu_and_mul(a[:4], out=a[:4, 32:]), "silu_and_mul: out overlaps x in memory"),
        (lambda a: ops.silu_and_mul(a[:4], out=a[:4, 8:40]), "silu_and_mul: out overlaps x in memory"),
        (lambda a: rope(q=a[:8].reshape(4, 2, 64), k=a[8:].reshape(4, 1, 64)), ""),
        (lambda a: rope(q=a[:8].reshape(4, 2, 64), k=a[7:11].reshape(4, 1, 64)), "apply_rope: q overlaps k in memory"),
        (lambda a: rope(q=a.reshape(4, 3, 64)[:, :2], k=a.reshape(4, 3, 64)[:, 2:]), ""),
        (
            lambda a: rope(q=a.reshape(4, 3, 64)[:, :2], k=a.reshape(4, 3, 64)[:, 1:]),
            "apply_rope: q overlaps k in memory",
        ),
        (lambda a: rope(cos_sin_cache=a[:9], q=a[8:10, None].repeat(2, 1).reshape(4, 1, 64)), ""),
        (
            lambda a: rope(cos_sin_cache=a[:9], q=a[8:].reshape(4, 1, 64)),
            "apply_rope: q overlaps cos_sin_cache in memory",
        ),
    ],
)
def test_memory_that_would_be_read_after_it_was_written_is_refused(call: Callable[[Any], Any], message: str) -> None:
    memory = np.ones((12, 64), np.float32)
    if not message:
        call(memory)
        return
    with pytest.raises(InputError) as caught:
        call(memory)
    assert str(caught.value) == message


def test_columns_of_one_buffer_may_be_read_and_written() -> None:
    """Neighbours in memory, though their address ranges cross."""
    buffer = np.random.default_rng().standard_normal((4, 192)).astype(np.float32)
    expected = ops.rmsnorm(buffer[:, :64].copy(), W)
    ops.rmsnorm(buffer[:, :64], W, out=buffer[:, 64:128])
    np.testing.assert_array_equal(buffer[:, 64:128], expected)
    summed = buffer[:, :64] + buffer[:, 128:]
    ops.fused_add_rmsnorm(buffer[:, :64], buffer[:, 128:], W)
    np.testing.assert_array_equal(buffer[:, 128:], summed)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_only_read_may_be_read_only(dtype: str) -> None:
    """Mapped files, bytes and broadcasts are read-only; numpy does not hand them out as they are."""
    kind: Any = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    x = np.random.default_rng().standard_normal((4, 64)).astype(kind)
    weight = np.ones(64, kind)
    expected = ops.rmsnorm(x, weight)
    mapped = np.frombuffer(x.tobytes(), kind).reshape(4, 64)
    np.testing.assert_array_equal(ops.rmsnorm(mapped, read_only(weight)), expected)
    row = np.broadcast_to(x[0], (4, 64))
    np.testing.assert_array_equal(ops.rmsnorm(row, weight), np.broadcast_to(expected[0], (4, 64)))
    np.testing.assert_array_equal(mapped, x)


def test_bits_are_no_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(InputError, match=r"^rmsnorm: weight must be bfloat16, got uint16$"):
        ops.rmsnorm(np.ones((4, 64), ml_dtypes.bfloat16), np.ones(64, np.uint16))


def test_a_refused_call_writes_nothing() -> None:
    out = fresh() * 7
    with pytest.raises(InputError):
        ops.rmsnorm(X, W, -1.0, out=out)
    np.testing.assert_array_equal(out, fresh() * 7)


@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 64)])
def test_a_new_array_is_contiguous_whatever_x_is(shape: tuple[int, ...]) -> None:
    x = np.broadcast_to(np.arange(64, dtype=np.float32), shape)
    assert ops.rmsnorm(x, W).flags.c_contiguous
    assert ops.rmsnorm(np.ones(shape, np.float32).swapaxes(0, -2), W).flags.c_contiguous


# -- torch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.torch
def test_a_module_s_weight_is_taken_as_it_is(torch: Any) -> None:
    layer = torch.nn.LayerNorm(64)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(ops.layernorm(x, layer.weight, layer.bias), layer(x))


@pytest.mark.torch
def test_an_expanded_tensor_gives_a_contiguous_one(torch: Any) -> None:
    x = torch.randn(64).expand(3, 5, 64)
    out = ops.rmsnorm(x, torch.ones(64))
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


CALLS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "rmsnorm": (ops.rmsnorm, {"x": (4, 64), "weight": (64,), "out": (4, 64)}),
    "fused_add_rmsnorm": (ops.fused_add_rmsnorm, {"x": (4, 64), "residual": (4, 64), "weight": (64,)}),
    "layernorm": (ops.layernorm, {"x": (4, 64), "weight": (64,), "bias": (64,), "out": (4, 64)}),
    "apply_rope": (
        partial(ops.apply_rope, positions=POSITIONS),
        {"q": (4, 2, 64), "k": (4, 1, 64), "cos_sin_cache": (9, 64)},
    ),
    "silu_and_mul": (ops.silu_and_mul, {"x": (4, 64), "out": (4, 32)}),
    "gelu_tanh_and_mul": (ops.gelu_tanh_and_mul, {"x": (4, 64), "out": (4, 32)}),
}


@pytest.mark.torch
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, (_, shapes) in CALLS.items() for name in shapes])
def test_a_gradient_that_would_be_lost_is_refused_of_whatever_argument(torch: Any, op: str, name: str) -> None:
    call, shapes = CALLS[op]
    tensors = {each: torch.randn(shape) for each, shape in shapes.items()}
    given = {**tensors, name: tensors[name].clone().requires_grad_()}
    with pytest.raises(InputError, match=rf"^{op}: {name} requires a gradient, and this op records none\nhint: "):
        call(**given)
    call(**{**tensors, name: given[name].detach()})
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            call(**{each: value.clone().requires_grad_() for each, value in tensors.items()})


@pytest.mark.torch
def test_a_device_without_kernels_is_named(torch: Any) -> None:
    with pytest.raises(InputError, match=r"^rmsnorm: x must be on cpu or cuda, got meta$"):
        ops.rmsnorm(torch.ones(4, 64, device="meta"), torch.ones(64))
    with pytest.raises(InputError, match=r"^rmsnorm: "):
        ops.rmsnorm(torch.ones(4, 64), torch.ones(64, device="meta"))


@pytest.mark.torch
def test_a_tensor_without_rows_is_refused(torch: Any) -> None:
    with pytest.raises(InputError, match=r"^rmsnorm: "):
        ops.rmsnorm(torch.ones(4, 64).to_sparse(), torch.ones(64))
    with pytest.raises(InputError, match=r"^silu_and_mul: x must be one of .*, got float64$"):
        ops.silu_and_mul(torch.ones(4, 64, dtype=torch.float64))


@pytest.mark.torch
@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused(torch: Any) -> None:
    x, weight = torch.ones(4, 64, device="cuda"), torch.ones(64)
    with pytest.raises(InputError, match=r"^rmsnorm: weight must be on cuda:0 as x is, got cpu$"):
        ops.rmsnorm(x, weight)


@pytest.mark.torch
@pytest.mark.gpu
def test_work_is_queued_on_the_current_stream(torch: Any) -> None:
    """A captured graph holds the kernel, so that replaying it computes anew from what x holds by then."""
    x, weight = torch.randn(64, 4096, device="cuda"), torch.randn(4096, device="cuda")
    out = ops.rmsnorm(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.rmsnorm(x, weight, out=out)
    x.normal_()
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6), rtol=1e-5, atol=1e-5)
