"""Exchanges of keys as readers live through them: after each write, those who come fresh and those who remember."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import pytest

from kartifacts.errors import ConfigError, KartifactsError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import VIEWS, View, metadata_path
from kartifacts.model.manifest import Pin
from kartifacts.publish.buckets import Stamped
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import Edit, commit, publish_staged, refresh_timestamp
from kartifacts.trust import keyceremony, keychange
from kartifacts.trust.client import refresh
from kartifacts.trust.keyfiles import Plan
from kartifacts.trust.keygrants import grants_of, root_of
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.released import Released
from kartifacts.trust.signing import check_overlap

ROLES = ("timestamp", "snapshot", "targets", "root", "mylib")


def now() -> datetime:
    return datetime.now(timezone.utc)


def change(version: str) -> Callable[..., Edit]:
    pin = Pin(library="mylib", version=version, sha256=sha256(version.encode()), size=len(version))
    return lambda _: Edit(add=[Released(pin, (), "2026-03-01")])


class Watched(DirectoryBucket):
    """A bucket whose readers look after each write."""

    def __init__(self, root: Path, states: Path, roots: dict[View, bytes]) -> None:
        super().__init__(root)
        self.states, self.roots = states, roots
        self.looks = 0
        self.watching = False

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        done = super().put_if_absent(path, content)
        self.look(path)
        return done

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        super().swap(path, content, before)
        self.look(path)

    def remember(self) -> None:
        """From now on there are readers who have seen what is public now, and nothing since."""
        number = len(list(self.states.iterdir())) if self.states.exists() else 0
        for view in VIEWS:
            refresh(self.roots[view], self.states / str(number) / view, self.get)

    def look(self, path: str) -> None:
        """Be all readers of the view that a path is of."""
        views: list[View] = [view for view in VIEWS if path.startswith(metadata_path(view, ""))]
        if not self.watching:
            return
        for view in views:
            self.looks += 1
            refresh(self.roots[view], None, self.get)
            for memory in sorted(self.states.iterdir()):
                copy = memory.with_name(f".{memory.name}")
                shutil.copytree(memory / view, copy)
                refresh(self.roots[view], copy, self.get)
                shutil.rmtree(copy)


class Site:
    """A keyring, a bucket and readers."""

    def __init__(self, path: Path) -> None:
        self.keys = path / "keys"
        self.roots: dict[View, bytes] = {view: self.keyring.root(view) for view in VIEWS}
        self.bucket = Watched(path / "bucket", path / "states", self.roots)

    @property
    def keyring(self) -> Keyring:
        return Keyring.load(self.keys)

    def release(self, version: str) -> None:
        commit(self.bucket, self.keyring, {"mylib": change(version)})

    def publish(self) -> None:
        publish_staged(self.bucket, self.keyring)

    def versions(self, view: View = "online") -> set[str]:
        return {
            each.pin.version for each in refresh(self.roots[view], None, self.bucket.get).libraries["mylib"].releases
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    keyceremony.init(path / "keys", ["mylib"], {}, now=now())
    site = Site(path)
    site.release("1.0")
    site.bucket.remember()
    return path


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Site:
    shutil.copytree(made, tmp_path / "site")
    site = Site(tmp_path / "site")
    site.bucket.watching = True
    return site


def keys_of(site: Site, role: str, view: View) -> set[str]:
    return {key.keyid for key in site.keyring.grant(role, view).keys}


@pytest.mark.parametrize("role", ROLES)
def test_no_reader_fails_at_any_moment_of_a_rotation(site: Site, role: str) -> None:
    before = {view: keys_of(site, role, view) for view in VIEWS}
    keychange.rotate(site.keys, role, now=now())
    site.publish()
    site.bucket.remember()
    site.release("1.1")
    if role != "root":
        keychange.finish(site.keys, role, now=now())
        site.publish()
    site.bucket.remember()
    site.release("1.2")
    for view in VIEWS:
        assert not before[view] & keys_of(site, role, view)
        assert site.versions(view) == {"1.0", "1.1", "1.2"}
    assert site.bucket.looks > 8


@pytest.mark.parametrize("role", ["timestamp", "targets", "mylib"])
def test_both_steps_may_follow_each_other_at_once_as_after_a_theft(site: Site, role: str) -> None:
    old = site.keyring
    keychange.rotate(site.keys, role, now=now())
    keychange.finish(site.keys, role, now=now())
    site.publish()
    site.release("1.1")
    assert site.versions() == {"1.0", "1.1"}
    if role != "targets":  # whoever stole a key of these signs in vain
        with pytest.raises(KartifactsError):
            commit(site.bucket, old, {"mylib": change("6.6.6")})
        assert site.versions() == {"1.0", "1.1"}


def test_all_roles_may_be_rotated_together(site: Site) -> None:
    for role in ROLES:
        keychange.rotate(site.keys, role, now=now())
    site.publish()
    for role in ROLES[:3]:
        keychange.finish(site.keys, role, now=now())
    keychange.finish(site.keys, "mylib", now=now())
    site.publish()
    site.release("1.1")
    assert site.versions("airgap") == {"1.0", "1.1"}


@pytest.mark.parametrize("role", ["timestamp", "targets"])
def test_an_abrupt_rotation_is_refused_and_would_have_stopped_every_reader(site: Site, role: str) -> None:
    before = site.bucket.get(metadata_path("online", "1.root.json"))
    public = {"root": before, "targets": site.bucket.get(metadata_path("online", "1.targets.json"))}
    public["timestamp"] = site.bucket.get(metadata_path("online", "timestamp.json"))
    public["snapshot"] = site.bucket.get(metadata_path("online", "1.snapshot.json"))
    keychange.rotate(site.keys, role, now=now())
    keychange.finish(site.keys, role, now=now())
    keyring = site.keyring
    final = grants_of(keyring.newest_root("online"))
    abrupt = root_of(final, view="online", version=2, signers=keyring.signers("root"), now=now())
    with pytest.raises(ConfigError, match=f"too early.*{role}"):
        check_overlap(abrupt, public)
    site.bucket.watching = False
    site.bucket.put_if_absent(metadata_path("online", "2.root.json"), abrupt)
    with pytest.raises(VerificationError):
        refresh(site.roots["online"], None, site.bucket.get)


def test_one_of_several_keys_may_be_exchanged_alone(site: Site) -> None:
    gone, *stay = sorted(keys_of(site, "root", "online"))
    keychange.rotate(site.keys, "root", now=now(), views=["online"], only=[gone[:8]])
    site.publish()
    left = keys_of(site, "root", "online")
    assert gone not in left
    assert set(stay) < left
    assert len(left) == 3


@pytest.mark.parametrize("role", ["root", "targets"])
def test_renewal_changes_the_expiry_and_no_key(site: Site, role: Literal["root", "targets"]) -> None:
    before = keys_of(site, role, "online")
    keychange.renew(site.keys, role, now=now())
    site.publish()
    assert keys_of(site, role, "online") == before
    seen = refresh(site.roots["online"], None, site.bucket.get).seen
    assert (seen.root, seen.targets) == ((2, 1) if role == "root" else (1, 2))


def test_a_library_comes_and_goes_while_others_stay(site: Site) -> None:
    keychange.add_library(site.keys, "other", Plan(), now=now())
    site.publish()
    pin = Pin(library="other", version="1.0", sha256=sha256(b"x"), size=1)
    commit(site.bucket, site.keyring, {"other": lambda _: Edit(add=[Released(pin, (), "2026-03-01")])})
    assert set(refresh(site.roots["online"], None, site.bucket.get).libraries) == {"mylib", "other"}
    site.bucket.remember()
    keychange.remove_library(site.keys, "other", now=now())
    site.publish()
    assert set(refresh(site.roots["airgap"], None, site.bucket.get).libraries) == {"mylib"}
    site.release("1.1")
    assert site.versions() == {"1.0", "1.1"}


def test_a_keyring_of_before_a_rotation_cannot_publish_what_no_reader_would_believe(site: Site, tmp_path: Path) -> None:
    stale = keyceremony.export(site.keyring, tmp_path / "stale", ["snapshot", "timestamp", "mylib"])
    keychange.rotate(site.keys, "timestamp", now=now())
    site.publish()
    refresh_timestamp(site.bucket, stale)  # the old key is good until the end of the exchange
    keychange.finish(site.keys, "timestamp", now=now())
    site.publish()
    with pytest.raises(ConfigError, match="0 of 1 private keys"):
        refresh_timestamp(site.bucket, stale)
    site.release("1.1")
    fresh = keyceremony.export(site.keyring, tmp_path / "fresh", ["snapshot", "timestamp", "mylib"])
    refresh_timestamp(site.bucket, fresh)
