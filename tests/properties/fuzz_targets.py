"""Everything that reads what others wrote, as functions of bytes: what they raise is of our kinds, or a finding.

Used by the tests with hypothesis and, for longer, by ci/fuzz with atheris.  Half of the input is read as a document;
the other half is a list of choices, by which a document that is right gets changed in a few places.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from securesystemslib.exceptions import FormatError
from securesystemslib.formats import encode_canonical
from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, StoreError, VerificationError
from kartifacts.mirror.archive import open_archive
from kartifacts.mirror.carry import export, listing, read_listing
from kartifacts.mirror.filters import Filter, decode_filter, encode_filter
from kartifacts.mirror.pull import Trust
from kartifacts.model import frames
from kartifacts.model.digest import Digest, parse_digest, sha256, strict_json
from kartifacts.model.manifest import (
    Lock,
    Pin,
    decode_bundle,
    decode_listing,
    decode_lock,
    decode_release,
    decode_table,
    encode,
)
from kartifacts.model.materials import decode_materials
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.leases import TOMBSTONES, tombstones
from kartifacts.publish.oci_index import reconciled
from kartifacts.publish.provenance import opened
from kartifacts.publish.referrers import PROVENANCE, read_referrer, referrers
from kartifacts.publish.repository import Repository
from kartifacts.sources.directory import DirectorySource
from kartifacts.trust import signed, signing
from kartifacts.trust.client import refresh, refresh_expired, view_of
from kartifacts.trust.keygrants import grants_of, signed_by
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.keysigner import read_public
from tests.properties.small import Small, make

# Of a reader of files a SourceError or a StoreError is an answer too; `DECODERS` are given the bytes.
DECODING = (VerificationError, ConfigError)
READING = (*DECODING, SourceError, StoreError)


class Target(NamedTuple):
    seeds: tuple[bytes, ...]  # documents that are right
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = DECODING


def run(target: Target, data: bytes) -> None:
    """Read what `data` comes to; whatever is raised by this is a finding."""
    with suppress(*target.refusals):
        target.read(document(target.seeds, data))


# -- from bytes to documents -------------------------------------------------------------------------------------------


def document(seeds: tuple[bytes, ...], data: bytes) -> bytes:
    choices = Choices(data)
    how = choices.below(4)
    if how == 0:
        return data[1:]
    seed = seeds[choices.below(len(seeds))]
    if how == 1:
        return torn(seed, choices)
    try:
        value = json.loads(seed)
    except ValueError:  # it is no JSON
        return torn(seed, choices)
    return changed(value, choices)


class Choices:
    """A list of numbers made of bytes; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def below(self, limit: int) -> int:
        width = 1 if limit <= 256 else 3
        number = int.from_bytes(self._data[self._at : self._at + width], "big")
        self._at += width
        return number % limit


def torn(content: bytes, choices: Choices) -> bytes:
    """Some bytes replaced, taken out, put in, or the end cut off."""
    made = bytearray(content)
    while choices.left and made:
        what, at = choices.below(5), choices.below(len(made))
        if what == 0:
            made[at] = choices.below(256)
        elif what == 1:
            del made[at : at + 1 + choices.below(64)]
        elif what == 2:
            made[at:at] = bytes([choices.below(256)]) * (1 + choices.below(8))
        elif what == 3:
            other = choices.below(len(made))
            made[at:at] = made[other : other + choices.below(256)]
        else:
            del made[at:]
    return bytes(made)


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400,
    "", "x", ".", "..", "../x", "/x", "a/b/c", "a\0b", "\x1b[31m", "\ud800", "é", "e\u0301", "‮", "x" * 70_000,
    "sha256", "sha512", "sha256:" + "0" * 64, "0" * 64, "A" * 64, "-1", "1e9", "٣", "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00Z", "2026-13-01T00:00:00Z", "2026-01-01T00:00:00+99:99", "root", "targets", "timestamp",
    [], {}, [None], {"": None}, [[[]]], {"a": {"b": {}}}, ["x"] * 1000, {"__proto__": 1}, {"custom": []},
)  # fmt: skip


def changed(value: Any, choices: Choices) -> bytes:
    """Some values replaced by odd ones, taken out, doubled or exchanged; and, once written, perhaps torn."""
    for _ in range(1 + choices.below(3)):
        places = list(containers(value))
        if not places:
            break
        parent = places[choices.below(len(places))]
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if not keys:
            continue
        key, what = keys[choices.below(len(keys))], choices.below(6)
        if what <= 2:
            parent[key] = deepcopy(ODD[choices.below(len(ODD))])
        elif what == 3:
            del parent[key]
        elif what == 4 and isinstance(parent, list):
            parent.append(deepcopy(parent[key]))
        elif what == 4 and isinstance(parent, dict):
            name = ODD[choices.below(len(ODD))]
            parent[name if isinstance(name, str) else f"{key}x"] = deepcopy(parent[key])
        else:
            other = places[choices.below(len(places))]
            parent[key] = deepcopy(other)
    written = json.dumps(value, separators=(",", ":"), ensure_ascii=bool(choices.below(2))).encode(
        errors="surrogatepass"
    )
    how = choices.below(8)
    if how == 0:
        return torn(written, choices)
    if how == 1:  # the first key stands twice
        return written.replace(b"{", b'{"version":7,', 1)
    return written


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for child in list(value.values() if isinstance(value, dict) else value):
            yield from containers(child)


# -- what reads --------------------------------------------------------------------------------------------------------


@cache
def scratch() -> Path:
    """One directory for the files of all targets."""
    return Path(tempfile.mkdtemp(prefix="kartifacts-fuzz-"))


def remove_scratch() -> None:
    shutil.rmtree(scratch(), ignore_errors=True)


@cache
def small() -> Small:
    return make(scratch() / "small")


def file_of(data: bytes, name: str) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


def read_metadata(data: bytes) -> None:
    """Each way to read a file of metadata; one that refuses it does not spare the others."""
    readers: tuple[Callable[[bytes], object], ...] = (
        *(lambda data, kind=kind: signed.parse(data, kind, "it") for kind in (Root, Targets, Snapshot, Timestamp)),
        view_of,
        grants_of,
        signed_by,
        lambda data: signing.check_signed(data, "targets", data, "it"),
    )
    for read in readers:
        with suppress(*DECODING):
            read(data)


def read_keyring(data: bytes) -> None:
    place = scratch() / "keyring"
    if not place.exists():
        shutil.copytree(small().keyring.path, place)
    (place / "keys.json").write_bytes(data)
    keyring = Keyring.load(place)
    for role in ("root", "targets", "snapshot", "timestamp", "demo"):
        keyring.exchange(role)
        keyring.signers(role)


def read_archive(data: bytes) -> None:
    archive = open_archive(file_of(data, "archive.tar"))
    for name, size in list(archive.members.items())[:20]:
        archive.source.document(name, min(size, 1 << 20))


def read_client(name: str, data: bytes) -> None:
    """A repository one file of which says something else, signed by nobody, as a reader meets it."""
    _ask({name: data})


def read_stolen(name: str, data: bytes) -> None:
    """The same after who holds the keys has signed it and all that has to list it: what a stolen key can say."""
    try:
        value = json.loads(data)["signed"]
        files = _resigned(name, value)
    except (ValueError, KeyError, TypeError, RecursionError, FormatError) as error:
        raise VerificationError("nothing that could be signed") from error
    _ask(files)


def _ask(files: Mapping[str, bytes]) -> None:
    def read(path: str, limit: int) -> bytes:
        if path in files:
            if len(files[path]) > limit:
                raise SourceError("too large", permanent=True)
            return files[path]
        return DirectoryBucket(small().path).get(path, limit)

    root = small().keyring.root("online")
    with suppress(*READING):
        refresh(root, None, read)
    refresh_expired(root, None, read, until=datetime.now(timezone.utc).date(), reason="to see what it says")


def _resigned(name: str, value: Any) -> dict[str, bytes]:
    """What a file says, signed; and the snapshot and timestamp that list it, unless it is one of these or a root."""
    files = {name: _sealed(name, value)}
    for pointer, listed in (("metadata/2.snapshot.json", ROLES), ("metadata/timestamp.json", (SNAPSHOT,))):
        content = json.loads((small().path / pointer).read_bytes())["signed"]
        for path in set(listed) & set(files):
            meta = content["meta"][path.rpartition("/")[2].partition(".")[2]]
            meta["hashes"], meta["length"] = {"sha256": sha256(files[path])}, len(files[path])
            files[pointer] = _sealed(pointer, content)
    return files


SNAPSHOT = "metadata/2.snapshot.json"
ROLES = ("metadata/1.targets.json", "metadata/2.demo.json")
METADATA = ("metadata/2.root.json", *ROLES, SNAPSHOT, "metadata/timestamp.json")


def _sealed(name: str, value: Any) -> bytes:
    signers = small().keyring.signers(name.split(".")[-2].rpartition("/")[2])
    content = (encode_canonical(value) or "").encode()
    signatures = [signer.sign(content).to_dict() for signer in signers]
    return json.dumps({"signatures": signatures, "signed": value}, separators=(",", ":")).encode()


def read_said_of(data: bytes) -> None:
    """What is said of a release, from its index to the last document."""
    found = Repository(small().path)

    def content(digest: Digest, size: int, what: str) -> bytes:
        return found.read(digest, size, what)

    with suppress(*DECODING):
        read_referrer(PROVENANCE, data, "it")
    list(referrers(PROVENANCE, data, "demo", "1.1", content))


def read_index(data: bytes) -> None:
    reconciled(data, {}, "it")
    reconciled(reconciled(data, {"demo": [pin()]}, "it"), {"demo": []}, "it")


def read_names(data: bytes) -> None:
    """The pins that a directory lists, by metadata that nobody verifies there."""
    place = scratch() / "names"
    if not place.exists():
        shutil.copytree(small().path, place)
    for name in METADATA[1:]:
        before = (place / name).read_bytes()
        (place / name).unlink()
        (place / name).write_bytes(data)
        try:
            with suppress(*READING):
                Repository(place).pins()
        finally:
            (place / name).write_bytes(before)


COLLECTED = b'{"deleting":"2026-01-01T00:00:00+00:00","since":{"blobs/sha256/%s":"2026-01-01T00:00:00+00:00"}}' % (
    b"0" * 64
)


def read_tombstones(data: bytes) -> None:
    place = scratch() / "collected"
    (place / TOMBSTONES).parent.mkdir(parents=True, exist_ok=True)
    (place / TOMBSTONES).write_bytes(data)
    tombstones(DirectoryBucket(place))


# -- all of them -------------------------------------------------------------------------------------------------------


def pin() -> Pin:
    return next(pin for pin in Repository(small().path).pins() if pin.version == "1.1")


@cache
def targets() -> Mapping[str, Target]:
    """Name → target; the documents that are right come from a repository that is made for it."""
    repository, path = Repository(small().path), small().path
    descriptor = repository.release(pin()).manifests[0]
    bundle, manifest = repository.bundle(descriptor), repository.blob(descriptor.sha256).read_bytes()
    packed = repository.blob(bundle.config.sha256).read_bytes()
    table = frames.decompress(packed, frames.table_size(bundle.config, "it"), what="it")
    metadata = {name: (path / name).read_bytes() for name in METADATA}
    index = repository.provenance(pin()).popitem()[1]
    said = [
        (repository.read(each.sha256, each.size, "it"), referrer)
        for each, referrer in referrers(PROVENANCE, index, "demo", "1.1", repository.read)
    ]
    envelope, _, materials = (repository.read(each.digest, each.size, "it") for each in said[0][1].layers)
    keys = [key for grant in small().keyring.libraries().values() for key in grant.keys]
    lock = encode(Lock(version=1, releases=[pin()], synced=[*small().seen.values()]))
    releases = (repository.blob(parse_digest(pin().sha256)).read_bytes(),)
    found = {
        "strict_json": Target((manifest, table), lambda data: strict_json(data, what="it")),
        "release": Target(releases, decode_release),
        "bundle": Target((manifest,), decode_bundle),
        "table": Target((table,), lambda data: decode_table(data, bundle)),
        "frame": Target((packed,), lambda data: frames.decompress(data, len(table), what="it")),
        "listing": Target((table,), decode_listing),
        "lock": Target((lock,), decode_lock),
        "materials": Target((materials,), decode_materials),
        "metadata": Target(tuple(metadata.values()), read_metadata),
        "keys": Target(((small().keyring.path / "keys.json").read_bytes(),), read_keyring, READING),
        "public-key": Target(_public_keys(), lambda data: read_public(str(file_of(data, "key")))),
        "tombstones": Target((COLLECTED,), read_tombstones),
        "archive": Target((_archive(),), read_archive, READING),
        "mirror-listing": Target(
            (listing(DirectoryBucket(path)).encode(),), lambda data: read_listing(file_of(data, "l"))
        ),
        "mirror": Target(
            (encode_filter(Filter(libraries=("demo",), archs=("9.0a",))),), lambda data: decode_filter(data, what="it")
        ),
        "envelope": Target((envelope,), lambda data: opened(data, keys, 1, what="it")),
        "said": Target((index, *(data for data, _ in said)), read_said_of),
        "oci-index": Target(((path / "index.json").read_bytes(),), read_index),
        "names": Target(tuple(metadata.values()), read_names, READING),
    }
    for name, content in metadata.items():
        short = name.split(".")[-2].rpartition("/")[2]
        found[f"client-{short}"] = Target((content,), partial(read_client, name), READING)
        found[f"stolen-{short}"] = Target((content,), partial(read_stolen, name), READING)
    return found


def _public_keys() -> tuple[bytes, ...]:
    """One key as TUF writes it, and as openssl does."""
    key = small().keyring.grant("demo").keys[0]
    pem = (small().keyring.path / small().keyring.listed.keys[key.keyid].uri.removeprefix("file2:")).read_bytes()
    written = load_pem_private_key(pem, None).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return json.dumps({"keyid": key.keyid, **key.to_dict()}).encode(), written


def _archive() -> bytes:
    target = scratch() / "exported.tar"
    settings = Settings(store=scratch() / "store", workspace=scratch() / "workspace", download_threads=1, retries=0)
    trust = Trust((small().keyring.root("online"),))
    export(DirectorySource(small().path, mirror=True), target, trust, Filter(), settings)
    return target.read_bytes()
