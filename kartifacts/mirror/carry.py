"""Carries a repository, or what the other side lacks of it, across a gap that no network crosses.

The open side exports what it has verified; the closed side verifies it again, together with what it holds, before
anything changes there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, StoreError, VerificationError
from kartifacts.files.reading import open_regular, read_regular
from kartifacts.mirror.archive import Archive, TarWriter, check_member, open_archive
from kartifacts.mirror.contents import Contents, contents_of, run
from kartifacts.mirror.filters import MAX_MIRROR, MIRROR, Filter, decode_filter, encode_filter
from kartifacts.mirror.promote import Progress, Promotion, Told, index_of, promote, send_blobs
from kartifacts.mirror.pull import Trust, naming_filter_of, refuse_less, states_of
from kartifacts.mirror.reading import BucketSource, Reader
from kartifacts.mirror.verify import promised
from kartifacts.model.digest import Digest
from kartifacts.model.layout import OCI_INDEX, OCI_LAYOUT, OCI_LAYOUT_CONTENT, TIMESTAMP, blob_path, metadata_path
from kartifacts.model.manifest import MAX_INDEX
from kartifacts.publish import files
from kartifacts.publish.buckets import Bucket, Unlisted
from kartifacts.publish.leases import publishing
from kartifacts.publish.repository import Blob
from kartifacts.sources import Source

MAX_LISTING = 512 << 20  # bytes
_HEAD = "kartifacts listing 1"
_DIRECTORIES = ("airgap", "blobs", "metadata", "targets")


# -- what is there already ---------------------------------------------------------------------------------------------


def listing(bucket: Bucket) -> str:
    """All that a mirror holds under names that never change: a line each, size and path, sorted.

    Raises:
        SourceError: there is nothing, as where the name of the mirror is misspelt.
    """
    lines = []
    for directory in _DIRECTORIES:
        try:
            listed = bucket.list(directory)
        except Unlisted as error:
            error.hint = "export the whole for it, or list a directory that was filled with the same"
            raise
        for path, size, _ in listed:
            try:
                check_member(path, size, bucket.name)
            except VerificationError:  # of somebody else
                continue
            if not path.endswith(f"/{TIMESTAMP}"):
                lines.append(f"{size} {path}")
    if not lines:
        raise SourceError(
            f"{bucket.name} holds no part of a repository",
            missing=True,
            hint="a mirror that is still to be filled needs no listing: export without --since",
        )
    return "\n".join([_HEAD, *lines]) + "\n"


def read_listing(path: Path) -> dict[str, int]:
    """Path → size.

    Raises:
        ConfigError: it cannot be read.
        VerificationError: it is no listing, or is cut off.
    """
    try:
        text = read_regular(path, MAX_LISTING).decode("ascii")
    except OSError as error:
        raise ConfigError(f"cannot read the listing {str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise VerificationError(f"{str(path)!r} is no listing: {error}") from error
    head, *lines = text.split("\n")
    if head != _HEAD or lines[-1:] != [""]:
        raise VerificationError(f"{str(path)!r} is no listing, or is cut off: `kartifacts mirror list` writes one")
    found: dict[str, int] = {}
    for line in lines[:-1]:
        size, _, name = line.partition(" ")
        if not (size.isdecimal() and len(size) < 16):
            raise VerificationError(f"{str(path)!r} holds a line that is none: {line[:150]!r}")
        check_member(name, int(size), str(path))
        found[name] = int(size)
    return found


# -- the open side -----------------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    """What was written."""

    contents: Contents
    files: int
    bytes: int


def export(
    source: Source,
    target: Path,
    trust: Trust,
    chosen: Filter,
    settings: Settings,
    *,
    since: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write what was chosen of `source` into a file (``.tar``) or a new directory; equal input gives equal bytes.

    Args:
        since: what the other side holds already, which is left out.

    Raises:
        ConfigError: the directory is not empty, or a directory has the name of the file.
        VerificationError, SourceError, ArtifactUnavailable: as of `pull`.
        StoreError: it cannot be written.
    """
    with _writing(target):
        _check_target(target)
    reader = Reader([source], settings)
    basis = trust.basis(reader, states_of(settings))
    with naming_filter_of(source, chosen):
        contents = contents_of(basis, chosen, reader, threads=settings.download_threads)
    members = _members(contents, chosen, since or {})
    told = Told(sum(size for size, _ in members.values()), progress)
    write = _write_tar if target.suffix == ".tar" else _write_directory
    with _writing(target):
        write(target, members, reader, told)
    return Exported(contents, len(members), sum(size for size, _ in members.values()))


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {str(target)!r}: {error.strerror or error}") from error


Member = tuple[int, "bytes | Blob"]
"""Its size, and its content or the blob that it is."""


def _members(contents: Contents, chosen: Filter, since: Mapping[str, int]) -> dict[str, Member]:
    """Path → what is written under it, sorted."""
    found: dict[str, Member] = {}
    for blob in contents.blobs:
        found[blob_path(blob.digest)] = blob.size, contents.read.get(blob.digest, blob)
    for target in contents.targets:
        found[target.path] = target.blob.size, contents.read[target.blob.digest]
    found |= {path: (len(content), content) for path, content in contents.basis.metadata.items()}
    found = {path: member for path, member in found.items() if since.get(path) != member[0]}
    pointers = {metadata_path(each.view, TIMESTAMP): each.timestamp for each in contents.basis.signatures}
    pointers |= {MIRROR: encode_filter(chosen), OCI_LAYOUT: OCI_LAYOUT_CONTENT, OCI_INDEX: index_of(contents, None)}
    found |= {path: (len(content), content) for path, content in pointers.items()}
    return {path: found[path] for path in sorted(found)}


@contextmanager
def _opened(member: Member, reader: Reader) -> Iterator[bytes | Path]:
    _, content = member
    if isinstance(content, bytes):
        yield content
    else:
        with reader.content(content) as found:
            yield found


def _write_tar(target: Path, members: Mapping[str, Member], reader: Reader, told: Told) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".partial-", delete=False) as file:
        try:
            writer = TarWriter(file)
            for path, member in members.items():
                with _opened(member, reader) as content:
                    writer.add(path, member[0], _pieces(content))
                told.add(member[0])
            writer.finish()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _check_target(target: Path) -> None:
    if target.suffix == ".tar":
        if target.is_dir():
            raise ConfigError(f"{str(target)!r} is a directory; a file is written under a name that ends with .tar")
    elif os.path.lexists(target) and (not target.is_dir() or os.listdir(target)):
        raise ConfigError(
            f"{str(target)!r} is there already and not empty; name a new directory, or a file that ends with .tar"
        )


def _write_directory(target: Path, members: Mapping[str, Member], reader: Reader, told: Told) -> None:
    new = not target.exists()
    try:
        for path, member in members.items():
            with _opened(member, reader) as content:
                files.create(target / path, content)
            told.add(member[0])
    except BaseException:  # what is there is ours, since it was empty
        for name in {path.partition("/")[0] for path in members}:
            if (target / name).is_dir():
                shutil.rmtree(target / name)
            else:
                (target / name).unlink(missing_ok=True)
        if new:
            with suppress(OSError):
                target.rmdir()
        raise


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with open_regular(content) as file:
        while piece := file.read(1 << 20):
            yield piece


# -- the closed side ---------------------------------------------------------------------------------------------------


def import_(
    path: Path,
    bucket: Bucket,
    trust: Trust,
    settings: Settings,
    *,
    chosen: Filter | None = None,
    refilter: bool = False,
    progress: Progress | None = None,
) -> tuple[Contents, Promotion]:
    """Bring a mirror to the state that was carried here, if it and what the mirror holds are all that it takes.

    Args:
        chosen: what the mirror is to hold; None: what it promises now, which is everything if it is new.  What the
            archive says of itself decides nothing, since whoever carries it may write there.
        refilter: the mirror may promise less than it did.

    Raises:
        ConfigError: the mirror would promise less than it does.
        VerificationError: anything at all in it is not as it should be, or it is older than what the mirror holds;
            readers of the mirror see what they saw before.
    """
    archive = open_archive(path)
    bucket.preflight()
    if chosen is None:
        chosen = Filter() if refilter else promised(bucket)
    elif not refilter:
        refuse_less(bucket, chosen)
    bucket.tidy()
    carried = Reader([archive.source], settings)
    either = Reader([archive.source, BucketSource(bucket)], settings)
    threads = settings.download_threads
    if trust.roots and _is_older(archive, carried, bucket, trust):
        return _mend(archive, carried, either, bucket, trust, settings, progress)
    said = decode_filter(_file(carried, MIRROR, MAX_MIRROR), what=f"{MIRROR} of {archive.where}")
    try:
        basis = trust.basis(either, states_of(settings), mirror=bucket)
        contents = contents_of(basis, chosen, either, threads=threads)
    except SourceError as error:
        if not error.missing:
            raise
        raise _lacks(archive, bucket, error.message, said, chosen, error.hint) from error
    _check_names(archive, contents, said, chosen)
    lacking = [name for name in sorted(contents.paths - set(archive.members)) if bucket.size(name) is None]
    if lacking:
        more = f", and {len(lacking) - 1} more files" if len(lacking) > 1 else ""
        raise _lacks(archive, bucket, f"{lacking[0]}{more}", said, chosen)
    _check_contents(archive, carried, contents, bucket, threads)
    return contents, promote(contents, chosen, carried, bucket, threads=threads, progress=progress)


def _lacks(
    archive: Archive, bucket: Bucket, what: str, said: Filter, chosen: Filter, why: str | None = None
) -> VerificationError:
    hint = why or "export again without --since, or with a listing of this mirror as it is now"
    if not said.covers(chosen):
        hint = (
            f"the archive says that it carries a part: {said}; if that is what you want, give these options here too "
            "(with --change-filter if the mirror holds more now)"
        )
    return VerificationError(
        f"{archive.where} and {bucket.name} together lack a part of what the mirror is to hold ({chosen}): {what}; "
        "nothing was changed",
        source=archive.where,
        hint=hint,
    )


def _is_older(archive: Archive, carried: Reader, bucket: Bucket, trust: Trust) -> bool:
    """Whether it says itself that it is older than what the mirror holds; nothing is believed of either yet."""
    from kartifacts.trust.client import view_of

    for path in (metadata_path(view_of(root), TIMESTAMP) for root in trust.roots):
        held = bucket.read(path)
        if held is not None and path in archive.members:
            came = _version(carried.document(path, MAX_INDEX), f"{path} in {archive.where}")
            if came < _version(held.content, f"{path} in {bucket.name}"):
                return True
    return False


def _version(timestamp: bytes, what: str) -> int:
    from tuf.api.metadata import Timestamp

    from kartifacts.trust.signed import parse

    return int(parse(timestamp, Timestamp, what).signed.version)


def _mend(
    archive: Archive,
    carried: Reader,
    either: Reader,
    bucket: Bucket,
    trust: Trust,
    settings: Settings,
    progress: Progress | None,
) -> tuple[Contents, Promotion]:
    """Of an older archive take the blobs that the mirror has lost, if it has all of them; the state stays as it is."""
    threads = settings.download_threads
    basis = trust.basis(Reader([BucketSource(bucket)], settings), None, expired=True)
    contents = contents_of(basis, promised(bucket), either, threads=threads)
    lacking = [name for name in sorted(contents.paths) if bucket.size(name) is None]
    if (
        not lacking
        or not set(lacking) <= set(archive.members)
        or not all(name.startswith("blobs/") for name in lacking)
    ):
        raise VerificationError(
            f"{archive.where} is older than what {bucket.name} holds; nothing was changed",
            source=archive.where,
            hint="a mirror never goes back; an old archive can only bring blobs that a mirror has lost",
        )
    rest = sorted(name for name in archive.members if name.startswith("blobs/") and name not in lacking)
    run(threads, [partial(_check_blob, archive, carried, name) for name in rest])
    done = Promotion()
    with publishing(bucket):
        send_blobs(contents, carried, bucket, done, threads=threads, progress=progress)
    return contents, done


def _check_names(archive: Archive, contents: Contents, said: Filter, chosen: Filter) -> None:
    pointers = {metadata_path(signature.view, TIMESTAMP) for signature in contents.basis.signatures}
    for name in archive.members:
        if name not in {MIRROR, OCI_INDEX, OCI_LAYOUT, *pointers} and name not in contents.paths:
            raise VerificationError(
                f"{archive.where} holds {name!r}, which nothing that is believed here names; nothing was changed",
                source=archive.where,
                hint="metadata of a view has to come with --root of that view; from a whole mirror, use mirror pull"
                if chosen.covers(said)
                else f"the mirror holds a part: {chosen}; export just that, or give here, too, what the archive says "
                f"that it carries: {said if said != Filter() else '--change-filter, for everything'}",
            )


def _check_contents(archive: Archive, carried: Reader, contents: Contents, bucket: Bucket, threads: int) -> None:
    """Everything in it, but for the blobs that are going to be sent and will be looked at then."""
    expected = dict(contents.basis.metadata)
    expected |= {metadata_path(each.view, TIMESTAMP): each.timestamp for each in contents.basis.signatures}
    expected |= {target.path: contents.read[target.blob.digest] for target in contents.targets}
    expected |= {OCI_LAYOUT: OCI_LAYOUT_CONTENT, OCI_INDEX: index_of(contents, None)}
    for name, content in expected.items():
        if name in archive.members and _file(carried, name, len(content)) != content:
            raise VerificationError(f"{name} in {archive.where} is not what it was exported as", source=archive.where)
    rest = [blob_path(blob.digest) for blob in contents.blobs if bucket.size(blob_path(blob.digest)) == blob.size]
    run(threads, [partial(_check_blob, archive, carried, name) for name in rest if name in archive.members])


def _check_blob(archive: Archive, carried: Reader, name: str) -> None:
    blob = Blob(Digest(name.rpartition("/")[2]), archive.members[name], name)
    with carried.content(blob):
        pass


def _file(carried: Reader, name: str, limit: int) -> bytes:
    try:
        return carried.document(name, limit)
    except SourceError as error:
        raise VerificationError(f"{name}: {error.message}") from error
