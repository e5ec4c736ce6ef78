"""Documents differ in something exactly if they are not the same, and what differs is shown as people call it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.model.difference import Difference, documents, lines, names, values
from kartifacts.model.digest import canonical_json

NAMES = st.sampled_from(["name", "arch", "a", "b", "a.b", "[0]", "seconds"])
PLAIN = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "1", "null", "true", "{}", "x"])
DOCUMENTS = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def told(before: Any, after: Any, **options: Any) -> list[str]:
    return [str(row) for row in documents(before, after, **options)]


@given(DOCUMENTS, DOCUMENTS)
def test_documents_differ_in_something_exactly_if_they_are_not_the_same(before: Any, after: Any) -> None:
    same = canonical_json(before) == canonical_json(after)
    assert (told(before, after) == []) == same
    assert told(before, copy.deepcopy(before)) == []


@given(DOCUMENTS)
def test_fields_that_are_left_out_change_nothing_however_deep_they_lie(document: Any) -> None:
    assert told({"x": [document], "seconds": 1}, {"x": [document], "seconds": 2}, without={"seconds"}) == []
    assert told([{"a": {"seconds": 1}}], [{"a": {"seconds": 2}}], without={"seconds"}) == []


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b: 1 became 2"),
        ({"a": 1}, {}, "a: was 1"),
        ({}, {"a": None}, "a: is null"),
        ({"a": 1}, {"a": "1"}, 'a: 1 became "1"'),
        ({"a": True}, {"a": 1}, "a: true became 1"),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a: [1, 2] became [2, 1]"),
        (
            {"kernels": [{"uri": "x", "arch": "8.0", "bytes": 1}, {"uri": "x", "arch": "9.0a", "bytes": 1}]},
            {"kernels": [{"uri": "x", "arch": "8.0", "bytes": 1}, {"uri": "x", "arch": "9.0a", "bytes": 5}]},
            "kernels[x 9.0a].bytes: 1 became 5",
        ),
        ([{"name": "a"}, {"name": "b"}], [{"name": "b"}, {"name": "a"}], "order: the same values, in another order"),
        ({"a.b": 1}, {"a": {"b": 1}}, "order: the same values, in another order"),
    ],
)
def test_a_difference_is_told_by_the_way_to_it(before: Any, after: Any, row: str) -> None:
    assert told(before, after) == [row]


def test_rows_that_are_called_alike_are_told_apart_by_their_number() -> None:
    before = [{"name": "a", "bytes": 1}, {"name": "a", "bytes": 2}]
    after = [{"name": "a", "bytes": 1}, {"name": "a", "bytes": 3}]
    assert told(before, after) == ["[a #2].bytes: 2 became 3"]


def test_names_are_counted_and_the_first_of_many_are_shown() -> None:
    assert [str(row) for row in names("symbols", ["a", "b", "b"], ["b", "c"])] == [
        "symbols: without 'a', 'b'",
        "symbols: with 'c'",
    ]
    [row] = names("symbols", [], map(str, range(20)))
    assert row.text.endswith("and 12 more")
    assert row.text.count("'") == 16
    assert list(names("symbols", ["a"], ["a"])) == []


def test_one_line_in_place_of_another_is_shown_beside_it() -> None:
    assert [row.text for row in lines("notes", ["same", "old"], ["same", "new"])] == ["'old' became 'new'"]
    assert [row.text for row in lines("notes", ["old"], ["new", "newer"])] == ["without 'old'", "with 'new', 'newer'"]


def test_of_what_is_long_the_part_is_shown_in_which_it_differs() -> None:
    [row] = values("", {"flags": "-O3 " * 500 + "-DX=1 -g"}, {"flags": "-O3 " * 500 + "-DX=2 -g"})
    assert re.fullmatch(r"flags: \.\.\.[-O3 ]+-DX=1 -g became \.\.\.[-O3 ]+-DX=2 -g", str(row))
    [row] = values("", {"flags": "a" * 5000}, {"flags": "b" * 5000})
    assert 600 < len(row.text) < 700
    [row] = lines("notes", ["x" * 5000], ["x" * 5000 + "y"])
    assert row.text.endswith("xy'")


def test_a_difference_inside_something_says_inside_what() -> None:
    assert str(Difference("section .text", "changed", "1 byte").inside("image")) == "image: section .text: 1 byte"
