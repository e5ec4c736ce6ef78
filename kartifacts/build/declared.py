"""Reads one op.toml and refuses, with the name of the file, whatever could not be built, published or called."""

from __future__ import annotations

import keyword
import math
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from kartifacts.build import python_kernels
from kartifacts.build.flags import check_define, check_flag, check_link_flag
from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import DeviceDecl, FamilyDecl, OpDecl, check_family

DECLARATION = "op.toml"
MAX_DECLARATION = 1 << 20  # bytes of an op.toml
MAX_COMBINATIONS = 100_000  # of the values of an op's axes; each is a kernel
MAX_NAME = 200  # characters of an op and its axes, which become the name of a file
TAKEN = frozenset({"arch", "exports", "origin", "path", "refusals", "uri"})  # attributes of a loaded kernel
_TOOLCHAINS = {"cpu": ("cxx",), "cuda": ("nvrtc", "nvcc", "triton", "cutedsl"), "hip": ("triton",)}
_OUTPUTS = {  # the first is what is made where none is named
    "cxx": ("object",),
    "nvcc": ("object", "image"),
    "nvrtc": ("image",),
    "triton": ("image",),
    "cutedsl": ("object",),
}
MAX_MAJOR = 99  # of CUDA archs; 12 is the highest that there is
_AXIS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_HEADER = re.compile(r"\.(h|hh|hpp|hxx|h\+\+|cuh|inl|inc|ipp|tpp)$", re.IGNORECASE)
_EXPORT = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def read_family(file: Path) -> FamilyDecl:
    """The declaration in a file.

    Raises:
        ConfigError: it cannot be read, or is wrong; names the file.
    """
    return declared(parsed(file), str(file))


def parsed(file: Path) -> dict[str, Any]:
    """The TOML in a file, whatever it declares; raises `ConfigError`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(read_regular(file, MAX_DECLARATION).decode())
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML and UTF-8
        raise ConfigError(f"{str(file)!r} is not TOML: {error}") from error


def declared(content: dict[str, Any], what: str) -> FamilyDecl:
    """The declaration that `parsed` has read from the file `what`, checked; raises `ConfigError`."""
    try:
        _check_fields(content)
        decl = msgspec.convert(content, FamilyDecl)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.message}", hint=error.hint) from error
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{what!r} is not a declaration of ops: {error}") from error
    try:
        if not decl.op:
            raise ConfigError(f"{what}: the family {decl.family!r} declares no op")
        for op in decl.op:
            _check_number(op, what)
        check_family(decl, what=what)
        for op in decl.op:
            _check_op(op, what)
    except ConfigError as error:
        if what in error.message:
            raise
        raise ConfigError(f"{what}: {error.message}", hint=error.hint) from error
    return decl


def _check_fields(content: dict[str, Any]) -> None:
    """Name the op and device of a field that is none there; the parser would say `$.op[0].device[...]`."""
    ops = content.get("op")
    for op in ops if isinstance(ops, list) else ():
        devices = op.get("device") if isinstance(op, dict) else None
        for kind, device in devices.items() if isinstance(devices, dict) else ():
            for name in device if isinstance(device, dict) else ():
                if name not in DeviceDecl.__struct_fields__:
                    of_op = "; it belongs to [[op]]" * (name in OpDecl.__struct_fields__)
                    raise ConfigError(
                        f"{str(op.get('name'))[:80]}.device.{kind[:80]} has the unknown field {name[:80]!r}{of_op}",
                        hint=f"fields of a device: {', '.join(DeviceDecl.__struct_fields__)}",
                    )


def _check_exports(op: OpDecl, what: str) -> None:
    if not op.exports:
        raise ConfigError(f"{what}: {op.name} exports no function")
    for name in op.exports:
        if not _EXPORT.fullmatch(name) or keyword.iskeyword(name) or op.exports.count(name) > 1:
            raise ConfigError(
                f"{what}: {op.name} exports {name[:80]!r}; expected names of functions, each once, made of letters, "
                "digits and _, a letter first"
            )
        if name in TAKEN:
            raise ConfigError(
                f"{what}: {op.name} exports {name!r}, which would hide what a loaded kernel says about itself",
                hint=f"call it otherwise; taken are {', '.join(sorted(TAKEN))}",
            )


def _check_number(op: OpDecl, what: str) -> None:
    """Refuse an op of more kernels than anybody can build, before they are listed."""
    number = math.prod(map(len, op.axes.values()))
    if number > MAX_COMBINATIONS:
        listed = " times ".join(f"{len(values)} of {axis}" for axis, values in op.axes.items())
        raise ConfigError(
            f"{what}: {op.name} has {number} combinations of its axes' values ({listed[:200]}); "
            f"expected at most {MAX_COMBINATIONS}",
            hint="list fewer values, or divide the op",
        )


def _check_sources(device: DeviceDecl, where: str) -> None:
    if len(device.sources) > 1 and (device.output == "image" or device.toolchain == "nvrtc"):
        raise ConfigError(
            f"{where}.sources: an image is made of one source, got {', '.join(device.sources)}",
            hint='include the others from one of them, or declare toolchain = "nvcc" with output = "object"',
        )
    for field, sources in (("sources", device.sources), ("host_sources", device.host_sources)):
        for source in sources:
            if _HEADER.search(source):
                raise ConfigError(
                    f"{where}.{field}: {source[:100]!r} is a header, of which no compiler makes an object",
                    hint="leave it out: what a source includes is found, and part of the op's identity",
                )


def _check_op(op: OpDecl, what: str) -> None:
    for axis, values in op.axes.items():
        for text in (axis, *values):
            if not _AXIS.fullmatch(text):
                raise ConfigError(f"{what}: {op.name} has the axis {axis!r} with a bad name or value {text[:80]!r}")
        if not values or len(set(values)) != len(values):
            raise ConfigError(f"{what}: {op.name}.axes.{axis} must list its values, each once; got {values}")
    longest = "&".join(f"{axis}={max(values, key=len)}" for axis, values in op.axes.items())
    if len(op.name) + len(longest) > MAX_NAME:
        raise ConfigError(
            f"{what}: {op.name} and its longest axes have {len(op.name) + len(longest)} characters, which names no "
            f"file; expected at most {MAX_NAME}: {longest[:80]!r}"
        )
    _check_exports(op, what)
    for kind, device in op.device.items():
        where = f"{what}: {op.name}.device.{kind}"
        if device.toolchain not in _TOOLCHAINS[kind]:
            expected = " or ".join(map(repr, _TOOLCHAINS[kind]))
            raise ConfigError(f"{where}.toolchain: expected {expected}, got {device.toolchain!r}")
        if device.output and device.output not in (made := _OUTPUTS[device.toolchain]):
            expected = " or ".join(f"an {one}" for one in made)
            raise ConfigError(f"{where}.output: {device.toolchain} makes {expected}, not an {device.output[:80]}")
        _check_sources(device, where)
        python_kernels.check(op, kind, where)
        for flag in device.flags:
            check_flag(flag, device.toolchain, where)
        for flag in device.link_flags:
            check_link_flag(flag, where)
        for axis, macros in device.defines.items():
            if missing := [value for value in op.axes[axis] if value not in macros]:
                raise ConfigError(
                    f"{where}.defines.{axis} has no macro for {', '.join(missing)[:200]}, of the values of that axis",
                    hint="give each value one; a macro that is 0 will do",
                )
        for define in (define for values in device.defines.values() for define in values.values()):
            check_define(define, where)
        if device.min_arch and parse_arch(device.min_arch).kind != kind:
            raise ConfigError(f"{where}.min_arch: {device.min_arch!r} is no {kind} arch")
        if device.majors and kind != "cuda":
            raise ConfigError(f"{where}.majors says nothing: it is about archs of CUDA")
        for major in device.majors:
            if not 0 < major <= MAX_MAJOR or device.majors.count(major) > 1:
                raise ConfigError(
                    f"{where}.majors: expected the first number of CUDA archs, each once, got {device.majors}"
                )
