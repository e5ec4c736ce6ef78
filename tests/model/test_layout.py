"""Names: what may become a path in a repository, and above all what may not."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import blob_path, check_name, check_path, release_directory, release_path, suffix_of

HOSTILE = [
    *("", ".", "..", "/", "a/", "/a", "a//b", "../a", "a/../b", "a/..", "./a", "a/./b", "a\\b", "..\\a", "a..b"),
    *(".hidden", "-rf", "a.", "a ", " a", "a\n", "a\0b", "a\x1b[31m", "a:b", "C:", "a*", "a?", "a%2e%2e", "~", "$HOME"),
    *("con", "NUL", "nul.txt", "x/aux.so", "com1", "LPT9.so", "ä", "а", "a\u202eb", "a" * 5000),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_hostile_name_becomes_a_path(text: str) -> None:
    with pytest.raises(ConfigError, match="bad library name") as caught:
        check_name(text, "library")
    assert len(caught.value.message) < 400
    with pytest.raises(VerificationError, match="not a safe relative path") as refused:
        check_path(text)
    assert len(refused.value.message) < 400
    for library, version in ((text, "1.0"), ("lib", text)):
        with pytest.raises(ConfigError):
            release_directory(library, version)


@pytest.mark.parametrize(
    "text", ["a", "norm", "flash-attn", "0.1.0+cu130", "1.0_rc1", "a.b", "9.0a", "contact", "a" * 128]
)
def test_ordinary_names_are_given_back(text: str) -> None:
    assert check_name(text, "family") == check_path(text) == text


@pytest.mark.parametrize("text", ["Norm", "a/b", "_a", "a" * 129])
def test_a_name_is_lower_case_and_one_segment_although_a_path_need_not_be(text: str) -> None:
    with pytest.raises(ConfigError):
        check_name(text, "op")
    assert check_path(text) == text


def test_paths_are_bounded_in_whole_and_in_each_part() -> None:
    check_path("/".join(["a" * 255] * 4))
    for text in ("a" * 256, "/".join(["a" * 200] * 6)):
        with pytest.raises(VerificationError):
            check_path(text)


@given(st.text(max_size=40))
def test_a_path_that_passes_stays_below_where_it_is_put(text: str) -> None:
    try:
        path = check_path(text)
    except VerificationError:
        return
    joined = PurePosixPath("/root") / path
    assert joined.is_relative_to("/root")
    assert ".." not in joined.parts
    assert str(joined) == f"/root/{path}"
    assert path.isascii()
    assert path.isprintable()


def test_publisher_and_reader_agree_on_where_things_lie() -> None:
    digest = sha256(b"")
    assert blob_path(digest) == f"blobs/sha256/{digest}"
    assert release_path("lib", "1.0+cu13", digest) == f"targets/lib/1.0+cu13/{digest}.index.json"


@pytest.mark.parametrize(
    ("path", "suffix"),
    [
        *(("a/b.so", ".so"), ("x.cubin", ".cubin"), ("a.tar.gz", ".gz"), ("lib.so.1", ".1"), ("a.b/c", ""), ("c", "")),
        *((".so", ""), ("a/.so", ""), ("a.", ""), ("a.s-o", ""), ("a." + "x" * 13, ""), ("a.so\n", ""), ("", "")),
    ],
)
def test_only_a_plain_suffix_is_kept(path: str, suffix: str) -> None:
    assert suffix_of(path) == suffix
