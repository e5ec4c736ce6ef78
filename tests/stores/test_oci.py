"""OCI registries: uploads that broke off, logins and where they go, and registries that lie."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, KartifactsError, SourceError, VerificationError
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.manifest import MEDIA_INDEX, MEDIA_MANIFEST
from kartifacts.publish.buckets.oci import OciBucket
from kartifacts.remote.registry import ARTIFACT_FILE, EMPTY, MEDIA_EMPTY, TITLE, tag_of
from kartifacts.sources.oci import OciSource
from tests.stores.registries import Passing, Relay, Running, TokenServer, front, registry, relay, token_server

pytestmark = pytest.mark.stores

BYTES = os.urandom(3_000_000)
DIGEST = sha256(BYTES)
BLOB = f"blobs/sha256/{DIGEST}"
POINTER = "metadata/timestamp.json"
Log = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that wants the login kart:kartpass, by Basic."""
    with registry(tmp_path_factory.mktemp("locked"), "--auth") as running:
        yield running


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with token_server(tmp_path_factory.mktemp("tokens")) as server:
        yield server


@pytest.fixture(scope="module")
def tokened(tmp_path_factory: pytest.TempPathFactory, tokens: TokenServer) -> Iterator[Running]:
    """One that wants a token of `tokens`."""
    options = ("--token", tokens.url, str(tokens.certificate))
    with registry(tmp_path_factory.mktemp("tokened"), *options) as running:
        yield running


@pytest.fixture
def passing(plain: Running) -> Iterator[Relay]:
    with relay(plain) as running:
        yield running


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A repository of the test's own."""
    return f"kart/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"


def settings(home: Path | str = "/nonexistent", **environ: str) -> Settings:
    times = {"KARTIFACTS_READ_TIMEOUT": "10", "KARTIFACTS_RETRIES": "2"}
    return config.read({"HOME": str(home), "PATH": os.environ["PATH"], **times, **environ})


def bucket(url: str, with_settings: Settings | None = None, *, chunk: int = 1 << 20) -> OciBucket:
    return OciBucket(url, with_settings or settings(), single_writer=True, chunk=chunk)


def read(source: OciSource, digest: Digest = DIGEST, size: int = len(BYTES), **part: int) -> bytes:
    with source.read(digest, size, **part) as pieces:
        return b"".join(pieces)


def written(url: str, with_settings: Settings | None = None) -> bytes:
    """What a source gives of what a bucket was given."""
    opened = bucket(url, with_settings)
    opened.preflight()
    opened.put_if_absent(BLOB, BYTES)
    opened.swap(POINTER, b"1", opened.read(POINTER))
    source = OciSource(url, with_settings or settings())
    assert source.document(POINTER, 100) == b"1"
    assert read(source) == BYTES
    return read(source, start=1000, length=5000)


# -- what is written and read ------------------------------------------------------------------------------------------


def test_what_was_written_is_read_in_parts_and_never_beyond_its_end(plain: Running, name: str) -> None:
    url = plain.url(name)
    assert written(url) == BYTES[1000:6000]
    source = OciSource(url, settings())
    assert read(source, start=len(BYTES) - 10, length=5000) == BYTES[-10:]
    with pytest.raises(SourceError) as caught:
        read(source, Digest("0" * 64), 5)
    assert caught.value.missing
    with pytest.raises(SourceError, match="has 1 bytes; at most 0"):
        source.document(POINTER, 0)


def test_a_registry_is_refused_unless_somebody_is_alone(plain: Running, name: str, caplog: Log) -> None:
    opened = OciBucket(plain.url(name), settings())
    with pytest.raises(ConfigError, match="does not keep conditional writes"):
        opened.preflight()
    with pytest.raises(ConfigError, match="nothing was published"):
        opened.swap(POINTER, b"1", None)
    assert opened.read(POINTER) is None
    bucket(plain.url(name)).preflight()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_bundles_and_indexes_become_manifests_and_names_become_tags(plain: Running, name: str) -> None:
    opened = bucket(plain.url(name))
    opened.put_if_absent(BLOB, BYTES)
    layer = {"mediaType": "application/octet-stream", "digest": f"sha256:{DIGEST}", "size": len(BYTES)}
    manifest = canonical_json({"schemaVersion": 2, "mediaType": MEDIA_MANIFEST, "config": layer, "layers": [layer]})
    listed = {"mediaType": MEDIA_MANIFEST, "digest": f"sha256:{sha256(manifest)}", "size": len(manifest)}
    index = canonical_json({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [listed]})
    for content in (manifest, index):
        path = f"blobs/sha256/{sha256(content)}"
        assert opened.put_if_absent(path, content) == "created"
        assert opened.put_if_absent(path, content) == "same"
        assert opened.get(path) == content
        assert opened.digest(path) == (sha256(content), len(content))
        assert opened.size(path) == len(content)
        assert read(OciSource(plain.url(name), settings()), sha256(content), len(content)) == content
        assert (
            read(OciSource(plain.url(name), settings()), sha256(content), len(content), start=5, length=9)
            == (content[5:14])
        )
    named = {"mediaType": MEDIA_INDEX, "digest": f"sha256:{sha256(index)}", "size": len(index)}
    entry = {**named, "annotations": {"org.opencontainers.image.ref.name": "demo-1.0"}}
    opened.swap("index.json", canonical_json({"schemaVersion": 2, "manifests": [entry]}), None)
    assert "demo-1.0" in list(opened._tags())
    assert opened._ask("GET", opened._registry.manifest("demo-1.0")).content == index


def test_an_index_that_names_what_is_not_there_is_refused_by_the_registry(plain: Running, name: str) -> None:
    listed = {"mediaType": MEDIA_MANIFEST, "digest": f"sha256:{'0' * 64}", "size": 5}
    index = canonical_json({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [listed]})
    with pytest.raises(SourceError, match="MANIFEST"):
        bucket(plain.url(name)).put_if_absent(f"blobs/sha256/{sha256(index)}", index)


def test_referrers_are_found_where_a_registry_does_not_list_them(plain: Running, name: str) -> None:
    opened = bucket(plain.url(name))
    for content in (BYTES, EMPTY, b"said", b"said more"):
        opened.put_if_absent(f"blobs/sha256/{sha256(content)}", content)
    empty = {"mediaType": MEDIA_EMPTY, "digest": f"sha256:{sha256(EMPTY)}", "size": 2}
    about = canonical_json({"schemaVersion": 2, "mediaType": MEDIA_MANIFEST, "config": empty, "layers": [empty]})
    opened.put_if_absent(f"blobs/sha256/{sha256(about)}", about)
    subject = {"mediaType": MEDIA_MANIFEST, "digest": f"sha256:{sha256(about)}", "size": len(about)}
    digests = []
    for said in (b"said", b"said more"):
        layer = {"mediaType": "application/x-said", "digest": f"sha256:{sha256(said)}", "size": len(said)}
        whole = {"schemaVersion": 2, "mediaType": MEDIA_MANIFEST, "artifactType": "application/x-said"}
        manifest = canonical_json({**whole, "config": empty, "layers": [layer], "subject": subject})
        digests.append(f"sha256:{opened.refer(manifest)}")
        assert opened.put_if_absent(f"blobs/sha256/{sha256(manifest)}", manifest) == "same"
    index = json.loads(opened._ask("GET", opened._registry.manifest(f"sha256-{sha256(about)}")).content)
    assert [entry["digest"] for entry in index["manifests"]] == digests
    assert {entry["artifactType"] for entry in index["manifests"]} == {"application/x-said"}
    with pytest.raises(VerificationError, match="without a subject"):
        opened.refer(about)


def test_a_blob_is_mounted_from_another_repository(passing: Relay, name: str) -> None:
    bucket(passing.url(f"{name}/first")).put_if_absent(BLOB, BYTES)
    passing.requests.clear()
    second = bucket(f"{passing.url(f'{name}/second')}?mount={name}/first")
    assert second.put_if_absent(BLOB, BYTES) == "created"
    assert [method for method, _ in passing.requests] == ["HEAD", "POST"]
    assert second.digest(BLOB) == (DIGEST, len(BYTES))
    other = os.urandom(100)  # what is not there is sent
    assert second.put_if_absent(f"blobs/sha256/{sha256(other)}", other) == "created"
    assert second.get(f"blobs/sha256/{sha256(other)}") == other


def test_a_long_list_of_tags_is_read_to_its_end(passing: Relay, name: str) -> None:
    def paged(request: Passing) -> None:
        """As registries do that give no more than some at a time."""
        if request.status == 200 and "/tags/list" in request.path:
            tags = sorted(json.loads(request.answer)["tags"])
            last = request.path.partition("last=")[2]
            page = [tag for tag in tags if tag > last][:2]
            request.answer = json.dumps({"tags": page}).encode()
            if page and page[-1] != tags[-1]:
                link = f'</v2/{name}/tags/list?n=2&last={page[-1]}>; rel="next"'
                request.answer_headers.append(("Link", link))

    opened = bucket(passing.url(name))
    paths = [f"targets/demo/1.{number}/{'0' * 64}.index.json" for number in range(5)]
    paths.append(f"targets/{'demo' * 20}/{'1.0' * 20}/{'0' * 64}.index.json")  # too long for a tag
    for path in paths:
        opened.put_if_absent(path, path.encode())
    passing.rules.append(paged)
    assert [found.path for found in opened.list("targets")] == sorted(paths)
    assert [found.size for found in opened.list("targets/demo")] == [len(paths[0])] * 5
    assert opened.get(paths[-1]) == paths[-1].encode()


def test_a_registry_that_keeps_everything_says_so(tmp_path: Path, name: str) -> None:
    with registry(tmp_path / "state", DELETES="false") as running:
        opened = bucket(running.url(name))
        opened.put_if_absent(POINTER, b"1")
        with pytest.raises(SourceError, match=r"does not let 'metadata/timestamp.json' be removed") as caught:
            opened.delete(POINTER)
        assert caught.value.permanent
        assert opened.get(POINTER) == b"1"


# -- what breaks off ---------------------------------------------------------------------------------------------------


def once(method: str, part: str, *, skip: int = 0, **change: object) -> tuple[list[Passing], object]:
    """A rule that does something to one request."""
    seen: list[Passing] = []

    def rule(request: Passing) -> None:
        if request.method == method and part in request.path and (request.status == 0) != ("cut_answer" in change):
            seen.append(request)
            if len(seen) == skip + 1:
                for attribute, value in change.items():
                    setattr(request, attribute, value)

    return seen, rule


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
@pytest.mark.parametrize("change", [{"cut": True}, {"cut_answer": True}, {"status": 503}, {"status": 429}])
def test_an_upload_goes_on_where_it_broke_off(
    passing: Relay, name: str, method: str, change: dict[str, object]
) -> None:
    seen, rule = once(method, "/blobs/uploads/", skip=1 if method == "PATCH" else 0, **change)
    passing.rules.append(rule)  # type: ignore[arg-type]
    opened = bucket(passing.url(name))
    assert opened.put_if_absent(BLOB, BYTES) == "created"
    assert opened.digest(BLOB) == (DIGEST, len(BYTES))
    assert len(seen) > 1 or "cut_answer" in change or method == "PUT"  # a PUT without a body is done before it is cut
    if method == "PATCH" and "status" in change:  # what had arrived was not sent again
        assert sum(len(request.body) for request in seen if request.status in (0, 202)) <= len(BYTES) + (1 << 20)


def test_an_upload_that_the_registry_forgot_begins_anew(passing: Relay, name: str) -> None:
    seen, rule = once("PATCH", "/blobs/uploads/", skip=1, status=404)
    passing.rules.append(rule)  # type: ignore[arg-type]
    assert bucket(passing.url(name)).put_if_absent(BLOB, BYTES) == "created"
    assert len(seen) == 2 + 3


@pytest.mark.parametrize("status", [500, 503])
def test_a_registry_that_stays_broken_is_given_up(passing: Relay, name: str, status: int) -> None:
    def broken(request: Passing) -> None:
        if request.method == "PATCH":
            request.status = status

    passing.rules.append(broken)
    with pytest.raises(SourceError, match=f"answered {status} to PATCH"):
        bucket(passing.url(name)).put_if_absent(BLOB, BYTES)
    assert sum(method == "PATCH" for method, _ in passing.requests) <= 9


@pytest.mark.parametrize(("status", "said"), [(413, "client_max_body_size"), (405, "read-only")])
def test_what_no_second_try_would_change_is_said_at_once(passing: Relay, name: str, status: int, said: str) -> None:
    seen, rule = once("PUT", "/blobs/uploads/", status=status)
    passing.rules.append(rule)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=said):
        bucket(passing.url(name), chunk=1 << 24).put_if_absent(BLOB, BYTES)
    assert len(seen) == 1


def test_an_upload_that_something_changes_is_refused(passing: Relay, name: str) -> None:
    def damage(request: Passing) -> None:
        if request.method == "PATCH":
            request.body = bytes(10) + request.body[10:]

    passing.rules.append(damage)
    opened = bucket(passing.url(name))
    with pytest.raises(VerificationError, match="got other bytes"):
        opened.put_if_absent(BLOB, BYTES)
    assert opened.size(BLOB) is None


def test_an_interrupted_pull_goes_on(passing: Relay, name: str) -> None:
    bucket(passing.url(name)).put_if_absent(BLOB, BYTES)
    seen, rule = once("GET", "/blobs/", cut_answer=True)
    passing.rules.append(rule)  # type: ignore[arg-type]
    assert read(OciSource(passing.url(name), settings())) == BYTES
    assert len(seen) == 2
    assert [request.headers.get("Range") for request in seen] == [None, f"bytes={len(BYTES) // 2}-{len(BYTES) - 1}"]


# -- who may -----------------------------------------------------------------------------------------------------------


def docker_config(home: Path, content: object) -> None:
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker" / "config.json").write_text(json.dumps(content))


def in_url(home: Path, host: str, login: str) -> str:
    return f"{login}@"


def in_auths(home: Path, host: str, login: str) -> str:
    docker_config(home, {"auths": {host: {"auth": base64.b64encode(login.encode()).decode()}}})
    return ""


def in_an_old_name(home: Path, host: str, login: str) -> str:
    user, _, password = login.partition(":")
    docker_config(home, {"auths": {f"http://{host}/v1/": {"username": user, "password": password}}})
    return ""


def in_a_helper(home: Path, host: str, login: str) -> str:
    user, _, password = login.partition(":")
    helper = home / "docker-credential-kart"
    answer = json.dumps({"ServerURL": host, "Username": user, "Secret": password})
    helper.write_text(f'#!/bin/sh\n[ "$1" = get ] && [ "$(cat)" = "{host}" ] && echo \'{answer}\'\n')
    helper.chmod(0o755)
    docker_config(home, {"credHelpers": {host: "kart"}})
    return ""


def in_netrc(home: Path, host: str, login: str) -> str:
    user, _, password = login.partition(":")
    (home / ".netrc").write_text(f"machine 127.0.0.1 login {user} password {password}\n")
    (home / ".netrc").chmod(0o600)
    return ""


KEPT = [in_url, in_auths, in_an_old_name, in_a_helper, in_netrc]


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("kind", ["locked", "tokened"])
def test_a_login_is_found_wherever_it_is_kept(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, kind: str, keep: object
) -> None:
    running: Running = request.getfixturevalue(kind)
    assert callable(keep)
    user = keep(tmp_path, running.host, "kart:kartpass")
    found = settings(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert written(f"oci+http://{user}{running.host}/{name}", found) == BYTES[1000:6000]
    shown = (
        repr(OciSource(f"oci+http://{user}{running.host}/{name}", found))
        + OciBucket(f"oci+http://{user}{running.host}/{name}", found).name
    )
    assert "kartpass" not in shown


@pytest.mark.parametrize("kind", ["locked", "tokened"])
@pytest.mark.parametrize("login", ["", "kart:wrong"])
def test_who_may_not_is_told_so_and_how_to_log_in(
    request: pytest.FixtureRequest, name: str, kind: str, login: str
) -> None:
    running: Running = request.getfixturevalue(kind)
    url = running.url(name, login)
    with pytest.raises(SourceError, match=r"docker login") as caught:
        bucket(url).preflight()
    assert caught.value.permanent
    with pytest.raises(SourceError, match="answered 401") as caught:
        bucket(url).preflight()
    assert "wrong" not in str(caught.value)
    if login or kind == "locked":
        with pytest.raises(SourceError, match="answered 401"):
            read(OciSource(url, settings()))


def test_who_may_only_read_reads_and_cannot_write(tokened: Running, name: str) -> None:
    bucket(tokened.url(name, "kart:kartpass")).put_if_absent(BLOB, BYTES)
    url = tokened.url(name, "reader:readerpass")
    assert read(OciSource(url, settings())) == BYTES
    with pytest.raises(SourceError, match=r"with the login of 'reader'; it has to allow pull,push"):
        bucket(url).put_if_absent(POINTER, b"1")
    assert read(OciSource(tokened.url(name), settings())) == BYTES  # nobody in particular may read too


def test_a_token_is_asked_for_once_and_again_when_its_time_is_over(
    tokened: Running, tokens: TokenServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tokened.url(name, "kart:kartpass")
    opened = bucket(url)
    tokens.asked.clear()
    for number in range(5):
        opened.put_if_absent(f"metadata/{number}.snapshot.json", b"x")
    assert [query["scope"] for _, query in tokens.asked] == [[f"repository:{name}:pull,push"]]
    source = OciSource(url, settings())
    tokens.asked.clear()
    assert source.document("metadata/1.snapshot.json", 10) == b"x"
    authorization = source._client._authorization
    assert authorization is not None
    monkeypatch.setattr(authorization, "_until", 0.0)
    assert source.document("metadata/1.snapshot.json", 10) == b"x"
    monkeypatch.setattr(authorization, "_token", "Bearer of.another.time")  # which only the registry finds out
    assert source.document("metadata/1.snapshot.json", 10) == b"x"
    assert [query["scope"] for _, query in tokens.asked] == [[f"repository:{name}:pull"]] * 3


# -- TLS, and other hosts ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory, locked: Running) -> Iterator[Running]:
    with front(tmp_path_factory.mktemp("front"), locked) as running:
        yield running


def test_over_tls_with_an_authority_of_our_own(fronted: Running, name: str) -> None:
    url = f"oci://kart:kartpass@localhost:{fronted.port}/{name}"
    for act in (lambda: bucket(url).preflight(), lambda: read(OciSource(url, settings()))):
        with pytest.raises(SourceError, match="certificate is not trusted") as caught:
            act()
        assert "REQUESTS_CA_BUNDLE" in str(caught.value)
    trusting = settings(REQUESTS_CA_BUNDLE=str(fronted.state / "front.pem"))
    assert written(url, trusting) == BYTES[1000:6000]


def test_an_upload_is_not_led_away_from_tls(fronted: Running, name: str) -> None:
    trusting = settings(REQUESTS_CA_BUNDLE=str(fronted.state / "front.pem"))
    url = f"oci://kart:kartpass@localhost:{fronted.port + 1}/{name}"
    with pytest.raises(SourceError, match="not encrypted") as caught:
        bucket(url, trusting).put_if_absent(BLOB, BYTES)
    assert "X-Forwarded-Proto" in str(caught.value)


def test_no_login_goes_where_blobs_are_redirected_to(fronted: Running, name: str) -> None:
    url = f"oci+http://kart:kartpass@127.0.0.1:{fronted.port + 2}/{name}"
    assert written(url) == BYTES[1000:6000]
    assert bucket(url).digest(BLOB) == (DIGEST, len(BYTES))
    lines = (fronted.state / "storage.log").read_text().splitlines()
    assert len([line for line in lines if DIGEST in line]) >= 3
    assert {line.rpartition(" ")[2] for line in lines} == {'authorization="-"'}


def test_no_login_goes_to_a_token_server_without_tls(fronted: Running, name: str) -> None:
    """A registry behind TLS that names a token server without: both sides refuse to ask it."""
    trusting = settings(REQUESTS_CA_BUNDLE=str(fronted.state / "front.pem"))
    url = f"oci://kart:kartpass@localhost:{fronted.port}/{name}"
    opened, source = bucket(url, trusting), OciSource(url, trusting)
    wanted = ['Bearer realm="http://127.0.0.1:9/token",service="kart"']
    for authorization in (opened._writer._authorization, source._client._authorization):
        assert authorization is not None
        with pytest.raises(SourceError, match=r"names the token server .* not encrypted"):
            authorization.renew(wanted, "")


# -- registries that lie -----------------------------------------------------------------------------------------------


def test_a_file_with_other_bytes_is_refused(passing: Relay, name: str) -> None:
    bucket(passing.url(name)).put_if_absent(POINTER, b"signed")

    def lie(request: Passing) -> None:
        if request.status == 200 and request.method == "GET" and "/blobs/" in request.path:
            request.answer = b"SIGNED"

    passing.rules.append(lie)
    source, opened = OciSource(passing.url(name), settings()), bucket(passing.url(name))
    for act in (lambda: source.document(POINTER, 100), lambda: opened.read(POINTER)):
        with pytest.raises(VerificationError, match="gives other bytes"):
            act()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>log in</html>",
        b"[]",
        b'{"schemaVersion":2}',
        b'{"artifactType":"application/vnd.kartifacts.file.v1","layers":[{}]}',
        b'{"artifactType":"application/vnd.kartifacts.file.v1","layers":[{"size":-1,"digest":"sha256:0"}]}',
        canonical_json(
            {
                "artifactType": ARTIFACT_FILE,
                "layers": [{"size": 1, "digest": "sha256:0", "annotations": {TITLE: POINTER}}],
            }
        ),
        b"{" * 5000,
        b"{}" * 100_000,
    ],
)
def test_a_manifest_that_is_none_is_refused(passing: Relay, name: str, answer: bytes) -> None:
    bucket(passing.url(name)).put_if_absent(POINTER, b"signed")

    def lie(request: Passing) -> None:
        if request.status == 200 and request.method == "GET" and "/manifests/" in request.path:
            request.answer = answer

    passing.rules.append(lie)
    source, opened = OciSource(passing.url(name), settings()), bucket(passing.url(name))
    for act in (lambda: source.document(POINTER, 100), lambda: opened.read(POINTER), lambda: opened.size(POINTER)):
        with pytest.raises(KartifactsError) as caught:
            act()
        assert isinstance(caught.value, VerificationError | SourceError)


def test_one_file_is_not_taken_for_another(passing: Relay, name: str) -> None:
    opened = bucket(passing.url(name))
    opened.put_if_absent("metadata/1.root.json", b"old")
    opened.put_if_absent("metadata/2.root.json", b"new")

    def lie(request: Passing) -> None:
        request.path = request.path.replace(tag_of("metadata/2.root.json"), tag_of("metadata/1.root.json"))

    passing.rules.append(lie)
    with pytest.raises(VerificationError, match=r"is the manifest of 'metadata/1.root.json'"):
        OciSource(passing.url(name), settings()).document("metadata/2.root.json", 100)
    with pytest.raises(VerificationError, match=r"is the manifest of 'metadata/1.root.json'"):
        opened.get("metadata/2.root.json")


def test_a_store_that_confirms_other_bytes_is_not_believed(passing: Relay, name: str) -> None:
    def lie(request: Passing) -> None:
        if request.status == 201:
            request.answer_headers = [
                (header, f"sha256:{'0' * 64}" if header.lower() == "docker-content-digest" else value)
                for header, value in request.answer_headers
            ]

    passing.rules.append(lie)
    with pytest.raises(VerificationError, match="stored other bytes"):
        bucket(passing.url(name)).put_if_absent(BLOB, BYTES)


@pytest.mark.parametrize(("status", "missing"), [(404, True), (403, False), (429, False), (500, False)])
def test_what_a_registry_answers_to_a_read_is_told_apart(passing: Relay, name: str, status: int, missing: bool) -> None:
    bucket(passing.url(name)).put_if_absent(BLOB, BYTES)

    def answer(request: Passing) -> None:
        if request.method == "GET":
            request.status = status
            request.answer_headers = [("Retry-After", "7")] if status == 429 else []

    passing.rules.append(answer)
    with pytest.raises(SourceError, match=f"answered {status}") as caught:
        read(OciSource(passing.url(name), settings()))
    assert caught.value.missing == missing
    assert caught.value.retry_after == (7.0 if status == 429 else None)
    assert (caught.value.hint is not None and "docker login" in caught.value.hint) == (status == 403)
