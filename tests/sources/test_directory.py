"""A directory as a source: what it gives, and what it refuses to read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kartifacts.errors import SourceError, VerificationError
from kartifacts.model.digest import Digest, sha256
from kartifacts.sources.directory import DirectorySource
from kartifacts.store import Store


def read(source: DirectorySource, digest: Digest, size: int, **part: int) -> bytes:
    with source.read(digest, size, **part) as pieces:
        return b"".join(pieces)


def test_a_blob_and_its_ranges_come_as_they_are(repository: Path, digest: Digest, content: bytes) -> None:
    source = DirectorySource(repository)
    assert read(source, digest, len(content)) == content
    assert read(source, digest, len(content), start=1000, length=5000) == content[1000:6000]


def test_a_copied_store_serves_its_blobs_and_its_kernels(tmp_path: Path, content: bytes, digest: Digest) -> None:
    store = Store(tmp_path / "store")
    store.put(digest, content)
    path = store.put(digest, content, ".so")
    source = DirectorySource(store.root)
    assert read(source, digest, len(content)) == content
    assert source.loose(digest, ".so") == path
    assert source.loose(digest, ".cubin") is None


def test_missing_is_told_from_broken(tmp_path: Path, repository: Path, content: bytes, digest: Digest) -> None:
    for path in (repository, tmp_path / "nothing", repository / "blobs" / "sha256" / digest):
        with pytest.raises(SourceError) as caught:
            read(DirectorySource(path), sha256(b"other"), 5)
        assert caught.value.missing
    with pytest.raises(VerificationError, match=f"has {len(content)} bytes, expected 5"):
        read(DirectorySource(repository), digest, 5)


def test_a_pipe_or_a_directory_in_a_blobs_place_is_found_out(repository: Path, digest: Digest) -> None:
    blob = repository / "blobs" / "sha256" / digest
    for make in (os.mkfifo, os.mkdir):
        (blob.rmdir if blob.is_dir() else blob.unlink)()
        make(blob)
        with pytest.raises(SourceError, match="not a regular file"):
            read(DirectorySource(repository), digest, 5)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(repository: Path, digest: Digest, content: bytes) -> None:
    with DirectorySource(repository).read(digest, len(content), start=10) as pieces:
        os.truncate(repository / "blobs" / "sha256" / digest, 50)
        with pytest.raises(SourceError, match="early"):
            b"".join(pieces)
