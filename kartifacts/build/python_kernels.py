"""What op.toml says of a kernel in Python, checked and filled in with the axes of one specialisation: values alone.

    argument    *T  *T:16         a pointer to elements of type T (16: to an address that is a multiple of 16)
                T   T:16          a number (16: a multiple of 16)
                T(m, n)           a tensor of shape m × n whose elements lie together, rows by rows
                T(m, n; s, 1):16  a tensor with these strides, in elements, at an address that is a multiple of 16
                stream            the stream of the caller, who does not pass it
    constant    a value, an axis, or a table axis → value → what to take

T is one of TYPES or an axis whose values are such.  A dimension is a number, an axis whose values are numbers, or a
name of its own: it is then known at run time, and the same wherever the name stands; `n:8` is a multiple of 8.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from kartifacts.errors import ConfigError
from kartifacts.model.spec import Choice, DeviceDecl, KernelDecl, OpDecl, Plain, Spec

TOOLCHAINS = ("triton", "cutedsl")
TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
_NUMBERS = {  # what a kernel can be passed by value
    "triton": ("bool", *(name for name in TYPES if "int" in name), "float32", "float64"),
    "cutedsl": ("bool", *(name for name in TYPES if "int" in name), "float32", "float64"),
}
_HOST = {"triton": "kart/any_launcher.cpp", "cutedsl": "kart/cutedsl.cpp"}
_OPTIONS: dict[tuple[str, str], dict[str, type]] = {
    ("triton", "cuda"): {"num_warps": int, "num_stages": int, "maxnreg": int, "enable_fp_fusion": bool},
    ("triton", "hip"): {
        "num_warps": int,
        "num_stages": int,
        "waves_per_eu": int,
        "matrix_instr_nonkdim": int,
        "kpack": int,
        "enable_fp_fusion": bool,
    },
    ("cutedsl", "cuda"): {"opt_level": int},
}
_ARGUMENT = re.compile(
    r"(?P<star>\*?)(?P<type>\w+)(?:\((?P<shape>[^();]*)(?:;(?P<strides>[^();]*))?\))?(?::(?P<step>\d+))?"
)
_DIMENSION = re.compile(r"(?P<name>\w+)(?::(?P<step>\d+))?")
_MOST_COMBINATIONS = 4096  # that are looked at one by one
Dimension = int | tuple[str, int]  # or its name, and what it is a multiple of


@dataclass(frozen=True)
class Argument:
    """One parameter of the function that is known at run time."""

    form: str  # pointer | number | tensor | stream
    type: str = ""
    step: int = 1  # what the number or the address is a multiple of; of a tensor's address, 1: of its element's size
    shape: tuple[Dimension, ...] = ()
    strides: tuple[Dimension, ...] = ()  # empty: the elements lie together

    @property
    def text(self) -> str:
        """As in op.toml, for a launcher."""
        star = "*" if self.form == "pointer" else ""
        return f"{star}{self.type}" + (f":{self.step}" if self.step > 1 else "")


@dataclass(frozen=True)
class Kernel:
    """The kernel of one specialisation."""

    function: str
    arguments: dict[str, Argument]
    constants: dict[str, Plain]
    options: dict[str, Plain]

    def to_builtins(self) -> dict[str, Any]:
        return asdict(self)


def resolve(spec: Spec) -> Kernel:
    """The kernel of `spec`.

    Raises:
        ConfigError: something does not fit together, which `check` did not see among too many combinations of axes.
    """
    assert spec.device.kernel is not None
    return _resolved(spec.device.kernel, spec.device.toolchain, spec.arch.kind, dict(spec.axes), spec.uri)


def host_sources(device: DeviceDecl, kind: str) -> tuple[str, ...]:
    """Those of our own sources that make a kernel of `device` callable, relative to include/."""
    return () if device.kernel is None or kind != "cuda" else (_HOST[device.toolchain],)


def check(op: OpDecl, kind: str, where: str) -> None:
    """Raise `ConfigError` for a declaration of a device that no kernel in Python could be built by."""
    device = op.device[kind]
    if (device.kernel is not None) != (device.toolchain in TOOLCHAINS):
        made = "needs a kernel: its function and arguments" if device.kernel is None else "is told by flags and defines"
        raise ConfigError(f"{where}.kernel: the toolchain {device.toolchain!r} {made}")
    if device.kernel is None:
        return
    _check_device(op, device, kind, where)
    names = [*device.kernel.arguments, *device.kernel.constants]
    for name in (device.kernel.function, *names):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigError(f"{where}.kernel: {name[:80]!r} is no name in Python")
        if names.count(name) > 1:
            raise ConfigError(f"{where}.kernel: {name!r} is an argument and a constant")
    for combination in _combinations(op, device.kernel):
        _resolved(device.kernel, device.toolchain, kind, combination, f"{where}.kernel")


def _check_device(op: OpDecl, device: DeviceDecl, kind: str, where: str) -> None:
    toolchain = device.toolchain
    for name in ("flags", "defines", *(("link_flags",) if kind == "hip" or toolchain == "triton" else ())):
        if getattr(device, name):
            raise ConfigError(
                f"{where}.{name} says nothing to {toolchain}; what it takes stands in {where}.kernel.options"
            )
    if len(device.sources) != 1 or not device.sources[0].removesuffix(".jinja").endswith(".py"):
        raise ConfigError(f"{where}.sources: {toolchain} takes one file in Python, got {device.sources}")
    if device.host_sources and (toolchain == "cutedsl" or kind == "hip"):
        why = (
            "the function launches its kernels itself"
            if toolchain == "cutedsl"
            else "no launcher for AMD's GPUs is known"
        )
        raise ConfigError(f"{where}.host_sources: expected none: {why}")
    if not device.host_sources and len(op.exports) != 1:
        raise ConfigError(f"{where}: one kernel exports one function, got {', '.join(op.exports)}")


def _combinations(op: OpDecl, kernel: KernelDecl) -> Iterable[dict[str, str]]:
    """Every combination of the axes that `kernel` names; each axis by itself where there are too many."""
    texts = " ".join(kernel.arguments.values())
    used = {axis for axis in op.axes if re.search(rf"\b{re.escape(axis)}\b", texts)}
    for choice in (*kernel.constants.values(), *kernel.options.values()):
        used |= {choice} if isinstance(choice, str) else set(choice) if isinstance(choice, dict) else set()
    values = {axis: op.axes[axis] for axis in sorted(used & set(op.axes))}
    total = 1
    for each in values.values():
        total *= len(each)
    if total <= _MOST_COMBINATIONS:
        yield from (dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
        return
    first = {axis: each[0] for axis, each in values.items()}
    yield from ({**first, axis: value} for axis, each in values.items() for value in each)


# -- filling in --------------------------------------------------------------------------------------------------------


def _resolved(kernel: KernelDecl, toolchain: str, kind: str, axes: Mapping[str, str], where: str) -> Kernel:
    arguments = {
        name: _argument(text, toolchain, axes, f"{where}.arguments.{name}") for name, text in kernel.arguments.items()
    }
    if toolchain == "triton" and not any(argument.form == "pointer" for argument in arguments.values()):
        raise ConfigError(f"{where}.arguments: expected a pointer among them, which says on which GPU to launch")
    known = _OPTIONS[toolchain, kind]
    for name in kernel.options:
        if name not in known:
            raise ConfigError(
                f"{where}.options: {toolchain} for {kind} takes no {name[:80]!r}; it takes {', '.join(known)}"
            )
    options = {name: _chosen(choice, axes, f"{where}.options.{name}") for name, choice in kernel.options.items()}
    for name, value in options.items():
        if type(value) is not known[name]:
            raise ConfigError(f"{where}.options.{name}: expected {known[name].__name__}, got {value!r}")
    warps = options.get("num_warps", 4)
    if isinstance(warps, int) and (not 0 < warps <= 32 or warps & (warps - 1)):
        raise ConfigError(f"{where}.options.num_warps: expected a power of two up to 32, got {warps}")
    constants = {name: _chosen(choice, axes, f"{where}.constants.{name}") for name, choice in kernel.constants.items()}
    return Kernel(kernel.function, arguments, constants, options)


def _argument(text: str, toolchain: str, axes: Mapping[str, str], where: str) -> Argument:
    match = _ARGUMENT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            f"{where}: {text[:100]!r} is no type of an argument", hint="e.g. *float16:16, int32, float16(m, n)"
        )
    step = int(match["step"] or 1)
    if step < 1 or step & (step - 1) or step > 1 << 20:
        raise ConfigError(f"{where}: {text[:100]!r}: an alignment is a power of two, got {step}")
    if match["type"] == "stream" and toolchain == "cutedsl" and text.strip() == "stream":
        return Argument("stream")
    name = axes.get(match["type"], match["type"])
    if name not in TYPES:
        raise ConfigError(f"{where}: {name[:80]!r} is no type; expected an axis of types, or one of {', '.join(TYPES)}")
    form = "pointer" if match["star"] else "number" if match["shape"] is None else "tensor"
    wrong = ("tensor",) if toolchain == "triton" else ("pointer",)
    if form in wrong or (match["star"] and match["shape"] is not None):
        raise ConfigError(f"{where}: {toolchain} takes no {form}, got {text[:100]!r}")
    if form == "number" and name not in _NUMBERS[toolchain]:
        raise ConfigError(f"{where}: a {name} cannot be passed by value; pass a float32")
    if toolchain == "triton" and step not in (1, 16):
        raise ConfigError(f"{where}: {text[:100]!r}: Triton knows of multiples of 16 alone")
    if form == "number" and step > 1 and (toolchain == "cutedsl" or "int" not in name):
        raise ConfigError(f"{where}: {text[:100]!r}: a {name} is a multiple of nothing that {toolchain} knows")
    if form != "tensor":
        return Argument(form, name, step)
    shape = tuple(_dimension(each, axes, where) for each in match["shape"].split(","))
    strides = (
        () if match["strides"] is None else tuple(_dimension(each, axes, where) for each in match["strides"].split(","))
    )
    if strides and len(strides) != len(shape):
        raise ConfigError(f"{where}: {text[:100]!r} has {len(shape)} dimensions and {len(strides)} strides")
    return Argument(form, name, step, shape, strides)


def _dimension(text: str, axes: Mapping[str, str], where: str) -> Dimension:
    match = _DIMENSION.fullmatch(text)
    name = axes.get(match["name"], match["name"]) if match else ""
    if match is None or (match["name"] in axes and not name.isdecimal()) or (name.isdecimal() and match["step"]):
        raise ConfigError(f"{where}: {text[:80]!r} is no dimension; expected a number, an axis of numbers, or a name")
    if name.isdecimal():
        return int(name)
    step = int(match["step"] or 1)
    if not name.isidentifier() or not 0 < step <= 1 << 20:
        raise ConfigError(f"{where}: {text[:80]!r} is no dimension; expected a number, an axis of numbers, or a name")
    return name, step


def _chosen(choice: Choice, axes: Mapping[str, str], where: str) -> Plain:
    if isinstance(choice, str):
        if choice not in axes:
            raise ConfigError(
                f"{where}: {choice[:80]!r} names no axis of the op", hint="a text of its own belongs into the source"
            )
        return _value(axes[choice])
    if not isinstance(choice, dict):
        return choice
    if len(choice) != 1 or not set(choice) <= set(axes):
        raise ConfigError(f"{where}: expected one axis of the op, got {', '.join(choice) or 'none'}")
    ((axis, table),) = choice.items()
    if axes[axis] not in table:
        raise ConfigError(f"{where}: says nothing for {axis}={axes[axis]}")
    return table[axes[axis]]


def _value(text: str) -> Plain:
    """The value of an axis as Python has it: a number, True or False where it looks like one, else the text."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return text
