"""Names in a registry: addresses, tags that stand for one path only, and manifests that are read with suspicion."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import canonical_json, sha256
from kartifacts.model.layout import check_path
from kartifacts.model.manifest import MEDIA_INDEX, MEDIA_MANIFEST
from kartifacts.remote.registry import file_layer, file_manifest, manifest_type, parse_registry, path_of, tag_of

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
SEGMENT = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9._+-]{0,70}[A-Za-z0-9_+-])?", fullmatch=True)
PATHS = st.lists(SEGMENT, min_size=1, max_size=6).map("/".join)


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("oci://host/a/b", "https://host/v2/a/b/manifests/1", "oci://host/a/b"),
        ("oci://host:5000/a", "https://host:5000/v2/a/manifests/1", "oci://host:5000/a"),
        ("oci://me:secret@host/a/", "https://host/v2/a/manifests/1", "oci://host/a"),
        ("oci+http://127.0.0.1:5000/a", "http://127.0.0.1:5000/v2/a/manifests/1", "oci+http://127.0.0.1:5000/a"),
        ("oci+http://[::1]:5000/a", "http://[::1]:5000/v2/a/manifests/1", "oci+http://[::1]:5000/a"),
        ("oci://docker.io/me/a", "https://registry-1.docker.io/v2/me/a/manifests/1", "oci://registry-1.docker.io/me/a"),
        ("oci://host/a?mount=b/c&single-writer=1", "https://host/v2/a/manifests/1", "oci://host/a"),
    ],
)
def test_an_address_is_where_the_registry_has_it(text: str, url: str, name: str) -> None:
    found = parse_registry(text)
    assert found.manifest("1").url == url
    assert found.name == name
    assert (found.mount, found.single_writer) == (("b/c", True) if "?" in text else ("", False))


@pytest.mark.parametrize(
    "text",
    [
        "oci://",
        "oci://host",
        "oci://host/",
        "oci:host/a",
        "https://host/a",
        "oci://host/A",
        "oci://host/a//b",
        "oci://host/../a",
        "oci://host/a:tag",
        "oci://host/a@sha256:0",
        "oci://host/a b",
        "oci://host:0/a",
        "oci://host:x/a",
        "oci://host/" + "a" * 256,
        "oci://host/a?mount=",
        "oci://host/a?mount=../b",
        "oci://host/a?single-writer=yes",
        "oci://host/a?unknown=1",
        "oci://me:secret@/a",
    ],
)
def test_what_is_no_repository_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a repository of a registry") as caught:
        parse_registry(text)
    assert "secret" not in str(caught.value)


@given(PATHS, PATHS)
def test_no_two_paths_have_one_tag(one: str, other: str) -> None:
    assert TAG.fullmatch(tag_of(one))
    assert (tag_of(one) == tag_of(other)) == (one == other)
    assert path_of(tag_of(one)) in (one, "")
    assert path_of(tag_of(one)) == one or len(one) > 60


@pytest.mark.parametrize("one", ["a/b", "a_.b", "a_b", "a__b", "a+b", "a_-b", "-a", "a-b", "_a", "__a"])
def test_what_escapes_stand_for_is_not_mistaken(one: str) -> None:
    others = {"a/b", "a_.b", "a_b", "a__b", "a+b", "a_-b", "-a", "a-b", "_a", "__a"} - {one}
    assert tag_of(one) not in {tag_of(other) for other in others}


@pytest.mark.parametrize("tag", ["latest", "demo-1.0", "1.0", f"sha256-{'0' * 64}"])
def test_tags_of_releases_and_lists_are_no_files(tag: str) -> None:
    assert path_of(tag) is None


def test_the_manifest_of_a_file_says_which_file_it_is() -> None:
    made = file_manifest("a/b", sha256(b"x"), 1, "2026-01-01")
    found = file_layer(made, "here", "a/b")
    assert (found.sha256, found.size) == (sha256(b"x"), 1)
    assert file_layer(made, "here") == found
    with pytest.raises(VerificationError, match="is the manifest of 'a/b'"):
        file_layer(made, "here", "a/c")


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_of_what_is_no_manifest_nothing_is_believed(content: bytes) -> None:
    with pytest.raises(VerificationError):
        file_layer(content, "here")
    assert manifest_type(content) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["artifactType", "layers", "digest", "size", "annotations", "org.opencontainers.image.title"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_manifests_of_any_shape_are_refused_with_a_sentence(value: object) -> None:
    shaped = {**value, "artifactType": "application/vnd.kartifacts.file.v1"} if isinstance(value, dict) else value
    try:
        found = file_layer(canonical_json(shaped), "here")
    except VerificationError:
        return
    assert found.size >= 0


def test_a_blob_is_a_manifest_by_its_content_only() -> None:
    assert manifest_type(canonical_json({"schemaVersion": 2, "mediaType": MEDIA_INDEX})) == MEDIA_INDEX
    assert manifest_type(canonical_json({"schemaVersion": 2, "mediaType": MEDIA_MANIFEST})) == MEDIA_MANIFEST
    for other in (
        {"mediaType": MEDIA_INDEX},
        {"schemaVersion": 2, "mediaType": "text/plain"},
        {"schemaVersion": 2},
        {"schemaVersion": 2, "mediaType": [MEDIA_INDEX]},
        [MEDIA_INDEX],
    ):
        assert manifest_type(canonical_json(other)) is None


@given(PATHS)
def test_every_safe_path_has_a_tag(path: str) -> None:
    try:
        check_path(path)
    except VerificationError:
        return
    assert TAG.fullmatch(tag_of(path))
