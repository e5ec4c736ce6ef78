"""Writes keyring directories: whole files, private keys for their owner only, one change at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from securesystemslib.signer import Key

from kartifacts.errors import ConfigError, StoreError
from kartifacts.files.locking import hold
from kartifacts.files.reading import read_regular
from kartifacts.trust.keygrants import Grant
from kartifacts.trust.keyring import KEYS, Entry, Exchange, Keyring, Listed
from kartifacts.trust.keysigner import Secret, check_uri, new_private_key

_LOCK = ".lock"
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
            raise ConfigError(f"{str(path)!r} exists already: a keyring is never overwritten")
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
    """A keyring that nobody else changes in the meantime."""
    Keyring.load(path)
    with hold(path / _LOCK):
        yield Keyring.load(path, secret=secret)


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
        name = f"private/{label.replace(':', '-')}-{public.keyid[:8]}.pem"
        create(directory / name, pem, private=True)
        entries[public.keyid] = Entry(public.to_dict(), f"file2:{name}")
        keys.append(public)
    if len(entries) != len(keys):
        raise ConfigError(f"role {label!r} was given the same key twice")
    return Made(entries, Grant(tuple(keys), plan.threshold))


def write_listed(directory: Path, keys: Mapping[str, Entry], exchanges: Mapping[str, Exchange]) -> Listed:
    """Replace keys.json."""
    listed = Listed(1, dict(keys), dict(exchanges))
    content = json.dumps(msgspec.to_builtins(listed), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    with faults("write", directory / KEYS):
        os.replace(_written(directory / KEYS, content, 0o644), directory / KEYS)
        _sync(directory)
    return listed


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


def replace(path: Path, content: bytes) -> None:
    """Give a file other content, as when signatures came to it."""
    with faults("write", path):
        os.replace(_written(path, content, 0o644), path)
        _sync(path.parent)


def read(path: Path) -> bytes:
    with faults("read", path):
        return read_regular(path, _MAX_FILE)


def held(keyring: Keyring, keys: Iterable[Key]) -> list[Key]:
    return [key for key in keys if keyring.holds(key.keyid)]


def _written(path: Path, content: bytes, mode: int) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=".partial-", dir=path.parent)  # of mode 0600
    with open(descriptor, "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.fsync(file.fileno())
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
