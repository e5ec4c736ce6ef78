"""From an array to the kernel function that takes it: by framework, element type and device, looked up once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, NoReturn, Protocol, TypeVar

from kartifacts.errors import InputError, LoadError


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Array = TypeVar("Array", bound=HasShape)  # numpy.ndarray or torch.Tensor; all arguments of a call are of one kind

DTYPES = ("float16", "bfloat16", "float32")

Call = Callable[..., None]  # takes the arguments of the kernel's function
Empty = Callable[[Any, tuple[int, ...] | None], Any]  # makes a contiguous array like another one; None: of its shape


class Op:
    """One op as its callers see it.

    Args:
        family: the family that declares it.
        name: its name, which is also that of the function its kernels export.
        arguments: the names of the function's arguments, in order.
        written: those of them that the kernel writes.
        typed: those of them that have an element type of their own, whatever the kernel's is.
        axes: what kernels are specialised for besides the element type: name → values.
    """

    def __init__(
        self,
        family: str,
        name: str,
        arguments: str,
        *,
        written: str,
        typed: str = "",
        axes: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.family = family
        self.name = name
        self.arguments = tuple(arguments.split())
        self.written = frozenset(written.split())
        self.typed = frozenset(typed.split())
        self.axes = {"dtype": DTYPES, **(axes or {})}
        self._known: dict[tuple[Any, ...], tuple[Call, Empty]] = {}

    def take(self, x: Any, *values: object) -> tuple[Call, Empty]:
        """The function for arrays like `x` and these values of the further axes, and how to allocate more like it.

        Raises:
            InputError: `x` is no array, or there is no kernel for its element type or device, or for a value.
            KartifactsError: what `kartifacts.load` raises when the kernel cannot be had.
        """
        try:
            return self._known[(x.dtype, x.device, *values)]
        except (AttributeError, KeyError, TypeError):  # not seen yet, or numpy < 2, whose arrays have no device
            pass
        return self._find(x, values)  # outside, so that its errors have no such context

    def _find(self, x: Any, values: tuple[object, ...]) -> tuple[Call, Empty]:
        if _is_torch(x):
            dtype, device = str(x.dtype).removeprefix("torch."), _torch_device(self, x)
        elif _is_numpy(x):
            dtype, device = x.dtype.name, "cpu"
            if not x.dtype.isnative:
                raise InputError(f"{self.name}: {self.arguments[0]} must be in native byte order, got {x.dtype.str!r}")
        else:
            raise _no_array(self, x)
        if dtype not in DTYPES:
            raise InputError(f"{self.name}: {self.arguments[0]} must be one of {', '.join(DTYPES)}, got {dtype}")
        axes = dict(zip(self.axes, (dtype, *map(str, values)), strict=True))
        for axis, value in axes.items():
            if value not in self.axes[axis]:
                raise InputError(f"{self.name}: {axis} must be one of {', '.join(self.axes[axis])}, got {value[:80]}")
        key = (x.dtype, getattr(x, "device", None), *values)
        known = self._known.get(key)
        if known is None:
            from kartifacts.runtime import load

            kernel = load(f"{self.family}/{self.name}", device=device, **axes)
            function = getattr(kernel, self.name)
            known = (
                (_torch_call(self, function), _torch_empty)
                if _is_torch(x)
                else (_numpy_call(self, function, bits=dtype == "bfloat16"), _numpy_empty)
            )
            self._known[key] = known
        return known


def _is_torch(x: object) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(x, torch.Tensor)


def _is_numpy(x: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def _no_array(op: Op, x: object) -> InputError:
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return InputError(f"{op.name}: {op.arguments[0]} must be a numpy array or a torch tensor, got {kind}")


# -- torch -----------------------------------------------------------------------------------------------------------


def _torch_device(op: Op, x: Any) -> str:
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(f"{op.name}: {op.arguments[0]} must be on cpu or cuda, got {x.device}")
    return str(x.device)  # cpu, cuda:0


def _torch_empty(x: Any, shape: tuple[int, ...] | None) -> Any:
    torch = sys.modules["torch"]
    if shape is None and x.layout is torch.strided and x.is_contiguous():
        return torch.empty_like(x)  # takes a third of the time
    return torch.empty(x.shape if shape is None else shape, dtype=x.dtype, device=x.device)


def _torch_call(op: Op, function: Call) -> Call:
    torch = sys.modules["torch"]

    def call(*arguments: Any) -> None:
        if torch.is_grad_enabled():
            for name, value in zip(op.arguments, arguments, strict=False):
                if getattr(value, "requires_grad", False):
                    raise InputError(
                        f"{op.name}: {name} requires a gradient, and this op records none",
                        hint=f"call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()",
                    )
        try:
            function(*arguments)  # on the current stream of the tensors' device, which tvm_ffi asks torch for
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            _refuse(op, arguments[0], error)

    return call


# -- numpy -----------------------------------------------------------------------------------------------------------


def _numpy_empty(x: Any, shape: tuple[int, ...] | None) -> Any:
    return sys.modules["numpy"].empty(x.shape if shape is None else shape, x.dtype)


def _numpy_call(op: Op, function: Call, *, bits: bool) -> Call:
    """`bits`: the elements are bfloat16, which numpy and DLPack exchange only as their bits."""

    def call(*arguments: Any) -> None:
        try:
            if bits:
                arguments = tuple(map(_as_bits, repeat(op), op.arguments, arguments))
            try:
                function(*arguments)
            except BufferError:  # numpy does not export read-only arrays
                function(*map(_unlock, repeat(op), op.arguments, arguments))
        except InputError:
            raise
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            _refuse(op, arguments[0], error)

    return call


def _as_bits(op: Op, name: str, value: Any) -> Any:
    if not _is_numpy(value) or name in op.typed:
        return value
    if value.dtype.name != "bfloat16":
        raise InputError(f"{op.name}: {name} must be bfloat16, got {value.dtype.name}")
    return value.view("uint16")


def _unlock(op: Op, name: str, value: Any) -> Any:
    """A view of a read-only array that may be exported; the kernel writes only what it is declared to write."""
    import numpy as np

    if not _is_numpy(value) or value.flags.writeable:
        return value
    if name in op.written:
        raise InputError(f"{op.name}: {name} is written, but it is a read-only array")
    return np.asarray(_Unlocked(value))


class _Unlocked:
    def __init__(self, array: Any) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


# -- errors ----------------------------------------------------------------------------------------------------------


def _refuse(op: Op, x: object, error: Exception) -> NoReturn:
    """Raise what the binding or the exchange of arrays said as one of our errors."""
    if not _is_numpy(x) and not _is_torch(x):  # a numpy scalar, which has the element type and the device of an array
        raise _no_array(op, x) from error
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if text.startswith(f"{op.name}: the launch"):
        raise LoadError(
            text, hint="kartifacts doctor shows the driver and the devices that this process sees"
        ) from error
    raise InputError(text if text.startswith(op.name) else f"{op.name}: {text}") from error
