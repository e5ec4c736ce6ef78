"""Whether a bucket keeps conditional writes is found out by asking, whatever it answers."""

from __future__ import annotations

import logging

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError
from kartifacts.publish.buckets import open_bucket, update
from tests.stores.servers import put_server


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ("overwrites", "let a second writer of one name overwrite the first"),
        ("swaps", "let a writer replace a pointer that another had changed"),
        ("refuses", "refuses to replace a pointer that nobody has changed"),
        ("ignorant", "answered 501"),
        ("forgets", "overwrite the first"),
    ],
)
def test_a_server_that_breaks_a_promise_is_refused_and_only_warned_about_for_one_writer(
    broken: str, seen: str, caplog: pytest.LogCaptureFixture
) -> None:
    with put_server(broken) as server:
        bucket = open_bucket(server.url, Settings(retries=0))
        with pytest.raises(ConfigError, match=seen) as caught:
            bucket.preflight()
        assert "--single-writer" in str(caught.value)
        assert server.objects == {}  # the probe is gone
        alone = open_bucket(server.url, Settings(retries=0), single_writer=True)
        with caplog.at_level(logging.WARNING):
            alone.preflight()
        assert seen in caplog.text
        if broken != "forgets":
            for _ in range(2):
                update(alone, "index.json", lambda before: (before or b"") + b"x")
            assert alone.get("index.json") == b"xx"
            assert alone.put_if_absent("metadata/1.root.json", b"x") == "created"
            assert alone.put_if_absent("metadata/1.root.json", b"x") == "same"


def test_a_sound_server_passes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with put_server() as server, caplog.at_level(logging.WARNING):
        open_bucket(server.url, Settings(retries=0)).preflight()
        open_bucket(server.url, Settings(retries=0), single_writer=True).preflight()
        assert server.objects == {}
    assert caplog.text == ""


@pytest.mark.parametrize("status", [401, 403, 413, 500, 507])
def test_a_probe_that_cannot_be_written_is_no_verdict_on_the_promises(status: int) -> None:
    with put_server() as server:
        server.fail = [status] * 9
        with pytest.raises(SourceError, match=f"answered {status}"):
            open_bucket(server.url, Settings(retries=0)).preflight()
        with pytest.raises(SourceError, match=f"answered {status}"):
            open_bucket(server.url, Settings(retries=0), single_writer=True).preflight()
