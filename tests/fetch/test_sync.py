"""Sync: mirrors in order, the right release of each library, and a lock that never goes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.errors import (
    ArtifactUnavailable,
    ConfigError,
    ExpiredMetadata,
    KartifactsError,
    SourceError,
    VerificationError,
)
from kartifacts.fetch.sync import Exemption, Outcome, Wanted, age, sync
from kartifacts.model.manifest import Pin, Synced, decode_lock
from kartifacts.publish.lockfile import Overtaken, add_pins, read_lock, record
from kartifacts.testing import Mirror, faults
from tests.trust.simulator import Publisher, soon

Sync = Callable[..., Outcome]
ALL = Wanted()


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "repository", "kernels", "other")
    for version in ("1.0", "1.10", "1.9", "2.0rc1"):
        publisher.add("kernels", version, version.encode(), channels=["stable"] if version == "1.9" else ["edge"])
    publisher.release("other", "3.0", b"other")
    publisher.publish("kernels")
    return publisher


@pytest.fixture
def user(tmp_path: Path, publisher: Publisher) -> Settings:
    """Somebody who has put the root where it belongs."""
    home = tmp_path / "home" / ".config" / "kartifacts"
    home.mkdir(parents=True)
    (home / "root.json").write_bytes(publisher.trust)
    return config.read({"HOME": str(tmp_path / "home")}, {"retries": 1, "connect_timeout": 1.0, "read_timeout": 2.0})


@pytest.fixture
def ask(user: Settings) -> Sync:
    def ask(*mirrors: object, wanted: Wanted = ALL, exemption: Exemption | None = None, **more: Any) -> Outcome:
        urls = tuple(f"file://{mirror.path}" if isinstance(mirror, Publisher) else str(mirror) for mirror in mirrors)
        return sync(replace(user, mirrors=urls, **more), wanted=wanted, exemption=exemption)

    return ask


def versions(outcome: Outcome) -> dict[str, str]:
    return {pin.library: pin.version for pin in outcome.pins}


NAMES = [
    "kernels/9.9/INDEX.json", "kernels/9.9/x\x1b.json", "kernels//index.json", "kernels/9%2f9/index.json", "kernels/9",
    f"kernels/{'9' * 300}/index.json", "kernels/con/index.json", "other/9.9/index.json",
]  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, "a library"])
@pytest.mark.parametrize("exempted", [True, False])
def test_a_bad_name_in_signed_metadata_is_an_error_that_the_next_mirror_answers(
    ask: Sync, publisher: Publisher, name: str, exempted: bool
) -> None:
    before = deepcopy(publisher.roles["kernels"].targets)
    if name == "a library":
        publisher.delegate("../kernels")
    else:
        targets = publisher.roles["kernels"].targets
        targets[name] = replaced = deepcopy(targets["kernels/1.0/index.json"])
        replaced.path = name
    publisher.publish("targets", "kernels")
    bad = f"file://{publisher.copy('bad')}"
    exemption = Exemption(date.today() + timedelta(days=3), "a test") if exempted else None
    with pytest.raises(VerificationError) as raised:
        ask(bad, exemption=exemption)
    assert [refusal.place for refusal in raised.value.refusals] == [bad]
    publisher.roles["kernels"].targets = before
    if name == "a library":
        publisher.revoke("../kernels")
    publisher.publish("targets", "kernels")
    assert ask(bad, publisher, exemption=exemption).synced.source == f"file://{publisher.path}"


def test_the_newest_final_release_of_each_library_is_pinned(ask: Sync, publisher: Publisher, user: Settings) -> None:
    outcome = ask(publisher)
    assert versions(outcome) == {"kernels": "1.10", "other": "3.0"}
    assert user.home is not None
    assert outcome.path == user.home / "kartifacts.lock"
    lock = read_lock(outcome.path)
    assert lock == outcome.lock
    assert lock.releases == list(outcome.pins)
    assert lock.synced == [outcome.synced]
    assert outcome.synced.source == f"file://{publisher.path}"
    assert outcome.synced.libraries == {name: role.version for name, role in publisher.roles.items()}
    assert abs(datetime.fromisoformat(outcome.synced.at.replace("Z", "+00:00")) - soon(0)) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(version="1.0"), {"kernels": "1.0"}),
        (Wanted(channel="stable"), {"kernels": "1.9"}),
        (Wanted(channel="edge"), {"kernels": "1.10"}),
        (Wanted(libraries=("other",)), {"other": "3.0"}),
        (Wanted(libraries=("kernels", "other"), version=None), {"kernels": "1.10", "other": "3.0"}),
        (Wanted(version="2.0rc1"), {"kernels": "2.0rc1"}),
    ],
)
def test_a_version_a_channel_or_a_library_can_be_named(
    ask: Sync, publisher: Publisher, wanted: Wanted, expected: dict[str, str]
) -> None:
    assert versions(ask(publisher, wanted=wanted)) == expected


@pytest.mark.parametrize(
    "wanted", [Wanted(version="9"), Wanted(channel="none"), Wanted(libraries=("kernels", "other"), version="1.0")]
)
def test_what_was_not_released_is_said_with_what_was(ask: Sync, publisher: Publisher, wanted: Wanted) -> None:
    with pytest.raises(ArtifactUnavailable, match=r"did not release") as caught:
        ask(publisher, wanted=wanted)
    assert "3.0" in str(caught.value)
    assert not Path(publisher.path.parent / "home/.config/kartifacts/kartifacts.lock").exists()


def test_where_there_is_no_final_release_the_newest_other_is_taken(ask: Sync, publisher: Publisher) -> None:
    publisher.roles["kernels"].targets.clear()
    for version, published in (("1.0rc1", "2026-05-01"), ("1.0rc2", "2026-04-01"), ("nightly-x", "2026-12-01")):
        publisher.add("kernels", version, published=published)
    publisher.publish("kernels")
    assert versions(ask(publisher))["kernels"] == "1.0rc2"


def test_versions_that_pip_does_not_know_go_by_their_date(ask: Sync, publisher: Publisher) -> None:
    publisher.roles["kernels"].targets.clear()
    for version, published in (("r-9", "2026-05-01"), ("r-10", "2026-06-01"), ("r-8", "2026-05-30T10:00:00Z")):
        publisher.add("kernels", version, published=published)
    publisher.publish("kernels")
    assert versions(ask(publisher))["kernels"] == "r-10"


# -- mirrors -----------------------------------------------------------------------------------------------------------


def _altered(publisher: Publisher, mirror: Path) -> None:
    (mirror / "metadata" / publisher.name("kernels")).write_bytes(b"{}")


def _foreign(publisher: Publisher, mirror: Path) -> None:
    other = Publisher(mirror.with_name("foreign"), "kernels")
    (mirror / "metadata/timestamp.json").write_bytes(other.content("timestamp.json"))
    content = json.loads((mirror / "metadata/timestamp.json").read_bytes())
    content["signed"]["version"] += 1
    (mirror / "metadata/timestamp.json").write_text(json.dumps(content))


def _emptied(publisher: Publisher, mirror: Path) -> None:
    (mirror / "metadata/timestamp.json").unlink()


def _half(publisher: Publisher, mirror: Path) -> None:
    (mirror / "metadata" / publisher.name("kernels")).unlink()


def _expired(publisher: Publisher, mirror: Path) -> None:
    late = Publisher(mirror, view=publisher.view)
    late.trust, late.timestamp.expires = publisher.trust, soon(-1)
    late.timestamp.version = publisher.timestamp.version + 1
    late.timestamp.snapshot_meta = publisher.timestamp.snapshot_meta
    for name in publisher.file("x").parent.iterdir():
        (mirror / "metadata" / name.name).write_bytes(name.read_bytes())
    late.write("timestamp")


BAD: dict[Callable[[Publisher, Path], None], type[KartifactsError]]
BAD = {_altered: VerificationError, _foreign: VerificationError, _emptied: SourceError, _half: SourceError,
       _expired: ExpiredMetadata}  # fmt: skip


@pytest.mark.parametrize("damage", BAD)
def test_a_bad_mirror_is_complained_about_and_the_next_is_asked(
    ask: Sync, publisher: Publisher, damage: Callable[[Publisher, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    bad = publisher.copy(damage.__name__)
    damage(publisher, bad)
    outcome = ask(f"file://{bad}", publisher)
    assert outcome.synced.source == f"file://{publisher.path}"
    if BAD[damage] is not SourceError:
        assert "WARNING" in caplog.text
    with pytest.raises(BAD[damage]) as caught:
        ask(f"file://{bad}", store=bad / "new", lock=bad / "lock")
    assert [refusal.place for refusal in caught.value.refusals] == [f"file://{bad}"]


def test_the_worst_error_is_raised_with_those_of_all_mirrors(ask: Sync, publisher: Publisher) -> None:
    mirrors = []
    for damage in (_emptied, _expired, _altered, _half):
        mirrors.append(publisher.copy(f"worst{damage.__name__}"))
        damage(publisher, mirrors[-1])
    for several, worst in ((mirrors, VerificationError), (mirrors[:2], ExpiredMetadata), (mirrors[:1], SourceError)):
        with pytest.raises(worst) as caught:
            ask(*(f"file://{path}" for path in several), store=several[-1] / "store")
        assert type(caught.value) is worst
        assert {refusal.place for refusal in caught.value.refusals} == {f"file://{path}" for path in several}


def test_the_first_of_several_good_mirrors_is_taken_and_no_other_asked(ask: Sync, publisher: Publisher) -> None:
    with Mirror(publisher.path) as first, Mirror(publisher.path) as second:
        assert ask(first.url, second.url).synced.source == first.url
        assert first.count()
        assert not second.count()


def test_a_fault_that_passes_costs_a_second_try(ask: Sync, publisher: Publisher) -> None:
    with Mirror(publisher.path) as mirror:
        mirror.order(faults.status(503), match="snapshot", times=1)
        assert versions(ask(mirror.url))


def test_a_library_that_only_the_second_mirror_has_is_found(ask: Sync, publisher: Publisher) -> None:
    old = publisher.copy("old")
    publisher.delegate("fresh")
    publisher.add("fresh", "1.0")
    publisher.publish("targets", "fresh")
    wanted = Wanted(libraries=("fresh",))
    assert versions(ask(f"file://{old}", publisher, wanted=wanted)) == {"fresh": "1.0"}
    with pytest.raises(ConfigError, match="frehs") as caught:
        ask(publisher, wanted=Wanted(libraries=("frehs",)))
    assert "fresh" in caught.value.message


@pytest.mark.parametrize("mirrors", [(), ("http://127.0.0.1:9",), ("oci://localhost:9/x", "s3://b")])
def test_offline_or_without_a_mirror_nothing_is_asked(
    ask: Sync, mirrors: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(ConfigError, match=r"mirror"):
        ask(*mirrors, offline=True)


def test_offline_a_directory_can_still_be_asked(ask: Sync, publisher: Publisher) -> None:
    assert versions(ask("http://127.0.0.1:9", publisher, offline=True))


# -- the root ----------------------------------------------------------------------------------------------------------


def test_without_a_root_one_is_told_where_to_get_it(tmp_path: Path, publisher: Publisher) -> None:
    settings = config.read({"HOME": str(tmp_path)}, {"mirrors": f"file://{publisher.path}"})
    with pytest.raises(ConfigError, match="no root of trust") as caught:
        sync(settings)
    assert str(tmp_path / ".config/kartifacts/root.json") in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="cannot read the root"):
        sync(settings, root=tmp_path / "none.json")


def test_the_root_and_the_lock_can_be_named(tmp_path: Path, publisher: Publisher) -> None:
    settings = config.read({"HOME": str(tmp_path)}, {"mirrors": f"file://{publisher.path}"})
    (tmp_path / "r.json").write_bytes(publisher.trust)
    outcome = sync(settings, root=tmp_path / "r.json", lock=tmp_path / "new" / "my.lock")
    assert decode_lock((tmp_path / "new" / "my.lock").read_bytes()) == outcome.lock


@pytest.mark.parametrize("name", ["KARTIFACTS_ROOT", "KARTIFACTS_HOME"])
def test_no_variable_or_key_names_whom_to_trust(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="unknown variable"):
        config.read({"HOME": str(tmp_path), name: "/tmp/evil.json"})
    (tmp_path / "config.toml").write_text(f'{name.partition("_")[2].lower()} = "/tmp/evil.json"\n')
    with pytest.raises(ConfigError, match="unknown setting"):
        config.read({"HOME": str(tmp_path), "KARTIFACTS_CONFIG": str(tmp_path / "config.toml")})


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_a_machine_whose_memory_is_gone_still_goes_back_no_further_than_its_lock(
    ask: Sync, publisher: Publisher, tmp_path: Path
) -> None:
    old = publisher.copy("old")
    publisher.release("kernels", "3.0")
    path = ask(publisher).path
    before = path.read_bytes()
    for store in (tmp_path / "home/.cache/kartifacts/store", tmp_path / "a new one"):
        with pytest.raises(VerificationError):
            ask(f"file://{old}", store=store)
        assert path.read_bytes() == before
    assert versions(ask(f"file://{old}", publisher, store=tmp_path / "another"))["kernels"] == "3.0"


def test_who_syncs_one_library_keeps_what_is_known_of_the_others(ask: Sync, publisher: Publisher) -> None:
    first = ask(publisher)
    publisher.release("other", "4.0")
    second = ask(publisher, wanted=Wanted(libraries=("other",)))
    assert second.synced.libraries == {**first.synced.libraries, "other": publisher.roles["other"].version}
    assert {pin.library: pin.version for pin in second.lock.releases} == {"kernels": "1.10", "other": "4.0"}


def test_pins_from_elsewhere_and_other_repositories_stay(ask: Sync, publisher: Publisher, user: Settings) -> None:
    assert user.home is not None
    path = user.home / "kartifacts.lock"
    foreign = Pin(library="else", version="1", sha256="a" * 64, size=5)
    add_pins(path, [foreign])
    first = ask(publisher, lock=path)
    assert foreign in first.lock.releases
    add_pins(path, [foreign, Pin(library="more", version="1", sha256="b" * 64, size=5)])
    assert read_lock(path).synced == [first.synced]
    another = msgspec.structs.replace(first.synced, repository="f" * 64)
    record(path, [], another)
    assert read_lock(path).synced == sorted([first.synced, another], key=lambda each: each.repository)


@pytest.mark.parametrize("role", ["root", "timestamp", "snapshot", "targets"])
def test_a_newer_state_that_another_process_wrote_meanwhile_stays(tmp_path: Path, role: str) -> None:
    synced = state(root=5, timestamp=5, snapshot=5, targets=5)
    record(tmp_path / "l", [], synced)
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(Overtaken):
        record(tmp_path / "l", [], msgspec.structs.replace(synced, **{role: 4}))
    assert (tmp_path / "l").read_bytes() == before
    lower = state(root=6, timestamp=1, snapshot=1, targets=1)  # keys were changed, to recover from stolen ones
    assert record(tmp_path / "l", [], lower).synced == [lower]


def test_many_processes_sync_one_lock_while_releases_appear(ask: Sync, publisher: Publisher, user: Settings) -> None:
    code = (
        "import sys; from kartifacts import config; from kartifacts.fetch.sync import sync\n"
        "settings = config.read({'HOME': sys.argv[1]}, {'mirrors': sys.argv[2]})\n"
        "for _ in range(5): sync(settings)"
    )
    assert user.home is not None
    home = user.home.parent.parent
    arguments = [sys.executable, "-c", code, str(home), f"file://{publisher.path}"]
    several = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    number = 0
    while any(process.poll() is None for process in several):
        number += 1
        atomically_release(publisher, f"5.{number}")
    for process in several:
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert versions(ask(publisher))["kernels"] == f"5.{number}"


def atomically_release(publisher: Publisher, version: str) -> None:
    """As publishers do: what timestamp.json names is there before, and that is replaced whole."""
    publisher.add("kernels", version)
    publisher.roles["kernels"].version += 1
    publisher.write("kernels")
    publisher.list("kernels")
    publisher.snapshot.version += 1
    publisher.write("snapshot")
    publisher.name_snapshot()
    publisher.timestamp.version += 1
    partial = publisher.file("partial")
    partial.write_bytes(publisher.encode("timestamp", publisher.timestamp))
    partial.replace(publisher.file("timestamp.json"))


def test_a_damaged_lock_is_not_overwritten(ask: Sync, publisher: Publisher, user: Settings) -> None:
    assert user.home is not None
    path = user.home / "kartifacts.lock"
    path.write_text("{")
    with pytest.raises(VerificationError, match=r"kartifacts\.lock"):
        ask(publisher)
    assert path.read_text() == "{"


# -- expiry and age ----------------------------------------------------------------------------------------------------


def test_an_exemption_is_used_only_where_no_mirror_is_fresh_and_is_recorded(ask: Sync, publisher: Publisher) -> None:
    late = publisher.copy("late")
    _expired(publisher, late)
    exemption = Exemption(soon(20).date(), "the ship is at sea")
    with pytest.raises(ExpiredMetadata, match=r"timestamp\.json.*expired at"):
        ask(f"file://{late}")
    outcome = ask(f"file://{late}", exemption=exemption)
    assert outcome.synced.accepted_expired_until == exemption.until.isoformat()
    assert outcome.synced.reason == "the ship is at sea"
    assert read_lock(outcome.path).synced == [outcome.synced]
    publisher.commit()
    publisher.commit()
    fresh = ask(f"file://{late}", publisher, exemption=exemption)
    assert fresh.synced.source == f"file://{publisher.path}"
    assert fresh.synced.accepted_expired_until == fresh.synced.reason == ""


@pytest.mark.parametrize("exemption", [Exemption(date(2020, 1, 1), "x"), Exemption(soon(9).date(), " ")])
def test_an_exemption_that_is_none_is_a_wrong_argument(ask: Sync, publisher: Publisher, exemption: Exemption) -> None:
    late = publisher.copy("late")
    _expired(publisher, late)
    with pytest.raises(ConfigError):
        ask(f"file://{late}", exemption=exemption)


def state(**changes: Any) -> Synced:
    fields: dict[str, Any] = dict.fromkeys(("root", "timestamp", "snapshot", "targets"), 1)
    fields |= {"repository": "e" * 64, "view": "online", "libraries": {}}
    fields |= {"expires": "2027-01-08T00:00:00Z", "at": "2027-01-01T00:00:00Z"}
    return Synced(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words", "sound"),
    [
        ({}, "synced 1 day ago; its metadata expires in 6 days", True),
        ({"expires": "2027-01-04T12:00:00Z"}, "expires in 2 days", False),
        ({"expires": "2027-01-01T22:00:00Z"}, "expired since 2 hours", False),
        ({"accepted_expired_until": "2027-02-01", "reason": "ship"}, "accepted until 2027-02-01 because 'ship'", True),
        ({"accepted_expired_until": "2027-01-01", "reason": "ship"}, "was accepted until 2027-01-01", False),
        ({"at": "yesterday", "expires": "never"}, "expires at 'never'", False),
        ({"at": "2028-01-01T00:00:00Z"}, "synced at '2028", True),
        ({"source": "https://mirror"}, "online view of https://mirror, synced", True),
    ],
)
def test_the_age_of_a_state_is_told(changes: dict[str, str], words: str, sound: bool) -> None:
    found = age(state(**changes), datetime(2027, 1, 2, tzinfo=timezone.utc))
    assert words in found.text
    assert found.sound is sound


def test_a_clock_that_went_back_is_warned_about(
    ask: Sync, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    first = ask(publisher)
    future = msgspec.structs.replace(first.synced, at=soon(40).isoformat())
    record(first.path, [], future)
    ask(publisher, lock=first.path)
    assert "clock" in caplog.text


def test_every_error_of_sync_is_one_of_ours(ask: Sync, publisher: Publisher, tmp_path: Path) -> None:
    for role in ("timestamp", "snapshot", "targets", "kernels", "other"):
        path = publisher.file(publisher.name(role))
        content = path.read_bytes()
        for number, bad in enumerate((b"", b"\0", content[:-1], content + b"}", b"[" * 5000)):
            path.write_bytes(bad)
            with pytest.raises((VerificationError, SourceError)):
                ask(publisher, store=tmp_path / f"{role}{number}", retries=0)
        path.write_bytes(content)
    assert ask(publisher)
