"""Opens what signs: private keys in files, and keys of services and tokens by their URIs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.exceptions import UnsupportedLibraryError
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, GPGSigner, Key, Signer, SSlibKey

from kartifacts import config
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import open_regular, read_regular
from kartifacts.model.digest import strict_json

Secret = Callable[[str], str]
"""Gives the passphrase or PIN of what it is told the name of."""

_SERVICES = ("awskms", "gcpkms", "azurekms", "hv")
SCHEMES = ("file2", *_SERVICES, "hsm", "gnupg")
_MAX_PEM = 1 << 16  # bytes


def open_signer(uri: str, key: Key, *, directory: Path, secret: Secret | None = None) -> Signer:
    """What signs by `key`.

    Args:
        directory: where relative file names begin.

    Raises:
        ConfigError: the URI, the file or the passphrase is wrong, a library is missing, or no socket may be opened.
    """
    scheme = check_uri(uri)
    if scheme == "file2":
        return _from_file(directory / uri.removeprefix("file2:"), key, secret)
    if scheme in _SERVICES:
        config.read().check_online(f"the signer {uri!r}")
    try:
        return Signer.from_priv_key_uri(uri, key, secret or _nobody)
    except ConfigError:  # of who was asked for a secret
        raise
    except UnsupportedLibraryError as error:
        raise ConfigError(f"{uri!r} needs a library: {error}", hint=f"pip install {_extra(scheme)}") from error
    except Exception as error:
        raise ConfigError(f"cannot sign by {uri!r}: {error!r}") from error


def check_uri(uri: str) -> str:
    """The scheme of a signer's URI; a `ConfigError` if there are no such signers."""
    scheme, colon, _ = uri.partition(":")
    if not colon or scheme not in SCHEMES or scheme not in SIGNER_FOR_URI_SCHEME:
        raise ConfigError(f"{uri!r} is no URI of a signer: expected one of {', '.join(f'{name}:' for name in SCHEMES)}")
    return scheme


def _extra(scheme: str) -> str:
    extra = {"hv": "vault"}.get(scheme, scheme)
    return f"'securesystemslib[{extra}]'"


def _nobody(name: str) -> str:
    raise ConfigError(f"{name} is needed, and there is nobody to ask", hint="pass --passphrase-file")


# -- private keys in files ---------------------------------------------------------------------------------------------


def _from_file(path: Path, key: Key, secret: Secret | None) -> Signer:
    pem = _read_private(path)
    if not isinstance(key, SSlibKey):
        raise ConfigError(f"the key {key.keyid[:8]} is of type {key.keytype!r}, which no file holds")
    private = _open(pem, path, secret)
    try:
        return CryptoSigner(private, key)
    except (ValueError, UnsupportedLibraryError) as error:
        raise ConfigError(f"{str(path)!r} does not sign for key {key.keyid[:8]}: {error}") from error


def open_private(path: Path, secret: Secret | None = None) -> Signer:
    """The signer of a private key in a file, which says itself what its public key is."""
    private = _open(_read_private(path), path, secret)
    try:
        return CryptoSigner(private)
    except (ValueError, UnsupportedLibraryError) as error:
        raise ConfigError(f"{str(path)!r} is of a kind of key that does not sign here: {error}") from error


def _open(pem: bytes, path: Path, secret: Secret | None) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(pem, None)
    except TypeError:  # it is encrypted
        passphrase = (secret or _nobody)(f"the passphrase of {path}")
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{str(path)!r} is no private key: {error}", hint="expected PEM (PKCS8)") from error
    try:
        return load_pem_private_key(pem, passphrase.encode())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the passphrase does not open {str(path)!r}") from error


def is_encrypted(path: Path) -> bool:
    """Whether the private key in a file opens by a passphrase only."""
    return b"ENCRYPTED" in _read_private(path)[:200]


def _read_private(path: Path) -> bytes:
    """The content of a private key that, as ssh wants it, nobody else may read if it is this user's own file."""
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            if found.st_uid == os.geteuid() and found.st_mode & 0o077:
                raise ConfigError(
                    f"other users may read the private key {str(path)!r} (mode {stat.S_IMODE(found.st_mode):04o})",
                    hint=f"chmod 600 {path}; if somebody may have read it, rotate its role",
                )
            return file.read(_MAX_PEM)
    except OSError as error:
        raise ConfigError(f"cannot read the private key {str(path)!r}: {error.strerror or error}") from error


def new_private_key(passphrase: str | None) -> tuple[bytes, SSlibKey]:
    """A new ed25519 key: its private half as PEM, encrypted if there is a passphrase, and its public one."""
    signer = CryptoSigner.generate_ed25519()
    if passphrase is None:
        return signer.private_bytes, signer.public_key
    key = load_pem_private_key(signer.private_bytes, None)
    encryption = BestAvailableEncryption(passphrase.encode())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption), signer.public_key


# -- public keys -------------------------------------------------------------------------------------------------------


def read_public(text: str, uri: str = "") -> Key:
    """A public key by a PEM file, a JSON file as TUF writes keys, or, for ``gnupg:``, the id of a key in that keyring.

    Raises:
        ConfigError: there is none, or it is of a kind that does not sign.
    """
    if uri.startswith("gnupg:"):
        return _from_gnupg(text, uri.removeprefix("gnupg:"))
    try:
        content = read_regular(text, _MAX_PEM)
    except OSError as error:
        raise ConfigError(f"cannot read the public key {text!r}: {error.strerror or error}") from error
    try:
        if not content.lstrip().startswith(b"{"):
            return SSlibKey.from_crypto(load_pem_public_key(content))
        fields = strict_json(content, what=text)
        return Key.from_dict(fields.pop("keyid"), fields)
    except (VerificationError, ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{text!r} is no public key: {error}", hint="expected PEM, as openssl pkey -pubout"
        ) from error


def _from_gnupg(keyid: str, home: str) -> Key:
    try:
        _, key = GPGSigner.import_(keyid.lower(), home or None)
    except (ValueError, OSError, UnsupportedLibraryError) as error:
        raise ConfigError(
            f"gpg gives no public key {keyid!r}: {error}", hint="expected its whole fingerprint"
        ) from error
    return key
