"""A large block that broke off goes on where it was: in the next try, from the next mirror, in the next process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.errors import ArtifactUnavailable
from kartifacts.fetch import Fetcher
from kartifacts.model.digest import sha256
from kartifacts.testing import Mirror, TinyRepository, faults, tiny_repository

SIZE = 12 << 20
CONTENT = random.Random(8).randbytes(SIZE)  # does not compress
FETCH = """
import sys
from kartifacts import config
from kartifacts.fetch import Fetcher
from kartifacts.model.manifest import decode_lock
from kartifacts.sources import from_settings
from kartifacts.store import Store
settings = config.read({"HOME": sys.argv[3]}, {"mirrors": sys.argv[1], "store": sys.argv[2], "progress": "off"})
fetcher = Fetcher(Store(settings.store), from_settings(settings), settings)
(pin,) = decode_lock(open(sys.argv[4], "rb").read()).releases
(bundle,) = fetcher.bundles(pin)
fetcher.ensure(bundle, bundle.table.kernels)
"""

Make = Callable[..., Fetcher]


@pytest.fixture
def large(tmp_path: Path) -> TinyRepository:
    return tiny_repository(tmp_path / "large", {"large.so": CONTENT})


def partials(store: Path) -> list[Path]:
    return sorted((store / "v1" / "tmp").glob("*"))


def asked(mirror: Mirror, pack: str) -> list[int]:
    """Where each request for the pack began."""
    rows = [request.range for request in mirror.requests if pack in request.path]
    return [int(row.removeprefix("bytes=").partition("-")[0]) if row else 0 for row in rows]


def test_a_killed_process_leaves_what_the_next_one_goes_on_with(large: TinyRepository, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-c", FETCH]
    with Mirror(large.path) as mirror:
        arguments = [mirror.url, str(store), str(tmp_path), str(large.lock)]
        mirror.order(faults.stall(6 << 20), match=large.packs[0], times=1)
        first = subprocess.Popen([*command, *arguments])
        until = time.monotonic() + 20
        while sum(path.stat().st_size for path in partials(store)) < 5 << 20:
            assert time.monotonic() < until
            time.sleep(0.01)
        first.kill()
        first.wait()
        had = sum(path.stat().st_size for path in partials(store))
        mirror.cancel()
        subprocess.run([*command, *arguments], check=True, timeout=60)
        assert asked(mirror, large.packs[0]) == [0, had]
    assert (store / "v1" / "sha256" / sha256(CONTENT)[:2] / f"{sha256(CONTENT)}.so").read_bytes() == CONTENT
    assert partials(store) == []


def test_the_next_mirror_goes_on_where_the_first_broke_off(large: TinyRepository, fetcher: Make) -> None:
    with Mirror(large.path) as bad, Mirror(large.path) as good:
        bad.order(faults.reset(4 << 20), match=large.packs[0])
        one = fetcher(mirrors=f"{bad.url} {good.url}", retries=0)
        (bundle,) = one.bundles(large.pin)
        one.ensure(bundle, bundle.table.kernels)
        (start,) = asked(good, large.packs[0])
        assert start > 1 << 20
        assert partials(one.store.root) == []


def broken_off(mirror: Mirror, large: TinyRepository, fetcher: Make) -> Fetcher:
    """A fetcher whose one try ended in the middle of the block."""
    mirror.order(faults.reset(4 << 20), match=large.packs[0], times=1)
    one = fetcher(mirrors=mirror.url, retries=0)
    (bundle,) = one.bundles(large.pin)
    with pytest.raises(ArtifactUnavailable):
        one.ensure(bundle, bundle.table.kernels)
    return one


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "a flipped byte":
        path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    elif how == "other bytes":
        path.write_bytes(os.urandom(len(content)))
    elif how == "too long":
        path.write_bytes(content + bytes(SIZE))
    elif how == "all, and wrong":
        path.write_bytes(os.urandom(SIZE + 1000))
    elif how == "writable by others":
        path.write_bytes(os.urandom(len(content)))
        path.chmod(0o666)
    elif how == "a link":
        (path.parent / "elsewhere").write_bytes(b"precious")
        path.symlink_to(path.parent / "elsewhere")
    elif how == "another name of a file":
        (path.parent / "elsewhere").write_bytes(b"precious")
        path.hardlink_to(path.parent / "elsewhere")
    elif how == "a pipe":
        os.mkfifo(path)


@pytest.mark.parametrize(
    "how",
    [
        "a flipped byte",
        "other bytes",
        "too long",
        "all, and wrong",
        "writable by others",
        "a link",
        "another name of a file",
        "a pipe",
    ],
)
def test_what_was_kept_and_is_wrong_costs_one_clean_try_and_never_a_wrong_kernel(
    large: TinyRepository, fetcher: Make, how: str
) -> None:
    with Mirror(large.path) as mirror:
        one = broken_off(mirror, large, fetcher)
        (kept,) = partials(one.store.root)
        spoil(kept, how)
        two = fetcher(mirrors=mirror.url)
        (bundle,) = two.bundles(large.pin)
        (path,) = two.ensure(bundle, bundle.table.kernels).values()
        assert path.read_bytes() == CONTENT
        assert len(asked(mirror, large.packs[0])) <= 3
        elsewhere = kept.parent / "elsewhere"
        assert not elsewhere.exists() or elsewhere.read_bytes() == b"precious"
        assert not kept.exists()


def test_a_mirror_that_knows_no_ranges_never_puts_its_beginning_behind_what_was_kept(
    large: TinyRepository, fetcher: Make
) -> None:
    with Mirror(large.path) as mirror:
        broken_off(mirror, large, fetcher)
        mirror.order(faults.ignore_range(), match=large.packs[0])
        two = fetcher(mirrors=mirror.url)
        (bundle,) = two.bundles(large.pin)
        (path,) = two.ensure(bundle, bundle.table.kernels).values()
        assert path.read_bytes() == CONTENT
        assert len(asked(mirror, large.packs[0])) == 2
