"""Metadata that is made: what clients could not use, or could use against its readers, is never signed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner, Signer
from tuf.api.metadata import Delegations, Metadata, Root, Targets, Timestamp
from tuf.api.serialization.json import JSONSerializer

from kartifacts.errors import ConfigError, KartifactsError, PublishConflict, VerificationError
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import View
from kartifacts.model.manifest import Pin
from kartifacts.trust.keygrants import Grant, add_signatures, grants_of, root_of, targets_of
from kartifacts.trust.released import Released
from kartifacts.trust.signed import view_in
from kartifacts.trust.signing import check_overlap, check_signed, role_with, snapshot_of, timestamp_of

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc)
ROLES = ("root", "targets", "snapshot", "timestamp")


def new(count: int = 1) -> list[Signer]:
    return [CryptoSigner.generate_ed25519() for _ in range(count)]


def grant(signers: Sequence[Signer], threshold: int = 1) -> Grant:
    return Grant(tuple(signer.public_key for signer in signers), threshold)


def release(version: str, content: bytes = b"index", channels: Sequence[str] = (), **more: Any) -> Released:
    pin = Pin(library="mylib", version=version, sha256=sha256(content), size=len(content))
    return Released(pin, tuple(channels), "2026-03-01", **more)


def role(current: bytes | None = None, version: int = 1, signers: Sequence[Signer] | None = None, **edit: Any) -> bytes:
    return role_with(current, "mylib", version=version, signers=signers or new(), now=NOW, **edit)


def signed(content: bytes) -> Any:
    return json.loads(content)["signed"]


def root(
    keys: dict[str, list[Signer]], *, view: View = "online", version: int = 1, signers: Sequence[Signer] = ()
) -> bytes:
    grants = {name: grant(keys[name]) for name in ROLES}
    return root_of(grants, view=view, version=version, signers=signers or keys["root"], now=NOW)


@pytest.fixture
def keys() -> dict[str, list[Signer]]:
    return {name: new() for name in ROLES}


# -- form --------------------------------------------------------------------------------------------------------------


def test_equal_metadata_has_equal_bytes_and_is_what_tuf_itself_would_write(keys: dict[str, list[Signer]]) -> None:
    both = [release("1.0"), release("1.1", b"other")]
    once, again = (role(signers=keys["targets"], add=both) for _ in range(2))
    assert once == again
    assert once == JSONSerializer(compact=True, validate=True).serialize(Metadata[Targets].from_bytes(once))
    assert b" " not in once
    assert b"\n" not in once


@pytest.mark.parametrize(
    ("view", "snapshot_days", "timestamp_days"), [("online", 30, 7), ("airgap", 400, 400)], ids=["online", "airgap"]
)
def test_each_file_lives_as_long_as_its_readers_may_be_away(
    keys: dict[str, list[Signer]], view: View, snapshot_days: int, timestamp_days: int
) -> None:
    targets = targets_of({}, version=1, signers=keys["targets"], now=NOW)
    snapshot = snapshot_of(None, {"1.targets.json": targets}, version=1, signers=keys["snapshot"], view=view, now=NOW)
    timestamp = timestamp_of(None, snapshot, version=1, signers=keys["timestamp"], view=view, now=NOW)
    expected = {
        root(keys, view=view): 3 * 365,
        targets: 2 * 365,
        role(): 2 * 365,
        snapshot: snapshot_days,
        timestamp: timestamp_days,
    }
    for content, days in expected.items():
        assert signed(content)["expires"] == f"{NOW + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}"


def test_a_time_of_another_zone_expires_at_the_same_moment() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=9)))
    content = role_with(None, "mylib", version=1, signers=new(), now=elsewhere)
    assert signed(content)["expires"] == "2028-02-29T12:00:00Z"


def test_a_root_says_which_view_it_is_of(keys: dict[str, list[Signer]]) -> None:
    assert view_in(root(keys, view="airgap")) == "airgap"
    stranger = Root(unrecognized_fields={"dev.kartifacts.view": ["online"]})
    for content in (Metadata(Root()).to_bytes(), Metadata(stranger).to_bytes()):
        with pytest.raises(VerificationError, match="view"):
            view_in(content)


# -- releases ----------------------------------------------------------------------------------------------------------


def test_a_version_never_gets_a_second_content() -> None:
    first = role(add=[release("1.0")])
    with pytest.raises(PublishConflict, match=r"1\.0"):
        role(first, 2, add=[release("1.0", b"other")])
    with pytest.raises(PublishConflict, match=r"1\.0"):
        role(None, 1, add=[release("1.0"), release("1.0", b"other")])


def test_a_version_never_gets_a_second_provenance() -> None:
    first = role(add=[release("1.0", provenance=(Digest("a" * 64), 10))])
    with pytest.raises(PublishConflict, match="provenance"):
        role(first, 2, add=[release("1.0", provenance=(Digest("b" * 64), 10))])


def test_a_release_that_is_added_again_keeps_its_date_and_gains_channels_and_provenance() -> None:
    first = role(add=[release("1.0", channels=["stable"])])
    again = release("1.0", channels=["nightly"], provenance=(Digest("a" * 64), 10))._replace(published="2027-01-01")
    targets = signed(role(first, 2, add=[again]))["targets"]
    assert targets["mylib/1.0/index.json"]["custom"] == {"channels": ["nightly", "stable"], "published": "2026-03-01"}
    assert targets["mylib/1.0/provenance.json"] == {"hashes": {"sha256": "a" * 64}, "length": 10}


def test_channels_are_what_was_asked_for_and_other_releases_stay_as_they_are() -> None:
    first = role(add=[release("1.0", channels=["stable"]), release("1.1", b"x")])
    targets = signed(role(first, 2, channels={"1.0": [], "1.1": ["stable"]}))["targets"]
    assert targets["mylib/1.0/index.json"]["custom"]["channels"] == []
    assert targets["mylib/1.1/index.json"]["custom"]["channels"] == ["stable"]
    with pytest.raises(ConfigError, match=r"2\.0"):
        role(first, 2, channels={"2.0": ["stable"]})
    with pytest.raises(ConfigError, match="channel"):
        role(first, 2, channels={"1.0": ["../x"]})


def test_a_release_that_is_removed_takes_its_provenance_along() -> None:
    first = role(add=[release("1.0", provenance=(Digest("a" * 64), 10)), release("1.1")])
    assert list(signed(role(first, 2, remove=["1.0"]))["targets"]) == ["mylib/1.1/index.json"]
    with pytest.raises(ConfigError, match=r"1\.2"):
        role(first, 2, remove=["1.2"])


@pytest.mark.parametrize("name", [*ROLES, "../x", "A", "", "a/b", "con", "x" * 200])
def test_a_library_cannot_have_a_name_that_is_a_role_or_no_name(name: str) -> None:
    with pytest.raises(ConfigError):
        role_with(None, name, version=1, signers=new(), now=NOW)
    with pytest.raises(ConfigError):
        targets_of({name: grant(new())}, version=1, signers=new(), now=NOW)


def test_a_library_cannot_list_what_is_another_ones() -> None:
    with pytest.raises(ConfigError, match="other"):
        role(add=[Released(Pin(library="other", version="1.0", sha256="a" * 64, size=10))])


def test_a_role_that_hands_its_right_on_is_refused() -> None:
    second = Targets(delegations=Delegations({}, {}))
    with pytest.raises(VerificationError, match="hands its right on"):
        role(Metadata(second).to_bytes(), 2)


def test_a_role_too_long_for_clients_is_never_signed() -> None:
    channels = [f"{number}".rjust(120, "0") for number in range(500)]
    many = [release(f"1.{number}", channels=channels) for number in range(100)]
    with pytest.raises(ConfigError, match="5000000"):
        role(add=many)


def test_a_version_that_is_not_newer_is_refused() -> None:
    first = role(None, 7)
    for version in (6, 7):
        with pytest.raises(PublishConflict, match="7"):
            role(first, version)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"signed":{"_type":"targets"}}', b"null"])
def test_what_is_no_metadata_is_refused_with_an_error_of_ours(content: bytes) -> None:
    for make in (
        lambda: role(content, 2),
        lambda: grants_of(content),
        lambda: view_in(content),
        lambda: add_signatures(content, new()),
        lambda: check_overlap(content, {}),
        lambda: check_signed(content, "root", content, "it"),
        lambda: timestamp_of(None, content, version=1, signers=new(), view="online", now=NOW),
    ):
        with pytest.raises(KartifactsError):
            make()


def test_metadata_of_another_role_is_not_taken_for_it(keys: dict[str, list[Signer]]) -> None:
    with pytest.raises(VerificationError, match="expected targets"):
        role(root(keys), 2)
    with pytest.raises(VerificationError, match="only root and targets"):
        grants_of(Metadata(Timestamp()).to_bytes())


# -- what is current ---------------------------------------------------------------------------------------------------


def snapshot(current: bytes | None, roles: dict[str, bytes], version: int) -> bytes:
    return snapshot_of(current, roles, version=version, signers=new(), view="online", now=NOW)


def test_a_snapshot_keeps_all_that_it_listed_and_names_each_file_by_its_hash() -> None:
    targets = targets_of({}, version=1, signers=new(), now=NOW)
    first, second = role(None, 1), role(None, 4)
    made = snapshot(None, {"1.targets.json": targets, "1.mylib.json": first}, 1)
    made = snapshot(made, {"4.mylib.json": second}, 2)
    assert signed(made)["meta"] == {
        "mylib.json": {"version": 4, "length": len(second), "hashes": {"sha256": sha256(second)}},
        "targets.json": {"version": 1, "length": len(targets), "hashes": {"sha256": sha256(targets)}},
    }


def test_a_library_whose_name_begins_with_a_number_is_not_another_version_of_a_library() -> None:
    targets = targets_of({}, version=1, signers=new(), now=NOW)
    two = role_with(None, "2.mylib", version=3, signers=new(), now=NOW)
    made = snapshot(None, {"1.targets.json": targets, "3.2.mylib.json": two, "1.mylib.json": role()}, 1)
    assert set(signed(made)["meta"]) == {"targets.json", "2.mylib.json", "mylib.json"}


def test_no_role_goes_back_and_no_version_has_two_contents() -> None:
    targets = targets_of({}, version=1, signers=new(), now=NOW)
    made = snapshot(None, {"1.targets.json": targets, "3.mylib.json": role(None, 3)}, 1)
    with pytest.raises(PublishConflict):
        snapshot(made, {"2.mylib.json": role(None, 2)}, 2)
    with pytest.raises(PublishConflict):
        snapshot(made, {"3.mylib.json": role(None, 3)}, 2)
    with pytest.raises(VerificationError, match="another version"):
        snapshot(made, {"5.mylib.json": role(None, 4)}, 2)


@pytest.mark.parametrize("name", ["targets.json", "0.targets.json", "01.targets.json", "1.targets", "-1.targets.json"])
def test_a_snapshot_lists_only_files_with_versions(name: str) -> None:
    with pytest.raises(ConfigError):
        snapshot(None, {name: role()}, 1)


def test_a_snapshot_without_targets_is_refused_since_no_client_takes_it() -> None:
    with pytest.raises(ConfigError, match="targets"):
        snapshot(None, {"1.mylib.json": role()}, 1)


def test_a_timestamp_never_leads_back() -> None:
    targets = targets_of({}, version=1, signers=new(), now=NOW)
    old, later = (snapshot(None, {"1.targets.json": targets}, version) for version in (4, 5))
    first = timestamp_of(None, later, version=1, signers=new(), view="online", now=NOW)
    with pytest.raises(PublishConflict, match="older"):
        timestamp_of(first, old, version=2, signers=new(), view="online", now=NOW)
    again = timestamp_of(first, later, version=2, signers=new(), view="online", now=NOW)
    assert Metadata[Timestamp].from_bytes(again).signed.snapshot_meta.version == 5


def test_nothing_that_is_published_goes_unsigned(keys: dict[str, list[Signer]]) -> None:
    targets = targets_of({}, version=1, signers=[], now=NOW)  # these two are signed by people, one after the other
    root_of({name: grant(keys[name]) for name in ROLES}, view="online", version=1, signers=[], now=NOW)
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: role_with(None, "mylib", version=1, signers=[], now=NOW),
        lambda: snapshot_of(None, {"1.targets.json": targets}, version=1, signers=[], view="online", now=NOW),
        lambda: timestamp_of(
            None, snapshot(None, {"1.targets.json": targets}, 1), version=1, signers=[], view="online", now=NOW
        ),
    )
    for make in makers:
        with pytest.raises(ConfigError, match="nobody signs"):
            make()


class _Broken(Signer):
    """Signs something else, or raises what its kind raises."""

    def __init__(self, inner: Signer, error: Exception | None = None) -> None:
        self.inner, self.error = inner, error

    @property
    def public_key(self) -> Any:
        return self.inner.public_key

    @classmethod
    def from_priv_key_uri(cls, *arguments: Any) -> Signer:
        raise NotImplementedError

    def sign(self, payload: bytes) -> Any:
        if self.error:
            raise self.error
        return self.inner.sign(payload + b"!")


@pytest.mark.parametrize("error", [None, OSError("no token"), KeyError("x")], ids=repr)
def test_a_signature_that_does_not_hold_is_never_written(error: Exception | None) -> None:
    with pytest.raises(ConfigError, match="did not sign"):
        role(signers=[_Broken(new()[0], error)])


# -- who may sign ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, -1, 3])
def test_a_threshold_that_cannot_be_met_is_refused(threshold: int) -> None:
    with pytest.raises(ConfigError, match="signatures of 2 keys"):
        targets_of({"mylib": grant(new(2), threshold)}, version=1, signers=new(), now=NOW)


def test_one_key_never_counts_twice() -> None:
    [signer] = new()
    with pytest.raises(ConfigError, match="twice"):
        targets_of({"mylib": grant([signer, signer], 2)}, version=1, signers=new(), now=NOW)


def test_each_library_has_one_terminating_role_with_its_own_paths_and_no_other() -> None:
    made = signed(targets_of({"a": grant(new()), "b": grant(new())}, version=1, signers=new(), now=NOW))
    assert made["targets"] == {}
    assert [(each["name"], each["paths"], each["terminating"]) for each in made["delegations"]["roles"]] == [
        ("a", ["a/*/*"], True),
        ("b", ["b/*/*"], True),
    ]


def test_a_root_without_all_roles_is_refused(keys: dict[str, list[Signer]]) -> None:
    with pytest.raises(ConfigError, match="timestamp"):
        root_of({"root": grant(keys["root"])}, view="online", version=1, signers=keys["root"], now=NOW)


def test_signatures_below_the_threshold_are_counted() -> None:
    signers = new(3)
    delegator = targets_of({"mylib": grant(signers, 2)}, version=1, signers=new(), now=NOW)
    content = role(signers=[signers[0], *new(2)])
    with pytest.raises(VerificationError, match="1 of 2") as caught:
        check_signed(delegator, "mylib", content, "1.mylib.json")
    assert caught.value.actual == signers[0].public_key.keyid[:8]
    check_signed(delegator, "mylib", add_signatures(content, [signers[2]]), "1.mylib.json")


def test_what_cannot_be_signed_at_all_is_refused(keys: dict[str, list[Signer]], public: dict[str, bytes]) -> None:
    """A fraction has no canonical spelling, so nothing says over which bytes a signature would be."""
    odd = json.loads(public["timestamp"])
    odd["signed"]["more"] = 1.5
    content = json.dumps(odd).encode()
    with pytest.raises(VerificationError, match="cannot have been signed"):
        check_signed(public["root"], "timestamp", content, "timestamp.json")
    with pytest.raises(VerificationError, match="cannot have been signed"):
        add_signatures(content, keys["timestamp"])
    with pytest.raises(VerificationError, match="cannot have been signed"):
        add_signatures(public["timestamp"], (), others=content)


def test_signatures_of_two_copies_come_together_only_if_they_are_copies() -> None:
    one, two = new(2)
    base = targets_of({}, version=1, signers=[], now=NOW)
    merged = add_signatures(add_signatures(base, [one]), (), others=add_signatures(base, [two]))
    assert merged == targets_of({}, version=1, signers=[one, two], now=NOW)
    with pytest.raises(VerificationError, match="not the same"):
        add_signatures(base, (), others=targets_of({}, version=2, signers=[one], now=NOW))


# -- overlap -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def public(keys: dict[str, list[Signer]]) -> dict[str, bytes]:
    targets = targets_of({"mylib": grant(keys["targets"])}, version=1, signers=keys["targets"], now=NOW)
    made = snapshot_of(None, {"1.targets.json": targets}, version=1, signers=keys["snapshot"], view="online", now=NOW)
    stamp = timestamp_of(None, made, version=1, signers=keys["timestamp"], view="online", now=NOW)
    return {"root": root(keys), "targets": targets, "snapshot": made, "timestamp": stamp}


@pytest.mark.parametrize("name", ["targets", "snapshot", "timestamp"])
def test_a_root_that_only_knows_new_keys_is_refused_until_they_have_signed(
    keys: dict[str, list[Signer]], public: dict[str, bytes], name: str
) -> None:
    fresh = {**keys, name: new()}
    abrupt = root(fresh, version=2)
    with pytest.raises(ConfigError, match=f"too early.*'{name}'"):
        check_overlap(abrupt, public)
    both = {**keys, name: keys[name] + fresh[name]}
    check_overlap(root(both, version=2), public)
    public["root"] = root(both, version=2)
    public[name] = add_signatures(public[name], fresh[name])
    check_overlap(root(fresh, version=3), public)


def test_a_root_follows_the_public_one_by_one_and_is_signed_by_both(
    keys: dict[str, list[Signer]], public: dict[str, bytes]
) -> None:
    fresh = {**keys, "root": new()}
    with pytest.raises(ConfigError, match="one version to the next"):
        check_overlap(root(keys, version=3), public)
    with pytest.raises(VerificationError, match="root 1"):
        check_overlap(root(fresh, version=2), public)
    with pytest.raises(VerificationError, match="root 2"):
        check_overlap(root(fresh, version=2, signers=keys["root"]), public)
    check_overlap(root(fresh, version=2, signers=keys["root"] + fresh["root"]), public)


def test_the_root_of_the_other_view_never_follows(keys: dict[str, list[Signer]], public: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="other view"):
        check_overlap(root(keys, version=2, view="airgap"), public)


def test_targets_that_take_a_librarys_keys_away_are_refused_until_new_ones_have_signed(
    keys: dict[str, list[Signer]],
) -> None:
    old, fresh = new(), new()
    public = {"mylib": role(signers=old)}
    abrupt = targets_of({"mylib": grant(fresh)}, version=2, signers=keys["targets"], now=NOW)
    with pytest.raises(ConfigError, match="mylib"):
        check_overlap(abrupt, public)
    check_overlap(targets_of({"mylib": grant(old + fresh)}, version=2, signers=keys["targets"], now=NOW), public)
    check_overlap(abrupt, {"mylib": add_signatures(public["mylib"], fresh)})
    check_overlap(targets_of({}, version=2, signers=keys["targets"], now=NOW), public)  # nobody asks for it any more


def test_targets_that_are_older_than_the_public_ones_are_refused(keys: dict[str, list[Signer]]) -> None:
    older, newer = (targets_of({}, version=version, signers=keys["targets"], now=NOW) for version in (1, 2))
    with pytest.raises(PublishConflict):
        check_overlap(older, {"targets": newer})
    check_overlap(newer, {"targets": newer})
