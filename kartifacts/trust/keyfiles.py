"""Writes keyring directories: whole files, private keys for their owner only, one change at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from securesystemslib.signer import Key

from kartifacts.errors import ConfigError, StoreError
from kartifacts.files.locking import hold
from kartifacts.files.reading import read_regular
from kartifacts.model.layout import View
from kartifacts.trust.keygrants import Grant
from kartifacts.trust.keyring import BUCKETS, KEYS, Entry, Keyring, Listed
from kartifacts.trust.keysigner import Secret, check_uri, new_private_key
from kartifacts.trust.keysound import check_sound

_LOCK = ".lock"
_PRIVATE = "private"
_PARTIAL = ".partial-"
_SURELY_DEAD = 60.0  # seconds
_MAX_FILE = 5_000_000


class Plan(NamedTuple):
    """The keys that a role is to have: `threshold` of those in `signers`, or of `files` new ones."""

    threshold: int = 1
    files: int = 1
    signers: tuple[tuple[str, Key], ...] = ()  # URI, empty if it is held elsewhere, and public key


class Made(NamedTuple):
    """Keys that are in a keyring since just now, and how many of them have to sign."""

    entries: dict[str, Entry]
    grant: Grant


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill that becomes `path` at the end, so that nothing half made ever stands there."""
    with faults("make", path):
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(
                f"{str(path)!r} exists already: a keyring is never overwritten",
                hint="`kartifacts keys export --replace` brings an earlier export up to date",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        yield place
        with faults("make", path):
            place.rename(path)  # refused if somebody else was faster
            _sync(path.parent)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


@contextmanager
def changing(path: Path, secret: Secret | None) -> Iterator[Keyring]:
    """A keyring that nobody else changes in the meantime; a change that fails is taken back."""
    Keyring.load(path)
    with hold(path / _LOCK):
        keyring = Keyring.load(path, secret=secret)
        check_sound(keyring)
        _tidy(path)
        before, listed = set(_made_of(keyring)), read(path / KEYS)
        try:
            yield keyring
        except BaseException:
            with faults("take back a change of", path):
                _take_back(path, before, listed, set(keyring.listed.keys))
            raise


def _tidy(path: Path) -> None:
    """Remove what writers that were killed have left; younger files may be of who signs just now."""
    with faults("tidy", path):
        for left in path.glob(f"**/{_PARTIAL}*"):
            if time.time() - left.lstat().st_mtime > _SURELY_DEAD:
                left.unlink(missing_ok=True)


def _made_of(keyring: Keyring) -> list[Path]:
    return [*keyring.files(), *(keyring.path / _PRIVATE).glob("*-????????.pem")]


def _take_back(path: Path, before: set[Path], listed: bytes, keys: set[str]) -> None:
    """Remove what came since, in the opposite order of its making; somebody may have put back a key that is known."""
    since = [each for each in _made_of(Keyring.load(path)) if each not in before]
    for each in since:
        if each.parent.name != _PRIVATE:
            each.unlink(missing_ok=True)
    if read(path / KEYS) != listed:
        replace(path / KEYS, listed)
    known = {keyid[:8] for keyid in keys}
    for each in since:
        if each.parent.name == _PRIVATE and each.stem[-8:] not in known:
            each.unlink(missing_ok=True)


def make_keys(directory: Path, label: str, plan: Plan, passphrase: str | None) -> Made:
    """Make the private keys of a role, or note the signers that it was given."""
    count = len(plan.signers) or plan.files
    if not 1 <= plan.threshold <= count:
        raise ConfigError(f"role {label!r} cannot need {plan.threshold} signatures of {count} keys")
    entries: dict[str, Entry] = {}
    keys: list[Key] = []
    for uri, key in plan.signers:
        if uri:
            check_uri(uri)
        entries[key.keyid] = Entry(key.to_dict(), uri)
        keys.append(key)
    for _ in range(0 if plan.signers else count):
        pem, public = new_private_key(passphrase)
        name = f"{_PRIVATE}/{label.replace(':', '-')}-{public.keyid[:8]}.pem"
        create(directory / name, pem, private=True)
        entries[public.keyid] = Entry(public.to_dict(), f"file2:{name}")
        keys.append(public)
    if len(entries) != len(keys):
        raise ConfigError(f"role {label!r} was given the same key twice")
    return Made(entries, Grant(tuple(keys), plan.threshold))


def write_listed(directory: Path, listed: Listed) -> None:
    """Replace keys.json."""
    content = json.dumps(msgspec.to_builtins(listed), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    with faults("write", directory / KEYS):
        os.replace(_written(directory / KEYS, content, 0o644), directory / KEYS)
        _sync(directory)


def create(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file that was not there."""
    with faults("write", path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = _written(path, content, 0o600 if private else 0o644)
        try:
            os.link(written, path)
        except FileExistsError:
            raise ConfigError(f"{str(path)!r} exists already, and is never overwritten") from None
        finally:
            written.unlink()
        _sync(path.parent)


def replace(path: Path, content: bytes, *, private: bool = False) -> None:
    """Give a file other content, as when signatures came to it."""
    with faults("write", path):
        os.replace(_written(path, content, 0o600 if private else 0o644), path)
        _sync(path.parent)


def note_bucket(keyring: Keyring, name: str, versions: Mapping[View, int]) -> None:
    """Remember which timestamps a keyring has made public in a bucket."""
    noted = {**keyring.buckets(), name: versions}
    replace(keyring.path / BUCKETS, json.dumps(noted, indent=1, ensure_ascii=False).encode() + b"\n")


def put(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file, whether it was there or not."""
    (replace if os.path.lexists(path) else create)(path, content, private=private)


def remove(path: Path) -> None:
    with faults("remove", path):
        path.unlink(missing_ok=True)


def read(path: Path) -> bytes:
    with faults("read", path):
        return read_regular(path, _MAX_FILE)


def held(keyring: Keyring, keys: Iterable[Key]) -> list[Key]:
    return [key for key in keys if keyring.holds(key.keyid)]


def _written(path: Path, content: bytes, mode: int) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)  # of mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def faults(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {verb} {str(path)!r}: {error.strerror or error}") from error
