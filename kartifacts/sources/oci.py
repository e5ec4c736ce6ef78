"""A repository of an OCI registry as a source: blobs, manifests and files under tags, and none of them believed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import check_path
from kartifacts.model.manifest import MAX_INDEX
from kartifacts.remote.addresses import parse, shown
from kartifacts.remote.registry import ACCEPT, MAX_FILE_MANIFEST, file_layer, parse_registry, tag_of
from kartifacts.sources import Pieces
from kartifacts.sources.breaker import GRACE, Breaker

if TYPE_CHECKING:
    from kartifacts.remote.logins import Login
    from kartifacts.sources.client import Client
    from kartifacts.sources.resumed import Resumed


class OciSource:
    """A repository behind ``oci://host[:port]/name``, or behind ``oci+http://…`` without TLS.

    Args:
        url: where it is; a user and password in it are sent to that registry, or to whom it names over TLS.
        settings: timeouts, tries, proxies, authorities, logins.
    """

    local = False
    mirror = True
    installed = False

    def __init__(self, url: str, settings: Settings) -> None:
        settings.check_online(f"the mirror {shown(url)}")
        self._registry = parse_registry(url)
        if "?" in url:
            raise ConfigError(f"not a mirror's URL: {shown(url)!r}: options are for those who publish")
        self.name = self._registry.name
        self._settings = settings
        self.breaker = Breaker(self.name, tries=1 + settings.retries, grace=min(GRACE, settings.connect_timeout))

    def __repr__(self) -> str:
        return f"OciSource({self.name!r})"

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        # Never beyond the size: Debian's docker-registry announces more for that than it sends.
        transfer = self._opened(digest, size, start, size if length is None else min(start + length, size))
        try:
            yield transfer
        finally:
            transfer.close()

    def document(self, path: str, limit: int) -> bytes:
        tag = tag_of(check_path(path, what="a path in a repository"))
        where = f"the manifest of {path!r} in {self.name}"
        layer = file_layer(self._client.whole(self._registry.manifest(tag), MAX_FILE_MANIFEST), where, path)
        if layer.size > limit:
            raise SourceError(
                f"{path!r} in {self.name} has {layer.size} bytes; at most {limit} are read", permanent=True
            )
        try:
            content = self._client.whole(self._registry.blob(layer.sha256), layer.size)
        except SourceError as error:
            if not error.missing:
                raise
            raise SourceError(f"{self.name} has {path!r} under a tag, but not its content", permanent=True) from error
        if sha256(content) != layer.sha256:
            raise VerificationError(
                f"{self.name} gives other bytes for {path!r} than its manifest names",
                source=self.name,
                expected=layer.digest,
                actual=f"sha256:{sha256(content)}",
            )
        return content

    def blob(self, digest: Digest, size: int) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def loose(self, digest: Digest, suffix: str) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def _opened(self, digest: Digest, size: int, start: int, end: int) -> Resumed:
        """A blob; or, since only their content tells manifests from blobs, the manifest of that digest."""
        transfer = self._client.read(self._registry.blob(digest), size, start, end)
        try:
            transfer.open()
        except SourceError as error:
            if not error.missing or size > MAX_INDEX:
                raise
            transfer = self._client.read(self._registry.manifest(f"sha256:{digest}"), size, start, end)
            transfer.open()
        return transfer

    @cached_property
    def _client(self) -> Client:
        # Not before something is read: http.client takes longer to import than a kernel takes to load from the store.
        from kartifacts.remote.authorization import Authorization
        from kartifacts.sources.client import Client

        authorization = Authorization(self._registry, self._settings, "pull", self._ask_token_server)
        return Client(self._registry.root, self._settings, self.breaker, accept=ACCEPT, authorization=authorization)

    def _ask_token_server(self, url: str, login: Login | None) -> bytes:
        from kartifacts.remote.authorization import MAX_TOKEN
        from kartifacts.sources.client import Client

        address = replace(parse(url), login=login)
        return Client(address, self._settings, Breaker(shown(url))).whole(address, MAX_TOKEN)
