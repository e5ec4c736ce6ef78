"""The local content-addressed store: verified kernels and metadata under names that hold their digest.

    <root>/v1/sha256/<aa>/<64 hex><suffix>    one entry: mode 0444, never changed in place, never replaced
    <root>/v1/tmp                             large blocks under way, for who comes next to go on with
    <root>/v1/locks                           flock files, removed when released; elsewhere if this is a network mount
    <root>/v1/quarantine                      entries that were damaged, kept for whoever wants to know why

Reading writes nothing, so a complete store may lie on a read-only file system.  Locks only save work: without them two
processes fetch the same bytes, and the second finds the name taken.
"""

from __future__ import annotations

from kartifacts.store.store import Store
from kartifacts.store.upkeep import Damage, Entry, GcReport, Holdings, VerifyReport
from kartifacts.store.writing import Batch, Partial, Writer

__all__ = ["Batch", "Damage", "Entry", "GcReport", "Holdings", "Partial", "Store", "VerifyReport", "Writer"]
