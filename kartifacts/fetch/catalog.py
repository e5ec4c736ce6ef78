"""From a pin to what it names: release, bundle manifests and kernel tables, each checked before it is parsed."""

from __future__ import annotations

import re
from functools import cached_property

from kartifacts.errors import VerificationError
from kartifacts.fetch.transfer import Transfer
from kartifacts.fetch.unpack import decompress
from kartifacts.model.digest import parse_digest
from kartifacts.model.manifest import (
    MAX_TABLE_RAW,
    BundleManifest,
    Descriptor,
    Pin,
    Release,
    Table,
    decode_bundle,
    decode_release,
    decode_table,
)


class Bundle:
    """One bundle of a pinned release; its manifest and its table are read when they are first asked for."""

    def __init__(self, descriptor: Descriptor, transfer: Transfer) -> None:
        self.descriptor = descriptor
        self._transfer = transfer

    def __repr__(self) -> str:
        note = self.descriptor.note
        return f"<Bundle {note('library')} {note('version')} {note('family')} for {note('arch')}>"

    @property
    def name(self) -> str:
        note = self.descriptor.note
        return " ".join(
            text for text in (note("library"), note("version"), note("family"), note("arch")) if text
        ) or str(self.descriptor.sha256[:12])

    @cached_property
    def manifest(self) -> BundleManifest:
        what = f"manifest of bundle {self.name}"
        return decode_bundle(self._transfer.blob(self.descriptor.sha256, self.descriptor.size, what=what), what=what)

    @cached_property
    def table(self) -> Table:
        config = self.manifest.config
        what = f"kernel table of bundle {self.name}"
        compressed = self._transfer.blob(config.sha256, config.size, what=what)
        raw = decompress(compressed, _raw_size(config, what), what=what)
        return decode_table(raw, self.manifest, what=what)

    def forget(self) -> None:
        """Let go of the table, which may be large; it is read again when it is asked for."""
        vars(self).pop("table", None)


def read_release(pin: Pin, transfer: Transfer) -> Release:
    what = f"release {pin.library} {pin.version}"
    return decode_release(transfer.blob(parse_digest(pin.sha256), pin.size, what=what), what=what)


def _raw_size(config: Descriptor, what: str) -> int:
    text = config.note("raw-size")
    if not re.fullmatch(r"\d{1,12}", text) or int(text) > MAX_TABLE_RAW:
        raise VerificationError(
            f"{what} says that it has {text[:40]!r} bytes when decompressed; expected at most {MAX_TABLE_RAW}"
        )
    return int(text)
