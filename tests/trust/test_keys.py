"""Keyrings: nothing half made, no key that others can read, and thresholds that several people meet."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from kartifacts.errors import ConfigError, KartifactsError, StoreError, VerificationError
from kartifacts.model.layout import VIEWS
from kartifacts.trust import keyceremony, keychange
from kartifacts.trust.keyfiles import Plan
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.keysigner import check_uri, new_private_key, open_private, open_signer, read_public
from kartifacts.trust.keytravel import sign_file
from kartifacts.trust.signing import check_signed, role_with

NOW = datetime.now(timezone.utc)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    keyceremony.init(tmp_path / "keys", ["mylib"], {}, now=NOW)
    return tmp_path / "keys"


def private_of(keys: Path, beginning: str) -> Path:
    return next((keys / "private").glob(f"{beginning}-*.pem"))


def person(directory: Path, name: str, passphrase: str | None = None) -> tuple[Path, Path]:
    """The files of somebody's private and public key."""
    pem, _ = new_private_key(passphrase)
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    private.write_bytes(pem)
    private.chmod(0o600)
    key = load_pem_private_key(pem, passphrase.encode() if passphrase else None)
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


# -- making ------------------------------------------------------------------------------------------------------------


def test_a_new_keyring_is_complete_and_only_its_owner_can_read_its_keys(keys: Path) -> None:
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    private = sorted((keys / "private").iterdir())
    assert len(private) == 2 * (3 + 1 + 1) + 3 + 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    keyring = Keyring.load(keys)
    for view in VIEWS:
        assert set(keyring.staged(view)) == {"1.root.json", "1.targets.json"}
        for content in keyring.staged(view).values():
            assert keychange.lacks(keyring, view, content) == ""
        thresholds = {role: keyring.grant(role, view).threshold for role in ("root", "targets", "snapshot", "mylib")}
        assert thresholds == {"root": 2, "targets": 2, "snapshot": 1, "mylib": 1}
    assert not set(os.listdir(keys)) - {"keys.json", "private", "metadata", "airgap"}


def test_the_views_share_no_key_but_those_of_targets_and_libraries(keys: Path) -> None:
    keyring = Keyring.load(keys)
    for role in ("root", "snapshot", "timestamp"):
        online, airgap = ({key.keyid for key in keyring.grant(role, view).keys} for view in VIEWS)
        assert not online & airgap


def test_a_keyring_is_never_overwritten(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="never overwritten"):
        keyceremony.init(keys, ["other"], {}, now=NOW)
    with pytest.raises(ConfigError, match="never overwritten"):
        keyceremony.export(Keyring.load(keys), keys, ["timestamp"])
    assert before == {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["file", "full", "link"])
def test_nothing_that_lies_where_a_keyring_is_to_be_is_replaced(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "keys"
    if kind == "full":
        place.mkdir()
        (place / "note").write_text("mine")
    else:
        place.write_text("mine") if kind == "file" else place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        keyceremony.init(place, [], {}, now=NOW)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize("number", [1, 2, 15, 28, 30, 34])
def test_an_init_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    writes = iter(range(1, 100))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(writes) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="No space left"):
        keyceremony.init(tmp_path / "keys", ["mylib"], {}, now=NOW)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from datetime import datetime, timezone
from pathlib import Path
real, left = os.fsync, [int(sys.argv[2])]
def fsync(descriptor):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), 9)
    real(descriptor)
os.fsync = fsync
from kartifacts.trust import keyceremony, keychange
now = datetime.now(timezone.utc)
path = Path(sys.argv[1])
if path.exists():
    keychange.rotate(path, "mylib", now=now)
else:
    keyceremony.init(path, ["mylib"], {}, now=now)
"""


def killed_at(path: Path, number: int) -> bool:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(number)], capture_output=True, check=False)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


@pytest.mark.parametrize("number", [1, 20, 33])
def test_a_killed_init_leaves_nothing_under_the_name_of_the_keyring(tmp_path: Path, number: int) -> None:
    assert killed_at(tmp_path / "keys", number)
    assert not (tmp_path / "keys").exists()
    keyceremony.init(tmp_path / "keys", ["mylib"], {}, now=NOW)
    assert Keyring.load(tmp_path / "keys").signers("mylib")


def test_a_rotation_that_is_killed_can_be_made_again(tmp_path: Path) -> None:
    keyceremony.init(tmp_path / "made", ["mylib"], {}, now=NOW)
    for number in range(1, 9):
        keys = tmp_path / str(number)
        shutil.copytree(tmp_path / "made", keys)
        was_killed = killed_at(keys, number)
        keyring = Keyring.load(keys)
        assert keyring.signers("mylib")
        if keyring.exchange("mylib") is None:
            keychange.rotate(keys, "mylib", now=NOW)
        keychange.finish(keys, "mylib", now=NOW)
        assert len(Keyring.load(keys).grant("mylib").keys) == 1
        if not was_killed:
            return
    raise AssertionError("there are more writes than were tried")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_private_key_that_others_may_read_is_refused_as_ssh_does(keys: Path) -> None:
    for mode in (0o640, 0o604, 0o660):
        private_of(keys, "mylib").chmod(mode)
        with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 600|other users may read"):
            Keyring.load(keys).signers("mylib")
    assert Keyring.load(keys).signers("targets")
    private_of(keys, "mylib").chmod(0o400)
    assert Keyring.load(keys).signers("mylib")


def test_a_keyring_that_others_may_write_to_is_refused(keys: Path) -> None:
    keys.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        Keyring.load(keys)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"version":2,"keys":{}}',
        b'{"version":1}',
        b'{"version":1,"keys":{},"more":1}',
        b'{"version":1,"version":1,"keys":{}}',
        b'{"version":1,"keys":{"a":{"public":{}}}}',
        b'{"version":1,"keys":{"a":{"public":{"keytype":"x","scheme":"y","keyval":3}}}}',
        b'{"version":1,"keys":{"a":{"public":{"keytype":"ed25519","scheme":"ed25519","keyval":{"public":5}}}}}',
        b'{"version":1,"keys":{"a":{"public":{"keytype":["x"],"scheme":"y","keyval":{}}}}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_keys_json_is_a_clear_error(keys: Path, content: bytes) -> None:
    (keys / "keys.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        Keyring.load(keys)


def test_every_byte_of_keys_json_that_is_flipped_is_refused_or_changes_nothing_that_is_signed(keys: Path) -> None:
    whole = (keys / "keys.json").read_bytes()
    for at in range(0, len(whole), 37):
        (keys / "keys.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            keyring = Keyring.load(keys)
            signers = [*keyring.available("root"), *keyring.available("targets"), *keyring.available("mylib")]
        except ConfigError:
            continue
        known = {key.keyid for name in ("root", "targets", "mylib") for key in keyring.grant(name).keys}
        assert {signer.public_key.keyid for signer in signers} <= known


@pytest.mark.parametrize("missing", ["keys.json", "metadata/1.root.json", "metadata/1.targets.json", "airgap"])
def test_a_keyring_that_lacks_a_part_says_which(keys: Path, missing: str) -> None:
    gone = keys / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(ConfigError):
        Keyring.load(keys).staged("online") and Keyring.load(keys).staged("airgap")


def test_a_uri_that_leads_out_of_the_keyring_is_refused(keys: Path) -> None:
    content = (keys / "keys.json").read_text()
    (keys / "keys.json").write_text(content.replace("file2:private/", "file2:private/../../"))
    with pytest.raises(ConfigError, match="leads out"):
        Keyring.load(keys)


def test_what_is_no_keyring_is_said_to_be_none(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="not a keyring"):
            Keyring.load(place)


def test_a_private_key_that_is_another_ones_is_refused(keys: Path) -> None:
    shutil.copy(private_of(keys, "targets"), private_of(keys, "mylib"))
    with pytest.raises(ConfigError, match="does not sign for key"):
        Keyring.load(keys).signers("mylib")


@pytest.mark.parametrize("content", [b"", b"x", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_private_key_that_is_none_is_refused(keys: Path, content: bytes) -> None:
    private_of(keys, "mylib").write_bytes(content)
    with pytest.raises(ConfigError, match="no private key"):
        Keyring.load(keys).signers("mylib")


@pytest.mark.parametrize(
    "plans",
    [
        {"root": Plan(2, 3)},
        {"online:root": Plan(3, 2)},
        {"mylib": Plan(0, 1)},
        {"other": Plan()},
        {"online:targets": Plan()},
    ],
    ids=repr,
)
def test_a_plan_that_makes_no_sense_is_refused(tmp_path: Path, plans: dict[str, Plan]) -> None:
    with pytest.raises(ConfigError):
        keyceremony.init(tmp_path / "keys", ["mylib"], plans, now=NOW)
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_one_view_is_never_a_key_of_the_other(tmp_path: Path) -> None:
    private, public = person(tmp_path, "shared")
    signer = ((f"file2:{private}", read_public(str(public))),)
    plans = {"online:timestamp": Plan(signers=signer), "airgap:timestamp": Plan(signers=signer)}
    with pytest.raises(ConfigError, match="other view"):
        keyceremony.init(tmp_path / "keys", [], plans, now=NOW)
    keyceremony.init(tmp_path / "keys", [], {"online:timestamp": Plan(signers=signer)}, now=NOW)
    with pytest.raises(ConfigError, match="other view"):
        keychange.rotate(tmp_path / "keys", "snapshot", views=["airgap"], signers=signer, now=NOW)


@pytest.mark.parametrize("uri", ["", "file:x", "file2", "ftp://x", "tkey:", "sigstore:", "/etc/passwd", "FILE2:x"])
def test_a_signer_of_no_known_kind_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="no URI of a signer"):
        check_uri(uri)


@pytest.mark.parametrize(
    "uri", ["awskms:key", "gcpkms:projects/x", "azurekms://x/keys/y/z", "hv:key/1", "hsm:2?label=x", "hsm:notanumber"]
)
def test_a_service_that_is_not_there_is_an_error_of_ours(tmp_path: Path, uri: str) -> None:
    _, public = person(tmp_path, "key")
    with pytest.raises(ConfigError):
        open_signer(uri, read_public(str(public)), directory=tmp_path).sign(b"x")


@pytest.mark.parametrize("content", [b"", b"x", b"{}", b'{"keyid":3}', b"\x00" * 100, b"private"])
def test_what_is_no_public_key_is_refused(tmp_path: Path, content: bytes) -> None:
    private, _ = person(tmp_path, "key")
    path = tmp_path / "public"
    path.write_bytes(private.read_bytes() if content == b"private" else content)
    with pytest.raises(ConfigError, match="no public key"):
        read_public(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_public(str(tmp_path / "nothing"))


# -- passphrases -------------------------------------------------------------------------------------------------------


def test_encrypted_keys_open_by_their_passphrase_and_by_no_other(tmp_path: Path) -> None:
    keyceremony.init(tmp_path / "keys", ["mylib"], {}, now=NOW, passphrase="open sesame")
    assert b"ENCRYPTED" in private_of(tmp_path / "keys", "mylib").read_bytes()
    asked = []

    def answer(name: str) -> str:
        asked.append(name)
        return "open sesame"

    assert Keyring.load(tmp_path / "keys", secret=answer).signers("mylib")
    assert len(asked) == 1
    assert "mylib" in asked[0]
    with pytest.raises(ConfigError, match="does not open"):
        Keyring.load(tmp_path / "keys", secret=lambda _: "wrong").signers("mylib")
    with pytest.raises(ConfigError, match="passphrase"):
        Keyring.load(tmp_path / "keys").signers("mylib")


# -- several machines --------------------------------------------------------------------------------------------------


def test_the_keyring_of_a_machine_that_publishes_holds_no_offline_key(keys: Path, tmp_path: Path) -> None:
    ci = keyceremony.export(Keyring.load(keys), tmp_path / "ci", ["snapshot", "timestamp", "mylib"], ["online"])
    assert sorted(path.name.rpartition("-")[0] for path in (tmp_path / "ci/private").iterdir()) == [
        "mylib",
        "online-snapshot",
        "online-timestamp",
    ]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "ci/private").iterdir()} == {0o600}
    assert all(ci.signers(role) for role in ("snapshot", "timestamp", "mylib"))
    assert ci.root("airgap") == Keyring.load(keys).root("airgap")
    for role in ("root", "targets"):
        assert ci.available(role) == []
        with pytest.raises(ConfigError, match=f"{role}.*0 of 2 private keys"):
            ci.signers(role)
    with pytest.raises(ConfigError, match="airgap:timestamp"):
        ci.signers("timestamp", view="airgap")
    with pytest.raises(ConfigError, match="no private key of 'targets'"):
        keyceremony.export(ci, tmp_path / "more", ["targets"])
    assert not (tmp_path / "more").exists()


def test_a_root_becomes_whole_by_the_signatures_of_people_on_their_own_machines(tmp_path: Path) -> None:
    people = {name: person(tmp_path, name) for name in ("alice", "bob", "carol")}
    signers = tuple(("", read_public(str(public))) for _, public in people.values())
    keyring = keyceremony.init(tmp_path / "keys", [], {"online:root": Plan(2, 3, signers)}, now=NOW)
    staged = keyring.file("online", "1.root.json")
    assert "0 of 2" in keychange.lacks(keyring, "online", staged.read_bytes())
    copies = {}
    for name in ("alice", "bob"):
        (tmp_path / name).mkdir()
        copies[name] = tmp_path / name / "1.root.json"
        shutil.copy(staged, copies[name])
        signer = open_private(people[name][0])
        assert sign_file(copies[name], lambda wanted, signer=signer: [signer])  # type: ignore[misc]
    assert sign_file(staged, lambda wanted: [], copies=list(copies.values())) == []
    check_signed(staged.read_bytes(), "root", staged.read_bytes(), "root")
    assert keychange.lacks(keyring, "online", staged.read_bytes()) == ""


def test_a_file_takes_no_signature_of_a_key_it_does_not_ask_for(keys: Path, tmp_path: Path) -> None:
    private, _ = person(tmp_path, "stranger")
    root = keys / "metadata/1.root.json"
    before = root.read_bytes()
    with pytest.raises(ConfigError, match="does not sign"):
        sign_file(root, lambda wanted: [open_private(private)])
    with pytest.raises(ConfigError, match="does not sign"):
        sign_file(keys / "metadata/1.targets.json", lambda wanted: [open_private(private_of(keys, "mylib"))])
    assert root.read_bytes() == before


def test_a_rotated_root_asks_for_signatures_of_the_keys_before_too(keys: Path, tmp_path: Path) -> None:
    people = [person(tmp_path, name) for name in ("alice", "bob")]
    signers = [("", read_public(str(public))) for _, public in people]
    keychange.rotate(keys, "root", views=["online"], signers=signers, now=NOW)
    root = keys / "metadata/2.root.json"
    lacks = keychange.lacks(Keyring.load(keys), "online", root.read_bytes())
    assert "0 of 2" in lacks
    assert sign_file(root, lambda wanted: [open_private(private) for private, _ in people]) == []
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(root, alone)
    with pytest.raises(ConfigError, match="the one before"):
        sign_file(alone / "2.root.json", lambda wanted: [open_private(private_of(keys, "online-root"))])


@pytest.mark.parametrize("content", [b"", b"{}", b"snapshot"])
def test_what_people_do_not_sign_is_refused(keys: Path, content: bytes) -> None:
    path = keys / "metadata/5.root.json"
    path.write_bytes(content)
    with pytest.raises(KartifactsError):
        sign_file(path, lambda wanted: [])


def test_a_targets_file_without_a_root_beside_it_says_what_is_missing(keys: Path, tmp_path: Path) -> None:
    shutil.copy(keys / "metadata/1.targets.json", tmp_path)
    with pytest.raises(ConfigError, match="no root lies beside"):
        sign_file(tmp_path / "1.targets.json", lambda wanted: [])


def test_a_copy_that_says_something_else_lends_no_signatures(keys: Path, tmp_path: Path) -> None:
    keyceremony.init(tmp_path / "other", [], {}, now=NOW)
    with pytest.raises(VerificationError, match="not the same"):
        sign_file(keys / "metadata/1.root.json", lambda wanted: [], copies=[tmp_path / "other/metadata/1.root.json"])


# -- changes -----------------------------------------------------------------------------------------------------------


def test_an_exchange_is_begun_once_and_finished_once(keys: Path) -> None:
    with pytest.raises(ConfigError, match="no exchange"):
        keychange.finish(keys, "timestamp", now=NOW)
    keychange.rotate(keys, "timestamp", now=NOW)
    assert len(Keyring.load(keys).signers("timestamp")) == 2
    with pytest.raises(ConfigError, match="already"):
        keychange.rotate(keys, "timestamp", now=NOW)
    keychange.finish(keys, "timestamp", now=NOW)
    with pytest.raises(ConfigError, match="no exchange"):
        keychange.finish(keys, "timestamp", now=NOW)
    assert json.loads((keys / "keys.json").read_text())["exchanges"] == {}


@pytest.mark.parametrize("name", ["nothing", "root", "../x"])
def test_a_library_that_is_not_there_is_not_changed(keys: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        keychange.remove_library(keys, name, now=NOW)
    if name != "root":
        with pytest.raises(ConfigError):
            keychange.rotate(keys, name, now=NOW)
    with pytest.raises(ConfigError):
        keychange.renew(keys, "mylib", now=NOW)
    with pytest.raises(ConfigError, match="already"):
        keychange.add_library(keys, "mylib", Plan(), now=NOW)


@pytest.mark.parametrize("only", [["0" * 64], [""], ["xyz"]])
def test_a_key_that_is_not_exactly_one_is_not_exchanged(keys: Path, only: list[str]) -> None:
    with pytest.raises(ConfigError, match="does not name one key"):
        keychange.rotate(keys, "root", only=only, now=NOW)


def test_fewer_new_keys_than_must_sign_are_refused(keys: Path, tmp_path: Path) -> None:
    _, public = person(tmp_path, "alone")
    with pytest.raises(ConfigError, match="needs 2 keys"):
        keychange.rotate(keys, "targets", signers=[("", read_public(str(public)))], now=NOW)


def test_a_staged_file_is_never_overwritten(keys: Path) -> None:
    (keys / "metadata/2.targets.json").symlink_to("/dev/null")
    before = Keyring.load(keys)
    with pytest.raises(KartifactsError):
        keychange.add_library(keys, "other", Plan(), now=NOW)
    assert os.readlink(keys / "metadata/2.targets.json") == "/dev/null"
    assert before.root("online")


# -- other kinds of signers --------------------------------------------------------------------------------------------


def use(keys: Path, uri: str, public: str, secret: Any = None) -> None:
    """A signer as the key of a library, from its first signature to a role that is accepted."""
    signers = ((uri, read_public(public, uri)),)
    keychange.add_library(keys, "other", Plan(signers=signers), now=NOW)
    keyring = Keyring.load(keys, secret=secret)
    content = role_with(None, "other", version=1, signers=keyring.signers("other"), now=NOW)
    check_signed(keyring.targets(), "other", content, "1.other.json")


@pytest.fixture
def gnupg(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed")
    home = tmp_path / "g"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
    made = subprocess.run([*gpg, "--quick-gen-key", "tester", "ed25519", "sign"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"gpg makes no key here: {made.stderr.decode(errors='replace')[-200:]}")
    listed = subprocess.run([*gpg, "--with-colons", "-K"], capture_output=True, text=True, check=True).stdout
    yield home, next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr"))
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "gpg-agent"], capture_output=True, check=False)


def test_a_key_of_gnupg_signs(keys: Path, gnupg: tuple[Path, str]) -> None:
    home, fingerprint = gnupg
    use(keys, f"gnupg:{home}", fingerprint)
    with pytest.raises(ConfigError, match="gpg gives no public key"):
        read_public("0" * 40, f"gnupg:{home}")


def test_a_key_of_a_hardware_token_signs(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pkcs11", reason="python-pkcs11 is not installed")
    library = next(Path("/usr/lib").glob("**/libsofthsm2.so"), None)
    if library is None or shutil.which("softhsm2-util") is None:
        pytest.skip("softhsm2 is not installed")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm.conf").write_text(f"directories.tokendir = {tmp_path}/tokens\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm.conf"))
    monkeypatch.setenv("PYKCS11LIB", str(library))
    subprocess.run(
        ["softhsm2-util", "--init-token", "--free", "--label", "release", "--so-pin", "1234", "--pin", "4321"],
        check=True,
        capture_output=True,
    )
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = tmp_path / "ec.pub"
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    subprocess.run(
        ["softhsm2-util", "--import", str(tmp_path / "ec.pem"), "--token", "release", "--label", "k", "--id", "02",
         "--pin", "4321"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    asked = []

    def pin(name: str) -> str:
        asked.append(name)
        return "4321"

    use(keys, "hsm:2?label=release", str(public), pin)
    assert asked == ["pin"]
    keyring = Keyring.load(keys, secret=lambda _: "0000")
    with pytest.raises(ConfigError, match="did not sign"):
        role_with(None, "other", version=1, signers=keyring.signers("other"), now=NOW)


# -- what is encrypted stays so ----------------------------------------------------------------------------------------


def contents(keys: Path) -> dict[str, bytes]:
    return {str(path.relative_to(keys)): path.read_bytes() for path in keys.rglob("*") if path.is_file()}


@pytest.mark.parametrize("act", ["rotate", "rotate root", "add-library"])
@pytest.mark.parametrize("away", [False, True], ids=["keys here", "keys elsewhere"])
def test_an_encrypted_keyring_never_gets_a_private_key_in_plain_text(tmp_path: Path, act: str, away: bool) -> None:
    keys = tmp_path / "keys"
    keyceremony.init(keys, ["mylib"], {}, now=NOW, passphrase="sesame", secret=lambda _: "sesame")
    if away:  # as where all holders keep their own
        (keys / "private").rename(tmp_path / "away")

    def change(passphrase: str | None) -> None:
        if act == "add-library":
            keychange.add_library(keys, "more", Plan(), now=NOW, passphrase=passphrase, secret=lambda _: "sesame")
        else:
            role = act.partition(" ")[2] or "timestamp"
            keychange.rotate(keys, role, now=NOW, passphrase=passphrase, secret=lambda _: "sesame")

    before = contents(keys)
    with pytest.raises(ConfigError, match="are encrypted, and no passphrase") as caught:
        change(None)
    assert "--passphrase-file" in str(caught.value)
    assert {name: data for name, data in contents(keys).items() if name != ".lock"} == before
    change("sesame")
    assert all(b"ENCRYPTED" in path.read_bytes() for path in (keys / "private").iterdir())


def test_a_keyring_with_one_encrypted_key_is_an_encrypted_one_and_so_is_its_export(keys: Path, tmp_path: Path) -> None:
    keychange.rotate(keys, "mylib", now=NOW, passphrase="sesame")
    with pytest.raises(ConfigError, match="are encrypted"):
        keychange.rotate(keys, "timestamp", now=NOW)
    ci = keyceremony.export(Keyring.load(keys), tmp_path / "ci", ["mylib"])
    with pytest.raises(ConfigError, match="are encrypted"):
        keychange.add_library(ci.path, "more", Plan(), now=NOW)


@pytest.mark.parametrize("role", ["root", "targets", "timestamp", "mylib"])
def test_a_change_that_fails_leaves_the_keyring_as_it_was(tmp_path: Path, role: str) -> None:
    keys = tmp_path / "keys"
    keyceremony.init(keys, ["mylib"], {}, now=NOW, passphrase="sesame", secret=lambda _: "sesame")
    before = contents(keys)
    for secret in (lambda _: "barley", None):
        with pytest.raises(ConfigError):
            keychange.rotate(keys, role, now=NOW, passphrase="barley", secret=secret)
        with pytest.raises(ConfigError):
            keychange.add_library(keys, "more", Plan(), now=NOW, passphrase="barley", secret=secret)
        assert {name: data for name, data in contents(keys).items() if name != ".lock"} == before
    keychange.rotate(keys, role, now=NOW, passphrase="sesame", secret=lambda _: "sesame")


@pytest.mark.parametrize("number", range(1, 13))  # it writes twelve times
def test_a_rotation_that_fails_at_any_write_leaves_nothing(
    keys: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before, writes, real = contents(keys), iter(range(1, 100)), os.fsync

    def fsync(descriptor: int) -> None:
        if next(writes) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="No space left"):
        keychange.rotate(keys, "timestamp", now=NOW)
    monkeypatch.undo()
    assert {name: data for name, data in contents(keys).items() if name != ".lock"} == before
    keychange.rotate(keys, "timestamp", now=NOW)


# -- exports that follow -----------------------------------------------------------------------------------------------

PUBLISHES = ("snapshot", "timestamp", "mylib")


def test_an_earlier_export_is_replaced_where_it_lies_and_signs_at_every_moment(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyceremony.export(Keyring.load(keys), tmp_path / "ci", PUBLISHES)
    old = {path.name for path in (tmp_path / "ci/private").iterdir()}
    keychange.rotate(keys, "timestamp", now=NOW)
    keychange.finish(keys, "timestamp", now=NOW)
    with pytest.raises(ConfigError, match="never overwritten") as caught:
        keyceremony.export(Keyring.load(keys), tmp_path / "ci", PUBLISHES)
    assert "--replace" in str(caught.value)
    real, looks = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal looks
        looks += 1
        for view in VIEWS:
            assert all(Keyring.load(tmp_path / "ci").signers(role, view=view) for role in PUBLISHES)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    keyceremony.export(Keyring.load(keys), tmp_path / "ci", PUBLISHES, replace=True)
    assert looks > 10
    fresh = contents(keyceremony.export(Keyring.load(keys), tmp_path / "fresh", PUBLISHES).path)
    found = contents(tmp_path / "ci")
    assert {name: data for name, data in found.items() if name != ".lock"} == fresh
    assert len(old & {path.name for path in (tmp_path / "ci/private").iterdir()}) == 3  # of snapshots and the library
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "ci/private").iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["itself", "a link to it", "another", "more keys", "newer", "more roles", "a file"])
def test_what_would_be_lost_is_not_replaced(keys: Path, tmp_path: Path, kind: str) -> None:
    out, roles = tmp_path / "ci", ["timestamp"]
    if kind == "itself":
        out = keys
    elif kind == "a link to it":
        out.symlink_to(keys)
    elif kind == "another":
        keyceremony.init(out, ["mylib"], {}, now=NOW)
    elif kind == "a file":
        out.write_text("mine")
    else:
        shutil.copytree(keys, out)
        if kind == "more keys":
            keychange.rotate(out, "timestamp", now=NOW)
        elif kind == "newer":
            keychange.renew(out, "targets", now=NOW)
    before = contents(tmp_path)
    with pytest.raises(ConfigError):
        keyceremony.export(Keyring.load(keys), out, roles, replace=True)
    assert {name: data for name, data in contents(tmp_path).items() if not name.endswith(".lock")} == {
        name: data for name, data in before.items() if not name.endswith(".lock")
    }


# -- what somebody else changed ----------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], object]] = {
    "renew targets": lambda keys: keychange.renew(keys, "targets", now=NOW),
    "renew root": lambda keys: keychange.renew(keys, "root", now=NOW),
    "add a library": lambda keys: keychange.add_library(keys, "more", Plan(), now=NOW),
    "remove a library": lambda keys: keychange.remove_library(keys, "mylib", now=NOW),
    "rotate": lambda keys: keychange.rotate(keys, "timestamp", now=NOW),
    "export": lambda keys: keyceremony.export(Keyring.load(keys), keys.parent / "out", ["mylib"]),
}


def foreign(keys: Path, name: str, *, signatures: bool) -> None:
    """Let a key of somebody else sign for a role, as who can write to the directory would."""
    path = keys / name
    content = json.loads(path.read_text())
    _, key = new_private_key(None)
    said = content["signed"] if name.endswith("root.json") else content["signed"]["delegations"]
    said["keys"][key.keyid] = key.to_dict()
    role = said["roles"]["timestamp"] if name.endswith("root.json") else said["roles"][0]
    role["keyids"].append(key.keyid)
    if not signatures:
        content["signatures"] = []
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("signatures", [True, False], ids=["signatures left", "signatures removed"])
@pytest.mark.parametrize("name", ["metadata/1.targets.json", "metadata/1.root.json", "airgap/1.root.json"])
@pytest.mark.parametrize("act", CHANGES)
def test_nothing_is_built_on_what_somebody_changed(keys: Path, act: str, name: str, signatures: bool) -> None:
    foreign(keys, name, signatures=signatures)
    before = contents(keys)
    with pytest.raises(VerificationError, match=name.replace(".", r"\.")):
        CHANGES[act](keys)
    assert {name: data for name, data in contents(keys).items() if name != ".lock"} == before
    assert not (keys.parent / "out").exists()


def test_what_was_changed_after_others_signed_it_is_not_signed(keys: Path) -> None:
    foreign(keys, "metadata/1.targets.json", signatures=True)
    with pytest.raises(VerificationError, match="was changed after"):
        sign_file(keys / "metadata/1.targets.json", lambda _: [])


def test_what_waits_for_signatures_of_others_can_be_built_on(keys: Path, tmp_path: Path) -> None:
    """Two steps may be staged before the holders of offline keys come together."""
    for path in (keys / "private").glob("*root-*"):
        path.rename(tmp_path / path.name)
    assert all(staged.lacks for staged in keychange.rotate(keys, "timestamp", now=NOW))
    assert all(staged.lacks for staged in keychange.rotate(keys, "snapshot", now=NOW))
    for path in tmp_path.glob("*root-*"):
        path.rename(keys / "private" / path.name)
    with pytest.raises(VerificationError, match="has not signed it") as caught:
        keychange.renew(keys, "targets", now=NOW)
    assert "keys sign" in str(caught.value)


@pytest.mark.parametrize("name", ["metadata", "private", "airgap", "keys.json"])
def test_a_part_of_a_keyring_that_others_may_write_to_is_refused(keys: Path, name: str) -> None:
    path = keys / name
    path.chmod(path.stat().st_mode | 0o022)
    with pytest.raises(ConfigError, match=f"cannot be trusted.*{name}"):
        Keyring.load(keys)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"signatures":[],"signed":{"_type":"root"}}'])
def test_a_file_that_is_no_metadata_is_named(keys: Path, content: bytes) -> None:
    (keys / "metadata/2.root.json").write_bytes(content)
    with pytest.raises(VerificationError, match=r"metadata/2\.root\.json"):
        keychange.renew(keys, "root", now=NOW)


def test_what_a_killed_change_left_goes_with_the_next(keys: Path) -> None:
    for name in (".partial-a", "metadata/.partial-b", "private/.partial-c", "airgap/.partial-d"):
        (keys / name).write_text("half")
        os.utime(keys / name, (NOW.timestamp() - 3600,) * 2)
    (keys / "metadata/.partial-young").write_text("half")
    keychange.renew(keys, "targets", now=NOW)
    assert [path.name for path in keys.rglob(".partial-*")] == [".partial-young"]


@pytest.mark.parametrize("role", ["targets", "mylib"])
def test_keys_that_serve_both_views_are_not_exchanged_for_one(keys: Path, role: str) -> None:
    for change in (keychange.rotate, keychange.finish):
        with pytest.raises(ConfigError, match="both views"):
            change(keys, role, now=NOW, views=["online"])


def test_an_export_of_no_role_is_refused(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none was named"):
        keyceremony.export(Keyring.load(keys), tmp_path / "out", [])
