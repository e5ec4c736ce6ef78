"""The releases that signed metadata in a directory lists; it is read as names of files are, so not verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import parse_digest, strict_json
from kartifacts.model.layout import TIMESTAMP, VIEWS, View, check_name, metadata_path
from kartifacts.model.manifest import MAX_INDEX, Pin

_MAX_METADATA = 5_000_000  # bytes; as much as a client reads


def view_of(directory: Path) -> View | None:
    """The view that a directory shows to all; None if nothing is signed there.

    Raises:
        VerificationError: something is there in place of metadata, or only its beginning is gone.
        SourceError: one cannot tell.
    """
    broken = []
    for view in VIEWS:
        begin = directory / metadata_path(view, TIMESTAMP)
        try:
            os.stat(begin)
        except FileNotFoundError:
            if os.path.lexists(begin.parent):
                broken.append(begin)
        except NotADirectoryError as error:
            raise VerificationError(f"{str(begin.parent)!r} is not a directory", source=str(begin.parent)) from error
        except OSError as error:
            raise _unreadable(begin, error) from error
        else:
            return view
    if broken:
        raise VerificationError(
            f"{str(broken[0].parent)!r} is there without {TIMESTAMP}, so nothing says what is released",
            source=str(broken[0]),
            hint="copy the repository again; what is unsigned has no such directory",
        )
    return None


def signed_pins(directory: Path, view: View) -> Iterator[Pin]:
    """The releases of all libraries that a view lists.

    Raises:
        VerificationError: the metadata is malformed, or a file of it is missing.
        SourceError: it cannot be read.
    """
    from tuf.api.metadata import Snapshot, Targets, Timestamp

    from kartifacts.trust.signed import parse

    what = metadata_path(view, TIMESTAMP)
    number = parse(_read(directory, what), Timestamp, what).signed.snapshot_meta.version
    what = metadata_path(view, f"{number}.snapshot.json")
    listed = parse(_read(directory, what), Snapshot, what).signed.meta
    for file, meta in sorted(listed.items()):
        library = file.removesuffix(".json")
        if library != "targets":
            what = metadata_path(view, f"{meta.version}.{_checked(library, 'library', what)}.json")
            for name, target in parse(_read(directory, what), Targets, what).signed.targets.items():
                yield from _pin(library, name, target.length, target.hashes.get("sha256", ""), what)


def _pin(library: str, name: str, size: int, digest: str, what: str) -> Iterator[Pin]:
    parts = name.split("/")
    if len(parts) != 3 or parts[0] != library:
        raise VerificationError(f"{what} lists {name[:150]!r}, which is no release of {library}")
    if parts[2] == "index.json":
        if not 0 < size <= MAX_INDEX:
            raise VerificationError(f"{what} lists a release index of {size} bytes; at most {MAX_INDEX} are read")
        version = _checked(parts[1], "version", what)
        yield Pin(library=library, version=version, sha256=parse_digest(digest, what=what), size=size)


def _checked(text: str, kind: str, what: str) -> str:
    try:
        return check_name(text, kind)
    except ConfigError as error:
        raise VerificationError(f"{what} is malformed: {error.message}") from error


def _read(directory: Path, path: str) -> bytes:
    try:
        content = read_regular(directory / path, _MAX_METADATA)
    except FileNotFoundError as error:
        raise VerificationError(f"{path} is listed and missing", source=str(directory / path)) from error
    except OSError as error:
        raise _unreadable(directory / path, error) from error
    strict_json(content, what=path)
    return content


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"cannot read {str(path)!r}: {error.strerror or error}", permanent=True)
