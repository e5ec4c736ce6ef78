"""The plan: every wanted block once, nothing read far beside, ranges of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kartifacts.fetch.plan import GAP, RANGE_BLOCKS, RANGE_BYTES, plan
from kartifacts.model.manifest import (
    ARTIFACT_BUNDLE,
    MEDIA_MANIFEST,
    MEDIA_PACK,
    MEDIA_TABLE,
    Block,
    BundleManifest,
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
        layers=[Descriptor(media_type=MEDIA_PACK, digest=SHA, size=sum(row)) for row in lengths],
    )
    table = Table(version=1, library="l", family="f", arch="any", abi="none", blocks=blocks, kernels=kernels)
    return manifest, table


def test_a_bundle_of_thousands_of_kernels_is_a_few_requests() -> None:
    manifest, table = bundle([[300_000] * 47], per_block=64)
    assert len(table.kernels) == 3008
    assert len(plan(manifest, table, table.kernels)) <= 3


def test_one_kernel_is_its_block_and_no_more() -> None:
    manifest, table = bundle([[1000, 2000, 3000]])
    (found,) = plan(manifest, table, [table.kernels[2]])
    assert (found.start, found.length, found.wanted) == (1000, 2000, 2000)
    assert [entry.uri for entry in found.parts[0].kernels] == ["0/1/0"]


def test_a_gap_is_read_over_if_it_is_cheaper_than_another_request() -> None:
    for gap, requests in ((GAP, 1), (GAP + 1, 2)):
        manifest, table = bundle([[1000, gap, 1000]])
        found = plan(manifest, table, [table.kernels[0], table.kernels[4]])
        assert len(found) == requests
        assert sum(part.wanted for part in found) == 2000


def test_content_that_stands_under_two_names_is_written_once() -> None:
    manifest, table = bundle([[1000]], per_block=1)
    again = KernelEntry(uri="again", sha256=table.kernels[0].sha256, size=1, block=0, offset=0)
    other_suffix = KernelEntry(uri="so", sha256=table.kernels[0].sha256, size=1, block=0, offset=0, suffix=".so")
    (found,) = plan(manifest, table, [table.kernels[0], again, other_suffix])
    assert sorted(entry.suffix for entry in found.parts[0].kernels) == ["", ".so"]


@given(
    st.lists(st.lists(st.sampled_from([1, 1000, 600_000, 5_000_000, 40_000_000]), min_size=1, max_size=80), max_size=4),
    st.data(),
)
def test_every_wanted_block_is_read_once_and_ranges_are_bounded(lengths: list[list[int]], data: st.DataObject) -> None:
    manifest, table = bundle(lengths, per_block=1)
    wanted = [kernel for kernel in table.kernels if data.draw(st.booleans())]
    found = plan(manifest, table, wanted)
    read = [entry.uri for row in found for part in row.parts for entry in part.kernels]
    assert sorted(read) == sorted(entry.uri for entry in wanted)
    for row in found:
        assert row.length <= RANGE_BYTES or len(row.parts) == 1
        assert len(row.parts) <= RANGE_BLOCKS
        assert row.start + row.length <= row.pack.size
        for before, after in zip(row.parts, row.parts[1:], strict=False):
            assert 0 <= after.block.offset - before.end <= GAP
