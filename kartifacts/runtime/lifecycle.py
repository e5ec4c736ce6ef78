"""From a spec to a loaded kernel: this process, what was built here before, or building it now, whatever its toolchain.

What is kept belongs to who made it: where a compiler is here and may compile, only what this very one has made is used;
where none is or may, what any has made.  A kernel that was compiled with flags of the settings' is found under the same
settings only, and a kept kernel that does not load is built once more, where it may be.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kartifacts import config
from kartifacts.build import jit as builder
from kartifacts.build import nearest, toolchains, workspace
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.toolchains import Toolchain
from kartifacts.config import Settings
from kartifacts.errors import (
    BuildError,
    ConfigError,
    KartifactsError,
    LoadError,
    MissingKernel,
    NoCompiler,
    Refusal,
    StoreError,
)
from kartifacts.files.trust import make_directory
from kartifacts.model.arch import Arch
from kartifacts.model.digest import Digest
from kartifacts.model.spec import Spec
from kartifacts.runtime import host, misses
from kartifacts.runtime.kernel import Kernel
from kartifacts.runtime.turn import turn

log = logging.getLogger(__name__)

BEFORE = "built here before"

_Wanted = tuple[Digest, Arch, Settings]

_loaded: dict[_Wanted, Kernel] = {}
# Kept, and of no use here: by path and content.  Only one that has the key of ours is in the way.
_unloadable: dict[_Wanted, set[tuple[Path, Digest]]] = {}


def build_and_load(spec: Spec, settings: Settings | None = None) -> Kernel:
    """The kernel of `spec`: loaded by this process already, built here before, or built now by its toolchain.

    What is published is not looked at: that is what `Registry.load` does first.

    Args:
        spec: of a library's op, as `Library.spec` makes it and `MissingKernel.spec` carries it.
        settings: those in force; read from the environment and the configuration file if not given.

    Raises:
        ConfigError: its toolchain cannot make it, or the settings ask for what cannot be given; nothing was compiled.
        MissingKernel: it was not built here before, and the policy forbids compiling.
        NoCompiler: there is none for it; every place searched is listed.
        BuildError: a compiler failed, or made something else than the spec promises.
        StoreError: the workspace cannot be used.
        LoadError: it was built, and does not load in this process.
    """
    settings = settings or config.read()
    wanted = _wanted(spec, settings)
    with turn():
        kernel = _loaded.get(wanted)
        if kernel is None:
            reasons: list[Refusal] = []
            kernel = find(spec, settings, reasons) or build(spec, settings, reasons)
            _loaded[wanted] = kernel
        return kernel


def find(spec: Spec, settings: Settings, refusals: list[Refusal]) -> Kernel | None:
    """The kernel, if it was built here before and loads; else None, and why is added to `refusals`.

    Raises:
        ConfigError: the settings ask for what cannot be given.
    """
    for built in usable(spec, settings, refusals):
        try:
            return _load(spec, built, BEFORE, refusals)
        except LoadError as error:
            _unloadable.setdefault(_wanted(spec, settings), set()).add((built.path, built.sha256))
            refusals.append(Refusal(BEFORE, error.message))
    return None


def _wanted(spec: Spec, settings: Settings) -> _Wanted:
    return spec.op_digest, spec.arch, settings


def _load(spec: Spec, built: BuiltKernel, origin: str, refusals: Iterable[Refusal]) -> Kernel:
    return Kernel(spec.uri, built.arch, built.path, origin, built.exports, tuple(refusals))


def usable(spec: Spec, settings: Settings, refusals: list[Refusal]) -> Iterator[BuiltKernel]:
    """The finished builds that this process may load, newest first; why others are none is added to `refusals`.

    Writes nothing.
    """
    if settings.disk_cache == "off":
        log.warning("KARTIFACTS_DISK_CACHE=off: %s is not looked for among what was built here before", spec.uri)
        refusals.append(Refusal(BEFORE, "not looked at: KARTIFACTS_DISK_CACHE=off"))
        return
    found, toolchain = False, None
    try:
        toolchain = _demanded(spec, settings)
        for built in builder.every_built(spec, settings, toolchain):
            found = True
            lacking = host.unmet(built.needs, built.machine)
            if lacking is None:
                yield built
            else:
                _unloadable.setdefault(_wanted(spec, settings), set()).add((built.path, built.sha256))
                refusals.append(Refusal(BEFORE, lacking))
    except (StoreError, NoCompiler) as error:  # it is for who builds to say that this stands in the way
        refusals.append(Refusal(BEFORE, error.message))
    else:
        by = "" if toolchain is None else " by the compiler that is here"
        refusals += [] if found else [Refusal(BEFORE, f"nothing for {spec.arch}{by}")]


def _demanded(spec: Spec, settings: Settings) -> Toolchain | None:
    """The toolchain whose kernel alone will do; None where nothing can be compiled here, and any compiler's will.

    Raises:
        ConfigError: the settings ask for what cannot be given.
        NoCompiler: there is none, and the settings name the one that is to be used.
    """
    if settings.overrides or settings.cuda_compiler != "auto":
        return toolchains.find(spec.device.toolchain, settings)
    if refused(settings) is not None or not os.access(settings.workspace, os.W_OK):
        return None
    try:
        with suppress(ConfigError):  # as that of an older toolkit, which knows no such GPU
            toolchain = toolchains.find(spec.device.toolchain, settings)
            toolchain.check(spec)
            toolchain.made_with(spec)  # which looks for the compiler of its launcher
            return toolchain
    except NoCompiler as error:
        if any(refusal.place.startswith("KARTIFACTS_") for refusal in error.searched):
            raise
    return None


def refused(settings: Settings) -> str | None:
    """Why the policy forbids compiling, or None."""
    if settings.jit == "never":
        return "KARTIFACTS_JIT=never"
    if settings.offline and settings.jit != "always":
        return "offline, and KARTIFACTS_JIT is not 'always'"
    return None


def explain(spec: Spec, settings: Settings) -> list[Refusal]:
    """What `build_and_load` would do, and how what was built before differs from what is wanted."""
    rows: list[Refusal] = []
    try:
        if built := next(usable(spec, settings, rows), None):
            rows.append(Refusal(BEFORE, f"fits: {built.path}{_of_another(spec, built, settings)}"))
        else:
            rows += [Refusal(BEFORE, text) for text in _nearest(spec, settings)]
        if forbidden := refused(settings):
            return [*rows, Refusal("JIT", f"refused: {forbidden}")]
        toolchain = toolchains.find(spec.device.toolchain, settings)
        toolchain.check(spec)
        made_of = _made_of(toolchain.made_with(spec))
    except (NoCompiler, ConfigError) as error:
        return [*rows, Refusal("JIT", str(error))]
    return [*rows, Refusal("JIT", f"would compile {spec.uri} for {spec.arch} ({made_of})")]


def _of_another(spec: Spec, built: BuiltKernel, settings: Settings) -> str:
    """Says of a kept kernel by which compiler it is, if that is not the one that is here."""
    by = f"{built.toolchain.get('kind', 'compiler')} {built.toolchain.get('version', 'of no known version')}"
    try:
        made_with = toolchains.find(spec.device.toolchain, settings).made_with(spec)
    except (NoCompiler, ConfigError):
        return f", by {by}; no such compiler is here"
    if spec.key(made_with) == built.key:
        return ""
    return f", by {by}: another compiler than is here ({_made_of(made_with)})"


def _made_of(made_with: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(made_with.items()))


def _nearest(spec: Spec, settings: Settings) -> list[str]:
    try:
        wanted = spec.key_parts(toolchains.find(spec.device.toolchain, settings).made_with(spec))
    except NoCompiler:
        wanted = spec.key_parts({})
    found = nearest.nearest(settings.workspace, wanted)
    if found is None or not found.differences:  # the very same was spoken of already
        return []
    return [f"nearest is {found.path}, which differs in {', '.join(found.differences)}"]


# -- building ----------------------------------------------------------------------------------------------------------


def build(spec: Spec, settings: Settings, refusals: Iterable[Refusal]) -> Kernel:
    """The kernel, built now unless another process has done so meanwhile; raises what `build_and_load` raises."""
    refusals = tuple(dict.fromkeys(refusals))
    forbidden = refused(settings)
    if forbidden is not None:
        misses.note(spec, settings, "refused", forbidden)
        raise MissingKernel(
            f"no usable kernel for {spec.uri} on {spec.arch}, and compiling it is refused: {forbidden}",
            uri=spec.uri,
            arch=str(spec.arch),
            spec=spec,
            refusals=refusals,
            hint=f"to have it compiled here: KARTIFACTS_JIT={'always' if settings.offline else 'auto'}",
        )
    log.info("compiling %s for %s: %s", spec.uri, spec.arch, "; ".join(map(str, refusals)))
    try:
        built = _built(spec, settings)
        if (built.path, built.sha256) in _unloadable.pop(_wanted(spec, settings), ()):
            _set_aside(built.path, settings)
            built = _built(spec, settings)
        kernel = _load(spec, built, "jit", refusals)
    except KartifactsError as error:
        misses.note(spec, settings, "failed", error.message)
        error.refusals = (*refusals, *error.refusals)
        raise
    misses.note(spec, settings, "compiled")
    return kernel


def _built(spec: Spec, settings: Settings) -> BuiltKernel:
    if settings.disk_cache == "on":
        return builder.build_one(spec, settings)
    log.warning("KARTIFACTS_DISK_CACHE=off: %s is built, and not kept", spec.uri)
    try:
        return builder.build_one(spec, replace(workspace.apart(settings), disk_cache="on"))
    except BuildError as error:
        _rescue_log(error, settings.workspace / "logs")
        raise


def _rescue_log(error: BuildError, logs: Path) -> None:
    """Copy the log to where it stays."""
    stays = logs / Path(error.log).name
    try:
        make_directory(logs)
        shutil.copyfile(error.log, stays)
    except OSError:  # there is none, or no place for it
        return
    error.hint = error.hint and error.hint.replace(error.log, str(stays))
    error.log = str(stays)


def _set_aside(path: Path, settings: Settings) -> None:
    """Take a kept kernel that does not load out of the way; who has it mapped is not disturbed."""
    log.warning("the kernel in %s does not load: it is built again", path.parent)
    workspace.usable(settings.workspace)
    storing = workspace.storage_errors(settings.workspace)
    with workspace.staging(settings.workspace) as place, storing, suppress(FileNotFoundError):
        os.rename(path.parent, place / "unloadable")  # unless somebody else was faster
