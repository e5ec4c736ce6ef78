"""Whether a release works where only it is: run by `ci/release smoke` on a clean machine, after sync and fetch.

    python -I smoke.py PLAN

Every CPU kernel that this machine can run is called and compared with the reference in numpy, every other kernel is
there byte for byte, and nothing that the plan promises is missing.  No compiler, no GPU and no checkout is needed, and
a machine that has one of the first or the last proves nothing, so it is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kartifacts
from kartifacts import ops

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc", "ld")
PACKAGE = Path(kartifacts.__file__).parent
SOURCES = PACKAGE / "_kernels"
ROWS, COLUMNS, EPS = 7, 1000, 1e-5


def refuse_other_machines() -> None:
    """End where something else than the release could have helped."""
    if not PACKAGE.is_relative_to(sys.prefix):
        sys.exit(f"kartifacts comes from {PACKAGE}, not from this environment")
    if (PACKAGE.parent / "pyproject.toml").exists():
        sys.exit(f"{PACKAGE.parent} is a checkout")
    found = [name for name in COMPILERS if shutil.which(name)]
    if found:
        sys.exit(f"there are compilers on PATH: {', '.join(found)}")
    if os.environ.get("KARTIFACTS_JIT") != "never":
        sys.exit("KARTIFACTS_JIT is not 'never'")


def asked(*arguments: str) -> Any:
    """What a command of kartifacts answers."""
    command = [sys.executable, "-I", "-m", "kartifacts", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


# -- one call of each op -----------------------------------------------------------------------------------------------


def reference(family: str) -> Any:
    """The float64 references of a family, which the package brings beside its sources."""
    place = SOURCES / family / "reference.py"
    spec = importlib.util.spec_from_file_location(f"reference_of_{family}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(values, ml_dtypes.bfloat16)
    return np.asarray(values, dtype)


def call(op: str, axes: dict[str, str]) -> list[tuple[Any, Any]]:
    """Call an op with random arrays; gives what it made beside what it should have made."""
    random, dtype = np.random.default_rng(), axes["dtype"]
    family, _, name = op.partition("/")
    known = getattr(reference(family), name, None)

    def normal(*shape: int) -> Any:
        return typed(random.standard_normal(shape), dtype)

    def exact(array: Any) -> Any:
        return np.array(array, np.float64)

    if name in ("rmsnorm", "layernorm"):
        given = [normal(ROWS, COLUMNS), *(normal(COLUMNS) for _ in range(1 + (name == "layernorm")))]
        return [(getattr(ops, name)(*given, eps=EPS), known(*map(exact, given), EPS))]
    if name == "fused_add_rmsnorm":
        x, residual, weight = normal(ROWS, COLUMNS), normal(ROWS, COLUMNS), normal(COLUMNS)
        expected = known(exact(x), exact(residual), exact(weight), EPS)
        ops.fused_add_rmsnorm(x, residual, weight, EPS)
        return [(x, expected[0]), (residual, expected[1])]
    if name in ("silu_and_mul", "gelu_tanh_and_mul"):
        x = normal(ROWS, 2 * COLUMNS)
        return [(getattr(ops, name)(x), known(exact(x)))]
    if name == "apply_rope":
        head, style = int(axes["head_dim"]), axes["style"]
        q, k, positions = normal(ROWS, 4, head), normal(ROWS, 2, head), random.integers(0, 100, ROWS)
        cache = reference(family).cos_sin_cache(100, head)
        expected = [known(exact(x), positions, cache, style) for x in (q, k)]
        ops.apply_rope(q, k, positions, cache, style)
        return list(zip((q, k), expected, strict=True))
    sys.exit(f"smoke.py does not know how to call {op}: add it there")


def check_call(uri: str, places: dict[str, str]) -> None:
    """The kernel that is loaded here for `uri` is one of those that were released, and computes what it should."""
    op, _, query = uri.partition("?")
    axes = dict(pair.split("=") for pair in query.split("&"))
    kernel = kartifacts.load(op, device="cpu", **axes)
    if (kernel.origin, str(kernel.path)) != ("store", places.get(str(kernel.arch))):
        sys.exit(f"{uri} was loaded from {kernel.origin}, {kernel.path}; expected one of {places}")
    for got, expected in call(op, axes):
        error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
        if not error < TOLERANCE[axes["dtype"]]:
            sys.exit(f"{uri} for {kernel.arch} is off by {error:.3g}")


def main() -> None:
    (plan,) = sys.argv[1:]
    refuse_other_machines()
    promised = sum(build["kernels"] for build in asked("plan", plan, "--check")["builds"])
    rows = asked("list")["kernels"]
    if not rows or len(rows) != promised:
        sys.exit(f"{len(rows)} kernels are pinned; the plan promises {promised}")
    for row in rows:
        if hashlib.sha256(Path(row["place"]).read_bytes()).hexdigest() != row["sha256"]:
            sys.exit(f"{row['uri']} for {row['arch']} is not what was released: {row['place']}")
    mine: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["arch"].startswith("cpu:"):
            mine.setdefault(row["uri"], {})[row["arch"]] = row["place"]
    for uri, places in mine.items():
        check_call(uri, places)
    print(f"{len(mine)} kernels agree with numpy here; {len(rows)} have the bytes that were released")


if __name__ == "__main__":
    main()
