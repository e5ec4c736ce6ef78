"""Reads a root of trust from a file of this machine, so that what is wrong with it is said of that file."""

from __future__ import annotations

from pathlib import Path

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular

MAX_ROOT = 512_000  # bytes, as TUF clients have it


def read_root(path: Path, *, hint: str | None = None) -> bytes:
    """A root file that is signed by its own keys.

    Raises:
        ConfigError: it cannot be read; `hint` says what to do about it.
        VerificationError: it is no root, of no view, or lacks signatures of its own.
    """
    from kartifacts.trust.client import view_of
    from kartifacts.trust.signing import check_signed

    try:
        content = read_regular(path, MAX_ROOT)
    except OSError as error:
        raise ConfigError(f"cannot read the root {str(path)!r}: {error.strerror or error}", hint=hint) from error
    try:
        view_of(content)
        check_signed(content, "root", content, "it")
    except VerificationError as error:
        raise VerificationError(
            f"the root of trust {str(path)!r} cannot be used: {error.message}",
            source=str(path),
            expected=error.expected,
            actual=error.actual,
            hint="no mirror was asked: get the file again from the publisher, by a way that you trust",
        ) from error
    return content
