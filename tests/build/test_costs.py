"""What compilations have cost is kept, believed with care, and never in the way of a build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build.compile import compile_specs
from kartifacts.build.costs import FILE, LINK, SCHEMA, Cost, Costs, name_of
from kartifacts.build.library import Library
from kartifacts.config import Settings
from kartifacts.errors import BuildError, StoreError
from kartifacts.model.spec import Spec

from .conftest import CPU, Compiler

NAME = name_of("demo", "a.cu", "nvcc")


def test_too_little_memory_is_forgotten_at_once_and_too_much_by_halves() -> None:
    costs = Costs()
    assert costs.memory(NAME, 400) == 400
    costs.learn(NAME, 1.0, 100)
    assert costs.memory(NAME, 400) == 100
    costs.learn(NAME, 1.0, 900)
    assert costs.memory(NAME, 400) == 900
    costs.learn(NAME, 1.0, 100)
    assert costs.memory(NAME, 400) == 500


def test_a_source_that_was_never_measured_is_taken_for_a_usual_one_of_its_toolchain() -> None:
    costs = Costs(
        {name_of("demo", f"{name}.cu", "nvcc"): Cost(cost, 1) for name, cost in (("a", 1), ("b", 9), ("c", 3))}
    )
    assert costs.seconds(name_of("demo", "new.cu", "nvcc")) == 3
    assert costs.seconds(name_of("demo", "a.cu", "nvcc")) == 1
    assert costs.seconds(name_of("demo", "new.cpp", "cxx")) == Costs().seconds(name_of("demo", "new.cpp", "cxx")) > 0


def test_seconds_follow_a_machine_that_is_slower() -> None:
    costs = Costs({NAME: Cost(1.0, 1)})
    for _ in range(8):
        costs.learn(NAME, 3.0, 1)
    assert costs.seconds(NAME) == pytest.approx(3.0, abs=0.02)


DAMAGED = {
    "empty": "",
    "no json": "{",
    "other schema": json.dumps({"schema": SCHEMA + 1, "costs": {}}),
    "a list": "[]",
    "negative": json.dumps({"schema": SCHEMA, "costs": {NAME: {"seconds": -1, "memory": 1}}}),
    "negative memory": json.dumps({"schema": SCHEMA, "costs": {NAME: {"seconds": 1, "memory": -1}}}),
    "endless": json.dumps({"schema": SCHEMA, "costs": {NAME: {"seconds": 1e999, "memory": 1}}}),
    "text": json.dumps({"schema": SCHEMA, "costs": {NAME: {"seconds": "1", "memory": 1}}}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_table_is_forgotten_with_a_warning_and_the_build_writes_a_new_one(
    settings: Settings, make_spec: Callable[..., Spec], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    settings.workspace.mkdir()
    path = settings.workspace / FILE
    path.write_text(DAMAGED[damage])
    spec = make_spec()
    compile_specs([spec], settings)
    assert "what earlier builds have cost is forgotten" in caplog.text
    assert Costs.read(path).known.keys() == {
        name_of(spec.library, source, "cxx") for source in ("demo/answer_cpu.cpp", "demo/answer_binding.cpp")
    }


def test_a_build_keeps_what_it_measured_and_the_next_one_expects_that(
    settings: Settings, demo: Library, make_spec: Callable[..., Spec]
) -> None:
    report = compile_specs([make_spec("small")], settings).report
    costs = Costs.read(settings.workspace / FILE)
    measured = {step["title"].split()[1]: step for step in report["steps"] if step["title"].startswith("compiling")}
    for source in ("demo/answer_cpu.cpp", "demo/answer_binding.cpp"):
        known = costs.known[name_of("demolib", source, "cxx")]
        assert known.memory == measured[source]["memory"]
        assert known.seconds == measured[source]["cpu_seconds"]
    spec = make_spec("large")  # another specialisation of the same source
    assert costs.of(spec) == pytest.approx(costs.seconds(name_of("demolib", "demo/answer_cpu.cpp", "cxx")) + LINK)


def test_what_was_learned_is_kept_though_the_build_fails(
    make_settings: Callable[..., Settings], demo: Library, compiler: Compiler
) -> None:
    compiler.misbehave('case "$all" in *1000*) sleep 1; exit 1;; esac')
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path), KARTIFACTS_JOBS="1")
    with pytest.raises(BuildError):
        compile_specs(demo.specs([], [CPU])[0], settings)
    assert name_of("demolib", "demo/answer_binding.cpp", "cxx") in Costs.read(settings.workspace / FILE).known


def test_a_compiler_that_was_killed_is_given_more_by_the_next_build(
    make_settings: Callable[..., Settings], make_spec: Callable[..., Spec], compiler: Compiler
) -> None:
    compiler.misbehave('case "$all" in *answer_cpu*) exit 137;; esac')
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path))
    with pytest.raises(BuildError, match="was killed"):
        compile_specs([make_spec()], settings)
    costs = Costs.read(settings.workspace / FILE)
    killed = costs.memory(name_of("demolib", "demo/answer_cpu.cpp", "cxx"), 0)
    usual = costs.memory(name_of("demolib", "demo/answer_binding.cpp", "cxx"), 0)
    assert killed > 400 << 20 > usual > 0


def test_a_build_that_read_the_table_before_others_wrote_theirs_removes_nothing(tmp_path: Path) -> None:
    path = tmp_path / FILE
    tables = {name: Costs.read(path) for name in ("demo:1.cu nvcc", "demo:2.cu nvcc", NAME)}
    for name, table in tables.items():
        table.learn(name, 1.0, 1)
        table.write(path)
    assert Costs.read(path).known.keys() == tables.keys()


def test_a_table_that_cannot_be_written_is_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        Costs({NAME: Cost(1, 1)}).write(tmp_path / "file" / FILE)
