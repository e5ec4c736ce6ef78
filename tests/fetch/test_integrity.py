"""Bytes: what is installed is what was pinned, whatever sources give."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kartifacts.errors import ArtifactUnavailable, KartifactsError, StoreError, VerificationError
from kartifacts.fetch import Fetcher
from kartifacts.testing import Mirror, TinyRepository, faults, tiny_repository

Make = Callable[..., Fetcher]


def fetch_all(fetcher: Fetcher, repository: TinyRepository) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for bundle in fetcher.bundles(repository.pin):
        found |= fetcher.ensure(bundle, bundle.table.kernels)
    return found


def stored(fetcher: Fetcher) -> set[str]:
    """Every file below the store, whatever it is."""
    return {path.name for path in fetcher.store.root.rglob("*") if not path.is_dir()}


# -- the whole release, or an error ------------------------------------------------------------------------------------


def test_every_listed_file_is_fetched_whatever_its_suffix(
    mirror: Mirror, repository: TinyRepository, files: dict[str, bytes], fetcher: Make
) -> None:
    found = fetch_all(fetcher(mirrors=mirror.url), repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    assert found["b.so"].suffix == ".so"
    assert found["norm/rmsnorm?dtype=bfloat16"].suffix == ""


def test_one_missing_pack_fails_the_fetch_by_name_and_keeps_the_rest(
    tmp_path: Path, files: dict[str, bytes], fetcher: Make
) -> None:
    repository = tiny_repository(tmp_path / "packs", files, kernels_per_block=1, blocks_per_pack=1)
    with Mirror(repository.path) as mirror:
        _pack_of(fetcher(path=str(repository.path)), repository, "b.so").unlink()
        with pytest.raises(ArtifactUnavailable) as caught:
            fetch_all(fetcher(mirrors=mirror.url), repository)
        message = str(caught.value)
        assert "b.so" in message
        assert f"{mirror.url}/blobs/sha256/" in message
        assert "answered 404" in message
        assert message.startswith("b.so in pack "), "and nothing else"
        fetched_before = mirror.count()
        again = fetcher(mirrors=mirror.url)
        with pytest.raises(ArtifactUnavailable):
            fetch_all(again, repository)
        assert mirror.count() - fetched_before == 1, "only what is missing is asked for again"


def _pack_of(fetcher: Fetcher, repository: TinyRepository, uri: str) -> Path:
    (bundle,) = fetcher.bundles(repository.pin)
    entry = next(entry for entry in bundle.table.kernels if entry.uri == uri)
    pack = bundle.manifest.layers[bundle.table.blocks[entry.block].pack]
    return repository.blob(pack.sha256)


def test_everything_that_is_missing_is_named(tmp_path: Path, files: dict[str, bytes], fetcher: Make) -> None:
    repository = tiny_repository(tmp_path / "packs", files, kernels_per_block=1, blocks_per_pack=1)
    whole = fetcher(path=str(repository.path))
    with Mirror(repository.path) as mirror:
        for uri in ("b.so", "c.h"):
            _pack_of(whole, repository, uri).unlink()
        mirror.order(faults.flip(at=5), match=_pack_of(whole, repository, "d").name)
        one = fetcher(mirrors=mirror.url)
        (bundle,) = one.bundles(repository.pin)
        with pytest.raises(VerificationError) as wrong:
            one.ensure(bundle, bundle.table.kernels)
        assert all(f"{uri} in pack" in wrong.value.message for uri in ("b.so", "c.h", "d"))
        with pytest.raises(ArtifactUnavailable) as missing:
            one.ensure(bundle, [entry for entry in bundle.table.kernels if entry.uri != "d"])
        assert all(f"{uri} in pack" in missing.value.message for uri in ("b.so", "c.h"))
        assert len(missing.value.refusals) == 3, "two answers of the mirror, and the store"


def test_no_listing_is_ever_asked_for(mirror: Mirror, repository: TinyRepository, fetcher: Make) -> None:
    fetch_all(fetcher(mirrors=mirror.url), repository)
    assert all(request.path.startswith("/blobs/sha256/") for request in mirror.requests)


def test_one_name_in_two_releases_never_gives_the_others_bytes(tmp_path: Path, fetcher: Make) -> None:
    first = tiny_repository(tmp_path / "both", {"k_sm100f.cubin": b"built from one source"}, version="1")
    second = tiny_repository(tmp_path / "both", {"k_sm100f.cubin": b"built from another"}, version="2")
    for order in ((first, second), (second, first)):
        with Mirror(tmp_path / "both") as mirror:
            one = fetcher(mirrors=mirror.url, store=str(tmp_path / f"store-{order[0].pin.version}"))
            got = {each.pin.version: fetch_all(one, each)["k_sm100f.cubin"].read_bytes() for each in order}
        assert got == {"1": b"built from one source", "2": b"built from another"}


# -- wrong bytes -------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_never_installed_and_clean_tries_are_bounded(
    mirror: Mirror, repository: TinyRepository, files: dict[str, bytes], fetcher: Make
) -> None:
    pack = repository.packs[0]
    mirror.order(faults.flip(at=100), match=pack, times=2)
    found = fetch_all(fetcher(mirrors=mirror.url), repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    assert mirror.count(pack) == 3


@pytest.mark.parametrize("which", ["index", "manifest", "table", "pack"])
def test_a_mirror_that_flips_a_byte_every_time_is_a_typed_error(
    mirror: Mirror, repository: TinyRepository, fetcher: Make, which: str
) -> None:
    blob = {
        "index": repository.pin.sha256,
        "manifest": repository.manifest,
        "table": repository.table,
        "pack": repository.packs[0],
    }[which]
    mirror.order(faults.flip(at=50), match=blob)
    one = fetcher(mirrors=mirror.url)
    with pytest.raises(VerificationError) as caught:
        fetch_all(one, repository)
    assert f"{mirror.url}/blobs/sha256/{blob}" in caught.value.message
    assert caught.value.expected
    assert caught.value.actual
    assert mirror.count(blob) == 3
    assert not any(blob in name for name in stored(one))
    if which == "pack":
        assert len(stored(one)) == 3 + len(_good_blocks(one, repository)), "index, manifest, table"


def _good_blocks(fetcher: Fetcher, repository: TinyRepository) -> list[str]:
    return [
        entry.uri for bundle in fetcher.bundles(repository.pin) for entry in bundle.table.kernels if fetcher.find(entry)
    ]


def test_every_single_flipped_byte_is_noticed(tmp_path: Path, fetcher: Make) -> None:
    repository = tiny_repository(tmp_path / "small", {"a": b"first kernel", "b.so": b"second kernel"})
    blobs = [repository.blob(name) for name in (repository.pin.sha256, repository.manifest, repository.table)]
    for blob in [*blobs, *map(repository.blob, repository.packs)]:
        content = blob.read_bytes()
        for at in range(0, len(content), 1 if len(content) < 200 else 37):
            wrong = bytearray(content)
            wrong[at] ^= 1 << (at % 8)
            blob.write_bytes(wrong)
            store = tmp_path / "stores" / f"{blob.name}-{at}"
            with pytest.raises(VerificationError):
                fetch_all(fetcher(path=str(repository.path), store=str(store)), repository)
        blob.write_bytes(content)
    assert len(fetch_all(fetcher(path=str(repository.path)), repository)) == 2


def test_a_page_behind_a_redirect_sends_us_to_the_next_mirror(
    mirror: Mirror,
    repository: TinyRepository,
    files: dict[str, bytes],
    fetcher: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "nothing").mkdir()
    with Mirror(tmp_path / "nothing") as portal, Mirror(tmp_path / "nothing") as first:
        portal.order(faults.html())
        first.order(faults.redirect(f"{portal.url}/parked"))
        found = fetch_all(fetcher(mirrors=f"{first.url} {mirror.url}"), repository)
        assert {uri: path.read_bytes() for uri, path in found.items()} == files
        assert f"{portal.url}/parked" in caplog.text
        with pytest.raises(VerificationError) as caught:
            fetch_all(fetcher(mirrors=first.url, store=str(tmp_path / "other")), repository)
        assert f"{portal.url}/parked answered 200" in caught.value.message
        assert not (tmp_path / "other").exists() or not any((tmp_path / "other").rglob("*html*"))


def test_the_rest_of_a_range_comes_from_the_next_mirror_after_a_wrong_block(tmp_path: Path, fetcher: Make) -> None:
    files = {f"{number}.cubin": os.urandom(10_000) for number in range(8)}
    repository = tiny_repository(tmp_path / "repository-8", files, kernels_per_block=1)
    with Mirror(repository.path) as bad, Mirror(repository.path) as good:
        bad.order(faults.flip(at=45_000), match=repository.packs[0])
        one = fetcher(mirrors=f"{bad.url} {good.url}")
        found = fetch_all(one, repository)
        assert {uri: path.read_bytes() for uri, path in found.items()} == files
        (request,) = [request for request in good.requests if repository.packs[0] in request.path]
        assert int(request.range.removeprefix("bytes=").partition("-")[0]) > 30_000
        origins = {one.origin_of(entry) for bundle in one.bundles(repository.pin) for entry in bundle.table.kernels}
        assert origins == {bad.url, good.url}


def test_a_manifest_that_was_changed_to_match_changed_bytes_is_refused(
    tmp_path: Path, repository: TinyRepository, files: dict[str, bytes], fetcher: Make
) -> None:
    forged = tiny_repository(tmp_path / "forged", {**files, "b.so": b"evil"})
    shutil.copy(forged.blob(forged.pin.sha256), forged.blob(repository.pin.sha256))
    with Mirror(forged.path) as mirror, pytest.raises(VerificationError):
        fetch_all(fetcher(mirrors=mirror.url), repository)


@pytest.mark.parametrize("fault", [faults.chunked(), faults.gzip()])
def test_sizes_come_from_the_manifest_and_not_from_headers(
    mirror: Mirror, repository: TinyRepository, files: dict[str, bytes], fetcher: Make, fault: faults.Fault
) -> None:
    mirror.order(fault)
    found = fetch_all(fetcher(mirrors=mirror.url), repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files


def test_an_endless_answer_is_read_to_its_size_and_no_further(
    mirror: Mirror, repository: TinyRepository, files: dict[str, bytes], fetcher: Make
) -> None:
    mirror.order(faults.endless())
    one = fetcher(mirrors=mirror.url)
    assert len(fetch_all(one, repository)) == len(files)
    assert one.stats.bytes == sum(path.stat().st_size for path in (repository.path / "blobs" / "sha256").iterdir())


def test_a_mirror_without_ranges_adds_no_garbage(tmp_path: Path, fetcher: Make) -> None:
    files = {f"{number}.cubin": os.urandom(600_000) for number in range(6)}
    repository = tiny_repository(tmp_path / "repository-6", files, kernels_per_block=1)
    with Mirror(repository.path) as mirror:
        mirror.order(faults.ignore_range())
        one = fetcher(mirrors=mirror.url)
        (bundle,) = one.bundles(repository.pin)
        wanted = bundle.table.kernels[1::2]
        found = one.ensure(bundle, wanted)
        assert {uri: path.read_bytes() for uri, path in found.items()} == {
            entry.uri: files[entry.uri] for entry in wanted
        }
        assert any(request.range for request in mirror.requests)


@pytest.mark.parametrize("fault", [faults.reset(40_000), faults.truncate(40_000), faults.stall(40_000)])
def test_a_transfer_that_broke_off_is_resumed_and_checked_as_one(
    mirror: Mirror, repository: TinyRepository, files: dict[str, bytes], fetcher: Make, fault: faults.Fault
) -> None:
    mirror.order(fault, match=repository.packs[0], times=1)
    found = fetch_all(fetcher(mirrors=mirror.url, read_timeout="0.5"), repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files


def test_a_byte_that_was_wrong_before_the_break_is_fetched_anew(
    mirror: Mirror, repository: TinyRepository, files: dict[str, bytes], fetcher: Make
) -> None:
    def wrong_then_broken(answer: faults.Answer) -> None:
        faults.flip(at=10)(answer)
        faults.truncate(40_000)(answer)

    mirror.order(wrong_then_broken, match=repository.packs[0], times=1)
    found = fetch_all(fetcher(mirrors=mirror.url), repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    ranges = [request.range for request in mirror.requests if repository.packs[0] in request.path]
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=40000-")
    assert ranges[2] == "", "what was wrong is thrown away, not patched"


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(path)]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("compressible", [True, False])
def test_a_full_disk_ends_the_fetch_at_once_and_damages_nothing(
    tmp_path: Path, small_disk: Path, fetcher: Make, compressible: bool, caplog: pytest.LogCaptureFixture
) -> None:
    large = bytes(4 << 20) if compressible else os.urandom(4 << 20)
    files = {"a-small": b"small", **{f"{number}.so": large + bytes([number]) for number in range(3)}}
    repository = tiny_repository(tmp_path / "large", files, kernels_per_block=1, blocks_per_pack=1)
    with Mirror(repository.path) as mirror:
        one = fetcher(mirrors=mirror.url, store=str(small_disk / "store"))
        (bundle,) = one.bundles(repository.pin)
        (first,) = (entry for entry in bundle.table.kernels if entry.uri == "a-small")
        small = one.ensure(bundle, [first])
        before = stored(one)
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"No space left on device; need \d+ bytes, \d+ free"):
            one.ensure(bundle, bundle.table.kernels)
        assert time.monotonic() - started < 2
        assert "bytes and" in caplog.text, "a warning comes first"
        wait_for_threads()
        assert stored(one) == before
        assert one.ensure(bundle, [first]) == small
        assert all(mirror.count(pack) <= 1 for pack in repository.packs)


def wait_for_threads() -> None:
    """Until the transfers that were under way have noticed."""
    for thread in threading.enumerate():
        if thread.name == "kartifacts-fetch":
            thread.join()


def test_every_error_that_leaves_is_ours(mirror: Mirror, repository: TinyRepository, fetcher: Make) -> None:
    for fault in (faults.html(), faults.status(500), faults.redirect("{path}"), faults.reset(3), faults.truncate(0)):
        mirror.cancel()
        mirror.order(fault)
        with pytest.raises(KartifactsError):
            fetch_all(fetcher(mirrors=mirror.url, retries="0"), repository)
