"""`kartifacts verify --provenance`: whom one may name to believe, and what is proved then."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kartifacts import config
from kartifacts.cli import flows
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keyfiles import Plan
from kartifacts.trust.keyring import Keyring
from tests.conftest import Machine, Released

BUILDER = "https://ci.example/builders/7"


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    one = Plan(1, 1)
    plans = {"targets": one, "online:root": one, "airgap:root": one}
    return init(tmp_path / "keys", ["kartifacts"], plans, now=datetime.now(timezone.utc))


@pytest.fixture
def root(tmp_path: Path, keyring: Keyring) -> Path:
    path = tmp_path / "root.json"
    path.write_bytes(keyring.root("online"))
    return path


@pytest.fixture
def public_key(tmp_path: Path, keyring: Keyring) -> Path:
    return write_key(tmp_path / "library.pem", keyring)


def write_key(path: Path, keyring: Keyring) -> Path:
    (key,) = keyring.grant("kartifacts").keys
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.keyval["public"]))
    path.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


@pytest.fixture
def bucket(tmp_path: Path, keyring: Keyring, released: Released) -> Path:
    """A bucket with a release whose provenance was signed."""
    path = tmp_path / "bucket"
    flows.publish(
        released.path,
        f"dir:{path}",
        library=None,
        version=None,
        plan=None,
        lock=None,
        settings=config.read(),
        keys=keyring.path,
        builder_id=BUILDER,
    )
    return path


def test_it_is_proved_by_the_root_and_by_the_key(machine: Machine, bucket: Path, root: Path, public_key: Path) -> None:
    for whom in (("--root", root), ("--key", public_key), ("--root", root, "--key", public_key)):
        answer = machine.cli("verify", bucket, "--provenance", *whom, "--builder-id", BUILDER, "--json")
        assert (answer.code, answer.err) == (0, "")
        assert {row["builder"] for row in answer.data["proved"]} == {BUILDER}
        assert len(answer.data["proved"]) == len({row["bundle"] for row in answer.data["proved"]}) > 1
    text = machine.cli("verify", bucket, "--provenance", "--root", root).out
    assert f"built by {BUILDER}" in text


def test_tools_that_know_only_oci_find_what_is_said(bucket: Path, tmp_path: Path) -> None:
    """skopeo copies the bundles, then all that refers to them, with every digest kept."""
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("the program skopeo is not installed")
    listed = json.loads((bucket / "index.json").read_bytes())["manifests"]
    names = {entry["annotations"]["org.opencontainers.image.ref.name"]: entry["digest"] for entry in listed}
    assert set(names) == {"kartifacts-1.0", "kartifacts-1.0.provenance"}
    copied = tmp_path / "copied"
    for name, digest in names.items():
        places = (f"oci:{bucket}:{name}", f"oci:{copied}:{name}")
        subprocess.run([skopeo, "copy", "--insecure-policy", "--all", "--preserve-digests", "-q", *places], check=True)
        assert (copied / "blobs/sha256" / digest.removeprefix("sha256:")).is_file()

    def read(digest: str) -> Any:
        return json.loads((copied / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes())

    about, dsse = [], "application/vnd.in-toto.provenance+dsse"
    for entry in read(names["kartifacts-1.0.provenance"])["manifests"]:
        referrer = read(entry["digest"])
        about.append((referrer["subject"]["digest"], referrer["artifactType"]))
        kinds = [layer["mediaType"] for layer in referrer["layers"]]
        assert kinds == [dsse, "application/spdx+json", "application/vnd.kartifacts.materials.v1+json"]
        for layer in referrer["layers"]:
            assert (copied / "blobs/sha256" / layer["digest"].removeprefix("sha256:")).is_file()
    release = read(names["kartifacts-1.0"])
    assert sorted(about) == sorted((bundle["digest"], dsse) for bundle in release["manifests"])


def test_who_signed_it_is_not_taken_from_the_repository(
    machine: Machine, bucket: Path, root: Path, tmp_path: Path, released: Released
) -> None:
    one = Plan(1, 1)
    plans = {"targets": one, "online:root": one, "airgap:root": one}
    other = init(tmp_path / "others", ["kartifacts"], plans, now=datetime.now(timezone.utc))
    stranger = tmp_path / "stranger.json"
    stranger.write_bytes(other.root("online"))
    assert machine.cli("verify", bucket, "--provenance", "--root", stranger).code == 5
    answer = machine.cli("verify", bucket, "--provenance", "--key", write_key(tmp_path / "stranger.pem", other))
    assert answer.code == 5
    assert "signed by 0 of the keys" in answer.err
    planted = tmp_path / "planted"
    publish(released.path, DirectoryBucket(planted), keyring=other, builder_id=BUILDER)
    assert machine.cli("verify", planted, "--provenance", "--root", stranger).code == 0
    assert machine.cli("verify", planted, "--provenance", "--root", root).code == 5


def test_publish_signs_for_it_unless_told_not_to(
    machine: Machine, keyring: Keyring, released: Released, public_key: Path, tmp_path: Path
) -> None:
    for options, code in (((), 0), (("--no-provenance",), 5)):
        path = tmp_path / f"published-{code}"
        answer = machine.cli("publish", f"dir:{path}", "--from", released.path, "--keys", keyring.path, *options)
        assert (answer.code, answer.err) == (0, "")
        answer = machine.cli(
            "verify", path, "--provenance", "--key", public_key, "--builder-id", "urn:kartifacts:local"
        )
        assert answer.code == code
    wrong = ("--keys", keyring.path, "--builder-id", "not a URI")
    answer = machine.cli("publish", f"dir:{tmp_path / 'none'}", "--from", released.path, *wrong)
    assert answer.code == 2
    assert not (tmp_path / "none" / "blobs").exists()
    unsigned = machine.cli("publish", f"dir:{tmp_path / 'unsigned'}", "--from", released.path)
    assert unsigned.code == 0


def test_a_release_without_it_is_refused(
    machine: Machine, keyring: Keyring, released: Released, root: Path, public_key: Path, tmp_path: Path
) -> None:
    path = tmp_path / "unsaid"
    publish(released.path, DirectoryBucket(path), keyring=keyring)
    assert machine.cli("verify", path).code == 0
    for whom in (("--root", root), ("--key", public_key)):
        answer = machine.cli("verify", path, "--provenance", *whom)
        assert answer.code == 5
        assert "nothing is signed about kartifacts" in answer.err


def test_another_builder_or_a_damaged_envelope_is_refused(machine: Machine, bucket: Path, public_key: Path) -> None:
    answer = machine.cli("verify", bucket, "--provenance", "--key", public_key, "--builder-id", "urn:other")
    assert answer.code == 5
    assert "expected 'urn:other'" in answer.err
    envelope = next(path for path in (bucket / "blobs/sha256").iterdir() if b'"payloadType"' in path.read_bytes())
    envelope.chmod(0o644)
    envelope.write_bytes(envelope.read_bytes().replace(b"a", b"b", 1))
    answer = machine.cli("verify", bucket, "--provenance", "--key", public_key)
    assert answer.code == 5
    assert "provenance" in answer.err


@pytest.mark.parametrize(
    "wrong",
    [
        ("--root", "{root}"),
        ("--builder-id", "urn:x"),
        ("--provenance",),
        ("--provenance", "--root", "{missing}"),
        ("--provenance", "--key", "{root}"),
        ("--sigstore-bundle", "{root}"),
        ("--identity", "me"),
        ("--sigstore-bundle", "{root}", "--identity", "me", "--issuer", "it"),
        ("--sigstore-bundle", "{root}", "--identity", "me", "--issuer", "it", "--trusted-root", "{root}"),
    ],
)
def test_what_makes_no_sense_is_said(wrong: tuple[str, ...], machine: Machine, bucket: Path, root: Path) -> None:
    arguments = [word.format(root=root, missing=root.parent / "missing.json") for word in wrong]
    answer = machine.cli("verify", bucket, *arguments)
    assert answer.code == 2, answer.err


def test_it_is_that_of_a_repository(machine: Machine, root: Path) -> None:
    answer = machine.cli("verify", "--provenance", "--root", root)
    assert answer.code == 2
    assert "repository" in answer.err


def test_a_collector_keeps_what_is_said_about_releases_that_stay(
    machine: Machine, keyring: Keyring, bucket: Path, root: Path
) -> None:
    from kartifacts.publish.retention import retain

    later = datetime.now(timezone.utc)
    for days in (0, 1):  # the first marks, the second deletes
        retain(DirectoryBucket(bucket), keyring, grace=timedelta(0), now=later + timedelta(days=days))
    answer = machine.cli("verify", bucket, "--provenance", "--root", root)
    assert (answer.code, answer.err) == (0, "")
