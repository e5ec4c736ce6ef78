"""How two releases differ is read from what they hold, and what is the same in each kernel is not passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts.build.difference import differences
from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.publish.changes import Scope, releases
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository

Packed = Callable[..., Repository]
KERNEL = PackInput(
    uri="norm/scale", path=Path(), suffix=".so", key="a" * 64, exports=("scale",), needs={"glibc": "2.28"}
)


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    """A repository with one release of one bundle: a kernel of these bytes, and one that is always the same."""

    def make(content: bytes = b"code", *, level: int = 9, other: str = "norm/other", **changes: object) -> Repository:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        (place / "kernel").write_bytes(content)
        (place / "other").write_bytes(b"the same")
        entries = [
            dataclasses.replace(KERNEL, path=place / "kernel", **changes),  # type: ignore[arg-type]
            dataclasses.replace(KERNEL, path=place / "other", uri=other, key="c" * 64),
        ]
        told = {"library": "demo", "family": "norm", "arch": "9.0a", "abi": "tvm-ffi-0.1", "toolchain": {"kind": "cxx"}}
        bundle = pack_bundle(entries, place / "out", level=level, **told)  # type: ignore[arg-type]
        make_release(place / "out", "demo", "1.0", [bundle])
        return Repository(place / "out")

    return make


def told(first: Repository, second: Repository, depth: int = 1) -> Iterator[str]:
    start = "release demo: bundle norm for 9.0a: "
    for row in releases(first, second, Scope(depth), differences):
        yield str(row).removeprefix(start)


def test_the_same_kernels_are_the_same_release(packed: Packed) -> None:
    assert [*told(packed(), packed())] == []


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (
            {"content": b"c0de"},
            [
                "norm/scale: other bytes under the same key aaaaaaaaaaaa: the build is not reproducible",
                "norm/scale: file: 1 of 4 bytes differ, the first at byte 1",
            ],
        ),
        (
            {"content": b"c0de", "key": "b" * 64},
            [
                "norm/scale: compiled otherwise, as its key does: aaaaaaaaaaaa became bbbbbbbbbbbb",
                "norm/scale: file: 1 of 4 bytes differ, the first at byte 1",
            ],
        ),
        ({"key": "b" * 64}, ["keys: 1 kernels have other keys and the same bytes"]),
        ({"exports": ("scale", "shift")}, ["norm/scale: exports: scale became scale, shift"]),
        ({"needs": {"glibc": "2.34"}}, ["norm/scale: needs glibc: 2.28 became 2.34"]),
        ({"uri": "norm/shift"}, ["kernels: without 'norm/scale'", "kernels: with 'norm/shift'"]),
    ],
)
def test_what_changed_in_a_kernel_is_told(packed: Packed, changes: dict[str, object], rows: list[str]) -> None:
    found = told(packed(), packed(**changes))
    assert [row.partition("; one of them is no sound ELF file")[0] for row in found] == rows


def test_kernels_that_were_packed_otherwise_are_told_from_kernels_that_are_others(packed: Packed) -> None:
    content = b"".join(number.to_bytes(4, "little") * 3 for number in range(3000))
    [row] = told(packed(content, level=1), packed(content, level=19))
    assert row.startswith("packs: 1 blocks in 1 packs, compressed otherwise; earlier releases lend blocks")


def test_only_as_many_kernels_are_unpacked_as_were_asked_for(packed: Packed) -> None:
    first, second = packed(b"code"), packed(b"c0de")
    assert [row.partition(":")[0] for row in told(first, second, depth=0)] == ["norm/scale", "bytes"]
    assert [row.partition(":")[0] for row in told(first, second, depth=1)] == ["norm/scale", "norm/scale"]
