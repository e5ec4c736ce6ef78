"""What the holders of keys do: make them, exchange them, sign by them, and keep what is public from expiring."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kartifacts.cli.flows.shared import Report
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.layout import VIEWS, View
from kartifacts.model.manifest import Synced

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

    from kartifacts.publish.buckets import Bucket
    from kartifacts.trust.keychange import Staged
    from kartifacts.trust.keyfiles import Plan
    from kartifacts.trust.keyring import Keyring
    from kartifacts.trust.keysigner import Secret

SOON = timedelta(days=60)
_SIGN = "kartifacts keys sign adds signatures; then publish again"


def now() -> datetime:
    return datetime.now(timezone.utc)


def open_keyring(path: Path, secret: Secret | None = None) -> Keyring:
    """A keyring, by which to sign or publish."""
    from kartifacts.trust.keyring import Keyring

    return Keyring.load(path, secret=secret)


def is_encrypted(path: Path) -> bool:
    """Whether new private keys of a keyring have to be encrypted."""
    return open_keyring(path).encrypted


# -- making and changing -----------------------------------------------------------------------------------------------


def init(
    path: Path,
    *,
    libraries: Sequence[str],
    thresholds: Sequence[str],
    signers: Sequence[str],
    passphrase: str | None,
    secret: Secret | None,
) -> Report:
    from kartifacts.trust.keyceremony import init

    plans = _plans(thresholds, signers)
    init(path, libraries, plans, now=now(), passphrase=passphrase, secret=secret)
    return show(path)


def _plans(thresholds: Sequence[str], signers: Sequence[str]) -> dict[str, Plan]:
    from kartifacts.trust.keyceremony import DEFAULTS
    from kartifacts.trust.keyfiles import Plan

    given: dict[str, list[tuple[str, Key]]] = {}
    for text in signers:
        name, value = _pair(text, "--signer", "ROLE=URI,PUBLIC")
        for each in _labels(name):
            given.setdefault(each, []).append(signer_of(value))
    plans = {}
    for each, found in given.items():
        usual = DEFAULTS.get(each.partition(":")[2] or each, Plan())
        plans[each] = Plan(min(usual.threshold, len(found)), len(found), tuple(found))
    for text in thresholds:
        name, value = _pair(text, "--threshold", "ROLE=M/N")
        for each in _labels(name):
            plans[each] = _with_threshold(value, plans[each].signers if each in plans else ())
    return plans


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"{option} {text!r}: expected {form}, where ROLE may begin with online: or airgap:")
    return name, value


def _labels(name: str) -> list[str]:
    """A role as it is called in a keyring; one of a view, named without it, is that of both."""
    from kartifacts.trust.keyring import is_per_view, label

    return [label(name, view) for view in VIEWS] if is_per_view(name) else [name]


def _with_threshold(text: str, signers: tuple[tuple[str, Key], ...] = ()) -> Plan:
    from kartifacts.trust.keyfiles import Plan

    match = re.fullmatch(r"([1-9][0-9]{0,2})/([1-9][0-9]{0,2})", text)
    if match is None:
        raise ConfigError(f"{text!r} is no threshold: expected M/N, as in 2/3")
    threshold, count = int(match[1]), int(match[2])
    if signers and count != len(signers):
        raise ConfigError(f"a threshold of {text} was asked for, and {len(signers)} signers were given")
    return Plan(threshold, count, signers)


def signer_of(text: str) -> tuple[str, Key]:
    """The URI and the public key that ``URI,PUBLIC`` names."""
    from kartifacts.trust.keysigner import check_uri, read_public

    uri, comma, public = text.rpartition(",")
    if not comma or not public:
        raise ConfigError(f"{text!r}: expected URI,PUBLIC; the URI is empty for a key that is held elsewhere")
    if uri and check_uri(uri) == "file2":
        file = Path(uri.removeprefix("file2:"))
        if file.is_absolute() and not file.exists():
            raise ConfigError(f"{text!r}: there is no private key {str(file)!r}", hint="empty, if it is held elsewhere")
    return uri, read_public(public, uri)


def add_library(
    path: Path,
    name: str,
    *,
    threshold: str | None,
    signers: Sequence[str],
    passphrase: str | None,
    secret: Secret | None,
) -> Report:
    from kartifacts.trust import keychange
    from kartifacts.trust.keyfiles import Plan

    given = tuple(signer_of(text) for text in signers)
    plan = _with_threshold(threshold, given) if threshold else Plan(1, len(given) or 1, given)
    return _staged(keychange.add_library(path, name, plan, now=now(), passphrase=passphrase, secret=secret))


def remove_library(path: Path, name: str, *, secret: Secret | None) -> Report:
    from kartifacts.trust import keychange

    return _staged(keychange.remove_library(path, name, now=now(), secret=secret))


def rotate(
    path: Path,
    role: str,
    *,
    views: Sequence[View],
    only: Sequence[str],
    signers: Sequence[str],
    finish: bool,
    passphrase: str | None,
    secret: Secret | None,
) -> Report:
    from kartifacts.trust import keychange

    if finish:
        if only or signers:
            raise ConfigError("--finish takes the old keys away: --key and --signer belong to the first step")
        return _staged(keychange.finish(path, role, now=now(), views=views, secret=secret))
    given = [signer_of(text) for text in signers]
    return _staged(
        keychange.rotate(
            path, role, now=now(), views=views, only=only, signers=given, passphrase=passphrase, secret=secret
        )
    )


def renew(path: Path, role: str, *, views: Sequence[View], secret: Secret | None) -> Report:
    from kartifacts.trust import keychange

    return _staged(keychange.renew(path, role, now=now(), views=views, secret=secret))


def _staged(staged: Sequence[Staged]) -> Report:
    return {"staged": [{"file": str(each.path), "lacks": each.lacks} for each in staged]}


def export(path: Path, out: Path, *, roles: Sequence[str], views: Sequence[View], replace: bool) -> Report:
    from kartifacts.trust.keyceremony import export

    export(open_keyring(path), out, roles, views, replace=replace)
    return show(out)


def sign(
    file: Path, *, keys: Sequence[str], keyring: Path | None, copies: Sequence[Path], secret: Secret | None
) -> Report:
    """Add signatures to a root or targets file: by keys that are named, or by all of a keyring that it asks for."""
    from kartifacts.trust.keyfiles import read
    from kartifacts.trust.keysigner import open_private, open_signer
    from kartifacts.trust.keytravel import sign_file
    from kartifacts.trust.signed import parse_any

    if not (keys or keyring or copies):
        raise ConfigError("nobody to sign", hint="name a private key by --key, a keyring by --keys, a copy by --merge")
    signers: list[Signer] = []
    for text in keys:
        if re.match(r"[a-z0-9]+:", text):
            uri, key = signer_of(text)
            signers.append(open_signer(uri, key, directory=Path.cwd(), secret=secret))
        else:
            signers.append(open_private(Path(text), secret))
    ring = open_keyring(keyring, secret) if keyring else None

    def choose(wanted: Mapping[str, Key]) -> list[Signer]:
        held = [ring.signer(key) for key in wanted.values() if ring.holds(key.keyid)] if ring else []
        if ring and not (held or signers or copies):
            raise ConfigError(f"the keyring {str(keyring)!r} holds no private key that {str(file)!r} asks for")
        return [*signers, *held]

    lacks = sign_file(file, choose, copies=copies)
    metadata = parse_any(read(file), str(file))
    return {
        "file": str(file),
        "role": metadata.signed.type,
        "version": metadata.signed.version,
        "expires": _iso(metadata.signed.expires),
        "signatures": sorted(metadata.signatures),
        "lacks": lacks,
    }


# -- looking -----------------------------------------------------------------------------------------------------------


def show(path: Path) -> Report:
    """Roles, who signs for them, which private keys are here, and what was signed."""
    from kartifacts.trust.keychange import lacks
    from kartifacts.trust.keyring import is_per_view, label
    from kartifacts.trust.released import TOP_LEVEL
    from kartifacts.trust.signed import parse_any

    keyring = open_keyring(path)
    roles = {}
    for role in (*TOP_LEVEL, *keyring.libraries()):
        for view in VIEWS if is_per_view(role) else VIEWS[:1]:
            grant, name = keyring.grant(role, view), label(role, view)
            exchange = keyring.exchange(role, view)
            roles[name] = {
                "threshold": grant.threshold,
                "keys": [
                    {
                        "id": key.keyid,
                        "uri": entry.uri if (entry := keyring.listed.keys.get(key.keyid)) else "",
                        "here": keyring.holds(key.keyid),
                        "retiring": exchange is not None and key.keyid in exchange.old,
                    }
                    for key in grant.keys
                ],
            }
    files = []
    for view in VIEWS:
        for name, content in keyring.staged(view).items():
            if view == "online" or not name.endswith(".targets.json"):
                signed = parse_any(content, name).signed
                place = str(keyring.file(view, name).relative_to(keyring.path))
                lack = lacks(keyring, view, content)
                files.append({"file": place, "expires": _iso(signed.expires), "lacks": lack})
    return {"keyring": str(path), "roles": roles, "files": files}


def root(path: Path, view: View) -> bytes:
    """The root that readers of a view begin to trust with."""
    from kartifacts.trust.keychange import lacks

    keyring = open_keyring(path)
    content = keyring.root(view)
    if missing := lacks(keyring, view, content):
        raise VerificationError(
            f"readers would refuse this root: {missing}", hint="kartifacts keys sign adds signatures"
        )
    return content


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


# -- in public ---------------------------------------------------------------------------------------------------------


def publish_staged(
    bucket: str, path: Path, settings: Settings, *, single_writer: bool, secret: Secret | None
) -> Report:
    """Make the staged roots and targets public; those that cannot be are an error, after all others were."""
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.commit import publish_staged
    from kartifacts.trust.keychange import lacks
    from kartifacts.trust.signed import parse_any

    keyring = open_keyring(path, secret)
    opened = open_bucket(bucket, settings, single_writer=single_writer)
    for view in VIEWS:
        if keyring.available("timestamp", view=view) and (missing := lacks(keyring, view, keyring.root(view))):
            raise VerificationError(f"nothing was published: {missing}", hint=_SIGN)
    opened.preflight()
    seen = publish_staged(opened, keyring)
    left = []
    for view, synced in seen.items():
        for content, public in ((keyring.newest_root(view), synced.root), (keyring.targets(), synced.targets)):
            signed = parse_any(content, "a staged file").signed
            if signed.version > public:
                left.append(lacks(keyring, view, content) or f"{signed.version}.{signed.type}.json of the view {view}")
    if left:
        raise VerificationError(f"not public: {'; '.join(dict.fromkeys(left))}", hint=_SIGN)
    return {"bucket": opened.name, "views": {view: _versions(synced) for view, synced in seen.items()}}


def refresh_timestamp(
    bucket: str,
    path: Path,
    views: Sequence[View],
    settings: Settings,
    *,
    libraries: Sequence[str],
    clock_is_right: bool,
    single_writer: bool,
    secret: Secret | None,
) -> Report:
    """Sign the timestamps of views anew, and what grows old, and say what expires when.

    Args:
        views: none means those whose key is in the keyring.
        libraries: whose roles are signed anew however old they are.
    """
    from kartifacts.publish.buckets import open_bucket
    from kartifacts.publish.commit import refresh_timestamp

    keyring = open_keyring(path, secret)
    chosen = list(views) or [view for view in VIEWS if keyring.available("timestamp", view=view)] or ["online"]
    for view in chosen:
        keyring.signers("timestamp", view=view)
    opened = open_bucket(bucket, settings, single_writer=single_writer)
    seen = refresh_timestamp(opened, keyring, chosen, libraries=libraries, clock_is_right=clock_is_right)
    rows = [row for view in chosen for row in _expiries(opened, keyring, view)]
    rows.sort(key=lambda row: (row["expires"], row["role"]))
    moment, soon = _iso(now()), _iso(now() + SOON)
    return {
        "bucket": opened.name,
        "views": {view: _versions(seen[view]) for view in chosen if view in seen},
        "expires": rows,
        "soon": [row for row in rows if row["by_hand"] and moment < row["expires"] < soon],
    }


def _expiries(bucket: Bucket, keyring: Keyring, view: View) -> list[dict[str, Any]]:
    """When what readers of a view see expires; all but snapshot and timestamp are renewed by hand or by a release."""
    from kartifacts.publish.public import read_public
    from kartifacts.trust.released import TOP_LEVEL
    from kartifacts.trust.signed import parse_any

    public = read_public(bucket, keyring, view, now())
    rows = []
    for role in (*TOP_LEVEL, *(public.trusted.libraries if public.trusted is not None else ())):
        content = public.file(role)
        if content is not None:
            expires = _iso(parse_any(content, role).signed.expires)
            by_hand = role not in ("snapshot", "timestamp")
            rows.append({"view": view, "role": role, "expires": expires, "by_hand": by_hand})
    return rows


def _versions(seen: Synced) -> dict[str, Any]:
    return {
        "root": seen.root,
        "targets": seen.targets,
        "snapshot": seen.snapshot,
        "timestamp": seen.timestamp,
        "libraries": dict(seen.libraries),
        "expires": seen.expires,
    }


def write(path: Path, content: bytes) -> None:
    """Write a file that is no secret, in place of an older one."""
    from kartifacts.trust.keyfiles import replace

    replace(path, content)
