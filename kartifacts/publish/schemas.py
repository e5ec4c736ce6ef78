"""JSON schemas of every file that others may write or read, generated from the types that read them here.

``python -m kartifacts.publish.schemas manifests/schemas`` brings the copies in a checkout up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from kartifacts.model.manifest import BundleManifest, Lock, Release, Table
from kartifacts.model.materials import Materials
from kartifacts.model.spec import FamilyDecl
from kartifacts.publish.plan import Plan
from kartifacts.publish.promises import Promises
from kartifacts.publish.shards import Shard

_TYPES = {
    "bundle": BundleManifest,
    "lock": Lock,
    "materials": Materials,
    "op": FamilyDecl,
    "plan": Plan,
    "promises": Promises,
    "release": Release,
    "shard": Shard,
    "table": Table,
}


def schemas() -> dict[str, str]:
    """File name → content."""
    return {
        f"{name}.schema.json": json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)},
            indent=2,
            sort_keys=True,
        )
        + "\n"
        for name, kind in _TYPES.items()
    }


if __name__ == "__main__":
    for file_name, content in schemas().items():
        Path(sys.argv[1], file_name).write_text(content, encoding="utf-8")
