"""Puts the flags that a user has for CUDA compilers, spelled as nvcc takes them, as NVRTC takes them, or refuses them.

NVRTC wants every value in one word with its flag, and does not know all that nvcc knows; a value that is missing makes
it abort.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kartifacts.errors import ConfigError

# Those of both that have a value, and the spelling that it is added to.
_VALUED = {
    **dict.fromkeys(("-D", "--define-macro", "-define-macro"), "-D"),
    **dict.fromkeys(("-U", "--undefine-macro", "-undefine-macro"), "-U"),
    **dict.fromkeys(("-I", "--include-path", "-include-path"), "-I"),
    **{
        f"{dashes}{name}": f"--{name}="
        for dashes in ("-", "--")
        for name in (
            *("std", "maxrregcount", "ftz", "prec-div", "prec-sqrt", "fmad", "relocatable-device-code", "dopt"),
            *("diag-suppress", "diag-error", "diag-warn", "Ofast-compile", "jump-table-density", "brief-diagnostics"),
        )
    },
    "-rdc": "--relocatable-device-code=",
    "-Ofc": "--Ofast-compile=",
    "-jtd": "--jump-table-density=",
    "-brief-diag": "--brief-diagnostics=",
}
_SYSTEM = ("-isystem", "--system-include", "-system-include")
_PTXAS = ("-Xptxas", "--ptxas-options", "-ptxas-options")
_OF_NVCC = re.compile(
    r"-O\d?|-[vmrex]|-l(?!ineinfo$|to$).*|-[LW].*|-pg|-m64|-Xcompiler|-Xlinker|-Xarchive|-Xnvlink|-Xcicc|-Xfatbin|-ccbin|-arbin"
    r"|-ldir|-nohd(initlist|movefwd|moveforward)|-noeh|-noprof|-clean|-hls|-res-usage|-src-in-ptx|-nodlink|-reloc-ptx"
    r"|--?(compiler|linker|archive|nvlink)-options|--?(compiler-bindir|archiver-binary|libdevice-directory)"
    r"|--?(allow-unsupported-compiler|cudart|cudadevrt|target-directory|target-dir|use-local-env|profile|optimize)"
    r"|--?(shared|x|machine|library|library-path|forward-unknown-[a-z-]+|dont-use-profile|dryrun|verbose|keep|keep-dir)"
    r"|--?(save-temps|clean-targets|run|run-args|link|lib|no-device-link|entries|default-stream|source-in-ptx)"
    r"|--?(keep-device-functions|resource-usage|no-compress|compress-mode|sanitize|no-exceptions|relocatable-ptx)"
    r"|--?(expt-relaxed-constexpr|expt-extended-lambda|extended-lambda|ftemplate-depth|ftemplate-backtrace-limit)"
    r"|--?(no-host-device-[a-z-]+|host-linker-script|qpp-config|list-gpu-code|list-gpu-arch|no-align-double)"
    r"|--W.*|--?(static-global-template-stub|device-entity-has-hidden-visibility|objdir-as-tempdir|objtemp)"
)
_REFUSED = (
    (re.compile(r"-lineinfo|--?generate-line-info"), "KARTIFACTS_LINEINFO=1 asks for that"),
    (re.compile(r"-g|--?debug|-G|--?device-debug"), "KARTIFACTS_DEBUG=1 asks for that"),
    (_OF_NVCC, "it is a flag of nvcc that NVRTC, which makes the device code here, does not know"),
    (re.compile(r"-Xcudafe"), "NVRTC has flags of its own for that, as --diag-suppress=177"),
    (
        re.compile(r"--?(pre-include|include)|--?(use-|create-)?pch(-.*)?|-pch.*"),
        "nobody would notice that the file it names has changed",
    ),
    (
        re.compile(r"--?(dlto|lto|dlink-time-opt|gen-opt-lto|ltoir|optix-ir|fdevice-syntax-only)"),
        "NVRTC then makes no machine code",
    ),
    (re.compile(r"[^-].*|-|"), "it is no flag"),
)


def as_nvrtc_takes(words: Iterable[str], setting: str) -> Iterator[str]:
    """The flags in `words` as NVRTC and its worker take them.

    Args:
        setting: the variable that they come from.

    Raises:
        ConfigError: NVRTC does not take one of them; names it and the variable.
    """
    left = iter(words)
    for word in left:
        short = word[:2] if word[:2] in ("-D", "-U", "-I") and word not in _VALUED and "=" not in word[:3] else ""
        name, equals, value = (short, "=", word[2:]) if short else word.partition("=")
        if name in _PTXAS or name in _VALUED or name in _SYSTEM:
            value = value if equals else next(left, "")
            if not value or (name in _PTXAS and not all(value.split(","))):
                raise _refusal(setting, name, "its value is missing")
            if name in _SYSTEM:
                yield from ("-isystem", value)
            elif name in _PTXAS:
                yield from (f"--ptxas-options={part}" for part in value.split(","))
            else:
                yield f"{_VALUED[name]}{value}"
            continue
        for pattern, why in _REFUSED:
            if pattern.fullmatch(name):
                raise _refusal(setting, word, why)
        yield word


def _refusal(setting: str, word: str, why: str) -> ConfigError:
    return ConfigError(
        f"{setting}: {word!r} cannot be given to NVRTC: {why}",
        hint="options for ptxas are given as in -Xptxas=-O1; with KARTIFACTS_CUDA_COMPILER=nvcc the flags are nvcc's",
    )
