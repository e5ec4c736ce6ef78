"""What is published: release index → bundle manifest → kernel table → blocks inside packs.

A *release* is an OCI image index, a *bundle* an OCI image manifest whose config is the kernel table (zstd JSON) and
whose layers are packs.  A *pack* is a row of zstd frames; each frame is one *block*: the kernels of a run of names,
solid.  So a whole bundle is a few large GETs, and one kernel is one Range GET of its block.

Everything here is parsed only after its digest was checked against the object that named it, and is bounded: sizes
before reading, counts and offsets while parsing.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import Digest, are_digests, canonical_json, parse_digest, strict_json
from kartifacts.model.layout import are_paths, check_name, check_path, suffix_of

MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MEDIA_TABLE = "application/vnd.kartifacts.table.v1+json+zstd"
MEDIA_PACK = "application/vnd.kartifacts.pack.v1+zstd"
ARTIFACT_BUNDLE = "application/vnd.kartifacts.bundle.v1"

NOTE = "dev.kartifacts."  # annotations: library, version, family, arch, abi, toolchain, raw-size
# In an annotation, since tools older than OCI 1.1 drop an artifactType from an index, and with it its digest.
RELEASE_FORMAT = "release.v1"

MAX_INDEX = 4 << 20  # bytes of a release index or a bundle manifest
MAX_TABLE = 64 << 20  # bytes of a kernel table, compressed
MAX_TABLE_RAW = 256 << 20  # bytes of a kernel table, decompressed
MAX_PACK = 2 << 30  # bytes of one pack
MAX_BLOCK_RAW = 1 << 30  # bytes of one block, decompressed
MAX_DELTA_BASE = 32 << 20  # bytes of a kernel that another is described by
_MAX_VALUES = 4 << 20  # in one table, since a value of one byte costs a hundred in memory

_MAX_AXES = 1024
_AT_ONCE = 1024  # kernels looked at together
_AXES = re.compile(r"[A-Za-z0-9_.+-]+=[A-Za-z0-9_.+-]+(&[A-Za-z0-9_.+-]+=[A-Za-z0-9_.+-]+)*")


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Points at a blob: media type, digest (``sha256:<hex>``), size in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}

    @property
    def sha256(self) -> Digest:
        return parse_digest(self.digest)

    def note(self, name: str) -> str:
        return self.annotations.get(NOTE + name, "")


class Release(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A named index of bundles (OCI image index)."""

    schema_version: int
    media_type: str
    manifests: list[Descriptor]
    annotations: dict[str, str] = {}

    @property
    def library(self) -> str:
        return self.annotations.get(NOTE + "library", "")

    @property
    def version(self) -> str:
        return self.annotations.get(NOTE + "version", "")


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The kernels of one family for one arch and ABI (OCI image manifest)."""

    schema_version: int
    media_type: str
    artifact_type: str
    config: Descriptor
    layers: list[Descriptor]
    annotations: dict[str, str] = {}


class Block(msgspec.Struct, frozen=True, array_like=True):
    """One zstd frame: `length` bytes at `offset` of layer number `pack`, `size` bytes when decompressed."""

    pack: int
    offset: int
    length: int
    size: int
    sha256: str  # of the compressed bytes: checked before they reach the decompressor


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A way to one kernel for who has an older one: a zstd frame whose dictionary is that kernel's content."""

    pack: int
    offset: int
    length: int
    sha256: str  # of the compressed bytes
    base: str  # sha256 of the older kernel
    base_size: int
    base_suffix: str = ""


class KernelEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One published binary: `size` bytes at `offset` of the decompressed block number `block`."""

    uri: str  # norm/rmsnorm?dtype=bfloat16, or the path of an imported file
    sha256: str
    size: int
    block: int
    offset: int
    suffix: str = ""
    key: str = ""  # sha256 of all that can change the bytes; empty for imported files
    op_digest: str = ""  # sha256 of what the op is, without arch and toolchain; see model.spec
    exports: list[str] = []
    needs: dict[str, str] = {}  # glibc, glibcxx, cxxabi, cudart, driver, tvm_ffi: lowest version that will do
    delta: Delta | None = None

    @property
    def digest(self) -> Digest:
        return Digest(self.sha256)  # of a table that was read, so looked at


class Listed(msgspec.Struct, frozen=True, gc=False):
    """Of an entry, what tells whether its kernel is here."""

    sha256: str
    size: int
    suffix: str = ""


class _Listing(msgspec.Struct):
    kernels: list[Listed]


class Table(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The config of a bundle: every kernel and where it lies."""

    version: int
    library: str
    family: str
    arch: str  # canonical arch, or "any" for files that are not tied to one
    abi: str  # "tvm-ffi-0.1", or "none" for imported files
    blocks: list[Block]
    kernels: list[KernelEntry]
    toolchain: dict[str, str] = {}


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A release pinned by digest: one line of kartifacts.lock."""

    library: str
    version: str
    sha256: str
    size: int


class Synced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What signed metadata a lock was last made from: the lowest versions that a later `sync` accepts."""

    repository: str  # sha256 of the root that trust began with
    view: str
    root: int  # versions of the roles
    timestamp: int
    snapshot: int
    targets: int
    libraries: dict[str, int]
    expires: str  # of what expires first, ISO 8601 in UTC
    at: str  # when, by this machine's clock
    source: str = ""  # where it came from, without credentials
    accepted_expired_until: str = ""  # an operator's exception, and why
    reason: str = ""


class Lock(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of kartifacts.lock: the only releases whose bytes may be used."""

    version: int
    releases: list[Pin]
    synced: list[Synced] = []  # at most one of a repository


_T = TypeVar("_T")


def encode(value: msgspec.Struct) -> bytes:
    """Canonical JSON: equal values give equal bytes, so equal digests."""
    return canonical_json(msgspec.to_builtins(value))


def _decode(data: bytes, kind: type[_T], what: str) -> _T:
    value: Any = strict_json(data, what=what)
    try:
        return msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error


def _expect(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise VerificationError(
            f"{what}: expected {expected!r}, got {repr(actual)[:100]}",
            expected=str(expected),
            actual=str(actual)[:100],
        )


def decode_release(data: bytes, *, what: str = "release index") -> Release:
    release = _decode(data, Release, what)
    _expect(release.schema_version, 2, f"schemaVersion of {what}")
    _expect(release.media_type, MEDIA_INDEX, f"mediaType of {what}")
    _expect(release.annotations.get(NOTE + "format"), RELEASE_FORMAT, f"format of {what}")
    for descriptor in release.manifests:
        _check_descriptor(descriptor, MEDIA_MANIFEST, MAX_INDEX, what)
    return release


def decode_bundle(data: bytes, *, what: str = "bundle manifest") -> BundleManifest:
    bundle = _decode(data, BundleManifest, what)
    _expect(bundle.schema_version, 2, f"schemaVersion of {what}")
    _expect(bundle.media_type, MEDIA_MANIFEST, f"mediaType of {what}")
    _expect(bundle.artifact_type, ARTIFACT_BUNDLE, f"artifactType of {what}")
    _check_descriptor(bundle.config, MEDIA_TABLE, MAX_TABLE, what)
    for layer in bundle.layers:
        _check_descriptor(layer, MEDIA_PACK, MAX_PACK, what)
    return bundle


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage, which there is none of while ten thousands of values are made and kept."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def decode_table(data: bytes, bundle: BundleManifest, *, what: str = "kernel table") -> Table:
    """Parse a decompressed kernel table and check every offset against the packs of `bundle`."""
    table = _read_table(data, what)
    _expect(table.version, 1, f"version of {what}")
    _check_name(table.library, "library", what)
    _check_name(table.family, "family", what)
    for block in table.blocks:
        if not 0 <= block.size <= MAX_BLOCK_RAW:
            raise VerificationError(f"{what} has a block of {block.size} bytes")
        _check_place(block, bundle, what)
    _check_identities(table.kernels, what)
    sizes = [block.size for block in table.blocks]
    for kernel in table.kernels:
        if not 0 <= kernel.block < len(sizes):
            raise VerificationError(f"{what} puts {kernel.uri[:150]!r} into a block that is not there")
        if not (0 <= kernel.offset and 0 <= kernel.size and kernel.offset + kernel.size <= sizes[kernel.block]):
            raise VerificationError(f"{what} puts {kernel.uri[:150]!r} outside its block")
        if kernel.delta is not None:
            _check_delta(kernel.delta, bundle, what)
    return table


def decode_listing(data: bytes, *, what: str = "kernel table") -> list[Listed]:
    """What a table lists, in a quarter of the time of `decode_table`: to count by, since nothing of it was checked."""
    try:
        return msgspec.json.decode(data, type=_Listing).kernels
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error


def _read_table(data: bytes, what: str) -> Table:
    """Parse quickly what this version wrote itself, and with all care what another did.

    What is equal to its own canonical encoding holds no key twice and none that is unknown, so the typed reader, which
    looks for neither, is enough: a tenth of the time, which counts at 100,000 kernels.
    """
    if data.count(b",") > _MAX_VALUES:
        raise VerificationError(f"{what} has more than {_MAX_VALUES} values")
    try:
        table = msgspec.json.decode(data, type=Table)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode(data, Table, what)
    return table if _is_canonical(data, table) else _decode(data, Table, what)


def _is_canonical(data: bytes, table: Table) -> bool:
    """Whether `data` is what `encode` makes of `table`, without making all of it at once."""
    encoder = msgspec.json.Encoder(order="sorted")
    at = 0
    for piece in _written(encoder, table):
        if not data.startswith(piece, at):
            return False
        at += len(piece)
    return at == len(data)


def _written(encoder: msgspec.json.Encoder, table: Table) -> Iterator[bytes]:
    hollow = encoder.encode(msgspec.structs.replace(table, kernels=[]))
    before, after = hollow.split(b'"kernels":[]', 1)
    yield before + b'"kernels":['
    for start in range(0, len(table.kernels), _AT_ONCE):
        yield (b"," if start else b"") + encoder.encode(table.kernels[start : start + _AT_ONCE])[1:-1]
    yield b"]" + after


def _check_place(place: Block | Delta, bundle: BundleManifest, what: str) -> None:
    parse_digest(place.sha256, what=what)
    if not 0 <= place.pack < len(bundle.layers):
        raise VerificationError(f"{what} names pack {place.pack} of {len(bundle.layers)}")
    if not (0 <= place.offset and 0 < place.length and place.offset + place.length <= bundle.layers[place.pack].size):
        raise VerificationError(f"{what} has a block outside its pack: {place}")


def _check_delta(delta: Delta, bundle: BundleManifest, what: str) -> None:
    _check_place(delta, bundle, what)
    parse_digest(delta.base, what=what)
    if not 0 < delta.base_size <= MAX_DELTA_BASE or suffix_of(f"_{delta.base_suffix}") != delta.base_suffix:
        raise VerificationError(f"{what} has a delta to something that is no kernel: {delta}")


def _check_identities(kernels: list[KernelEntry], what: str) -> None:
    """The parts of entries that end up in messages and in names of files."""
    for start in range(0, len(kernels), _AT_ONCE):
        rows = kernels[start : start + _AT_ONCE]
        digests = [row.sha256 for row in rows]
        digests += [digest for row in rows for digest in (row.key, row.op_digest) if digest]
        if not are_digests(digests):
            wrong = next(digest for digest in digests if not are_digests([digest]))
            raise VerificationError(f"{what} has something that is no digest: {wrong[:100]!r}")
        named = [row.uri.partition("?") for row in rows]
        if not are_paths([path for path, _, _ in named]):
            for path, _, _ in named:
                check_path(path, what=f"a uri in {what}")
        sets = [axes for _, question, axes in named if question]
        if sets and not (max(map(len, sets)) <= _MAX_AXES and _AXES.fullmatch("&".join(sets))):
            wrong = next((axes for axes in sets if len(axes) > _MAX_AXES or not _AXES.fullmatch(axes)), sets[0])
            raise VerificationError(f"{what} has a uri with malformed axes: {wrong[:150]!r}")
        for suffix in {row.suffix for row in rows}:
            if suffix_of(f"_{suffix}") != suffix:
                raise VerificationError(f"{what} gives a kernel a suffix that is none: {suffix[:50]!r}")
    if len({kernel.uri for kernel in kernels}) != len(kernels):
        (twice, _), *_ = Counter(kernel.uri for kernel in kernels).most_common(1)
        raise VerificationError(f"{what} lists {twice[:150]!r} twice")


def decode_lock(data: bytes, *, what: str = "kartifacts.lock") -> Lock:
    lock = _decode(data, Lock, what)
    _expect(lock.version, 1, f"version of {what}")
    seen: set[tuple[str, str]] = set()
    for pin in lock.releases:
        _check_name(pin.library, "library", what)
        _check_name(pin.version, "version", what)
        if (pin.library, pin.version) in seen:
            raise VerificationError(f"{what} pins {pin.library} {pin.version} twice")
        seen.add((pin.library, pin.version))
        parse_digest(pin.sha256, what=what)
        if not 0 < pin.size <= MAX_INDEX:
            raise VerificationError(f"{what} pins a release index of {pin.size} bytes; at most {MAX_INDEX} are read")
    return lock


def _check_name(text: str, kind: str, what: str) -> None:
    try:
        check_name(text, kind)
    except ConfigError as error:
        raise VerificationError(f"{what} is malformed: {error.message}") from error


def _check_descriptor(descriptor: Descriptor, media_type: str, limit: int, what: str) -> None:
    _expect(descriptor.media_type, media_type, f"mediaType in {what}")
    parse_digest(descriptor.digest, what=what)
    if not 0 <= descriptor.size <= limit:
        raise VerificationError(f"{what} points at a blob of {descriptor.size} bytes; at most {limit} are read")
