"""Ways in which one thing is not another, and how names, values and documents are compared; pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Change = Literal["added", "removed", "changed"]

_SHOWN = 8  # names in one row
_LONGEST = 300  # characters of a name or value
_TITLES = ("library", "version", "family", "op", "name", "uri", "path", "arch", "number")  # what tells rows apart


@dataclass(frozen=True)
class Difference:
    """One way in which the second thing is not the first."""

    where: str
    change: Change
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    def inside(self, where: str) -> Difference:
        """The same of a part of something larger."""
        return Difference(f"{where}: {self.where}", self.change, self.text)


def names(where: str, before: Iterable[str], after: Iterable[str]) -> Iterator[Difference]:
    """Names that are there less often, or more often."""
    earlier, later = Counter(before), Counter(after)
    if lost := sorted((earlier - later).elements()):
        yield Difference(where, "removed", f"without {listed(lost)}")
    if new := sorted((later - earlier).elements()):
        yield Difference(where, "added", f"with {listed(new)}")


def listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(repr(text[:_LONGEST]) for text in texts[:_SHOWN]) + more


def lines(where: str, before: Sequence[str], after: Sequence[str]) -> Iterator[Difference]:
    """Lines of text; where one took the place of another, both are shown."""
    lost, new = [text for text in before if text not in after], [text for text in after if text not in before]
    if len(lost) == len(new) == 1:
        earlier, later = cut(lost[0], new[0])
        yield Difference(where, "changed", f"{earlier!r} became {later!r}")
    else:
        yield from names(where, lost, new)


def cut(before: str, after: str) -> tuple[str, str]:
    """Two texts, of which only a part is shown where they are long: that in which they begin to differ."""
    pairs = enumerate(zip(before, after, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, same - _LONGEST // 4) if max(len(before), len(after)) > _LONGEST else 0
    earlier, later = (("..." if start else "") + text[start : start + _LONGEST] for text in (before, after))
    return earlier, later


def values(where: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Difference]:
    """Values by name."""
    for name in sorted({*before, *after}):
        here = f"{where} {name[:_LONGEST]}".strip()
        earlier, later = cut(before.get(name, ""), after.get(name, ""))
        if name not in after:
            yield Difference(here, "removed", f"was {earlier}")
        elif name not in before:
            yield Difference(here, "added", f"is {later}")
        elif before[name] != after[name]:
            yield Difference(here, "changed", f"{earlier} became {later}")


def documents(before: Any, after: Any, *, without: Collection[str] = ()) -> Iterator[Difference]:
    """Two values of JSON, wherever they differ; none only if they are the same.

    Args:
        without: names of fields that are left out.
    """
    earlier, later = dict(_leaves(before, without)), dict(_leaves(after, without))
    shown = [{path: _shown(value) for path, value in leaves.items()} for leaves in (earlier, later)]
    for path in earlier.keys() & later.keys():
        if _written(earlier[path]) != _written(later[path]) and shown[0][path] == shown[1][path]:
            shown[0][path], shown[1][path] = _written(earlier[path]), _written(later[path])  # 1 and "1"
    found = list(values("", *shown))
    if not found and _written(_left(before, without)) != _written(_left(after, without)):
        found.append(Difference("order", "changed", "the same values, in another order"))
    yield from found


def _leaves(document: Any, without: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Every value that holds no other, by the way to it; rows of a list are called by what they are, if they say so."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{path}.{name}".lstrip("."), value[name]) for name in value if name not in without]
        elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
            taken: Counter[str] = Counter()
            for number, each in enumerate(value):
                title = _title(each) or str(number)
                taken[title] += 1
                called = title if taken[title] == 1 else f"{title} #{taken[title]}"
                waiting.append((f"{path}[{called}]", each))
        elif path or value != {}:
            yield path, value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _left(document: Any, without: Collection[str]) -> Any:
    """The document without those fields."""
    if isinstance(document, dict):
        return {name: _left(value, without) for name, value in document.items() if name not in without}
    return [_left(value, without) for value in document] if isinstance(document, list) else document


def _title(row: Any) -> str:
    if not isinstance(row, dict):
        return ""
    return " ".join(str(row[name]) for name in _TITLES if isinstance(row.get(name), (str, int)))
