"""What the commands do, as functions: each composes the packages below it and returns a report that is plain data."""

from __future__ import annotations

from kartifacts.cli.flows.asking import explain_key
from kartifacts.cli.flows.comparing import diff, inspect
from kartifacts.cli.flows.consuming import fetch, gc, listing, status, verify
from kartifacts.cli.flows.gating import gate
from kartifacts.cli.flows.matrix import matrix
from kartifacts.cli.flows.merging import merge
from kartifacts.cli.flows.producing import (
    build,
    build_planned,
    import_checksums,
    lock,
    publish,
    write_costs,
    write_report,
)
from kartifacts.cli.flows.provenance import Demand
from kartifacts.cli.flows.selecting import Selection
from kartifacts.cli.flows.sharding import build_shard
from kartifacts.cli.flows.wheel import wheel, write_index

__all__ = [
    "Demand",
    "Selection",
    "build",
    "build_planned",
    "build_shard",
    "diff",
    "explain_key",
    "fetch",
    "gate",
    "gc",
    "import_checksums",
    "inspect",
    "listing",
    "lock",
    "matrix",
    "merge",
    "publish",
    "status",
    "verify",
    "wheel",
    "write_costs",
    "write_index",
    "write_report",
]
