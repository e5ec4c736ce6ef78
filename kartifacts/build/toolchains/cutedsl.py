"""NVIDIA's CuTe DSL: makes objects that launch their kernels themselves, and links a CUDA runtime into what comes out.

So a kernel needs neither the package nor its runtime library where it runs, but a driver that knows that CUDA runtime.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kartifacts.build import python_kernels
from kartifacts.build.toolchains import Toolchain, Unit, cxx, nvcc, packages, probe
from kartifacts.build.toolchains.options import USUAL, Options, flags_for
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler, Refusal
from kartifacts.model.arch import sm_name
from kartifacts.model.digest import canonical_json
from kartifacts.model.materials import cuda_of
from kartifacts.model.spec import Spec

MEMORY = 600 << 20
_WHEELS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core")
_LIBRARIES = ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12")
_ARCHIVE = "libcuda_dialect_runtime_static.a"
_SYSTEM = ("-Wl,-Bsymbolic", "-ldl", "-lrt", "-lpthread")
_ARCHS = {  # those of CuTe DSL 4.8
    "8.0", "8.6", "8.7", "8.9", "9.0", "9.0a",
    *(f"{number}{suffix}" for number in ("10.0", "10.3", "10.7", "11.0", "12.0", "12.1") for suffix in ("", "a", "f")),
}  # fmt: skip
_HINT = "pip install 'kartifacts[cutedsl]'"


@dataclass(frozen=True)
class Runtime:
    """What objects are linked with: the archive of the package, and a CUDA runtime."""

    archive: Path
    library: Path
    version: str  # CUDART_VERSION, as 13000

    @property
    def release(self) -> str:
        return cuda_of({"kind": CuteDsl.kind, "cudart": self.version})


@dataclass(frozen=True)
class CuteDsl(Toolchain):
    """CuTe DSL as it is installed for this Python.

    Args:
        workspace: where its modules are kept.
    """

    package: packages.Package
    runtime: Runtime
    host: cxx.Cxx
    workspace: Path
    options: Options = USUAL

    kind = "cutedsl"

    @property
    def place(self) -> Path:
        return self.package.site / "nvidia_cutlass_dsl"

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        host = {f"host {name}": value for name, value in self.host.fingerprint.items() if name != "kind"}
        return {**self._own, "cudart": self.runtime.version, **host}

    @cached_property
    def _own(self) -> dict[str, str]:
        return {
            "kind": self.kind,
            "version": self.package.version,
            "package": self.package.digest,
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            **self.options.facts,
        }

    def made_with(self, spec: Spec) -> dict[str, str]:
        return {**self.fingerprint, **self._beside(spec)}

    def programs(self, settings: Settings) -> dict[str, str]:
        files = {self.runtime.library.name: self.runtime.library, self.runtime.archive.name: self.runtime.archive}
        host = {f"host {name}": digest for name, digest in self.host.programs(settings).items()}
        return {**probe.digests(settings, "cutedsl", files), **host}

    def check(self, spec: Spec) -> None:
        if spec.arch.ptx or str(spec.arch) not in _ARCHS:
            plain = str(replace(spec.arch, ptx=False))
            reason = "what it makes holds no PTX" if spec.arch.ptx and plain in _ARCHS else "it knows no such GPU"
            raise ConfigError(
                f"{spec.uri} for {spec.arch} cannot be built by CuTe DSL {self.package.version}: {reason}",
                hint=f"ask for {plain}"
                if plain in _ARCHS
                else f"known are {', '.join(sorted(_ARCHS, key=_by_number))}",
            )
        python_kernels.resolve(spec)

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        kernel = {**python_kernels.resolve(spec).to_builtins(), "export": spec.op.exports[0]}
        flags = ("--target", sm_name(spec.arch), "--kernel", canonical_json(kernel).decode(), *self.options.flags)
        facts = {**self._own, **self._beside(spec)}
        own = Unit(
            spec.device.sources[0],
            Path(sys.executable),
            flags,
            ("--site", str(self.package.site), *self._module(spec, facts)),
            facts,
            MEMORY,
            worker=packages.worker("cutedsl_worker.py"),
            headers=packages.no_headers,
        )
        toolkit = f'-DKART_TOOLKIT="{self.runtime.release}"'
        return (own, *(replace(unit, flags=(*unit.flags, toolkit)) for unit in self.host.host_units(spec)))

    def link(self, objects: Sequence[str], output: str) -> tuple[str, ...]:
        return self.host.link(objects, output, (str(self.runtime.archive), str(self.runtime.library), *_SYSTEM))

    def _beside(self, spec: Spec) -> dict[str, str]:
        beside = packages.imported(spec, ("cutlass",))
        return {"imports": beside} if beside else {}

    def _module(self, spec: Spec, facts: dict[str, str]) -> tuple[str, ...]:
        """Where the worker keeps the objects of an op for one arch, and what all of them are made of."""
        place = self.workspace / "modules" / f"{spec.library}.{spec.family}.{spec.op.name}.{spec.arch.slug}"
        sources = {source.path: source.sha256 for source in spec.sources}
        made_of = canonical_json({"compiler": facts, "arch": str(spec.arch), "sources": sources}).decode()
        entry = ",".join(f"{axis}={value}" for axis, value in spec.axes) or spec.op.name
        return ("--module", str(place), "--made-of", made_of, "--entry", entry)


def _by_number(text: str) -> tuple[int, str]:
    return int(text.partition(".")[0]), text


def discover(settings: Settings) -> CuteDsl:
    """Find CuTe DSL, what its objects are linked with, and the host compiler that links them; nothing is imported.

    Raises:
        NoCompiler: one of them is not there.
    """
    libraries = [name for name in _LIBRARIES if _is_installed(name)]
    package = packages.find("cutlass", (*_WHEELS, *(libraries or _LIBRARIES[:1])), _HINT)
    archive = package.site / "nvidia_cutlass_dsl" / libraries[0].rpartition("-")[2] / "lib" / _ARCHIVE
    if not archive.is_file():
        searched = (Refusal(str(archive.parent), f"it has no {_ARCHIVE}"),)
        raise NoCompiler("CuTe DSL has no runtime that can be linked", searched=searched, hint=_HINT)
    host = cxx.discover(settings)
    options = flags_for(settings, CuteDsl.kind)
    return CuteDsl(package, _runtime(settings, archive), host, settings.workspace, options)


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _runtime(settings: Settings, archive: Path) -> Runtime:
    searched = []
    for root in _roots(settings):
        try:
            library, header = nvcc.runtime_of(root)
        except probe.Silent as error:
            searched.append(Refusal(str(root), str(error)))
            continue
        version = nvcc.defined(header, "CUDART_VERSION")
        if re.fullmatch(r"1[2-9]\d{3}", version):
            return Runtime(archive, library, version)
        searched.append(Refusal(str(root), f"its CUDA runtime is {version}; expected 12.5 or newer"))
    raise NoCompiler(
        "no CUDA runtime was found that kernels of CuTe DSL can be linked with (libcudart_static.a)",
        searched=tuple(searched),
        hint="pip install nvidia-cuda-runtime, or set CUDA_HOME to a CUDA toolkit",
    )


def _roots(settings: Settings) -> Iterator[Path]:
    """Toolkits that are named, wheels, and the usual place."""
    yield from (Path(value) for _, value in settings.cuda_home if os.path.isabs(value))
    for wheels in nvcc.wheels():
        yield from sorted(wheels.glob("cu[0-9]*"), reverse=True)
        yield wheels / "cuda_runtime"
    yield nvcc.USUAL
