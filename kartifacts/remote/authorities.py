"""Says whose certificates are trusted for https: those that the settings name, or this system's."""

from __future__ import annotations

import ssl
from pathlib import Path

from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.remote.answers import innermost

AUTHORITY_HINT = "set REQUESTS_CA_BUNDLE or SSL_CERT_FILE to the certificate of the authority that signed it"


NO_TLS_HINT = "if nothing there speaks TLS, write http:// for a mirror or a bucket, oci+http:// for a registry"


def tls_hint(error: BaseException) -> str:
    """What to do where TLS failed: a certificate is refused, or the other side answers in plain HTTP."""
    cause: BaseException | None = error
    for _ in range(10):
        if isinstance(cause, ssl.SSLCertVerificationError) or cause is None:
            break
        if isinstance(cause, ssl.SSLError):
            return NO_TLS_HINT
        reason = getattr(cause, "reason", None)  # as urllib3 keeps it
        cause = reason if isinstance(reason, BaseException) else cause.__cause__ or cause.__context__
    return AUTHORITY_HINT


def tls_context(settings: Settings) -> ssl.SSLContext:
    """How certificates are checked.

    Raises:
        SourceError: the file or directory that a variable names cannot be read.
    """
    variable, place = settings.authorities
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if not place:
            _load_usual(context)
        elif Path(place).is_dir():
            context.load_verify_locations(capath=place)
        else:
            context.load_verify_locations(cafile=place)
    except OSError as error:
        raise SourceError(
            f"{variable} names {place!r}, which cannot be read: {innermost(error)}",
            permanent=True,
            hint=f"{variable} is a file of certificates in PEM form, or a directory of them",
        ) from error
    return context


def _load_usual(context: ssl.SSLContext) -> None:
    """Trust whom this system trusts, or where it says nothing, as in many a container, whom certifi does."""
    found = ssl.get_default_verify_paths()
    if found.cafile or (found.capath and any(Path(found.capath).glob("*.0"))):
        context.load_default_certs()
    else:
        import certifi

        context.load_verify_locations(cafile=certifi.where())
