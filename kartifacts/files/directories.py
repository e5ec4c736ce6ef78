"""Tells the directory that a text names, in each of the spellings that people use, and whether it can be written."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from kartifacts.errors import ConfigError


def directory_in(text: str) -> Path | None:
    """The directory of ``dir:PATH``, ``file://PATH`` or a plain path; None if the text names something else.

    A plain path holds a slash or is a directory, so that a misspelt word makes none.

    Raises:
        ConfigError: a file URL names another machine, or nothing.
    """
    scheme, colon, rest = text.partition(":")
    if scheme == "file" and rest.startswith("//"):
        return _in_url(text)
    if colon and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return Path(rest) if scheme == "dir" and rest else None
    return Path(text) if "/" in text or (text and os.path.isdir(text)) else None


def check_place(path: Path, option: str, *, directory: bool) -> None:
    """Find out before hours of work whether a directory, or a file, can be written where `option` has it.

    Directories that are missing on the way there will be made.

    Raises:
        ConfigError: it cannot; names the option and what is in the way.
    """
    end = os.path.realpath(path)
    place = end if directory or os.path.isdir(end) else os.path.dirname(end)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    reason = f"{place!r} is not a directory"
    if os.path.isdir(end) and not directory:
        reason = "it is a directory"
    elif os.path.isdir(place):
        try:
            with tempfile.TemporaryFile(dir=place):
                return
        except OSError as error:
            reason = f"in {place!r}: {error.strerror or error}"
    raise ConfigError(
        f"nothing can be written at {option} {str(path)!r}: {reason}",
        hint=f"name a {'directory' if directory else 'file'} in a place that this user may write",
    )


def _in_url(url: str) -> Path:
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(
            f"{url!r} names the host {parts.netloc!r}: a file:// URL is a path of this machine",
            hint=f"with an absolute path it has three slashes: file:///{parts.netloc}{parts.path}",
        )
    return Path(unquote(parts.path))
