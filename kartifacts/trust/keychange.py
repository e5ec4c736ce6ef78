"""Changes what a keyring says: libraries come and go, keys are exchanged in two steps, files are signed anew.

A change writes private keys first, keys.json then, and the signed file last, each whole or not at all: whoever is
killed between them leaves keys that nothing names, and nothing else; one that fails takes them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from securesystemslib.signer import Key

from kartifacts.errors import ConfigError
from kartifacts.model.layout import VIEWS, View
from kartifacts.trust import keytravel
from kartifacts.trust.keyceremony import check_separate
from kartifacts.trust.keyfiles import Made, Plan, changing, create, held, make_keys, write_listed
from kartifacts.trust.keygrants import Grant, grants_of, root_of, targets_of
from kartifacts.trust.keyring import Exchange, Keyring, is_per_view, label
from kartifacts.trust.keysigner import Secret
from kartifacts.trust.released import TOP_LEVEL, check_library
from kartifacts.trust.signed import parse_any


class Staged(NamedTuple):
    """A signed file that waits for its publication."""

    path: Path
    lacks: str  # of signatures; empty: nothing


# -- libraries ---------------------------------------------------------------------------------------------------------


def add_library(
    path: Path,
    name: str,
    plan: Plan,
    *,
    now: datetime,
    passphrase: str | None = None,
    secret: Secret | None = None,
) -> list[Staged]:
    """Stage targets that give a library a role of its own."""
    with changing(path, secret) as keyring:
        libraries = keyring.libraries()
        if check_library(name) in libraries:
            raise ConfigError(f"library {name!r} has a role already", hint=f"kartifacts keys rotate {path} {name}")
        _check_passphrase(keyring, plan, passphrase)
        made = make_keys(path, name, plan, passphrase)
        keyring = _with(keyring, made, {}, passphrase)
        return [_stage_targets(keyring, {**libraries, name: made.grant}, now)]


def remove_library(path: Path, name: str, *, now: datetime, secret: Secret | None = None) -> list[Staged]:
    """Stage targets that no longer know a library: from then on readers refuse its releases."""
    with changing(path, secret) as keyring:
        libraries = keyring.libraries()
        if name not in libraries:
            raise ConfigError(f"no library {name!r} has a role; there are: {', '.join(libraries) or 'none'}")
        del libraries[name]
        return [_stage_targets(keyring, libraries, now)]


# -- rotation ----------------------------------------------------------------------------------------------------------


def rotate(
    path: Path,
    role: str,
    *,
    now: datetime,
    views: Sequence[View] = VIEWS,
    only: Sequence[str] = (),
    signers: Sequence[tuple[str, Key]] = (),
    passphrase: str | None = None,
    secret: Secret | None = None,
) -> list[Staged]:
    """Stage the first step of an exchange of keys: old and new ones are good together, until `finish`.

    The keys of a root need no second step: a root is signed by the keys of the one before and its own.

    Args:
        views: of a root, snapshot or timestamp.
        only: beginnings of ids of the keys to exchange; default: all of the role.
        signers: URIs and public keys of the new ones; default: as many new files.
    """
    staged = []
    with changing(path, secret) as keyring:
        for view in _views(role, views):
            name = label(role, view)
            if keyring.exchange(role, view) is not None:
                raise ConfigError(
                    f"the keys of {name!r} are being exchanged already",
                    hint=f"kartifacts keys rotate {path} {role} --finish",
                )
            grant = keyring.grant(role, view)
            old = _chosen(grant, only, name)
            plan = Plan(min(grant.threshold, len(signers) or len(old)), len(old), tuple(signers))
            _check_passphrase(keyring, plan, passphrase)
            made = make_keys(path, name, plan, passphrase)
            if again := {key.keyid for key in grant.keys} & set(made.entries):
                raise ConfigError(f"key {min(again)[:8]} is a key of {name!r} already")
            kept = [key for key in grant.keys if key not in old]
            if len(kept) + len(made.grant.keys) < grant.threshold:
                raise ConfigError(f"role {name!r} needs {grant.threshold} keys; {len(made.grant.keys)} new ones came")
            exchange = Exchange([key.keyid for key in old], list(made.entries))
            keyring = _with(keyring, made, {} if role == "root" else {name: exchange}, passphrase)
            keys = (*(kept if role == "root" else grant.keys), *made.grant.keys)
            staged += _stage_grant(keyring, role, view, Grant(keys, grant.threshold), now)
            if role == "targets":  # signed by the new keys too, so that the old ones can be taken away
                staged.append(_stage_targets(keyring, keyring.libraries(), now))
    return staged


def finish(
    path: Path, role: str, *, now: datetime, views: Sequence[View] = VIEWS, secret: Secret | None = None
) -> list[Staged]:
    """Stage the second step of an exchange of keys: the old ones are good no more."""
    staged = []
    with changing(path, secret) as keyring:
        exchanges = {view: keyring.exchange(role, view) for view in _views(role, views)}
        if not any(exchanges.values()):
            raise ConfigError(
                f"no exchange of the keys of {role!r} is under way", hint=f"kartifacts keys rotate {path} {role}"
            )
        for view, exchange in exchanges.items():
            if exchange is not None:
                grant = keyring.grant(role, view)
                left = tuple(key for key in grant.keys if key.keyid not in exchange.old)
                if left != grant.keys:  # or it was staged, and we were killed after that
                    staged += _stage_grant(keyring, role, view, Grant(left, grant.threshold), now)
                others = {name: each for name, each in keyring.listed.exchanges.items() if name != label(role, view)}
                keyring = _relisted(keyring, exchanges=others)
    return staged


def renew(
    path: Path, role: str, *, now: datetime, views: Sequence[View] = VIEWS, secret: Secret | None = None
) -> list[Staged]:
    """Stage the next version of the roots or the targets, with the same keys and a new expiry."""
    with changing(path, secret) as keyring:
        if role == "targets":
            return [_stage_targets(keyring, keyring.libraries(), now)]
        if role == "root":
            return [_stage_root(keyring, view, grants_of(keyring.newest_root(view)), now) for view in views]
    raise ConfigError(
        f"{role!r} is not renewed by hand: expected root or targets",
        hint="`kartifacts timestamp refresh` renews snapshot and timestamp; a library is renewed by its next release",
    )


def _views(role: str, views: Sequence[View]) -> Sequence[View]:
    if is_per_view(role):
        return views
    if set(views) != set(VIEWS):
        raise ConfigError(f"the keys of {role!r} serve both views: they cannot be exchanged for {views[0]!r} only")
    return VIEWS[:1]


def _chosen(grant: Grant, only: Sequence[str], name: str) -> list[Key]:
    if not only:
        return list(grant.keys)
    chosen = [key for key in grant.keys if key.keyid.startswith(tuple(only))]
    for beginning in only:
        if sum(key.keyid.startswith(beginning) for key in chosen) != 1:
            ids = ", ".join(key.keyid[:8] for key in grant.keys)
            raise ConfigError(f"{beginning!r} does not name one key of {name!r}; its keys: {ids}")
    return chosen


# -- staging -----------------------------------------------------------------------------------------------------------


def _stage_grant(keyring: Keyring, role: str, view: View, grant: Grant, now: datetime) -> list[Staged]:
    """Say in the files that name a role who signs for it from now on."""
    if role not in TOP_LEVEL:
        return [_stage_targets(keyring, {**keyring.libraries(), role: grant}, now)]
    return [
        _stage_root(keyring, each, {**grants_of(keyring.newest_root(each)), role: grant}, now)
        for each in ((view,) if is_per_view(role) else VIEWS)
    ]


def _stage_root(keyring: Keyring, view: View, roles: Mapping[str, Grant], now: datetime) -> Staged:
    before = keyring.newest_root(view)
    both = {key.keyid: key for grants in (grants_of(before), roles) for key in grants["root"].keys}
    others = {each: grants_of(keyring.newest_root(each)) for each in VIEWS if each != view}
    check_separate(
        {label(role, each): grant for each, grants in {**others, view: roles}.items() for role, grant in grants.items()}
    )
    version = parse_any(before, "the newest root").signed.version + 1
    signers = [keyring.signer(key) for key in held(keyring, both.values())]
    content = root_of(roles, view=view, version=version, signers=signers, now=now)
    path = keyring.file(view, f"{version}.root.json")
    create(path, content)
    return Staged(path, lacks(keyring, view, content))


def _stage_targets(keyring: Keyring, libraries: Mapping[str, Grant], now: datetime) -> Staged:
    version = parse_any(keyring.targets(), "the newest targets").signed.version + 1
    content = targets_of(libraries, version=version, signers=keyring.available("targets"), now=now)
    path = keyring.file("online", f"{version}.targets.json")
    create(path, content)
    return Staged(path, lacks(keyring, "online", content))


def lacks(keyring: Keyring, view: View, content: bytes) -> str:
    """Which signatures a staged root or targets file still needs; empty if none."""
    signed = parse_any(content, "the staged file").signed
    if signed.type == "targets":
        delegators = [keyring.newest_root(each) for each in VIEWS]
    else:
        before = [keyring.numbered_root(view, signed.version - 1)] if signed.version > 1 else []
        delegators = [*before, content]
    return "; ".join(keytravel.lacks(content, delegators))


def _check_passphrase(keyring: Keyring, plan: Plan, passphrase: str | None) -> None:
    if passphrase is None and not plan.signers and keyring.encrypted:
        raise ConfigError(
            f"the private keys of {str(keyring.path)!r} are encrypted, and no passphrase was given for new ones",
            hint="pass --encrypt, or --passphrase-file",
        )


def _with(keyring: Keyring, made: Made, exchanges: Mapping[str, Exchange], passphrase: str | None) -> Keyring:
    before = keyring.listed
    return _relisted(
        keyring,
        keys={**before.keys, **made.entries},
        exchanges={**before.exchanges, **exchanges},
        encrypted=before.encrypted or passphrase is not None,
    )


def _relisted(keyring: Keyring, **changes: object) -> Keyring:
    listed = msgspec.structs.replace(keyring.listed, **changes)
    write_listed(keyring.path, listed)
    return keyring.with_listed(listed)
