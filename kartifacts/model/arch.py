"""What a kernel is built for and what it runs on: one value type, one table, one parser for every spelling in use.

Spellings are read literally: `9.0` is plain 9.0, as torch and nvcc mean it.  FlashInfer reads `9.0` as `9.0a`; that is
a dialect one has to ask for.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kartifacts.errors import ConfigError, Refusal

Kind = Literal["cuda", "hip", "cpu"]
Suffix = Literal["", "a", "f"]
Dialect = Literal["literal", "flashinfer"]
Toolkit = tuple[int, int]


class _Cuda(NamedTuple):
    """One compute capability: the first toolkit that builds it, the first that no longer does, and those of a and f."""

    since: Toolkit
    until: Toolkit | None = None
    a: Toolkit | None = None
    f: Toolkit | None = None
    renamed: str = ""  # what `until` calls it
    tegra: bool = False  # an integrated GPU: no binary code passes between it and others of its major version


_CUDA: dict[tuple[int, int], _Cuda] = {
    (5, 0): _Cuda(since=(6, 0), until=(13, 0)),
    (5, 2): _Cuda(since=(6, 5), until=(13, 0)),
    (5, 3): _Cuda(since=(7, 0), until=(13, 0), tegra=True),
    (6, 0): _Cuda(since=(8, 0), until=(13, 0)),
    (6, 1): _Cuda(since=(8, 0), until=(13, 0)),
    (6, 2): _Cuda(since=(8, 0), until=(13, 0), tegra=True),
    (7, 0): _Cuda(since=(9, 0), until=(13, 0)),
    (7, 2): _Cuda(since=(9, 2), until=(13, 0), tegra=True),
    (7, 5): _Cuda(since=(10, 0)),
    (8, 0): _Cuda(since=(11, 0)),
    (8, 6): _Cuda(since=(11, 1)),
    (8, 7): _Cuda(since=(11, 4), tegra=True),
    (8, 8): _Cuda(since=(13, 0)),
    (8, 9): _Cuda(since=(11, 8)),
    (9, 0): _Cuda(since=(11, 8), a=(12, 0)),
    (10, 0): _Cuda(since=(12, 8), a=(12, 8), f=(12, 9)),
    (10, 1): _Cuda(since=(12, 8), until=(13, 0), a=(12, 8), f=(12, 9), renamed="11.0", tegra=True),
    (10, 3): _Cuda(since=(12, 9), a=(12, 9), f=(12, 9)),
    (10, 7): _Cuda(since=(13, 4), a=(13, 4), f=(13, 4)),
    (11, 0): _Cuda(since=(13, 0), a=(13, 0), f=(13, 0)),
    (12, 0): _Cuda(since=(12, 8), a=(12, 8), f=(12, 9)),
    (12, 1): _Cuda(since=(12, 9), a=(12, 9), f=(12, 9)),
}
_NAMED = {  # torch's names
    "maxwell+tegra": "5.3",
    "maxwell": "5.0 5.2+PTX",
    "pascal": "6.0 6.1+PTX",
    "volta+tegra": "7.2",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0 8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0 10.3 12.0 12.1+PTX",
    "rubin": "10.7+PTX",
}
_GFX = {  # AMD target → the target features that it can be built with or without
    **dict.fromkeys(("gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"), ("sramecc", "xnack")),
    **dict.fromkeys(("gfx900", "gfx90c", "gfx1010", "gfx1011", "gfx1012"), ("xnack",)),
    **{f"gfx{n}": () for n in (*range(1030, 1037), *range(1100, 1104), *range(1150, 1154), 1200, 1201, 1250)},
}
_CPU = {  # name → (instruction set, level); a level runs what was built for a lower one
    "x86-64": ("x86-64", 1),
    "x86-64-v2": ("x86-64", 2),
    "x86-64-v3": ("x86-64", 3),
    "x86-64-v4": ("x86-64", 4),
    "aarch64": ("aarch64", 1),
}
_CPU_ALIASES = {"x86-64-v1": "x86-64", "x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}
_CUDA_TEXT = re.compile(
    r"(?:(?:sm_?|compute_?)?(?P<packed>[1-9][0-9]{1,2})|(?P<major>[1-9][0-9]?)\.(?P<minor>[0-9]))"
    r"(?P<suffix>[a-z]?)(?P<ptx>\+ptx)?"
)
_SUFFIXES: tuple[Suffix, ...] = ("", "a", "f")
_SUFFIX_NAMES = {"": "plain", "a": "arch-specific", "f": "family-specific"}
_STRENGTH = {"": 0, "f": 1, "a": 2}  # each has the instructions of those below it
_HINT = "archs look like 8.0, 9.0a, 10.0f, sm_90a, 8.0+PTX, gfx942, cpu:x86-64-v3, cpu:aarch64, native"


class Verdict(NamedTuple):
    """Whether a kernel runs on a device, why or why not, and how well it fits: the lowest `rank` is taken."""

    ok: bool
    reason: str
    rank: int = 0


@dataclass(frozen=True)
class Arch:
    """A build target, or a device when it is on the right of `runs_on`.

    Args:
        kind: ``cuda``, ``hip`` or ``cpu``.
        major, minor: CUDA compute capability.
        suffix: ``a`` uses instructions of one CUDA arch only, ``f`` those of its family.
        ptx: PTX is included, which a driver can compile for later devices.
        name: of an AMD target (``gfx90a:xnack-``) or a CPU level (``x86-64-v3``).
    """

    kind: Kind
    major: int = 0
    minor: int = 0
    suffix: Suffix = ""
    ptx: bool = False
    name: str = ""

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"
        return f"cpu:{self.name}" if self.kind == "cpu" else self.name

    @property
    def slug(self) -> str:
        """The name as part of a file name: no character that a shell, a URL or a file system minds."""
        if self.kind == "hip":
            return re.sub(r":(\w+)([+-])", lambda m: f"-{m[1]}-{'on' if m[2] == '+' else 'off'}", self.name)
        return str(self).lower().replace(":", "-")

    def runs_on(self, device: Arch) -> Verdict:
        """Whether code built for this arch runs on `device`, of which a suffix and PTX are disregarded."""
        rank = _RANK[self.kind](self, device) if self.kind == device.kind else None
        bare = replace(device, suffix="", ptx=False)
        return Verdict(
            rank is not None,
            f"built for {self}, which runs on {_COVERS[self.kind](self)}; the device is {bare}",
            rank or 0,
        )


# -- what runs where ---------------------------------------------------------------------------------------------------
# Ranks prefer the target that could use most of the device: exact `a`, then `f`, then plain code, nearest first; PTX is
# last, since the driver has to compile it.  Of two equal ones the smaller, without PTX, goes first.


def _cuda_rank(built: Arch, device: Arch) -> int | None:
    step = device.minor - built.minor
    if built.major == device.major and step >= 0 and (step == 0 or not (_alone(built) or _is_tegra(device))):
        return {"a": 0, "f": 1000, "": 2000}[built.suffix] + 2 * step + built.ptx
    ahead = (device.major - built.major) * 100 + step
    return 10_000 + ahead if built.ptx and not built.suffix and ahead > 0 else None


def _is_tegra(arch: Arch) -> bool:
    return (arch.major, arch.minor) in _CUDA and _CUDA[arch.major, arch.minor].tegra


def _alone(built: Arch) -> bool:
    return built.suffix == "a" or _is_tegra(built)


def _cuda_covers(built: Arch) -> str:
    own = f"{built.major}.{built.minor}"
    if built.ptx and not built.suffix:
        return f"{own} and later"
    if _alone(built):
        return f"{own} only"
    apart = [f"{x}.{y}" for (x, y), row in _CUDA.items() if x == built.major and y > built.minor and row.tegra]
    return f"{own} and later {built.major}.x" + (f" except {', '.join(apart)}" if apart else "")


def _hip_rank(built: Arch, device: Arch) -> int | None:
    (base, wants), (chip, has) = _features(built.name), _features(device.name)
    clash = any(has.get(feature, on) != on for feature, on in wants.items())
    return None if base != chip or clash else len(_GFX.get(base, ())) - len(wants)


def _features(name: str) -> tuple[str, dict[str, str]]:
    base, *features = name.split(":")
    return base, {feature[:-1]: feature[-1:] for feature in features}


def _hip_covers(built: Arch) -> str:
    base, wants = _features(built.name)
    return base + "".join(f" with {feature} {'on' if on == '+' else 'off'}" for feature, on in wants.items()) + " only"


def _cpu_rank(built: Arch, device: Arch) -> int | None:
    (isa, level), (own_isa, own_level) = (_CPU.get(arch.name, (arch.name, 1)) for arch in (built, device))
    return own_level - level if isa == own_isa and level <= own_level else None


def _cpu_covers(built: Arch) -> str:
    return f"{built.name} CPUs and later" if _CPU.get(built.name, ("", 0))[0] == "x86-64" else f"{built.name} CPUs"


_RANK = {"cuda": _cuda_rank, "hip": _hip_rank, "cpu": _cpu_rank}
_COVERS = {"cuda": _cuda_covers, "hip": _hip_covers, "cpu": _cpu_covers}


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_arch(text: str) -> Arch:
    """Read one arch in any spelling.

    Raises:
        ConfigError: it is unknown, with the ones near it, or it names several.
    """
    found = _read(text.strip(), None)
    if len(found) != 1:
        raise ConfigError(f"{text.strip()!r} names several archs ({' '.join(map(str, found))}); expected one")
    return found[0]


def parse_archs(text: str, *, native: Sequence[Arch] = (), dialect: Dialect = "literal") -> tuple[Arch, ...]:
    """Read a list of archs, separated by any mix of white space, `,` and `;`; duplicates collapse, order is kept.

    Args:
        native: what `native`, `cpu` and `cpu:native` stand for: the archs of this machine's devices.
        dialect: ``flashinfer`` reads `9.0` as `9.0a`, `12.0` as `12.0f`, ...; see `build_arch`.

    Raises:
        ConfigError: naming the item that is wrong.
    """
    items = [item for item in re.split(r"[\s,;]+", text) if item]
    if not items:
        raise ConfigError("the arch list is empty", hint="e.g. '8.0 9.0a cpu:x86-64-v3', or 'native'")
    archs = [arch for item in items for arch in _read(item, native)]
    if dialect == "flashinfer":
        archs = [build_arch(arch) for arch in archs]
    elif dialect != "literal":
        raise ConfigError(f"unknown arch dialect {dialect!r}; expected literal or flashinfer")
    return tuple(dict.fromkeys(archs))


def build_arch(device: Arch) -> Arch:
    """What to compile for a device, by FlashInfer's rule: the suffix that opens the device's own instructions.

    An arch that has a suffix or PTX already is taken as written.
    """
    if device.kind != "cuda" or device.suffix or device.ptx or device.major < 9:
        return device
    # 12.1 gets no `f`: code for all of 12.x does not use what only 12.1 has.
    return replace(device, suffix="f" if (device.major, device.minor) == (12, 0) else "a")


def _read(item: str, native: Sequence[Arch] | None) -> tuple[Arch, ...]:
    folded = item.lower()
    if folded in ("native", "cpu", "cpu:native"):
        return _resolve_native(item, folded, native)
    if folded.startswith("cpu:"):
        name = _CPU_ALIASES.get(folded[4:], folded[4:])
        if name not in _CPU:
            raise _unknown(item, [f"cpu:{known}" for known in _CPU])
        return (Arch("cpu", name=name),)
    if folded.startswith("gfx"):
        return (_read_gfx(item, folded),)
    named = folded.removesuffix("+ptx")
    if named in _NAMED:
        *first, last = (_read(part, native)[0] for part in _NAMED[named].split())
        return (*first, replace(last, ptx=last.ptx or named != folded))
    return (_read_cuda(item, folded),)


def _resolve_native(item: str, folded: str, native: Sequence[Arch] | None) -> tuple[Arch, ...]:
    if native is None:
        raise ConfigError(f"{item!r} stands for this machine's devices and cannot be used here", hint="name one arch")
    found = tuple(arch for arch in native if folded == "native" or arch.kind == "cpu")
    if not found:
        raise ConfigError(
            f"{item!r} asks for the devices of this machine, but none was detected", hint="name the archs"
        )
    return found


def _read_cuda(item: str, folded: str) -> Arch:
    match = _CUDA_TEXT.fullmatch(folded)
    if match is None:
        spellings = [*map(str, _SINCE), *_NAMED, *_GFX, *(f"cpu:{name}" for name in _CPU), "native"]
        raise _unknown(item, difflib.get_close_matches(folded[:40], spellings, n=4, cutoff=0.5))
    digits = match["packed"] or match["major"] + match["minor"]
    major, minor, suffix = int(digits[:-1]), int(digits[-1]), match["suffix"]
    if (major, minor) not in _CUDA:
        nearest = min({x for x, _ in _CUDA}, key=lambda x: (abs(x - major), -x))
        raise _unknown(item, [str(arch) for arch in _SINCE if arch.major == nearest])
    variants = {arch.suffix: arch for arch in _SINCE if (arch.major, arch.minor) == (major, minor)}
    if suffix not in variants:
        raise _unknown(item, map(str, variants.values()), f" ({major}.{minor} has no variant {suffix!r})")
    return replace(variants[suffix], ptx=match["ptx"] is not None)


def _read_gfx(item: str, folded: str) -> Arch:
    base, *features = folded.split(":")
    if base not in _GFX:
        raise _unknown(item, difflib.get_close_matches(base[:40], _GFX, n=4, cutoff=0.4))
    names = [feature[:-1] for feature in features]
    if any(feature[-1:] not in ("+", "-") for feature in features) or len(set(names)) != len(names):
        raise ConfigError(f"bad target features in arch {item[:80]!r}; expected e.g. gfx90a:sramecc+:xnack-")
    for name in names:
        if name not in _GFX[base]:
            takes = ", ".join(_GFX[base]) or "none"
            raise ConfigError(f"bad arch {item[:80]!r}: {base} has no feature {name[:40]!r}; it has: {takes}")
    return Arch("hip", name=":".join([base, *sorted(features)]))


def _unknown(item: str, near: Iterable[str], why: str = "") -> ConfigError:
    listed = ", ".join(near)
    return ConfigError(f"unknown arch {item[:80]!r}{why}" + (f"; near ones: {listed}" if listed else ""), hint=_HINT)


# -- building ----------------------------------------------------------------------------------------------------------

_SINCE: dict[Arch, Toolkit] = {  # every CUDA target → the first toolkit that builds it
    Arch("cuda", major, minor, suffix): since
    for (major, minor), row in _CUDA.items()
    for suffix, since in zip(_SUFFIXES, (row.since, row.a, row.f), strict=True)
    if since is not None
}


def check_toolkit(arch: Arch, toolkit: Toolkit) -> None:
    """Raise `ConfigError` if that CUDA toolkit cannot build for `arch`, its suffix included."""
    since = _SINCE.get(replace(arch, ptx=False))
    if since is None:
        raise ConfigError(f"no CUDA toolkit is known to build for {arch}")
    have, row = _dotted(toolkit), _CUDA[arch.major, arch.minor]
    if row.until is not None and toolkit >= row.until:
        fate = f"renamed it to {row.renamed}" if row.renamed else "dropped it"
        raise ConfigError(
            f"arch {arch} cannot be built with CUDA {have}: it needs CUDA < {_dotted(row.until)}, which {fate}",
            hint=f"ask for {row.renamed}{arch.suffix}" if row.renamed else "use an older toolkit, or leave it out",
        )
    if toolkit < since:
        usable = [str(other) for other in targets(toolkit) if (other.major, other.minor) == (arch.major, arch.minor)]
        raise ConfigError(
            f"arch {arch} cannot be built with CUDA {have}: {_SUFFIX_NAMES[arch.suffix]} code for "
            f"{arch.major}.{arch.minor} needs CUDA >= {_dotted(since)}",
            hint=f"CUDA {have} can build for {', '.join(usable)}" if usable else "install a newer CUDA toolkit",
        )


def targets(toolkit: Toolkit) -> list[Arch]:
    """Every arch that a CUDA toolkit can build for."""
    return [
        arch
        for arch, since in _SINCE.items()
        if since <= toolkit < (_CUDA[arch.major, arch.minor].until or (toolkit[0] + 1, 0))
    ]


def buildable(arch: Arch, toolkit: Toolkit) -> Arch | None:
    """What comes nearest to a CUDA arch among those that a toolkit can build for; None if nothing of its device does.

    Of several, the one with the fewest instructions more than were asked for, else with the fewest less.
    """
    row = _CUDA.get((arch.major, arch.minor))
    if row is not None and row.until is not None and toolkit >= row.until and row.renamed:
        renamed = _read_cuda(row.renamed, row.renamed)
        return buildable(replace(arch, major=renamed.major, minor=renamed.minor), toolkit)
    strength = _STRENGTH[arch.suffix]
    near = [other for other in targets(toolkit) if (other.major, other.minor) == (arch.major, arch.minor)]
    order = sorted(
        near, key=lambda other: (_STRENGTH[other.suffix] < strength, abs(_STRENGTH[other.suffix] - strength))
    )
    return replace(order[0], ptx=arch.ptx) if order else None


def _dotted(toolkit: Toolkit) -> str:
    return ".".join(map(str, toolkit))


def sm_name(arch: Arch) -> str:
    """``sm_90a``: the name that nvcc, ptxas and NVRTC use."""
    if arch.kind != "cuda":
        raise ConfigError(f"{arch} is no CUDA arch")
    return f"sm_{arch.major}{arch.minor}{arch.suffix}"


def gencode(arch: Arch) -> list[str]:
    """The flags that make nvcc build binary code for `arch`, and PTX if it asks for that."""
    real = sm_name(arch)
    virtual = real.replace("sm_", "compute_")
    return [f"-gencode=arch={virtual},code={code}" for code in ((real, virtual) if arch.ptx else (real,))]


def supported(
    archs: Iterable[Arch], *, majors: Sequence[int] = (), min_arch: Arch | None = None
) -> tuple[tuple[Arch, ...], tuple[Refusal, ...]]:
    """Cut a requested list to what an op supports; the caller raises if nothing is left.

    Args:
        majors: CUDA major versions that the op supports; empty for all.
        min_arch: the lowest arch that will do; with a suffix, its variants of at least that suffix.
    """
    reasons = {arch: _unsupported(arch, majors, min_arch) for arch in archs}
    kept = tuple(arch for arch, reason in reasons.items() if reason is None)
    return kept, tuple(Refusal(str(arch), reason) for arch, reason in reasons.items() if reason is not None)


def _unsupported(arch: Arch, majors: Sequence[int], least: Arch | None) -> str | None:
    if arch.kind == "cuda" and majors and arch.major not in majors:
        return f"the op supports {', '.join(f'{major}.x' for major in majors)} only"
    if least is None:
        return None
    if arch.kind == least.kind == "cuda":
        fits = (arch.major, arch.minor) >= (least.major, least.minor)
        if fits and _STRENGTH[arch.suffix] < _STRENGTH[least.suffix]:
            better = f"{arch.major}.{arch.minor}{least.suffix}"
            return f"the op needs the {_SUFFIX_NAMES[least.suffix]} variant; ask for {better}"
    else:
        fits = least.runs_on(arch).ok
    return None if fits else f"the op needs {least} or later"
