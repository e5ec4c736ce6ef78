"""Remembers in the workspace what reading a library came to, so that while nothing was touched none of it is read.

libraries/<sha256 of the question>.json     its own sha256, then question, answer, and the stamp of each file and
                                            directory that the answer hangs on

Each is only a saving: whatever is damaged, of another question, somebody else's or in doubt is not used.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kartifacts.build import templates
from kartifacts.build.closure import shared_include
from kartifacts.build.declared import DECLARATION, declared, parsed
from kartifacts.build.stamps import Stamp, is_settled, stamp_of
from kartifacts.build.workspace import check_owner, replace_file
from kartifacts.errors import ConfigError, StoreError
from kartifacts.files.trust import unfit
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.spec import Source, Spec

log = logging.getLogger(__name__)

_MOST = 16 << 20  # bytes
_MOST_WATCHED = 500  # files and directories; to look at more would take longer than a search
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Record(msgspec.Struct, frozen=True):
    question: Any
    answer: Any
    stamps: list[tuple[str, Stamp]]


_RECORD = msgspec.json.Decoder(_Record)


def answer(workspace: Path | None, question: Any, find: Callable[[], tuple[Any, Iterable[str]]]) -> Any:
    """The answer of an earlier process while nothing that it hangs on was touched, else that of `find`.

    Args:
        workspace: where it is remembered, if that is there already; None: nowhere.
        question: of JSON, as is the answer.
        find: gives the answer, and the files and directories that it hangs on.
    """
    place = None if workspace is None else _place(workspace, question)
    if place is not None and (said := _recalled(place, question)) is not None:
        return said.answer
    began = time.time_ns()
    found, hung_on = find()
    if place is not None:
        _note(place, question, found, {*hung_on}, began)
    return found


def closure(workspace: Path | None, root: Path, sources: Sequence[str], axes: Mapping[str, str]) -> tuple[Source, ...]:
    """As `templates.closure`."""

    def find() -> tuple[Any, Iterable[str]]:
        found, hung_on = templates.traced(root, sources, axes)
        return [[source.path, source.sha256] for source in found], hung_on

    rendered = any(map(templates.is_template, sources))
    question = ["closure", str(root), str(shared_include(root) or ""), [*sources], dict(axes) if rendered else {}]
    return tuple(Source(path, Digest(digest)) for path, digest in answer(workspace, question, find))


def declarations(workspace: Path | None, root: Path) -> dict[str, dict[str, Any] | None]:
    """What each op.toml of a library holds, by its directory; None where that has to be read for its error."""
    found: dict[str, dict[str, Any] | None] = answer(workspace, ["declarations", str(root)], partial(_read, root))
    return found


def _read(root: Path) -> tuple[dict[str, dict[str, Any] | None], set[str]]:
    found: dict[str, dict[str, Any] | None] = {}
    files = sorted(root.glob(f"*/{DECLARATION}"))
    for file in files:
        try:
            content = parsed(file)
            declared(content, str(file))  # else it may hold what JSON cannot
            found[file.parent.name] = content
        except ConfigError:
            found[file.parent.name] = None
    return found, _of_declarations(root)


def _of_declarations(root: Path) -> set[str]:
    """Every file and directory of which one changes if another op.toml is there or says something else."""
    places = [str(root), *(entry.path for entry in _entries(root) if entry.is_dir())]
    files = [os.path.join(place, DECLARATION) for place in places[1:]]
    return {*places, *(file for file in files if os.path.isfile(file))}


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return [*entries]
    except OSError:  # then nothing is declared
        return []


def note(workspace: Path, spec: Spec) -> None:
    """Remember the library of `spec` for the next process, as it is now."""
    with suppress(ConfigError):  # it changes just now
        declarations(workspace, Path(spec.root))
        closure(workspace, Path(spec.root), _sources(spec), dict(spec.axes))


def watched(spec: Spec) -> set[str] | None:
    """Every file and directory that a spec hangs on; None if they are too many to look at."""
    root = Path(spec.root)
    _, found = templates.traced(root, _sources(spec), dict(spec.axes))
    found |= _of_declarations(root)
    return found if len(found) <= _MOST_WATCHED else None


def _sources(spec: Spec) -> tuple[str, ...]:
    return (*spec.device.sources, *spec.device.host_sources)


def _place(workspace: Path, question: Any) -> Path | None:
    """Where the answer to a question is remembered; None if there is no workspace, or one that others can write to."""
    if not os.path.isdir(workspace):
        return None
    try:
        check_owner(workspace)
        return workspace / "libraries" / f"{sha256(canonical_json(question))}.json"
    except (StoreError, UnicodeEncodeError) as error:  # the first is for who builds to say
        log.debug("nothing is remembered in %s: %s", workspace, error)
        return None


def _recalled(place: Path, question: Any) -> _Record | None:
    try:
        descriptor = os.open(place, _FLAGS)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            content = file.read(_MOST)
        digest, _, said = content.partition(b"\n")
        if reason := unfit(status, len(content)):
            raise ValueError(reason)
        if sha256(said).encode() != digest:
            raise ValueError("it is damaged")
        record = _RECORD.decode(said)
        if record.question != question:
            raise ValueError("it answers another question")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # of which msgspec's are
        log.debug("%s is not used: %s", place, error)
        return None
    return record if all(stamp_of(path) == stamp for path, stamp in record.stamps) else None


def _note(place: Path, question: Any, found: Any, hung_on: set[str], began: int) -> None:
    stamps = [(path, stamp_of(path)) for path in sorted(hung_on)]
    if not all(is_settled(stamp, began) for _, stamp in stamps):
        return
    try:
        said = canonical_json({"question": question, "answer": found, "stamps": stamps})
        replace_file(place, sha256(said).encode() + b"\n" + said)
    except (StoreError, UnicodeEncodeError) as error:  # JSON holds no path that is not text
        log.debug("%s is not written: %s", place, error)
