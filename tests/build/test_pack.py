"""What `pack_bundle` writes, decoded again by nothing but the model and zstandard."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.build.reuse import Earlier
from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import BundleManifest, Descriptor, Table, decode_bundle, decode_table


def pack(entries: list[PackInput], out: Path, **options: Any) -> Descriptor:
    settings: dict[str, Any] = {
        "library": "demo",
        "family": "norm",
        "arch": "9.0a",
        "abi": "tvm-ffi-0.1",
        "toolchain": {"kind": "nvcc", "version": "13.0.88"},
    }
    return pack_bundle(entries, out, **(settings | options))


def blob(out: Path, descriptor: Descriptor) -> bytes:
    data = (out / "blobs" / "sha256" / descriptor.sha256).read_bytes()
    assert len(data) == descriptor.size
    assert sha256(data) == descriptor.sha256
    return data


def opened(out: Path, descriptor: Descriptor) -> tuple[BundleManifest, Table]:
    bundle = decode_bundle(blob(out, descriptor))
    raw_size = int(bundle.config.note("raw-size"))
    raw = zstandard.ZstdDecompressor().decompress(blob(out, bundle.config), max_output_size=raw_size)
    assert len(raw) == raw_size
    return bundle, decode_table(raw, bundle)


def unpacked(out: Path, descriptor: Descriptor) -> dict[str, bytes]:
    """Every kernel by uri, each read as a client does: one range, hashed, then decompressed within its bound."""
    bundle, table = opened(out, descriptor)
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    packs = [blob(out, layer) for layer in bundle.layers]
    blocks = []
    for block in table.blocks:
        frame = packs[block.pack][block.offset : block.offset + block.length]
        assert sha256(frame) == block.sha256
        assert zstandard.frame_content_size(frame) == block.size
        blocks.append(reader.decompress(frame, max_output_size=block.size))
    kernels = {entry.uri: blocks[entry.block][entry.offset : entry.offset + entry.size] for entry in table.kernels}
    assert {entry.uri: entry.sha256 for entry in table.kernels} == {uri: sha256(data) for uri, data in kernels.items()}
    return kernels


@pytest.fixture
def kernels(tmp_path: Path) -> list[PackInput]:
    """Forty files of 0 to 60 KB; neighbours are alike, and no order is kept."""
    chance = random.Random(3)
    common = chance.randbytes(40_000)
    folder = tmp_path / "kernels"
    folder.mkdir()
    made = []
    for number in range(40):
        path = folder / f"k{number}.so"
        path.write_bytes(common[: number * 1000] + chance.randbytes(number * 500))
        made.append(PackInput(f"norm/k?n={number}", path, suffix=".so", exports=("f",), needs={"glibc": "2.34"}))
    chance.shuffle(made)
    return made


def tree(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


# -- round trip --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_bytes", "pack_bytes"), [(1, 1), (100_000, 150_000), (8 << 20, 64 << 20)])
def test_every_kernel_comes_back_whatever_the_blocks(
    kernels: list[PackInput], tmp_path: Path, block_bytes: int, pack_bytes: int
) -> None:
    made = pack(kernels, tmp_path / "out", block_bytes=block_bytes, pack_bytes=pack_bytes)
    assert unpacked(tmp_path / "out", made) == {entry.uri: entry.path.read_bytes() for entry in kernels}
    bundle, table = opened(tmp_path / "out", made)
    assert all(layer.size <= pack_bytes for layer in bundle.layers) or block_bytes == 1
    assert sorted(entry.uri for entry in table.kernels) == sorted(entry.uri for entry in kernels)


def test_the_table_says_all_that_the_input_said(kernels: list[PackInput], tmp_path: Path) -> None:
    told = PackInput(
        "norm/z", kernels[0].path, ".so", key="1" * 64, op_digest="2" * 64, exports=["b", "a"], needs={"cudart": "13"}
    )
    made = pack([*kernels, told], tmp_path)
    entry = opened(tmp_path, made)[1].kernels[-1]
    assert (entry.uri, entry.suffix, entry.key, entry.op_digest) == ("norm/z", ".so", "1" * 64, "2" * 64)
    assert (entry.exports, entry.needs) == (["b", "a"], {"cudart": "13"})


def test_manifest_and_descriptor_carry_the_same_notes(kernels: list[PackInput], tmp_path: Path) -> None:
    made = pack(kernels, tmp_path)
    bundle, table = opened(tmp_path, made)
    assert made.annotations == bundle.annotations
    assert made.note("arch") == table.arch == "9.0a"
    assert made.note("toolchain") == "kind=nvcc version=13.0.88"
    assert made.note("kernels") == "40"
    assert int(made.note("raw-size")) == sum(entry.path.stat().st_size for entry in kernels)


def test_the_same_kernels_give_the_same_bytes_in_any_order_and_with_any_number_of_threads(
    kernels: list[PackInput], tmp_path: Path
) -> None:
    first = pack(kernels, tmp_path / "a", block_bytes=50_000, pack_bytes=200_000, jobs=1)
    second = pack(sorted(kernels, key=str), tmp_path / "b", block_bytes=50_000, pack_bytes=200_000, jobs=4)
    assert first == second
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_only_named_readable_blobs_are_left(kernels: list[PackInput], tmp_path: Path) -> None:
    pack(kernels, tmp_path / "out", pack_bytes=100_000)
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert path.name == sha256(path.read_bytes())
            assert path.stat().st_mode & 0o777 == 0o644


def moved_away(path: Path) -> None:
    path.symlink_to(path.rename(path.parent / "elsewhere"))


BLOB_DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "other bytes": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "unreadable to others": lambda path: path.chmod(0o600),
    "a link": moved_away,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", BLOB_DAMAGE)
def test_only_blobs_that_are_not_there_whole_are_written_again(
    kernels: list[PackInput], tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    first = pack(kernels, out)
    blobs = sorted((out / "blobs/sha256").iterdir())
    before = {path: path.stat().st_ino for path in blobs}
    content = {path: path.read_bytes() for path in blobs}
    damaged = blobs[0]
    BLOB_DAMAGE[damage](damaged)
    assert pack(kernels, out) == first
    (out / "blobs/sha256/elsewhere").unlink(missing_ok=True)
    assert sorted((out / "blobs/sha256").iterdir()) == blobs
    assert {path: path.read_bytes() for path in blobs} == content
    assert {path.lstat().st_mode for path in blobs} == {0o100644}
    assert all(path.stat().st_ino == before[path] for path in blobs if path != damaged)


def test_neighbours_share_their_block(kernels: list[PackInput], tmp_path: Path) -> None:
    solid = pack(kernels, tmp_path / "solid")
    single = pack(kernels, tmp_path / "single", block_bytes=1)
    sizes = [
        sum(layer.size for layer in opened(tmp_path / name, made)[0].layers)
        for name, made in (("solid", solid), ("single", single))
    ]
    assert sizes[0] < 0.6 * sizes[1]


def test_progress_ends_at_the_total(kernels: list[PackInput], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    pack(kernels, tmp_path, block_bytes=100_000, progress=lambda done, total: told.append((done, total)))
    total = sum(entry.path.stat().st_size for entry in kernels)
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert len(told) > 5


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_bundle_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one kernel"):
        pack([], tmp_path)


def test_two_files_of_one_name_are_refused(kernels: list[PackInput], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"two files want the name 'norm/k\?n=3'"):
        pack([*kernels, PackInput("norm/k?n=3", kernels[0].path)], tmp_path)


@pytest.mark.parametrize("uri", ["../x", "/x", "a//b", "", "a/../b", "con", "a b", "x\n"])
def test_a_name_that_could_leave_the_tree_is_refused(kernels: list[PackInput], tmp_path: Path, uri: str) -> None:
    with pytest.raises(VerificationError, match="not a safe relative path"):
        pack([PackInput(uri, kernels[0].path)], tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"arch": "sm_90a"}, {"arch": "9.9x"}, {"library": "A"}, {"abi": "x y"}, {"level": 0}, {"block_bytes": 0}]
)
def test_what_no_reader_would_take_is_not_written(
    kernels: list[PackInput], tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        pack(kernels, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_a_typed_error(kernels: list[PackInput], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe"):
        with pytest.raises(StoreError, match=r"cannot read|not a regular file"):
            pack([*kernels, PackInput("x", path)], tmp_path / "out")


def test_an_output_that_cannot_be_written_is_a_typed_error(kernels: list[PackInput], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StoreError, match="cannot write the repository"):
        pack(kernels, tmp_path / "out")


def test_a_full_disk_is_a_typed_error_and_leaves_no_litter(kernels: list[PackInput], tmp_path: Path) -> None:
    code = f"""
import resource, signal
from pathlib import Path
from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
entries = [PackInput(path.name, path) for path in Path({str(kernels[0].path.parent)!r}).iterdir()]
try:
    out = Path({str(tmp_path / "out")!r})
    pack_bundle(entries, out, library="d", family="n", arch="any", abi="none", toolchain={{}})
except StoreError as error:
    print("typed:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("typed: cannot write the repository")
    assert tree(tmp_path / "out") == {}


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite", "replace", "remove"])
def test_a_file_that_changes_while_it_is_packed_is_never_published(
    kernels: list[PackInput], tmp_path: Path, change: str
) -> None:
    victim = max(kernels, key=lambda entry: entry.uri).path

    def interfere(done: int, total: int) -> None:
        if victim.exists() and victim.stat().st_mtime_ns != 1:
            content = victim.read_bytes()
            if change == "grow":
                victim.write_bytes(content + b"x")
            elif change == "shrink":
                victim.write_bytes(content[:-1])
            elif change == "rewrite":
                victim.write_bytes(bytes(len(content)))
            elif change == "replace":
                os.replace(kernels[0].path, victim)
            else:
                victim.unlink()
                return
            os.utime(victim, ns=(1, 1))

    # One block at a time, and blocks so large that the victim's is not read before the first is done.
    for entry in kernels:
        if entry.path != victim:
            entry.path.write_bytes(bytes(5_000_000))
    with pytest.raises((VerificationError, StoreError), match=r"changed while it was packed|cannot read"):
        pack(kernels, tmp_path / "out", block_bytes=1, jobs=1, level=1, progress=interfere)
    assert not any(path.name.startswith(".") for path in (tmp_path / "out" / "blobs" / "sha256").iterdir())


def test_content_that_is_not_what_was_promised_is_refused(kernels: list[PackInput], tmp_path: Path) -> None:
    good = sha256(kernels[0].path.read_bytes())
    pack([PackInput("x", kernels[0].path, sha256=good)], tmp_path / "good")
    with pytest.raises(VerificationError, match="not what was promised"):
        pack([PackInput("x", kernels[1].path, sha256=good)], tmp_path / "bad")


def test_a_large_file_is_packed_in_bounded_memory(tmp_path: Path) -> None:
    size = 400 << 20
    code = f"""
import random, re
from pathlib import Path
from kartifacts.build.pack import PackInput, pack_bundle
piece = random.Random(1).randbytes(1 << 20)
with open("large", "wb") as file:
    for _ in range({size >> 20}):
        file.write(piece)
for number in range(12):
    Path(f"small{{number}}").write_bytes(random.Random(number).randbytes(6 << 20))
entries = [PackInput(name, Path(name)) for name in ["large", *(f"small{{n}}" for n in range(12))]]
pack_bundle(entries, Path("out"), library="d", family="n", arch="any", abi="none", toolchain={{}}, jobs=2)
# Not ru_maxrss, which a process takes over from the one that started it.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(done.stdout) < 300


# -- an order that brings together what is alike -----------------------------------------------------------------------


def families(folder: Path, name: str) -> list[PackInput]:
    """Sixty kernels of four kinds, named so that only their last word, or only their size, tells the kind."""
    chance = random.Random(5)
    stock = [chance.randbytes(30_000 + kind * 100) for kind in range(4)]
    folder.mkdir()
    made = []
    for number in range(60):
        kind = number % 4
        path = folder / name.format(number=f"{chance.getrandbits(64):016x}", kind="ABCD"[kind])
        path.write_bytes(stock[kind])
        made.append(PackInput(path.name, path))
    return made


@pytest.mark.parametrize("name", ["k{number}Kind{kind}.cubin", "{number}.cubin", "{kind}{number}.cubin"])
def test_kernels_that_are_alike_meet_in_a_block_however_they_are_named(tmp_path: Path, name: str) -> None:
    made = pack(families(tmp_path / "kernels", name), tmp_path / "out", block_bytes=500_000)
    bundle, _ = opened(tmp_path / "out", made)
    # Four kinds of 30 KB that do not compress; sorted by a name that says nothing, each of four blocks held all four.
    assert sum(layer.size for layer in bundle.layers) < 300_000


def test_what_compresses_badly_does_not_make_one_kernel_cost_a_whole_group(tmp_path: Path) -> None:
    chance = random.Random(6)
    entries = []
    for number in range(40):
        path = tmp_path / f"noise{number}"
        path.write_bytes(chance.randbytes(200_000))
        entries.append(PackInput(path.name, path))
    _, table = opened(tmp_path / "out", pack(entries, tmp_path / "out"))
    assert max(block.length for block in table.blocks) <= 1 << 20
    assert len(table.blocks) <= 16
    assert len(unpacked(tmp_path / "out", pack(entries, tmp_path / "out"))) == 40


# -- what an earlier release holds -------------------------------------------------------------------------------------


def many(folder: Path, count: int = 200) -> list[PackInput]:
    """Kernels that share most of their bytes, as those of one op do."""
    chance = random.Random(9)
    common = chance.randbytes(20_000)
    folder.mkdir()
    made = []
    for number in range(count):
        path = folder / f"k{number}.so"
        path.write_bytes(common + chance.randbytes(2_000) + number.to_bytes(4, "big"))
        made.append(PackInput(f"norm/k?n={number}", path, ".so", key=sha256(path.name.encode())))
    return made


def earlier(out: Path, made: Descriptor) -> Earlier:
    return Earlier(out, *opened(out, made))


def change(entries: list[PackInput], numbers: list[int]) -> None:
    for number in numbers:
        path = entries[number].path
        path.write_bytes(path.read_bytes()[:-100] + random.Random(number).randbytes(100))


def test_nothing_changed_gives_the_same_bundle_and_no_new_pack(tmp_path: Path) -> None:
    entries = many(tmp_path / "kernels")
    first = pack(entries, tmp_path / "out", block_bytes=300_000)
    before = tree(tmp_path / "out")
    again = pack(entries, tmp_path / "out", block_bytes=300_000, earlier=[earlier(tmp_path / "out", first)])
    assert again == first
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("place", ["same", "another"])
def test_one_changed_kernel_in_a_hundred_makes_few_new_bytes(tmp_path: Path, place: str) -> None:
    entries = many(tmp_path / "kernels")
    old = tmp_path / "old"
    first = pack(entries, old, block_bytes=300_000)
    change(entries, [17, 120])
    new = old if place == "same" else tmp_path / "new"
    second = pack(entries, new, block_bytes=300_000, earlier=[earlier(old, first)])
    was, now = opened(old, first)[0], opened(new, second)[0]
    known = {layer.digest for layer in was.layers}
    assert known <= {layer.digest for layer in now.layers}
    fresh = sum(layer.size for layer in now.layers if layer.digest not in known)
    assert fresh < 0.12 * sum(layer.size for layer in was.layers)
    assert set(unpacked(new, second)) == {entry.uri for entry in entries}
    table = opened(new, second)[1]
    deltas = {entry.uri: entry for entry in table.kernels if entry.delta is not None}
    assert set(deltas) == {"norm/k?n=17", "norm/k?n=120"}
    held = unpacked(old, first)
    for uri, entry in deltas.items():
        delta = entry.delta
        assert delta is not None
        assert delta.base == sha256(held[uri])
        frame = blob(new, now.layers[delta.pack])[delta.offset : delta.offset + delta.length]
        assert sha256(frame) == delta.sha256
        assert delta.length < 500
        given = zstandard.ZstdCompressionDict(held[uri], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        assert sha256(zstandard.ZstdDecompressor(dict_data=given).decompress(frame)) == entry.sha256


def test_old_blocks_do_not_pile_up_for_ever(tmp_path: Path) -> None:
    entries = many(tmp_path / "kernels", 100)
    out = tmp_path / "out"
    made = pack(entries, out, block_bytes=300_000)
    alone = sum(block.length for block in opened(out, made)[1].blocks)
    for step in range(12):
        change(entries, [(step * 7 + number * 3) % 100 for number in range(6)])
        made = pack(entries, out, block_bytes=300_000, earlier=[earlier(out, made)])
        assert set(unpacked(out, made)) == {entry.uri for entry in entries}
        assert sum(block.length for block in opened(out, made)[1].blocks) < 2 * alone


def test_what_is_said_of_a_kernel_is_said_anew_though_its_bytes_are_old(tmp_path: Path) -> None:
    entries = many(tmp_path / "kernels", 20)
    first = pack(entries, tmp_path / "out")
    renamed = [replace(entry, key="ab" * 32, exports=("g",), needs={"glibc": "2.17"}) for entry in entries]
    second = pack(renamed, tmp_path / "out", earlier=[earlier(tmp_path / "out", first)])
    bundle, table = opened(tmp_path / "out", second)
    assert bundle.layers == opened(tmp_path / "out", first)[0].layers
    assert {(entry.key, *entry.exports, entry.needs["glibc"]) for entry in table.kernels} == {("ab" * 32, "g", "2.17")}


@pytest.mark.parametrize("fault", ["a damaged block", "a missing pack"])
def test_an_earlier_release_that_is_damaged_is_never_passed_on(tmp_path: Path, fault: str) -> None:
    entries = many(tmp_path / "kernels", 20)
    old = tmp_path / "old"
    first = pack(entries, old)
    held = earlier(old, first)
    layer = old / "blobs" / "sha256" / held.manifest.layers[0].sha256
    if fault == "a missing pack":
        layer.unlink()
    else:
        layer.chmod(0o644)
        content = bytearray(layer.read_bytes())
        content[len(content) // 2] ^= 1
        layer.write_bytes(content)
    with pytest.raises((VerificationError, StoreError)):
        pack(entries, tmp_path / "new", earlier=[held])
    assert not list((tmp_path / "new").rglob(".partial-*"))


@pytest.mark.parametrize("changed", [1, 3, 8])
def test_a_bundle_too_small_to_keep_a_block_still_says_how_to_get_from_the_old_kernels_to_the_new(
    tmp_path: Path, changed: int
) -> None:
    entries = many(tmp_path / "kernels", 9)
    out = tmp_path / "out"
    held = earlier(out, pack(entries, out))
    change(entries, list(range(changed)))
    second = pack(entries, out, earlier=[held])
    bundle, table = opened(out, second)
    assert {entry.uri for entry in table.kernels if entry.delta is not None} == {
        f"norm/k?n={number}" for number in range(changed)
    }
    ways = sum(entry.delta.length for entry in table.kernels if entry.delta is not None)
    assert ways < 0.2 * sum(block.length for block in table.blocks)
    assert len(bundle.layers) == (3 if changed < 3 else 2)  # the old one, where it is kept, the new one, the deltas
    assert set(unpacked(out, second)) == {entry.uri for entry in entries}
