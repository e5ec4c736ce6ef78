"""Speaks to S3: ``s3://`` texts, one boto3 client with no retries of its own, and its faults as typed errors.

Retries belong to whoever asks: only who sees every answer knows whether a conditional write was applied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, KartifactsError, SourceError, VerificationError
from kartifacts.model.layout import check_path
from kartifacts.remote.addresses import Address, parse, proxy_for, shown
from kartifacts.remote.answers import REDIRECTS, TRANSIENT, innermost
from kartifacts.remote.authorities import tls_hint
from kartifacts.remote.patience import patient_pools

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

Client = Any
"""A boto3 client, which has no static types."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_CHECKSUMS = ("when_required", "when_supported")
_PARAMETERS = ("endpoint", "region", "checksums", "single-writer")
_CONNECTIONS = 64  # there are never more threads
_THROTTLED = 1.0  # seconds to wait where a store says that there were too many requests, but not for how long
_SLOWER = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"})
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout"})  # on the way there, with status 400
_TRAILERS = frozenset({"MissingContentLength", "XAmzContentSHA256Mismatch"})
HINTS = {
    "AccessDenied": "the policy of the bucket or the user does not allow it; without s3:ListBucket S3 also says this "
    "of what is not there",
    "InvalidAccessKeyId": "boto3 takes credentials from AWS_ACCESS_KEY_ID, AWS_PROFILE or ~/.aws/credentials",
    "SignatureDoesNotMatch": "the secret key is another one, or a proxy changes requests",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "NoSuchBucket": "make the bucket first; kartifacts never does",
    "MissingContentLength": "use checksums=when_required, which is the default: this store takes no trailers",
    "XAmzContentSHA256Mismatch": "use checksums=when_required, which is the default: this store takes no trailers",
    "AuthorizationHeaderMalformed": "add ?region=… to the bucket's URL",
}


class S3Error(SourceError):
    """What a store answered, or that it did not.

    Args:
        status: of HTTP; 0 if there was no answer.
        code: the store's word for it, like NoSuchKey.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "",
        missing: bool = False,
        denied: bool = False,
        permanent: bool = False,
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            message, missing=missing, denied=denied, permanent=permanent, retry_after=retry_after, hint=hint
        )
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Place:
    """What an ``s3://`` text names."""

    bucket: str
    prefix: str  # "" or without a slash at its ends
    endpoint: str  # "" for AWS
    region: str
    checksums: str
    single_writer: bool

    @property
    def name(self) -> str:
        """For messages."""
        below = f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"
        return f"{below} at {self.endpoint}" if self.endpoint else below

    def key(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def path(self, key: str) -> str:
        return key[len(self.prefix) + 1 :] if self.prefix else key


def place(text: str) -> Place:
    """Take an ``s3://`` text apart.

    Raises:
        ConfigError: it is malformed; the message does not repeat what may be a password.
    """
    try:
        if not text.isprintable():  # urlsplit would leave some of it out
            raise ValueError("it has a control character in it")
        parts = urlsplit(text)
        if parts.scheme != "s3" or parts.fragment:
            raise ValueError("expected s3://bucket/prefix?endpoint=URL&region=NAME")
        if "@" in parts.netloc:
            raise ValueError("credentials do not belong there: boto3 finds them as it always does")
        if not _BUCKET.fullmatch(parts.netloc):
            raise ValueError(f"{parts.netloc[:100]!r} is not the name of a bucket")
        prefix = unquote(parts.path).strip("/")
        if prefix:
            check_path(prefix, what="the prefix")
        given = _parameters(parts.query)
    except (ValueError, VerificationError) as error:
        raise ConfigError(f"not an S3 bucket: {shown(text)!r}: {error}") from error
    return Place(parts.netloc, prefix, *given)


def _parameters(query: str) -> tuple[str, str, str, bool]:
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    values = dict(pairs)
    for name, _ in pairs:
        if name not in _PARAMETERS:
            raise ValueError(f"unknown parameter {name[:40]!r}; known: {', '.join(_PARAMETERS)}")
    if len(values) != len(pairs):
        raise ValueError("a parameter is there twice")
    for name, value in pairs:
        if not value:  # a variable that was not set, and AWS is not what was meant then
            raise ValueError(f"{name}= says nothing: leave it out, or say which")
    endpoint = values.get("endpoint", "").rstrip("/")
    if "endpoint" in values:
        address = parse(endpoint)
        if address.login or "?" in address.target:
            raise ValueError("an endpoint has neither a password nor a query")
    region = values.get("region", "")
    if region and not _REGION.fullmatch(region):
        raise ValueError(f"{region[:40]!r} is not the name of a region")
    checksums = values.get("checksums", _CHECKSUMS[0])
    if checksums not in _CHECKSUMS:
        raise ValueError(f"checksums={checksums[:40]!r}; expected {' or '.join(_CHECKSUMS)}")
    single = values.get("single-writer", "0")
    if single not in ("0", "1"):
        raise ValueError(f"single-writer={single[:40]!r}; expected 1 or 0")
    return endpoint, region, checksums, single == "1"


def connect(where: Place, settings: Settings) -> Client:
    """A client for a place, which all threads may share; nothing is asked yet.

    Raises:
        ConfigError: boto3 is not installed, or the endpoint, the authorities or a profile is wrong.
    """
    with _boto3_for(where):
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    config = Config(
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=_CONNECTIONS,
        proxies=_proxies(where, settings),
        # Trailers, boto3's own choice, are more than Ceph and others understand over TLS.  See docs/howto/stores.md.
        request_checksum_calculation=where.checksums,
        response_checksum_validation=where.checksums,
        signature_version="s3v4",
        s3={"addressing_style": "path" if where.endpoint else "auto"},
        user_agent_extra="kartifacts",
    )
    variable, authorities = settings.authorities
    if authorities and not os.path.isfile(authorities):
        raise ConfigError(f"{variable} names {authorities!r}, which is not a file of certificates; boto3 needs one")
    try:
        session = boto3.session.Session()
        client = session.client(
            "s3",
            config=config,
            region_name=where.region or session.region_name or "us-east-1",
            endpoint_url=where.endpoint or None,
            verify=authorities or None,
        )
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(f"cannot speak to {where.name}: {str(error)[:300]}") from error
    _check_credentials(session)
    # There is no public way to give it connections; those that it has wait for ever for what trickles.
    kinds = client._endpoint.http_session._pool_classes_by_scheme  # noqa: SLF001
    kinds.update(patient_pools(kinds))
    if where.endpoint:
        # It would ask where the bucket is instead, and ask that by the same way, until the stack is full.
        client.meta.events.register_first("needs-retry.s3", _refuse_redirect)
    return client


def _check_credentials(session: Any) -> None:
    found = session.get_credentials()
    if found is not None and not all(str(each or "").isprintable() for each in found.get_frozen_credentials()):
        raise ConfigError(
            "the credentials that boto3 found have a control character in them, such as a line break",
            hint=HINTS["InvalidAccessKeyId"],
        )


def _refuse_redirect(response: tuple[Any, Any] | None = None, **_: object) -> None:
    if response is not None and response[0].status_code in REDIRECTS:
        where = shown(str(response[0].headers.get("Location", "")))
        raise _Redirected(f"it answered {response[0].status_code} and redirects to {where!r}")


class _Redirected(Exception):
    """A store is not where it was said to be."""


@contextmanager
def _boto3_for(where: Place) -> Iterator[None]:
    """Say of imports inside how to get what they need; whoever comes first has to: an address is signed lazily."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{where.name} needs boto3: {error}", hint="pip install 'kartifacts[s3]'") from error


def _proxies(where: Place, settings: Settings) -> Mapping[str, str]:
    """What boto3 is to use instead of the variables that it would read itself; {} for none."""
    host = f"https://{where.bucket}.s3.{where.region or 'us-east-1'}.amazonaws.com"
    target: Address = parse(where.endpoint or host)
    proxy = proxy_for(target, settings)
    if proxy is None:
        return {}
    named = dict(settings.proxies)
    text = named.get(target.scheme) or named["all"]
    return {target.scheme: text if "://" in text else f"http://{text}"}


@contextmanager
def faults(verb: str, what: str, where: Place) -> Iterator[None]:
    """Whatever boto3 raises inside becomes an `S3Error`; no message of it holds a credential.

    Raises:
        ConfigError: boto3 is not installed.
    """
    with _boto3_for(where):
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

    doing = f"cannot {verb} {what!r} in {where.name}"
    try:
        yield
    except KartifactsError:  # some are a ValueError too
        raise
    except ClientError as error:
        raise _answered(error, doing, where) from error
    except BotoCoreError as error:
        raise _unanswered(error, doing) from error
    except _Redirected as error:
        raise S3Error(f"{doing}: {error}", permanent=True, hint="name that endpoint, if it is the right one") from error
    except (HTTPError, OSError) as error:  # of a body that boto3 reads without looking after it
        raise S3Error(f"{doing}: {innermost(error)}") from error
    except (ResponseParserError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise S3Error(f"{doing}: what it answered is not of S3: {innermost(error)[:200]}", permanent=True) from error


def _answered(error: ClientError, doing: str, where: Place) -> S3Error:
    answer: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
    status = int(answer.get("HTTPStatusCode") or 0)
    found = re.fullmatch(r"[A-Za-z0-9.]{1,64}", str(error.response.get("Error", {}).get("Code", "")))
    code = found[0] if found else ""
    missing = code in ("NoSuchKey", "NoSuchVersion") or (status == 404 and code != "NoSuchBucket")
    plain = where.checksums == _CHECKSUMS[0] and code in _TRAILERS  # so that it was not for want of trailers
    transient = status in TRANSIENT or code in _DAMAGED or code in _SLOWER or (plain and status == 400)
    pause: float | None = None
    asked = str(answer.get("HTTPHeaders", {}).get("retry-after", ""))
    if transient and re.fullmatch(r"\d{1,6}", asked):
        pause = float(asked)
    elif status == 429 or code in _SLOWER:
        pause = _THROTTLED
    return S3Error(
        f"{doing}: it answered {status}{'' if code in ('', str(status)) else f' {code}'}",
        status=status,
        code=code,
        missing=missing,
        denied=status == 403,
        permanent=not transient,
        retry_after=pause,
        hint=None if plain else HINTS.get(code) or (HINTS["AccessDenied"] if status == 403 else None),
    )


def _unanswered(error: BotoCoreError, doing: str) -> S3Error:
    from botocore import exceptions as known
    from urllib3.exceptions import LocationParseError

    if isinstance(error, (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError)):
        return S3Error(f"{doing}: there are no credentials for it", permanent=True, hint=HINTS["InvalidAccessKeyId"])
    given = error.kwargs.get("error")
    reason = innermost(given if isinstance(given, BaseException) else error)
    if isinstance(error, known.SSLError):
        return S3Error(
            f"{doing}: TLS failed: {reason}",
            permanent=True,
            hint=tls_hint(given if isinstance(given, BaseException) else error),
        )
    if isinstance(error, (known.ConnectTimeoutError, known.ReadTimeoutError)):
        return S3Error(f"{doing}: it said nothing for too long")
    if isinstance(given, LocationParseError):
        return S3Error(f"{doing}: it redirects to what is no URL", permanent=True)
    passing = (known.HTTPClientError, known.ConnectionError, known.IncompleteReadError, known.FlexibleChecksumError)
    if isinstance(error, passing):
        return S3Error(f"{doing}: {reason}")
    return S3Error(f"{doing}: {type(error).__name__}", permanent=True)
