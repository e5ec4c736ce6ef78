"""Logins and tokens: what a registry asks for, whom it is shown to, and what is kept where."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.remote.authorization import Authorization, challenges
from kartifacts.remote.logins import Kept, Login, kept_login
from kartifacts.remote.registry import parse_registry

BEARER = 'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a:pull"'
Log = pytest.LogCaptureFixture


def settings(home: Path, **environ: str) -> Settings:
    return config.read({"HOME": str(home), "PATH": str(home), **environ})


class TokenServer:
    """Answers and remembers who asked; an `Authorization` gets its method in place of HTTP."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers) or [{"token": "t", "expires_in": 300}]
        self.asked: list[tuple[str, Login | None]] = []

    def get(self, url: str, login: Login | None) -> bytes:
        self.asked.append((url, login))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else json.dumps(answer).encode()


def asking(
    home: Path, server: TokenServer, text: str = "oci://me:secret@host/a", actions: str = "pull"
) -> Authorization:
    return Authorization(parse_registry(text), settings(home), actions, server.get)


# -- challenges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], []),
        (["Basic"], [("basic", {})]),
        (['Basic realm="x"'], [("basic", {"realm": "x"})]),
        (['BASIC realm="a, b"'], [("basic", {"realm": "a, b"})]),
        (["Basic realm=x", "Bearer realm=y"], [("basic", {"realm": "x"}), ("bearer", {"realm": "y"})]),
        (['Basic realm="x", Bearer realm="y",a=z'], [("basic", {"realm": "x"}), ("bearer", {"realm": "y", "a": "z"})]),
        (["Negotiate, Basic realm=x"], [("negotiate", {}), ("basic", {"realm": "x"})]),
        (['Bearer realm="say \\"x\\""'], [("bearer", {"realm": 'say "x"'})]),
        (['Bearer realm = "x" , scope="a:b,c"'], [("bearer", {"realm": "x", "scope": "a:b,c"})]),
        (['realm="x"'], []),
        (['Bearer realm="never closed'], [("bearer", {})]),
        (["=,;\x00", ""], []),
    ],
)  # fmt: skip
def test_challenges_are_taken_apart(headers: list[str], expected: list[tuple[str, dict[str, str]]]) -> None:
    assert [(found.scheme, found.parameters) for found in challenges(headers)] == expected


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_token_is_for_this_repository_and_what_is_to_be_done(tmp_path: Path) -> None:
    server = TokenServer()
    asked = asking(tmp_path, server, "oci://me:secret@host/a/b?mount=c", "pull,push")
    assert asked.header() == ""
    assert asked.renew([BEARER], "")
    assert asked.header() == "Bearer t"
    [(url, login)] = server.asked
    assert login == ("me", "secret")
    assert url == (
        "https://auth.example/token?service=registry.example"
        "&scope=repository%3Aa%2Fb%3Apull%2Cpush&scope=repository%3Ac%3Apull"
    )


def test_a_token_whose_time_is_over_is_asked_for_again(tmp_path: Path) -> None:
    server = TokenServer({"token": "first", "expires_in": 300}, {"access_token": "second"})
    asked = asking(tmp_path, server)
    asked.renew([BEARER], "")
    assert asked.header() == asked.header() == "Bearer first"
    asked._until = 0.0
    assert asked.header() == "Bearer second"
    assert len(server.asked) == 2


def test_threads_that_are_refused_together_ask_for_one_token(tmp_path: Path) -> None:
    server = TokenServer()
    asked = asking(tmp_path, server)
    threads = [threading.Thread(target=asked.renew, args=([BEARER], "")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1


def test_a_login_that_is_refused_is_not_shown_again_and_again(tmp_path: Path) -> None:
    asked = asking(tmp_path, TokenServer())
    assert asked.renew(["Basic realm=x"], "")
    used = asked.header()
    assert base64.b64decode(used.removeprefix("Basic ")) == b"me:secret"
    assert not asked.renew(["Basic realm=x"], used)


def test_without_a_login_basic_is_no_use_and_a_token_may_be(tmp_path: Path) -> None:
    server = TokenServer()
    asked = asking(tmp_path, server, "oci://host/a")
    assert not asked.renew(["Basic realm=x"], "")
    assert not asked.renew([], "")
    assert not asked.renew(["Negotiate"], "")
    assert asked.renew([BEARER], "")
    assert [login for _, login in server.asked] == [None]


@pytest.mark.parametrize(
    "realm",
    ["http://auth.example/token", "", "ftp://auth.example", "//auth.example/", "https://", "file:///etc/passwd"],
)
def test_no_login_goes_to_a_server_without_tls(tmp_path: Path, realm: str) -> None:
    server = TokenServer()
    with pytest.raises(SourceError, match="names the token server") as caught:
        asking(tmp_path, server).renew([f'Bearer realm="{realm}"'], "")
    assert caught.value.permanent
    assert server.asked == []
    assert "secret" not in str(caught.value)


def test_a_registry_without_tls_may_have_a_token_server_without(tmp_path: Path) -> None:
    server = TokenServer()
    asked = asking(tmp_path, server, "oci+http://127.0.0.1:5000/a")
    assert asked.renew(['Bearer realm="http://127.0.0.1:5001/token"'], "")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        [],
        {},
        {"token": ""},
        {"token": 5},
        {"token": "a b"},
        {"token": "a\r\nHost: b"},
        {"token": "é"},
        b'{"token":"a","token":"b"}',
    ],
)
def test_what_is_no_token_is_not_sent(tmp_path: Path, answer: object) -> None:
    asked = asking(tmp_path, TokenServer(answer))
    with pytest.raises(SourceError, match="there is none") as caught:
        asked.renew([BEARER], "")
    assert caught.value.permanent


def test_why_there_is_no_token_is_said_with_how_to_log_in(tmp_path: Path) -> None:
    asked = asking(tmp_path, TokenServer(SourceError("the server answered 401", permanent=True)))
    with pytest.raises(SourceError, match=r"wants a token, and there is none: the server answered 401") as caught:
        asked.renew([BEARER], "")
    assert caught.value.hint is not None
    assert "docker login" in caught.value.hint
    asked = asking(tmp_path, TokenServer(SourceError("too many", retry_after=7.0)))
    with pytest.raises(SourceError) as caught:
        asked.renew([BEARER], "")
    assert (caught.value.permanent, caught.value.retry_after) == (False, 7.0)


# -- what container tools keep -----------------------------------------------------------------------------------------


def encoded(login: str) -> dict[str, str]:
    return {"auth": base64.b64encode(login.encode()).decode()}


def keep(home: Path, content: object, name: str = ".docker/config.json") -> None:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.mark.parametrize(
    ("auths", "expected"),
    [
        ({"host": encoded("a:b")}, ("a", "b")),
        ({"https://host": encoded("a:b:c")}, ("a", "b:c")),
        ({"https://host/v1/": encoded("a:b")}, ("a", "b")),
        ({"host/": encoded("a:b")}, ("a", "b")),
        ({"host:443": encoded("a:b")}, ("a", "b")),
        ({"host": {"username": "a", "password": "b"}}, ("a", "b")),
        ({"host/x/y": encoded("a:b"), "host": encoded("c:d")}, ("a", "b")),
        ({"host/x": encoded("a:b"), "host": encoded("c:d")}, ("a", "b")),
        ({"host/x/z": encoded("a:b"), "host": encoded("c:d")}, ("c", "d")),
        ({"other": encoded("a:b"), "host.evil": encoded("a:b"), "host:5000": encoded("a:b")}, None),
        ({"host": {"auth": "not base64!"}}, None),
        ({"host": encoded("no colon")}, None),
        ({"host": {}}, None),
        ({"host": "text"}, None),
        ({"host": {"identitytoken": "x"}}, None),
        ("text", None),
    ],
)
def test_the_most_specific_login_is_taken(tmp_path: Path, auths: object, expected: Login | None) -> None:
    keep(tmp_path, {"auths": auths})
    assert kept_login(settings(tmp_path), "host", "x/y") == Kept(expected)


def test_a_kept_token_is_sent_as_it_is(tmp_path: Path) -> None:
    keep(tmp_path, {"auths": {"host": {"registrytoken": "kept"}}})
    server = TokenServer()
    asked = asking(tmp_path, server, "oci://host/a")
    assert asked.renew([BEARER], "")
    assert asked.header() == "Bearer kept"
    assert server.asked == []


def test_docker_hub_has_an_old_name(tmp_path: Path) -> None:
    keep(tmp_path, {"auths": {"https://index.docker.io/v1/": encoded("a:b")}})
    assert kept_login(settings(tmp_path), "registry-1.docker.io", "me/x").login == ("a", "b")


def test_files_are_looked_at_in_the_order_of_the_tools(tmp_path: Path) -> None:
    keep(tmp_path, {"auths": {"host": encoded("docker:1")}})
    assert kept_login(settings(tmp_path), "host", "x").login == ("docker", "1")
    keep(tmp_path, {"auths": {"host": encoded("podman:1")}}, ".config/containers/auth.json")
    assert kept_login(settings(tmp_path), "host", "x").login == ("podman", "1")
    keep(tmp_path, {"auths": {"host": encoded("named:1")}}, "named.json")
    named = settings(tmp_path, REGISTRY_AUTH_FILE=str(tmp_path / "named.json"))
    assert kept_login(named, "host", "x").login == ("named", "1")
    elsewhere = settings(tmp_path, REGISTRY_AUTH_FILE=str(tmp_path / "absent.json"))
    assert kept_login(elsewhere, "host", "x") == Kept()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"auths":{},"auths":{}}'])
def test_a_damaged_file_is_a_warning(tmp_path: Path, content: bytes, caplog: Log) -> None:
    keep(tmp_path, content)
    assert kept_login(settings(tmp_path), "host", "x") == Kept()
    assert ("is not used" in caplog.text) == (content != b"[]")


def helper(home: Path, script: str) -> None:
    path = home / "docker-credential-ours"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_a_helper_is_asked_for_this_registry(tmp_path: Path, key: str) -> None:
    keep(tmp_path, {key: {"host": "ours"} if key == "credHelpers" else "ours", "auths": {"host": {}}})
    helper(tmp_path, 'read host; echo "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$host\\"}"')
    assert kept_login(settings(tmp_path), "host", "x").login == ("get", "host")


def test_a_helper_that_knows_nothing_is_no_fault(tmp_path: Path) -> None:
    keep(tmp_path, {"credsStore": "ours"})
    helper(tmp_path, 'echo "credentials not found in native keychain"; exit 1')
    assert kept_login(settings(tmp_path), "host", "x") == Kept()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "is not on PATH"),
        ("echo locked >&2; exit 1", "locked"),
        ("echo nonsense", "no login"),
        ("echo '{}'", "no login"),
        ("echo '[]'", "no login"),
        ("""echo '{"Username": "<token>", "Secret": "s3cret"}'""", "identity token"),
        ("""echo '{"Username": 5, "Secret": "s3cret"}'""", "identity token|no login"),
    ],
)
def test_a_helper_that_fails_is_said(tmp_path: Path, script: str | None, said: str) -> None:
    keep(tmp_path, {"credHelpers": {"host": "ours"}})
    if script is not None:
        helper(tmp_path, script)
    with pytest.raises(SourceError, match=said) as caught:
        kept_login(settings(tmp_path), "host", "x")
    assert "s3cret" not in str(caught.value)
    assert kept_login(settings(tmp_path), "other", "x") == Kept()


@pytest.mark.parametrize("name", ["../evil", "a b", "", "x;y", "a/b"])
def test_a_helper_is_a_program_and_no_path(tmp_path: Path, name: str) -> None:
    keep(tmp_path, {"credHelpers": {"host": name}})
    with pytest.raises(SourceError, match="is not on PATH"):
        kept_login(settings(tmp_path), "host", "x")
