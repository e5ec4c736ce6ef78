"""Shards take about as long as each other, and every machine divides the work alike."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kartifacts.build.costs import Cost, Costs, name_of
from kartifacts.build.library import open_library
from kartifacts.build.partition import partition
from kartifacts.cli.flows.matrix import matrix
from kartifacts.cli.flows.planned import costs_of, work_of
from kartifacts.model.spec import Spec
from kartifacts.publish.plan import read_plan

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "manifests/release.toml"
Names = list[tuple[str, str]]


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
    work = work_of(PLAN, ["cuda-13.0-x86_64"])
    return list(work.specs["cuda-13.0-x86_64"])


def named(part: list[Spec]) -> Names:
    return [(spec.uri, str(spec.arch)) for spec in part]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("seed", range(5))
def test_shards_differ_by_no_more_than_the_largest_kernel(seed: int, n: int, specs: list[Spec]) -> None:
    chance = random.Random(seed)
    costs = {name: chance.expovariate(1.0) ** 3 for name in named(specs)}  # few large ones, many small
    parts = partition(specs, lambda spec: costs[spec.uri, str(spec.arch)], n)
    assert sorted(name for part in parts for name in named(part)) == sorted(costs), "each once"
    loads = [sum(costs[name] for name in named(part)) for part in parts]
    assert max(loads) - min(loads) <= max(costs.values()) + 1e-9
    assert max(loads) <= max(sum(costs.values()) / n, 0.0) + max(costs.values())


def test_the_order_in_which_kernels_are_found_decides_nothing(specs: list[Spec]) -> None:
    cost = Costs().of  # the same for many
    usual = [sorted(named(part)) for part in partition(specs, cost, 5)]
    for seed in range(5):
        other = specs.copy()
        random.Random(seed).shuffle(other)
        assert [sorted(named(part)) for part in partition(other, cost, 5)] == usual


def test_more_shards_than_kernels_leave_some_without_work(specs: list[Spec]) -> None:
    parts = partition(specs[:3], lambda _: 1.0, 5)
    assert sorted(map(len, parts)) == [0, 0, 1, 1, 1]


def test_kernels_that_cost_nothing_are_shared_out_too(specs: list[Spec]) -> None:
    assert [len(part) for part in partition(specs[:8], lambda _: 0.0, 4)] == [2, 2, 2, 2]


_ELSEWHERE = """
import json, sys
from pathlib import Path
from kartifacts.build.partition import partition
from kartifacts.cli.flows.planned import costs_of, work_of
path = Path(sys.argv[1])
work = work_of(path, [sys.argv[2]])
cost, digest = costs_of(work.plan, path)
parts = partition(work.specs[sys.argv[2]], cost, 3)
print(json.dumps([digest, [[(spec.uri, str(spec.arch)) for spec in part] for part in parts]]))
"""


def test_two_machines_divide_a_plan_alike_whatever_they_have_learned_themselves(tmp_path: Path) -> None:
    """Each reads the costs that lie beside the plan; its own workspace, locale and hash seed count for nothing."""
    said = []
    for number, locale in enumerate(("C", "tr_TR.UTF-8")):
        home = tmp_path / str(number)
        own = home / "workspace/costs.json"
        own.parent.mkdir(parents=True)
        learned = Costs({name: Cost(99.0 * number, 1) for name in costs_beside_the_plan().known})
        own.write_bytes(learned.encoded)
        answer = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE, str(PLAN), "cuda-13.0-x86_64"],
            env={
                "HOME": str(home),
                "KARTIFACTS_WORKSPACE": str(own.parent),
                "PYTHONHASHSEED": str(number + 1),
                "LC_ALL": locale,
                "PYTHONPATH": str(ROOT),
            },
            cwd=home,
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(json.loads(answer.stdout))
    assert said[0] == said[1]
    assert all(said[0][1])


def test_the_plan_says_what_each_shard_gets_before_there_is_a_job(specs: list[Spec]) -> None:
    report, text = matrix(PLAN, form="table", builds=["cuda-13.0-x86_64"], check=True)
    (build,) = report["builds"]
    cost, _ = costs_of(read_plan(PLAN), PLAN)
    shares = [part["seconds"] for part in build["shards"]]
    assert sum(part["kernels"] for part in build["shards"]) == build["kernels"] == len(specs)
    assert sum(shares) == pytest.approx(sum(map(cost, specs)), abs=0.01)
    assert max(shares) - min(shares) <= max(map(cost, specs)) + 0.01
    assert f"shard 2/2: {build['shards'][1]['kernels']} kernels, {shares[1]:.1f} s of a CPU" in text


# -- the costs that are kept with the plan -----------------------------------------------------------------------------


def costs_beside_the_plan() -> Costs:
    return Costs.read(PLAN.parent / read_plan(PLAN).costs)


def declared() -> set[str]:
    families = open_library(ROOT / "kernels").families
    return {
        name_of("kartifacts", f"{family}/{source}", toolchain)
        for family, decl in families.items()
        for op in decl.op
        for device in op.device.values()
        for source, toolchain in (
            *((source, device.toolchain) for source in device.sources),
            *((source, "cxx") for source in device.host_sources),
        )
    }


def test_every_cost_that_is_kept_is_of_a_source_that_there_is() -> None:
    """A cost under a name that nothing asks for decides nothing, and nobody would see that."""
    known = costs_beside_the_plan().known
    assert known
    assert known.keys() <= declared()


def test_each_kernel_of_the_plan_is_shared_out_by_what_its_own_sources_took(specs: list[Spec]) -> None:
    cost, _ = costs_of(read_plan(PLAN), PLAN)
    known = costs_beside_the_plan().known
    for spec in specs:
        names = [name_of(spec.library, source, spec.device.toolchain) for source in spec.device.sources]
        assert cost(spec) == pytest.approx(sum(known[name].seconds for name in names), abs=0.1 + 1e-9), spec.uri
