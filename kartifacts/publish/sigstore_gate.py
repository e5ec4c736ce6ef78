"""One more gate: a release is taken only if somebody signed it through a Sigstore, as a bundle file proves offline.

The trusted root is a file that the caller has; nothing is fetched, so a revocation or a new root of that Sigstore is
seen only once the file is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import sha256, strict_json
from kartifacts.publish.provenance import PAYLOAD, STATEMENT

if TYPE_CHECKING:
    from sigstore.models import Bundle

MAX_BUNDLE = 16 << 20  # bytes of a bundle or a trusted root


class Read(NamedTuple):
    """A bundle file that was parsed; nothing of it has been believed yet."""

    path: Path
    bundle: Bundle


class Gate:
    """Whose signatures count.

    Args:
        trusted_root: the trusted_root.json of a Sigstore.
        identity: who must have signed: what the certificate names, e.g. the address of a workflow.
        issuer: who must have vouched for that identity.

    Raises:
        ConfigError: the extra `sigstore` is not installed, or the file is no trusted root.
    """

    def __init__(self, trusted_root: Path, *, identity: str, issuer: str) -> None:
        try:
            from sigstore.models import TrustedRoot
            from sigstore.verify import Verifier
            from sigstore.verify.policy import Identity
        except ImportError as error:
            raise ConfigError(
                f"bundles of Sigstore cannot be verified: {error}", hint="pip install 'kartifacts[sigstore]'"
            ) from error
        _read(trusted_root, "trusted root")  # its size, and whether it can be read
        try:
            self._verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trusted_root)))
        except Exception as error:  # its parts have faults of many kinds
            raise ConfigError(f"{str(trusted_root)!r} is not the trusted root of a Sigstore: {_said(error)}") from error
        self._policy = Identity(identity=identity, issuer=issuer)

    def read(self, paths: Sequence[Path]) -> list[Read]:
        """Parse bundle files; a `VerificationError` names the one that is none."""
        from sigstore.models import Bundle

        found = []
        for path in paths:
            data = _read(path, "Sigstore bundle")
            strict_json(data, what=str(path))
            try:
                found.append(Read(path, Bundle.from_json(data)))
            except Exception as error:
                raise VerificationError(
                    f"{str(path)!r} is not a Sigstore bundle: {_said(error)}", source=str(path)
                ) from error
        return found

    def check(self, index: bytes, bundles: Sequence[Read], name: str) -> Path:
        """The file of the first bundle that proves the release whose index this is.

        Raises:
            VerificationError: none does; says of each why not.
        """
        refused = []
        for path, bundle in bundles:
            try:
                if bundle._inner.dsse_envelope is None:  # noqa: SLF001  it has no other way to ask
                    self._verifier.verify_artifact(index, bundle, self._policy)
                else:
                    _check_statement(*self._verifier.verify_dsse(bundle, self._policy), index, str(path))
            except Exception as error:  # noqa: BLE001  of sigstore, of cryptography, and ours
                refused.append(f"\n  {str(path)!r}: {_said(error)}")
            else:
                return path
        raise VerificationError(f"no Sigstore bundle proves {name}:{''.join(refused)}", expected=sha256(index))


def _check_statement(payload_type: str, payload: bytes, index: bytes, what: str) -> None:
    statement: Any = strict_json(payload, what=what)
    try:
        subjects = [subject["digest"]["sha256"] for subject in statement["subject"]]
        kind = statement["_type"]
    except (KeyError, TypeError) as error:
        raise VerificationError(f"{what} holds no in-toto statement: {error!r}") from error
    if (payload_type, kind) != (PAYLOAD, STATEMENT):
        raise VerificationError(f"{what} holds no in-toto statement but {payload_type[:100]!r} {repr(kind)[:100]}")
    if sha256(index) not in subjects:
        raise VerificationError(f"{what} is about other files", expected=sha256(index))


def _read(path: Path, what: str) -> bytes:
    try:
        return read_regular(path, MAX_BUNDLE)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error.strerror or error}") from error


def _said(error: Exception) -> str:
    """One line of what a library says, of which pydantic says many."""
    from pydantic import ValidationError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ValidationError):
            first, *more = cause.errors(include_url=False, include_context=False, include_input=False)
            where = ".".join(map(str, first["loc"]))
            others = f", and {len(more)} more faults" if more else ""
            return f"{where + ': ' if where else ''}{first['msg']}{others}"[:300]
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
