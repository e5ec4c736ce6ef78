#!/usr/bin/env python3
"""The client of `kartifacts sync` as tuf-conformance calls it: the same fetcher, updater and HTTP client."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from kartifacts import config
from kartifacts.errors import KartifactsError
from kartifacts.remote.addresses import Address, parse
from kartifacts.sources.breaker import Breaker
from kartifacts.sources.client import Client
from kartifacts.trust.client import Read
from kartifacts.trust.client_session import updating

TRUSTED = "bootstrap"  # no .json: the suite takes each of those in the directory for metadata
METADATA, TARGETS = "metadata", "targets"


def reader(bases: dict[str, str]) -> Read:
    """Reads ``metadata/...`` and ``targets/...`` below their URLs, as `HttpSource.document` does.

    That one refuses the names of roles which no library can have, but which the suite tries.
    """
    clients = {}
    for name, base in bases.items():
        address = parse(base.rstrip("/"))
        clients[name] = address, Client(address, replace(config.read(), proxies=()), Breaker(base))

    def read(path: str, limit: int) -> bytes:
        name, _, rest = path.partition("/")
        base, client = clients[name]
        return client.whole(Address(*base.origin, f"{urlsplit(base.url).path}/{rest}", base.login), limit)

    return read


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--metadata-dir", type=Path, required=True)
    parser.add_argument("--metadata-url", default="")
    parser.add_argument("--target-name", action="append", default=[])
    parser.add_argument("--target-base-url", default="")
    parser.add_argument("--target-dir", type=Path)
    parser.add_argument("command", choices=["init", "refresh", "download"])
    parser.add_argument("root", nargs="?", type=Path)
    asked = parser.parse_args()
    state: Path = asked.metadata_dir
    if asked.command == "init":
        trusted = asked.root.read_bytes()
        (state / TRUSTED).write_bytes(trusted)
        (state / "root.json").write_bytes(trusted)
        return 0
    read = reader({METADATA: asked.metadata_url} | ({TARGETS: asked.target_base_url} if asked.target_base_url else {}))
    try:
        with updating((state / TRUSTED).read_bytes(), state, read, METADATA) as updater:
            updater.refresh()
            for name in asked.target_name:
                target = updater.get_targetinfo(name)
                if target is None:
                    raise KartifactsError(f"no target {name!r}")
                updater.target_dir = str(asked.target_dir)
                if updater.find_cached_target(target) is None:
                    updater.download_target(target, target_base_url=TARGETS)
    except KartifactsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
