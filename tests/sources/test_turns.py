"""Several mirrors, some of them useless: what is asked when, and how long it takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import blob_path
from kartifacts.sources import Source
from kartifacts.sources.directory import DirectorySource
from kartifacts.sources.http import HttpSource
from kartifacts.sources.turns import first_good
from kartifacts.testing import Mirror, faults

Make = Callable[..., Settings]
Fetch = Callable[..., bytes]

ARTIFACTS = 200
THREADS = 8
USELESS = {
    "500": faults.status(500),
    "503": faults.status(503),
    "503 and a long pause": faults.status(503, Retry_After="3600"),
    "429": faults.status(429),
    "429 and a long pause": faults.status(429, Retry_After="30"),
    "429 and RateLimit": faults.status(429, RateLimit='"hour";r=0;t=50'),
    "silence": faults.silent(),
    "a stall after the headers": faults.stall(0),
    "a stall after some bytes": faults.stall(10),
    "a stall after many bytes": faults.stall(70_000),
    "cut after the headers": faults.truncate(0),
    "cut after many bytes": faults.truncate(70_000),
    "reset": faults.reset(10),
    "a wrong byte": faults.flip(at=80_000),
    "a page": faults.html(),
    "slow headers": faults.slow_headers(0.05),
    "forbidden": faults.status(403),
}


@pytest.fixture
def blobs(repository: Path) -> list[bytes]:
    """Contents of many blobs in the repository."""
    contents = [number.to_bytes(4, "big") * 20_500 for number in range(ARTIFACTS)]
    for content in contents:
        (repository / blob_path(sha256(content))).write_bytes(content)
    return contents


def fetch_all(fetch: Fetch, sources: Sequence[Source], blobs: Sequence[bytes], errors: list[Exception]) -> float:
    """Fetches everything on several threads; gives the seconds that it took."""
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda content: fetch(sources, content, errors=errors), blobs):
            pass
    return time.monotonic() - started


@pytest.mark.parametrize("case", USELESS)
def test_a_useless_mirror_before_a_good_one_costs_about_two_failures_in_all(
    mirror: Mirror, repository: Path, settings: Make, blobs: list[bytes], fetch: Fetch, case: str
) -> None:
    mirror.order(USELESS[case])
    timeout = 0.5
    errors: list[Exception] = []
    with Mirror(repository) as good:
        sources = [HttpSource(url, settings(read_timeout=timeout)) for url in (mirror.url, good.url)]
        alone = fetch_all(fetch, sources[1:], blobs, errors)
        took = fetch_all(fetch, sources, blobs, errors)
    assert took < 3 * alone + 3 * timeout + 1
    assert mirror.count() <= 5 * THREADS
    assert len(errors) <= 5 * THREADS


def test_a_mirror_that_holds_only_some_blobs_and_forbids_the_rest_still_gives_what_nobody_else_has(
    mirror: Mirror, repository: Path, settings: Make, blobs: list[bytes], fetch: Fetch, tmp_path: Path
) -> None:
    partial = tmp_path / "partial"
    for content in blobs[: ARTIFACTS // 2]:
        target = partial / blob_path(sha256(content))
        target.parent.mkdir(parents=True, exist_ok=True)
        (repository / blob_path(sha256(content))).rename(target)
    for content in blobs[ARTIFACTS // 2 :]:
        mirror.order(faults.status(403), match=sha256(content))
    with Mirror(repository) as rest:
        mirror.directory = partial
        sources = [HttpSource(url, settings()) for url in (mirror.url, rest.url)]
        fetch_all(fetch, sources, blobs[::-1], [])


@pytest.mark.parametrize("kind", ["drops", "refuses"])
def test_a_dead_mirror_before_a_good_one_costs_two_connect_timeouts_in_all(
    mirror: Mirror,
    settings: Make,
    blobs: list[bytes],
    fetch: Fetch,
    dead_host: str,
    refusing_host: str,
    kind: str,
) -> None:
    dead = dead_host if kind == "drops" else refusing_host
    errors: list[Exception] = []
    sources = [HttpSource(url, settings(connect_timeout=0.5)) for url in (dead, mirror.url)]
    alone = fetch_all(fetch, sources[1:], blobs, [])
    assert fetch_all(fetch, sources, blobs, errors) < 3 * alone + 2 * 0.5 + 1
    assert len(errors) <= 2 * THREADS


@pytest.mark.parametrize(
    ("headers", "seconds"), [({"Retry_After": "2"}, 2), ({"RateLimit": '"hour";r=0;t=1'}, 1), ({}, 1)]
)
def test_the_only_mirror_is_waited_for_as_long_as_it_asks(
    mirror: Mirror, settings: Make, content: bytes, headers: dict[str, str], seconds: float
) -> None:
    mirror.order(faults.status(429, **headers), times=1)
    times: list[float] = []

    def attempt(source: Source) -> bytes:
        times.append(time.monotonic())
        with source.read(sha256(content), len(content)) as pieces:
            return b"".join(pieces)

    source = HttpSource(mirror.url, settings(retries=0))
    assert first_good([source], attempt, label="a blob", retries=0, refused=lambda *_: None) == content
    assert times[1] - times[0] >= seconds


def test_a_pause_is_not_waited_for_where_another_mirror_has_the_blob(
    mirror: Mirror, repository: Path, settings: Make, content: bytes, fetch: Fetch
) -> None:
    mirror.order(faults.status(429, Retry_After="20"))
    with Mirror(repository) as good:
        sources = [HttpSource(url, settings()) for url in (mirror.url, good.url)]
        started = time.monotonic()
        for _ in range(20):
            assert fetch(sources, content) == content
        assert time.monotonic() - started < 5
    assert mirror.count() == 1


def test_a_mirror_that_asks_for_a_pause_gets_its_turn_where_no_other_has_the_blob(
    mirror: Mirror, settings: Make, content: bytes, fetch: Fetch, tmp_path: Path
) -> None:
    mirror.order(faults.status(503, Retry_After="1"), times=1)
    (tmp_path / "empty").mkdir()
    with Mirror(tmp_path / "empty") as other:
        assert fetch([HttpSource(url, settings()) for url in (mirror.url, other.url)], content) == content
    assert (mirror.count(), other.count()) == (2, 1)


@pytest.mark.parametrize("seconds", ["7200", "61"])
def test_a_pause_beyond_all_patience_is_an_error_at_once(
    mirror: Mirror, settings: Make, content: bytes, fetch: Fetch, seconds: str
) -> None:
    mirror.order(faults.status(429, Retry_After=seconds))
    started = time.monotonic()
    with pytest.raises(SourceError, match="429") as caught:
        fetch([HttpSource(mirror.url, settings())], content)
    assert time.monotonic() - started < 5
    assert caught.value.retry_after == float(seconds)


def test_pauses_and_faults_have_budgets_of_their_own(settings: Make, content: bytes) -> None:
    source = DirectorySource(Path("/"))
    waited: list[float] = []
    errors = [SourceError("slow down", retry_after=1.0)] * 5 + [SourceError("a fault")] * 2
    left = list(errors)

    def attempt(source: Source) -> str:
        if left:
            raise left.pop(0)
        return "good"

    def run(retries: int) -> str | None:
        return first_good([source], attempt, label="it", retries=retries, refused=lambda *_: None, sleep=waited.append)

    assert run(2) == "good"
    assert len([seconds for seconds in waited if seconds >= 1]) == 5
    left = list(errors)
    assert run(1) is None
    left = [SourceError("slow down", retry_after=1.0)] * 1000
    waited.clear()
    assert run(20) is None
    assert 50 < sum(waited) <= 60


def test_wrong_bytes_get_clean_tries_after_the_other_mirrors_and_never_pass(
    mirror: Mirror, repository: Path, settings: Make, content: bytes, fetch: Fetch
) -> None:
    mirror.order(faults.flip(), times=2)
    assert fetch([HttpSource(mirror.url, settings())], content) == content
    assert mirror.count() == 3
    mirror.order(faults.flip())
    with pytest.raises(VerificationError):
        fetch([HttpSource(mirror.url, settings())], content)
    assert mirror.count() == 6
    with Mirror(repository) as good:
        assert fetch([HttpSource(url, settings()) for url in (mirror.url, good.url)], content) == content
    assert (mirror.count(), good.count()) == (7, 1)


def test_the_same_refusal_of_many_blobs_is_one_warning(
    mirror: Mirror, repository: Path, settings: Make, blobs: list[bytes], fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.order(faults.status(403), match="blobs")
    with Mirror(repository) as good, caplog.at_level(logging.DEBUG):
        sources = [HttpSource(url, settings()) for url in (mirror.url, good.url)]
        fetch_all(fetch, sources, blobs, [])
        assert [record.levelname for record in caplog.records if "403" in record.message].count("WARNING") == 1
        mirror.cancel()
        mirror.order(faults.status(401))
        fetch_all(fetch, [HttpSource(mirror.url, settings()), sources[1]], blobs[:20], [])
        assert [record.levelname for record in caplog.records if "401" in record.message].count("WARNING") == 1


@pytest.mark.parametrize("fault", [faults.status(503), faults.stall(10), faults.truncate(10)])
def test_a_useless_only_mirror_is_left_alone_after_two_reads(
    mirror: Mirror, settings: Make, blobs: list[bytes], fetch: Fetch, fault: faults.Fault
) -> None:
    mirror.order(fault)
    source = HttpSource(mirror.url, settings(retries=1, read_timeout=0.3))
    started = time.monotonic()
    for content in blobs:
        with pytest.raises(SourceError):
            fetch([source], content, retries=1)
    assert time.monotonic() - started < 10
    assert mirror.count() <= 12


def test_a_short_outage_of_the_only_mirror_is_survived_by_all_threads(
    mirror: Mirror, settings: Make, blobs: list[bytes], fetch: Fetch
) -> None:
    mirror.order(faults.status(503), skip=20, times=THREADS)
    errors: list[Exception] = []
    source = HttpSource(mirror.url, settings(retries=3, connect_timeout=5.0))

    def run(content: bytes) -> bytes:
        return fetch([source], content, retries=3, errors=errors)

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, blobs)) == blobs
    assert len(errors) == THREADS


def test_many_threads_do_not_rush_at_a_mirror_whose_pause_is_over(
    mirror: Mirror, settings: Make, blobs: list[bytes], fetch: Fetch
) -> None:
    busy = threading.Event()
    mirror.order(faults.status(429, Retry_After="1"), times=1)
    source = HttpSource(mirror.url, settings())
    with pytest.raises(SourceError), source.read(sha256(blobs[0]), len(blobs[0])):
        pass
    mirror.order(faults.hold(busy), times=1)
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(fetch, [source], content) for content in blobs[:THREADS]]
        ended = time.monotonic() + 1.5
        while mirror.count() < 2 and time.monotonic() < ended + 5:
            busy.wait(0.01)
        assert mirror.count() == 2
        busy.set()
        assert [future.result() for future in futures] == blobs[:THREADS]
