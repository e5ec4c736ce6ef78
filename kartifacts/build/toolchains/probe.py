"""Asks a tool what it is, once: answers are kept, in the workspace if there is one, while its files do not change."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kartifacts.build.workspace import replace_file
from kartifacts.config import Settings
from kartifacts.errors import KartifactsError, StoreError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import canonical_json, sha256, strict_json

log = logging.getLogger(__name__)

# They change what a compiler makes, and are in no key.
_DROPPED = (
    # gcc, clang and collect2: where parts, headers and libraries are, further options, and files that they write
    "COMPILER_PATH", "GCC_EXEC_PREFIX", "LIBRARY_PATH", "LPATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "OBJC_INCLUDE_PATH", "OBJCPLUS_INCLUDE_PATH", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "GCC_COMPARE_DEBUG",
    "CCC_OVERRIDE_OPTIONS", "QA_OVERRIDE_GCC3_OPTIONS", "COLLECT_GCC", "COLLECT_GCC_OPTIONS", "COLLECT_LTO_WRAPPER",
    # GNU ld
    "LD_RUN_PATH", "LDEMULATION", "GNUTARGET",
    # nvcc, the variables that its nvcc.profile adds to included
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES",
    "CUDAFE_FLAGS", "PTXAS_FLAGS", "NVLINK_FLAGS",
    # ccache, where the compiler is a link to it
    "CCACHE_COMPILER", "CCACHE_CC",
    "MAKEFLAGS",
)  # fmt: skip
_MAX_RECORD = 1 << 20  # bytes
_TIMEOUT = 30.0  # seconds that a tool may take to say its version

Facts = dict[str, str]


class Silent(Exception):
    """A tool did not answer; the text says why."""


def environment(settings: Settings) -> dict[str, str]:
    """The environment of every compiler: the user's, without what silently changes the output."""
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return {**env, "PATH": tools_path(settings), "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}


def tools_path(settings: Settings) -> str:
    """Where a compiler looks for its assembler and linker, also when it was named by a path and PATH is empty."""
    return os.pathsep.join(filter(None, (settings.search_path, os.defpath)))


def ask(settings: Settings, *command: str | Path) -> str:
    """What a tool prints (standard output and error).

    Raises:
        Silent: it does not start, fails or hangs.
    """
    try:
        done = subprocess.run(
            command,
            env=environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise Silent(f"{command[0]} does not run: {error}") from error
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise Silent(f"{command[0]} exited with status {done.returncode}: {text.strip()[:200]!r}")
    return text


def remembered(
    settings: Settings, question: str, tools: Iterable[Path], answer: Callable[[], tuple[Facts, Iterable[Path]]]
) -> Facts:
    """The facts that `answer` gives about `tools`, from the workspace if no file that they depend on has changed.

    Args:
        question: names the kind of facts.
        tools: the files asked about; they say which record is read.
        answer: gives the facts, and further files that they depend on.
    """
    tools = tuple(tools)
    name = sha256(canonical_json([question, [ascii(str(tool)) for tool in tools]]))
    record = settings.workspace / "toolchains" / f"{name}.json"
    facts = _recalled(record)
    if facts is None:
        said = _unwritten.get(record)
        if said is None or not _hold(said["stamps"]):
            facts, more = answer()
            said = {"facts": facts, "stamps": {str(path): _stamp(str(path)) for path in (*tools, *more)}}
        facts = said["facts"]
        _unwritten[record] = said
        if os.path.isdir(settings.workspace):  # who only asks makes none
            _write(record, said)
    return facts


_unwritten: dict[Path, dict[str, Any]] = {}


def _write(record: Path, said: dict[str, Any]) -> None:
    try:
        replace_file(record, canonical_json(said))
    except (StoreError, UnicodeEncodeError) as error:  # JSON holds no path that is not text
        log.debug("facts about a compiler are not kept: %s", error)
    else:
        del _unwritten[record]


def digests(settings: Settings, question: str, files: dict[str, Path]) -> Facts:
    """The sha256 of each of `files`, by name; read once for as long as they do not change.

    Raises:
        StoreError: one cannot be read.
    """

    def answer() -> tuple[Facts, Iterable[Path]]:
        return {name: _digest(path) for name, path in files.items()}, ()

    return remembered(settings, f"digests of {question}: {' '.join(files)}", files.values(), answer)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            hashed = hashlib.sha256()
            while piece := file.read(1 << 20):
                hashed.update(piece)
    except OSError as error:
        raise StoreError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    return hashed.hexdigest()


def _recalled(record: Path) -> Facts | None:
    """The facts in `record`; None if there are none that still hold."""
    try:
        kept = strict_json(read_regular(record, _MAX_RECORD), what=str(record))
        if _hold(kept["stamps"]):
            return {str(name): str(value) for name, value in kept["facts"].items()}
    except (OSError, KartifactsError, KeyError, TypeError, AttributeError, ValueError):
        pass
    return None


def _hold(stamps: dict[str, Any]) -> bool:
    try:
        return all(_stamp(path) == stamp for path, stamp in stamps.items())
    except OSError:
        return False


def _stamp(path: str) -> list[object]:
    """What changes whenever the file does, also when it is replaced by one of the same size and time."""
    real = os.path.realpath(path)
    status = os.stat(real)
    return [real, status.st_size, status.st_mtime_ns, status.st_ino]
