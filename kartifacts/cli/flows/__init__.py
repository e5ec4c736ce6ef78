"""What the commands do, as functions: each composes the packages below it and returns a report that is plain data."""

from __future__ import annotations

from kartifacts.cli.flows.asking import explain_key
from kartifacts.cli.flows.consuming import fetch, gc, listing, status, verify
from kartifacts.cli.flows.producing import build, import_checksums, lock, publish
from kartifacts.cli.flows.provenance import Demand
from kartifacts.cli.flows.selecting import Selection
from kartifacts.cli.flows.wheel import wheel, write_index

__all__ = [
    "Demand",
    "Selection",
    "build",
    "explain_key",
    "fetch",
    "gc",
    "import_checksums",
    "listing",
    "lock",
    "publish",
    "status",
    "verify",
    "wheel",
    "write_index",
]
