"""What ci/editable does once kartifacts is installed: edits kernels of the copy, and sees what is built again.

Each use is a process of its own, with torch in it: it loads kernels for this CPU, and builds images for a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
NORMS, GATED, ROPE = ("norm/rmsnorm", "norm/layernorm"), "activation/silu_and_mul", "rope/apply_rope"
CPU = {f"{op} cpu" for op in (*NORMS, GATED, ROPE)}
CUDA = {f"{op} 9.0a" for op in (*NORMS, GATED)}

USE = """
import json, sys, torch
import kartifacts
from kartifacts import config, ops
from kartifacts.build.jit import build_one
from kartifacts.build.library import discover
from kartifacts.model.arch import parse_arch

settings, built = config.read(), []
library = discover(workspace=settings.workspace).find("norm/rmsnorm")
assert str(library.root) == sys.argv[1], f"{library.root} is used, not the copy"
before = {path.parent for path in settings.workspace.glob("kernels/*/*/kernel.json")}
for name in sys.argv[2:]:
    op, arch = name.split()
    axes = {"dtype": "float32", **({"head_dim": "64", "style": "neox"} if op.startswith("rope") else {})}
    if arch == "cpu":
        kernel = kartifacts.load(op, device="cpu", **axes)
        assert (kernel.path.parent in before) is (kernel.origin == "built here before"), (name, kernel.origin)
    else:
        kernel = build_one(library.spec(op, axes, parse_arch(arch)), settings)
    if kernel.path.parent not in before:
        built.append(name)
x = torch.tensor([[3.0, -3.0, 3.0]])
print(json.dumps({"built": built, "rmsnorm": ops.rmsnorm(x, torch.ones(3))[0, 0].item()}))
"""

# What is edited, how, and which of the kernels reach it.
EDITS = {
    "norm/rmsnorm.cu": ("", "// edited\n", {"norm/rmsnorm 9.0a"}),
    "norm/norm.cuh": ("", "// edited\n", {f"{op} 9.0a" for op in NORMS}),
    "norm/norm_cpu.h": ("", "// edited\n", {f"{op} cpu" for op in NORMS}),
    "norm/rmsnorm_cpu.cpp": ("narrow(normalised", "narrow(2 * normalised", {"norm/rmsnorm cpu"}),
    "activation/op.toml": ('flags = ["-O3", ', 'flags = ["-O3", "-DKART_EDITED", ', {f"{GATED} cpu"}),
    "rope/apply_rope_cpu.cpp.jinja": ("", "// edited for {{ style }}\n", {f"{ROPE} cpu"}),
    "include/kart/wide.h": ("", "// edited\n", CUDA),
    "norm/reference.py": ("", "# edited\n", set()),
}


def use(what: str, expected: set[str]) -> float:
    """Use all kernels in a new process, which must build exactly these; gives what rmsnorm says."""
    began = time.monotonic()
    command = [sys.executable, "-c", USE, str(KERNELS), *sorted(CPU | CUDA)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"after {what}:\n{done.stdout}{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    if set(said["built"]) != expected:
        sys.exit(f"after {what}: expected {sorted(expected)} to be built, got {said['built']}")
    print(f"{what}: {', '.join(sorted(expected)) or 'nothing'} built, {time.monotonic() - began:.1f} s", flush=True)
    answer: float = said["rmsnorm"]
    return answer


def main() -> None:
    assert abs(use("a new install", CPU | CUDA) - 1) < 1e-5
    use("no edit", set())
    for name, (old, new, expected) in EDITS.items():
        path = KERNELS / name
        text = path.read_text()
        path.write_text(text.replace(old, new, 1) if old else text + new)
        assert path.read_text() != text, f"{name} has changed: adapt this check"
        answer = use(f"an edit of {name}", expected)
        assert abs(answer - (2 if "rmsnorm_cpu.cpp" in name else answer)) < 1e-5, answer
        path.write_text(text)
    use("undoing all edits", set())
    for path in KERNELS.rglob("*"):
        os.utime(path)
    use("touching every file", set())
    outside()


def outside() -> None:
    """A header of the environment that a kernel includes: in no library, and edited in place."""
    import tvm_ffi

    header = Path(tvm_ffi.__file__).parent / "include/editable_check.h"
    header.write_text("#define EDITABLE_CHECK 1\n")
    source = KERNELS / "norm/rmsnorm_cpu.cpp"
    source.write_text("#include <editable_check.h>\n" + source.read_text())
    use("including a header of the environment", {"norm/rmsnorm cpu"})
    os.utime(header)
    use("touching it", set())
    header.write_text("#define EDITABLE_CHECK 2\n")
    use("an edit of it", {"norm/rmsnorm cpu"})


if __name__ == "__main__":
    main()
