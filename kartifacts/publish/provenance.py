"""Says, signed, how each bundle of a release was built: an in-toto statement with a SLSA predicate in a DSSE envelope.

A statement is derived from the bundle's materials and the builder's name and from nothing else: no time, no version of
the release.  So a bundle that did not change has the same statement, and by a key of a deterministic scheme the same
envelope, in every release.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kartifacts.errors import ConfigError, KartifactsError, VerificationError
from kartifacts.model.digest import Digest, canonical_json, sha256, strict_json
from kartifacts.model.manifest import MAX_INDEX, Descriptor, Pin
from kartifacts.model.materials import MEDIA_MATERIALS, Materials, materials_of
from kartifacts.publish.referrers import MAX_SAID, MEDIA_PROVENANCE, MEDIA_SBOM, Made, index_of, refer
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
    """Whether a release says what its bundles were made of; one that was built before there were materials does not."""
    return any(
        materials_of(bundle, what=bundle_name(bundle)) is not None for bundle in repository.release(pin).manifests
    )


def attest(repository: Repository, pin: Pin, signers: Sequence[Signer], *, builder_id: str = LOCAL_BUILDER) -> Attested:
    """Make statement, envelope and SBOM of every bundle of a release.

    Args:
        signers: of the library's role.
        builder_id: a URI that names who built it.

    Raises:
        ConfigError: a bundle does not say what it was made of, or `builder_id` is no URI, or nobody signs.
        VerificationError: a blob of the release is missing or damaged.
    """
    check_builder(builder_id)
    if not signers:
        raise ConfigError(f"nobody signs the provenance of {pin.library} {pin.version}")
    made: list[Made] = []
    for bundle in repository.release(pin).manifests:
        name = bundle_name(bundle)
        if materials_of(bundle, what=name) is None:
            raise ConfigError(
                f"{name} of {pin.library} {pin.version} does not say what it was made of",
                hint="build it again, or publish with --no-provenance",
            )
        materials = repository.materials(bundle)
        said = refer(bundle, MEDIA_SBOM, sbom(materials, bundle.sha256))
        statement = canonical_json(statement_of(bundle, materials, _sbom_of(said), builder_id))
        envelope = refer(bundle, MEDIA_PROVENANCE, sealed(statement, signers), {"in-toto.io/predicate-type": PREDICATE})
        made += (said, envelope)
    index = index_of(pin.library, pin.version, made)
    if len(index) > MAX_INDEX:
        raise ConfigError(f"{pin.library} {pin.version} has too many bundles to be listed: {len(index)} bytes")
    blobs = {digest: content for each in made for digest, content in each.blobs}
    return Attested((*blobs.items(), (sha256(index), index)), index)


def _sbom_of(said: Made) -> Digest:
    _, (digest, _), _ = said.blobs
    return digest


def check_builder(text: str) -> None:
    scheme, colon, rest = text.partition(":")
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= 1000
    if not (plain and colon and rest and scheme[:1].isalpha() and scheme.replace("+", "").replace("-", "").isalnum()):
        raise ConfigError(f"a builder is named by a URI, got {text[:200]!r}", hint="e.g. https://ci.example/builders/1")


# -- the statement -----------------------------------------------------------------------------------------------------


def statement_of(bundle: Descriptor, materials: Materials, sbom: Digest, builder_id: str) -> dict[str, Any]:
    """The in-toto statement about a bundle; `sbom` is the digest of its SBOM."""
    named = materials_of(bundle, what=bundle_name(bundle))
    assert named is not None, "materials were read by it"
    byproducts = [("materials", named[0], MEDIA_MATERIALS), ("SBOM", sbom, MEDIA_SBOM)]
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
