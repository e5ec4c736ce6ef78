"""Whatever a file of others holds, its reader answers with an error of ours; for longer runs there is ci/fuzz."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties import fuzz_targets

NAMES = [
    "strict_json",
    "release",
    "bundle",
    "table",
    "frame",
    "listing",
    "lock",
    "materials",
    "metadata",
    "keys",
    "public-key",
    "tombstones",
    "archive",
    "mirror-listing",
    "mirror",
    "envelope",
    "said",
    "oci-index",
    "names",
    "client-root",
    "client-targets",
    "client-demo",
    "client-snapshot",
    "client-timestamp",
    "stolen-root",
    "stolen-targets",
    "stolen-demo",
    "stolen-snapshot",
    "stolen-timestamp",
]
SLOW = ("client", "stolen", "keys", "names")  # these ask for a whole state each time

Choices = st.binary(max_size=40)


@pytest.fixture(scope="module", autouse=True)
def scratch() -> object:
    yield
    fuzz_targets.remove_scratch()


def test_every_target_is_tested() -> None:
    assert sorted(fuzz_targets.targets()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_that_is_right_is_read(name: str) -> None:
    """Or all that is found below would be that nothing gets past the first check."""
    target = fuzz_targets.targets()[name]
    for seed in target.seeds:
        if name not in ("metadata", "names", "envelope", "said"):  # which have documents of several kinds
            target.read(seed)


def check(name: str, examples: int) -> None:
    target = fuzz_targets.targets()[name]

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(Choices)
    def each(data: bytes) -> None:
        fuzz_targets.run(target, data)

    each()


@pytest.mark.parametrize("name", NAMES)
def test_only_errors_of_ours_come_out(name: str) -> None:
    check(name, 12 if name.partition("-")[0] in SLOW else 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_only_errors_of_ours_come_out_of_many_documents(name: str) -> None:
    check(name, 600 if name.partition("-")[0] in SLOW else 5000)
