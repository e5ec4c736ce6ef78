"""Real servers, each started once and only if a test asks for it, and the buckets that they give."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.publish.buckets import Bucket, open_bucket
from kartifacts.remote import s3
from tests.processes import free_ports

SCRIPTS = Path(__file__).parents[2] / "ci" / "stores"
PATH = f"{Path(sys.executable).parent}:/usr/sbin:/sbin:{os.environ.get('PATH', os.defpath)}"
AWS = {
    "AWS_ACCESS_KEY_ID": "kartadmin",
    "AWS_SECRET_ACCESS_KEY": "kartsecretkart",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


def require(*programs: str) -> None:
    """Skip where a program is missing; fail where all must be there."""
    missing = [program for program in programs if shutil.which(program, path=PATH) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        if os.environ.get("KART_REQUIRE_STORES"):
            pytest.fail(reason)
        pytest.skip(reason)


def run_script(name: str, *arguments: object, **environ: str) -> dict[str, str]:
    """Run a script of ci/stores; gives the ``name=value`` lines that it prints."""
    done = subprocess.run(
        [SCRIPTS / name, *map(str, arguments)],
        env={**os.environ, "PATH": PATH, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"ci/stores/{name} {arguments[0]} failed"
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@dataclass(frozen=True)
class Place:
    """Where a test may write: the text of a bucket of its own, and what a process needs to open it."""

    text: str
    environ: Mapping[str, str] = field(default_factory=dict)
    single_writer: bool = False
    spoil: Callable[[str, bytes], object] | None = None  # puts bytes under a path, past all that a bucket checks

    def settings(self, **settings: Any) -> Settings:
        given = {"KARTIFACTS_RETRIES": "2"} | {f"KARTIFACTS_{name.upper()}": str(v) for name, v in settings.items()}
        return config.read({"HOME": "/nonexistent", **self.environ, **given})

    def open(self, **settings: Any) -> Bucket:
        return open_bucket(self.text, self.settings(**settings), single_writer=self.single_writer)

    def python(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A process in which `bucket` is this one."""
        begin = f"""
import os, sys
from kartifacts import config
from kartifacts.errors import PublishConflict
from kartifacts.publish.buckets import open_bucket, update
settings = config.read({{"HOME": "/nonexistent", **{dict(self.environ)!r}}})
bucket = open_bucket({self.text!r}, settings, single_writer={self.single_writer})
"""
        return subprocess.Popen(
            [sys.executable, "-c", begin + code, *arguments],
            env={**os.environ, **AWS},
            stdout=subprocess.PIPE,
            text=True,
        )


@dataclass(frozen=True)
class S3Server:
    """An S3 server that runs, and those who may ask it: kartadmin all, kartreader nothing but reading."""

    endpoint: str
    authority: str = ""

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def place(self, *, own: bool = False, endpoint: str = "", extra: str = "") -> Place:
        """A prefix that nobody else uses; with `own`, in a bucket that nobody else uses."""
        bucket = f"kart-{uuid.uuid4().hex[:12]}" if own else "kart"
        text = f"s3://{bucket}/{uuid.uuid4().hex[:12]}/it?endpoint={endpoint or self.endpoint}{extra}"
        environ = {"REQUESTS_CA_BUNDLE": self.authority} if self.authority else {}
        where = s3.place(text)
        client = self.client()
        if where.bucket not in [bucket["Name"] for bucket in client.list_buckets().get("Buckets", ())]:
            client.create_bucket(Bucket=where.bucket)

        def spoil(path: str, content: bytes) -> None:
            client.put_object(Bucket=where.bucket, Key=where.key(path), Body=content)

        return Place(text, environ, spoil=spoil)

    def client(self) -> Any:
        settings = config.read({"HOME": "/nonexistent", "REQUESTS_CA_BUNDLE": self.authority})
        return s3.connect(s3.place(f"s3://any?endpoint={self.endpoint}"), settings)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of kartadmin, found as boto3 finds any."""
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    require("weed", "curl")
    state = tmp_path_factory.mktemp("seaweedfs")
    yield S3Server(run_script("seaweedfs", "start", state, free_ports(8))["endpoint"])
    run_script("seaweedfs", "stop", state)


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    require("juicefs", "curl")
    state = tmp_path_factory.mktemp("juicefs")
    yield S3Server(run_script("juicefs", "start", state, free_ports(2))["endpoint"])
    run_script("juicefs", "stop", state)


@pytest.fixture(scope="session")
def ceph_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "openssl", "curl")
    if os.geteuid() != 0:
        pytest.skip("ceph's daemons need root")
    state = tmp_path_factory.mktemp("ceph")
    yield run_script("ceph", "start", state, free_ports(4))
    run_script("ceph", "stop", state)


@pytest.fixture(scope="session")
def ceph(ceph_servers: dict[str, str]) -> S3Server:
    return S3Server(ceph_servers["endpoint"])


@pytest.fixture(scope="session")
def ceph_tls(ceph_servers: dict[str, str]) -> S3Server:
    return S3Server(ceph_servers["tls_endpoint"], ceph_servers["authority"])


@pytest.fixture(scope="session")
def nginx_uploads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of an nginx that takes PUT and DELETE, with a login, and the directory that it writes to."""
    require("nginx", "openssl")
    state, tree, uploads = (tmp_path_factory.mktemp(name) for name in ("nginx", "tree", "uploads"))
    port = free_ports(5)
    run_script("nginx", "start", state, tree, port, uploads)
    yield f"http://kart:kartpass@127.0.0.1:{port + 4}", uploads
    run_script("nginx", "stop", state)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of an OCI registry that lets everybody in, and the directory that it keeps blobs in."""
    require("docker-registry", "curl")
    state, port = tmp_path_factory.mktemp("registry"), free_ports(1)
    run_script("registry", "start", state, port)
    yield port, state / "data" / "docker" / "registry" / "v2" / "blobs" / "sha256"
    run_script("registry", "stop", state)
