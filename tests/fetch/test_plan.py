"""The plan: every wanted block once, nothing read far beside, ranges of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.fetch.plan import GAP, RANGE_BLOCKS, RANGE_BYTES, Want, plan, shortcuts
from kartifacts.model.manifest import (
    ARTIFACT_BUNDLE,
    MEDIA_MANIFEST,
    MEDIA_PACK,
    MEDIA_TABLE,
    Block,
    BundleManifest,
    Delta,
    Descriptor,
    KernelEntry,
    Table,
)

SHA = "0" * 64


def bundle(lengths: Sequence[Sequence[int]], per_block: int = 2) -> tuple[BundleManifest, Table]:
    """A bundle of packs whose blocks have these compressed lengths, with `per_block` kernels in each."""
    blocks: list[Block] = []
    kernels: list[KernelEntry] = []
    for pack, row in enumerate(lengths):
        offset = 0
        for length in row:
            for number in range(per_block):
                uri = f"{pack}/{len(blocks)}/{number}"
                kernels.append(
                    KernelEntry(uri=uri, sha256=f"{len(kernels):064x}", size=1, block=len(blocks), offset=number)
                )
            blocks.append(Block(pack, offset, length, 10, SHA))
            offset += length
    manifest = BundleManifest(
        schema_version=2,
        media_type=MEDIA_MANIFEST,
        artifact_type=ARTIFACT_BUNDLE,
        config=Descriptor(media_type=MEDIA_TABLE, digest=SHA, size=1),
        layers=[
            Descriptor(media_type=MEDIA_PACK, digest=f"{number:064x}", size=sum(row))
            for number, row in enumerate(lengths)
        ],
    )
    table = Table(version=1, library="l", family="f", arch="any", abi="none", blocks=blocks, kernels=kernels)
    return manifest, table


@pytest.mark.parametrize("length", [10_000, 100_000, 300_000, 700_000, 1_000_000])
@pytest.mark.parametrize("threads", [1, 2, 8, 64])
def test_a_bundle_of_thousands_of_kernels_is_a_few_requests(length: int, threads: int) -> None:
    manifest, table = bundle([[length + 1013 * number for number in range(47)]], per_block=64)
    assert len(table.kernels) == 3008
    assert len(plan([Want(manifest, table, table.kernels)], threads=threads)) <= 7  # and three for the tables


def test_every_thread_has_something_to_do() -> None:
    manifest, table = bundle([[900_000] * 30])
    found = plan([Want(manifest, table, table.kernels)], threads=4)
    assert len(found) == 4
    assert max(row.length for row in found) < 1.5 * min(row.length for row in found)


def test_one_kernel_is_its_block_and_no_more() -> None:
    manifest, table = bundle([[1000, 2000, 3000]])
    (found,) = plan([Want(manifest, table, [table.kernels[2]])])
    assert (found.start, found.length, found.wanted) == (1000, 2000, 2000)
    assert [entry.uri for entry in found.parts[0].kernels] == ["0/1/0"]


def test_a_gap_is_read_over_if_it_is_cheaper_than_another_request() -> None:
    for gap, requests in ((GAP, 1), (GAP + 1, 2)):
        manifest, table = bundle([[1000, gap, 1000]])
        found = plan([Want(manifest, table, [table.kernels[0], table.kernels[4]])])
        assert len(found) == requests
        assert sum(part.wanted for part in found) == 2000


def test_content_that_stands_under_two_names_is_written_once() -> None:
    manifest, table = bundle([[1000]], per_block=1)
    again = KernelEntry(uri="again", sha256=table.kernels[0].sha256, size=1, block=0, offset=0)
    other_suffix = KernelEntry(uri="so", sha256=table.kernels[0].sha256, size=1, block=0, offset=0, suffix=".so")
    (found,) = plan([Want(manifest, table, [table.kernels[0], again, other_suffix])])
    assert sorted(entry.suffix for entry in found.parts[0].kernels) == ["", ".so"]


def changed(count: int, *, length: int) -> tuple[BundleManifest, Table]:
    """Two blocks of `count` kernels; for each of them a delta of `length` in another pack."""
    manifest, table = bundle([[1000, 1000], [length * 2 * count]], per_block=count)
    kernels = [
        msgspec.structs.replace(entry, delta=Delta(1, number * length, length, SHA, f"{number:064x}", 5))
        for number, entry in enumerate(table.kernels[: 2 * count])
    ]
    return manifest, msgspec.structs.replace(table, kernels=kernels)


def test_a_kernel_whose_forerunner_is_here_is_made_from_it() -> None:
    manifest, table = changed(4, length=10)
    quick, rest = shortcuts([Want(manifest, table, table.kernels[:3])], lambda delta: Path(delta.base))
    assert rest == []
    (found,) = quick
    assert (found.start, found.length) == (0, 30)
    assert [part.kernels[0].uri for part in found.parts] == [entry.uri for entry in table.kernels[:3]]
    assert [part.base for part in found.parts] == [Path(f"{number:064x}") for number in range(3)]


@pytest.mark.parametrize("why", ["one is not here", "they are longer than the block"])
def test_a_block_that_is_needed_anyway_is_not_fetched_twice(why: str) -> None:
    manifest, table = changed(4, length=10 if why == "one is not here" else 400)
    lost = f"{2:064x}" if why == "one is not here" else ""
    want = Want(manifest, table, table.kernels[:4])
    quick, rest = shortcuts([want], lambda delta: None if delta.base == lost else Path(delta.base))
    assert quick == []
    assert rest == [want]
    assert sum(row.wanted for row in plan(rest)) == 1000


@given(
    st.lists(st.lists(st.sampled_from([1, 1000, 600_000, 5_000_000, 40_000_000]), min_size=1, max_size=80), max_size=4),
    st.data(),
)
def test_every_wanted_block_is_read_once_and_ranges_are_bounded(lengths: list[list[int]], data: st.DataObject) -> None:
    manifest, table = bundle(lengths, per_block=1)
    wanted = [kernel for kernel in table.kernels if data.draw(st.booleans())]
    found = plan([Want(manifest, table, wanted)])
    read = [entry.uri for row in found for part in row.parts for entry in part.kernels]
    assert sorted(read) == sorted(entry.uri for entry in wanted)
    for row in found:
        assert row.length <= RANGE_BYTES or len(row.parts) == 1
        assert len(row.parts) <= RANGE_BLOCKS
        assert row.start + row.length <= row.pack.size
        for before, after in zip(row.parts, row.parts[1:], strict=False):
            assert 0 <= after.block.offset - before.end <= GAP
