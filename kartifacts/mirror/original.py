"""Refuses metadata that says more than what was signed: a mirror serves the publisher's bytes, and no one else's.

Snapshot, targets and libraries are named by a sha256 that is signed; of timestamps and roots only a part is signed.
"""

from __future__ import annotations

from collections.abc import Mapping

from kartifacts.errors import VerificationError
from kartifacts.model.layout import TIMESTAMP, View, metadata_path


def check_original(view: View, roots: Mapping[str, bytes], timestamp: bytes) -> None:
    """Refuse a root or timestamp that is written otherwise than publishers do, or has signatures that are none.

    Args:
        roots: path → content, of every version; whoever may sign by one of them may have signed what is there.

    Raises:
        VerificationError: naming the file.
    """
    _check("timestamp", {metadata_path(view, TIMESTAMP): timestamp}, roots)
    _check("root", roots, roots)


def _check(role: str, contents: Mapping[str, bytes], roots: Mapping[str, bytes]) -> None:
    from securesystemslib.exceptions import UnverifiedSignatureError
    from tuf.api.metadata import Root

    from kartifacts.trust.signed import parse, parse_any, signed_bytes

    keys = {}
    for path, content in roots.items():
        root = parse(content, Root, path).signed
        keys.update({keyid: root.keys[keyid] for keyid in root.roles[role].keyids})
    for path, content in contents.items():
        metadata = parse_any(content, path)
        over = signed_bytes(metadata, path)
        for keyid, signature in metadata.signatures.items():
            if keyid not in keys:
                raise _changed(path, f"it has a signature by {keyid[:8]!r}, a key that no root knows")
            try:
                keys[keyid].verify_signature(signature, over)
            except UnverifiedSignatureError as error:
                raise _changed(path, f"the signature by {keyid[:8]!r} does not hold") from error
            if signature.unrecognized_fields or signature.signature != signature.signature.lower():
                raise _changed(path, f"the signature by {keyid[:8]!r} is written otherwise")
        in_order = list(metadata.signatures) == sorted(metadata.signatures)
        if metadata.unrecognized_fields or not in_order or metadata.to_bytes() != content:
            raise _changed(path, "it holds more than what is signed, or is written otherwise")


def _changed(path: str, how: str) -> VerificationError:
    return VerificationError(
        f"{path} is not as a publisher writes it: {how}; readers see what they saw before",
        hint="somebody changed it on the way, in a part that no signature covers; get it from the publisher",
    )
