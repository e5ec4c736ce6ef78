"""The commands of who holds keys, as somebody types them."""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Root

from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.trust import keyceremony, keychange
from kartifacts.trust.client import refresh
from kartifacts.trust.keysigner import new_private_key
from tests.conftest import Answer, Machine
from tests.publish.test_signed import laid


@pytest.fixture
def keys(machine: Machine, tmp_path: Path) -> Path:
    assert machine.cli("keys", "init", tmp_path / "keys", "--library", "mylib").code == 0
    return tmp_path / "keys"


def failed(answer: Answer, code: int, *words: str) -> None:
    assert answer.code == code, answer.err
    assert answer.out == ""
    for word in words:
        assert word in answer.err
    assert "Traceback" not in answer.err


def reader(bucket: Path, root: bytes) -> object:
    return refresh(root, None, DirectoryBucket(bucket).get).seen


def test_the_way_from_a_ceremony_to_what_readers_believe(machine: Machine, keys: Path, tmp_path: Path) -> None:
    bucket, ci = tmp_path / "bucket", tmp_path / "ci"
    published = machine.cli("keys", "publish", f"dir:{bucket}", "--keys", keys, "--json")
    assert (published.code, published.err) == (0, "")
    assert published.data["views"]["online"]["root"] == 1
    exported = machine.cli("keys", "export", keys, ci, "--roles", "snapshot,timestamp,mylib", "--json")
    assert exported.data["roles"]["mylib"]["keys"][0]["here"] is True
    assert not any(key["here"] for key in exported.data["roles"]["online:root"]["keys"])
    refreshed = machine.cli("timestamp", "refresh", f"dir:{bucket}", "--keys", ci, "--json")
    assert (refreshed.code, refreshed.err) == (0, "")
    assert refreshed.data["views"]["online"]["timestamp"] == 2
    assert refreshed.data["expires"][0]["role"] == "timestamp"
    assert refreshed.data["soon"] == []
    root = machine.cli("keys", "root", keys)
    assert machine.cli("keys", "root", keys, "--out", tmp_path / "root.json").code == 0
    assert (tmp_path / "root.json").read_text() == root.out.rstrip("\n")
    assert reader(bucket, (tmp_path / "root.json").read_bytes())
    assert json.loads(machine.cli("keys", "root", keys, "--view", "airgap").out) != json.loads(root.out)


def test_texts_say_what_json_says(machine: Machine, keys: Path, tmp_path: Path) -> None:
    shown = machine.cli("keys", "show", keys)
    for name, role in machine.cli("keys", "show", keys, "--json").data["roles"].items():
        line = next(line for line in shown.out.splitlines() if line.startswith(f"{name}: "))
        assert f"{role['threshold']} of {len(role['keys'])}" in line
        assert all(key["id"][:8] in line for key in role["keys"])
    assert "metadata/1.root.json: expires 20" in shown.out
    staged = machine.cli("keys", "rotate", keys, "timestamp", "--view", "online")
    assert (staged.code, staged.err) == (0, "")
    assert "metadata/2.root.json" in staged.out
    assert "retiring" in machine.cli("keys", "show", keys).out
    assert machine.cli("keys", "rotate", keys, "timestamp", "--finish").code == 0
    assert "retiring" not in machine.cli("keys", "show", keys).out


def test_a_whole_life_of_keys_leaves_readers_with_what_is_current(machine: Machine, keys: Path, tmp_path: Path) -> None:
    bucket = f"dir:{tmp_path / 'bucket'}"
    publish = ("keys", "publish", bucket, "--keys", keys)
    assert machine.cli(*publish).code == 0
    for command in (
        ("add-library", keys, "other", "--threshold", "1/2"),
        ("rotate", keys, "targets"),
        ("renew", keys, "root"),
        ("rotate", keys, "targets", "--finish"),
        ("rotate", keys, "root", "--view", "airgap"),
        ("remove-library", keys, "other"),
    ):
        answer = machine.cli("keys", *command)
        assert answer.code == 0, answer.err
        assert machine.cli(*publish).code == 0
    seen = machine.cli(*publish, "--json").data["views"]
    assert (seen["online"]["root"], seen["airgap"]["root"]) == (4, 5)
    assert seen["online"]["targets"] == seen["airgap"]["targets"] == 4


def test_publishing_refuses_a_root_below_its_threshold_and_says_how_many_are_missing(
    machine: Machine, tmp_path: Path
) -> None:
    publics = []
    for name in ("alice", "bob", "carol"):
        pem, key = new_private_key(None)
        (tmp_path / f"{name}.pem").write_bytes(pem)
        (tmp_path / f"{name}.pem").chmod(0o600)
        (tmp_path / f"{name}.json").write_text(json.dumps({"keyid": key.keyid, **key.to_dict()}))
        publics += ["--signer", f"online:root=,{tmp_path / f'{name}.json'}"]
    keys, bucket = tmp_path / "keys", tmp_path / "bucket"
    made = machine.cli("keys", "init", keys, *publics)
    assert "0 of 2 signatures" in made.out
    publish = ("keys", "publish", f"dir:{bucket}", "--keys", keys)
    root = keys / "metadata/1.root.json"
    failed(machine.cli("keys", "root", keys), 5, "0 of 2", "keys sign")
    assert machine.cli("keys", "root", keys, "--view", "airgap").code == 0
    failed(machine.cli(*publish), 5, "0 of 2")
    assert "1 of 2" in machine.cli("keys", "sign", root, "--key", tmp_path / "alice.pem").out
    failed(machine.cli(*publish), 5, "1 of 2")
    assert not bucket.exists()
    signed = machine.cli("keys", "sign", root, "--key", tmp_path / "bob.pem", "--json")
    assert signed.data["lacks"] == []
    assert machine.cli(*publish).code == 0
    assert reader(bucket, root.read_bytes())


def test_a_staged_root_that_people_have_not_signed_is_an_error_after_all_else_was_published(
    machine: Machine, keys: Path, tmp_path: Path
) -> None:
    publish = ("keys", "publish", f"dir:{tmp_path / 'bucket'}", "--keys", keys)
    assert machine.cli(*publish).code == 0
    aside = tmp_path / "aside"
    shutil.move(keys / "private", aside)
    (keys / "private").mkdir()
    for path in aside.iterdir():
        if not path.name.startswith("online-root"):
            shutil.copy(path, keys / "private")
    assert "0 of 2" in machine.cli("keys", "renew", keys, "root").out
    failed(machine.cli(*publish), 5, "0 of 2", "2.root.json")
    assert (tmp_path / "bucket/airgap/2.root.json").exists()
    assert not (tmp_path / "bucket/metadata/2.root.json").exists()
    shutil.rmtree(keys / "private")
    shutil.move(aside, keys / "private")
    assert machine.cli("keys", "sign", keys / "metadata/2.root.json", "--keys", keys).code == 0
    assert machine.cli(*publish).code == 0


def test_a_refresh_warns_of_what_people_have_to_renew_and_succeeds(machine: Machine, tmp_path: Path) -> None:
    long_ago = datetime.now(timezone.utc) - timedelta(days=2 * 365 - 20)
    keyceremony.init(tmp_path / "keys", ["mylib"], {}, now=long_ago)
    bucket = f"dir:{tmp_path / 'bucket'}"
    assert machine.cli("keys", "publish", bucket, "--keys", tmp_path / "keys").code == 0
    answer = machine.cli("timestamp", "refresh", bucket, "--keys", tmp_path / "keys")
    assert answer.code == 0
    warned = [line.split()[1] for line in answer.err.splitlines() if line.startswith("warning: ")]
    assert warned == ["targets"]
    assert "keys renew" in answer.err
    keychange.renew(tmp_path / "keys", "targets", now=datetime.now(timezone.utc))
    assert machine.cli("keys", "publish", bucket, "--keys", tmp_path / "keys").code == 0
    assert machine.cli("timestamp", "refresh", bucket, "--keys", tmp_path / "keys").err == ""


def test_a_refresh_that_could_not_sign_fails(machine: Machine, keys: Path, tmp_path: Path) -> None:
    bucket = f"dir:{tmp_path / 'bucket'}"
    assert machine.cli("keys", "publish", bucket, "--keys", keys).code == 0
    before = (tmp_path / "bucket/metadata/timestamp.json").read_bytes()
    assert machine.cli("keys", "export", keys, tmp_path / "lib", "--roles", "mylib").code == 0
    failed(machine.cli("timestamp", "refresh", bucket, "--keys", tmp_path / "lib"), 2, "timestamp", "0 of 1")
    assert machine.cli("keys", "export", keys, tmp_path / "on", "--roles", "timestamp", "--view", "online").code == 0
    failed(machine.cli("timestamp", "refresh", bucket, "--keys", tmp_path / "on", "--view", "all"), 2, "airgap")
    assert (tmp_path / "bucket/metadata/timestamp.json").read_bytes() == before
    assert machine.cli("timestamp", "refresh", bucket, "--keys", tmp_path / "on").code == 0
    assert (tmp_path / "bucket/metadata/timestamp.json").read_bytes() != before


@pytest.mark.parametrize(
    "command",
    [
        ("timestamp", "refresh"),
        ("promote", "mylib", "1.0", "--channel", "stable"),
        ("retire", "mylib", "1.0"),
        ("retain",),
    ],
    ids=lambda command: command[0],
)
def test_only_publishing_begins_a_repository(
    machine: Machine, keys: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    words = 2 if command[0] == "timestamp" else 1
    bucket = f"dir:{tmp_path / 'mistyped'}"
    answer = machine.cli(*command[:words], bucket, *command[words:], "--keys", keys)
    failed(answer, 2, "nothing is signed in", "mistyped", "keys publish")
    assert not (tmp_path / "mistyped").exists()


def test_of_an_expired_library_its_own_readers_are_told_and_others_go_on(machine: Machine, tmp_path: Path) -> None:
    now = datetime.now(timezone.utc)
    keyring = keyceremony.init(tmp_path / "keys", ["idle", "mylib"], {}, now=now)
    bucket = DirectoryBucket(tmp_path / "bucket")
    laid(bucket, keyring, now, {"idle": now - timedelta(days=800), "mylib": now})
    keyceremony.export(keyring, tmp_path / "ci", ["mylib", "snapshot", "timestamp"])
    refreshed = machine.run_cli("timestamp", "refresh", f"dir:{bucket.root}", "--keys", tmp_path / "ci")
    assert refreshed.code == 0
    assert refreshed.err.count("role of library 'idle' expired") == refreshed.err.count("\n") == 1
    assert "--accept-expired" not in refreshed.err
    (tmp_path / "root.json").write_bytes(keyring.root("online"))
    sync = ("sync", "--root", tmp_path / "root.json", "--lock", tmp_path / "lock")
    every = machine.run_cli(*sync, mirrors=f"file://{bucket.root}")
    assert every.code == 11
    assert "idle.json" in every.err
    one = machine.run_cli(*sync, "--library", "mylib", mirrors=f"file://{bucket.root}")
    assert one.code == 0, one.err
    assert machine.cli("timestamp", "refresh", f"dir:{bucket.root}", "--keys", tmp_path / "keys").err == ""
    assert machine.run_cli(*sync, mirrors=f"file://{bucket.root}").code == 0


def test_a_refresh_renews_one_view_and_leaves_the_other(machine: Machine, keys: Path, tmp_path: Path) -> None:
    bucket = f"dir:{tmp_path / 'bucket'}"
    assert machine.cli("keys", "publish", bucket, "--keys", keys).code == 0
    answer = machine.cli("timestamp", "refresh", bucket, "--keys", keys, "--view", "airgap", "--json")
    assert set(answer.data["views"]) == {"airgap"}
    assert json.loads((tmp_path / "bucket/airgap/timestamp.json").read_text())["signed"]["version"] == 2
    assert json.loads((tmp_path / "bucket/metadata/timestamp.json").read_text())["signed"]["version"] == 1


def test_a_passphrase_comes_from_a_file_and_never_from_the_command_line(machine: Machine, tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys", tmp_path / "secret"
    secret.write_text("open sesame\n")
    made = machine.cli("keys", "init", keys, "--library", "mylib", "--passphrase-file", secret)
    assert made.code == 0
    assert all(b"ENCRYPTED" in path.read_bytes() for path in (keys / "private").iterdir())
    publish = ("keys", "publish", f"dir:{tmp_path / 'bucket'}", "--keys", keys)
    failed(machine.cli(*publish), 2, "passphrase", "--passphrase-file")
    (tmp_path / "wrong").write_text("open barley\n")
    failed(machine.cli(*publish, "--passphrase-file", tmp_path / "wrong"), 2, "does not open")
    for content in (b"", b"\n", b"\xff"):
        (tmp_path / "wrong").write_bytes(content)
        failed(machine.cli(*publish, "--passphrase-file", tmp_path / "wrong"), 2, "passphrase")
    failed(machine.cli(*publish, "--passphrase-file", tmp_path / "none"), 2, "cannot read the passphrase")
    assert machine.cli(*publish, "--passphrase-file", secret).code == 0
    assert machine.cli("keys", "show", keys).code == 0


def test_new_keys_of_an_encrypted_keyring_are_encrypted_or_not_made(machine: Machine, tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys", tmp_path / "secret"
    secret.write_text("open sesame\n")
    assert machine.cli("keys", "init", keys, "--library", "mylib", "--passphrase-file", secret).code == 0
    before = sorted((keys / "private").iterdir())
    for command in (("rotate", keys, "timestamp"), ("rotate", keys, "root"), ("add-library", keys, "other")):
        failed(machine.cli("keys", *command), 2, "to be encrypted", "--passphrase-file")
        (tmp_path / "wrong").write_text("open barley\n")
        failed(machine.cli("keys", *command, "--passphrase-file", tmp_path / "wrong"), 2, "does not open")
        assert sorted((keys / "private").iterdir()) == before
    assert machine.cli("keys", "rotate", keys, "timestamp", "--passphrase-file", secret).code == 0
    assert len(list((keys / "private").iterdir())) == len(before) + 2
    assert all(b"ENCRYPTED" in path.read_bytes() for path in (keys / "private").iterdir())
    finished = machine.cli("keys", "rotate", keys, "timestamp", "--finish", "--passphrase-file", secret)
    assert finished.code == 0


def test_what_is_staged_says_the_next_step(machine: Machine, keys: Path) -> None:
    assert "keys sign" not in machine.cli("keys", "rotate", keys, "timestamp").out
    for path in (keys / "private").glob("*-root-*"):
        path.unlink()
    for command in (("rotate", "snapshot"), ("renew", "root")):
        answer = machine.cli("keys", command[0], keys, command[1])
        assert answer.code == 0
        assert answer.out.index("kartifacts keys sign") < answer.out.index("kartifacts keys publish")


def test_an_export_that_is_too_old_says_how_to_get_a_new_one_under_the_same_path(
    machine: Machine, keys: Path, tmp_path: Path
) -> None:
    publish = ("keys", "publish", f"dir:{tmp_path / 'bucket'}", "--keys", keys)
    export = ("keys", "export", keys, tmp_path / "ci", "--roles", "snapshot,timestamp,mylib")
    refresh = ("timestamp", "refresh", f"dir:{tmp_path / 'bucket'}", "--keys", tmp_path / "ci")
    assert machine.cli(*publish).code == machine.cli(*export).code == 0
    for step in ((), ("--finish",)):
        assert machine.cli("keys", "rotate", keys, "timestamp", *step).code == 0
        assert machine.cli(*publish).code == 0
    failed(
        machine.cli(*refresh), 2, "0 of 1", "export a new keyring from the one where the keys were made", "--replace"
    )
    failed(machine.cli(*export), 2, "--replace")
    assert machine.cli(*export, "--replace").code == 0
    assert machine.cli(*refresh).code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--library", "root"),
        ("--library", "../x"),
        ("--threshold", "root"),
        ("--threshold", "root=3/2"),
        ("--threshold", "root=0/1"),
        ("--threshold", "root=two/3"),
        ("--threshold", "nothing=1/1"),
        ("--threshold", "sideways:root=1/1"),
        ("--signer", "targets=awskms:key"),
        ("--signer", "targets=nothing:key,k.pub"),
        ("--signer", "targets=awskms:key,none.pub"),
        ("--signer", "=,"),
    ],
)
def test_an_init_that_makes_no_sense_makes_nothing(
    machine: Machine, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    failed(machine.cli("keys", "init", tmp_path / "keys", *arguments), 2)
    assert not (tmp_path / "keys").exists()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_thresholds_are_those_that_were_asked_for(machine: Machine, tmp_path: Path) -> None:
    made = machine.cli(
        "keys", "init", tmp_path / "keys", "--threshold", "root=1/1", "--threshold", "airgap:root=3/5", "--library",
        "mylib", "--threshold", "mylib=2/2", "--json",
    )  # fmt: skip
    counts = {name: (role["threshold"], len(role["keys"])) for name, role in made.data["roles"].items()}
    assert counts["online:root"] == (1, 1)
    assert counts["airgap:root"] == (3, 5)
    assert counts["mylib"] == (2, 2)
    assert counts["targets"] == (2, 3)


def test_nobody_to_sign_and_nothing_to_sign_are_errors(machine: Machine, keys: Path, tmp_path: Path) -> None:
    root = keys / "metadata/1.root.json"
    failed(machine.cli("keys", "sign", root), 2, "nobody to sign")
    failed(machine.cli("keys", "sign", tmp_path / "none.json", "--keys", keys), 9)
    failed(machine.cli("keys", "rotate", keys, "timestamp", "--finish", "--key", "ab"), 2, "--finish")
    failed(machine.cli("keys", "show", tmp_path), 2, "not a keyring")
    signer = f"file2:{tmp_path / 'none.pem'},none.pub"
    failed(machine.cli("keys", "add-library", keys, "other", "--signer", signer), 2, "no private key", "none.pem")
    failed(machine.cli("keys", "publish", "ftp://x", "--keys", keys), 2)


def test_what_is_signed_says_which_view_it_is_of(machine: Machine, keys: Path) -> None:
    for view, directory in (("online", "metadata"), ("airgap", "airgap")):
        root = Metadata[Root].from_file(str(keys / directory / "1.root.json")).signed
        assert root.unrecognized_fields["dev.kartifacts.view"] == view


def test_asking_for_help_does_not_load_what_signs(machine: Machine) -> None:
    answer = machine.python(
        "import sys; from kartifacts.cli import keys; print([name for name in sys.modules if name.split('.')[0] in "
        "('tuf', 'securesystemslib', 'cryptography')])"
    )
    assert answer.out.strip() == "[]"


def test_keyrings_are_opened_only_by_who_may(machine: Machine, keys: Path) -> None:
    private = next((keys / "private").glob("mylib-*"))
    private.chmod(0o644)
    failed(machine.cli("keys", "sign", keys / "metadata/1.targets.json", "--key", private), 2, "chmod 600")
    keys.chmod(0o777)
    failed(machine.cli("keys", "show", keys), 2, "cannot be trusted")


def test_the_root_is_given_as_json_too_byte_for_byte(machine: Machine, keys: Path, tmp_path: Path) -> None:
    given = machine.cli("keys", "root", keys, "--view", "airgap", "--json").data
    assert given["view"] == "airgap"
    assert given["sha256"] == hashlib.sha256(given["root"].encode()).hexdigest()
    assert given["root"].encode() == (keys / "airgap" / "1.root.json").read_bytes()
    file = tmp_path / "root.json"
    written = machine.cli("keys", "root", keys, "--view", "airgap", "--out", file, "--json").data
    assert (written["out"], file.read_text()) == (str(file), written["root"])


@pytest.mark.parametrize("content", [b"{}", b"junk", None], ids=["empty", "junk", "another version"])
@pytest.mark.parametrize("name", ["2.root.json", "2.targets.json"])
@pytest.mark.parametrize("command", ["show", "renew", "publish"])
def test_a_file_of_a_keyring_that_is_not_what_its_name_says_is_named(
    machine: Machine, keys: Path, tmp_path: Path, command: str, name: str, content: bytes | None
) -> None:
    path = keys / "metadata" / name
    path.write_bytes(path.with_name(name.replace("2", "1")).read_bytes() if content is None else content)
    arguments = {"show": (keys,), "renew": (keys, "targets"), "publish": (f"dir:{tmp_path}/b", "--keys", keys)}[command]
    answer = machine.cli("keys", command, *arguments)
    assert answer.code == 5
    assert str(path) in answer.err
    assert "says that it is version 1 of" in answer.err if content is None else "is not TUF metadata" in answer.err
    assert not (tmp_path / "b").exists()
