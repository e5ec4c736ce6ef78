"""A tiny repository is a real one: every digest and size in it is right, and skopeo's files are there."""

from __future__ import annotations

from pathlib import Path

from kartifacts.model.digest import sha256
from kartifacts.model.frames import decompress
from kartifacts.model.manifest import decode_bundle, decode_lock, decode_release, decode_table
from kartifacts.testing import tiny_repository

FILES = {"a.cubin": b"first" * 100, "norm/x?dtype=f32": b"second", "b.so": b""}


def test_everything_in_it_can_be_read_and_is_what_it_says(tmp_path: Path) -> None:
    repository = tiny_repository(tmp_path, FILES, family="norm", arch="cpu:x86-64-v3", kernels_per_block=1)
    (pin,) = decode_lock(repository.lock.read_bytes()).releases
    assert pin == repository.pin
    release = decode_release(repository.blob(pin.sha256).read_bytes())
    assert (release.library, release.version) == ("tiny", "1.0")
    (descriptor,) = release.manifests
    assert descriptor.note("arch") == "cpu:x86-64-v3"
    assert descriptor.sha256 == repository.manifest
    manifest = decode_bundle(repository.blob(descriptor.sha256).read_bytes())
    compressed = repository.blob(repository.table).read_bytes()
    table = decode_table(decompress(compressed, int(manifest.config.note("raw-size")), what="table"), manifest)
    (layer,) = manifest.layers
    pack = repository.blob(layer.sha256).read_bytes()
    for entry in table.kernels:
        block = table.blocks[entry.block]
        frame = pack[block.offset : block.offset + block.length]
        assert sha256(frame) == block.sha256
        content = decompress(frame, block.size, what="block")[entry.offset : entry.offset + entry.size]
        assert content == FILES[entry.uri]
        assert sha256(content) == entry.sha256
    for blob in (tmp_path / "blobs" / "sha256").iterdir():
        assert sha256(blob.read_bytes()) == blob.name


def test_the_same_files_give_the_same_release(tmp_path: Path) -> None:
    assert tiny_repository(tmp_path / "a", FILES).pin == tiny_repository(tmp_path / "b", FILES).pin
