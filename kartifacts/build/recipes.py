"""Reads builder.toml, the description of a build environment, and holds the compilers found here against it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kartifacts.build.toolchains import Toolchain
from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import canonical_json, sha256
from kartifacts.model.materials import Recipe
from kartifacts.model.spec import Spec

MAX_RECIPE = 1 << 20  # bytes


class Pinned(msgspec.Struct, frozen=True):
    """What a recipe says of one compiler, as far as it is compared; its flags are those of the code."""

    version: str
    machine: str = ""
    linker: str = ""


class Builder(msgspec.Struct, frozen=True):
    """What is read of a builder.toml."""

    name: str
    image: str = ""  # container image that the environment begins with
    machine: str = ""  # x86_64 | aarch64
    cuda: str = ""  # version of the toolkit
    cxx: Pinned | None = None
    nvcc: Pinned | None = None
    nvrtc: Pinned | None = None
    triton: Pinned | None = None
    cutedsl: Pinned | None = None


def read_builder(path: Path) -> Builder:
    """Read a builder.toml; a `ConfigError` says what is wrong with it."""
    return _read(path)[0]


def _read(path: Path) -> tuple[Builder, bytes]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = read_regular(path, MAX_RECIPE)
        return msgspec.convert(tomllib.loads(data.decode()), Builder), data
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8 and the types of fields
        raise ConfigError(f"{str(path)!r} is not the recipe of a build environment: {error}") from error


def read_recipe(path: Path, toolchains: Iterable[Toolchain], specs: Iterable[Spec] = ()) -> Recipe:
    """The builder.toml that names this environment, once the compilers found here are those that it pins.

    Args:
        specs: what is to be built, of which also the launchers, though they came prebuilt, are of compilers it pins.

    Raises:
        ConfigError: it cannot be read, or a compiler is another one.
    """
    builder, data = _read(path)
    by_kind = {toolchain.kind: toolchain for toolchain in toolchains}
    for kind, facts in _used(by_kind, specs):
        for what, pinned, found in _compared(builder, kind, facts):
            if pinned != found:
                raise ConfigError(
                    f"the recipe {builder.name[:100]!r} pins {what} {pinned[:100] or 'not at all'!r}; "
                    f"{found!r} was found",
                    hint="build in the environment that the recipe describes, or leave --recipe out",
                )
    return Recipe(name=builder.name, sha256=sha256(data))


def _used(toolchains: Mapping[str, Toolchain], specs: Iterable[Spec]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each toolchain with the facts of it, and of what it uses beside itself; all that differ."""
    yield from ((kind, toolchain.fingerprint) for kind, toolchain in toolchains.items())
    seen = set()
    for spec in specs:
        facts = toolchains[spec.device.toolchain].made_with(spec)
        said = canonical_json(dict(facts))
        if said not in seen:
            seen.add(said)
            yield spec.device.toolchain, facts


def _compared(builder: Builder, kind: str, facts: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """What is pinned of a compiler, and of the host compiler that it or its launchers use, beside what was found."""
    for compiler, prefix in ((kind, ""), ("cxx", "host "), ("cxx", "launcher ")):
        if f"{prefix}version" not in facts:
            continue
        pinned: Pinned | None = getattr(builder, compiler, None)
        what = compiler + " of launchers" * (prefix == "launcher ")
        yield what, pinned.version if pinned else "", facts[f"{prefix}version"]
        for name in ("machine", "linker"):
            said, found = getattr(pinned, name, ""), facts.get(f"{prefix}{name}", "")
            if said and found:
                yield f"{name} of {what}", said, found
