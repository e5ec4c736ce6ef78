"""Op → spec → key: what is declared, one specialisation of it, and the identity of its bytes.

Two digests, because two questions are asked:

* `Spec.op_digest`: is this *the same op*?  Over the op, its axes, the content of every source and header reached, the
  declared flags and the FFI ABI.  A machine without a compiler can compute it; a prebuilt kernel fits when it is equal,
  whatever version string either side carries.
* `Spec.key(toolchain)`: are these *the same bytes*?  Over the above, the full arch and the toolchain's kind and
  version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import msgspec

from kartifacts.errors import ConfigError
from kartifacts.model.arch import Arch
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.layout import check_name

KEY_SCHEMA = 2
FFI_ABI = "tvm-ffi-0.1"
NOT_AXES = {"self", "op", "device"}  # load() takes axes as keywords beside these


Plain = bool | int | float | str
Choice = Plain | dict[str, dict[str, Plain]]
"""A value; a text names the axis whose value it is; a table axis → value → what to take."""


class KernelDecl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel written in Python: its function, and what that is specialised to (see `build.python_kernels`)."""

    function: str
    arguments: dict[str, str]  # parameter → its type, in which a name of an axis stands for its value
    constants: dict[str, Choice] = {}  # parameter → what is known when it is compiled
    options: dict[str, Choice] = {}  # of the compiler


class DeviceDecl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an op is built for one kind of device.

    Paths are relative to the directory of op.toml; `..` may reach another directory of the same library, no further.
    """

    toolchain: str  # cxx | nvcc | nvrtc | triton | cutedsl
    sources: list[str]  # compiled per arch and specialisation: device code, of an object with its launcher
    host_sources: list[str] = []  # FFI binding, of an image with its launcher; compiled once per op
    output: str = ""  # object | image; empty: what the toolchain makes by itself
    flags: list[str] = []
    link_flags: list[str] = []
    defines: dict[str, dict[str, str]] = {}  # axis → value → macro definition, e.g. KART_DTYPE=2
    kernel: KernelDecl | None = None  # of triton and cutedsl, in place of flags and defines
    min_arch: str = ""  # lowest arch that the code supports, e.g. 7.5
    majors: list[int] = []  # CUDA major versions that the code supports; empty: all


class Unsupported(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Combinations of axes that an op does not have: refused before anything is compiled."""

    when: dict[str, list[str]]  # axis → values; all of the axes must match
    reason: str


class OpDecl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One op as declared in op.toml."""

    name: str
    summary: str
    exports: list[str]
    axes: dict[str, list[str]]
    device: dict[str, DeviceDecl]  # cpu | cuda | hip
    unsupported: list[Unsupported] = []  # combinations of values that are none
    reference: str = ""  # file:function of the float64 reference
    trace: str = ""  # trace template


class FamilyDecl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of one op.toml."""

    schema: int
    family: str
    op: list[OpDecl]


@dataclass(frozen=True)
class Source:
    """One file that the bytes depend on: its path relative to the library's root, and its content's digest."""

    path: str
    sha256: Digest


@dataclass(frozen=True)
class Spec:
    """One specialisation of one op for one arch: what a toolchain compiles and what a release promises.

    `root` is where the sources lie on this machine; it takes no part in any identity.
    """

    library: str
    family: str
    op: OpDecl
    axes: tuple[tuple[str, str], ...]  # sorted by axis
    arch: Arch
    device: DeviceDecl
    sources: tuple[Source, ...]  # everything reached, headers included, sorted by path
    root: str

    @property
    def uri(self) -> str:
        return make_uri(self.family, self.op.name, dict(self.axes))

    @property
    def output(self) -> str:
        """``object``: host and device code linked together.  ``image``: device code alone, loaded by the driver."""
        return self.device.output or ("image" if self.device.toolchain in ("nvrtc", "triton") else "object")

    def identity(self) -> dict[str, Any]:
        """What `op_digest` is made of, for ``kartifacts explain-key``."""
        return {
            "schema": KEY_SCHEMA,
            "uri": self.uri,
            "exports": self.op.exports,
            "toolchain": self.device.toolchain,
            "output": self.output,
            "flags": self.device.flags,
            "link_flags": self.device.link_flags,
            "defines": self.defines,
            "compile": [self.device.sources, self.device.host_sources],
            "sources": {source.path: source.sha256 for source in self.sources},
            "ffi": FFI_ABI,
            **({"kernel": msgspec.to_builtins(self.device.kernel)} if self.device.kernel else {}),
        }

    @property
    def defines(self) -> list[str]:
        return [
            self.device.defines[axis][value] for axis, value in self.axes if value in self.device.defines.get(axis, {})
        ]

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that its kernel may need besides the usual, as named after -l."""
        return tuple(flag.removeprefix("-l") for flag in self.device.link_flags if flag.startswith("-l"))

    @cached_property
    def op_digest(self) -> Digest:
        return sha256(canonical_json(self.identity()))

    def key_parts(self, toolchain: dict[str, str]) -> dict[str, Any]:
        """What `key` is made of; `toolchain` holds its kind, version and whatever else changes its output."""
        return {**self.identity(), "arch": str(self.arch), "compiler": toolchain}

    def key(self, toolchain: dict[str, str]) -> Digest:
        return sha256(canonical_json(self.key_parts(toolchain)))


def overridden(toolchain: Mapping[str, str]) -> str:
    """The flags that settings added to the compilers of a kernel, out of what its key is made of; empty if none did.

    Such a kernel is for who set them: nobody else's load takes it, and no release holds it.
    """
    return " ".join(flags for name, flags in sorted(toolchain.items()) if name.split(" ")[-1] == "overrides")


def make_uri(family: str, op: str, axes: dict[str, str]) -> str:
    """``norm/rmsnorm?dtype=bfloat16``: deterministic, axes sorted by name."""
    query = "&".join(f"{axis}={axes[axis]}" for axis in sorted(axes))
    return f"{family}/{op}" + (f"?{query}" if query else "")


def check_axes(family: str, op: OpDecl, axes: dict[str, object]) -> tuple[tuple[str, str], ...]:
    """Give back `axes` sorted, or say which axis is unknown, missing or has a value that is not declared."""
    name = f"{family}/{op.name}"
    for axis in axes:
        if axis not in op.axes:
            raise ConfigError(f"{name} has no axis {axis!r}; its axes are: {', '.join(sorted(op.axes)) or 'none'}")
    for axis, values in op.axes.items():
        if axis not in axes:
            raise ConfigError(f"{name} needs the axis {axis!r}, one of: {', '.join(values)}")
        if str(axes[axis]) not in values:
            raise ConfigError(
                f"{name} is not declared for {axis}={str(axes[axis])[:80]!r}; declared: {', '.join(values)}"
            )
    pairs = tuple(sorted((axis, str(value)) for axis, value in axes.items()))
    if rule := unsupported(op, pairs):
        named = ", ".join(f"{axis}={value}" for axis, value in pairs if axis in rule.when)
        raise ConfigError(f"{name} has no kernel for {named}: {rule.reason}")
    return pairs


def unsupported(op: OpDecl, axes: tuple[tuple[str, str], ...]) -> Unsupported | None:
    """The first declared reason why there is no kernel for a combination of values; None if there is one."""
    given = dict(axes)
    return next(
        (rule for rule in op.unsupported if all(given[axis] in values for axis, values in rule.when.items())), None
    )


def combinations(op: OpDecl) -> list[tuple[tuple[str, str], ...]]:
    """Every specialisation that an op has, each as its axes and values, sorted by axis."""
    names = sorted(op.axes)
    every = (tuple(zip(names, values, strict=True)) for values in product(*(op.axes[name] for name in names)))
    return [axes for axes in every if unsupported(op, axes) is None]


def check_family(decl: FamilyDecl, *, what: str) -> FamilyDecl:
    """Check the names and references inside a declaration; unknown keys were refused while parsing."""
    if decl.schema != 1:
        raise ConfigError(f"{what}: schema {decl.schema} is not known; this version reads schema 1")
    check_name(decl.family, "family")
    names = [op.name for op in decl.op]
    for op in decl.op:
        check_name(op.name, "op")
        if names.count(op.name) > 1:
            raise ConfigError(f"{what}: the op {op.name!r} is declared twice")
        for axis in NOT_AXES & set(op.axes):
            raise ConfigError(
                f"{what}: the op {op.name!r} has an axis named {axis!r}, which means something else in load()"
            )
        if not op.device:
            raise ConfigError(f"{what}: the op {op.name!r} is declared for no device")
        for kind, device in op.device.items():
            _check_device(device, op, kind, f"{what}: {op.name}.device.{kind}")
        _check_unsupported(op, f"{what}: {op.name}.unsupported")
    return decl


def _check_device(device: DeviceDecl, op: OpDecl, kind: str, where: str) -> None:
    if kind not in ("cpu", "cuda", "hip"):
        raise ConfigError(f"{where}: expected cpu, cuda or hip")
    if not device.sources:
        raise ConfigError(f"{where} lists no sources")
    for axis, values in device.defines.items():
        unknown = sorted(set(values) - set(op.axes.get(axis, [])))
        if axis not in op.axes or unknown:
            raise ConfigError(f"{where}.defines names {axis}={unknown}, which no axis of the op declares")


def _check_unsupported(op: OpDecl, where: str) -> None:
    for rule in op.unsupported:
        if not rule.when or not all(rule.when.values()):
            raise ConfigError(f"{where}: a rule names no axis, or an axis without values; it says {rule.reason!r}")
        if not rule.reason.strip():
            raise ConfigError(f"{where}: a rule about {', '.join(sorted(rule.when))} gives no reason")
        for axis, values in rule.when.items():
            unknown = sorted(set(values) - set(op.axes.get(axis, [])))
            if axis not in op.axes or unknown:
                raise ConfigError(f"{where} names {axis}={unknown}, which no axis of the op declares")
    if op.unsupported and not combinations(op):
        raise ConfigError(f"{where} leaves nothing: every combination of the axes is said to have no kernel")
