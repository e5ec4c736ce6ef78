"""Where kernels are looked for: local first, in place where that is safe, and no socket when offline."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.errors import ArtifactUnavailable, VerificationError
from kartifacts.fetch import Fetcher
from kartifacts.store import Store
from kartifacts.testing import Mirror, TinyRepository, tiny_repository

Make = Callable[..., Fetcher]


def fetch_all(fetcher: Fetcher, repository: TinyRepository) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for bundle in fetcher.bundles(repository.pin):
        found |= fetcher.ensure(bundle, bundle.table.kernels)
    return found


@pytest.fixture
def refusing_host() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def warm(mirror: Mirror, repository: TinyRepository, fetcher: Make) -> Fetcher:
    """A store that holds the whole release."""
    one = fetcher(mirrors=mirror.url)
    fetch_all(one, repository)
    mirror.requests.clear()
    return one


def test_a_warm_store_opens_no_socket_even_online(
    warm: Fetcher, no_sockets: None, repository: TinyRepository, fetcher: Make, files: dict[str, bytes]
) -> None:
    one = fetcher(mirrors="http://127.0.0.1:9")
    assert len(fetch_all(one, repository)) == len(files)
    assert one.stats.requests == 0


def test_offline_a_missing_file_is_an_error_at_once_that_names_every_place(
    warm: Fetcher, no_sockets: None, repository: TinyRepository, fetcher: Make, tmp_path: Path
) -> None:
    one = fetcher(mirrors="http://127.0.0.1:9", path=str(tmp_path / "nothing"), offline="1")
    (bundle,) = one.bundles(repository.pin)
    entry = next(entry for entry in bundle.table.kernels if entry.uri == "b.so")
    one.ensure(bundle, bundle.table.kernels)
    path = one.find(entry)
    assert path is not None
    path.unlink()
    started = time.monotonic()
    with pytest.raises(ArtifactUnavailable) as caught:
        one.ensure(bundle, bundle.table.kernels)
    assert time.monotonic() - started < 1
    message = str(caught.value)
    assert "b.so" in message
    assert str(tmp_path / "nothing") in message
    assert str(one.store.root) in message
    assert "KARTIFACTS_OFFLINE" in message
    assert "kartifacts fetch" in message


def test_offline_and_cold_is_the_same_error(repository: TinyRepository, fetcher: Make, no_sockets: None) -> None:
    with pytest.raises(ArtifactUnavailable, match=r"release tiny 1\.0"):
        fetcher(mirrors="http://127.0.0.1:9", offline="1").bundles(repository.pin)


def test_a_mirror_that_is_down_hides_nothing_that_is_here(
    warm: Fetcher, refusing_host: str, repository: TinyRepository, fetcher: Make, files: dict[str, bytes]
) -> None:
    assert len(fetch_all(fetcher(mirrors=refusing_host), repository)) == len(files)


def test_a_miss_is_not_remembered(
    mirror: Mirror, repository: TinyRepository, fetcher: Make, files: dict[str, bytes], tmp_path: Path
) -> None:
    away = tmp_path / "away"
    shutil.move(repository.blob(repository.packs[0]), away)
    one = fetcher(mirrors=mirror.url)
    for _ in range(2):
        with pytest.raises(ArtifactUnavailable):
            fetch_all(one, repository)
    shutil.move(away, repository.blob(repository.packs[0]))
    assert len(fetch_all(one, repository)) == len(files)


def test_a_directory_is_asked_before_any_mirror(
    mirror: Mirror, repository: TinyRepository, fetcher: Make, files: dict[str, bytes]
) -> None:
    one = fetcher(path=str(repository.path), mirrors=mirror.url)
    found = fetch_all(one, repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    assert mirror.count() == 0
    (bundle,) = one.bundles(repository.pin)
    assert {one.origin_of(entry) for entry in bundle.table.kernels} == {str(repository.path)}
    assert {fetcher(path=str(repository.path)).origin_of(entry) for entry in bundle.table.kernels} == {"store"}


def test_an_unpacked_tree_is_used_in_place_and_nothing_is_written(
    warm: Fetcher, repository: TinyRepository, fetcher: Make, files: dict[str, bytes], tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(warm.store.root, tree)
    one = fetcher(path=str(tree), store=str(tmp_path / "never"))
    found = fetch_all(one, repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    assert all(path.is_relative_to(tree) for path in found.values())
    assert not (tmp_path / "never").exists()


def test_a_wrong_file_in_an_unpacked_tree_is_never_used(
    warm: Fetcher, mirror: Mirror, repository: TinyRepository, fetcher: Make, files: dict[str, bytes], tmp_path: Path
) -> None:
    tree, store = tmp_path / "tree", str(tmp_path / "fresh")
    shutil.copytree(warm.store.root, tree)
    victim = next(path for path in tree.rglob("*.so"))
    content = bytearray(victim.read_bytes())
    content[7] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(content)
    with pytest.raises(VerificationError) as caught:
        fetch_all(fetcher(path=str(tree), store=store), repository)
    assert str(victim) in caught.value.message
    found = fetch_all(fetcher(path=str(tree), store=store, mirrors=mirror.url), repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    assert mirror.count(repository.packs[0]) == 1


def test_an_unpacked_tree_that_others_may_write_is_copied_before_use(
    warm: Fetcher, repository: TinyRepository, fetcher: Make, files: dict[str, bytes], tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(warm.store.root, tree)
    tree.chmod(0o777)
    one = fetcher(path=str(tree), store=str(tmp_path / "fresh"))
    found = fetch_all(one, repository)
    assert {uri: path.read_bytes() for uri, path in found.items()} == files
    assert all(path.is_relative_to(tmp_path / "fresh") for path in found.values())
    victim = next(path for path in tree.rglob("*.so"))
    victim.chmod(0o644)
    victim.write_bytes(bytes(victim.stat().st_size))
    with pytest.raises(VerificationError, match=r"b\.so"):
        fetch_all(fetcher(path=str(tree), store=str(tmp_path / "fresher")), repository)


def test_unchecked_use_is_said_every_time(
    warm: Fetcher, repository: TinyRepository, fetcher: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(warm.store.root, tree)
    one = fetcher(path=str(tree), store=str(tmp_path / "never"), verify="off")
    for _ in range(2):
        caplog.clear()
        fetch_all(one, repository)
        assert caplog.text.count("KARTIFACTS_VERIFY is off") == 5


def test_damaged_metadata_in_the_store_is_fetched_again(
    warm: Fetcher, mirror: Mirror, repository: TinyRepository, fetcher: Make, files: dict[str, bytes]
) -> None:
    for digest in (repository.pin.sha256, repository.manifest, repository.table):
        path = warm.store.path(digest)  # type: ignore[arg-type]
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
        path.chmod(0o444)
    assert len(fetch_all(fetcher(mirrors=mirror.url), repository)) == len(files)
    assert mirror.count() == 3
    assert warm.store.verify().damaged == ()


def test_only_what_is_missing_is_asked_for(mirror: Mirror, repository: TinyRepository, fetcher: Make) -> None:
    one = fetcher(mirrors=mirror.url)
    (bundle,) = one.bundles(repository.pin)
    one.ensure(bundle, bundle.table.kernels[:1])
    first = next(request for request in mirror.requests if repository.packs[0] in request.path)
    assert first.range.startswith("bytes=0-")
    assert one.missing_bytes(bundle, bundle.table.kernels[:2]) > 0
    one.ensure(bundle, bundle.table.kernels)
    assert one.missing_bytes(bundle, bundle.table.kernels) == 0
    assert mirror.count(repository.packs[0]) == 2


def test_an_upgrade_moves_only_what_changed(tmp_path: Path, fetcher: Make) -> None:
    files = {f"{number:02}.cubin": os.urandom(20_000) for number in range(10)}
    old = tiny_repository(tmp_path / "repository-2", files, version="1", kernels_per_block=1)
    new = tiny_repository(tmp_path / "repository-2", {**files, "04.cubin": b"new"}, version="2", kernels_per_block=1)
    with Mirror(old.path) as mirror:
        one = fetcher(mirrors=mirror.url)
        fetch_all(one, old)
        before = one.stats.bytes
        fetch_all(one, new)
        assert one.stats.bytes - before < 10_000


def test_progress_adds_up_to_what_was_missing(mirror: Mirror, repository: TinyRepository, fetcher: Make) -> None:
    one = fetcher(mirrors=mirror.url)
    (bundle,) = one.bundles(repository.pin)
    expected = one.missing_bytes(bundle, bundle.table.kernels)
    told: list[int] = []
    one.ensure(bundle, bundle.table.kernels, progress=told.append)
    assert sum(told) == expected == repository.blob(repository.packs[0]).stat().st_size
    one.ensure(bundle, bundle.table.kernels, progress=told.append)
    assert sum(told) == expected


def test_a_bar_is_shown_when_asked_for_and_not_without_a_terminal(
    mirror: Mirror, repository: TinyRepository, fetcher: Make, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for progress, shown in (("auto", False), ("on", True)):
        fetch_all(fetcher(mirrors=mirror.url, progress=progress, store=str(tmp_path / progress)), repository)
        assert ("tiny 1.0 demo any" in capfd.readouterr().err) == shown


def test_a_store_that_cannot_keep_metadata_still_answers_questions(
    mirror: Mirror, repository: TinyRepository, fetcher: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    one = fetcher(mirrors=mirror.url, store=str(tmp_path / "file"))
    (bundle,) = one.bundles(repository.pin)
    assert len(bundle.table.kernels) == 5
    assert str(tmp_path / "file") in caplog.text


def test_the_stores_of_two_fetchers_are_one(warm: Fetcher, repository: TinyRepository, fetcher: Make) -> None:
    assert Store(warm.store.root).verify().entries == 5 + 3
