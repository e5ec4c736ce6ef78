"""NVIDIA's nvcc: found in whatever layout it is installed, its parts checked to belong together."""

from __future__ import annotations

import logging
import mmap
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from kartifacts.build.launchers import Launchers, noted_defines
from kartifacts.build.toolchains import CUBIN, FATBIN, OBJECT, Toolchain, Unit, cxx, probe
from kartifacts.build.toolchains.options import USUAL as USUAL_OPTIONS
from kartifacts.build.toolchains.options import Options, flags_for
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler, Refusal
from kartifacts.model.arch import check_toolkit, gencode, sm_name
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

# -objtemp: nvcc's own names of files in between, which objects hold, follow from the name of the output.
COMPILE = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-Werror=date-time", "-objtemp", "-Iinclude")
IMAGE = ("-O3", "-std=c++17", "-Xcompiler=-Werror=date-time", "-Iinclude")
MEMORY = 400 << 20
IMAGE_MEMORY = 150 << 20
USUAL = Path("/usr/local/cuda")
_SYSTEM = ("-ldl", "-lrt", "-lpthread")  # what the static CUDA runtime needs
_BANNER = rb"Cuda compilation tools, release (\d+\.\d+), V(\d+(?:\.\d+)+)"
_HINT = "install a CUDA toolkit and set CUDA_HOME, or: pip install 'kartifacts[cuda]'"
_warned: set[str] = set()


@dataclass(frozen=True)
class Nvcc(Toolchain):
    """A CUDA toolkit with the host compiler that it uses.

    Args:
        root: the directory with bin/nvcc.
        facts: versions of the parts, the archs that it lists, where its static runtime lies.
        host: compiles what nvcc leaves to a host compiler, and the binding, and links.
        launchers: of images.
        options: what the settings add.
    """

    root: Path
    facts: dict[str, str]
    host: cxx.Cxx
    launchers: Launchers
    options: Options = USUAL_OPTIONS

    kind = "nvcc"

    @property
    def place(self) -> Path:
        return self.root

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return self._made_with((*COMPILE, *_called("SOURCE")))

    def _made_with(self, flags: tuple[str, ...]) -> dict[str, str]:
        own = {name: self.facts[name] for name in ("version", "ptxas", "cicc", "cudart", "cccl")}
        host = {f"host {name}": value for name, value in self.host.fingerprint.items() if name != "kind"}
        return {"kind": self.kind, **own, **host, "flags": " ".join(flags), **self.options.facts}

    @cached_property
    def _of_images(self) -> dict[str, str]:
        return self._made_with((*IMAGE, *_called("SOURCE")))

    def made_with(self, spec: Spec) -> dict[str, str]:
        if spec.output == "image":
            return {**self._of_images, **self.launchers.facts(spec)}
        return self.fingerprint

    def programs(self, settings: Settings) -> dict[str, str]:
        names = ("bin/nvcc", "bin/cudafe++", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc")
        files = {name.rpartition("/")[2]: self.root / name for name in (*names, "nvvm/libdevice/libdevice.10.bc")}
        files["libcudart_static.a"] = Path(self.facts["runtime"])
        there = {name: path for name, path in files.items() if path.is_file()}
        there |= self.options.programs
        host = {f"host {name}": digest for name, digest in self.host.programs(settings).items()}
        return {**probe.digests(settings, "cuda toolkit", there), **host}

    def check(self, spec: Spec) -> None:
        major, minor = self.facts["release"].split(".")
        check_toolkit(spec.arch, (int(major), int(minor)))
        listed = self.facts["archs"].split()
        name = sm_name(spec.arch)
        if name not in listed and name.rstrip("af") not in listed:
            raise ConfigError(
                f"{spec.uri} for {spec.arch} cannot be built: CUDA {self.facts['release']} in {self.root} "
                f"lists {self.facts['archs']}, not {name}"
            )

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        if spec.output == "image":
            kind, suffix = ("-fatbin", FATBIN) if spec.arch.ptx else ("-cubin", CUBIN)
            usual, made_with, memory = (*IMAGE, kind), self._of_images, IMAGE_MEMORY
            others = self.launchers.units(spec)
        else:
            usual, made_with, memory, suffix = COMPILE, self.fingerprint, MEMORY, OBJECT
            others = self.host.host_units(spec)
        declared = (*gencode(spec.arch), *spec.device.flags, *(f"-D{define}" for define in spec.defines))
        own = (
            Unit(
                source,
                self.root / "bin/nvcc",
                (*usual, *declared, *self.options.flags, *_called(source)),
                (f"-ccbin={self.host.path}", *_mapped(str(self.root), "cuda")),
                made_with,
                memory,
                suffix,
                launcher=self.options.launcher,
                headers=headers_in,
            )
            for source in spec.device.sources
        )
        return (*own, *others)

    def link(self, objects: Sequence[str], output: str) -> tuple[str, ...]:
        return self.host.link(objects, output, (self.facts["runtime"], *_SYSTEM))

    def libraries(self, spec: Spec) -> tuple[str, ...]:
        flags = spec.device.link_flags
        if not any(flag.startswith("-l") for flag in flags):
            return tuple(flags)
        lib = Path(self.facts["runtime"]).parent
        # The driver's library is none of a toolkit, which has something to link against in its place.
        return (*(_library(flag, lib) for flag in flags), f"-L{lib}", f"-L{lib / 'stubs'}")

    def prebuilt(self, spec: Spec) -> Path | None:
        return self.launchers.prebuilt(spec) if spec.output == "image" else None

    def notes(self, spec: Spec, image: Path) -> dict[str, str]:
        del image
        return {"toolkit": self.facts["release"], **noted_defines(spec)}


def _library(flag: str, lib: Path) -> str:
    """-lNAME, so that it is found in wheels too: they lack the name that linkers know a library by."""
    name = flag.removeprefix("-l")
    if name == flag or any(os.path.exists(lib / f"lib{name}{suffix}") for suffix in (".so", ".a")):
        return flag
    found = sorted(
        path.name for path in lib.glob(f"lib{name}.so.*") if path.name.removeprefix(f"lib{name}.so.").isdigit()
    )
    return f"-l:{found[-1]}" if found else flag


def headers_in(directory: str, name: str) -> tuple[str, ...]:
    """Flags by which the headers in `directory` are found, and called `name` by what they say of themselves."""
    return ("-isystem", directory.replace(",", r"\,"), *_mapped(directory, name))


def _mapped(directory: str, name: str) -> tuple[str, ...]:
    # Of a list, and for the shell that nvcc starts.
    return ("-Xcompiler", shlex.quote(f"-ffile-prefix-map={directory}={name}".replace(",", r"\,")))


def _called(source: str) -> tuple[str, ...]:
    """Names what is internal to `source` after its path in the library; nvcc does after where it lies on this machine.

    The path as such goes to two front ends, of which the one looks at device code only.
    """
    name = re.sub(r"[^A-Za-z0-9_./-]", "_", source)
    return ("-Xcicc", f"--orig_src_path_name={name}", "-Xcudafe", f"--orig_src_path_name={name}")


def discover(settings: Settings) -> Nvcc:
    """Find a complete CUDA toolkit and its host compiler; nothing is compiled.

    Raises:
        ConfigError: a setting asks of it what cannot be given.
        NoCompiler: there is none; lists every place searched, with what is wrong with it.
    """
    options = flags_for(settings, Nvcc.kind)
    searched: list[Refusal] = []
    for place, root, problem in _candidates(settings):
        if root is not None:
            try:
                tools = [root / part for part in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc")]
                facts = probe.remembered(settings, "cuda toolkit", tools, partial(_examine, settings, root))
            except (probe.Silent, OSError) as error:
                problem = str(error)
            else:
                return Nvcc(root, facts, cxx.discover(settings), Launchers(settings), options)
        refusal = Refusal(place, problem)
        searched.append(refusal)
        if place.startswith("CUDA_"):
            warn_once(refusal)
    raise NoCompiler("no CUDA compiler (nvcc) was found", searched=tuple(searched), hint=_HINT)


# -- where toolkits are ------------------------------------------------------------------------------------------------

Candidate = tuple[str, Path | None, str]  # the place as shown, its root if it may be one, else what is wrong


def _candidates(settings: Settings) -> Iterator[Candidate]:
    for variable, value in settings.cuda_home:
        yield _judged(f"{variable}={value!r}", Path(value), misspelt(value))
    found = shutil.which("nvcc", path=settings.search_path)
    if found is None:
        yield "PATH", None, f"no program 'nvcc' in {settings.search_path!r}"
    else:
        yield _of_program(settings, Path(os.path.abspath(found)))
    yield _judged(str(USUAL), USUAL, "")
    packaged = [*_wheels()]
    for root in packaged:
        yield _judged(str(root), root, "")
    if not packaged:
        yield "Python packages", None, "nvidia-cuda-nvcc is not installed"


def warn_once(refusal: Refusal) -> None:
    """Say that a place which the user named is of no use; the others are looked at all the same."""
    if str(refusal) not in _warned:
        _warned.add(str(refusal))
        log.warning("%s; looking elsewhere", refusal)


def misspelt(value: str) -> str:
    """What is wrong with the value of CUDA_HOME, if anything."""
    if not value.strip():
        return "it is empty"
    if os.pathsep in value and not os.path.isdir(value):
        return f"expected one directory, got a list separated by {os.pathsep!r}"
    if not os.path.isabs(value):
        return "it is not an absolute path"
    return ""


def _judged(place: str, root: Path, problem: str) -> Candidate:
    if not problem and not os.path.isdir(root):
        problem = "no such directory"
    if not problem and not os.access(root / "bin/nvcc", os.X_OK):
        problem = "it has no bin/nvcc that can be run"
    return place, (None if problem else root), problem


def _of_program(settings: Settings, program: Path) -> Candidate:
    """The toolkit of an nvcc on PATH, which may be a link or a script that starts the real one."""
    root = Path(os.path.realpath(program)).parent.parent
    if os.path.isfile(root / "nvvm/bin/cicc"):
        return str(program), root, ""
    try:
        facts = probe.remembered(settings, "nvcc on PATH", [program], partial(_ask_for_root, settings, program))
    except probe.Silent as error:
        return str(program), None, str(error)
    return _judged(str(program), Path(facts["root"]), "")


def _ask_for_root(settings: Settings, program: Path) -> tuple[probe.Facts, list[Path]]:
    plan = probe.ask(settings, program, "--dryrun", "-x", "cu", "-E", os.devnull)
    here = re.search(r"^#\$ _HERE_=(.+)$", plan, re.MULTILINE)
    if here is None:
        raise probe.Silent(f"{program} does not say where its toolkit is")
    return {"root": str(Path(here[1]).parent)}, []


def _wheels() -> Iterator[Path]:
    """``site-packages/nvidia/cu13`` and the like, newest first."""
    found = {root for place in wheels() for root in place.glob("cu[0-9]*") if (root / "bin/nvcc").exists()}
    yield from sorted(found, key=lambda root: int("0" + re.sub(r"\D", "", root.name)), reverse=True)


def wheels() -> list[Path]:
    """The directories in which NVIDIA's packages of this environment lie: ``site-packages/nvidia``."""
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    known = [os.path.abspath(os.path.join(place, "nvidia")) for place in sys.path]
    places = dict.fromkeys((*known, *((spec.submodule_search_locations if spec else None) or ())))
    return [Path(place) for place in places if os.path.isdir(place)]


# -- what a toolkit is -------------------------------------------------------------------------------------------------


def _examine(settings: Settings, root: Path) -> tuple[probe.Facts, list[Path]]:
    nvcc = probe.ask(settings, root / "bin/nvcc", "--version")
    release, version = _banner(nvcc.encode(), root / "bin/nvcc")
    ptxas = _banner(probe.ask(settings, root / "bin/ptxas", "--version").encode(), root / "bin/ptxas")
    cicc = _banner_inside(root / "nvvm/bin/cicc")  # it has no option that shows its version
    for name, other in (("ptxas", ptxas), ("cicc", cicc)):
        if other[0] != release:
            raise probe.Silent(
                f"its parts do not belong together: nvcc is of CUDA {version}, {name} of {other[1]}; "
                "install all parts of one release"
            )
    runtime, header = runtime_of(root)
    facts = {
        "release": release,
        "version": version,
        "ptxas": ptxas[1],
        "cicc": cicc[1],
        "cudart": defined(header, "CUDART_VERSION"),
        "cccl": defined(header.parent / "cccl/cuda/std/__cccl/version.h", "CCCL_VERSION"),
        "archs": " ".join(probe.ask(settings, root / "bin/nvcc", "--list-gpu-code").split()),
        "runtime": str(runtime),
    }
    return facts, [runtime, header]


def _banner(text: bytes, tool: Path) -> tuple[str, str]:
    match = re.search(_BANNER, text)
    if match is None:
        raise probe.Silent(f"{tool} does not say its version")
    return match[1].decode(), match[2].decode()


def _banner_inside(tool: Path) -> tuple[str, str]:
    with tool.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        start = max(content.find(b"Cuda compilation tools, release "), 0)
        return _banner(content[start : start + 200], tool)


def runtime_of(root: Path) -> tuple[Path, Path]:
    """The static CUDA runtime and the header that states its version, in any of the layouts in use."""
    libraries = [root / "lib64", root / "lib", target(root) / "lib"]
    headers = [root / "include", target(root) / "include"]
    for name, places in (("libcudart_static.a", libraries), ("cuda_runtime_api.h", headers)):
        if not any((place / name).is_file() for place in places):
            raise probe.Silent(f"it has no {name} in {', '.join(str(p.relative_to(root)) for p in places)}")
    library = next(path for place in libraries if (path := place / "libcudart_static.a").is_file())
    return library, next(path for place in headers if (path := place / "cuda_runtime_api.h").is_file())


def target(root: Path) -> Path:
    """Where a toolkit keeps what is for this kind of machine."""
    return root / "targets" / f"{'sbsa' if platform.machine() == 'aarch64' else 'x86_64'}-linux"


def defined(header: Path, name: str) -> str:
    """The number that a header defines; ``none`` where the toolkit has no such header."""
    try:
        text = header.read_text(errors="replace")
    except FileNotFoundError:
        return "none"
    match = re.search(rf"^#\s*define\s+{name}\s+(\d+)", text, re.MULTILINE)
    return match[1] if match else "none"
