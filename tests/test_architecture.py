"""The rules that every module keeps, and what users get when they import it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kartifacts
from tests.conftest import REPORT, WATCH, Machine

CHECKOUT = Path(__file__).parents[1]
PACKAGE = CHECKOUT / "kartifacts"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_kernels" not in path.parts)
# Programs of their own: a build starts them in processes to which standard output is where answers go, and whose
# environment and end are theirs.  The library itself imports none of them, which a test below sees to.
WORKERS = {
    f"build/toolchains/{name}.py"
    for name in ("worker", "nvrtc_worker", "python_worker", "triton_worker", "cutedsl_worker")
}
HEAVY = (
    "torch",
    "tvm_ffi",
    "numpy",
    "requests",
    "urllib3",
    "zstandard",
    "msgspec",
    "tqdm",
    "click",
    "elftools",
    "socket",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


# -- the import --------------------------------------------------------------------------------------------------------

_GETTEXT = {"LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"}  # for click's own sentences
_SPY = """
import os, collections.abc
asked = []
class Spy(collections.abc.MutableMapping):
    def __init__(self, real): self.real = real
    def __getitem__(self, name): asked.append(name); return self.real[name]
    def __setitem__(self, name, value): asked.append(name); self.real[name] = value
    def __delitem__(self, name): asked.append(name); del self.real[name]
    def __iter__(self): asked.append("all of them"); return iter(self.real)
    def __len__(self): return len(self.real)
os.environ = Spy(os.environ)
before = set(sys.modules)
"""


@pytest.mark.parametrize(
    ("modules", "may_load"),
    [
        ("kartifacts", ()),
        ("kartifacts, kartifacts.errors, kartifacts.config", ()),
        ("kartifacts, kartifacts.ops", ()),
        ("kartifacts.cli", ("click",)),
        ("kartifacts.model.manifest, kartifacts.model.spec", ("msgspec",)),
    ],
)
def test_an_import_reads_no_variable_writes_nothing_and_loads_nothing_heavy(
    machine: Machine, modules: str, may_load: tuple[str, ...]
) -> None:
    code = WATCH + _SPY + f"import {modules}\nresult = [asked, sorted(set(sys.modules) - before)]\n" + REPORT
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, env=machine.environ({}), cwd=machine.home, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    asked, loaded = found["result"]
    assert found["seen"] == []
    assert set(asked) <= (_GETTEXT if "click" in may_load else set())
    assert not [name for name in loaded if name.partition(".")[0] in HEAVY and name.partition(".")[0] not in may_load]
    if modules == "kartifacts":
        assert [name for name in loaded if name.startswith("kartifacts")] == ["kartifacts"]


def test_the_public_surface_is_what_it_says() -> None:
    assert kartifacts.__all__ == ["Kernel", "Registry", "__version__", "build_and_load", "load"]
    assert dir(kartifacts) == sorted(kartifacts.__all__)
    for name in kartifacts.__all__:
        assert getattr(kartifacts, name) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        kartifacts.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from kartifacts import nothing  # noqa: F401
    scope: dict[str, Any] = {}
    exec("from kartifacts import *", scope)
    assert set(kartifacts.__all__) <= set(scope)


# -- rules that the code keeps -----------------------------------------------------------------------------------------


def calls_and_names(path: Path) -> Iterator[tuple[str, str, ast.AST]]:
    """Each dotted name that a module uses, with the function that it stands in."""

    def walk(node: ast.AST, inside: str) -> Iterator[tuple[str, str, ast.AST]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = node.name
        if isinstance(node, (ast.Attribute, ast.Name)):
            yield ast.unparse(node), inside, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", inside, node
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text()), "")


def test_only_config_and_one_function_for_compilers_read_the_environment() -> None:
    reading = {
        "os.environ",
        "os.environb",
        "os.getenv",
        "os.putenv",
        "os.path.expanduser",
        "Path.home",
        "os.get_exec_path",
    }
    found = {
        (name_of(path), inside) for path in MODULES for name, inside, _ in calls_and_names(path) if name in reading
    }
    elsewhere = {row for row in found if row[0] not in {"config.py", *WORKERS}}
    assert elsewhere == {("build/toolchains/probe.py", "environment")}


def test_programs_are_looked_for_on_the_path_of_the_settings() -> None:
    """Without `path`, shutil.which reads the environment itself."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "shutil.which":
                assert any(keyword.arg == "path" for keyword in node.keywords), (path, ast.unparse(node))


def test_only_the_command_line_prints_exits_and_sets_up_logging() -> None:
    speaking = {"print", "sys.exit", "os._exit", "sys.stdout", "SystemExit", "exit", "input", "logging.basicConfig"}
    for path in MODULES:
        if name_of(path).startswith("cli/") or name_of(path) in WORKERS:
            continue
        found = [name for name, _, _ in calls_and_names(path) if name in speaking or name.endswith(".addHandler")]
        assert found == [], path


def test_workers_are_programs_that_the_library_never_imports() -> None:
    names = {name.rpartition("/")[2].removesuffix(".py") for name in WORKERS}
    assert {name_of(path) for path in MODULES if path.name.endswith("worker.py")} == WORKERS
    for path in MODULES:
        if name_of(path) in WORKERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                spelled = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
                imported = {name.rpartition(".")[2] for name in spelled}
                assert not imported & names, path


def test_programs_of_ci_take_from_the_tests_what_is_there() -> None:
    """They run where nobody sees them fail before it matters, such as on a machine with a GPU."""
    taken = [
        (path.name, str(node.module), alias.name)
        for path in sorted((CHECKOUT / "ci").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("tests", "kartifacts")
        for alias in node.names
    ]
    assert any(module.startswith("tests.") for _, module, _ in taken)
    for program, module, name in taken:
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (program, module, name)


def test_a_place_that_a_user_names_is_looked_at_without_failing() -> None:
    """`Path.is_dir` and its like raise below a directory that may not be searched, where os.path answers False."""
    for module in ("config", "publish/repository", "cli/flows/producing", "build/foreign", "diagnostics/doctor"):
        names = {name.rpartition(".")[2] for name, _, _ in calls_and_names(PACKAGE / f"{module}.py")}
        assert not names & {"is_dir", "is_file", "exists"}, module


def test_torch_is_named_only_where_an_array_of_it_was_given() -> None:
    for path in MODULES:
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        assert "torch" not in imported, path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_happens_in_it(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), path
    if len(text.splitlines()) > 1:
        assert "from __future__ import annotations" in text


def test_imports_point_one_way() -> None:
    program = shutil.which("lint-imports", path=sysconfig.get_path("scripts")) or shutil.which("lint-imports")
    if program is None:
        pytest.skip("needs import-linter")
    done = subprocess.run([program, "--no-cache"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
