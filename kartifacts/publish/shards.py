"""What one of several builders made: kernels as blobs, then one document that names them; written, found and verified.

shards/<promises>/<build>/<i>-of-<n>.json     a shard that is complete; the last run of it stands
promises/<promises>.json                      what it is a part of
kernels/<key>.json                            one kernel, as soon as it is made: a builder that was stopped goes on
blobs/sha256/<hex>                            its bytes

Whoever may write there decides what is released, so such a bucket is for builders alone.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kartifacts.errors import ConfigError, PublishConflict, SourceError, StoreError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest, canonical_json, parse_digest, sha256, strict_json
from kartifacts.model.layout import blob_path, check_name, check_path, suffix_of
from kartifacts.model.manifest import encode
from kartifacts.model.materials import Materials, Recipe, check_contents
from kartifacts.publish.buckets import MAX_SMALL, Bucket, update
from kartifacts.publish.plan import MAX_SHARDS
from kartifacts.publish.promises import MAX_PROMISES, Promises, decode_promises

log = logging.getLogger(__name__)

MAX_KERNEL = 1 << 30  # bytes, as many as a block may have
MAX_RECORD = 1 << 20  # bytes
_PLACE = re.compile(r"shards/([0-9a-f]{64})/([^/]+)/([1-9][0-9]{0,3})-of-([1-9][0-9]{0,3})\.json")

_T = TypeVar("_T")


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel that was made."""

    uri: str
    arch: str
    key: str
    op_digest: str
    sha256: str
    size: int
    suffix: str
    exports: list[str]
    needs: dict[str, str]
    toolchain: str  # kind
    maker: str  # digest of the environment that it was made in, see `Shard.maker`
    seconds: float = 0.0  # that its steps took, as far as it was measured
    memory: int = 0  # bytes that the hungriest of them took


class Compiler(msgspec.Struct, frozen=True, kw_only=True):
    """A toolchain as it was found."""

    facts: dict[str, str]  # all that can change its output
    programs: dict[str, str]  # name → sha256


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one build, complete."""

    version: int
    library: str
    promises: str  # sha256 of what it is a part of
    plan: str  # digest of the plan
    costs: str  # sha256 of the costs by which the work was shared out
    build: str
    number: int  # from 1
    of: int
    machine: str
    toolchains: dict[str, Compiler]  # of the whole build, by kind
    recipe: Recipe | None
    overrides: dict[str, str]  # settings that change how compilers are called
    kernels: list[Made]
    materials: list[Materials]

    @property
    def name(self) -> str:
        return f"shard {self.number}/{self.of} of build {self.build!r}"

    def maker(self, toolchain: str) -> Digest:
        """Stands for all that kernels of a toolchain were made with: where it differs, one key may give other bytes."""
        said = (self.machine, self.toolchains.get(toolchain), self.recipe)
        return sha256(canonical_json([msgspec.to_builtins(value) for value in said]))


class Place(NamedTuple):
    """Where a shard lies: what its path says."""

    promises: str
    build: str
    number: int
    of: int

    @property
    def path(self) -> str:
        return f"shards/{self.promises}/{check_name(self.build, 'build')}/{self.number}-of-{self.of}.json"


def place_of(shard: Shard) -> Place:
    return Place(shard.promises, shard.build, shard.number, shard.of)


# -- writing -----------------------------------------------------------------------------------------------------------


def offer(bucket: Bucket, made: Made, path: Path) -> Made:
    """Let other builders have a kernel; gives what stands for its key.

    That may be what another one made first in the same environment.  What was made in another one is replaced: whoever
    has handed that in says in the shard's document what it was.
    """
    _put(bucket, made, path)
    with suppress(PublishConflict):  # another one's record, which says when it was measured
        bucket.put_if_absent(_record(made.key), encode(made))
        return made
    there: Made | None = None
    with suppress(VerificationError):  # a record that is damaged is replaced
        there = find(bucket, made.key)
    if there is not None and there.maker == made.maker and (there == made or _is_whole(bucket, there)):
        return there
    update(bucket, _record(made.key), lambda _: encode(made))
    return made


def _put(bucket: Bucket, made: Made, path: Path) -> None:
    """Let a kernel lie under its digest; bytes there that are not those of their name are damage, and replaced."""
    place = blob_path(parse_digest(made.sha256))
    try:
        bucket.put_if_absent(place, path)
    except PublishConflict:
        if bucket.digest(place)[0] == made.sha256:
            raise
        log.warning("%s in %s was damaged, and is replaced", place, bucket.name)
        bucket.delete(place)
        bucket.put_if_absent(place, path)


def _is_whole(bucket: Bucket, made: Made) -> bool:
    """Whether the bytes are there that a record names."""
    try:
        return bucket.digest(blob_path(parse_digest(made.sha256))) == (made.sha256, made.size)
    except SourceError as error:
        if error.denied or not error.permanent:
            raise
        return False


def hand_in(bucket: Bucket, shard: Shard, promises: Promises) -> None:
    """Say that a shard is complete; all of its kernels are there.  The last run of it stands."""
    bucket.put_if_absent(_promises(promises.digest), promises.encoded)
    said = encode(shard)
    others: list[bytes] = []

    def change(before: bytes | None) -> bytes:
        others[:] = [before] if before not in (None, said) else []
        return said

    update(bucket, place_of(shard).path, change)
    if others:
        log.warning("%s had been handed in otherwise at %s; this run stands now", shard.name, bucket.name)


def _record(key: str) -> str:
    return f"kernels/{parse_digest(key)}.json"


def _promises(digest: str) -> str:
    return f"promises/{parse_digest(digest)}.json"


# -- reading -----------------------------------------------------------------------------------------------------------


def find(bucket: Bucket, key: str) -> Made | None:
    """What a builder made under a key; None if nobody did.

    Raises:
        VerificationError: the record is not what it should be.
    """
    path = _record(key)
    data = _read(bucket, path, MAX_RECORD)
    if data is None:
        return None
    made = _decoded(data, Made, f"{path} in {bucket.name}")
    _check_made(made, f"{path} in {bucket.name}")
    if made.key != key:
        raise VerificationError(f"{path} in {bucket.name} is of the key {made.key}", expected=key, actual=made.key)
    return made


def bring(bucket: Bucket, made: Made, target: Path) -> None:
    """Write the bytes of a kernel to `target`, once they were checked.

    Raises:
        VerificationError: they are not those that were handed in, or are not there any more.
        SourceError: they cannot be read.
        StoreError: `target` cannot be written.
    """
    path = blob_path(parse_digest(made.sha256))
    try:
        data = bucket.get(path, made.size)
        actual = f"sha256 {sha256(data)}, {len(data)} bytes"
    except SourceError as error:
        if error.denied or not error.permanent:
            raise
        data, actual = b"", "nothing" if error.missing else error.message
    if len(data) != made.size or sha256(data) != made.sha256:
        if actual != "nothing" and bucket.digest(path)[0] == made.sha256:
            raise VerificationError(
                f"{made.uri} for {made.arch} in {bucket.name} is whole, and what was handed in says that it has "
                f"{made.size} bytes",
                source=f"{bucket.name} {path}",
                hint="run the shard again, which says it anew",
            )
        raise VerificationError(
            f"{made.uri} for {made.arch} in {bucket.name} is {'missing' if actual == 'nothing' else 'damaged'}: {path}",
            source=f"{bucket.name} {path}",
            expected=f"sha256 {made.sha256}, {made.size} bytes",
            actual=actual,
            hint=f"remove it and {_record(made.key)}, and run the shard again",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as error:
        raise StoreError(f"cannot write {str(target)!r}: {error.strerror or error}") from error


def places(bucket: Bucket, promises: str = "") -> list[Place]:
    """The shards that a bucket holds, of one set of promises if it is named; `Unlisted` if it cannot say."""
    matches = (_PLACE.fullmatch(entry.path) for entry in bucket.list(f"shards/{promises}".rstrip("/")))
    found = (Place(match[1], match[2], int(match[3]), int(match[4])) for match in matches if match)
    return sorted(place for place in found if place.number <= place.of <= MAX_SHARDS)


def read_shard(bucket: Bucket, place: Place) -> Shard | None:
    """A shard, once it was checked that it is what its path says; None if there is none.

    Raises:
        VerificationError: it is malformed, or another one.
    """
    what = f"{place.path} in {bucket.name}"
    data = _read(bucket, place.path, MAX_SMALL)
    if data is None:
        return None
    shard = _decoded(data, Shard, what)
    if shard.version != 1:
        raise VerificationError(f"version of {what}: expected 1, got {shard.version}", expected="1")
    if place_of(shard) != place:
        raise VerificationError(f"{what} says that it is {shard.name[:200]}, promises {shard.promises[:100]!r}")
    for digest in (shard.plan, shard.costs):
        parse_digest(digest, what=what)
    for made in shard.kernels:
        _check_made(made, what)
    for materials in shard.materials:
        check_contents(materials, what)
    return shard


def read_all_promises(bucket: Bucket, digest: str) -> Promises:
    """What shards are parts of, by the digest that they name."""
    path = _promises(digest)
    data = _read(bucket, path, MAX_PROMISES)
    if data is None:
        raise VerificationError(f"{bucket.name} lacks {path}, which its shards are parts of")
    if sha256(data) != digest:
        raise VerificationError(f"{path} in {bucket.name} is damaged", expected=digest, actual=sha256(data))
    return decode_promises(data, what=f"{path} in {bucket.name}")


def _read(bucket: Bucket, path: str, limit: int) -> bytes | None:
    try:
        return bucket.get(path, limit)
    except SourceError as error:
        if error.missing:
            return None
        raise


def _decoded(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.convert(strict_json(data, what=what), type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error


def _check_made(made: Made, what: str) -> None:
    check_path(made.uri.partition("?")[0], what=f"a uri in {what}")
    for digest in (made.key, made.op_digest, made.sha256, made.maker):
        parse_digest(digest, what=what)
    if not 0 < made.size <= MAX_KERNEL or suffix_of(f"_{made.suffix}") != made.suffix:
        raise VerificationError(f"{what} has {made.size} bytes of {made.suffix[:50]!r} for {made.uri}")
    try:
        parse_arch(made.arch)
    except ConfigError as error:
        raise VerificationError(f"{what} is malformed: {error.message}") from error
