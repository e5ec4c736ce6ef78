"""Reads out of logs which kernels were missing, and says what a release plan lacks to hold them.

A log is what ``KARTIFACTS_MISSES`` names, or the output of any program in which `MissingKernel` was shown or a kernel
compiled at level INFO: both are known by how their messages begin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kartifacts.errors import ConfigError, printable
from kartifacts.model.arch import Arch, parse_arch

_BEGINNING = 100  # characters of a line that are shown
_BEGINS = '{"missing": "'  # as each line of KARTIFACTS_MISSES does
_WHOLE_URI = re.compile(r"[a-z0-9._+-]+/[a-z0-9._+-]+(\?[!#-\[\]-~ ]+)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_URI = r"(?P<uri>[a-z0-9._+-]+/[a-z0-9._+-]+(\?[^\s:,'\"\\]+)?)"
_ARCH = r"(?P<arch>[a-z0-9.+:_-]*[a-z0-9_])"
_REFUSED = re.compile(rf"no usable kernel for {_URI} on (?i:{_ARCH}), and compiling it is refused: ")
_COMPILED = re.compile(rf"\bcompiling {_URI} for (?i:{_ARCH}): ")
_TEST = re.compile(r"^_{3,} (?P<test>\S.*?) _{3,}$")  # how pytest begins what it tells of a test that failed
_NO_TEST = re.compile(r"^={3,} ")


@dataclass
class Missed:
    """One kernel that was missing, and what is known of who missed it."""

    uri: str
    arch: Arch
    times: int = 0
    compiled: int = 0  # of these: how often it was compiled instead
    tests: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    machines: set[str] = field(default_factory=set)

    def report(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "arch": str(self.arch),
            "times": self.times,
            "compiled": self.compiled,
            "tests": sorted(self.tests),
            "pids": sorted(self.pids),
            "machines": sorted(self.machines),
        }

    @property
    def op(self) -> str:
        return self.uri.partition("?")[0]

    @property
    def family(self) -> str:
        return self.uri.partition("/")[0]


class Read(NamedTuple):
    """What logs say."""

    missed: list[Missed]  # sorted
    unread: list[str]  # how lines begin that say something was missing, and not which kernel for which arch


def read(lines: Iterable[str]) -> Read:
    """Every kernel that the lines say was missing; a line that says nothing of the kind is passed over."""
    found: dict[tuple[str, Arch], Missed] = {}
    unread: list[str] = []
    for said in _events(lines):
        try:
            arch = parse_arch(said["arch"])
        except (ConfigError, KeyError):  # it is cut, damaged or of another version
            unread.append(printable(said["text"][:_BEGINNING]))
            continue
        missed = found.setdefault((said["missing"], arch), Missed(said["missing"], arch))
        missed.times += 1
        missed.compiled += said.get("outcome") == "compiled"
        missed.tests |= {test for test in [said.get("test")] if test and isinstance(test, str)}
        missed.pids |= {pid for pid in [said.get("pid")] if isinstance(pid, int)}
        missed.machines |= {machine for machine in [said.get("machine")] if machine and isinstance(machine, str)}
    return Read(sorted(found.values(), key=lambda missed: (missed.uri, str(missed.arch))), unread)


def _events(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    test = ""
    for line in lines:
        text = _COLOUR.sub("", line).rstrip("\r\n")
        if '"missing"' in text and (said := _noted(text[text.find("{") :])) is not None:
            yield {**said, "text": text}
        elif heading := _TEST.match(text):
            test = heading["test"]
        elif _NO_TEST.match(text):
            test = ""
        else:
            for pattern, outcome in ((_REFUSED, "refused"), (_COMPILED, "compiled")):
                for match in pattern.finditer(text):
                    told = {"missing": match["uri"], "arch": match["arch"], "outcome": outcome, "test": test}
                    yield {**told, "text": text[match.start() :]}


def _noted(text: str) -> Mapping[str, Any] | None:
    """What a line of ``KARTIFACTS_MISSES`` says, nothing if it cannot be read; None if it is no such line."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):  # half a line, as a full disk leaves it
        return {} if text.startswith(_BEGINS) else None
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in ("missing", "arch")):
        return None
    return said if _WHOLE_URI.fullmatch(said["missing"]) else {}
