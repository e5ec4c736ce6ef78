"""Headers that a mirror may send, right and wrong."""

from __future__ import annotations

import time
from email.message import Message
from email.utils import formatdate

import pytest

from kartifacts.errors import SourceError, VerificationError
from kartifacts.remote.addresses import shown
from kartifacts.remote.answers import asked_pause, check_range, check_whole

URL = "http://127.0.0.1/blob"


def received(headers: dict[str, str]) -> Message:
    message = Message()
    for name, value in headers.items():
        message[name] = value
    return message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": " 7 "}, 7),
        ({"Retry-After": "-7"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "9" * 400}, None),
        ({"Retry-After": "Mon, 01 Jan 1990 00:00:00 GMT"}, 0),
        ({"RateLimit": '"hour";r=0;t=87'}, 87),
        ({"RateLimit": '"hour";r=10;t=87'}, None),
        ({"RateLimit": '"minute";r=3;t=9, "hour";t=87;r=0'}, 87),
        ({"RateLimit": '"minute";r=0;t=9, "hour";r=0;t=87'}, 87),
        ({"RateLimit": '"minute";r=0, "hour";r=5;t=87'}, None),
        ({"Retry-After": "2", "RateLimit": '"hour";r=0;t=87'}, 2),
        ({"RateLimit": "nonsense"}, None),
    ],
)
def test_a_pause_is_read_in_every_spelling(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_pause(received(headers)) == seconds


def test_a_date_is_a_pause_too() -> None:
    pause = asked_pause(received({"Retry-After": formatdate(time.time() + 100, usegmt=True)}))
    assert pause is not None
    assert 90 < pause <= 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bytes 10-19",
        "bytes */100",
        "bytes 10-19/99x",
        "items 10-19/100",
        "bytes 10-20/100",
        "bytes 9-19/100",
        "bytes 15-12/100",
        "bytes 10-" + "9" * 30 + "/100",
    ],
)
def test_a_content_range_that_is_not_the_one_asked_for_is_refused(text: str) -> None:
    with pytest.raises(SourceError):
        check_range(received({"Content-Range": text}), URL, start=10, end=20, size=100)


def test_a_content_range_may_leave_the_total_open_or_stop_early_but_not_name_another() -> None:
    for text in ("bytes 10-19/100", "bytes 10-19/*", "bytes 10-12/100"):
        check_range(received({"Content-Range": text}), URL, start=10, end=20, size=100)
    with pytest.raises(VerificationError):
        check_range(received({"Content-Range": "bytes 10-19/101"}), URL, start=10, end=20, size=100)


def test_a_length_is_believed_only_where_it_contradicts() -> None:
    for headers in (
        {},
        {"Content-Length": "100"},
        {"Content-Length": "x"},
        {"Content-Length": "5", "Content-Encoding": "gzip"},
    ):
        check_whole(received(headers), URL, size=100)
    with pytest.raises(VerificationError):
        check_whole(received({"Content-Length": "99"}), URL, size=100)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://user:pass@host:1/a", "https://host:1/a"),
        ("https://host/a?sig=1#x", "https://host/a?…"),
        ("https://us@er:p@ss@host/a", "https://host/a"),
        ("http://[", "'http://['"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, text: str) -> None:
    assert shown(url) == text
