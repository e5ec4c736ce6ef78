"""One run of python-tuf's updater: alone on its directory, reading through our sources, with errors of our kinds."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote, unquote

from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadError,
    DownloadHTTPError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Signed
from tuf.ngclient import FetcherInterface, Updater

from kartifacts.errors import ExpiredMetadata, KartifactsError, SourceError, StoreError, VerificationError
from kartifacts.files.faults import store_error, storing
from kartifacts.files.locking import elsewhere, hold
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import check_trusted, make_directory
from kartifacts.model.digest import strict_json
from kartifacts.model.layout import TIMESTAMP, VIEWS, View, metadata_path
from kartifacts.trust.client import Read
from kartifacts.trust.client_state import check_state
from kartifacts.trust.signed import check_parsed, parse_any

MAX_METADATA = 5_000_000  # bytes, whatever length signed metadata promises of other metadata
PATIENCE = 600.0  # seconds for all of a run, since a source may spread its answers
_JUDGED = ("root", "timestamp", "snapshot", "targets")  # in this order, and then libraries

_BEGINNINGS = {metadata_path(view, TIMESTAMP): view for view in VIEWS}  # what a view has if it has anything

_NAMED = re.compile(r"(?:.*/)?(?:[0-9]+\.)?(?P<role>[^/]+)\.json")
_NEXT_ROOT = re.compile(r"(?:.*/)?[0-9]+\.root\.json")
_SIGNED_BY = re.compile(r"was signed by (\d+)/(\d+) keys")
_OBSERVED = re.compile(r"Observed (\S+ \S+) does not match expected (\S+ \S+)")

CLOCK_HINT = (
    "a wrong clock of this machine looks the same: check it; else the mirror stands still or hides what is newer: "
    "tell who keeps it. `kartifacts sync --accept-expired-until DATE --reason TEXT` makes an exception that is recorded"
)


def base(view: View) -> str:
    """The directory of a view's metadata, in the repository."""
    return metadata_path(view, "").rstrip("/")


def by_path(read: Read) -> Read:
    """`read` for who spells names as URLs do: only the names of libraries go there, and those hold no slash."""
    return lambda path, limit: read(unquote(path), limit)


class Fetcher(FetcherInterface):
    """Gives the updater what `read` gives, if it has one reading only."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._due = time.monotonic() + PATIENCE
        self.got: dict[str, bytes] = {}  # role → what was read of it last

    def download_bytes(self, url: str, max_length: int) -> bytes:
        limit = min(max_length, MAX_METADATA)
        try:
            content = self._bounded(url, limit)
        except SourceError as error:
            if (error.missing or error.denied) and _NEXT_ROOT.fullmatch(url):  # so the present root is the newest
                raise DownloadHTTPError(error.message, 404) from error
            if error.missing and url in _BEGINNINGS:
                raise _without(_BEGINNINGS[url], error) from error
            raise
        if content.lstrip()[:1] == b"<":
            raise VerificationError(
                f"{url} is HTML or XML, not signed metadata",
                hint="a login page, or one for whatever is not there: the mirror has another URL, or wants a login",
            )
        strict_json(content, what=url)
        if named := _NAMED.fullmatch(url):
            self.got[unquote(named["role"])] = content
        return content

    def _fetch(self, url: str) -> Iterator[bytes]:
        yield self._bounded(url, MAX_METADATA)

    def _bounded(self, url: str, limit: int) -> bytes:
        if time.monotonic() > self._due:
            raise SourceError(f"the metadata did not come within {PATIENCE:.0f} s; {url!r} was not asked for any more")
        content = self._read(url, limit)
        if len(content) > limit:
            raise SourceError(f"{url!r} is larger than {limit} bytes", permanent=True)
        return content


def _without(view: View, error: SourceError) -> SourceError:
    other = "airgap" if view == "online" else "online"
    return SourceError(
        f"there is no signed metadata for the {view} view: {error.message}",
        missing=True,
        hint=f"the root of trust is of the {view} view; what is only for readers of the {other} view takes the root "
        "of that one, and what was published without --keys takes a lock",
    )


@contextmanager
def updating(root: bytes, state: Path, read: Read, directory: str) -> Iterator[Updater]:
    """The updater of a repository whose metadata lies in `directory`, which no other process runs at the same time."""
    fetcher = Fetcher(read)
    with alone(state), translated(state, fetcher):
        strict_json(root, what="the root of trust")
        yield Updater(str(state), directory, fetcher=fetcher, bootstrap=root)


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Make the directory of a repository's state and keep all other processes out of it."""
    with storing("keep what was seen of a repository in", state):
        make_directory(state, 0o700)
    check_trusted(state)
    with hold((elsewhere(state) or state) / ".lock") as held:
        if not held:  # what two updaters write into one directory is not of one state
            raise StoreError(
                f"{str(state)!r} cannot be locked, and only one process at a time may work there",
                hint="see the warning above; KARTIFACTS_STORE names another place",
            )
        with storing("keep what was seen of a repository in", state):
            for left in state.glob("tmp*"):
                if left.suffix != ".json":  # a killed process wrote it
                    left.unlink(missing_ok=True)
            check_state(state, MAX_METADATA)
        yield


def kept(state: Path, role: str) -> bytes:
    """The metadata of a role that was verified last."""
    return read_regular(state / f"{quote(role, '')}.json", MAX_METADATA)


@contextmanager
def translated(state: Path, fetcher: Fetcher) -> Iterator[None]:
    """Turn whatever tuf and what it builds on raise into errors of ours."""
    try:
        yield
    except KartifactsError:
        raise
    except ExpiredMetadataError as error:
        _raise_expired(error, state, fetcher)
    except DownloadError as error:
        raise SourceError(f"the metadata cannot be read: {error}") from error
    except OSError as error:
        raise store_error(error, "keep what was seen of a repository in", state) from error
    except Exception as error:  # its parsers raise what they like at bytes that nobody has vouched for
        raise _refused(error) from error


def expired(name: str, signed: Signed, now: datetime) -> ExpiredMetadata:
    """The error for metadata that is past its expiry at `now`."""
    when = signed.expires.isoformat().replace("+00:00", "Z")
    return ExpiredMetadata(
        f"{name}.json, version {signed.version}, expired at {when}, and the clock of this machine says "
        f"{now.astimezone(timezone.utc).isoformat(timespec='seconds').replace('+00:00', 'Z')}",
        expired=when,
        hint=CLOCK_HINT,
    )


def _raise_expired(error: ExpiredMetadataError, state: Path, fetcher: Fetcher) -> NoReturn:
    """Say which file it was: the updater has verified all it got before, and judges them in this order."""
    now = datetime.now(timezone.utc)
    for role in (*_JUDGED, *(role for role in fetcher.got if role not in _JUDGED)):
        data = fetcher.got.get(role)
        if data is None and os.path.exists(state / f"{role}.json"):
            data = kept(state, role)
        if data is not None:
            signed = parse_any(data, f"{role}.json").signed
            if signed.is_expired(now):
                raise expired(role, signed, now) from error
    raise ExpiredMetadata(f"signed metadata is expired: {error}", hint=CLOCK_HINT) from error


def _refused(error: Exception) -> VerificationError:
    check_parsed(error)
    text = str(error) or type(error).__name__
    if isinstance(error, UnsignedMetadataError):
        found = _SIGNED_BY.search(text)
        return VerificationError(
            f"the signatures do not suffice: {text}",
            expected=f"{found[2]} keys" if found else "",
            actual=f"{found[1]} keys" if found else "",
            hint="the root of trust, or the one that it led to, does not know the keys that signed this",
        )
    if isinstance(error, BadVersionNumberError):
        return VerificationError(
            f"metadata of another version than was seen before or is listed: {text}",
            hint="the mirror went back to an older state, or is only half of a newer one",
        )
    if isinstance(error, LengthOrHashMismatchError):
        found = _OBSERVED.search(text)
        return VerificationError(
            f"metadata is not what other metadata lists: {text}",
            expected=found[2] if found else "",
            actual=found[1] if found else "",
            hint="the mirror is damaged, or only half of a newer state",
        )
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    return VerificationError(f"the metadata is refused: {text}{cause}")
