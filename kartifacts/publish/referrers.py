"""What is said about bundles: OCI manifests whose subject is a bundle, and the index of a release that lists them.

The index is the target ``<library>/<version>/provenance.json`` of signed metadata, and lies among the blobs too, so
that tools which know only OCI find what it lists.  Every object is read by its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kartifacts.errors import VerificationError
from kartifacts.model.digest import Digest, parse_digest, sha256, strict_json
from kartifacts.model.manifest import MAX_INDEX, MEDIA_INDEX, MEDIA_MANIFEST, NOTE, Descriptor, encode
from kartifacts.publish.repository import Blob

# The in-toto attestation specification names an envelope in a store so; SPDX is registered with IANA.
MEDIA_PROVENANCE = "application/vnd.in-toto.provenance+dsse"
MEDIA_SBOM = "application/spdx+json"
KINDS = {MEDIA_PROVENANCE: "provenance", MEDIA_SBOM: "SBOM"}
PROVENANCE_FORMAT = "provenance.v1"

MAX_SAID = 16 << 20  # bytes of an envelope or an SBOM
_EMPTY = b"{}"
_MEDIA_EMPTY = "application/vnd.oci.empty.v1+json"


class Referrer(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One document about one bundle (OCI image manifest with a subject)."""

    schema_version: int
    media_type: str
    artifact_type: str
    config: Descriptor
    layers: list[Descriptor]
    subject: Descriptor
    annotations: dict[str, str] = {}

    @property
    def document(self) -> Descriptor:
        return self.layers[0]


class Said(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """All that is said about the bundles of one release (OCI image index)."""

    schema_version: int
    media_type: str
    manifests: list[Descriptor]
    annotations: dict[str, str] = {}


class Made(NamedTuple):
    """A referrer that was made: its descriptor, and its blobs in the order in which they may appear."""

    descriptor: Descriptor
    blobs: tuple[tuple[Digest, bytes], ...]


Read = Callable[[Digest, int, str], bytes]
"""Digest, size and what it is → the content, once it was checked against both."""


def refer(subject: Descriptor, media_type: str, document: bytes, annotations: dict[str, str] | None = None) -> Made:
    """Make a referrer of a bundle out of what is said about it."""
    if len(document) > MAX_SAID:
        raise VerificationError(f"a {KINDS[media_type]} of {len(document)} bytes; at most {MAX_SAID} are read")
    referrer = encode(
        Referrer(
            schema_version=2,
            media_type=MEDIA_MANIFEST,
            artifact_type=media_type,
            config=_described(_MEDIA_EMPTY, _EMPTY),
            layers=[_described(media_type, document)],
            subject=Descriptor(media_type=subject.media_type, digest=subject.digest, size=subject.size),
            annotations=annotations or {},
        )
    )
    contents = (_EMPTY, document, referrer)
    return Made(_described(MEDIA_MANIFEST, referrer), tuple((sha256(content), content) for content in contents))


def index_of(library: str, version: str, made: Sequence[Made]) -> bytes:
    """The index of what is said about a release."""
    notes = {"format": PROVENANCE_FORMAT, "library": library, "version": version}
    return encode(
        Said(
            schema_version=2,
            media_type=MEDIA_INDEX,
            manifests=[each.descriptor for each in made],
            annotations={NOTE + name: text for name, text in notes.items()},
        )
    )


def _described(media_type: str, content: bytes) -> Descriptor:
    return Descriptor(media_type=media_type, digest=f"sha256:{sha256(content)}", size=len(content))


def read_said(data: bytes, library: str, version: str) -> list[Descriptor]:
    """The referrers that the index of a release lists; a `VerificationError` if it is not the index of that release."""
    what = f"provenance of {library} {version}"
    try:
        said = msgspec.convert(strict_json(data, what=what), type=Said)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"the {what} is malformed: {error}") from error
    told = tuple(said.annotations.get(NOTE + name) for name in ("format", "library", "version"))
    if (said.schema_version, said.media_type, *told) != (2, MEDIA_INDEX, PROVENANCE_FORMAT, library, version):
        raise VerificationError(f"the {what} is not that: it says {repr(told)[:300]}")
    for descriptor in said.manifests:
        _check(descriptor, MEDIA_MANIFEST, MAX_INDEX, what)
    return said.manifests


def read_referrer(data: bytes, what: str) -> Referrer:
    """A referrer of one document, after its digest was checked."""
    try:
        referrer = msgspec.convert(strict_json(data, what=what), type=Referrer)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    kind = referrer.artifact_type
    if (referrer.schema_version, referrer.media_type) != (2, MEDIA_MANIFEST) or kind not in KINDS:
        raise VerificationError(f"{what} is neither provenance nor an SBOM: {kind[:100]!r}")
    if len(referrer.layers) != 1 or referrer.config != _described(_MEDIA_EMPTY, _EMPTY):
        raise VerificationError(f"{what} is not of one document: it has {len(referrer.layers)} layers")
    _check(referrer.document, kind, MAX_SAID, what)
    _check(referrer.subject, MEDIA_MANIFEST, MAX_INDEX, what)
    return referrer


def _check(descriptor: Descriptor, media_type: str, limit: int, what: str) -> None:
    if descriptor.media_type != media_type:
        raise VerificationError(f"{what} names a {descriptor.media_type[:100]!r}, expected {media_type!r}")
    parse_digest(descriptor.digest, what=what)
    if not 0 < descriptor.size <= limit:
        raise VerificationError(f"{what} names a blob of {descriptor.size} bytes; at most {limit} are read")


def referrers(index: bytes, library: str, version: str, read: Read) -> Iterator[tuple[Descriptor, Referrer]]:
    """Every referrer that an index lists, read and checked."""
    for number, descriptor in enumerate(read_said(index, library, version)):
        what = f"referrer {number} of {library} {version}"
        yield descriptor, read_referrer(read(descriptor.sha256, descriptor.size, what), what)


def closure(index: bytes, library: str, version: str, read: Read) -> Iterator[Blob]:
    """Every blob that an index leads to, in the order in which they may appear in public, the index itself last."""
    name = f"{library} {version}"
    for descriptor, referrer in referrers(index, library, version, read):
        kind = KINDS[referrer.artifact_type]
        yield Blob(referrer.config.sha256, referrer.config.size, f"empty config of the {kind} of {name}")
        yield Blob(referrer.document.sha256, referrer.document.size, f"{kind} of {name}")
        yield Blob(descriptor.sha256, descriptor.size, f"manifest of the {kind} of {name}")
    yield Blob(sha256(index), len(index), f"provenance of {name}")
