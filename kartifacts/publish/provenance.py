"""Says, signed, how each bundle of a release was built: an in-toto statement with a SLSA predicate in a DSSE envelope.

A statement is derived from the bundle's materials and the builder's name and from nothing else: no time, no version of
the release.  So a bundle that did not change has the same statement, and by a key of a deterministic scheme the same
envelope, in every release.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kartifacts.errors import ConfigError, KartifactsError, VerificationError
from kartifacts.model.digest import Digest, canonical_json, sha256, strict_json
from kartifacts.model.manifest import Descriptor, Pin
from kartifacts.model.materials import MAX_MATERIALS, MEDIA_MATERIALS, Materials, decode_materials
from kartifacts.publish.referrers import (
    MATERIALS,
    MAX_SAID,
    MEDIA_SBOM,
    PROVENANCE,
    Made,
    Referrer,
    by_bundle,
    index_of,
    refer,
)
from kartifacts.publish.repository import Repository, bundle_name
from kartifacts.publish.sbom import sbom

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
PAYLOAD = "application/vnd.in-toto+json"
BUILD_TYPES = {"build": "urn:kartifacts:build:v1", "import": "urn:kartifacts:import:v1"}
LOCAL_BUILDER = "urn:kartifacts:local"
_MAX_SIGNATURES = 64


@dataclass(frozen=True)
class Attested:
    """What was signed about a release: the blobs, whatever names another after it, and the index, which is the last."""

    blobs: tuple[tuple[Digest, bytes], ...]
    index: bytes


def attestable(repository: Repository, pin: Pin) -> bool:
    """Whether it is known here what the bundles of a release were made of: it is where they were built."""
    return repository.made_of(pin) is not None


def attest(repository: Repository, pin: Pin, signers: Sequence[Signer], *, builder_id: str = LOCAL_BUILDER) -> Attested:
    """Make statement, envelope and SBOM of every bundle of a release.

    Args:
        signers: of the library's role.
        builder_id: a URI that names who built it.

    Raises:
        ConfigError: a bundle does not say what it was made of, or `builder_id` is no URI, or nobody signs.
        VerificationError: a blob of the release or of its materials is missing or damaged.
    """
    check_builder(builder_id)
    if not signers:
        raise ConfigError(f"nobody signs the provenance of {pin.library} {pin.version}")
    listed, bundles = repository.made_of(pin), repository.release(pin).manifests
    told = {} if listed is None else by_bundle(MATERIALS, listed, pin, bundles, repository.read)
    made = [_attested(repository, bundle, _told(told, bundle, pin), signers, builder_id) for bundle in bundles]
    index = index_of(PROVENANCE, pin.library, pin.version, made)
    blobs = {digest: content for each in made for digest, content in each.blobs}
    return Attested((*blobs.items(), (sha256(index), index)), index)


def _told(told: Mapping[Digest, Referrer], bundle: Descriptor, pin: Pin) -> Descriptor:
    if bundle.sha256 not in told:
        raise ConfigError(
            f"{bundle_name(bundle)} of {pin.library} {pin.version} does not say what it was made of",
            hint="build it again, or publish with --no-provenance",
        )
    (materials,) = told[bundle.sha256].layers
    return materials


def _attested(
    repository: Repository, bundle: Descriptor, listed: Descriptor, signers: Sequence[Signer], builder_id: str
) -> Made:
    what = f"materials of {bundle_name(bundle)}"
    content = repository.read(listed.digest, listed.size, what, limit=MAX_MATERIALS)
    materials = decode_materials(content, what=what)
    bill = sbom(materials, bundle.sha256)
    statement = canonical_json(statement_of(bundle, materials, listed.sha256, sha256(bill), builder_id))
    documents = (sealed(statement, signers), bill, content)
    return refer(PROVENANCE, bundle, documents, {"in-toto.io/predicate-type": PREDICATE})


def check_builder(text: str) -> None:
    scheme, colon, rest = text.partition(":")
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= 1000
    if not (plain and colon and rest and scheme[:1].isalpha() and scheme.replace("+", "").replace("-", "").isalnum()):
        raise ConfigError(f"a builder is named by a URI, got {text[:200]!r}", hint="e.g. https://ci.example/builders/1")


# -- the statement -----------------------------------------------------------------------------------------------------


def statement_of(
    bundle: Descriptor, materials: Materials, made_of: Digest, sbom: Digest, builder_id: str
) -> dict[str, Any]:
    """The in-toto statement about a bundle; `made_of` and `sbom` are the digests of its materials and its SBOM."""
    byproducts = [("materials", made_of, MEDIA_MATERIALS), ("SBOM", sbom, MEDIA_SBOM)]
    return {
        "_type": STATEMENT,
        "subject": [{"name": subject_name(materials), "digest": {"sha256": bundle.sha256}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPES[materials.kind],
                "externalParameters": {
                    "library": materials.library,
                    "family": materials.family,
                    "archs": [materials.arch],
                    "abi": materials.abi,
                    "ops": {op.op: {"flags": op.flags} for op in materials.ops},
                },
                "internalParameters": {"toolchain": materials.toolchain},
                "resolvedDependencies": _dependencies(materials),
            },
            "runDetails": {
                "builder": {"id": builder_id},
                "byproducts": [
                    {"name": name, "digest": {"sha256": digest}, "mediaType": media_type}
                    for name, digest, media_type in byproducts
                ],
            },
        },
    }


def subject_name(materials: Materials) -> str:
    return f"{materials.library}/{materials.family}/{materials.arch}/{materials.abi}"


def _dependencies(materials: Materials) -> list[dict[str, Any]]:
    kind = "source" if materials.kind == "build" else "checksums"
    found = [(kind, content.path, content.sha256) for content in materials.files]
    found += [("program", name, digest) for name, digest in sorted(materials.programs.items())]
    if materials.recipe is not None:
        found.append(("recipe", materials.recipe.name, materials.recipe.sha256))
    return [{"name": name, "digest": {"sha256": digest}, "annotations": {"kind": kind}} for kind, name, digest in found]


# -- the envelope ------------------------------------------------------------------------------------------------------


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keyid: str
    sig: str


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_Signature]


def sealed(payload: bytes, signers: Sequence[Signer]) -> bytes:
    """A statement in an envelope that all `signers` signed, in the one spelling that `opened` takes."""
    from securesystemslib import dsse
    from securesystemslib.exceptions import Error

    envelope = dsse.Envelope(payload, PAYLOAD, {})
    try:
        for signer in signers:
            envelope.sign(signer)
    except KartifactsError:
        raise
    except (Error, ValueError, OSError) as error:
        raise ConfigError(f"provenance cannot be signed: {error}") from error
    made = envelope.to_dict()
    made["signatures"].sort(key=lambda signature: signature["keyid"])
    return canonical_json(made)


def opened(data: bytes, keys: Sequence[Key], threshold: int, *, what: str) -> tuple[bytes, tuple[str, ...]]:
    """The statement in an envelope, and the ids of the keys that signed it, once enough of `keys` have.

    Raises:
        VerificationError: it is malformed, spelt otherwise than `sealed` does, or too few of the keys signed it; or a
            signature of one of them does not hold.
    """
    if len(data) > MAX_SAID:
        raise VerificationError(f"{what} has {len(data)} bytes; at most {MAX_SAID} are read")
    parsed = strict_json(data, what=what)
    try:
        envelope = msgspec.convert(parsed, type=_Sealed)
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    keyids = [signature.keyid for signature in envelope.signatures]
    if canonical_json(parsed) != data or keyids != sorted(set(keyids)) or len(keyids) > _MAX_SIGNATURES:
        raise VerificationError(f"{what} is not spelt as it is written: one signature of a key, keys in order")
    if envelope.payload_type != PAYLOAD:
        raise VerificationError(f"{what} holds a {envelope.payload_type[:100]!r}, expected {PAYLOAD!r}")
    payload = _plain(envelope.payload, what)
    signed = _signed(payload, envelope, keys, what)
    if threshold < 1 or len(signed) < threshold:
        raise VerificationError(
            f"{what} is signed by {len(signed)} of the keys that may; {threshold} must",
            expected=f"{threshold} of {', '.join(key.keyid[:8] for key in keys)}",
            actual=", ".join(keyid[:8] for keyid in keyids),
        )
    return payload, tuple(sorted(signed.values()))


def _signed(payload: bytes, envelope: _Sealed, keys: Sequence[Key], what: str) -> dict[str, str]:
    """Which keys signed, by their public halves: one that has two ids counts once."""
    from securesystemslib import dsse
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    content = dsse.Envelope(payload, envelope.payload_type, {}).pae()
    known = {key.keyid: key for key in keys}
    found: dict[str, str] = {}
    for each in envelope.signatures:
        key = known.get(each.keyid)
        if key is None:
            continue
        try:
            key.verify_signature(Signature(each.keyid, _plain(each.sig, what).hex()), content)
        except (UnverifiedSignatureError, ValueError) as error:
            raise VerificationError(f"{what} has a signature of the key {key.keyid[:8]} that does not hold") from error
        found.setdefault(str(sorted(key.keyval.items())), key.keyid)
    return found


def _plain(text: str, what: str) -> bytes:
    """Base64 in its one spelling: a lenient reader takes others too, which would be other files of the same sense."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise VerificationError(f"{what} is malformed: not base64") from error
    if base64.b64encode(data).decode() != text:
        raise VerificationError(f"{what} is malformed: base64 in another spelling")
    return data
