"""Digests and JSON: equal values give equal bytes, and nothing that has two readings is read."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import VerificationError
from kartifacts.model.digest import are_digests, canonical_json, parse_digest, sha256, strict_json

HEX = hashlib.sha256(b"abc").hexdigest()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def test_sha256_is_that_of_the_bytes_however_they_are_held() -> None:
    assert sha256(b"abc") == sha256(bytearray(b"abc")) == sha256(memoryview(b"abc")) == HEX


def test_both_spellings_of_a_digest_are_one() -> None:
    assert parse_digest(HEX) == parse_digest(f"sha256:{HEX}") == HEX


@pytest.mark.parametrize(
    "text",
    [
        *("", "sha256:", HEX[:-1], HEX + "0", HEX.upper(), HEX + "\n", " " + HEX, f"sha256:sha256:{HEX}"),
        *(
            f"sha512:{HEX}",
            f"md5:{HEX[:32]}",
            f"SHA256:{HEX}",
            f"{HEX[:-1]}g",
            f"../{HEX[3:]}",
            "٠" * 64,
            "x" * 100_000,
        ),
    ],
)
def test_nothing_else_passes_for_a_digest(text: str) -> None:
    with pytest.raises(VerificationError) as caught:
        parse_digest(text)
    assert len(caught.value.message) < 1000


@given(JSON)
def test_canonical_json_is_read_back_as_it_was(value: object) -> None:
    assert strict_json(canonical_json(value), what="x") == value


@given(st.dictionaries(TEXT, JSON, max_size=5))
def test_the_order_of_keys_does_not_change_the_bytes(value: dict[str, object]) -> None:
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


def test_canonical_json_is_compact_utf8() -> None:
    assert canonical_json({"b": [1, 2], "a": "é"}) == '{"a":"é","b":[1,2]}'.encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[1,]", b"{} {}", b"\xff", b"nul", b"'x'"),
        *(b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'{"a":-1e999}'),
        '"é"'.encode("latin-1"),
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32"),
        b'\xef\xbb\xbf{"a":1}',
        *(b'"\xed\xa0\x80"', b'"\\ud800"', b'{"\\uDFFF":1}'),
        *(b"[" * 100 + b"]" * 100, b'{"a":' * 70 + b"1" + b"}" * 70, b"[" * 200_000),
        b"1" * 10_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_malformed_json_is_a_verification_error_that_names_the_thing(data: bytes) -> None:
    with pytest.raises(VerificationError, match="some index is malformed") as caught:
        strict_json(data, what="some index")
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("data", [b'{"a":1,"a":1}', b'{"a":1,"\\u0061":2}', b'[{"x":{"k":1,"j":2,"k":3}}]'])
def test_a_key_that_stands_twice_is_refused_at_any_depth(data: bytes) -> None:
    with pytest.raises(VerificationError, match="stands twice"):
        strict_json(data, what="x")


def test_one_duplicate_among_very_many_keys_is_found_in_time() -> None:
    keys = [*range(200_000), 199_999]
    with pytest.raises(VerificationError, match="'199999' stands twice"):
        strict_json(("{" + ",".join(f'"{key}":0' for key in keys) + "}").encode(), what="x")


def test_whole_characters_may_be_escaped() -> None:
    assert strict_json(b'"\\ud83d\\ude00 \\u00e9"', what="x") == "\U0001f600 é"


@given(st.binary(max_size=60))
def test_bytes_give_json_or_a_verification_error(data: bytes) -> None:
    try:
        value = strict_json(data, what="x")
    except VerificationError:
        return
    assert json.loads(data) == value


@given(
    st.lists(st.sampled_from(["ab" * 32, "0" * 64, "AB" * 32, "ab" * 31, "ab" * 33, "g" * 64, " " * 64, "é" * 64, ""]))
)
def test_many_digests_are_judged_as_each_alone(texts: list[str]) -> None:
    def plain(text: str) -> bool:
        return re.fullmatch("[0-9a-f]{64}", text) is not None

    assert are_digests(texts) == all(map(plain, texts))
