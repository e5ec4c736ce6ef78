"""Decompression: never past what was declared, and nothing installed that the table does not promise."""

from __future__ import annotations

import io
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from kartifacts.fetch.plan import Part
from kartifacts.fetch.unpack import WHOLE, WrongPacking, unpack
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Block, KernelEntry
from kartifacts.store import Store

ONE, TWO = b"first kernel" * 100, b"second kernel" * 50


def compress(content: bytes, **parameters: int) -> bytes:
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(3, **parameters)
    ).compress(content)


def entry(content: bytes, offset: int, *, suffix: str = "", digest: str = "") -> KernelEntry:
    return KernelEntry(
        uri=f"at-{offset}{suffix}",
        sha256=digest or sha256(content),
        size=len(content),
        block=0,
        offset=offset,
        suffix=suffix,
    )


def part(compressed: bytes, size: int, *kernels: KernelEntry) -> Part:
    return Part(Block(0, 0, len(compressed), size, sha256(compressed)), kernels)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("spooled", [False, True])
def test_kernels_are_cut_out_wherever_they_lie_even_over_each_other(store: Store, spooled: bool) -> None:
    block = b"gap" + ONE + b"gap" + TWO
    both = ONE + b"gap" + TWO
    kernels = (entry(ONE, 3, suffix=".so"), entry(both, 3), entry(ONE, 3), entry(TWO, len(block) - len(TWO)))
    compressed = compress(block)
    unpack(io.BytesIO(compressed) if spooled else compressed, part(compressed, len(block), *kernels), store, what="x")
    for kernel, content in zip(kernels, (ONE, both, ONE, TWO), strict=True):
        path = store.find(sha256(content), len(content), kernel.suffix)
        assert path is not None
        assert path.read_bytes() == content


def test_a_kernel_of_no_bytes_is_a_kernel(store: Store) -> None:
    compressed = compress(ONE)
    unpack(compressed, part(compressed, len(ONE), entry(b"", 5)), store, what="x")
    assert store.find(sha256(b""), 0) is not None


@pytest.mark.parametrize(
    ("compressed", "reason"),
    [
        (compress(ONE)[:-5], "has .* bytes|cannot be decompressed"),
        (compress(ONE[:50]), "has 50 bytes"),
        (b"", "has 0 bytes"),
        (compress(ONE + b"?"), "has more bytes"),
        (b"not zstd at all", "cannot be decompressed"),
        (compress(bytes(300 << 20), window_log=29, write_content_size=0), "cannot be decompressed"),
        (compress(b"?" + ONE[1:]), "sha256"),
    ],
)
def test_a_block_that_is_not_what_the_table_says_installs_nothing(store: Store, compressed: bytes, reason: str) -> None:
    with pytest.raises(WrongPacking, match=reason):
        unpack(compressed, part(compressed, len(ONE), entry(ONE, 0)), store, what="a block")
    assert list(store.entries()) == []


def test_a_bomb_costs_no_more_than_what_was_declared(store: Store) -> None:
    bomb = compress(bytes(1 << 30))
    assert len(bomb) < 200_000
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = memory("VmRSS")
    with pytest.raises(WrongPacking, match="more bytes"):
        unpack(bomb, part(bomb, len(ONE), entry(ONE, 0)), store, what="a block")
    with pytest.raises(WrongPacking, match="sha256"):
        unpack(io.BytesIO(bomb), part(bomb, len(ONE), entry(ONE, 0)), store, what="a block")
    assert memory("VmHWM") - before < 30 << 10


def memory(what: str) -> int:
    """KiB of this process."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_a_kernel_is_made_from_the_one_that_it_replaces(store: Store, tmp_path: Path) -> None:
    old = os.urandom(50_000)
    new = old[:20_000] + b"changed" + old[20_010:]
    base = tmp_path / "old"
    base.write_bytes(old)
    given = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    frame = zstandard.ZstdCompressor(dict_data=given).compress(new)
    assert len(frame) < 1000
    one = replace(part(frame, len(new), entry(new, 0, suffix=".so")), base=base)
    unpack(frame, one, store, what="x")
    assert store.find(sha256(new), len(new), ".so") is not None
    base.write_bytes(os.urandom(50_000))  # as a disk may do
    with pytest.raises(WrongPacking):
        unpack(frame, replace(one, kernels=(entry(new, 0),)), store, what="x")
    assert store.find(sha256(new), len(new)) is None


def test_buffers_that_are_lent_again_never_mix_kernels(store: Store) -> None:
    contents = [os.urandom(size) for size in (900_000, 10, 400_000, 899_999, 1)] * 8
    parts = [(compress(content), content) for content in contents]

    def one(pair: tuple[bytes, bytes]) -> None:
        compressed, content = pair
        unpack(compressed, part(compressed, len(content), entry(content, 0)), store, what="x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, parts))
    assert {stored.digest for stored in store.entries()} == {sha256(content) for content in contents}


@pytest.mark.parametrize("size", [WHOLE - 1, WHOLE, WHOLE + 1])
def test_a_block_about_as_large_as_a_buffer_comes_whole(store: Store, size: int) -> None:
    content = os.urandom(1000) * (size // 1000) + bytes(size % 1000)
    compressed = compress(content)
    unpack(compressed, part(compressed, size, entry(content, 0)), store, what="x")
    assert store.find(sha256(content), size) is not None
