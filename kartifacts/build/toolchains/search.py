"""Tells in which directories a compiler looks for headers, in its order, so that what it missed can be watched."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from kartifacts.build.closure import relative
from kartifacts.build.toolchains import Unit, probe
from kartifacts.config import Settings

log = logging.getLogger(__name__)

Answer = Callable[[], tuple[probe.Facts, list[Path]]]

# In the order in which they are searched, of the host compilers, nvcc and NVRTC.
_OPTIONS = (("-iquote",), ("-I", "--include-path", "-include-path"), ("-isystem", "--system-include"))
_LISTED = re.compile(r"^#include <\.\.\.> search starts here:\n(.*?)^End of search list", re.MULTILINE | re.DOTALL)
_PLANNED = re.compile(r'"-I([^"]+)"|"-isystem" "([^"]+)"')
_HOST = "-ccbin="


def places(settings: Settings, root: Path, unit: Unit) -> list[str]:
    """The directories outside of the library at `root` in which the compiler of `unit` looks, as it spells them."""
    arguments = (*unit.flags, *unit.places)
    given = [place for names in _OPTIONS for place in _given(arguments, names)]
    outside = [os.path.join(root, place) for place in given if relative(root, place) is None]
    return [*outside, *(() if unit.worker else _built_in(settings, unit))]


def _given(arguments: Iterable[str], names: tuple[str, ...]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        for name in names:
            if word.startswith(name):
                yield word[len(name) :].removeprefix("=") or next(words, "")
                break


def _built_in(settings: Settings, unit: Unit) -> list[str]:
    host = next((Path(place.removeprefix(_HOST)) for place in unit.places if place.startswith(_HOST)), None)
    if host is None:
        return _asked(settings, [unit.compiler], partial(_of_host, settings, unit.compiler))
    toolkit = _asked(settings, [unit.compiler, host], partial(_of_toolkit, settings, unit.compiler, host))
    return [*toolkit, *_asked(settings, [host], partial(_of_host, settings, host))]


def _asked(settings: Settings, tools: list[Path], answer: Answer) -> list[str]:
    try:
        facts = probe.remembered(settings, "header directories", tools, answer)
    except (probe.Silent, OSError) as error:
        log.debug("where %s looks for headers is not known: %s", tools[0], error)
        return []
    return [place for place in facts["places"].split("\n") if place]


def _of_host(settings: Settings, compiler: Path) -> tuple[probe.Facts, list[Path]]:
    listed = _LISTED.search(probe.ask(settings, compiler, "-E", "-v", "-x", "c++", os.devnull))
    lines = listed[1].splitlines() if listed else []
    return {"places": "\n".join(line.strip().removesuffix(" (framework directory)") for line in lines)}, []


def _of_toolkit(settings: Settings, nvcc: Path, host: Path) -> tuple[probe.Facts, list[Path]]:
    plan = probe.ask(settings, nvcc, f"{_HOST}{host}", "--dryrun", "-x", "cu", "-c", os.devnull)
    found = dict.fromkeys(os.path.normpath(first or second) for first, second in _PLANNED.findall(plan))
    return {"places": "\n".join(found)}, []
