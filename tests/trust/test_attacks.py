"""What someone can do who serves metadata, or has stolen a key: nothing that a reader would believe."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from securesystemslib.formats import encode_canonical
from securesystemslib.signer import Signer
from tuf.api.metadata import DelegatedRole, Delegations, MetaFile, SuccinctRoles

from kartifacts.errors import KartifactsError, SourceError, VerificationError
from kartifacts.model.manifest import Synced
from kartifacts.trust.client import Trusted, refresh, refresh_expired
from tests.trust.simulator import Publisher, instead, key, soon

Refresh = Callable[..., Trusted]
BELOW = ("timestamp", "snapshot", "targets", "kernels")


def excepting(*arguments: Any, **keywords: Any) -> Trusted:
    return refresh_expired(*arguments, until=soon(9).date(), reason="a test", **keywords)


# An operator who accepts what is expired accepts nothing else.
WAYS = pytest.mark.parametrize("ask", [refresh, excepting], ids=["refresh", "excepting"])


def delegations(publisher: Publisher) -> Delegations:
    assert publisher.targets.delegations is not None
    return publisher.targets.delegations


def roles(publisher: Publisher) -> dict[str, DelegatedRole]:
    found = delegations(publisher).roles
    assert found is not None
    return found


# -- rollback ----------------------------------------------------------------------------------------------------------


def go_back(publisher: Publisher, role: str, old: dict[str, bytes]) -> None:
    """Serve an older version of a role, with as many keys as that takes."""
    if role == "timestamp":
        publisher.put("timestamp.json", old["timestamp"])
        return
    if role == "snapshot":
        publisher.snapshot.version -= 1
        publisher.put(publisher.name("snapshot"), old["snapshot"])
        publisher.timestamp.version += 1
        publisher.name_snapshot()
        publisher.write("timestamp")
        return
    publisher.signed(role).version -= 1
    publisher.put(publisher.name(role), old[role])
    publisher.list(role)
    publisher.commit()


def one_older(publisher: Publisher) -> dict[str, bytes]:
    """All metadata as it is now; then everything gets a newer version."""
    old = {role: publisher.content(publisher.name(role)) for role in BELOW}
    publisher.add("kernels", "2.0")
    publisher.publish("targets", "kernels")
    return old


@WAYS
@pytest.mark.parametrize("role", BELOW)
def test_nothing_goes_back_to_an_older_version(publisher: Publisher, state: Path, role: str, ask: Refresh) -> None:
    old = one_older(publisher)
    seen = refresh(publisher.trust, state, publisher.read).seen
    go_back(publisher, role, old)
    with pytest.raises(VerificationError):
        ask(publisher.trust, state, publisher.read)
    publisher.signed(role).version = getattr(seen, role, seen.libraries["kernels"]) + 5
    publisher.publish("kernels")
    publisher.publish("targets")
    publisher.timestamp.version += 5
    publisher.snapshot.version += 5
    publisher.commit()
    assert ask(publisher.trust, state, publisher.read).seen.timestamp > seen.timestamp


@WAYS
@pytest.mark.parametrize("role", BELOW)
def test_a_new_machine_goes_back_no_further_than_its_lock(publisher: Publisher, role: str, ask: Refresh) -> None:
    old = one_older(publisher)
    floor = refresh(publisher.trust, None, publisher.read).seen
    go_back(publisher, role, old)
    assert ask(publisher.trust, None, publisher.read)  # which is why the lock has to say it
    with pytest.raises(VerificationError, match=r"lock was made from version") as caught:
        ask(publisher.trust, None, publisher.read, floor=floor)
    assert caught.value.expected.startswith("version ")
    assert caught.value.actual.startswith("version ")


@WAYS
def test_an_older_root_is_refused_by_the_lock(publisher: Publisher, ask: Refresh) -> None:
    before = publisher.copy("before")
    publisher.next_root()
    floor = refresh(publisher.trust, None, publisher.read).seen
    publisher.path = before  # a mirror that hides the newer root
    with pytest.raises(VerificationError, match=r"root\.json is of version 1"):
        ask(publisher.trust, None, publisher.read, floor=floor)


def test_a_library_cannot_be_hidden_from_who_has_seen_it(publisher: Publisher, state: Path) -> None:
    floor = refresh(publisher.trust, state, publisher.read).seen
    del publisher.snapshot.meta["kernels.json"]  # takes the keys of snapshot and timestamp
    publisher.commit()
    for kept, lowest in ((state, None), (None, floor)):
        with pytest.raises(VerificationError):
            refresh(publisher.trust, kept, publisher.read, floor=lowest)


# -- mixed and altered -------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("role", ["snapshot", "targets", "kernels"])
def test_an_old_file_under_a_new_name_is_refused(publisher: Publisher, role: str, ask: Refresh) -> None:
    old = one_older(publisher)
    mirror = instead(publisher, {publisher.name(role): old[role]})
    with pytest.raises(VerificationError) as caught:
        ask(publisher.trust, None, mirror)
    assert caught.value.expected
    assert caught.value.actual


@WAYS
@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("role", ["targets", "kernels"])
def test_a_version_other_than_listed_is_refused_with_and_without_hashes(
    publisher: Publisher, role: str, hashes: bool, ask: Refresh
) -> None:
    listed = publisher.snapshot.meta[f"{role}.json"]
    publisher.signed(role).version += 1
    data = publisher.encode(role, publisher.signed(role))
    publisher.put(f"{listed.version}.{role}.json", data)
    publisher.snapshot.meta[f"{role}.json"] = (
        MetaFile.from_data(listed.version, data, ["sha256"]) if hashes else MetaFile(listed.version)
    )
    publisher.commit()
    with pytest.raises(VerificationError, match="version"):
        ask(publisher.trust, None, publisher.read)


@pytest.mark.parametrize("role", ["root", *BELOW])
def test_no_flipped_byte_is_believed(publisher: Publisher, role: str) -> None:
    publisher.next_root()
    good = refresh(publisher.trust, None, publisher.read)
    name = publisher.name(role)
    content = publisher.content(name)
    for at in random.Random(role).sample(range(len(content)), 30):
        bad = bytearray(content)
        bad[at] ^= 1 << random.Random(at).randrange(8)
        try:
            found = refresh(publisher.trust, None, instead(publisher, {name: bytes(bad)}))
        except VerificationError:
            continue
        # Only in the hex of a signature, upper case for lower, which says the same.
        assert found._replace(files={}) == good._replace(files={})
        assert content[at : at + 1].isalpha()
        assert bytes(bad).lower() == content.lower()


ODD: dict[str, Callable[[bytes], bytes]] = {
    "a key twice": lambda data: data.replace(b'"version":', b'"version":9,"version":', 1),
    "a key twice outside": lambda data: data[:-1] + b',"signed":{}}',
    "NaN": lambda data: data[:-1] + b',"x":NaN}',
    "infinity": lambda data: data[:-1] + b',"x":1e999}',
    "5000 digits": lambda data: data[:-1] + b',"x":' + b"9" * 5000 + b"}",
    "deep": lambda data: data[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "half a character": lambda data: data[:-1] + b',"x":"\\ud800"}',
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "cut off": lambda data: data[: len(data) // 2],
    "nothing": lambda data: b"",
    "a page": lambda data: b"<html>please log in</html>",
    "a list": lambda data: b"[]",
    "another role": lambda data: data.replace(b'"_type":"', b'"_type":"x', 1),
    "other spec": lambda data: data.replace(b'"spec_version":"1', b'"spec_version":"2', 1),
}


@WAYS
@pytest.mark.parametrize("role", ["root", "timestamp", "kernels"])
@pytest.mark.parametrize("kind", ODD)
def test_what_has_two_readings_or_none_is_refused(publisher: Publisher, kind: str, role: str, ask: Refresh) -> None:
    publisher.next_root()
    name = publisher.name(role)
    content = ODD[kind](publisher.content(name))
    publisher.put(name, content)
    if role == "kernels":  # as if its own key had signed for it
        publisher.list(role)
        publisher.commit()
    with pytest.raises((VerificationError, SourceError)) as caught:
        ask(publisher.trust, None, publisher.read)
    assert isinstance(caught.value, VerificationError) or len(content) > 16384


@pytest.mark.parametrize("version", [0, -1, "1", None, True, [], 10**30], ids=str)
@pytest.mark.parametrize("role", BELOW)
def test_a_version_that_is_no_number_of_use_is_refused(publisher: Publisher, role: str, version: Any) -> None:
    """Signed by the role's own keys, and listed as such."""
    publisher.signed(role).version = version
    content = publisher.encode(role, publisher.signed(role))
    listed = MetaFile.from_data(int(version) if version in (True, 10**30) else 77, content, ["sha256"])
    if role == "timestamp":
        publisher.put("timestamp.json", content)
    else:
        publisher.put(f"{listed.version}.{role}.json", content)
        if role == "snapshot":
            publisher.timestamp.snapshot_meta = listed
            publisher.write("timestamp")
        else:
            publisher.snapshot.meta[f"{role}.json"] = listed
            publisher.commit()
    with pytest.raises(VerificationError):
        refresh(publisher.trust, None, publisher.read)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.text(max_size=5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(role=st.sampled_from(["root", *BELOW]), seed=st.integers(0, 10**6), value=JSON)
def test_whatever_the_owner_of_a_key_signs_ends_in_one_kind_of_error(
    publisher: Publisher, role: str, seed: int, value: Any
) -> None:
    """Some part of it becomes something else, and is signed and listed as it should be."""
    content = json.loads(publisher.content(publisher.name(role)))
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [content["signed"]]
    while pending:
        outer = pending.pop()
        for place in list(outer) if isinstance(outer, dict) else range(len(outer)):
            places.append((outer, place))
            if isinstance(outer[place], (dict, list)):
                pending.append(outer[place])
    outer, place = random.Random(seed).choice(places)
    outer[place] = value
    signatures = [signer.sign(encode_canonical(content["signed"]).encode()) for signer in publisher.signers[role]]  # type: ignore[union-attr]
    data = json.dumps({**content, "signatures": [signature.to_dict() for signature in signatures]}).encode()
    snapshot, timestamp = deepcopy(publisher.snapshot), deepcopy(publisher.timestamp)
    contents: dict[str, bytes | None] = {publisher.name(role): data}
    if role in ("targets", "kernels"):
        snapshot.meta[f"{role}.json"] = MetaFile.from_data(publisher.signed(role).version, data, ["sha256"])
        contents[publisher.name("snapshot")] = data = publisher.encode("snapshot", snapshot)
    if role in ("targets", "kernels", "snapshot"):
        timestamp.snapshot_meta = MetaFile.from_data(snapshot.version, data, ["sha256"])
        contents["timestamp.json"] = publisher.encode("timestamp", timestamp)
    for ask in (refresh, excepting):
        with suppress(VerificationError, SourceError):
            ask(content_root(publisher, role, contents), None, instead(publisher, contents))


def content_root(publisher: Publisher, role: str, contents: dict[str, bytes | None]) -> bytes:
    return contents[publisher.name("root")] or b"" if role == "root" else publisher.trust


# -- signatures --------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("role", BELOW)
def test_a_key_that_is_not_the_roles_own_signs_nothing(publisher: Publisher, role: str, ask: Refresh) -> None:
    stolen: list[Signer] = [key(f"online {other}") for other in ("timestamp", "snapshot", "targets") if other != role]
    stolen += [key("somebody"), key("other")]
    publisher.signers[role] = stolen
    if role in ("snapshot", "timestamp"):
        publisher.commit()
    else:
        publisher.publish(role)
    with pytest.raises(VerificationError, match="0/1 keys") as caught:
        ask(publisher.trust, None, publisher.read)
    assert (caught.value.expected, caught.value.actual) == ("1 keys", "0 keys")


@WAYS
@pytest.mark.parametrize("role", ["targets", "kernels"])
@pytest.mark.parametrize("signers", [["a"], ["a", "x"], ["a", "a"], ["a", "b"]], ids=str)
def test_a_threshold_takes_as_many_different_keys(
    publisher: Publisher, role: str, signers: list[str], ask: Refresh
) -> None:
    for name in ("a", "b"):
        (publisher.root if role == "targets" else publisher.targets).add_key(key(name).public_key, role)
    (publisher.root.roles[role] if role == "targets" else roles(publisher)[role]).threshold = 2
    publisher.next_root()
    publisher.publish("targets")
    publisher.signers[role] = [key(name) for name in dict.fromkeys(signers)]
    publisher.publish("targets", "kernels")
    if signers == ["a", "a"]:  # its signature stands twice
        metadata = json.loads(publisher.content(publisher.name(role)))
        metadata["signatures"] *= 2
        publisher.put(publisher.name(role), json.dumps(metadata).encode())
        publisher.list(role)
        publisher.commit()
    if signers == ["a", "b"]:
        assert ask(publisher.trust, None, publisher.read)
    else:
        with pytest.raises(VerificationError):
            ask(publisher.trust, None, publisher.read)


@WAYS
@pytest.mark.parametrize("role", ["timestamp", "kernels"])
def test_a_key_under_two_names_does_not_make_two(publisher: Publisher, role: str, ask: Refresh) -> None:
    again = json.loads(json.dumps(key("kernels").public_key.to_dict()))
    alias = type(key("kernels").public_key).from_dict("feed" * 16, again)
    if role == "kernels":
        delegations(publisher).keys[alias.keyid] = alias
        roles(publisher)[role].keyids.append(alias.keyid)
        publisher.publish("targets")
    else:
        publisher.root.add_key(key("kernels").public_key, role)
        publisher.root.add_key(alias, role)
        publisher.next_root()
    with pytest.raises(VerificationError, match="two names"):
        ask(publisher.trust, None, publisher.read)


@WAYS
@pytest.mark.parametrize("fault", ["not by the old", "not by itself", "skipped", "same version"])
def test_a_root_needs_the_keys_of_the_one_before_and_its_own(publisher: Publisher, fault: str, ask: Refresh) -> None:
    old = publisher.signers["root"]
    publisher.replace_key("root", "new root")
    if fault == "not by the old":
        publisher.next_root()
    elif fault == "not by itself":
        publisher.root.version += 1
        publisher.write("root", signers=old)
    elif fault == "skipped":
        publisher.root.version += 2
        publisher.put("2.root.json", publisher.encode("root", publisher.root, [*old, key("new root")]))
    else:
        publisher.put("2.root.json", publisher.encode("root", publisher.root, [*old, key("new root")]))
    with pytest.raises(VerificationError):
        ask(publisher.trust, None, publisher.read)


@WAYS
def test_a_root_that_both_signed_is_followed(publisher: Publisher, state: Path, ask: Refresh) -> None:
    for number in range(3):
        old = publisher.signers["root"]
        publisher.replace_key("root", f"root {number}")
        publisher.next_root(*old)
    assert ask(publisher.trust, state, publisher.read).seen.root == 4
    assert refresh(publisher.trust, state, publisher.read).seen.root == 4


# -- stolen keys -------------------------------------------------------------------------------------------------------


@WAYS
def test_the_keys_of_timestamp_and_snapshot_release_nothing(publisher: Publisher, ask: Refresh) -> None:
    publisher.signers["kernels"] = [key("online timestamp"), key("online snapshot")]
    publisher.release("kernels", "6.6.6", b"evil")
    with pytest.raises(VerificationError, match="kernels was signed by 0/1 keys"):
        ask(publisher.trust, None, publisher.read)


@WAYS
def test_a_librarys_key_releases_nothing_of_another(publisher: Publisher, ask: Refresh) -> None:
    evil = publisher.roles["other"].targets["other/2026.1/index.json"]
    publisher.roles["other"].targets["kernels/6.6.6/index.json"] = evil
    publisher.publish("other")
    with pytest.raises(VerificationError, match=r"not one of its own releases"):
        ask(publisher.trust, None, publisher.read)
    assert ask(publisher.trust, None, publisher.read, libraries=["kernels"]).libraries["kernels"].releases


@WAYS
def test_what_was_fast_forwarded_comes_back_by_new_keys(publisher: Publisher, state: Path, ask: Refresh) -> None:
    """Somebody with the keys of snapshot and timestamp signs versions that no publisher would ever reach."""
    honest = {"timestamp": publisher.timestamp.version + 1, "snapshot": publisher.snapshot.version + 1}
    publisher.timestamp.version = publisher.snapshot.version = 2**40
    publisher.commit()
    floor = refresh(publisher.trust, state, publisher.read).seen
    assert floor.timestamp > 2**40
    for role, version in honest.items():
        publisher.signed(role).version = version
    publisher.commit()
    for kept, lowest in ((state, None), (None, floor)):
        with pytest.raises(VerificationError):
            ask(publisher.trust, kept, publisher.read, floor=lowest)
    publisher.replace_key("timestamp", "new timestamp")
    publisher.replace_key("snapshot", "new snapshot")
    publisher.next_root()
    publisher.commit()
    for kept, lowest in ((None, floor), (state, None), (state, floor)):
        assert ask(publisher.trust, kept, publisher.read, floor=lowest).seen.timestamp == honest["timestamp"] + 2


@WAYS
def test_one_new_key_of_two_does_not_lift_the_floor(publisher: Publisher, ask: Refresh) -> None:
    publisher.timestamp.version = 1000
    publisher.commit()
    floor = refresh(publisher.trust, None, publisher.read).seen
    publisher.root.add_key(key("second timestamp").public_key, "timestamp")  # the old one still counts
    publisher.next_root()
    publisher.timestamp.version = 10
    publisher.commit()
    with pytest.raises(VerificationError, match="lock was made from version"):
        ask(publisher.trust, None, publisher.read, floor=floor)


@WAYS
@pytest.mark.parametrize("how", ["revoked", "new key"])
def test_what_a_client_remembers_of_a_revoked_library_is_not_believed(
    publisher: Publisher, state: Path, how: str, ask: Refresh
) -> None:
    refresh(publisher.trust, state, publisher.read)
    assert (state / "kernels.json").exists()
    if how == "revoked":
        publisher.revoke("kernels")
        publisher.publish("targets")
        assert set(ask(publisher.trust, state, publisher.read).libraries) == {"other"}
        return
    roles(publisher)["kernels"].keyids = [key("new kernels").public_key.keyid]
    delegations(publisher).keys[key("new kernels").public_key.keyid] = key("new kernels").public_key
    publisher.publish("targets")  # the library's own file is still the old one
    with pytest.raises(VerificationError, match="0/1 keys"):
        ask(publisher.trust, state, publisher.read)
    publisher.signers["kernels"] = [key("new kernels")]
    publisher.publish("kernels")
    assert ask(publisher.trust, state, publisher.read).libraries["kernels"].keys == (key("new kernels").public_key,)


# -- delegations -------------------------------------------------------------------------------------------------------


def _narrowed(publisher: Publisher) -> None:
    roles(publisher)["kernels"].terminating = False


def _widened(publisher: Publisher) -> None:
    roles(publisher)["kernels"].paths = ["kernels/*/*", "other/*/*"]


def _everything(publisher: Publisher) -> None:
    roles(publisher)["kernels"].paths = ["*/*/*"]


def _prefixes(publisher: Publisher) -> None:
    roles(publisher)["kernels"].paths = None
    roles(publisher)["kernels"].path_hash_prefixes = ["0"]


def _own_targets(publisher: Publisher) -> None:
    publisher.targets.targets = dict(publisher.roles["kernels"].targets)


def _bins(publisher: Publisher) -> None:
    delegations(publisher).roles = None
    delegations(publisher).succinct_roles = SuccinctRoles([key("kernels").public_key.keyid], 1, 1, "bin")


DELEGATIONS = [_narrowed, _widened, _everything, _prefixes, _own_targets, _bins]


@WAYS
@pytest.mark.parametrize("change", DELEGATIONS)
def test_a_library_has_its_own_directory_and_the_last_word_there(
    publisher: Publisher, change: Callable[[Publisher], None], ask: Refresh
) -> None:
    change(publisher)
    publisher.publish("targets")
    with pytest.raises(VerificationError, match=r"targets\.json"):
        ask(publisher.trust, None, publisher.read)


@WAYS
@pytest.mark.parametrize(
    "name",
    ["../kernels", "a/b", "", ".", "Kernels", "ker nels", "nul", "snapshot", "timestamp", "root", "targets", "a" * 300,
     "ké", "a\n", "-a", "%2e", "a\\b"],
)  # fmt: skip
def test_a_role_of_a_bad_name_is_refused_before_its_file_is_touched(
    publisher: Publisher, state: Path, name: str, ask: Refresh
) -> None:
    role = roles(publisher)["kernels"]
    roles(publisher)[name] = DelegatedRole(name, role.keyids, 1, True, paths=[f"{name}/*/*"])
    asked: list[str] = []

    def read(path: str, limit: int) -> bytes:
        asked.append(path)
        return publisher.read(path, limit)

    try:
        publisher.publish("targets")
    except ValueError:
        pytest.skip("tuf cannot even write this")
    with pytest.raises(VerificationError):
        ask(publisher.trust, state, read)
    assert not any("kernels" in path for path in asked)


@WAYS
def test_a_role_with_two_delegators_is_refused(publisher: Publisher, ask: Refresh) -> None:
    """The diamond: a library delegates to the role of another, under keys of its own choosing."""
    publisher.roles["other"].delegations = Delegations(
        {key("other").public_key.keyid: key("other").public_key},
        {"kernels": DelegatedRole("kernels", [key("other").public_key.keyid], 1, True, paths=["kernels/*/*"])},
    )
    publisher.publish("other")
    with pytest.raises(VerificationError, match="two delegators"):
        ask(publisher.trust, None, publisher.read)


@WAYS
@pytest.mark.parametrize(
    "path",
    ["kernels/1.0", "kernels/../index.json", "kernels/1.0/x/index.json", "/kernels/1/index.json", "kernels//index.json",
     "kernels/1.0/../index.json", "other/1.0/index.json", "kernels/A/index.json", "kernels/1\n/index.json",
     "kernels/nul/index.json",     "kernels/" + "1" * 300 + "/index.json", "kernels/é/index.json"],
)  # fmt: skip
def test_a_release_of_a_bad_name_is_refused(publisher: Publisher, path: str, ask: Refresh) -> None:
    publisher.roles["kernels"].targets[path] = publisher.roles["kernels"].targets["kernels/1.0/index.json"]
    publisher.publish("kernels")
    with pytest.raises(VerificationError, match=r"kernels\.json lists"):
        ask(publisher.trust, None, publisher.read)


@pytest.mark.parametrize(
    "change",
    [{"length": 0}, {"length": 5 << 20}, {"hashes": {"md5": "a" * 32}}, {"hashes": {"sha256": "A" * 64}},
     {"hashes": {"sha256": "a" * 63}}, {"hashes": {"sha256": "a" * 64, "md5": "a" * 32}},
     {"custom": {"channels": "stable"}}, {"custom": {"channels": [1]}}, {"custom": {"published": "yesterday"}},
     {"custom": {"published": 5}}, {"custom": []},
     *({"custom": {"published": text}} for text in ("9999-99-99", "2026-02-30", "٢٠٢٦-٠١-٠١", "2026-01-01T24:00Z",
                                                    "2026-01-01T10:60", "2026-01-01T10:00+99:00", "20260101xx"))],
    ids=str,
)  # fmt: skip
def test_a_release_that_says_something_odd_of_itself_is_refused(publisher: Publisher, change: dict[str, Any]) -> None:
    entry = publisher.roles["kernels"].targets["kernels/1.0/index.json"]
    if "custom" in change:
        entry.unrecognized_fields["custom"] = change["custom"]
    for name in change.keys() - {"custom"}:
        setattr(entry, name, change[name])
    publisher.publish("kernels")
    with pytest.raises(VerificationError, match=r"kernels 1\.0"):
        refresh(publisher.trust, None, publisher.read)


def test_a_file_of_a_kind_that_is_not_known_yet_is_no_fault(publisher: Publisher) -> None:
    targets = publisher.roles["kernels"].targets
    targets["kernels/1.0/sbom.json"] = targets["kernels/1.0/index.json"]
    publisher.publish("kernels")
    assert len(refresh(publisher.trust, None, publisher.read).libraries["kernels"].releases) == 2


# -- views -------------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("name", ["timestamp.json", "all"])
@pytest.mark.parametrize("swapped", [False, True], ids=["online", "airgap"])
def test_the_metadata_of_one_view_is_nothing_in_the_other(
    publisher: Publisher, name: str, swapped: bool, ask: Refresh
) -> None:
    other = Publisher(publisher.path, "kernels", "other", view="airgap")
    victim, giver = (other, publisher) if swapped else (publisher, other)
    assert ask(victim.trust, None, victim.read)
    for path in giver.file("x").parent.iterdir() if name == "all" else [giver.file(name)]:
        victim.put(path.name, path.read_bytes())
    with pytest.raises(VerificationError, match="keys"):
        ask(victim.trust, None, victim.read)


@WAYS
def test_a_root_cannot_change_its_view(publisher: Publisher, ask: Refresh) -> None:
    publisher.root.unrecognized_fields["dev.kartifacts.view"] = "airgap"
    publisher.next_root()
    with pytest.raises(VerificationError, match="view"):
        ask(publisher.trust, None, publisher.read)


@WAYS
def test_a_root_without_consistent_snapshots_is_refused(publisher: Publisher, ask: Refresh) -> None:
    publisher.root.consistent_snapshot = False
    publisher.next_root()
    for role in ("snapshot", "targets", "kernels", "other"):
        publisher.put(f"{role}.json", publisher.content(publisher.name(role)))
    with pytest.raises(VerificationError, match="consistent"):
        ask(publisher.trust, None, publisher.read)


def test_the_floor_of_another_repository_says_nothing(publisher: Publisher) -> None:
    floor = Synced(
        repository="a" * 64, view="online", root=1, timestamp=1, snapshot=1, targets=1, libraries={}, expires="", at=""
    )
    with pytest.raises(KartifactsError, match="another root"):
        refresh(publisher.trust, None, publisher.read, floor=floor)
