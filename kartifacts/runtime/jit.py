"""The JIT as `load` sees it: what was built here before, what could be, and building it now."""

from __future__ import annotations

from kartifacts.build import jit as builder
from kartifacts.build import toolchains
from kartifacts.build.kept import BuiltKernel
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler, Refusal
from kartifacts.model.spec import Spec
from kartifacts.runtime import host
from kartifacts.runtime.found import Found


def find(spec: Spec, settings: Settings) -> Found | None:
    """A finished build of the same op digest and arch; no process is started and nothing is written."""
    built = builder.find_built(spec, settings)
    return None if built is None or host.unmet(built.needs) else _found(built, "built here before")


def compile(spec: Spec, settings: Settings) -> Found:  # noqa: A001  always used as jit.compile
    """Build now, once for all processes that ask for the same kernel."""
    return _found(builder.build_one(spec, settings), "jit")


def refused(settings: Settings) -> str | None:
    """Why the policy forbids compiling, or None."""
    if settings.jit == "never":
        return "KARTIFACTS_JIT=never"
    if settings.offline and settings.jit != "always":
        return "offline, and KARTIFACTS_JIT is not 'always'"
    return None


def explain(spec: Spec, settings: Settings) -> Refusal:
    """Whether `compile` would be tried, and with what."""
    forbidden = refused(settings)
    if forbidden is not None:
        return Refusal("JIT", f"refused: {forbidden}")
    try:
        toolchain = toolchains.find(spec.device.toolchain, settings)
        toolchain.check(spec)
    except (NoCompiler, ConfigError) as error:
        return Refusal("JIT", str(error))
    made_of = ", ".join(f"{name} {value}" for name, value in sorted(toolchain.made_with(spec).items()))
    return Refusal("JIT", f"would compile {spec.uri} for {spec.arch} ({made_of})")


def _found(built: BuiltKernel, origin: str) -> Found:
    return Found(built.path, built.arch, origin, tuple(built.exports))
