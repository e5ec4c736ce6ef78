"""From a pin to what it names: release, bundle manifests and kernel tables, each checked before it is parsed."""

from __future__ import annotations

from functools import cached_property

from kartifacts.errors import VerificationError
from kartifacts.fetch.transfer import Transfer
from kartifacts.model import frames
from kartifacts.model.digest import parse_digest
from kartifacts.model.manifest import (
    BundleManifest,
    Descriptor,
    Listed,
    Pin,
    Release,
    Table,
    decode_bundle,
    decode_listing,
    decode_release,
    decode_table,
)


class Bundle:
    """One bundle of a pinned release; its manifest and its table are read when they are first asked for."""

    def __init__(self, pin: Pin, descriptor: Descriptor, transfer: Transfer) -> None:
        self.pin = pin
        self.descriptor = descriptor
        self._transfer = transfer

    def __repr__(self) -> str:
        return f"<Bundle {self.name}>"

    @property
    def name(self) -> str:
        note = self.descriptor.note
        words = (self.pin.library, self.pin.version, note("family") or self.descriptor.sha256[:12], note("arch"))
        return " ".join(word for word in words if word)

    @cached_property
    def manifest(self) -> BundleManifest:
        what = f"manifest of bundle {self.name}"
        return decode_bundle(self._transfer.blob(self.descriptor.sha256, self.descriptor.size, what=what), what=what)

    @cached_property
    def table(self) -> Table:
        return decode_table(self._raw_table(), self.manifest, what=f"kernel table of bundle {self.name}")

    def listed(self) -> list[Listed]:
        """What the table lists, unchecked and not kept, for those who only count."""
        return decode_listing(self._raw_table(), what=f"kernel table of bundle {self.name}")

    def _raw_table(self) -> bytes:
        config = self.manifest.config
        what = f"kernel table of bundle {self.name}"
        compressed = self._transfer.blob(config.sha256, config.size, what=what)
        return frames.decompress(compressed, frames.table_size(config, what), what=what)

    def forget(self) -> None:
        """Let go of the table, which may be large; it is read again when it is asked for."""
        vars(self).pop("table", None)


def read_release(pin: Pin, transfer: Transfer) -> Release:
    what = f"release {pin.library} {pin.version}"
    release = decode_release(transfer.blob(parse_digest(pin.sha256), pin.size, what=what), what=what)
    if (release.library, release.version) != (pin.library, pin.version):
        raise VerificationError(
            f"what is pinned as {what} says that it is {release.library[:100]!r} {release.version[:100]!r}",
            expected=f"{pin.library} {pin.version}",
            actual=f"{release.library} {release.version}"[:200],
        )
    return release
