"""A private S3 bucket as a source: boto3 signs the address of an object; all else is as for any mirror over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import blob_path, check_path
from kartifacts.remote import s3
from kartifacts.remote.addresses import Address, parse
from kartifacts.sources import Pieces
from kartifacts.sources.breaker import GRACE, Breaker

if TYPE_CHECKING:
    from kartifacts.sources.client import Client

_SIGNED_FOR = 3600  # seconds


class S3Source:
    """A repository in a bucket that is not open to all.

    Args:
        url: ``s3://bucket/prefix[?endpoint=URL&region=NAME]``; credentials are found as boto3 always does.
        settings: timeouts, tries, proxies, authorities.
    """

    local = False
    mirror = True
    installed = False

    def __init__(self, url: str, settings: Settings) -> None:
        self._place = s3.place(url)
        self.name = self._place.name
        settings.check_online(f"the mirror {self.name}")
        self._settings = settings
        self.breaker = Breaker(self.name, tries=1 + settings.retries, grace=min(GRACE, settings.connect_timeout))

    def __repr__(self) -> str:
        return f"S3Source({self.name!r})"

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        end = size if length is None else min(start + length, size)
        transfer = self._client.read(self._signed(blob_path(digest)), size, start, end)
        try:
            transfer.open()
            yield transfer
        finally:
            transfer.close()

    def document(self, path: str, limit: int) -> bytes:
        return self._client.whole(self._signed(check_path(path, what="a path in a repository")), limit)

    def blob(self, digest: Digest, size: int) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def loose(self, digest: Digest, suffix: str) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def _signed(self, path: str) -> Address:
        """Where an object can be had for an hour; what makes it so is in the query, which no message shows."""
        asked = {"Bucket": self._place.bucket, "Key": self._place.key(path)}
        with s3.faults("ask for", path, self._place):
            return parse(self._signer.generate_presigned_url("get_object", Params=asked, ExpiresIn=_SIGNED_FOR))

    @cached_property
    def _signer(self) -> s3.Client:
        return s3.connect(self._place, self._settings)

    @cached_property
    def _client(self) -> Client:
        from kartifacts.sources.client import Client

        origin = self._signed("blobs")
        return Client(origin, self._settings, self.breaker, authorization=_InTheAddress(self.name))


class _InTheAddress:
    """Nothing is to be sent beside a signed address: not even what netrc has for that host."""

    def __init__(self, name: str) -> None:
        self._name = name

    def header(self) -> str:
        return ""

    def renew(self, wanted: Sequence[str], used: str) -> bool:  # noqa: ARG002  the protocol's names
        return False

    def check(self, status: int, place: str) -> None:
        if status in (401, 403):
            hint = f"{s3.HINTS['InvalidAccessKeyId']}; {s3.HINTS['AccessDenied']}"
            raise SourceError(f"{place} answered {status}", denied=status == 403, permanent=True, hint=hint)
