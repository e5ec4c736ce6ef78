"""What the settings add to every command of a compiler: debugging, further flags, a launcher; pure but for look-ups.

All toolchains ask here, so that a setting means the same to each of them.  A toolchain appends `flags` to its own and
to those of the op, adds `facts` to its fingerprint (they are what tells keys apart), and gives `launcher` to its
units, where it is part of no identity.  With no such setting every field is empty: usual kernels know nothing of it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kartifacts.build.toolchains.nvrtc_flags import as_nvrtc_takes
from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import canonical_json, sha256

log = logging.getLogger(__name__)

_DEBUG = {
    "cxx": ("-g", "-O0"),
    "nvcc": ("-g", "-G", "-Xptxas=-v"),
    "nvrtc": ("--device-debug", "--ptxas-options=-v"),
    "triton": ("--debug",),  # of these two, to their own workers
    "cutedsl": ("--debug",),
}
# -G has line numbers already, and nvcc complains about both.
_LINEINFO = {
    "nvcc": ("-lineinfo",),
    "nvrtc": ("--generate-line-info",),
    "triton": ("--lineinfo",),
    "cutedsl": ("--lineinfo",),
}
_EXTRA = {"cxx": "cxx_flags", "nvcc": "cuda_flags", "nvrtc": "cuda_flags"}
_LAUNCHER = {"cxx": "cxx_launcher", "nvcc": "cuda_launcher"}  # NVRTC is a library: nothing starts it

# They say how many of something run at once, and change no byte of what one arch is compiled to.
_SCHEDULING = re.compile(r"--?threads(=.*)?|-t(=?\d+)?|-j(=?\d+)?|--?jobserver")
_REFUSED = (
    (re.compile(r"--?split-compile(-extended)?(=.*)?"), "changes the bytes from one run to the next"),
    (
        re.compile(r"--?(gpu-architecture|gpu-code|arch|code|gencode|generate-code)(=.*)?"),
        "the GPU comes from the arch list",
    ),
    (
        re.compile(r"-o.*|-c|-S|-E|-M[A-Z]*|--output-(file|directory)(=.*)?|--?(ptx|cubin|fatbin|preprocess|compile)"),
        "what is made, and where, is decided by the build",
    ),
    (
        re.compile(r"[^=]*=.*\b__(DATE|TIME|TIMESTAMP)__\b.*"),
        "the kernel would be another each time that it is compiled",
    ),
    (re.compile(r"@.*|--?(options-file|optf)(=.*)?"), "flags in a file cannot be seen"),
)
_NATIVE = re.compile(r"-m(arch|tune|cpu)=native\b")
_MAX_CPUINFO = 16 << 20  # bytes


class Options(NamedTuple):
    """What the settings add to one toolchain.

    Attributes:
        flags: of the compiler, after the op's own, so that they win.
        facts: of the fingerprint: ``overrides``, and ``cpu`` where the flags ask the compiler to look at its own.
        launcher: the program, by its full path, and its arguments, before the compiler; in no key.
        symbols: whether what is linked keeps its symbols.
    """

    flags: tuple[str, ...] = ()
    facts: Mapping[str, str] = {}
    launcher: tuple[str, ...] = ()
    symbols: bool = False

    @property
    def programs(self) -> dict[str, Path]:
        """The launcher as a program of the toolchain, for provenance."""
        return {f"started by {Path(self.launcher[0]).name}": Path(self.launcher[0])} if self.launcher else {}


USUAL = Options()


def flags_for(settings: Settings, kind: str) -> Options:
    """What `settings` add to a toolchain of this kind: ``cxx``, ``nvcc``, ``nvrtc``, ``triton`` or ``cutedsl``.

    Raises:
        ConfigError: a flag cannot be given here, or there is no such launcher; the message names the variable.
    """
    flags = [*_DEBUG.get(kind, ())] if settings.debug else [*_LINEINFO.get(kind, ())] if settings.lineinfo else []
    if kind in _EXTRA:
        extra = _extra(settings, _EXTRA[kind])
        flags += as_nvrtc_takes(extra, f"KARTIFACTS_{_EXTRA[kind].upper()}") if kind == "nvrtc" else extra
    facts = {"overrides": shlex.join(flags)} if flags else {}
    if any(_NATIVE.search(flag) for flag in flags):
        facts["cpu"] = cpu_digest(_cpuinfo())
    launcher = _launcher(settings, _LAUNCHER[kind]) if kind in _LAUNCHER else ()
    return Options(tuple(flags), facts, launcher, settings.debug)


def _extra(settings: Settings, field: str) -> list[str]:
    name, words = f"KARTIFACTS_{field.upper()}", iter(_words(settings, field))
    flags = []
    for word in words:
        for pattern, why in _REFUSED:
            if pattern.fullmatch(word):
                raise ConfigError(f"{name}: {word!r} cannot be given here: {why}")
        if _SCHEDULING.fullmatch(word):
            left_out = f"{word} {next(words, '')}".strip() if word in ("-t", "-j", "-threads", "--threads") else word
            log.warning("%s: %s is left out: KARTIFACTS_JOBS says how many compilers run at once", name, left_out)
            continue
        flags.append(word)
    return flags


def _words(settings: Settings, field: str) -> list[str]:
    text = getattr(settings, field)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"KARTIFACTS_{field.upper()}={text!r} is not what a shell would take: {error}") from error


def _launcher(settings: Settings, field: str) -> tuple[str, ...]:
    words = _words(settings, field)
    if not words:
        return ()
    found = shutil.which(words[0], path=settings.search_path)
    if found is None:
        looked = "" if os.sep in words[0] else f" in {settings.search_path!r}"
        raise ConfigError(
            f"KARTIFACTS_{field.upper()}: there is no program {words[0]!r}{looked}",
            hint="install it, or unset the variable: compilers need no launcher",
        )
    return (os.path.abspath(found), *words[1:])


def _cpuinfo() -> str:
    try:
        return read_regular(Path("/proc/cpuinfo"), _MAX_CPUINFO).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"a flag asks for the CPU of this machine, which cannot be told: {error}", hint="name the CPU in the flag"
        ) from error


def cpu_digest(cpuinfo: str) -> str:
    """What tells CPUs apart for a compiler that looks at its own, out of the text of /proc/cpuinfo."""
    telling = re.compile(
        r"^(vendor_id|cpu family|model|stepping|cache size|flags|Features|CPU [a-z]+|isa|cpu)\s*:\s*(.*)$", re.MULTILINE
    )
    return sha256(canonical_json(sorted({f"{name} {value}" for name, value in telling.findall(cpuinfo)})))
