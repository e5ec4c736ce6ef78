"""What `kartifacts.load` costs beyond loading the file: in a new process, for a further kernel, and when it is loaded.

    python bench/load.py [--rounds 9]

Builds a release for this CPU, serves it from a directory, loads from it once, then starts processes.  Beside it, in the
same rounds: `tvm_ffi.load_module` alone, and a ninja that finds nothing to do, which is what a JIT that asks its build
system at every start pays before it loads.  Milliseconds, medians; imports are counted apart from the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, os, subprocess, sys, time
import tvm_ffi
marks = [time.perf_counter()]
import kartifacts
kartifacts.load
marks.append(time.perf_counter())
ask = lambda dtype: kartifacts.load("norm/rmsnorm", device="cpu", dtype=dtype)
kernel = ask("float32")
marks.append(time.perf_counter())
ask("bfloat16")
marks.append(time.perf_counter())
for _ in range(1000):
    ask("float32")
marks.append(time.perf_counter())
tvm_ffi.load_module(sys.argv[1])
marks.append(time.perf_counter())
subprocess.run(["ninja", "-C", sys.argv[2]], check=True, stdout=subprocess.DEVNULL)
marks.append(time.perf_counter())
imports, first, further, loaded, module, ninja = ((b - a) * 1e3 for a, b in zip(marks, marks[1:]))
print(json.dumps({"imports": imports, "first": first, "further": further, "loaded": loaded / 1000, "module": module,
                  "ninja": ninja, "origin": kernel.origin}))
"""
ROWS = {
    "module": "tvm_ffi.load_module",
    "ninja": "a ninja run with nothing to do",
    "imports": "import kartifacts and what load needs",
    "first": "first load of a process",
    "further": "a further kernel",
    "loaded": "a kernel that is loaded",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        environ = prepare(place)
        copy = place / "copy.so"
        shutil.copy(max((place / "store/v1/sha256").rglob("*.so"), key=lambda path: path.stat().st_size), copy)
        noted, searched = [], []
        for _ in range(options.rounds):
            noted.append(one(copy, place, environ))
            shutil.move(place / "store/v1/recall", place / "recall")
            searched.append(one(copy, place, environ))
            shutil.move(place / "recall", place / "store/v1/recall")
    show(noted, searched)


def prepare(place: Path) -> dict[str, str]:
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KARTIFACTS_")},
        "KARTIFACTS_STORE": str(place / "store"),
        "KARTIFACTS_LOCK": str(place / "kartifacts.lock"),
        "KARTIFACTS_MIRRORS": f"file://{place}/release",
        "KARTIFACTS_JIT": "never",
    }
    lock = str(place / "kartifacts.lock")
    build = ["build", "--archs", "cpu:x86-64-v2", "--ops", "norm", "--out", str(place / "release"), "--lock", lock]
    subprocess.run([sys.executable, "-m", "kartifacts", *build], check=True, env=environ, stdout=subprocess.DEVNULL)
    (place / "ninja").mkdir()
    (place / "ninja/build.ninja").write_text("rule copy\n  command = cp $in $out\nbuild out: copy in\n")
    (place / "ninja/in").write_text("")
    (place / "copy.so").write_bytes(b"")
    one(None, place, environ)
    return {**environ, "KARTIFACTS_MIRRORS": "https://mirror.example/kernels"}  # as users have it; nothing is asked


def one(module: Path | None, place: Path, environ: dict[str, str]) -> dict[str, float]:
    program = PROGRAM if module is not None else PROGRAM.replace("tvm_ffi.load_module(sys.argv[1])", "pass")
    command = [sys.executable, "-c", program, str(module), str(place / "ninja")]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def show(noted: list[dict[str, float]], searched: list[dict[str, float]]) -> None:
    def median(runs: list[dict[str, float]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    module, ninja = median(noted, "module"), median(noted, "ninja")
    print("| | with a note ms | without ms | with a note, beyond load_module | / ninja |")
    print("| --- | --: | --: | --: | --: |")
    for name, what in ROWS.items():
        here = median(noted, name)
        beyond = f"{here - module:.2f}" if name in ("first", "further") else ""
        print(f"| {what} | {here:.3f} | {median(searched, name):.3f} | {beyond} | {here / ninja:.2f} |")


if __name__ == "__main__":
    main()
