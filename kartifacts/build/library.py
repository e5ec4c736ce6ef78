"""Libraries of ops: reads op.toml files, finds every file that a kernel's bytes depend on, and gives specs.

A library is a directory with ``<family>/op.toml`` and shared headers in ``include/``.  Nothing of it is imported.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import msgspec

from kartifacts.build import python_kernels, remembered, templates
from kartifacts.build.closure import INCLUDE, SHARED, inside, own_root, shared_include
from kartifacts.build.declared import DECLARATION, declared, read_family
from kartifacts.errors import ConfigError, Refusal
from kartifacts.files.installed import declares
from kartifacts.model.arch import Arch, build_arch, parse_arch, supported
from kartifacts.model.layout import check_name
from kartifacts.model.spec import DeviceDecl, FamilyDecl, OpDecl, Source, Spec, check_axes, combinations

log = logging.getLogger(__name__)

BUILTIN = "kartifacts"
ENTRY_POINTS = "kartifacts.libraries"
_LOOKED_AT = 256  # combinations of an op's axes


class Library:
    """The ops that one directory declares.

    Every file is read at most once: within a process, a library does not change.

    Attributes:
        version: of the package that brings it; empty if that is this one, or none.
        broken: directory → what is wrong with the op.toml in it; the other families can be used all the same.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        families: Mapping[str, FamilyDecl],
        homes: Mapping[str, str],
        *,
        version: str = "",
        broken: Mapping[str, ConfigError] | None = None,
        workspace: Path | None = None,
    ) -> None:
        self.name = name
        self.root = root
        self.version = version
        self.families = families
        self.broken = dict(broken or {})
        self._workspace = workspace
        self._homes = homes  # family → its directory, relative to the root
        self._reached: dict[object, tuple[Source, ...]] = {}  # sources and axes →

    def __repr__(self) -> str:
        return f"Library({self.name!r}, {str(self.root)!r})"

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Every op as ``family/op``, sorted."""
        return tuple(sorted(f"{decl.family}/{op.name}" for decl in self.families.values() for op in decl.op))

    def matches(self, op: str) -> tuple[str, ...]:
        """The ops that `op` can mean: a full name means itself, a bare one any of that name."""
        return tuple(name for name in self.ops if name == op or name.rpartition("/")[2] == op)

    def find(self, op: str) -> tuple[str, OpDecl]:
        """The family and declaration of ``norm/rmsnorm``, or of ``rmsnorm`` where one family declares it."""
        found = self.matches(op)
        if not found and (error := self.broken.get(op.rpartition("/")[0] or op)):
            raise error
        if len(found) != 1:
            error = _not_one(op, found, self.ops, f"library {self.name!r}")
            unreadable = (f"unreadable: {reason.message}" for reason in self.broken.values())
            error.hint = "; ".join(filter(None, (error.hint, *unreadable)))
            raise error
        family, _, name = found[0].rpartition("/")
        return family, next(decl for decl in self.families[family].op if decl.name == name)

    def spec(self, op: str, axes: Mapping[str, object], arch: Arch) -> Spec:
        """One specialisation of an op for one arch, with the content of every file that its bytes depend on.

        Raises:
            ConfigError: the op or an axis is not declared, the op does not support `arch`, or a source is missing.
        """
        family, decl = self.find(op)
        pairs = check_axes(family, decl, dict(axes))
        return self._spec(family, decl, pairs, arch)

    def build_arch(self, op: str, device: Arch) -> Arch:
        """What to compile of an op for a device: the arch of `model.arch.build_arch`, as the op's toolchain has it."""
        _, decl = self.find(op)
        arch = build_arch(device)
        declared = decl.device.get(arch.kind)
        family = declared is not None and declared.toolchain == "triton" and arch.suffix == "f"
        return replace(arch, suffix="a") if family else arch

    def specs(self, ops: Iterable[str], archs: Sequence[Arch]) -> tuple[list[Spec], list[Refusal]]:
        """Every specialisation of `ops` (all, if none are named) for every arch that each op supports.

        Returns:
            The specs, and one refusal for each op and arch that were left out.

        Raises:
            ConfigError: nothing is left to build, or any declaration of the library is wrong.
        """
        for error in self.broken.values():
            raise error
        made: list[Spec] = []
        skipped: list[Refusal] = []
        wanted = {f"{family}/{decl.name}": (family, decl) for family, decl in map(self.find, tuple(ops) or self.ops)}
        for name, (family, decl) in wanted.items():
            for arch in archs:
                reason = _unsupported(decl, arch)
                if reason is not None:
                    skipped.append(Refusal(f"{name} for {arch}", reason))
                    continue
                made.extend(self._spec(family, decl, pairs, arch) for pairs in combinations(decl))
        if not made:
            reasons = "; ".join(map(str, skipped[:8]))
            raise ConfigError(f"nothing to build for {' '.join(map(str, archs)) or 'an empty arch list'}: {reasons}")
        return made, skipped

    def faults(self) -> list[ConfigError]:
        """What is wrong with the sources of each op and device, found without compiling any.

        Of an op with very many combinations of its axes, the first are looked at.
        """
        found: dict[str, ConfigError] = {}
        for family, decl in map(self.find, self.ops):
            for kind in decl.device:
                try:
                    device = self._device(family, decl, kind)
                    for axes in islice(combinations(decl), _LOOKED_AT):
                        self.closure((*device.sources, *device.host_sources), dict(axes))
                except ConfigError as error:
                    found.setdefault(error.message, error)
        return list(found.values())

    def closure(self, sources: Iterable[str], axes: Mapping[str, str] = {}) -> tuple[Source, ...]:
        """`sources` and every file of the library that they include, with content digests, sorted by path.

        Args:
            axes: what templates among `sources` are rendered with.
        """
        wanted = tuple(sources)
        asked = (wanted, tuple(axes.items()) if any(map(templates.is_template, wanted)) else ())
        if asked not in self._reached:
            self._reached[asked] = remembered.closure(self._workspace, self.root, wanted, axes)
        return self._reached[asked]

    def _spec(self, family: str, decl: OpDecl, axes: tuple[tuple[str, str], ...], arch: Arch) -> Spec:
        reason = _unsupported(decl, arch)
        if reason is not None:
            raise ConfigError(f"{family}/{decl.name} cannot be built for {arch}: {reason}")
        device = self._device(family, decl, arch.kind)
        return Spec(
            library=self.name,
            family=family,
            op=decl,
            axes=axes,
            arch=arch,
            device=device,
            sources=self.closure((*device.sources, *device.host_sources), dict(axes)),
            root=str(self.root),
        )

    def _device(self, family: str, decl: OpDecl, kind: str) -> DeviceDecl:
        """The declaration with its paths relative to the library's root, as the compiler and the identity see them."""
        device, home = decl.device[kind], self._homes[family]
        what = f"{home}/op.toml: {decl.name}.device.{kind}"
        return msgspec.structs.replace(
            device,
            sources=[inside(home, path, what) for path in device.sources],
            host_sources=[inside(home, path, what) for path in device.host_sources] or self._usual_host(device, kind),
        )

    def _usual_host(self, device: DeviceDecl, kind: str) -> list[str]:
        """What launches a kernel in Python that declares no host code: a source that lies among our headers."""
        top = INCLUDE if shared_include(self.root) is None else f"{SHARED}/{INCLUDE}"
        return [f"{top}/{path}" for path in python_kernels.host_sources(device, kind)]


class Libraries:
    """The libraries of this machine, searched as one.  Those given explicitly hide others' ops of the same name."""

    def __init__(
        self, explicit: Sequence[Library], installed: Sequence[Library], broken: Sequence[Refusal] = ()
    ) -> None:
        self.explicit = tuple(explicit)
        self.installed = tuple(installed)
        declarations = [
            Refusal(f"library {library.name}", error.message)
            for library in (*explicit, *installed)
            for error in library.broken.values()
        ]
        self.broken = (*broken, *declarations)

    def __iter__(self) -> Iterator[Library]:
        return iter((*self.explicit, *self.installed))

    def library_of(self, op: str) -> Library | None:
        """The library that declares `op`; None if none does.

        Raises:
            ConfigError: several do, or the declaration of its family cannot be read.
        """
        for group in (self.explicit, self.installed):
            found = [(library, name) for library in group for name in library.matches(op)]
            if len(found) > 1:
                named = [f"{name} of {library.name!r} in {library.root}" for library, name in found]
                raise ConfigError(f"the op {op!r} is declared more than once: {'; '.join(named)}")
            if found:
                return found[0][0]
            for library in group:
                if error := library.broken.get(op.rpartition("/")[0]):
                    raise error
        return None

    def find(self, op: str) -> Library:
        """The library that declares `op`; raises `ConfigError` if not exactly one does."""
        library = self.library_of(op)
        if library is None:
            raise self.unknown(op)
        return library

    def unknown(self, op: str) -> ConfigError:
        """The error for an op that no library declares."""
        known = [name for library in self for name in library.ops]
        error = _not_one(op, (), known, "any library")
        if self.broken:
            error.hint = "; ".join(filter(None, (error.hint, *(f"unreadable: {reason}" for reason in self.broken))))
        return error


def discover(explicit: Iterable[Path] = (), workspace: Path | None = None) -> Libraries:
    """Find the libraries of this machine: `explicit` directories, our own, and those of installed packages.

    What is read of them is remembered in `workspace`, if that is there already.  One broken package or declaration
    does not take the others with it: it is logged, and named where an op is not found.
    """
    installed, broken = [], []
    for name, value, version in _installed():
        try:
            installed.append(open_library(_root_of(value), name, version=version, strict=False, workspace=workspace))
        except ConfigError as error:
            log.warning("the kernel library %r is not usable: %s", name, error.message)
            broken.append(Refusal(f"library {name}", error.message))
    return Libraries([open_library(path, strict=False, workspace=workspace) for path in explicit], installed, broken)


def open_library(
    root: Path, name: str | None = None, *, version: str = "", strict: bool = True, workspace: Path | None = None
) -> Library:
    """Read every op.toml of a library.

    Args:
        root: its directory.
        name: what releases call it; by default a name like that of the directory.
        version: of the package that brings it.
        strict: fail at the first op.toml that is wrong; else go on without, and raise its error when it is asked for.
        workspace: where what is read of it is remembered, if that is there already.

    Raises:
        ConfigError: it is not a library, or an op.toml is wrong; names the file.
    """
    try:
        root = Path(os.path.abspath(root))
    except FileNotFoundError as error:  # no current directory
        raise ConfigError(f"{str(root)!r} is no kernel library: {error.strerror}") from error
    if name is None:
        name = BUILTIN if root == own_root() else re.sub(r"[^a-z0-9]+", "-", root.name.lower()).strip("-") or "ops"
    check_name(name, "library")
    parsed = remembered.declarations(workspace, root)
    if not parsed:
        raise ConfigError(f"{str(root)!r} is no kernel library: it has no */op.toml")
    families: dict[str, FamilyDecl] = {}
    homes: dict[str, str] = {}
    broken: dict[str, ConfigError] = {}
    for home, content in parsed.items():
        file = root / home / DECLARATION
        try:
            decl = read_family(file) if content is None else declared(content, str(file))
            if decl.family in families:
                raise ConfigError(
                    f"{str(file)!r} declares the family {decl.family!r}, as {homes[decl.family]}/op.toml does"
                )
        except ConfigError as error:
            if strict:
                raise
            log.warning("an op.toml of the library %r is not usable: %s", name, error.message)
            broken[home] = error
            continue
        families[decl.family] = decl
        homes[decl.family] = home
    return Library(name, root, families, homes, version=version, broken=broken, workspace=workspace)


# -- where libraries are -----------------------------------------------------------------------------------------------


def _installed() -> Iterator[tuple[str, str | Path, str]]:
    """Name, place and version of each installed library, ours first."""
    root = own_root()
    if root is not None:
        yield BUILTIN, root, ""
    if not declares(ENTRY_POINTS):
        return
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        yield point.name, point.value, point.dist.version if point.dist else ""


def _root_of(place: str | Path) -> Path:
    """A directory as it is, or the one that ``package`` or ``package:sub.directory`` stands for; imports nothing."""
    if isinstance(place, Path):
        return place
    from importlib.util import find_spec

    top, *parts = re.split(r"[.:]", place.partition("[")[0].strip())
    try:
        spec = find_spec(top)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"entry point {place!r} names the package {top!r}, which is broken: {error}") from error
    for location in (spec.submodule_search_locations if spec else None) or ():
        root = Path(location, *parts)
        if os.path.isdir(root):
            return root
    raise ConfigError(f"entry point {place!r} names no directory of an installed package")


# -- what is asked for -------------------------------------------------------------------------------------------------


def _unsupported(decl: OpDecl, arch: Arch) -> str | None:
    device = decl.device.get(arch.kind)
    if device is None:
        return f"the op is declared for {', '.join(sorted(decl.device))} only"
    least = parse_arch(device.min_arch) if device.min_arch else None
    _, refused = supported([arch], majors=device.majors, min_arch=least)
    return refused[0].reason if refused else None


def _not_one(op: str, found: Sequence[str], known: Sequence[str], where: str) -> ConfigError:
    if found:
        return ConfigError(f"the op {op!r} is ambiguous in {where}: {', '.join(found)}", hint="name its family")
    bare = {name.rpartition("/")[2]: name for name in known}
    near = difflib.get_close_matches(op[:100], [*known, *bare], n=4, cutoff=0.5)
    listed = ", ".join(dict.fromkeys(bare.get(name, name) for name in near)) or ", ".join(known[:20]) or "none"
    return ConfigError(f"no op {op[:100]!r} is declared in {where}", hint=f"near ones: {listed}")
