"""An HTTP(S) mirror as a source: bounded, resumed where it broke off, and never believed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import blob_path, check_path
from kartifacts.remote.addresses import Address, parse, shown
from kartifacts.sources import Pieces
from kartifacts.sources.breaker import GRACE, Breaker

if TYPE_CHECKING:
    from kartifacts.sources.client import Client


class HttpSource:
    """A repository behind `url`.

    Args:
        url: where ``blobs/`` lies; a user and password in it are sent to that origin only and never shown.
        settings: timeouts, tries, proxies, authorities.
    """

    local = False
    mirror = True
    installed = False

    def __init__(self, url: str, settings: Settings) -> None:
        settings.check_online(f"the mirror {shown(url)}")
        try:
            self._address = parse(url.rstrip("/"))
            if "?" in self._address.target:
                raise ValueError("blobs are named below it, so it cannot have a query")
        except ValueError as error:
            raise ConfigError(f"not a mirror's URL: {shown(url)!r}: {error}") from error
        self.name = shown(url)
        self._settings = settings
        self.breaker = Breaker(self.name, tries=1 + settings.retries, grace=min(GRACE, settings.connect_timeout))

    def __repr__(self) -> str:
        return f"HttpSource({self.name!r})"

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        end = size if length is None else start + length
        transfer = self._client.read(self._below(blob_path(digest)), size, start, end)
        try:
            transfer.open()
            yield transfer
        finally:
            transfer.close()

    def document(self, path: str, limit: int) -> bytes:
        # A plus sign is a space to some stores, and a file may be named after a library or version that has one.
        name = check_path(path, what="a path in a repository").replace("+", "%2B")
        return self._client.whole(self._below(name), limit)

    def blob(self, digest: Digest, size: int) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def loose(self, digest: Digest, suffix: str) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def _below(self, path: str) -> Address:
        base = self._address.target.rstrip("/")
        return Address(*self._address.origin, f"{base}/{path}", self._address.login)

    @cached_property
    def _client(self) -> Client:
        # Not before something is read: http.client takes longer to import than a kernel takes to load from the store.
        from kartifacts.sources.client import Client

        return Client(self._address, self._settings, self.breaker)
