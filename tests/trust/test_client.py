"""What a reader comes to believe of a repository that keeps its word, and what it says where it cannot read it."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tuf.api.metadata import TargetFile

from kartifacts.errors import ConfigError, ExpiredMetadata, SourceError, StoreError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import View
from kartifacts.trust.client import refresh, refresh_expired, repository_id, view_of
from tests.trust.simulator import Publisher, instead, key, soon


def test_releases_come_with_their_pins_channels_and_keys(publisher: Publisher, state: Path) -> None:
    publisher.roles["kernels"].targets["kernels/1.1/provenance.json"] = TargetFile(9, {"sha256": "ab" * 32}, "p")
    publisher.publish("kernels")
    trusted = refresh(publisher.trust, state, publisher.read)
    library = trusted.libraries["kernels"]
    assert [(release.pin.version, release.channels) for release in library.releases] == [
        ("1.0", ()),
        ("1.1", ("stable",)),
    ]
    first, second = library.releases
    assert (first.pin.sha256, first.pin.size, first.provenance) == (sha256(b"first"), 5, None)
    assert second.provenance == ("ab" * 32, 9)
    assert second.published == "2026-01-01"
    assert (library.keys, library.threshold) == ((key("kernels").public_key,), 1)
    assert trusted.view == "online"
    assert trusted.seen.repository == repository_id(publisher.trust) == sha256(publisher.trust)
    assert trusted.seen.libraries == {"kernels": publisher.roles["kernels"].version, "other": 2}
    assert trusted.seen.timestamp == publisher.timestamp.version
    assert set(trusted.libraries) == {"kernels", "other"}


@pytest.mark.parametrize("view", ["online", "airgap"])
def test_the_root_says_in_which_directory_its_view_lies(tmp_path: Path, view: View) -> None:
    publisher = Publisher(tmp_path / "r", "kernels", view=view)
    publisher.release("kernels", "1")
    trusted = refresh(publisher.trust, None, publisher.read)
    assert trusted.view == trusted.seen.view == view_of(publisher.trust) == view
    assert {path.partition("/")[0] for path in trusted.files} == {"metadata" if view == "online" else "airgap"}


def test_the_files_that_were_used_make_a_mirror(publisher: Publisher, tmp_path: Path) -> None:
    publisher.next_root()
    trusted = refresh(publisher.trust, None, publisher.read)
    for path, content in trusted.files.items():
        (tmp_path / "mirror" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mirror" / path).write_bytes(content)
        assert (publisher.path / path).read_bytes() == content
    mirror = Publisher(tmp_path / "elsewhere")
    mirror.path = tmp_path / "mirror"
    assert refresh(publisher.trust, None, mirror.read) == trusted
    assert trusted.seen.root == 2


def test_only_the_libraries_that_are_wanted_are_read(publisher: Publisher) -> None:
    asked: list[str] = []

    def read(path: str, limit: int) -> bytes:
        asked.append(path)
        return publisher.read(path, limit)

    trusted = refresh(publisher.trust, None, read, libraries=["other"])
    assert set(trusted.libraries) == set(trusted.seen.libraries) == {"other"}
    assert not any("kernels" in path for path in asked)


@pytest.mark.parametrize("name", ["kernals", "fresh"])
def test_a_library_that_is_not_there_is_a_wrong_argument(publisher: Publisher, name: str) -> None:
    publisher.delegate("fresh")
    publisher.publish("targets")
    with pytest.raises(ConfigError, match=name):
        refresh(publisher.trust, None, publisher.read, libraries=[name])
    assert "fresh" not in refresh(publisher.trust, None, publisher.read).libraries


def test_a_library_whose_name_is_spelt_otherwise_in_urls_is_found(tmp_path: Path, state: Path) -> None:
    publisher = Publisher(tmp_path / "r", "c++_1.x")
    publisher.release("c++_1.x", "1.0+cu130")
    for _ in range(2):
        assert (
            refresh(publisher.trust, state, publisher.read).libraries["c++_1.x"].releases[0].pin.version == "1.0+cu130"
        )


def test_what_did_not_change_is_not_read_again(publisher: Publisher, state: Path) -> None:
    first = refresh(publisher.trust, state, publisher.read)
    asked: list[str] = []

    def read(path: str, limit: int) -> bytes:
        asked.append(path)
        return publisher.read(path, limit)

    assert refresh(publisher.trust, state, read) == first
    assert asked == ["metadata/2.root.json", "metadata/timestamp.json"]


def test_what_was_retired_between_two_reads_is_asked_for_once_more(publisher: Publisher, state: Path) -> None:
    old = publisher.content("timestamp.json")
    retired = publisher.file(publisher.name("snapshot"))
    publisher.release("kernels", "1.2")
    retired.unlink()
    given = [old]  # by a cache in between, once

    def read(path: str, limit: int) -> bytes:
        if path.endswith("timestamp.json") and given:
            return given.pop()
        return publisher.read(path, limit)

    assert refresh(publisher.trust, state, read).libraries["kernels"].releases[-1].pin.version == "1.2"


def test_what_stays_away_is_a_source_error(publisher: Publisher) -> None:
    publisher.file(publisher.name("kernels")).unlink()
    with pytest.raises(SourceError, match=r"kernels\.json") as caught:
        refresh(publisher.trust, None, publisher.read)
    assert caught.value.missing


def test_a_place_without_metadata_says_so(publisher: Publisher) -> None:
    with pytest.raises(SourceError, match=r"timestamp\.json"):
        refresh(publisher.trust, None, instead(publisher, {"timestamp.json": None, "2.root.json": None}))


@pytest.mark.parametrize("root", [b"", b"{}", b"[]", b"null", b"\xff", b'{"signed":{"_type":"root"}}', b"{" * 10_000])
def test_a_root_that_is_none_is_refused(root: bytes, publisher: Publisher) -> None:
    for ask in (lambda: refresh(root, None, publisher.read), lambda: view_of(root)):
        with pytest.raises(VerificationError):
            ask()


@pytest.mark.parametrize("view", [None, "both", 7, ["online"]])
def test_a_root_of_no_view_is_refused(publisher: Publisher, view: object) -> None:
    publisher.root.unrecognized_fields = {} if view is None else {"dev.kartifacts.view": view}
    with pytest.raises(VerificationError, match="view"):
        view_of(publisher.encode("root", publisher.root))


def test_a_damaged_memory_heals(publisher: Publisher, state: Path) -> None:
    first = refresh(publisher.trust, state, publisher.read)
    for path in state.rglob("*.json"):
        path.write_bytes(b"{" if path.name < "p" else b"")
    assert refresh(publisher.trust, state, publisher.read) == first


def test_what_killed_processes_left_goes(publisher: Publisher, state: Path) -> None:
    refresh(publisher.trust, state, publisher.read)
    (state / "tmp1234").write_bytes(b"half")
    refresh(publisher.trust, state, publisher.read)
    assert not list(state.glob("tmp*"))
    assert state.stat().st_mode & 0o777 == 0o700


def test_a_memory_that_others_may_write_is_refused(publisher: Publisher, state: Path) -> None:
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(StoreError, match="written by other users"):
        refresh(publisher.trust, state, publisher.read)


def test_a_memory_that_cannot_be_kept_is_said(publisher: Publisher, state: Path) -> None:
    state.write_bytes(b"a file")
    with pytest.raises(StoreError, match="state"):
        refresh(publisher.trust, state, publisher.read)


def test_many_processes_take_turns_on_one_memory(publisher: Publisher, state: Path) -> None:
    root = state.with_name("root.json")
    root.write_bytes(publisher.trust)
    code = (
        "import sys; from pathlib import Path; from kartifacts.trust.client import refresh\n"
        "from kartifacts.sources.directory import DirectorySource\n"
        "root, state, repository = map(Path, sys.argv[1:])\n"
        "print(refresh(root.read_bytes(), state, DirectorySource(repository).document).seen.timestamp)"
    )
    arguments = [sys.executable, "-c", code, str(root), str(state), str(publisher.path)]
    several = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in several:
        out, err = process.communicate()
        assert (process.returncode, out.strip()) == (0, str(publisher.timestamp.version)), err


def test_nothing_that_loads_kernels_imports_tuf() -> None:
    code = (
        "import sys, kartifacts, kartifacts.runtime, kartifacts.fetch, kartifacts.trust.client, kartifacts.fetch.sync\n"
        "print([name for name in ('tuf', 'securesystemslib', 'boto3', 'cryptography') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- expiry ------------------------------------------------------------------------------------------------------------

ROLES = ("root", "timestamp", "snapshot", "targets", "kernels")


def expire(publisher: Publisher, role: str) -> None:
    publisher.signed(role).expires = soon(-1)
    if role == "root":
        publisher.next_root()
    elif role in ("snapshot", "timestamp"):
        publisher.commit()
    else:
        publisher.publish(role)


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("role", ROLES)
def test_frozen_metadata_is_refused_by_name_with_both_clocks(
    publisher: Publisher, state: Path, role: str, remembered: bool
) -> None:
    if remembered:
        refresh(publisher.trust, state, publisher.read)
    expire(publisher, role)
    with pytest.raises(ExpiredMetadata, match=rf"{role}\.json.*expired at .*clock") as caught:
        refresh(publisher.trust, state, publisher.read)
    assert caught.value.expired == publisher.signed(role).expires.isoformat().replace("+00:00", "Z")
    assert "clock" in (caught.value.hint or "")


def test_a_clock_far_ahead_is_refused_with_both_times(publisher: Publisher) -> None:
    with pytest.raises(ExpiredMetadata, match="2099-01-01T00:00:00Z"):
        refresh(publisher.trust, None, publisher.read, now=datetime(2099, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize("role", ROLES)
def test_an_exception_accepts_what_is_expired_and_is_recorded(
    publisher: Publisher, state: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = refresh(publisher.trust, state, publisher.read)
    expire(publisher, role)
    until = soon(30).date()
    trusted = refresh_expired(publisher.trust, state, publisher.read, until=until, reason="moving the mirror")
    assert (trusted.seen.accepted_expired_until, trusted.seen.reason) == (until.isoformat(), "moving the mirror")
    assert trusted.libraries["kernels"].releases == before.libraries["kernels"].releases
    assert role in caplog.text
    assert "moving the mirror" in caplog.text
    with pytest.raises(ExpiredMetadata):  # the exception was for once
        refresh(publisher.trust, state, publisher.read)


def test_what_needs_no_exception_gets_none(publisher: Publisher, state: Path) -> None:
    plain = refresh(publisher.trust, None, publisher.read)
    for _ in range(2):
        assert refresh_expired(publisher.trust, state, publisher.read, until=soon(9).date(), reason="why not") == plain
    assert refresh(publisher.trust, state, publisher.read) == plain


@pytest.mark.parametrize(
    ("days", "reason", "words"),
    [(-2, "x", "today is"), (402, "x", "400 days"), (9, "", "reason"), (9, " \n", "reason")],
)
def test_an_exception_without_end_or_reason_is_refused(
    publisher: Publisher, days: int, reason: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        refresh_expired(publisher.trust, None, publisher.read, until=soon(days).date(), reason=reason)


def test_a_day_later_the_exception_is_over(publisher: Publisher) -> None:
    expire(publisher, "timestamp")
    later = datetime.now(timezone.utc) + timedelta(days=10)
    with pytest.raises(ConfigError, match="today is"):
        refresh_expired(publisher.trust, None, publisher.read, until=soon(9).date(), reason="x", now=later)


# -- what a Read may do ------------------------------------------------------------------------------------------------


def test_a_read_that_gives_more_than_was_asked_for_is_refused(publisher: Publisher) -> None:
    def huge(path: str, limit: int) -> bytes:
        return publisher.read(path, limit).ljust(limit + 1)

    with pytest.raises(SourceError, match="larger than"):
        refresh(publisher.trust, None, huge)


def test_a_length_that_signed_metadata_promises_is_bounded_all_the_same(publisher: Publisher) -> None:
    asked: list[int] = []

    def read(path: str, limit: int) -> bytes:
        asked.append(limit)
        return publisher.read(path, limit)

    publisher.timestamp.snapshot_meta.length = 10**12
    publisher.timestamp.version += 1
    publisher.write("timestamp")
    with pytest.raises(VerificationError, match="length"):
        refresh(publisher.trust, None, read)
    assert max(asked) <= 5_000_000


def test_time_is_bounded_over_all_files(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    from kartifacts.trust import client_session

    monkeypatch.setattr(client_session, "PATIENCE", -1.0)
    with pytest.raises(SourceError, match="did not come within"):
        refresh(publisher.trust, None, publisher.read)


def test_what_signs_at_aws_is_not_imported_to_verify_and_works_all_the_same() -> None:
    pytest.importorskip("boto3")
    code = (
        "import sys; from kartifacts.trust.client_imports import import_verifiers\n"
        "import_verifiers(); assert 'boto3' not in sys.modules and 'securesystemslib.signer' in sys.modules\n"
        "from securesystemslib.signer import _aws_signer\n"
        "assert _aws_signer.AWS_IMPORT_ERROR is None and 'boto3' not in sys.modules\n"
        "import boto3; assert _aws_signer.boto3.client is boto3.client; print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr


def test_no_second_http_client_is_imported_to_verify_and_none_stands_in_for_it_where_it_is_wanted() -> None:
    code = (
        "import sys; from kartifacts.trust.client_imports import import_verifiers\n"
        "import_verifiers(); import kartifacts.trust.client_session\n"
        "assert not {'urllib3', 'requests'} & sys.modules.keys()\n"
        "from tuf.ngclient.urllib3_fetcher import Urllib3Fetcher; Urllib3Fetcher(); assert 'urllib3' in sys.modules\n"
        "print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
