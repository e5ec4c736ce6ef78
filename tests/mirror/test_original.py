"""Roots and timestamps, of which only a part is signed: what was added on the way is not served as the publisher's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from kartifacts.config import Settings
from kartifacts.errors import VerificationError
from kartifacts.mirror.carry import export, import_
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.pull import Trust, pull
from kartifacts.mirror.verify import verify
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.commit import publish_staged
from kartifacts.trust.keychange import renew
from kartifacts.trust.keyring import Keyring
from tests.mirror.conftest import Origin

Change = Callable[[dict[str, Any]], object]

CHANGES: dict[str, Change | None] = {
    "a key beside the signed part": lambda found: found.update(note="hello"),
    "a signature by a stranger": lambda found: found["signatures"].append({"keyid": "0" * 64, "sig": "00" * 64}),
    "a key within a signature": lambda found: found["signatures"][0].update(note="hello"),
    "capital letters": lambda found: found["signatures"][0].update(sig=found["signatures"][0]["sig"].upper()),
    "white space": None,
}


def changed(content: bytes, change: Change | None) -> bytes:
    if change is None:
        return content + b"\n"
    found = json.loads(content)
    change(found)
    return json.dumps(found, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("name", ["timestamp.json", "1.root.json", "2.root.json"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_no_signature_covers_cannot_be_added_on_the_way(
    origin: Origin, settings: Settings, tmp_path: Path, name: str, what: str
) -> None:
    shutil.copytree(origin.keyring.path, tmp_path / "ring")
    renew(tmp_path / "ring", "root", now=datetime.now(timezone.utc))
    publish_staged(DirectoryBucket(origin.path), Keyring.load(tmp_path / "ring"))
    trust, carried, bucket = Trust((origin.root("online"),)), tmp_path / "carried", DirectoryBucket(tmp_path / "mirror")
    export(origin.source, carried, trust, Filter(), replace(settings, store=tmp_path / "publisher"))
    sound = (carried / "metadata" / name).read_bytes()
    for root in (carried, origin.path):
        (root / "metadata" / name).write_bytes(changed(sound, CHANGES[what]))
    with pytest.raises(VerificationError, match=name):
        import_(carried, bucket, trust, settings)
    assert not (tmp_path / "mirror").exists()
    if name == "1.root.json":  # what was given is known to be right, and is what is passed on
        pull(origin.source, bucket, trust, Filter(), settings)
        assert (bucket.root / "metadata" / name).read_bytes() == sound
        assert verify(DirectoryBucket(carried), trust, None, settings).faults
        return
    with pytest.raises(VerificationError, match=name):
        pull(origin.source, bucket, trust, Filter(), settings)
    assert not (tmp_path / "mirror").exists()
    with pytest.raises(VerificationError, match=name):
        verify(DirectoryBucket(carried), trust, None, settings)
