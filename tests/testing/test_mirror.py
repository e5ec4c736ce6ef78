"""The mirror that fails to order really fails in the way ordered, seen by a client that is not ours."""

from __future__ import annotations

import gzip
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kartifacts.testing import Mirror, faults

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    (tmp_path / "blob").write_bytes(CONTENT)
    with Mirror(tmp_path) as running:
        yield running


@pytest.fixture
def client(mirror: Mirror) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", mirror.port, timeout=5)
    yield connection
    connection.close()


def get(
    client: http.client.HTTPConnection, path: str = "/blob", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    client.request("GET", path, headers=headers)
    response = client.getresponse()
    return response.status, response.headers, response.read()


def test_without_orders_it_serves_files_and_ranges_over_one_connection(
    mirror: Mirror, client: http.client.HTTPConnection
) -> None:
    status, headers, body = get(client)
    assert (status, body) == (200, CONTENT)
    etag = headers["ETag"]
    status, headers, body = get(client, Range="bytes=10-19")
    assert (status, headers["Content-Range"], body) == (206, f"bytes 10-19/{len(CONTENT)}", CONTENT[10:20])
    assert get(client, Range="bytes=10-", **{"If-Range": etag})[0] == 206
    assert get(client, Range="bytes=10-", **{"If-Range": '"other"'})[0] == 200
    assert get(client, Range=f"bytes={len(CONTENT)}-")[0] == 416
    assert get(client, "/other")[0] == 404
    assert get(client, "/../blob")[0] == 404
    client.request("HEAD", "/blob")
    response = client.getresponse()
    assert (response.status, response.headers["Content-Length"], response.read()) == (200, str(len(CONTENT)), b"")
    assert mirror.connections == 1
    assert mirror.count() == len(mirror.requests) == 8
    assert mirror.count("blob") == 7
    assert mirror.requests[1].range == "bytes=10-19"
    assert mirror.most_at_once == 1


def test_orders_are_carried_out_where_they_match_as_often_as_ordered(
    mirror: Mirror, client: http.client.HTTPConnection
) -> None:
    mirror.order(faults.status(503), match="blob", skip=1, times=2)
    mirror.order(faults.status(418), match="other", times=1)
    assert [get(client)[0] for _ in range(4)] == [200, 503, 503, 200]
    assert [get(client, "/other")[0] for _ in range(2)] == [418, 404]
    mirror.order(faults.status(500))
    mirror.cancel()
    assert get(client)[0] == 200


def test_faults_that_answer(mirror: Mirror, client: http.client.HTTPConnection) -> None:
    mirror.order(faults.flip(at=-1), times=1)
    assert get(client)[2] == CONTENT[:-1] + bytes([CONTENT[-1] ^ 0x40])
    mirror.order(faults.chunked(), times=1)
    assert get(client)[2] == CONTENT
    mirror.order(faults.wrong_length(3), times=1)
    assert get(client)[2] == CONTENT + bytes(3)
    mirror.order(faults.wrong_length(-3), times=1)
    assert get(client)[2] == CONTENT[:-3]
    mirror.order(faults.html(), times=1)
    status, headers, body = get(client, "/other")
    assert (status, headers["Content-Type"], body[:6]) == (200, "text/html", b"<html>")
    mirror.order(faults.redirect("http://127.0.0.1:1{path}", 307), times=1)
    status, headers, _ = get(client)
    assert (status, headers["Location"]) == (307, "http://127.0.0.1:1/blob")
    mirror.order(faults.status(429, Retry_After="2"), times=1)
    status, headers, _ = get(client)
    assert (status, headers["Retry-After"]) == (429, "2")
    mirror.order(faults.ignore_range(), times=1)
    assert get(client, Range="bytes=1-2")[::2] == (200, CONTENT)
    mirror.order(faults.other_range(5), times=1)
    status, headers, body = get(client, Range="bytes=1-2")
    assert (status, headers["Content-Range"], body) == (206, f"bytes 6-7/{len(CONTENT)}", CONTENT[6:8])
    mirror.order(faults.gzip(), times=1)
    status, headers, body = get(client, Range="bytes=1-2")
    assert (headers["Content-Encoding"], gzip.decompress(body)) == ("gzip", CONTENT)
    mirror.order(faults.drip(4000, 0.01), times=1)
    assert get(client)[2] == CONTENT


@pytest.mark.parametrize(
    ("fault", "error"), [(faults.truncate(100), http.client.IncompleteRead), (faults.reset(100), ConnectionResetError)]
)
def test_faults_that_break_off(
    mirror: Mirror, client: http.client.HTTPConnection, fault: faults.Fault, error: type[Exception]
) -> None:
    mirror.order(fault)
    client.request("GET", "/blob")
    response = client.getresponse()
    assert response.headers["Content-Length"] == str(len(CONTENT))
    with pytest.raises(error):
        response.read()


def test_faults_without_end_end_with_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(CONTENT)
    for fault in (faults.stall(100), faults.silent(), faults.endless()):
        with Mirror(tmp_path) as mirror:
            mirror.order(fault)
            with socket.create_connection(("127.0.0.1", mirror.port), timeout=5) as client:
                client.sendall(b"GET /blob HTTP/1.1\r\nHost: x\r\n\r\n")
                while not mirror.requests:
                    pass
        assert not [thread for thread in threading.enumerate() if thread is mirror._thread]


def test_a_held_answer_comes_when_it_is_let_go(mirror: Mirror, client: http.client.HTTPConnection) -> None:
    let_go = threading.Event()
    mirror.order(faults.hold(let_go))
    client.request("GET", "/blob")
    assert not select(client)
    let_go.set()
    assert client.getresponse().read() == CONTENT


def select(client: http.client.HTTPConnection) -> bool:
    import select as system

    return bool(system.select([client.sock], [], [], 0.05)[0])


def test_faults_of_the_head(mirror: Mirror, client: http.client.HTTPConnection) -> None:
    mirror.order(faults.header("X-Path", "else"), times=1)
    assert get(client)[1]["X-Path"] == "else"
    mirror.order(faults.again("Content-Length", "5"), times=1)
    assert get(client)[1].get_all("Content-Length") == [str(len(CONTENT)), "5"]
    mirror.order(faults.without("ETag"), times=1)
    assert "ETag" not in get(client)[1]
    mirror.order(faults.multipart(), times=1)
    status, headers, body = get(client, Range="bytes=1-2")
    assert (status, headers["Content-Range"], headers["Content-Type"][:9]) == (206, None, "multipart")
    assert CONTENT[1:3] in body
    mirror.order(faults.slow_headers(0.0001), times=1)
    assert get(client)[::2] == (200, CONTENT)
    client.close()  # what is sent raw ends the connection
    mirror.order(faults.empty(204), times=1)
    assert get(client)[::2] == (204, b"")


@pytest.mark.parametrize(
    ("fault", "pattern", "ends"),
    [
        (faults.endless_headers(), rb"HTTP/1.1 200 OK\r\n(X-More: and more\r\n)+(X-.*)?", False),
        (faults.endless_interim(103), rb"(HTTP/1.1 103 Wait\r\n\r\n)+(HTTP.*)?", False),
        (faults.bad_chunks(b"zz"), rb"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n(?s:.+)", True),
        (faults.raw(), rb"", True),
        (faults.raw(b"a", b"b"), rb"ab", True),
        (faults.raw(b"ab", last=False), rb"(ab)+a?", False),
    ],
)
def test_faults_against_the_rules(mirror: Mirror, fault: faults.Fault, pattern: bytes, ends: bool) -> None:
    mirror.order(fault)
    received = b""
    with socket.create_connection(("127.0.0.1", mirror.port), timeout=5) as connection:
        connection.sendall(b"GET /blob HTTP/1.1\r\nHost: x\r\n\r\n")
        while len(received) < 100_000 and (piece := connection.recv(65536)):
            received += piece
    assert re.fullmatch(pattern, received)
    assert (len(received) < 100_000) == ends


def test_it_disconnects_when_told(mirror: Mirror, client: http.client.HTTPConnection) -> None:
    assert get(client)[0] == 200
    mirror.disconnect()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        get(client)


def test_it_carries_bytes_as_a_proxy_does(mirror: Mirror, tmp_path: Path) -> None:
    with Mirror(tmp_path) as proxy:
        proxy.tunnel_to = ("127.0.0.1", mirror.port)
        through = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
        through.set_tunnel("mirror.invalid", 80)
        assert get(through)[::2] == (200, CONTENT)
        through.close()
        assert [(request.method, request.path) for request in proxy.requests] == [("CONNECT", "mirror.invalid:80")]
        proxy.order(faults.status(407))
        with pytest.raises(OSError, match="407"):
            get(through)
    assert mirror.count() == 1
