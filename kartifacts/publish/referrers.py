"""What is said about bundles: OCI manifests whose subject is a bundle, and the index of a release that lists them.

Where bundles are built, materials are said about each, and nobody has signed that yet.  Where they are published, it is
provenance: the index is the target ``<library>/<version>/provenance.json`` of signed metadata.  Either index lies among
the blobs too, so that tools which know only OCI find what it lists.  Every object is read by its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import Digest, parse_digest, sha256, strict_json
from kartifacts.model.manifest import MAX_INDEX, MEDIA_INDEX, MEDIA_MANIFEST, NOTE, Descriptor, Pin, encode
from kartifacts.model.materials import MAX_MATERIALS, MEDIA_MATERIALS
from kartifacts.publish.repository import Blob, bundle_name

# The in-toto attestation specification names an envelope in a store so; SPDX is registered with IANA.
MEDIA_PROVENANCE = "application/vnd.in-toto.provenance+dsse"
MEDIA_SBOM = "application/spdx+json"

MAX_SAID = 16 << 20  # bytes of an envelope or an SBOM
_EMPTY = b"{}"
_MEDIA_EMPTY = "application/vnd.oci.empty.v1+json"


class Layer(NamedTuple):
    """One of the documents about a bundle."""

    name: str
    media_type: str
    limit: int  # bytes


class Kind(NamedTuple):
    """What may be said about a bundle: by which documents, in this order."""

    name: str
    artifact_type: str
    layers: tuple[Layer, ...]


_MATERIALS = Layer("materials", MEDIA_MATERIALS, MAX_MATERIALS)
MATERIALS = Kind("materials", MEDIA_MATERIALS, (_MATERIALS,))
PROVENANCE = Kind(
    "provenance",
    MEDIA_PROVENANCE,
    (Layer("envelope", MEDIA_PROVENANCE, MAX_SAID), Layer("SBOM", MEDIA_SBOM, MAX_SAID), _MATERIALS),
)


class Referrer(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """All documents of one kind about one bundle (OCI image manifest with a subject)."""

    schema_version: int
    media_type: str
    artifact_type: str
    config: Descriptor
    layers: list[Descriptor]
    subject: Descriptor
    annotations: dict[str, str] = {}


class Said(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What is said about the bundles of one release, one kind of it (OCI image index)."""

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


def refer(
    kind: Kind, subject: Descriptor, documents: Sequence[bytes], annotations: dict[str, str] | None = None
) -> Made:
    """Make a referrer of a bundle out of what is said about it."""
    for layer, document in zip(kind.layers, documents, strict=True):
        if len(document) > layer.limit:
            raise ConfigError(f"{layer.name} of {len(document)} bytes; at most {layer.limit} are read")
    referrer = encode(
        Referrer(
            schema_version=2,
            media_type=MEDIA_MANIFEST,
            artifact_type=kind.artifact_type,
            config=_described(_MEDIA_EMPTY, _EMPTY),
            layers=[
                _described(layer.media_type, document) for layer, document in zip(kind.layers, documents, strict=True)
            ],
            subject=Descriptor(media_type=subject.media_type, digest=subject.digest, size=subject.size),
            annotations=annotations or {},
        )
    )
    contents = (_EMPTY, *documents, referrer)
    return Made(_described(MEDIA_MANIFEST, referrer), tuple((sha256(content), content) for content in contents))


def index_of(kind: Kind, library: str, version: str, made: Sequence[Made]) -> bytes:
    """The index of what is said about a release.

    Raises:
        ConfigError: it would be longer than anybody reads.
    """
    notes = {"format": f"{kind.name}.v1", "library": library, "version": version}
    index = encode(
        Said(
            schema_version=2,
            media_type=MEDIA_INDEX,
            manifests=[each.descriptor for each in made],
            annotations={NOTE + name: text for name, text in notes.items()},
        )
    )
    if len(index) > MAX_INDEX:
        raise ConfigError(f"{library} {version} has too many bundles to be listed: {len(index)} bytes")
    return index


def _described(media_type: str, content: bytes) -> Descriptor:
    return Descriptor(media_type=media_type, digest=f"sha256:{sha256(content)}", size=len(content))


def read_said(kind: Kind, data: bytes, library: str, version: str) -> list[Descriptor]:
    """The referrers that the index of a release lists; a `VerificationError` if it is not the index of that release."""
    what = f"{kind.name} of {library} {version}"
    try:
        said = msgspec.convert(strict_json(data, what=what), type=Said)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"the {what} is malformed: {error}") from error
    told = tuple(said.annotations.get(NOTE + name) for name in ("format", "library", "version"))
    if (said.schema_version, said.media_type, *told) != (2, MEDIA_INDEX, f"{kind.name}.v1", library, version):
        raise VerificationError(f"the {what} is not that: it says {repr(told)[:300]}")
    for descriptor in said.manifests:
        _check(descriptor, MEDIA_MANIFEST, MAX_INDEX, what)
    return said.manifests


def read_referrer(kind: Kind, data: bytes, what: str) -> Referrer:
    """A referrer with all documents of its kind, after its digest was checked."""
    try:
        referrer = msgspec.convert(strict_json(data, what=what), type=Referrer)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    types = referrer.schema_version, referrer.media_type, referrer.artifact_type
    if types != (2, MEDIA_MANIFEST, kind.artifact_type):
        raise VerificationError(f"{what} is not {kind.name}: it says {repr(types)[:300]}")
    if len(referrer.layers) != len(kind.layers) or referrer.config != _described(_MEDIA_EMPTY, _EMPTY):
        expected = ", ".join(layer.name for layer in kind.layers)
        raise VerificationError(f"{what} has {len(referrer.layers)} documents, expected {expected}")
    for descriptor, layer in zip(referrer.layers, kind.layers, strict=True):
        _check(descriptor, layer.media_type, layer.limit, what)
    _check(referrer.subject, MEDIA_MANIFEST, MAX_INDEX, what)
    return referrer


def _check(descriptor: Descriptor, media_type: str, limit: int, what: str) -> None:
    if descriptor.media_type != media_type:
        raise VerificationError(f"{what} names a {descriptor.media_type[:100]!r}, expected {media_type!r}")
    parse_digest(descriptor.digest, what=what)
    if not 0 < descriptor.size <= limit:
        raise VerificationError(f"{what} names a blob of {descriptor.size} bytes; at most {limit} are read")


def referrers(
    kind: Kind, index: bytes, library: str, version: str, read: Read
) -> Iterator[tuple[Descriptor, Referrer]]:
    """Every referrer that an index lists, read and checked."""
    for number, descriptor in enumerate(read_said(kind, index, library, version)):
        what = f"{kind.name} {number} of {library} {version}"
        yield descriptor, read_referrer(kind, read(descriptor.sha256, descriptor.size, what), what)


def by_bundle(kind: Kind, index: bytes, pin: Pin, bundles: Iterable[Descriptor], read: Read) -> dict[Digest, Referrer]:
    """What is said about each bundle of a release, by its digest; of some there may be nothing.

    Raises:
        VerificationError: something is said about another bundle, or twice about one.
    """
    known = {bundle.sha256: bundle for bundle in bundles}
    found: dict[Digest, Referrer] = {}
    for _, referrer in referrers(kind, index, pin.library, pin.version, read):
        subject, name = referrer.subject.sha256, f"{pin.library} {pin.version}"
        if subject not in known:
            raise VerificationError(f"the {kind.name} of {name} is about a bundle of another release: sha256:{subject}")
        if subject in found:
            raise VerificationError(f"{bundle_name(known[subject])} of {name} has {kind.name} twice", expected=subject)
        found[subject] = referrer
    return found


def closure(kind: Kind, index: bytes, library: str, version: str, read: Read) -> Iterator[Blob]:
    """Every blob that an index leads to, in the order in which they may appear in public, the index itself last."""
    name = f"{library} {version}"
    for descriptor, referrer in referrers(kind, index, library, version, read):
        yield Blob(referrer.config.sha256, referrer.config.size, f"empty config of the {kind.name} of {name}")
        for document, layer in zip(referrer.layers, kind.layers, strict=True):
            yield Blob(document.sha256, document.size, f"{layer.name} in the {kind.name} of {name}")
        yield Blob(descriptor.sha256, descriptor.size, f"manifest of the {kind.name} of {name}")
    yield Blob(sha256(index), len(index), f"{kind.name} of {name}")
