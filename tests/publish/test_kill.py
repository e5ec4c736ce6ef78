"""A publisher of signed releases that dies after any request: whoever reads sees the old state or the new, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kartifacts.errors import SourceError
from kartifacts.model.layout import VIEWS
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import commit, publish_staged, refresh_timestamp
from kartifacts.publish.editing import promoting, retiring
from kartifacts.publish.protocol import publish
from kartifacts.trust.keychange import add_library, finish, rotate
from kartifacts.trust.keyfiles import Plan
from kartifacts.trust.keyring import Keyring

Make = Callable[..., Any]
Act = Callable[[Bucket], object]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure leaves is not looked at here, so no disk is waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Scenario(NamedTuple):
    keyring: Keyring
    before: list[Act]
    act: Act
    old: set[str] | None  # releases and their channels; None: there is nothing
    new: set[str]


def first(make_keys: Make, tiny: Make) -> Scenario:
    keyring, source = make_keys(), tiny("1.0")
    return Scenario(keyring, [], lambda bucket: publish(source, bucket, keyring=keyring), None, {"demo 1.0"})


def upgrade(make_keys: Make, tiny: Make) -> Scenario:
    keyring, old, new = make_keys(), tiny("1.0"), tiny("2.0")
    return Scenario(
        keyring,
        [lambda bucket: publish(old, bucket, keyring=keyring, channels=["stable"])],
        lambda bucket: publish(new, bucket, keyring=keyring, channels=["stable"]),
        {"demo 1.0 stable"},
        {"demo 1.0", "demo 2.0 stable"},
    )


def another_library(make_keys: Make, tiny: Make) -> Scenario:
    keyring, old, new = make_keys(), tiny("1.0"), tiny("1.0", library="more")
    before = lambda bucket: publish(old, bucket, keyring=keyring)  # noqa: E731

    def act(bucket: Bucket) -> None:
        if "more" not in keyring.libraries():
            add_library(keyring.path, "more", Plan(), now=datetime.now(timezone.utc))
        publish(new, bucket, keyring=Keyring.load(keyring.path))

    return Scenario(keyring, [before], act, {"demo 1.0"}, {"demo 1.0", "more 1.0"})


def promotion(make_keys: Make, tiny: Make) -> Scenario:
    keyring, old, new = make_keys(), tiny("1.0"), tiny("2.0")
    return Scenario(
        keyring,
        [
            lambda bucket: publish(old, bucket, keyring=keyring, channels=["stable"]),
            lambda bucket: publish(new, bucket, keyring=keyring),
        ],
        lambda bucket: commit(bucket, keyring, promoting("demo", "2.0", "stable")),
        {"demo 1.0 stable", "demo 2.0"},
        {"demo 1.0", "demo 2.0 stable"},
    )


def retirement(make_keys: Make, tiny: Make) -> Scenario:
    keyring, old, new = make_keys(), tiny("1.0"), tiny("2.0")
    return Scenario(
        keyring,
        [lambda bucket: publish(old, bucket, keyring=keyring), lambda bucket: publish(new, bucket, keyring=keyring)],
        lambda bucket: commit(bucket, keyring, retiring("demo", "1.0")),
        {"demo 1.0", "demo 2.0"},
        {"demo 2.0"},
    )


def rotation(make_keys: Make, tiny: Make, roles: tuple[str, ...] = ("online timestamp", "demo")) -> Scenario:
    """Both steps of an exchange of keys, published at once."""
    keyring, source = make_keys(), tiny("1.0")

    def act(bucket: Bucket) -> None:
        now = datetime.now(timezone.utc)
        if len(keyring.staged("online")) == 2:
            for name in roles:
                *view, role = name.split()
                views: Any = view or VIEWS
                rotate(keyring.path, role, now=now, views=views)
                if role != "root":  # whose keys need no second step
                    finish(keyring.path, role, now=now, views=views)
        publish_staged(bucket, Keyring.load(keyring.path))

    return Scenario(keyring, [lambda bucket: publish(source, bucket, keyring=keyring)], act, {"demo 1.0"}, {"demo 1.0"})


def rotation_of_all(make_keys: Make, tiny: Make) -> Scenario:
    return rotation(make_keys, tiny, ("timestamp", "snapshot", "targets", "root", "demo"))


def freshening(make_keys: Make, tiny: Make) -> Scenario:
    keyring, source = make_keys(), tiny("1.0")
    return Scenario(
        keyring,
        [lambda bucket: publish(source, bucket, keyring=keyring)],
        lambda bucket: refresh_timestamp(bucket, keyring),
        {"demo 1.0"},
        {"demo 1.0"},
    )


@pytest.mark.parametrize(
    "make",
    [
        first,
        upgrade,
        pytest.param(another_library, marks=pytest.mark.slow),
        promotion,
        pytest.param(retirement, marks=pytest.mark.slow),
        rotation,
        pytest.param(rotation_of_all, marks=pytest.mark.slow),
        freshening,
    ],
    ids=lambda make: make.__name__,
)
def test_cut_after_any_request_all_readers_see_the_old_state_or_the_new_and_a_second_run_completes_it(
    make: Callable[[Make, Make], Scenario],
    make_keys: Make,
    tiny: Make,
    readers: Make,
    cut_bucket: Make,
    tmp_path: Path,
) -> None:
    scenario = make(make_keys, tiny)
    start = tmp_path / "start"
    start.mkdir()
    everybody = readers(scenario.keyring)
    for act in scenario.before:
        act(DirectoryBucket(start))
    if scenario.before:
        everybody.remember(start)
        assert signed(everybody.see(start)) == {frozenset(scenario.old or ())}

    shutil.copytree(start, tmp_path / "complete")
    counting = cut_bucket(tmp_path / "complete")
    scenario.act(counting)
    assert len(counting.asked) > 20
    old, new = frozenset(scenario.old) if scenario.old is not None else None, frozenset(scenario.new)
    states, looked_at, root = set(), -1, tmp_path / "cut"
    for number, request in enumerate(counting.asked):
        for last in (False, True) if is_write(request) else (False,):
            done = sum(map(is_write, counting.asked[:number])) + last
            if done == looked_at and make is not first:
                continue  # the bucket is as it was after the request before
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(start, root)
            (scenario.keyring.path / "buckets.json").unlink(
                missing_ok=True
            )  # it would notice that the bucket went back
            cut = cut_bucket(root, requests=number, last_takes_effect=last)
            # Whoever dies while giving up a lease has published.
            with pytest.raises(SourceError, match="lost") if not request.startswith("delete gc/") else nullcontext():
                scenario.act(cut)
            if done == looked_at:
                continue
            looked_at = done
            seen = everybody.see(root)
            states.add(frozenset(signed(seen)))
            assert signed(seen) <= {old, new}
            assert seen["oci"] in (tags(scenario.old), tags(scenario.new))
            scenario.act(DirectoryBucket(root))
            seen = everybody.see(root)
            assert signed(seen) == {new}
            assert seen["oci"] == tags(scenario.new)
    assert old == new or len(states) > 2


def signed(seen: dict[str, frozenset[str] | None]) -> set[frozenset[str] | None]:
    return {releases for reader, releases in seen.items() if reader != "oci"}


def tags(releases: set[str] | None) -> frozenset[str] | None:
    return None if releases is None else frozenset("-".join(release.split()[:2]) for release in releases)


def is_write(request: str) -> bool:
    return request.startswith(("put ", "swap ", "delete "))
