"""What an ``s3://`` text may say, and whom boto3 then asks, and by what way."""

from __future__ import annotations

import sys

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError
from kartifacts.publish.buckets import open_bucket
from kartifacts.remote import s3
from kartifacts.sources.s3 import S3Source
from tests.stores.servers import put_server


def test_all_that_can_be_said_is_understood() -> None:
    text = "s3://kernels/v1/a?endpoint=https://h:9/&region=eu-north-1&checksums=when_supported&single-writer=1"
    assert s3.place(text) == s3.Place("kernels", "v1/a", "https://h:9", "eu-north-1", "when_supported", True)
    plain = s3.place("s3://kernels")
    assert plain == s3.Place("kernels", "", "", "", "when_required", False)
    assert (plain.key("a/b"), plain.path("a/b"), plain.name) == ("a/b", "a/b", "s3://kernels")
    below = s3.place("s3://kernels/v1/?endpoint=http://h")
    assert (below.key("a/b"), below.path("v1/a/b"), below.name) == ("v1/a/b", "a/b", "s3://kernels/v1 at http://h")


@pytest.mark.parametrize(
    "text",
    [
        "s3:kernels",
        "s3://",
        "s3:///x",
        "s3://k",
        "s3://key:secret@kernels",
        "s3://kernels/../x",
        "s3://kernels/%2e%2e/x",
        "s3://kernels/a b",
        "s3://kernels#x",
        "s3://kernels?endpoint",
        "s3://kernels?endpoint=ftp://h",
        "s3://kernels?endpoint=https://u:secret@h",
        "s3://kernels?endpoint=https://h?x=secret",
        "s3://kernels?endpoint=https://h:99999",
        "s3://kernels?region=../x",
        "s3://kernels?checksums=never",
        "s3://kernels?single-writer=yes",
        "s3://kernels?region=a&region=b",
        "s3://kernels?secret=x",
    ],
)
def test_anything_else_is_refused_without_what_may_be_a_secret(text: str) -> None:
    for act in (s3.place, lambda text: open_bucket(text, Settings()), lambda text: S3Source(text, Settings())):
        with pytest.raises(ConfigError, match="not an S3 bucket") as caught:
            act(text)
        assert "secret@" not in str(caught.value)
        assert "=secret" not in str(caught.value)


def test_where_boto3_is_missing_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match="needs boto3") as caught:
        open_bucket("s3://kernels?endpoint=http://127.0.0.1:9", Settings()).get("x")
    assert "kartifacts[s3]" in str(caught.value)
    with pytest.raises(ConfigError, match="KARTIFACTS_OFFLINE"):
        S3Source("s3://kernels", Settings(offline=True))


def test_proxies_are_those_of_the_settings_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with put_server() as server:
        host = server.url.removesuffix("/repository")
        server.objects |= {"/kernels/x": b"direct", "http://store.example/kernels/x": b"by the proxy"}
        direct = open_bucket(f"s3://kernels?endpoint={host}", Settings(retries=0))
        assert direct.get("x") == b"direct"
        proxied = Settings(retries=0, proxies=(("http", host), ("no", "other.example")))
        assert open_bucket("s3://kernels?endpoint=http://store.example", proxied).get("x") == b"by the proxy"
        with pytest.raises(SourceError):
            open_bucket("s3://kernels?endpoint=http://other.example", proxied).get("x")


@pytest.mark.parametrize(
    ("status", "permanent", "missing"),
    [(400, True, False), (403, True, False), (404, True, True), (429, False, False), (503, False, False)],
)
def test_a_status_without_a_body_still_says_what_it_says(status: int, permanent: bool, missing: bool) -> None:
    with put_server() as server:
        server.fail = [status]
        host = server.url.removesuffix("/repository")
        where = s3.place(f"s3://kernels?endpoint={host}")
        client = s3.connect(where, Settings())
        with pytest.raises(s3.S3Error, match=f"answered {status}") as caught, s3.faults("write", "x", where):
            client.put_object(Bucket="kernels", Key="x", Body=b"x")
    error = caught.value
    assert (error.status, error.permanent, error.missing) == (status, permanent, missing)
    assert (error.retry_after is not None) == (status == 429)
