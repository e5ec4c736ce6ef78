"""Triton: makes images for GPUs of NVIDIA and AMD from kernels in Python, on machines that need have neither.

For NVIDIA an image is attached to a launcher: the library's own, or one that takes the grid and the kernel's arguments.
For AMD it stays by itself, with the same notes in it: built, published and fetched, but launched by nobody here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace

from kartifacts.build import images, python_kernels
from kartifacts.build.launchers import Launchers
from kartifacts.build.toolchains import CUBIN, HSACO, Toolchain, Unit, packages, probe
from kartifacts.build.toolchains.options import USUAL, Options, flags_for
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler, Refusal, StoreError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import Arch
from kartifacts.model.digest import canonical_json
from kartifacts.model.spec import Spec

LAUNCHER = "kart/any_launcher.cpp"
MEMORY = 500 << 20
MAX_IMAGE = 1 << 30  # bytes
# All that Triton reads of its environment, but for where it may write.  Its next release fuses by other rules unasked.
_SET = ("TRITON_DEFAULT_FP_FUSION=1",)
_CAPABILITIES = {75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121}  # that have a name in the LLVM of Triton 3.9
_GFX = {  # that have layouts in Triton 3.9; for others it ends in the middle of a pass
    "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1250",
    *(f"gfx{number}" for number in (*range(1100, 1104), *range(1150, 1154), 1200, 1201)),
}  # fmt: skip
_BACKENDS = Path("triton/backends")
_COMPILER = "nvidia/compiler.py"
_PTXAS = {"ptxas": "nvidia/bin/ptxas", "ptxas-blackwell": "nvidia/bin/ptxas-blackwell"}
_PROGRAMS = {"libtriton.so": "../_C/libtriton.so", "libdevice.10.bc": "nvidia/lib/libdevice.10.bc", **_PTXAS}
_HINT = "pip install 'kartifacts[triton]'"


@dataclass(frozen=True)
class Triton(Toolchain):
    """Triton as it is installed for this Python.

    Args:
        facts: versions of the assemblers that it brings.
        releases: of CUDA, by the capability of the GPUs that code is made for with an assembler of it.
        launchers: of images.
        options: what the settings add.
    """

    package: packages.Package
    facts: dict[str, str]
    releases: dict[int, str]
    launchers: Launchers
    options: Options = USUAL

    kind = "triton"

    @property
    def place(self) -> Path:
        return self.package.site / "triton"

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return {
            "kind": self.kind,
            "version": self.package.version,
            "package": self.package.digest,
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            **self.facts,
            "set": " ".join(_SET),
            **self.options.facts,
        }

    def made_with(self, spec: Spec) -> dict[str, str]:
        return {**self._image_facts(spec), **self.launchers.facts(spec)}

    def programs(self, settings: Settings) -> dict[str, str]:
        files = {name: self.package.site / _BACKENDS / place for name, place in _PROGRAMS.items()}
        own = probe.digests(settings, "triton", {name: path for name, path in files.items() if path.is_file()})
        try:
            host = self.launchers.host.programs(settings)
        except NoCompiler:  # then every launcher came prebuilt, or there is none
            host = {}
        return {**own, **{f"launcher {name}": digest for name, digest in host.items()}}

    def check(self, spec: Spec) -> None:
        what = f"{spec.uri} for {spec.arch} cannot be built by Triton {self.package.version}"
        if reason := _unfit(spec.arch):
            raise ConfigError(f"{what}: {reason[0]}", hint=reason[1])
        python_kernels.resolve(spec)

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        kernel = canonical_json(python_kernels.resolve(spec).to_builtins()).decode()
        flags = (
            "--target",
            _target(spec.arch),
            "--kernel",
            kernel,
            *(f"--set={each}" for each in _SET),
            *self.options.flags,
        )
        image = Unit(
            spec.device.sources[0],
            Path(sys.executable),
            flags,
            ("--site", str(self.package.site)),
            self._image_facts(spec),
            MEMORY,
            suffix=HSACO if spec.arch.kind == "hip" else CUBIN,
            worker=packages.worker("triton_worker.py"),
            headers=packages.no_headers,
        )
        exported = f"-DKART_EXPORTED={spec.op.exports[0]}"
        return (image, *(_exporting(unit, exported) for unit in self.launchers.units(spec)))

    def link(self, objects: Sequence[str], output: str) -> tuple[str, ...]:
        return self.launchers.host.link(objects, output)

    def prebuilt(self, spec: Spec) -> Path | None:
        return self.launchers.prebuilt(spec)

    def notes(self, spec: Spec, image: Path) -> dict[str, str]:
        """What Triton alone knows stands in the image itself."""
        try:
            return images.noted_in(read_regular(image, MAX_IMAGE))
        except (OSError, VerificationError) as error:
            raise StoreError(f"cannot read the image of {spec.uri} for {spec.arch}: {error}") from error

    def _image_facts(self, spec: Spec) -> dict[str, str]:
        beside = packages.imported(spec, ("triton",))
        cuda = self.releases.get(_capability(spec.arch)) if spec.arch.kind == "cuda" else None
        own = {"imports": beside} if beside else {}
        return {**self.fingerprint, **own, **({"cuda": cuda} if cuda else {})}


def _exporting(unit: Unit, flag: str) -> Unit:
    return replace(unit, flags=(*unit.flags, flag)) if unit.source.endswith(LAUNCHER) else unit


def _unfit(arch: Arch) -> tuple[str, str] | None:
    """Why Triton makes nothing for an arch, and what to ask for; None if it does."""
    if arch.kind == "hip":
        base, _, features = arch.name.partition(":")
        if features:
            return "it leaves target features at what they are by default", f"ask for {base}"
        return None if base in _GFX else ("it knows no such GPU", f"known are {', '.join(sorted(_GFX))}")
    if arch.kind != "cuda":
        return "it makes code for GPUs alone", "declare another toolchain for this kind of device"
    plain = f"{arch.major}.{arch.minor}"
    if _capability(arch) not in _CAPABILITIES:
        known = ", ".join(f"{each // 10}.{each % 10}" for each in sorted(_CAPABILITIES))
        return "it knows no such GPU", f"known are {known}"
    if arch.ptx:
        return "what it makes holds binary code for one arch, and no PTX", f"ask for {str(arch).removesuffix('+PTX')}"
    wanted = "a" if arch.major >= 9 else ""
    if arch.suffix != wanted:
        return f"for {plain} it always makes code for sm_{arch.major}{arch.minor}{wanted}", f"ask for {plain}{wanted}"
    return None


def _capability(arch: Arch) -> int:
    return arch.major * 10 + arch.minor


def _target(arch: Arch) -> str:
    return f"hip:{arch.name}" if arch.kind == "hip" else f"cuda:{_capability(arch)}"


def discover(settings: Settings) -> Triton:
    """Find Triton; it is not imported.

    Raises:
        NoCompiler: it is not installed for this Python.
    """
    package = packages.find("triton", ("triton",), _HINT)
    backends = package.site / _BACKENDS
    tools = {name: backends / place for name, place in _PTXAS.items() if (backends / place).is_file()}
    try:
        files = (*tools.values(), backends / _COMPILER)
        said = probe.remembered(settings, "triton", files, partial(_examine, settings, tools, backends / _COMPILER))
    except (probe.Silent, OSError) as error:
        raise NoCompiler("Triton is not usable", searched=(Refusal(str(backends), str(error)),), hint=_HINT) from error
    facts = {name: value for name, value in said.items() if not name.isdecimal()}
    releases = {int(name): value for name, value in said.items() if name.isdecimal()}
    return Triton(package, facts, releases, Launchers(settings), flags_for(settings, Triton.kind))


def _examine(settings: Settings, tools: dict[str, Path], compiler: Path) -> tuple[probe.Facts, list[Path]]:
    facts, releases = {}, {}
    for name, tool in tools.items():
        release = re.search(r"release (\d+\.\d+), V(\d+(?:\.\d+)+)", probe.ask(settings, tool, "--version"))
        if release is None:
            raise probe.Silent(f"{tool} does not say its version")
        releases[name], facts[name] = release[1], release[2]
    taken = _assemblers(compiler)
    by_gpu = {str(number): releases[name] for number in _CAPABILITIES if (name := taken(number)) in releases}
    return {**facts, **by_gpu}, []


def _assemblers(compiler: Path) -> Callable[[int], str]:
    """Which assembler Triton takes for a capability: its own function, taken out of its text, as it is not imported.

    For which GPUs it takes which is another matter in Triton 3.6 and 3.9.
    """
    try:
        functions = [node for node in ast.parse(compiler.read_bytes()).body if isinstance(node, ast.FunctionDef)]
        [found] = [node for node in functions if node.name == "get_ptxas"]
        found.returns, found.decorator_list, found.args.args[0].annotation = None, [], None
        names = {name.replace("-", "_"): name for name in _PTXAS}
        known = {"knobs": SimpleNamespace(nvidia=SimpleNamespace(**names))}
        exec(compile(ast.Module([found], []), str(compiler), "exec"), known)  # noqa: S102  code of an installed package
        function: Callable[[int], str] = known["get_ptxas"]  # type: ignore[assignment]
        function(80)
    except Exception as error:
        raise probe.Silent(f"{compiler} does not say which assembler it takes: {error}") from error
    return function
