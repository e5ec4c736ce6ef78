"""Launches the functions of an image that has no launcher, through NVIDIA's driver: nothing is compiled or linked.

The driver is opened with the first launch, so that a process without a GPU can hold the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kartifacts.errors import InputError, LoadError
from kartifacts.files.reading import read_regular

MAX_IMAGE = 2 << 30  # bytes
SUFFIXES = (".cubin", ".fatbin")
_MAX_SHARED, _FREE_SHARED = 8, 48 << 10  # attribute of a kernel; bytes that every launch may have
_POINTER_DEVICE = 9  # attribute of an address
_RELAXED = 2  # mode of capturing
_INVALID_VALUE, _TOO_MANY_RESOURCES = 1, 701
_MOST_GRID, _MOST_BLOCK = (0x7FFFFFFF, 0xFFFF, 0xFFFF), (1024, 1024, 64)
_SIGNED = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}
_UNSIGNED = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
_REAL = {4: ctypes.c_float, 8: ctypes.c_double}


class Image:
    """Device code alone, as a module whose functions can be launched.

    Raises:
        LoadError: the file cannot be read, or is for GPUs of others.
    """

    def __init__(self, path: Path, uri: str) -> None:
        self.uri = uri
        if path.suffix not in SUFFIXES:
            raise LoadError(
                f"{uri} does not load: an image without a launcher is launched by NVIDIA's driver only, and this is a "
                f"{path.suffix} for other GPUs"
            )
        try:
            self._content = read_regular(path, MAX_IMAGE)
        except OSError as error:
            raise LoadError(f"{uri} does not load: {str(path)!r} cannot be read: {error.strerror or error}") from error
        self._lock = threading.Lock()
        self._library: ctypes.c_void_p | None = None

    def get_function(self, name: str) -> Function:
        return Function(self, name)

    def kernel(self, name: str) -> ctypes.c_void_p:
        """The driver's handle of one function; needs a current context of any device.

        Raises:
            LoadError: the driver does not take the image, or there is no such function in it.
        """
        driver = _driver()
        with self._lock, driver.uncaptured():
            if self._library is None:
                library = ctypes.c_void_p()
                none = (None, None, 0, None, None, 0)
                driver.call(
                    f"{self.uri} does not load", "cuLibraryLoadData", ctypes.byref(library), self._content, *none
                )
                self._library = library
            kernel = ctypes.c_void_p()
            what = f"{self.uri} has no function {name!r}"
            driver.call(what, "cuLibraryGetKernel", ctypes.byref(kernel), self._library, name.encode())
            return kernel


class Function:
    """One function of an image: ``kernel.scale.launch(grid, block, x, 2.0, n)``."""

    def __init__(self, image: Image, name: str) -> None:
        self._image = image
        self.name = name
        self._kernel: ctypes.c_void_p | None = None
        self._sizes: list[int] | None = None

    def __repr__(self) -> str:
        return f"<Function {self.name} of {self._image.uri}>"

    def __call__(self, *_: Any) -> None:
        raise InputError(
            f"{self.name} of {self._image.uri} has no launcher that knows its grid",
            hint=f"use {self.name}.launch(grid, block, ...)",
        )

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared: int = 0,
        stream: Any = 0,
        device: int | None = None,
    ) -> None:
        """Queue the function on a stream.

        Args:
            grid: blocks in x, or in x, y and z.
            block: threads of a block in the same way.
            args: of the function: tensors on the GPU (of torch, or with ``__cuda_array_interface__``), an int for each
                integer, a float for each floating-point number, None for a null pointer, or values of ctypes, which are
                passed as they are.
            shared: bytes of dynamic shared memory.
            stream: handle of a stream, or an object of torch's; 0 is the default stream.
            device: number of the GPU; by default that of the first tensor, else that of the current context, else 0.

        Raises:
            InputError: an argument or a size is none that this function takes.
            LoadError: there is no driver, the driver does not take the image, or a launch failed.
        """
        what = f"{self.name} of {self._image.uri}"
        blocks, threads = _sizes(grid, _MOST_GRID, f"{what}: grid"), _sizes(block, _MOST_BLOCK, f"{what}: block")
        driver = _driver()
        with driver.current(_device_of(args) if device is None else device):
            if self._kernel is None:
                self._kernel = self._image.kernel(self.name)
                self._sizes = driver.parameters(self._kernel)
            values = _values(args, self._sizes, what)
            if shared > _FREE_SHARED:
                number = driver.device()
                driver.call(what, "cuKernelSetAttribute", _MAX_SHARED, shared, self._kernel, number)
            places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            handle = ctypes.c_void_p(getattr(stream, "cuda_stream", stream))
            driver.call(what, "cuLaunchKernel", self._kernel, *blocks, *threads, shared, handle, places, None)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _sizes(given: int | Sequence[int], most: tuple[int, int, int], what: str) -> tuple[int, ...]:
    sizes = [given] if isinstance(given, int) else [*given]
    sizes += [1] * (3 - len(sizes))
    if len(sizes) != 3 or not all(1 <= size <= top for size, top in zip(sizes, most, strict=True)):
        raise InputError(f"{what} must be up to three numbers from 1 to {', '.join(map(str, most))}; got {given!r}")
    return tuple(sizes)


def _device_of(args: Sequence[Any]) -> int | None:
    for value in args:
        if getattr(value, "is_cuda", False) is True:
            return int(value.device.index)
        if hasattr(value, "__cuda_array_interface__"):
            return _driver().device_of(value.__cuda_array_interface__["data"][0])
    return None


def _values(args: Sequence[Any], sizes: list[int] | None, what: str) -> list[Any]:
    if sizes is not None and len(args) != len(sizes):
        raise InputError(f"{what} takes {len(sizes)} arguments, got {len(args)}")
    return [
        _value(value, None if sizes is None else sizes[place], f"{what}: argument {place}")
        for place, value in enumerate(args)
    ]


def _value(value: Any, size: int | None, what: str) -> Any:
    """`value` as ctypes has it, of the size that the function takes."""
    made = _made(value, size, what)
    if size is not None and ctypes.sizeof(made) != size:
        raise InputError(f"{what} has {size} bytes, got {ctypes.sizeof(made)} of {type(value).__name__}")
    return made


def _made(value: Any, size: int | None, what: str) -> Any:
    if _is_ctypes(value):
        return value
    if value is None:
        return ctypes.c_void_p()
    if hasattr(value, "data_ptr"):
        if not value.is_cuda:
            raise InputError(f"{what} is on {value.device}; expected a tensor on a GPU")
        return ctypes.c_void_p(value.data_ptr())
    if hasattr(value, "__cuda_array_interface__"):
        return ctypes.c_void_p(value.__cuda_array_interface__["data"][0])
    if getattr(value, "shape", ()) == ():
        if hasattr(value, "__index__"):
            return _number(int(value), size, what)
        if hasattr(value, "__float__"):
            return _real(float(value), size, what)
    raise InputError(
        f"{what} is a {type(value).__name__}; expected a tensor on a GPU, a number, None or a value of ctypes"
    )


def _is_ctypes(value: Any) -> bool:
    if isinstance(value, type):
        return False
    try:
        ctypes.sizeof(value)
    except TypeError:
        return False
    return True


def _real(value: float, size: int | None, what: str) -> Any:
    if size not in _REAL:
        raise InputError(f"{what} is {value!r}; {_untyped(size)}")
    return _REAL[size](value)


def _number(value: int, size: int | None, what: str) -> Any:
    if size not in _SIGNED:
        raise InputError(f"{what} is {value!r}; {_untyped(size)}")
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise InputError(f"{what} is {value}, which does not fit into {size} bytes")
    return (_SIGNED if value < 0 else _UNSIGNED)[size](value)


def _untyped(size: int | None) -> str:
    known = "this driver does not tell what the function takes" if size is None else f"the function takes {size} bytes"
    return f"{known}: give a ctypes value, as ctypes.c_int32(1)"


# -- the driver --------------------------------------------------------------------------------------------------------


class _Driver:
    """libcuda, opened and initialised."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LoadError(
                f"there is no NVIDIA driver to launch kernels with: {error}",
                hint="without one, kernels for NVIDIA GPUs can be built and published, not run",
            ) from error
        self.call("the NVIDIA driver does not start", "cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}  # primary ones, held for as long as this process lives

    def call(self, what: str, name: str, *arguments: Any) -> None:
        """Call a function of the driver; `what` begins the message if it fails."""
        code = self._function(name, what)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        message = f"{what}: {name} failed: {(text.value or b'unknown error').decode('ascii', 'replace')} ({code})"
        if name == "cuLaunchKernel" and code in (_INVALID_VALUE, _TOO_MANY_RESOURCES):
            raise InputError(message, hint="grid, block and shared must be what the kernel and the GPU allow")
        raise LoadError(message)

    def _function(self, name: str, what: str) -> Callable[..., int]:
        try:
            function: Callable[..., int] = getattr(self._cuda, name)
        except AttributeError:
            raise LoadError(f"{what}: this NVIDIA driver is older than 12.0: it has no {name}") from None
        return function

    @contextmanager
    def current(self, device: int | None) -> Iterator[None]:
        """Have a context of `device` current: the primary one, unless another of that device is."""
        here = self.device()
        if here is not None and device in (None, here):
            yield
            return
        context = self._primary(device or 0)
        self.call("a launch", "cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("a launch", "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _primary(self, device: int) -> ctypes.c_void_p:
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self.call(f"GPU {device}", "cuDeviceGet", ctypes.byref(number), device)
            self.call(f"GPU {device}", "cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        return self._contexts[device]

    def device(self) -> int | None:
        """The device of the current context."""
        number = ctypes.c_int()
        return number.value if self._cuda.cuCtxGetDevice(ctypes.byref(number)) == 0 else None

    def device_of(self, address: int) -> int:
        number = ctypes.c_int()
        self.call("a tensor", "cuPointerGetAttribute", ctypes.byref(number), _POINTER_DEVICE, ctypes.c_uint64(address))
        return number.value

    def parameters(self, kernel: ctypes.c_void_p) -> list[int] | None:
        """The size of each parameter; None where the driver is too old to tell."""
        function = getattr(self._cuda, "cuKernelGetParamInfo", None)
        if function is None:
            return None
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while function(kernel, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
            sizes.append(size.value)
        return sizes

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Allow this thread to load, also while a graph is being captured."""
        mode = ctypes.c_int(_RELAXED)
        self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _driver() -> _Driver:
    return _Driver()
