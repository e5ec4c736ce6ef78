"""Proves where the releases of a repository directory come from: by signed statements, and by bundles of Sigstore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.model.manifest import Pin

if TYPE_CHECKING:
    from kartifacts.publish.attestations import Believed
    from kartifacts.publish.repository import Repository


@dataclass(frozen=True)
class Demand:
    """What is asked for besides soundness.

    Args:
        statements: that every bundle has a signed statement of how it was built.
        root: the root of trust whose metadata names the keys; by default the one of the settings.
        keys: public keys in PEM that may have signed, instead of those of the metadata or besides them.
        builder_id: who must have built.
        sigstore: bundles of Sigstore, of which one must hold for each release.
        identity, issuer: who must have signed those, as whose account.
        trusted_root: the trusted_root.json of that Sigstore.
    """

    statements: bool = False
    root: Path | None = None
    keys: tuple[Path, ...] = ()
    builder_id: str | None = None
    sigstore: tuple[Path, ...] = ()
    identity: str = ""
    issuer: str = ""
    trusted_root: Path | None = None

    def check(self, repository: Path | None) -> None:
        """Raise `ConfigError` if these do not make sense together."""
        if not self.statements and (self.root or self.keys or self.builder_id):
            raise ConfigError("--root, --key and --builder-id say whom to believe", hint="add --provenance")
        told = (self.identity, self.issuer, self.trusted_root)
        if bool(self.sigstore) != any(told) or (self.sigstore and not all(told)):
            raise ConfigError("--sigstore-bundle, --identity, --issuer and --trusted-root are needed together")
        if repository is None and (self.statements or self.sigstore):
            raise ConfigError("provenance is that of a repository", hint="name its directory")


Choose = Callable[[Pin], "tuple[Believed, Digest | None]"]
"""Whom to believe about a release, and the digest of its provenance if signed metadata tells."""


def prove(settings: Settings, path: Path, library: str | None, demand: Demand) -> list[dict[str, Any]]:
    """What was proved about each bundle and release of a repository that is sound.

    Raises:
        VerificationError: something was not signed by whom it should be, or says what is not so.
        ConfigError: nobody is named whom to believe.
    """
    from kartifacts.publish.repository import Repository

    repository = Repository(path)
    pins = repository.pins(library)
    rows: list[dict[str, Any]] = []
    if demand.statements:
        rows += _by_statements(settings, repository, pins, demand)
    if demand.sigstore:
        rows += _by_sigstore(repository, pins, demand)
    return rows


def _by_statements(
    settings: Settings, repository: Repository, pins: Sequence[Pin], demand: Demand
) -> list[dict[str, Any]]:
    from kartifacts.publish.attestations import check_release, index_of

    choose = _chooser(settings, repository, pins, demand)
    rows: list[dict[str, Any]] = []
    for pin in pins:
        believed, signed = choose(pin)
        index = index_of(repository, pin, signed)
        rows += (
            {
                "library": pin.library,
                "version": pin.version,
                "bundle": origin.bundle,
                "sha256": origin.digest,
                "builder": origin.builder,
                "keys": list(origin.keyids),
            }
            for origin in check_release(repository, pin, index, believed, builder_id=demand.builder_id)
        )
    return rows


def _chooser(settings: Settings, repository: Repository, pins: Sequence[Pin], demand: Demand) -> Choose:
    from kartifacts.publish.attestations import Believed, read_keys

    extra = read_keys(demand.keys)
    root = demand.root or (None if extra else settings.root)
    if root is None:
        if not extra:
            raise ConfigError(
                "nobody is named whom to believe, and there is no root of trust in the configuration",
                hint="name one with --root ROOT.json, or the library's public key with --key PUBLIC.pem",
            )
        return lambda _: (Believed(extra, 1), None)
    from kartifacts.sources.directory import DirectorySource
    from kartifacts.trust.client import refresh
    from kartifacts.trust.roots import read_root

    libraries = sorted({pin.library for pin in pins})
    try:
        trusted = refresh(read_root(root), None, DirectorySource(repository.path).document, libraries=libraries)
    except SourceError as error:
        if error.missing:
            error.hint = (
                "what `kartifacts build` wrote is not signed: verify the bucket that it was published to with --keys, "
                f"or a mirror of that; {error.hint or ''}"
            )
        raise

    def choose(pin: Pin) -> tuple[Believed, Digest | None]:
        name = f"{pin.library} {pin.version}"
        signer = trusted.libraries.get(pin.library)
        released = next((each for each in signer.releases if each.pin == pin), None) if signer else None
        if signer is None or released is None:
            raise VerificationError(
                f"{name} in {str(repository.path)!r} is not a release that signed metadata lists", expected=pin.sha256
            )
        if released.provenance is None:
            raise VerificationError(
                f"nothing is signed about {name}: its metadata lists no provenance",
                hint="publish it with --keys and without --no-provenance",
            )
        return Believed((*signer.keys, *extra), signer.threshold), released.provenance[0]

    return choose


def _by_sigstore(repository: Repository, pins: Sequence[Pin], demand: Demand) -> list[dict[str, Any]]:
    from kartifacts.publish.sigstore_gate import Gate

    assert demand.trusted_root is not None, "checked before"
    gate = Gate(demand.trusted_root, identity=demand.identity, issuer=demand.issuer)
    bundles = gate.read(demand.sigstore)
    rows = []
    for pin in pins:
        index = repository.read(pin.sha256, pin.size, f"release index of {pin.library} {pin.version}")
        used = gate.check(index, bundles, f"{pin.library} {pin.version}")
        rows.append(
            {
                "library": pin.library,
                "version": pin.version,
                "sha256": pin.sha256,
                "identity": demand.identity,
                "issuer": demand.issuer,
                "sigstore_bundle": str(used),
            }
        )
    return rows
