"""Shows a registry who asks: a Basic login, or a token from the server that the registry names, renewed when needed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple
from urllib.parse import urlencode

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.model.digest import strict_json
from kartifacts.remote.addresses import parse, shown
from kartifacts.remote.answers import NoConnection
from kartifacts.remote.logins import Kept, Login, Netrc, basic, kept_login
from kartifacts.remote.registry import Registry

Get = Callable[[str, "Login | None"], bytes]
"""GETs a small document, with a login if there is one; raises a `SourceError`."""

MAX_TOKEN = 1 << 20
LOGIN_HINT = (
    "log in by `docker login`, `podman login` or `skopeo login` for this registry, "
    "or put the login into ~/.netrc or into the URL"
)
_LIFE = 60.0  # seconds of a token that says nothing
_MARGIN = 10.0  # seconds before its end in which a token is not used any more
_ITEM = re.compile(
    r"""\s*,?\s*(?: (?P<name>[A-Za-z0-9_-]+)\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s,"]+))
                  | (?P<scheme>[A-Za-z][A-Za-z0-9_-]*)(?=[\s,]|$) )""",
    re.VERBOSE,
)


class Challenge(NamedTuple):
    """What a server wants to see: a scheme in lower case, and its parameters."""

    scheme: str
    parameters: dict[str, str]


def challenges(headers: Sequence[str]) -> list[Challenge]:
    """Take the values of WWW-Authenticate headers apart; whatever is malformed ends its header."""
    found: list[Challenge] = []
    for text in headers:
        position = 0
        while item := _ITEM.match(text, position):
            position = item.end()
            if item["scheme"]:
                found.append(Challenge(item["scheme"].lower(), {}))
            elif found:
                value = item["bare"] if item["bare"] is not None else re.sub(r"\\(.)", r"\1", item["quoted"])
                found[-1].parameters[item["name"].lower()] = value
    return found


class Authorization:
    """The value of the Authorization header for one repository, shared by all threads.

    Args:
        actions: what is to be done there: ``pull``, or ``pull,push``.
        get: how to ask a token server.
    """

    def __init__(self, registry: Registry, settings: Settings, actions: str, get: Get) -> None:
        self._registry = registry
        self._settings = settings
        self._actions = actions
        self._get = get
        self._guard = threading.Lock()
        self._basic = ""
        self._challenge: Challenge | None = None
        self._token = ""
        self._until = 0.0

    def header(self) -> str:
        """The value for the next request; empty while nobody asked for one."""
        with self._guard:
            if self._challenge is not None and time.monotonic() >= self._until:
                self._renew(self._challenge)
            return self._basic or self._token

    def renew(self, headers: Sequence[str], used: str) -> bool:
        """After a 401 to a request with the value `used`: whether another value is worth another request.

        Raises:
            SourceError: the token server cannot be asked, or refuses.
        """
        with self._guard:
            now = self._basic or self._token
            if now and now != used:  # another thread was faster
                return True
            wanted = {challenge.scheme: challenge for challenge in reversed(challenges(headers))}
            if "bearer" in wanted:
                if self._kept.token:
                    self._basic = f"Bearer {self._kept.token}"
                else:
                    self._challenge = wanted["bearer"]
                    self._renew(self._challenge)
            elif "basic" in wanted and self._login is not None:
                self._basic = basic(self._login)
            return (self._basic or self._token) != used

    def check(self, status: int, place: str) -> None:
        """Raise a `SourceError` where a registry did not let a request pass, with what it was shown."""
        if status not in (401, 403):
            return
        login = self._login
        who = f"with the login of {login[0]!r}" if login else "with the token that is kept" if self._kept.token else ""
        raise SourceError(
            f"{place} answered {status} to a request {who or 'without a login'}; it has to allow {self._actions}",
            denied=status == 403,
            permanent=True,
            hint=LOGIN_HINT,
        )

    @cached_property
    def _kept(self) -> Kept:
        return kept_login(self._settings, self._registry.root.authority, self._registry.repository)

    @cached_property
    def _login(self) -> Login | None:
        host = self._registry.root.host
        return self._registry.root.login or self._kept.login or Netrc(self._settings.netrc).login(host, default=True)

    def _renew(self, challenge: Challenge) -> None:
        asked = time.monotonic()
        url = self._realm(challenge)
        try:
            token, life = _token(self._get(url, self._login), shown(url))
        except SourceError as error:
            raise SourceError(
                f"{self._registry.name} wants a token, and there is none: {error.message}",
                permanent=error.permanent,
                retry_after=error.retry_after,
                hint=LOGIN_HINT if error.permanent and not isinstance(error, NoConnection) else error.hint,
            ) from error
        self._token, self._until = f"Bearer {token}", asked + max(life - _MARGIN, 1.0)

    def _realm(self, challenge: Challenge) -> str:
        """Where a token is to be had, as far as a login may go there."""
        realm = challenge.parameters.get("realm", "")
        try:
            address = parse(realm)
        except ValueError as error:
            raise SourceError(
                f"{self._registry.name} names the token server {shown(realm)!r}: {error}", permanent=True
            ) from error
        if address.scheme != "https" and self._registry.root.scheme == "https":
            raise SourceError(
                f"{self._registry.name} names the token server {shown(realm)!r}, which is refused: it is not encrypted",
                permanent=True,
            )
        wanted = [("scope", f"repository:{self._registry.repository}:{self._actions}")]
        if self._registry.mount:
            wanted.append(("scope", f"repository:{self._registry.mount}:pull"))
        if service := challenge.parameters.get("service"):
            wanted.insert(0, ("service", service))
        return f"{realm}{'&' if '?' in realm else '?'}{urlencode(wanted)}"


def _token(answer: bytes, place: str) -> tuple[str, float]:
    """A token server's answer: the token, and for how many seconds it holds."""
    try:
        content = strict_json(answer, what=f"the answer of {place}")
    except VerificationError as error:
        raise SourceError(error.message, permanent=True) from error
    token = (content.get("token") or content.get("access_token")) if isinstance(content, dict) else None
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise SourceError(f"the answer of {place} holds no token", permanent=True)
    life = content.get("expires_in")
    return token, float(life) if isinstance(life, int) and 0 < life < 10**6 else _LIFE
