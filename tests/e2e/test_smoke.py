"""ci/smoke.py, which says whether a release works on a clean machine, sees what is wrong with one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import CPU_ARCHS, Answer, Machine, Released
from tests.sites import plan_text

CHECKOUT = Path(__file__).parents[2]
# This machine is not clean, and has the references elsewhere; all else is as it stands there.
RUN = f"""
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("smoke", {str(CHECKOUT / "ci/smoke.py")!r})
smoke = importlib.util.module_from_spec(spec)
spec.loader.exec_module(smoke)
smoke.refuse_other_machines = lambda: None
smoke.SOURCES = Path({str(CHECKOUT / "kernels")!r})
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """What `released` promises."""
    path = tmp_path / "plan.toml"
    build = {"name": "all", "machine": os.uname().machine, "archs": CPU_ARCHS.split()}
    path.write_text(plan_text("kartifacts", build))
    return path


@pytest.fixture
def reader(machine: Machine, released: Released) -> Machine:
    """A machine that has fetched the release."""
    fetched = machine.cli("fetch", lock=released.lock_file, mirrors=released.path)
    assert fetched.code == 0, fetched.err
    return machine


def smoke(reader: Machine, released: Released, plan: Path, change: str = "") -> Answer:
    return reader.python(f"{RUN}{change}\nsmoke.main()", plan, lock=released.lock_file, jit="never", offline=1)


def test_every_kernel_of_this_cpu_is_called_and_every_other_is_hashed(
    reader: Machine, released: Released, plan: Path
) -> None:
    answer = smoke(reader, released, plan)
    assert answer.code == 0, answer.err
    listed = reader.cli("list", "--json", lock=released.lock_file).data["kernels"]
    uris = {kernel["uri"] for kernel in listed}
    assert len(listed) == len(uris) * len(CPU_ARCHS.split())
    assert answer.out == f"{len(uris)} kernels agree with numpy here; {len(listed)} have the bytes that were released\n"


def test_a_kernel_with_other_bytes_is_seen(reader: Machine, released: Released, plan: Path) -> None:
    victim = reader.cli("list", "--json", lock=released.lock_file).data["kernels"][-1]
    path = Path(victim["place"])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    answer = smoke(reader, released, plan)
    assert (answer.code, answer.out) == (1, "")
    assert f"{victim['uri']} for {victim['arch']} is not what was released" in answer.err


def test_a_release_with_less_than_its_plan_promises_is_seen(reader: Machine, released: Released, plan: Path) -> None:
    more = "cpu:x86-64-v2" if os.uname().machine == "x86_64" else "cpu:armv9-a"
    plan.write_text(plan.read_text().replace("archs = [", f'archs = ["{more}", '))
    answer = smoke(reader, released, plan)
    assert answer.code == 1
    assert "kernels are pinned; the plan promises" in answer.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("smoke.TOLERANCE = dict.fromkeys(smoke.TOLERANCE, 0.0)", "is off by"),
        ("smoke.call = lambda op, axes: [(smoke.np.full(3, smoke.np.nan), smoke.np.ones(3))]", "is off by nan"),
        ("smoke.ops = object(); smoke.call('norm/another', {'dtype': 'float32'})", "does not know how to call norm/an"),
    ],
    ids=["wrong", "nan", "unknown"],
)
def test_results_that_are_not_the_reference_s_are_seen(
    reader: Machine, released: Released, plan: Path, change: str, says: str
) -> None:
    answer = smoke(reader, released, plan, change)
    assert answer.code == 1
    assert says in answer.err
