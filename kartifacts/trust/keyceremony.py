"""Begins keyrings: the ceremony that makes all keys, and the copy that holds only those of a machine that publishes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from securesystemslib.signer import Signer

from kartifacts.errors import ConfigError
from kartifacts.model.layout import VIEWS, View
from kartifacts.trust.keyfiles import (
    Plan,
    changing,
    create,
    held,
    make_keys,
    new_directory,
    put,
    read,
    remove,
    write_listed,
)
from kartifacts.trust.keygrants import Grant, root_of, targets_of
from kartifacts.trust.keyring import BUCKETS, Entry, Keyring, Listed, is_per_view, label
from kartifacts.trust.keysigner import Secret
from kartifacts.trust.keysound import check_sound
from kartifacts.trust.released import TOP_LEVEL, check_library

DEFAULTS = {"root": Plan(2, 3), "targets": Plan(2, 3), "snapshot": Plan(), "timestamp": Plan()}


def init(
    path: Path,
    libraries: Sequence[str],
    plans: Mapping[str, Plan],
    *,
    now: datetime,
    passphrase: str | None = None,
    secret: Secret | None = None,
) -> Keyring:
    """Make a keyring with the first root of both views and the first targets.

    Args:
        plans: by label (``targets``, ``online:timestamp``, or a library's name); other roles get the defaults.
        passphrase: encrypts the private keys; None leaves their secrecy to the file system.
        secret: asked for what other signers need.

    Raises:
        ConfigError: there is something at `path` already, or a plan makes no sense.
    """
    labels = {label(role, view): plan for view in VIEWS for role, plan in DEFAULTS.items()}
    labels |= {check_library(name): Plan() for name in libraries}
    if unknown := sorted(set(plans) - set(labels)):
        raise ConfigError(f"no role {unknown[0]!r} is made here; roles: {', '.join(labels)}")
    with new_directory(path) as place:
        made = {name: make_keys(place, name, plans.get(name, plan), passphrase) for name, plan in labels.items()}
        grants = {name: keys.grant for name, keys in made.items()}
        check_separate(grants)
        entries = {keyid: entry for keys in made.values() for keyid, entry in keys.entries.items()}
        write_listed(place, Listed(1, entries, encrypted=passphrase is not None))
        keyring = Keyring.load(place, secret=_asking(place, passphrase, secret))
        for view in VIEWS:
            roles = {role: grants[label(role, view)] for role in TOP_LEVEL}
            root = root_of(roles, view=view, version=1, signers=_signers(keyring, roles["root"]), now=now)
            create(keyring.file(view, "1.root.json"), root)
        roles = {name: grants[name] for name in libraries}
        targets = targets_of(roles, version=1, signers=_signers(keyring, grants["targets"]), now=now)
        create(keyring.file("online", "1.targets.json"), targets)
    return Keyring.load(path, secret=secret)


def export(
    keyring: Keyring, out: Path, roles: Sequence[str], views: Sequence[View] = VIEWS, *, replace: bool = False
) -> Keyring:
    """Make a keyring at `out` that holds of the private keys only those of `roles`, for a machine that publishes.

    Args:
        replace: bring an earlier export at `out` up to that; who signs by it meanwhile goes on.
    """
    check_sound(keyring)
    if not roles:
        raise ConfigError("an export holds the private keys of some roles: none was named")
    wanted: dict[str, Entry] = {}
    for role in roles:
        for view in views if is_per_view(role) else VIEWS[:1]:
            keys = held(keyring, keyring.grant(role, view).keys)
            if not keys:
                raise ConfigError(f"the keyring {str(keyring.path)!r} holds no private key of {label(role, view)!r}")
            wanted |= {key.keyid: keyring.listed.keys[key.keyid] for key in keys}
    listed = Listed(1, wanted, keyring.listed.exchanges, keyring.encrypted)
    if replace and os.path.lexists(out):
        _replace_export(keyring, out, listed)
    else:
        with new_directory(out) as place:
            _copy_private(keyring, place, wanted)
            write_listed(place, listed)
            _copy_signed(keyring, place)
    return Keyring.load(out)


def _replace_export(keyring: Keyring, out: Path, listed: Listed) -> None:
    with changing(out, None) as old:
        _check_loses_nothing(keyring, old, listed)
        _copy_private(keyring, out, listed.keys)
        # Old and new keys are there together, until the roots that name the new ones are.
        write_listed(out, msgspec.structs.replace(listed, keys={**old.listed.keys, **listed.keys}))
        _copy_signed(keyring, out)
        write_listed(out, listed)
    for keyid in set(old.listed.keys) - set(listed.keys):
        private = old.private_file(keyid)
        if private is not None and private.is_relative_to(out):
            remove(private)


def _check_loses_nothing(keyring: Keyring, old: Keyring, listed: Listed) -> None:
    """Refuse to replace what is no earlier export of a keyring, or holds what that does not."""
    out = f"{str(old.path)!r} cannot be replaced by an export of {str(keyring.path)!r}"
    if os.path.samefile(old.path, keyring.path):
        raise ConfigError(f"{out}: it is that keyring itself")
    if any(old.root(view) != keyring.root(view) for view in VIEWS):
        raise ConfigError(f"{out}: it is of another repository")
    held = [keyid for keyid in old.listed.keys if old.holds(keyid)]
    if alone := [keyid for keyid in held if not keyring.holds(keyid)]:
        raise ConfigError(f"{out}: the private key {alone[0][:8]} lies there only")
    for name, grant in keyring.grants().items():
        if any(key.keyid in held and key.keyid not in listed.keys for key in grant.keys):
            raise ConfigError(
                f"{out}: it holds keys of {name!r} too", hint="name that role too, or export to another directory"
            )
    names = {path.relative_to(keyring.path) for path in keyring.files()}
    if newer := sorted({path.relative_to(old.path) for path in old.files()} - names):
        raise ConfigError(f"{out}: {newer[0]} lies there only", hint="copy it into the keyring that is exported")


def _copy_private(keyring: Keyring, place: Path, wanted: Iterable[str]) -> None:
    for keyid in wanted:
        private = keyring.private_file(keyid)
        if private is not None and private.is_relative_to(keyring.path):
            put(place / private.relative_to(keyring.path), read(private), private=True)


def _copy_signed(keyring: Keyring, place: Path) -> None:
    buckets = [keyring.path / BUCKETS] if keyring.buckets() else []
    for path in (*buckets, *keyring.files()):
        put(place / path.relative_to(keyring.path), read(path))


def check_separate(grants: Mapping[str, Grant]) -> None:
    """Refuse a key that both views know: the long-lived files of one would be good for readers of the other."""
    known: dict[str, str] = {}
    for name, grant in grants.items():
        view, colon, _ = name.partition(":")
        for key in grant.keys if colon else ():
            if known.setdefault(key.keyid, view) != view:
                raise ConfigError(
                    f"key {key.keyid[:8]} of {name!r} is a key of the other view too",
                    hint="give each view keys of its own: --signer online:ROLE=... and --signer airgap:ROLE=...",
                )


def _signers(keyring: Keyring, grant: Grant) -> list[Signer]:
    return [keyring.signer(key) for key in held(keyring, grant.keys)]


def _asking(place: Path, passphrase: str | None, secret: Secret | None) -> Secret | None:
    """Answers for the keys that were just made, and asks for others."""
    if passphrase is None:
        return secret

    def answer(name: str) -> str:
        if secret is None or str(place) in name:
            return passphrase
        return secret(name)

    return answer
