"""One request to an S3 bucket at a time, with its faults typed; what they come to is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from kartifacts.config import Settings
from kartifacts.model.manifest import MAX_PACK
from kartifacts.publish.buckets import Listed
from kartifacts.publish.buckets.sent import Sent, served_as
from kartifacts.remote import s3
from kartifacts.remote.patience import at_most
from kartifacts.remote.s3 import Client, S3Error, faults

_WRITE = "kartifacts-write"  # metadata of an object: which write made it
_PIECE = 1 << 20
_ANSWER = 16 << 20  # bytes of an answer that is no object


class Found(NamedTuple):
    """What a store says of an object."""

    size: int
    etag: str  # without quotes
    write: str  # the mark that its writer left


class Upload(NamedTuple):
    """An upload in parts that was not completed."""

    key: str
    number: str
    begun: float  # seconds since 1970


class Requests:
    """Paths are those of a repository; every fault is an `S3Error`."""

    def __init__(self, place: s3.Place, settings: Settings) -> None:
        self.place = place
        self._settings = settings

    def head(self, path: str) -> Found | None:
        try:
            with self._faults("look at", path):
                return _found(self._client.head_object(**self._named(path)))
        except S3Error as error:
            if error.missing:
                return None
            raise

    def get(self, path: str, limit: int) -> tuple[bytes, Found]:
        with self._faults("read", path, limit):
            answer = self._client.get_object(**self._named(path))
            found = _found(answer)
            if found.size > limit:
                answer["Body"].close()
                message = f"{path!r} in {self.place.name} has {found.size} bytes; at most {limit} are read"
                raise S3Error(message, permanent=True)
            return answer["Body"].read(), found

    def pieces(self, path: str) -> Iterator[bytes]:
        with self._faults("read", path, MAX_PACK):
            body = self._client.get_object(**self._named(path))["Body"]
        with self._faults("read", path):
            yield from body.iter_chunks(_PIECE)

    def put(self, path: str, sent: Sent, write: str, condition: Mapping[str, str]) -> None:
        with self._faults("write", path), sent.open() as body:
            self._client.put_object(
                **self._made(path, write),
                Body=body,
                ContentLength=sent.size,
                ContentMD5=sent.md5,
                ChecksumSHA256=sent.sha256,
                **condition,
            )

    def begin(self, path: str, write: str) -> str:
        with self._faults("write", path):
            return str(self._client.create_multipart_upload(**self._made(path, write))["UploadId"])

    def put_part(self, path: str, upload: str, number: int, sent: Sent) -> dict[str, Any]:
        part, md5 = sent.part(number)
        given = {"UploadId": upload, "PartNumber": number, "Body": part, "ContentMD5": md5}
        with self._faults(f"write part {number} of", path):
            return {"PartNumber": number, "ETag": self._client.upload_part(**self._named(path), **given)["ETag"]}

    def complete(self, path: str, upload: str, parts: list[dict[str, Any]], condition: Mapping[str, str]) -> None:
        given = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        with self._faults("write", path):
            self._client.complete_multipart_upload(**self._named(path), **given, **condition)

    def abort(self, key: str, upload: str) -> None:
        with self._faults("abort the upload of", key):
            self._client.abort_multipart_upload(Bucket=self.place.bucket, Key=key, UploadId=upload)

    def copy(self, source: str, path: str, write: str) -> None:
        origin = {"Bucket": self.place.bucket, "Key": self.place.key(source)}
        with self._faults("copy", source):
            self._client.copy_object(**self._made(path, write), CopySource=origin, MetadataDirective="REPLACE")

    def delete(self, path: str) -> None:
        with self._faults("delete", path):
            self._client.delete_object(**self._named(path))

    def page(self, prefix: str, token: str) -> tuple[list[Listed], str]:
        """Some objects whose key begins with `prefix`, under their keys; and what gets the next ones, or ""."""
        given = {"ContinuationToken": token} if token else {}
        with self._faults("list", prefix):
            answer = self._client.list_objects_v2(Bucket=self.place.bucket, Prefix=prefix, **given)
            found = [
                Listed(str(entry["Key"]), int(entry["Size"]), float(entry["LastModified"].timestamp()))
                for entry in answer.get("Contents", ())
            ]
        return found, str(answer.get("NextContinuationToken", "")) if answer.get("IsTruncated") else ""

    def uploads(self, prefix: str) -> list[Upload]:
        """Uploads in parts under way or given up; the first thousand of them."""
        with self._faults("list uploads below", prefix):
            answer = self._client.list_multipart_uploads(Bucket=self.place.bucket, Prefix=prefix)
            return [
                Upload(str(entry["Key"]), str(entry["UploadId"]), float(entry["Initiated"].timestamp()))
                for entry in answer.get("Uploads", ())
            ]

    def _named(self, path: str) -> dict[str, str]:
        return {"Bucket": self.place.bucket, "Key": self.place.key(path)}

    def _made(self, path: str, write: str) -> dict[str, Any]:
        content_type, cache_control = served_as(path)
        metadata = {_WRITE: write}
        return {
            **self._named(path),
            "ContentType": content_type,
            "CacheControl": cache_control,
            "Metadata": metadata,
        }

    @contextmanager
    def _faults(self, verb: str, path: str, most: int = _ANSWER) -> Iterator[None]:
        with faults(verb, path, self.place), at_most(most):
            yield

    @cached_property
    def _client(self) -> Client:
        return s3.connect(self.place, self._settings)


def _found(answer: Mapping[str, Any]) -> Found:
    metadata = {str(name).lower(): str(value) for name, value in answer.get("Metadata", {}).items()}
    if "ContentLength" not in answer:
        raise ValueError("it gives no Content-Length")
    return Found(int(answer["ContentLength"]), str(answer.get("ETag", "")).strip('"'), metadata.get(_WRITE, ""))
