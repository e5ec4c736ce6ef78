"""Who has an earlier release fetches what changed and little more, and never gets less than who has not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.build.reuse import Earlier
from kartifacts.errors import VerificationError
from kartifacts.fetch import Bundle, Fetcher
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Pin
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository
from kartifacts.testing import Mirror, faults

COUNT, CHANGED = 300, (31, 117, 204)  # one in a hundred

Make = Callable[..., Fetcher]


class Releases:
    """A repository with the releases 1 and 2 of one library."""

    def __init__(self, place: Path) -> None:
        self.path = place / "repository"
        chance = random.Random(4)
        common = chance.randbytes(20_000)
        self.one = {f"op/k{number}.so": common + chance.randbytes(3_000) for number in range(COUNT)}
        self.two = {
            name: content[:5_000] + chance.randbytes(50) + content[5_050:] if int(name[4:-3]) in CHANGED else content
            for name, content in self.one.items()
        }
        self.pins = [self._release(place / "1", "1", self.one), self._release(place / "2", "2", self.two)]

    def _release(self, raw: Path, version: str, contents: dict[str, bytes]) -> Pin:
        (raw / "op").mkdir(parents=True)
        for name, content in contents.items():
            (raw / name).write_bytes(content)
        earlier = []
        if version != "1":
            shelf = Repository(self.path)
            for descriptor in shelf.release(self.pins_of("1")).manifests:
                manifest = shelf.bundle(descriptor)
                earlier.append(Earlier(self.path, manifest, shelf.table(manifest, "a table")))
        entries = [PackInput(name, raw / name, ".so") for name in contents]
        bundle = pack_bundle(
            entries,
            self.path,
            library="many",
            family="op",
            arch="any",
            abi="none",
            toolchain={},
            earlier=earlier,
            block_bytes=700_000,
        )
        make_release(self.path, "many", version, [bundle])
        return self.pins_of(version)

    def pins_of(self, version: str) -> Pin:
        (pin,) = Repository(self.path).pins("many", version)
        return pin


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    return Releases(tmp_path)


def take(fetcher: Fetcher, pin: Pin) -> tuple[Bundle, int, int]:
    """Fetch a whole release; gives its bundle, and the bytes and requests that it took."""
    bytes_before, requests_before = fetcher.stats.bytes, fetcher.stats.requests
    (bundle,) = fetcher.bundles(pin)
    places = fetcher.ensure(bundle, bundle.table.kernels)
    for entry in bundle.table.kernels:
        assert sha256(places[entry.uri].read_bytes()) == entry.sha256
    return bundle, fetcher.stats.bytes - bytes_before, fetcher.stats.requests - requests_before


def test_an_upgrade_costs_what_changed(releases: Releases, fetcher: Make) -> None:
    verify_repository(releases.path, deep=True).check("the repository")
    with Mirror(releases.path) as mirror:
        one = fetcher(mirrors=mirror.url)
        _, whole, _ = take(one, releases.pins[0])
        bundle, moved, requests = take(one, releases.pins[1])
        tables = bundle.manifest.config.size + bundle.descriptor.size + releases.pins[1].size
        assert moved - tables < 0.002 * whole
        assert requests <= 4  # index, manifest, table, and one range
        assert take(one, releases.pins[1])[1:] == (0, 0)


def test_the_progress_of_an_upgrade_adds_up_to_what_was_said_to_be_missing(releases: Releases, fetcher: Make) -> None:
    with Mirror(releases.path) as mirror:
        one = fetcher(mirrors=mirror.url)
        take(one, releases.pins[0])
        (bundle,) = one.bundles(releases.pins[1])
        told: list[int] = []
        missing = one.missing_bytes(bundle, bundle.table.kernels)
        one.ensure(bundle, bundle.table.kernels, progress=told.append)
        assert sum(told) == missing > 0


def test_who_has_nothing_fetches_no_deltas(releases: Releases, fetcher: Make) -> None:
    with Mirror(releases.path) as mirror:
        bundle, moved, _ = take(fetcher(mirrors=mirror.url), releases.pins[1])
    assert moved < 1.1 * sum(block.length for block in bundle.table.blocks) + 100_000


def delta_pack(bundle: Bundle) -> str:
    (number,) = {entry.delta.pack for entry in bundle.table.kernels if entry.delta is not None}
    return bundle.manifest.layers[number].sha256


@pytest.mark.parametrize(
    "trouble",
    ["the older kernel is gone", "the older kernel is damaged", "the pack is missing", "the pack is damaged"],
)
def test_whatever_is_wrong_with_a_short_cut_the_long_way_is_taken(
    releases: Releases, fetcher: Make, trouble: str
) -> None:
    with Mirror(releases.path) as mirror:
        one = fetcher(mirrors=mirror.url, retries=0)
        take(one, releases.pins[0])
        (new,) = one.bundles(releases.pins[1])
        if trouble.startswith("the older kernel"):
            for number in CHANGED:
                content = releases.one[f"op/k{number}.so"]
                path = one.store.path(sha256(content), ".so")
                path.chmod(0o644)
                path.write_bytes(random.Random(7).randbytes(len(content)))
                path.chmod(0o444)
                if trouble.endswith("gone"):
                    path.unlink()
        else:
            blob = releases.path / "blobs" / "sha256" / delta_pack(new)
            damaged = bytearray(blob.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            blob.chmod(0o644)
            blob.write_bytes(damaged)
            if trouble.endswith("missing"):
                blob.unlink()
        _, moved, _ = take(one, releases.pins[1])
        assert moved < 3_000_000


def test_a_wrong_delta_is_found_by_whoever_verifies_the_release(releases: Releases, fetcher: Make) -> None:
    with Mirror(releases.path) as mirror:
        (new,) = fetcher(mirrors=mirror.url).bundles(releases.pins[1])
        blob = releases.path / "blobs" / "sha256" / delta_pack(new)
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(VerificationError, match="pack"):
        verify_repository(releases.path, deep=True).check("the repository")


def test_a_mirror_that_fails_half_way_through_a_short_cut_costs_no_kernel(releases: Releases, fetcher: Make) -> None:
    with Mirror(releases.path) as mirror:
        one = fetcher(mirrors=mirror.url)
        take(one, releases.pins[0])
        (new,) = one.bundles(releases.pins[1])
        mirror.order(faults.truncate(200), match=delta_pack(new), times=2)
        take(one, releases.pins[1])
