"""Builders that share nothing but a bucket of a real S3 server make the release that one machine would make."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import VerificationError
from kartifacts.remote import s3
from tests.sites import CPU, Site
from tests.stores.conftest import AWS, Place, S3Server

pytestmark = [
    pytest.mark.stores,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs an x86-64 machine, whose CPUs have levels"),
]


@pytest.fixture
def place(seaweedfs: S3Server) -> Place:
    return seaweedfs.place()


def objects(server: S3Server, place: Place) -> dict[str, bytes]:
    """What lies in the bucket, as another client sees it."""
    where = s3.place(place.text)
    client = server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=where.bucket, Prefix=where.key(""))
    names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    prefix = len(where.key(""))
    return {
        name[prefix:].lstrip("/"): client.get_object(Bucket=where.bucket, Key=name)["Body"].read() for name in names
    }


def started(site: Site, place: Place, runs: Mapping[str, str]) -> list[dict[str, Any]]:
    """Runs of shards, all at once; their reports."""
    processes = [site.start(machine, shard, meet=place.text, **AWS) for machine, shard in runs.items()]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output) for output in outputs]


def alone(site: Site) -> dict[str, bytes]:
    """The release that one machine makes."""
    assert site.cli("plain", "build", "--plan", site.plan, "--out", site.root / "plain").code == 0
    return site.files("plain")


def test_two_machines_at_once_make_the_release_of_one(site: Site, place: Place, seaweedfs: S3Server) -> None:
    reports = started(site, place, {"a": "1/2", "b": "2/2"})
    assert [report["built"] for report in reports] == [4, 4]
    there = objects(seaweedfs, place)
    assert sum(name.startswith("kernels/") for name in there) == 8
    assert sum(name.startswith("shards/") for name in there) == 2
    merged = site.merge("merged", meet=place.text, **AWS)
    assert merged.code == 0, merged.err
    assert site.files("merged") == alone(site)
    assert site.gate("merged").code == 0


def test_a_run_that_was_killed_is_gone_on_with_elsewhere_and_a_whole_one_compiles_nothing(
    site: Site, place: Place, seaweedfs: S3Server, tmp_path: Path
) -> None:
    gate, count = tmp_path / "gate", tmp_path / "count"
    os.mkfifo(gate)
    waiting = f'case " $* " in *" -c "*) echo >> {count}; [ $(wc -l < {count}) = 6 ] && : > {gate};; esac\n'
    site.compiler.first.write_text(waiting)
    process = site.start("killed", "1/1", meet=place.text, **AWS)
    with open(gate, "rb"):  # opens once the sixth compilation begins
        process.send_signal(signal.SIGKILL)
        process.communicate()
    site.compiler.first.unlink()
    done = sum(name.startswith("kernels/") for name in objects(seaweedfs, place))
    assert 3 <= done <= 5, "five were made; the last may have been on their way"
    answer = site.merge("merged", meet=place.text, **AWS)
    assert answer.code == VerificationError.exit_code
    assert "of build 'cpu' is missing" in answer.err

    compiled = site.compiler.compiled
    (report,) = started(site, place, {"fresh": "1/1"})
    assert (report["taken"], report["built"]) == (done, 8 - done)
    assert site.compiler.compiled == compiled + 8 - done
    there = objects(seaweedfs, place)
    (again,) = started(site, place, {"third": "1/1"})
    assert (again["taken"], again["built"]) == (8, 0)
    assert site.compiler.compiled == compiled + 8 - done
    assert objects(seaweedfs, place) == there
    assert site.merge("merged", meet=place.text, **AWS).code == 0
    assert site.files("merged") == alone(site)


def test_two_runs_of_one_shard_at_once_end_as_one_run_does(site: Site, place: Place, seaweedfs: S3Server) -> None:
    """A job that a CI system started again while its first try still ran."""
    site.write({**CPU, "shards": 1})
    started(site, place, {"first": "1/1", "again": "1/1"})
    there = objects(seaweedfs, place)
    assert sum(name.startswith("kernels/") for name in there) == 8
    (document,) = (json.loads(there[name]) for name in there if name.startswith("shards/"))
    records = {name: json.loads(there[name]) for name in there if name.startswith("kernels/")}
    assert [records[f"kernels/{made['key']}.json"] for made in document["kernels"]] == document["kernels"]
    assert site.merge("merged", meet=place.text, **AWS).code == 0
    assert site.files("merged") == alone(site)
