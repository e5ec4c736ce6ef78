"""Finds the user and password for a host: in netrc, and where container tools keep those for registries."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import netrc
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import strict_json

log = logging.getLogger(__name__)

Login = tuple[str, str]
"""User and password."""

_MAX_FILE = 4 << 20
_HELPER_SECONDS = 60
_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")  # one registry, whose login has an old name


def basic(login: Login) -> str:
    """The value of an Authorization header."""
    return "Basic " + base64.b64encode(":".join(login).encode()).decode()


class Netrc:
    """What a netrc file says; one that is damaged says nothing, and is warned about."""

    def __init__(self, path: Path | None) -> None:
        self._found = netrc.netrc("/dev/null")
        try:
            if path is not None:
                self._found = netrc.netrc(str(path))
        except FileNotFoundError:
            pass
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
            log.warning("%s is not used: %s", path, error)

    def login(self, host: str, *, default: bool) -> Login | None:
        """The login for `host`, or, if `default`, the one for hosts that are not listed."""
        found = self._found.hosts.get(host) or (self._found.hosts.get("default") if default else None)
        return (found[0], found[2] or "") if found else None


class Kept(NamedTuple):
    """What a container tool keeps for a registry: a login, or a token that is sent as it is."""

    login: Login | None = None
    token: str = ""


def kept_login(settings: Settings, authority: str, repository: str) -> Kept:
    """What `docker login`, `podman login` or a credential helper has for a repository; empty if there is nothing.

    Args:
        authority: host, with its port unless it is the usual one.

    Raises:
        SourceError: a helper that is configured for it fails.
    """
    names = list(_names(authority, repository))
    for path in settings.container_logins:
        content = _read(path)
        helpers, auths = _mapping(content.get("credHelpers")), _mapping(content.get("auths"))
        helper = next((helpers[name] for name in names if name in helpers), None)
        if helper is not None:
            return _ask(str(helper), authority, settings, path)
        entries = {_plain(key): value for key, value in auths.items()}
        for name in names:
            kept = _entry(_mapping(entries.get(name)), path, name)
            if kept != Kept():
                return kept
        store = content.get("credsStore")
        if isinstance(store, str) and store and (kept := _ask(store, authority, settings, path)) != Kept():
            return kept
    return Kept()


def _names(authority: str, repository: str) -> Iterator[str]:
    """What an entry for a repository may be called, the most specific name first."""
    hosts = [authority] if ":" in authority.rpartition("]")[2] else [authority, f"{authority}:443"]
    if authority in _HUB:
        hosts = list(_HUB)
    parts = repository.split("/")
    for count in range(len(parts), -1, -1):
        for host in hosts:
            yield "/".join((host, *parts[:count]))


def _plain(key: str) -> str:
    """``https://host/v1/`` is how older tools say ``host``."""
    bare = re.sub(r"^https?://", "", key).rstrip("/")
    return re.sub(r"/v[12]$", "", bare)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(strict_json(read_regular(path, _MAX_FILE), what=str(path)))
    except FileNotFoundError:
        return {}
    except (OSError, VerificationError) as error:
        log.warning("%s is not used: %s", path, error)
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _entry(entry: Mapping[str, Any], path: Path, name: str) -> Kept:
    token = entry.get("registrytoken")
    if isinstance(token, str) and token:
        return Kept(token=token)
    if entry.get("identitytoken"):
        log.warning("%s has an identity token for %s, which is not used: log in by user and password", path, name)
        return Kept()
    user, password = entry.get("username"), entry.get("password")
    if isinstance(user, str) and isinstance(password, str) and user:
        return Kept((user, password))
    if not entry.get("auth"):
        return Kept()
    try:
        plain = base64.b64decode(str(entry["auth"]), validate=True).decode().rstrip("\0")
    except (binascii.Error, UnicodeDecodeError):
        plain = ""
    user_name, colon, secret = plain.partition(":")
    if colon:
        return Kept((user_name, secret))
    log.warning("%s has a login for %s that is not a user and a password in base64; it is not used", path, name)
    return Kept()


def _ask(helper: str, authority: str, settings: Settings, path: Path) -> Kept:
    """What the program ``docker-credential-<helper>`` answers."""
    import subprocess

    name = f"docker-credential-{helper}"
    program = shutil.which(name, path=settings.search_path) if re.fullmatch(r"[A-Za-z0-9._-]{1,100}", helper) else None
    asked = "https://index.docker.io/v1/" if authority in _HUB else authority
    if program is None:
        raise SourceError(f"{str(path)!r} names the credential helper {name!r}, which is not on PATH", permanent=True)
    try:
        done = subprocess.run(
            [program, "get"], input=asked.encode(), capture_output=True, check=False, timeout=_HELPER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"the credential helper {program!r} failed: {error}", permanent=True) from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        if "not found" in said:
            return Kept()
        raise SourceError(f"the credential helper {program!r} failed for {asked}: {said[:200]!r}", permanent=True)
    try:
        answer = _mapping(json.loads(done.stdout))
        user, secret = answer["Username"], answer["Secret"]
    except (ValueError, KeyError) as error:
        raise SourceError(f"the credential helper {program!r} answered with no login", permanent=True) from error
    if not isinstance(user, str) or not isinstance(secret, str) or user == "<token>":
        raise SourceError(
            f"the credential helper {program!r} has an identity token for {asked}, which is not used",
            permanent=True,
            hint="log in by user and password",
        )
    return Kept((user, secret))
