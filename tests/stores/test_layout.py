"""A repository directory is an OCI image layout, and a registry holds the same bytes, for our tools and for others'."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oras.provider
import pytest

from kartifacts.errors import VerificationError
from kartifacts.model.digest import Digest, parse_digest, sha256
from kartifacts.model.layout import blob_path
from kartifacts.publish.buckets.oci import OciBucket
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository
from kartifacts.remote.registry import tag_of
from tests.conftest import Machine, Released
from tests.stores.conftest import require
from tests.stores.registries import Passing, Running, TokenServer, registry, relay, token_server

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("locked"), "--auth") as running:
        yield running


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with token_server(tmp_path_factory.mktemp("tokens")) as server:
        yield server


@pytest.fixture(scope="module")
def tokened(tmp_path_factory: pytest.TempPathFactory, tokens: TokenServer) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("tokened"), "--token", tokens.url, str(tokens.certificate)) as running:
        yield running


def skopeo(*arguments: object) -> str:
    require("skopeo")
    done = subprocess.run(
        ["skopeo", "--insecure-policy", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blobs(layout: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (layout / "blobs" / "sha256").iterdir()}


def named_by(released: Released) -> dict[str, bytes]:
    """What OCI's tools find from the release on: each bundle, its table and its packs."""
    repository = Repository(released.path)
    pin = released.lock.releases[0]
    digests = {parse_digest(pin.sha256)}
    for bundle in repository.release(pin).manifests:
        manifest = repository.bundle(bundle)
        digests |= {part.sha256 for part in (bundle, manifest.config, *manifest.layers)}
    return {digest: repository.blob(digest).read_bytes() for digest in digests}


def tag_in(released: Released) -> str:
    index = json.loads((released.path / "index.json").read_bytes())
    return str(index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"])


def publish(machine: Machine, released: Released, url: str, **settings: Any) -> None:
    answer = machine.cli("publish", f"{url}?single-writer=1", "--from", released.path, **settings)
    assert answer.code == 0, answer.err


def fetch_and_load(machine: Machine, released: Released, mirror: str, **settings: Any) -> None:
    """From the lock that was made with the release, whoever has carried its bytes meanwhile."""
    settings |= {"lock": released.lock_file, "mirrors": mirror, "jit": "never"}
    answer = machine.run_cli("fetch", "--json", **settings)
    assert answer.code == 0, answer.err
    code = "registry = __import__('kartifacts').Registry()\nkernel, error = error_of(registry)\nprint(error)"
    done = machine.python(code, **settings | {"offline": "1"})
    assert done.code == 0, done.err
    assert float(done.out) < 1e-6


# -- published, and used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "locked", "tokened"])
def test_a_release_is_published_fetched_and_called(
    request: pytest.FixtureRequest, released: Released, machine: Machine, kind: str
) -> None:
    running: Running = request.getfixturevalue(kind)
    login = "" if kind == "plain" else "kart:kartpass"
    publish(machine, released, running.url("kart/released", login))
    publish(machine, released, running.url("kart/released", login))  # nothing is left to do
    fetch_and_load(machine, released, running.url("kart/released", login))


def test_two_publishers_are_not_let_in(plain: Running, released: Released, machine: Machine) -> None:
    answer = machine.cli("publish", plain.url("kart/refused"), "--from", released.path)
    assert answer.code == 2
    assert "single-writer" in answer.err


def test_a_release_can_be_had_by_its_name_from_a_registry(plain: Running, released: Released, machine: Machine) -> None:
    publish(machine, released, plain.url("kart/named"))
    pin = released.lock.releases[0]
    where = f"docker://{plain.host}/kart/named"
    raw = skopeo("inspect", "--tls-verify=false", "--raw", f"{where}:{tag_in(released)}").encode()
    assert sha256(raw) == pin.sha256
    tags = json.loads(skopeo("list-tags", "--tls-verify=false", where))["Tags"]
    assert tag_in(released) in tags
    assert [tag for tag in tags if not tag.startswith("_")] == [tag_in(released)]


def test_wrong_bytes_from_a_registry_are_refused(plain: Running, released: Released, machine: Machine) -> None:
    publish(machine, released, plain.url("kart/wrong"))

    def lie(request: Passing) -> None:
        if request.method == "GET" and request.status in (200, 206) and len(request.answer) > 100:
            request.answer = request.answer[:50] + bytes([request.answer[50] ^ 1]) + request.answer[51:]

    with relay(plain) as passing:
        passing.rules.append(lie)
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": passing.url("kart/wrong"), "jit": "never"}
        answer = machine.run_cli("fetch", **settings)
        assert answer.code == VerificationError.exit_code, answer.err
        passing.rules.clear()
        answer = machine.run_cli("fetch", **settings)
        assert answer.code == 0, answer.err


@pytest.mark.parametrize("status", [404, 403, 429])
def test_what_a_registry_refuses_is_said(plain: Running, released: Released, machine: Machine, status: int) -> None:
    def refuse(request: Passing) -> None:
        request.status = status
        request.answer_headers = [("Retry-After", "3600")] if status == 429 else []

    with relay(plain) as passing:
        passing.rules.append(refuse)
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": passing.url("kart/x"), "retries": "0"}
        answer = machine.run_cli("fetch", **settings)
    assert answer.code != 0
    assert str(status) in answer.err
    assert passing.url("kart/x") in answer.err or f"127.0.0.1:{passing.port}/v2/kart/x" in answer.err


def test_a_fetch_that_breaks_off_goes_on(plain: Running, released: Released, machine: Machine) -> None:
    publish(machine, released, plain.url("kart/broken"))
    cut: list[str] = []

    def break_off(request: Passing) -> None:
        if request.status in (200, 206) and len(request.answer) > 4000 and request.path not in cut:
            cut.append(request.path)
            request.cut_answer = True

    with relay(plain) as passing:
        passing.rules.append(break_off)
        fetch_and_load(machine, released, passing.url("kart/broken"))
    assert cut


def test_what_a_registry_throws_away_is_nothing_that_a_release_needs(
    released: Released, machine: Machine, tmp_path: Path
) -> None:
    with registry(tmp_path / "registry") as running:
        publish(machine, released, running.url("kart/kept"))
        orphan = os.urandom(1000)
        OciBucket(running.url("kart/kept"), machine.settings()).put_if_absent(blob_path(sha256(orphan)), orphan)
    subprocess.run(
        ["docker-registry", "garbage-collect", running.state / "config.yml"], check=True, capture_output=True
    )
    with registry(tmp_path / "registry") as running:
        bucket = OciBucket(running.url("kart/kept"), machine.settings())
        assert bucket.size(blob_path(sha256(orphan))) is None  # so it did collect
        for blob in verify_repository(released.path).blobs:
            assert bucket.digest(blob_path(blob.digest)) == (blob.digest, blob.size)
        fetch_and_load(machine, released, running.url("kart/kept"))


# -- carried by others' tools ------------------------------------------------------------------------------------------


def test_skopeo_carries_a_repository_into_a_registry_and_back(
    plain: Running, released: Released, machine: Machine, tmp_path: Path
) -> None:
    tag = tag_in(released)
    there, back = f"docker://{plain.host}/kart/carried:{tag}", tmp_path / "back"
    skopeo("copy", "--all", "--preserve-digests", "--dest-tls-verify=false", f"oci:{released.path}:{tag}", there)
    skopeo("copy", "--all", "--preserve-digests", "--src-tls-verify=false", there, f"oci:{back}:{tag}")
    assert blobs(back) == named_by(released)
    fetch_and_load(machine, released, plain.url("kart/carried"))
    for other, mirror in (("file", f"file://{back}"), ("path", "")):
        another = Machine(tmp_path / other)
        place = {"path": back} if not mirror else {}
        fetch_and_load(another, released, mirror or "file:///nonexistent", **place)


def test_skopeo_carries_without_being_told_to_keep_digests(plain: Running, released: Released, tmp_path: Path) -> None:
    tag = tag_in(released)
    there = f"docker://{plain.host}/kart/plainly:{tag}"
    skopeo("copy", "--all", "--dest-tls-verify=false", f"oci:{released.path}:{tag}", there)
    assert sha256(skopeo("inspect", "--tls-verify=false", "--raw", there).encode()) == released.lock.releases[0].sha256


def test_what_was_published_to_a_registry_becomes_a_layout(
    plain: Running, released: Released, machine: Machine, tmp_path: Path
) -> None:
    publish(machine, released, plain.url("kart/pulled"))
    tag, back = tag_in(released), tmp_path / "back"
    where = f"docker://{plain.host}/kart/pulled:{tag}"
    skopeo("copy", "--all", "--preserve-digests", "--src-tls-verify=false", where, f"oci:{back}:{tag}")
    assert blobs(back) == named_by(released)


def test_oras_pulls_the_same_bytes(plain: Running, released: Released, machine: Machine, tmp_path: Path) -> None:
    publish(machine, released, plain.url("kart/oras"))
    client = oras.provider.Registry(plain.host, insecure=True)
    pin, where = released.lock.releases[0], f"{plain.host}/kart/oras"
    container = client.get_container(f"{where}:{tag_in(released)}")
    index = client.get_manifest(container, ["application/vnd.oci.image.index.v1+json"])
    repository = Repository(released.path)
    assert [bundle["digest"] for bundle in index["manifests"]] == [
        bundle.digest for bundle in repository.release(pin).manifests
    ]
    for bundle in index["manifests"]:
        one = client.get_container(f"{where}@{bundle['digest']}")
        manifest = client.get_manifest(one)
        for blob in (manifest["config"], *manifest["layers"]):
            digest = Digest(blob["digest"].removeprefix("sha256:"))
            got: bytes = client.get_blob(one, blob["digest"]).content
            assert got == (released.path / blob_path(digest)).read_bytes()
        pulled = client.pull(f"{where}@{bundle['digest']}", outdir=str(tmp_path))
        assert {sha256(Path(path).read_bytes()) for path in pulled} == {
            layer["digest"].removeprefix("sha256:") for layer in manifest["layers"]
        }


def test_oras_pulls_a_file_under_its_own_path(
    plain: Running, released: Released, machine: Machine, tmp_path: Path
) -> None:
    publish(machine, released, plain.url("kart/files"))
    client = oras.provider.Registry(plain.host, insecure=True)
    [pulled] = client.pull(f"{plain.host}/kart/files:{tag_of('index.json')}", outdir=str(tmp_path))
    assert Path(pulled) == tmp_path / "index.json"
    built, published = (json.loads(path.read_bytes()) for path in (released.path / "index.json", Path(pulled)))
    materials = [each for each in built["manifests"] if "dev.kartifacts.materials-of" in each["annotations"]]
    assert len(materials) == 1  # which stay behind, since nobody has signed them
    assert published["manifests"] == [each for each in built["manifests"] if each not in materials]
