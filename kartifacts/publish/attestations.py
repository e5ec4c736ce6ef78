"""Checks what was signed about the bundles of a release: all of them, by the right keys, and true to the materials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest, sha256, strict_json
from kartifacts.model.manifest import Descriptor, Pin
from kartifacts.publish.provenance import PREDICATE, STATEMENT, opened, statement_of
from kartifacts.publish.referrers import MAX_SAID, PROVENANCE, Referrer, by_bundle
from kartifacts.publish.repository import Repository, bundle_name
from kartifacts.publish.sbom import sbom

if TYPE_CHECKING:
    from securesystemslib.signer import Key

_MAX_KEY = 1 << 16  # bytes of a PEM file


class Believed(NamedTuple):
    """Whose statements about a library are believed."""

    keys: tuple[Key, ...]
    threshold: int


class Origin(NamedTuple):
    """What was proved about one bundle."""

    bundle: str
    digest: Digest
    builder: str
    keyids: tuple[str, ...]


def read_keys(paths: Sequence[Path]) -> tuple[Key, ...]:
    """Public keys in PEM files; raises `ConfigError` if one is none."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    keys = []
    for path in paths:
        try:
            keys.append(SSlibKey.from_crypto(load_pem_public_key(read_regular(path, _MAX_KEY))))
        except OSError as error:
            raise ConfigError(f"cannot read the key {str(path)!r}: {error.strerror or error}") from error
        except Exception as error:  # each kind of key has its own
            raise ConfigError(f"{str(path)!r} is not a public key in PEM: {error}") from error
    return tuple(keys)


def index_of(repository: Repository, pin: Pin, signed: Digest | None = None) -> bytes | None:
    """The index of what is said about a release; None if nothing is.

    Args:
        signed: its digest in signed metadata, if that was read.

    Raises:
        VerificationError: it is damaged or missing; or there are several, and which one counts is not known.
    """
    found = repository.provenance(pin)
    name = f"{pin.library} {pin.version}"
    if signed is not None and signed not in found:
        raise VerificationError(f"the provenance of {name} is missing", expected=signed, source=str(repository.path))
    if signed is None and len(found) > 1:
        raise VerificationError(
            f"{name} has {len(found)} provenance documents",
            hint="give the root of trust with --root, so that signed metadata says which one counts",
        )
    return found[signed] if signed is not None else next(iter(found.values()), None)


def check_release(
    repository: Repository,
    pin: Pin,
    index: bytes | None,
    believed: Believed,
    *,
    builder_id: str | None = None,
) -> list[Origin]:
    """Prove where every bundle of a release comes from.

    Args:
        index: of what is said about it; None if nothing is.
        builder_id: who must have built it; anybody if None.

    Raises:
        VerificationError: a bundle has no statement that holds, or two; or something is said about another bundle.
            Names the bundle.
    """
    name = f"{pin.library} {pin.version}"
    bundles = repository.release(pin).manifests
    if index is None:
        lacking = [bundle_name(bundle) for bundle in bundles]
        raise VerificationError(
            f"nothing is signed about {name}: no provenance of {', '.join(lacking[:3])}"
            + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""),
            hint="publish it with --keys, or verify without --provenance",
        )
    told = by_bundle(PROVENANCE, index, pin, bundles, repository.read)
    origins = []
    for bundle in bundles:
        if bundle.sha256 not in told:
            raise VerificationError(f"{bundle_name(bundle)} of {name} has no provenance", expected=bundle.sha256)
        origins.append(_origin(repository, bundle, told[bundle.sha256], believed, builder_id, name))
    return origins


def _origin(
    repository: Repository,
    bundle: Descriptor,
    provenance: Referrer,
    believed: Believed,
    builder_id: str | None,
    release: str,
) -> Origin:
    what = f"provenance of {bundle_name(bundle)} of {release}"
    sealed, bill, made_of = provenance.layers
    envelope = repository.read(sealed.digest, sealed.size, what, limit=MAX_SAID)
    payload, keyids = opened(envelope, believed.keys, believed.threshold, what=what)
    statement = strict_json(payload, what=what)
    try:
        types = statement["_type"], statement["predicateType"]
        builder = statement["predicate"]["runDetails"]["builder"]["id"]
    except (KeyError, TypeError, IndexError) as error:
        raise VerificationError(f"{what} is no statement of how it was built: {error!r}") from error
    if types != (STATEMENT, PREDICATE) or not isinstance(builder, str):
        raise VerificationError(f"{what} is no statement of how it was built: {repr(types)[:200]}")
    if builder_id is not None and builder != builder_id:
        raise VerificationError(
            f"{what}: built by {builder[:200]!r}, expected {builder_id!r}", expected=builder_id, actual=builder[:200]
        )
    materials = repository.materials(made_of, f"materials of {bundle_name(bundle)} of {release}")
    repository.read(bill.digest, bill.size, f"SBOM of {bundle_name(bundle)} of {release}", limit=MAX_SAID)
    derived = sha256(sbom(materials, bundle.sha256))
    if bill.sha256 != derived:
        raise VerificationError(
            f"the SBOM of {bundle_name(bundle)} of {release} says other things than its materials",
            expected=derived,
            actual=bill.sha256,
        )
    expected = statement_of(bundle, materials, made_of.sha256, derived, builder)
    if statement != expected:
        raise VerificationError(f"{what} says other things than its materials: {_difference(statement, expected)}")
    return Origin(bundle_name(bundle), bundle.sha256, builder, keyids)


def _difference(said: object, expected: object, at: str = "") -> str:
    """Where two statements differ first."""
    if isinstance(said, dict) and isinstance(expected, dict):
        for key in sorted({*map(str, said), *expected}):
            if said.get(key) != expected.get(key):
                return _difference(said.get(key), expected.get(key), f"{at}.{key}" if at else key)
    if isinstance(said, list) and isinstance(expected, list) and len(said) == len(expected):
        for number, (one, other) in enumerate(zip(said, expected, strict=True)):
            if one != other:
                return _difference(one, other, f"{at}[{number}]")
    return f"{at} is {repr(said)[:150]}, expected {repr(expected)[:150]}"
