"""Signed publishing to real stores: cut off or killed anywhere, and several at once, readers see whole states only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import SourceError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import View, blob_path, target_path
from kartifacts.model.manifest import decode_bundle, decode_release
from kartifacts.publish.buckets import Bucket, Unlisted
from kartifacts.publish.protocol import publish
from kartifacts.publish.retention import retain
from kartifacts.testing import tiny_repository
from kartifacts.trust.client import refresh
from kartifacts.trust.keyceremony import init
from kartifacts.trust.keyfiles import Plan
from kartifacts.trust.keyring import Keyring
from tests.stores.conftest import Place, S3Server
from tests.stores.servers import put_server

Sources = Callable[[str], Path]
POINTERS = ("index.json", "metadata/timestamp.json", "airgap/timestamp.json")


@pytest.fixture(
    params=[
        pytest.param("http", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.stores) for name in ("seaweedfs", "ceph", "registry")),
    ],
    scope="session",
)
def places(request: pytest.FixtureRequest) -> Iterator[Callable[[], Place]]:
    """Gives empty places of one kind of store."""
    if request.param == "http":
        with put_server() as server:
            numbers = iter(range(1000))
            yield lambda: Place(f"{server.url}/{next(numbers)}")
    elif request.param == "registry":
        port, _ = request.getfixturevalue("registry")
        names = iter(range(1000))
        yield lambda: Place(f"oci+http://127.0.0.1:{port}/killed/{next(names)}", {}, single_writer=True)
    else:
        running: S3Server = request.getfixturevalue(request.param)
        yield running.place


@pytest.fixture(scope="session")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    one = Plan(1, 1)
    plans = {"targets": one, "online:root": one, "airgap:root": one}
    return init(tmp_path_factory.mktemp("keys") / "ring", ["demo", "more"], plans, now=datetime.now(timezone.utc))


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    root = tmp_path_factory.mktemp("sources")

    def make(name: str) -> Path:
        library, version = name.split()
        content = {"norm/x?dtype=half": name.encode()}
        return tiny_repository(root / name, content, library=library, version=version).path

    return make


class Cut:
    """A bucket to which the connection is lost after some requests, whose last is carried out."""

    def __init__(self, bucket: Bucket, requests: int = 1 << 30) -> None:
        self._bucket = bucket
        self._left = requests
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        if name not in ("put_if_absent", "copy_if_absent", "get", "digest", "size", "read", "swap", "list", "delete"):
            return found

        def asked(path: str, *arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise SourceError(f"connection lost before {name} {path}")
            self.asked.append(f"{name} {path}")
            answer = found(path, *arguments)
            if self._left == 0:
                raise SourceError(f"connection lost after {name} {path}")
            return answer

        return asked


def copied(directory: Path, place: Place) -> Bucket:
    """Everything of a directory bucket in a place."""
    bucket = place.open()

    def rank(path: Path) -> tuple[int, Path]:  # a registry takes nothing that names what it does not hold yet
        content = path.read_bytes()
        return 2 if b'"manifests"' in content else 1 if b'"layers"' in content else 0, path

    for path in sorted((path for path in directory.rglob("*") if path.is_file()), key=rank):
        name = path.relative_to(directory).as_posix()
        if name in POINTERS:
            bucket.swap(name, path.read_bytes(), None)
        else:
            bucket.put_if_absent(name, path)
    return bucket


def seen(bucket: Bucket, keyring: Keyring, view: View) -> set[str]:
    """What a new reader sees, each release proved to be there; empty if there is nothing."""
    try:
        libraries = refresh(keyring.root(view), None, bucket.get).libraries
    except SourceError as error:
        if not error.missing:
            raise
        return set()
    found = set()
    for release in (release for library in libraries.values() for release in library.releases):
        pin = release.pin
        index = bucket.get(target_path(pin.library, pin.version, Digest(pin.sha256)))
        assert bucket.digest(blob_path(Digest(pin.sha256))) == (pin.sha256, pin.size)
        for descriptor in decode_release(index).manifests:
            bundle = decode_bundle(bucket.get(blob_path(descriptor.sha256)))
            for below in (bundle.config, *bundle.layers):
                assert bucket.digest(blob_path(below.sha256)) == (below.sha256, below.size)
        found.add(f"{pin.library} {pin.version}")
    return found


def test_cut_after_any_write_readers_see_the_old_state_or_the_new_and_a_second_run_completes_it(
    places: Callable[[], Place], keyring: Keyring, sources: Sources, tmp_path: Path
) -> None:
    from kartifacts.publish.buckets.directory import DirectoryBucket

    old, new = {"demo 1.0"}, {"demo 1.0", "demo 2.0"}
    publish(sources("demo 1.0"), DirectoryBucket(tmp_path / "start"), keyring=keyring)
    counting: Any = Cut(copied(tmp_path / "start", places()))
    publish(sources("demo 2.0"), counting, keyring=keyring)
    writes = [
        number
        for number, request in enumerate(counting.asked, 1)
        if request.startswith(("put", "copy", "swap")) and not request.startswith("put_if_absent gc/")
    ]
    assert len(writes) > 10
    states = set()
    for number in writes:
        bucket = copied(tmp_path / "start", places())
        cut: Any = Cut(bucket, number)
        with pytest.raises(SourceError, match="lost"):
            publish(sources("demo 2.0"), cut, keyring=keyring)
        online, airgap = seen(bucket, keyring, "online"), seen(bucket, keyring, "airgap")
        assert online in (old, new)
        assert airgap in (old, new)
        states.add((len(online), len(airgap)))
        publish(sources("demo 2.0"), bucket, keyring=keyring)
        assert seen(bucket, keyring, "online") == seen(bucket, keyring, "airgap") == new
    assert states == {(1, 1), (2, 1), (2, 2)}


PUBLISHER = """
import signal
from pathlib import Path
from kartifacts.publish.protocol import publish
from kartifacts.trust.keyring import Keyring

class Killed:
    left = int(sys.argv[2])
    def __getattr__(self, name):
        found = getattr(bucket, name)
        if name in ("name", "preflight", "tidy"):
            return found
        Killed.left -= 1
        if Killed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

for source in sys.argv[3:]:
    publish(Path(source), Killed(), keyring=Keyring.load(Path(sys.argv[1])))
"""


@pytest.mark.stores
@pytest.mark.parametrize("at", [3, 15, 25, 35, 42, 50])
def test_a_process_that_is_killed_leaves_a_whole_state_and_the_next_goes_on(
    places: Callable[[], Place], keyring: Keyring, sources: Sources, at: int
) -> None:
    place = places()
    bucket = place.open()
    publish(sources("demo 1.0"), bucket, keyring=keyring)
    killed = place.python(PUBLISHER, str(keyring.path), str(at), str(sources("demo 2.0")))
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    for view in ("online", "airgap"):
        assert seen(bucket, keyring, view) in ({"demo 1.0"}, {"demo 1.0", "demo 2.0"})
    publish(sources("demo 2.0"), bucket, keyring=keyring)
    assert seen(bucket, keyring, "online") == seen(bucket, keyring, "airgap") == {"demo 1.0", "demo 2.0"}


@pytest.mark.stores
def test_of_publishers_at_once_none_loses_a_release(
    places: Callable[[], Place], keyring: Keyring, sources: Sources
) -> None:
    place = places()
    if place.single_writer:
        pytest.skip("what is published there is published by one at a time")
    wanted = [
        [f"{library} {number}.{minor}" for minor in range(3)] for number, library in enumerate(["demo", "more"] * 2)
    ]
    started = [
        place.python(PUBLISHER, str(keyring.path), "0", *(str(sources(name)) for name in names)) for names in wanted
    ]
    for publisher in started:
        publisher.communicate()
    assert [publisher.returncode for publisher in started] == [0] * len(started)
    everything = {name for names in wanted for name in names}
    bucket = place.open()
    assert seen(bucket, keyring, "online") == seen(bucket, keyring, "airgap") == everything


@pytest.mark.stores
def test_retention_where_a_store_can_be_listed(places: Callable[[], Place], keyring: Keyring, sources: Sources) -> None:
    from datetime import timedelta

    from kartifacts.publish.commit import commit
    from kartifacts.publish.editing import retiring

    bucket = places().open()
    publish(sources("demo 1.0"), bucket, keyring=keyring)
    publish(sources("demo 2.0"), bucket, keyring=keyring)
    commit(bucket, keyring, retiring("demo", "1.0"))
    try:
        bucket.list("blobs")
    except Unlisted:
        with pytest.raises(Unlisted):
            retain(bucket, keyring)
        return
    late = datetime.now(timezone.utc) + timedelta(days=200)
    assert retain(bucket, keyring, now=late).waiting > 4
    assert len(retain(bucket, keyring, now=late + timedelta(days=31)).deleted) > 4
    assert seen(bucket, keyring, "online") == seen(bucket, keyring, "airgap") == {"demo 2.0"}
    publish(sources("demo 1.0"), bucket, keyring=keyring)
    assert seen(bucket, keyring, "online") == {"demo 1.0", "demo 2.0"}
