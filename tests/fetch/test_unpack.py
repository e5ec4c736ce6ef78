"""Decompression: never past what was declared, and nothing installed that the table does not promise."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
import zstandard

from kartifacts.errors import VerificationError
from kartifacts.fetch.plan import Part
from kartifacts.fetch.unpack import WrongPacking, decompress, unpack
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
        (compress(ONE)[:-5], "ends|cannot be decompressed"),
        (compress(ONE[:50]), "ends after 50 bytes"),
        (b"", "ends after 0 bytes"),
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
    with pytest.raises(WrongPacking, match="sha256"):
        unpack(bomb, part(bomb, len(ONE), entry(ONE, 0)), store, what="a block")
    with pytest.raises(WrongPacking, match="more than the 1000 bytes"):
        decompress(bomb, 1000, what="a table")
    assert memory("VmHWM") - before < 30 << 10


def memory(what: str) -> int:
    """KiB of this process."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_a_table_must_have_exactly_its_size() -> None:
    content = os.urandom(1000)
    assert decompress(compress(content), 1000, what="a table") == content
    assert decompress(compress(b""), 0, what="a table") == b""
    for size in (999, 1001, 0):
        with pytest.raises(VerificationError):
            decompress(compress(content), size, what="a table")
