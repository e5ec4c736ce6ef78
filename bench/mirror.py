"""One nginx that serves the files as they are, as a release, and as a hub would; and what its log says it sent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from contenders import COMMIT, HUB, Row

FIRST_PORT = 8471
_CONF = """
pid {state}/nginx.pid; error_log {state}/error.log warn; worker_processes 1; {user}
events {{ worker_connections 1024; }}
http {{
  default_type application/octet-stream; sendfile on; tcp_nopush on; server_tokens off;
  log_format traffic '$bytes_sent $status $uri'; access_log {state}/traffic.log traffic;
  client_body_temp_path {state}/t1; proxy_temp_path {state}/t2; fastcgi_temp_path {state}/t3;
  uwsgi_temp_path {state}/t4; scgi_temp_path {state}/t5;
  ssl_certificate {state}/server.pem; ssl_certificate_key {state}/server.key;
  map_hash_max_size 1048576; map_hash_bucket_size 2048;
  map $uri $linked {{ include {state}/digests; }}
  server {{
    listen {address}:{port}; listen {address}:{secure} ssl http2;
    root {www};
    location /hub/api/ {{ default_type application/json; }}
    location /hub/{hub}/resolve/{commit}/ {{
      alias {www}/raw/; add_header X-Repo-Commit {commit}; add_header X-Linked-Etag $linked;
    }}
  }}
}}
"""


class Sent(NamedTuple):
    size: int  # with the headers of the answers
    status: int
    path: str


class Mirror:
    def __init__(self, state: Path, address: str, port: int) -> None:
        self.state = state
        self._address = address
        self._port = port
        self._read = 0

    def url(self, secure: bool = False) -> str:
        return f"https://{self._address}:{self._port + 1}" if secure else f"http://{self._address}:{self._port}"

    @property
    def authority(self) -> Path:
        return self.state / "server.pem"

    def sent(self) -> list[Sent]:
        """What was sent since this was last asked; what ended a moment ago may not be in the log yet."""
        time.sleep(0.05)
        with open(self.state / "traffic.log", encoding="utf-8") as file:
            file.seek(self._read)
            lines = file.readlines()
            self._read = file.tell()
        fields = [line.rstrip("\n").split(" ", 2) for line in lines]
        return [Sent(int(size), int(status), path) for size, status, path in fields]


@contextmanager
def serving(
    place: Path,
    raw: Path,
    release: Path,
    rows: Sequence[Row],
    *,
    address: str = "127.0.0.1",
    inside: Sequence[str] = (),
) -> Iterator[Mirror]:
    """Serve from `place`, which is emptied of what it served before; `inside` is put before the command."""
    state, www = place / "nginx", place / "www"
    for directory in (state, www):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    (www / "raw").symlink_to(raw)
    (www / "release").symlink_to(release)
    _write_hub(www, state, rows)
    _certificate(state, address)
    port = FIRST_PORT if inside else free_ports()
    user = "user root;" if os.geteuid() == 0 else ""  # a worker of another user could not read a private directory
    conf = _CONF.format(
        state=state, www=www, user=user, address=address, port=port, secure=port + 1, hub=HUB, commit=COMMIT
    )
    (state / "nginx.conf").write_text(conf)
    files = ["-p", str(state), "-c", str(state / "nginx.conf"), "-e", str(state / "error.log")]
    server = subprocess.Popen([*inside, "nginx", *files, "-g", "daemon off;"])
    try:
        while not (state / "nginx.pid").exists():
            if server.poll() is not None:
                raise SystemExit(f"nginx did not start: {(state / 'error.log').read_text()}")
            time.sleep(0.02)
        yield Mirror(state, address, port)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def free_ports() -> int:
    """The first of two in a row that nobody uses."""
    for first in range(FIRST_PORT, FIRST_PORT + 200, 2):
        with ExitStack() as probes:
            try:
                for port in (first, first + 1):
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise SystemExit("no free ports")


def _write_hub(www: Path, state: Path, rows: Sequence[Row]) -> None:
    """The two answers of the hub's API that a snapshot needs, and the digest that each file's headers name."""
    api = www / "hub/api/models" / HUB
    (api / "revision").mkdir(parents=True)
    (api / "tree").mkdir()
    found = {"id": HUB, "modelId": HUB, "sha": COMMIT, "siblings": [{"rfilename": row.path} for row in rows]}
    (api / "revision/main").write_text(json.dumps({**found, "private": False, "tags": [], "downloads": 0, "likes": 0}))
    tree = [
        {
            "type": "file",
            "path": row.path,
            "size": row.size,
            "oid": row.sha256[:40],
            "lfs": {"oid": row.sha256, "size": row.size, "pointerSize": 130},
        }
        for row in rows
    ]
    (api / "tree" / COMMIT).write_text(json.dumps(tree))
    prefix = f"/hub/{HUB}/resolve/{COMMIT}"
    with open(state / "digests", "w", encoding="utf-8") as file:
        file.writelines(f'"{prefix}/{row.path}" \'"{row.sha256}"\';\n' for row in rows)


def _certificate(state: Path, address: str) -> None:
    """One that signs itself, so that it is also the authority."""
    subject = ["-subj", "/CN=bench", "-addext", f"subjectAltName=IP:{address}", "-days", "2"]
    keys = ["-keyout", str(state / "server.key"), "-out", str(state / "server.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(["openssl", "req", "-x509", *kind, *subject, *keys], check=True, stderr=subprocess.DEVNULL)
