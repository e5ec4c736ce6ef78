"""Which compiler flags an op may declare: those whose effect depends on the op's own files and its arch alone.

All others are refused, since nobody can list every flag of every compiler that reads or writes a file.
"""

from __future__ import annotations

import re

from kartifacts.errors import ConfigError

_DEFINE = r"[A-Za-z_]\w*(=[^\n\0$`\\]*)?"  # without what a shell that nvcc starts would expand
# Of the host compiler: optimisation, the meaning of floating point, the language, limits and warnings.
_HOST = re.compile(
    r"-O([0-3sgz]|fast)?"
    r"|-std=(c|gnu)\+\+(11|14|17|20|23|26|2[abc])"
    rf"|-[DU]{_DEFINE}"
    r"|-pedantic|-w|-W(no-)?[a-z][a-z0-9+-]*(=\d+)?"
    r"|-f(no-)?(aggressive-loop-optimizations|associative-math|builtin|cx-limited-range|devirtualize|exceptions"
    r"|fast-math|finite-loops|finite-math-only|float-store|function-sections|data-sections|gcse"
    r"|if-conversion2?|inline|inline-functions|inline-small-functions|ipa-[a-z-]+|ivopts|loop-[a-z-]+"
    r"|math-errno|merge-all-constants|merge-constants|omit-frame-pointer|openmp-simd|optimize-sibling-calls"
    r"|peel-loops|prefetch-loop-arrays|reciprocal-math|rename-registers|rounding-math|rtti|schedule-insns2?"
    r"|semantic-interposition|signaling-nans|signed-zeros|slp-vectorize|split-loops|strict-aliasing"
    r"|strict-overflow|threadsafe-statics|trapping-math|trapv|tree-[a-z-]+|unroll-all-loops|unroll-loops"
    r"|unsafe-math-optimizations|unswitch-loops|vectorize|wrapv)"
    r"|-ffp-contract=(fast|on|off)|-fvect-cost-model=(unlimited|dynamic|cheap|very-cheap)"
    r"|-fvisibility-inlines-hidden|-f(template|constexpr)-[a-z-]+=\d+"
    r"|-mprefer-vector-width=(none|128|256|512)|-mtune=generic|-mno-[a-z0-9.]+"
)
_CLOCK = re.compile(r"\b__(DATE|TIME|TIMESTAMP)__\b")
_LEVEL = r"(true|false)"
# Of nvcc, with one dash or two.
_NVCC = re.compile(
    r"-O[0-3]|-std=c\+\+(11|14|17|20|23)|-w|--?disable-warnings|-W(no-)?[a-z][a-z0-9+-]*"
    rf"|-[DU]{_DEFINE}"
    r"|--?(use_fast_math|restrict|extra-device-vectorization|extended-lambda|expt-extended-lambda"
    r"|expt-relaxed-constexpr|Werror[a-z=,-]*)"
    rf"|--?(ftz|prec-div|prec-sqrt|fmad)={_LEVEL}"
    r"|--?maxrregcount=\d{1,3}|--?ftemplate-(depth|backtrace-limit)=\d+"
    r"|--?default-stream=(legacy|null|per-thread)|--?diag-(suppress|error|warn)=\d+(,\d+)*"
    r"|-Xcudafe=--(diag_(suppress|error|warning)=\w+|display_error_number)"
)
# Of NVRTC; nvcc, which stands in for it, understands the same.
_NVRTC = re.compile(
    r"-std=c\+\+(11|14|17|20)|-w|--?disable-warnings"
    rf"|-[DU]{_DEFINE}"
    r"|--?(use_fast_math|restrict|extra-device-vectorization)"
    rf"|--?(ftz|prec-div|prec-sqrt|fmad)={_LEVEL}"
    r"|--?maxrregcount=\d{1,3}|--?diag-(suppress|error|warn)=\d+(,\d+)*"
)
_PTXAS = re.compile(
    r"-O[0-4]|-v|--verbose|-w|--warn-on-(spills|local-memory-usage|double-precision-use)|-warn-[a-z-]+"
    r"|-dlcm=(ca|cg|cs|cv)|-dscm=(wb|cg|cs|wt)|--(def|force)-(load|store)-cache=[a-z]{2}"
    rf"|--?(allow-expensive-optimizations|fmad)={_LEVEL}|--?maxrregcount=\d{{1,3}}|--opt-level=[0-4]"
)
_OWN = {"nvcc": _NVCC, "nvrtc": _NVRTC}
# Flags that hand a list over to another tool.
_TO_PTXAS = {"-Xptxas": _PTXAS, "--ptxas-options": _PTXAS}
_HANDED_ON = {"nvcc": {"-Xcompiler": _HOST, "--compiler-options": _HOST, **_TO_PTXAS}, "nvrtc": _TO_PTXAS}

# Of the linker: libraries by name, which are looked for where the compiler does, and how symbols are bound.
_LINK = re.compile(
    r"-l[A-Za-z0-9_][A-Za-z0-9_+.-]*|-pthread|-Wl,(-z,(now|relro|nodelete)|--(no-)?as-needed|--gc-sections)"
)


def check_flag(flag: str, toolchain: str, where: str) -> None:
    """Raise `ConfigError`, which names the flag, unless an op may declare it."""
    name, equals, rest = flag.partition("=")
    handed_on = _HANDED_ON.get(toolchain, {})
    if equals and name in handed_on:
        allowed, parts = handed_on[name], rest.split(",")
    else:
        allowed, parts = _OWN.get(toolchain, _HOST), [flag]
    for part in parts:
        _refuse_clock(part, f"{where}.flags")
        if not allowed.fullmatch(part):
            inside = "" if part == flag else f" (in {flag!r})"
            raise ConfigError(
                f"{where}.flags: {part!r}{inside} is not allowed: with it the result might depend on more than "
                f"the op's own files and its arch, or {toolchain} does not know it",
                hint="allowed are optimisation (-O3), floating point (-ffast-math, --use_fast_math), -D, -std, warnings"
                ", and for nvcc lists as in -Xcompiler=-Wall,-fno-math-errno; shared headers belong into include/, "
                "CPU level and GPU into the arch list",
            )


def check_link_flag(flag: str, where: str) -> None:
    """Raise `ConfigError`, which names the flag, unless an op may declare it for the linker."""
    if not _LINK.fullmatch(flag):
        raise ConfigError(
            f"{where}.link_flags: {flag[:100]!r} is not allowed: with it the result might depend on where this machine "
            "keeps things",
            hint="allowed are libraries by name (-lm), -pthread, -Wl,-z,now (also relro, nodelete), -Wl,--as-needed "
            "and -Wl,--gc-sections",
        )


def check_define(define: str, where: str) -> None:
    """Raise `ConfigError` unless `define` is a macro with its value, as it stands after -D."""
    if not re.fullmatch(_DEFINE, define):
        raise ConfigError(f"{where}.defines: expected NAME or NAME=VALUE, got {define[:100]!r}")
    _refuse_clock(define, f"{where}.defines")


def _refuse_clock(text: str, where: str) -> None:
    """Some compilers cannot tell when a macro of the command line stands for the time."""
    if found := _CLOCK.search(text.partition("=")[2]):
        raise ConfigError(
            f"{where}: {text[:100]!r} uses {found[0]}: the kernel would be another each time that it is compiled",
            hint="leave it out, or give a fixed text",
        )
