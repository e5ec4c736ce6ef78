"""Begins keyrings: the ceremony that makes all keys, and the copy that holds only those of a machine that publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from securesystemslib.signer import Signer

from kartifacts.errors import ConfigError
from kartifacts.model.layout import View
from kartifacts.trust.keyfiles import Plan, create, held, make_keys, new_directory, read, write_listed
from kartifacts.trust.keygrants import Grant, root_of, targets_of
from kartifacts.trust.keyring import VIEWS, Entry, Keyring, is_per_view, label
from kartifacts.trust.keysigner import Secret
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
        write_listed(place, {keyid: entry for keys in made.values() for keyid, entry in keys.entries.items()}, {})
        keyring = Keyring.load(place, secret=_asking(place, passphrase, secret))
        for view in VIEWS:
            roles = {role: grants[label(role, view)] for role in TOP_LEVEL}
            root = root_of(roles, view=view, version=1, signers=_signers(keyring, roles["root"]), now=now)
            create(keyring.file(view, "1.root.json"), root)
        roles = {name: grants[name] for name in libraries}
        targets = targets_of(roles, version=1, signers=_signers(keyring, grants["targets"]), now=now)
        create(keyring.file("online", "1.targets.json"), targets)
    return Keyring.load(path, secret=secret)


def export(keyring: Keyring, out: Path, roles: Sequence[str], views: Sequence[View] = VIEWS) -> Keyring:
    """Make a keyring at `out` that holds of the private keys only those of `roles`, for a machine that publishes."""
    wanted: dict[str, Entry] = {}
    for role in roles:
        for view in views if is_per_view(role) else VIEWS[:1]:
            keys = held(keyring, keyring.grant(role, view).keys)
            if not keys:
                raise ConfigError(f"the keyring {str(keyring.path)!r} holds no private key of {label(role, view)!r}")
            wanted |= {key.keyid: keyring.listed.keys[key.keyid] for key in keys}
    with new_directory(out) as place:
        for keyid in wanted:
            private = keyring.private_file(keyid)
            if private is not None and private.is_relative_to(keyring.path):
                create(place / private.relative_to(keyring.path), read(private), private=True)
        write_listed(place, wanted, {})
        for path in keyring.files():
            create(place / path.relative_to(keyring.path), read(path))
    return Keyring.load(out)


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
