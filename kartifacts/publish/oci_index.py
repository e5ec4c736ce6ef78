"""index.json of a repository: its entry for tools that know only OCI, and, where nothing is signed, who came first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kartifacts.errors import PublishConflict, VerificationError
from kartifacts.model.digest import Digest, canonical_json, parse_digest, sha256, strict_json
from kartifacts.model.layout import OCI_INDEX, OCI_LAYOUT, OCI_LAYOUT_CONTENT
from kartifacts.model.manifest import MEDIA_INDEX, NOTE, Descriptor, Pin
from kartifacts.publish.buckets import Bucket, Change, update
from kartifacts.trust.released import Released

_REF_NAME = "org.opencontainers.image.ref.name"
_PROVENANCE, _MATERIALS = ".provenance", ".materials"

# What skopeo and registries take: single separators between letters and digits, no '+'; the names of referrers not.
_PLAIN = re.compile(r"(?!sha\d+-)(?!.*\.(?:provenance|materials)$)(?=.{1,117}$)[a-z0-9]+([._-][a-z0-9]+)*")
_DATED, _NUMBERED, _WORDED = map(re.compile, (r"(.+?)-(\d{4}-\d\d-\d\d.*)", r"(.+)-(\d.*)", r"(.+)-(.+)"))

Entry = dict[str, Any]


def refuse_other_claim(bucket: Bucket, pin: Pin) -> None:
    """Raise `PublishConflict` if the index lists this version with another content."""
    current = bucket.read(OCI_INDEX)
    if current is not None:
        _claimed(current.content, pin, bucket.name)


def claim(bucket: Bucket, pin: Pin, made_of: tuple[Digest, int] | None = None) -> None:
    """List a release whose blobs are all in place; of two contents of one version only the first gets in.

    Args:
        made_of: digest and size of the index of its materials; of two builds with the same bytes the last one counts.

    Raises:
        PublishConflict: the version is listed with another content; nothing was changed.
        VerificationError: what is there is no OCI image index; nothing was changed.
    """
    change_index(bucket, lambda current: _claimed(current, pin, bucket.name, made_of))


def reconciled(
    current: bytes | None, pins: Mapping[str, Iterable[Pin]], where: str, *, said: Iterable[Released] = ()
) -> bytes:
    """The index with exactly these releases, by library; what is of other libraries or of other tools stays.

    Args:
        said: releases whose provenance is listed too, so that tools which know only OCI find what refers to bundles.
    """
    index, entries = _parsed(current, where)
    listed = {library: list(each) for library, each in pins.items()}
    others = [entry for entry in entries if entry.get("mediaType") != MEDIA_INDEX or not _replaced(entry, listed)]
    about = (_provenance(each.pin, *each.provenance) for each in said if each.provenance is not None)
    return _encoded(index, [*others, *(_entry(pin) for each in listed.values() for pin in each), *about])


def _replaced(entry: Entry, pins: Mapping[str, list[Pin]]) -> bool:
    """Whether it is ours and of one of these libraries; materials stay as long as their release is listed."""
    if {_note(entry, "library"), _note(entry, "provenance-of")} & set(pins):
        return True
    releases = pins.get(_note(entry, "materials-of"))
    return releases is not None and not any(_is_made_of(entry, pin) for pin in releases)


def listed_materials(current: bytes, pin: Pin, where: str) -> tuple[Digest, int] | None:
    """Digest and size of the index of what a release was made of; None if the index lists none.

    Raises:
        VerificationError: what is there is no OCI image index, or the entry is malformed.
    """
    for entry in entries_in(current, where):
        if _is_made_of(entry, pin):
            size = entry.get("size")
            if not isinstance(size, int) or size < 0:
                raise VerificationError(f"{OCI_INDEX} of {where} is malformed: materials of {size!r:.50} bytes")
            return parse_digest(str(entry.get("digest")), what=f"{OCI_INDEX} of {where}"), size
    return None


def change_index(bucket: Bucket, change: Change) -> None:
    """Replace the index by `change` of it, in what is then an OCI image layout."""
    if bucket.size(OCI_LAYOUT) is None:
        bucket.put_if_absent(OCI_LAYOUT, OCI_LAYOUT_CONTENT)
    update(bucket, OCI_INDEX, change)


def entries_in(current: bytes | None, where: str) -> list[Entry]:
    """What the index lists, whoever put it there."""
    return _parsed(current, where)[1]


def _claimed(current: bytes | None, pin: Pin, where: str, made_of: tuple[Digest, int] | None = None) -> bytes:
    index, entries = _parsed(current, where)
    made, others = [_entry(pin)], []
    if made_of is not None:
        made.append(_materials(pin, *made_of))
    for entry in entries:
        if (_note(entry, "library"), _note(entry, "version")) == (pin.library, pin.version):
            refuse_unless_same(str(entry.get("digest")), pin, where)
        elif made_of is None or not _is_made_of(entry, pin):
            others.append(entry)
    return _encoded(index, [*others, *made])


def refuse_unless_same(found: str, pin: Pin, where: str) -> None:
    """Raise `PublishConflict` if a version was found with another digest than that of `pin`."""
    if found.removeprefix("sha256:") != pin.sha256:
        raise PublishConflict(
            f"{where} already holds another content of {pin.library} {pin.version}: {found!r}; nothing was changed",
            hint="a version never changes: publish these bundles under another one, with --release-version",
        )


def _entry(pin: Pin) -> Entry:
    notes = {_REF_NAME: ref_name(pin), NOTE + "library": pin.library, NOTE + "version": pin.version}
    return _listed(pin.sha256, pin.size, notes)


def _provenance(pin: Pin, digest: Digest, size: int) -> Entry:
    # Not under the notes of a release, of which a version has one.
    notes = {_REF_NAME: ref_name(pin) + _PROVENANCE, NOTE + "provenance-of": pin.library}
    return _listed(digest, size, notes)


def _materials(pin: Pin, digest: Digest, size: int) -> Entry:
    notes = {NOTE + "materials-of": pin.library, NOTE + "version": pin.version}
    return _listed(digest, size, {_REF_NAME: ref_name(pin) + _MATERIALS, **notes})


def _is_made_of(entry: Entry, pin: Pin) -> bool:
    return (_note(entry, "materials-of"), _note(entry, "version")) == (pin.library, pin.version)


def ref_name(pin: Pin) -> str:
    """The name of a release for tools that know only OCI; no two have the same, and no index of referrers has it.

    It is ``<library>-<version>`` with ``_`` for ``+`` where that can be read back, and else has a digest behind ``--``.
    """
    plain = f"{pin.library}-{pin.version}".replace("+", "_")
    if _PLAIN.fullmatch(plain) and _read_back(plain) == (pin.library, pin.version):
        return plain
    readable = re.sub(r"[^a-z0-9]+", lambda run: run[0][0], plain)[:80].rstrip("._-")
    return f"{readable}--{sha256(f'{pin.library}/{pin.version}'.encode())[:32]}"


def _read_back(plain: str) -> tuple[str, str]:
    """Which release a plain name is of: a version is a date, or what begins with the last digit after a dash."""
    found = _DATED.fullmatch(plain) or _NUMBERED.fullmatch(plain) or _WORDED.fullmatch(plain)
    assert found is not None, "a plain name has a dash"
    return found[1], found[2].replace("_", "+")


def _listed(digest: str, size: int, notes: dict[str, str]) -> Entry:
    descriptor = Descriptor(media_type=MEDIA_INDEX, digest=f"sha256:{digest}", size=size, annotations=notes)
    made: Entry = msgspec.to_builtins(descriptor)
    return made


def _parsed(current: bytes | None, where: str) -> tuple[dict[str, Any], list[Entry]]:
    what = f"{OCI_INDEX} of {where}"
    index: Any = {"schemaVersion": 2, "mediaType": MEDIA_INDEX} if current is None else strict_json(current, what=what)
    entries = index.get("manifests", []) if isinstance(index, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise VerificationError(f"{what} is malformed: expected an OCI image index; nothing was changed")
    return index, entries


def _encoded(index: dict[str, Any], entries: Iterable[Entry]) -> bytes:
    return canonical_json({**index, "manifests": sorted(entries, key=_order)})


def _note(entry: Entry, name: str) -> str:
    notes = entry.get("annotations")
    return str(notes.get(NOTE + name, "")) if isinstance(notes, dict) else ""


def _order(entry: Entry) -> tuple[str, str]:
    notes = entry.get("annotations")
    return str(notes.get(_REF_NAME, "")) if isinstance(notes, dict) else "", str(entry.get("digest"))
