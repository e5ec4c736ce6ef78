"""Compiles kernels with Triton, for GPUs of NVIDIA and AMD, on machines that need have none (see `python_worker`).

    --target cuda:90 | hip:gfx942

The image that comes out has a section .kart.launch, which says how it is launched.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kartifacts.build.toolchains import python_worker
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import python_worker

    del sys.path[0]

TYPES = {
    "bool": "i1", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "float16": "fp16", "bfloat16": "bf16",
    "float32": "fp32", "float64": "fp64",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def prepare() -> None:
    sys.path.append(_PACKAGES)
    for name in ("triton", "triton.compiler", "triton.backends.compiler", "kartifacts.build.images"):
        importlib.import_module(name)
    from triton.runtime.cache import triton_key

    triton_key()  # reads all of Triton, once for every job


def compiled(job: python_worker.Job, function: Any) -> bytes:
    """The image of a kernel.

    Raises:
        Mistake: the function is no kernel, or has other parameters, or Triton refuses it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    if not isinstance(function, JITFunction):
        found = type(function).__name__
        what = f"{job.source}:1: error: {job.kernel['function']!r} is a {found}, not a @triton.jit function"
        if found == "Autotuner":
            what += "; name the function below @triton.autotune, with the options that it chooses"
        raise python_worker.Mistake(what)
    kind, _, chip = job.target.partition(":")
    target = GPUTarget("cuda", int(chip), 32) if kind == "cuda" else GPUTarget("hip", chip, warp_size(chip))
    os.environ["TRITON_CACHE_DIR"] = os.environ["TRITON_HOME"] = job.place
    os.environ["TRITON_ALWAYS_COMPILE"] = os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0" if job.debug or job.lineinfo else "1"
    if job.debug:
        os.environ["DISABLE_PTXAS_OPT"] = "1"
    source = _source(job, function)
    try:
        made = triton.compile(source, target=target, options={**job.kernel["options"], "debug": job.debug})
    except triton.compiler.errors.CompilationError as error:
        raise python_worker.Mistake(_located(error, job)) from None
    from kartifacts.build import images

    noted = notes(job, function, made.metadata)
    if kind == "cuda":
        from triton.backends.nvidia.compiler import get_ptxas

        noted["toolkit"] = get_ptxas(int(chip)).version
    return images.noted(made.kernel, noted)


def warp_size(chip: str) -> int:
    return 64 if chip.startswith("gfx9") else 32


def _source(job: python_worker.Job, function: Any) -> Any:
    from triton.compiler import ASTSource

    arguments, constants = job.kernel["arguments"], dict(job.kernel["constants"])
    optional = {each.name for each in function.params if each.has_default}
    python_worker.parameters(job, function.arg_names, optional)
    constants |= {
        each.name: each.default for each in function.params if each.name in optional - {*arguments, *constants}
    }
    signature, hints = {}, {}
    for number, name in enumerate(function.arg_names):
        told = arguments.get(name)
        if told is None:
            signature[name] = "constexpr"
            continue
        signature[name] = ("*" if told["form"] == "pointer" else "") + TYPES[told["type"]]
        if told["step"] > 1:
            hints[(number,)] = [["tt.divisibility", told["step"]]]
    return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)


def notes(job: python_worker.Job, function: Any, made: Any) -> dict[str, str]:
    """What a launcher has to know: names and types of the arguments in their order, and what each block takes."""
    arguments = job.kernel["arguments"]
    for name, usual in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False)):
        if getattr(made, name, usual) != usual:
            raise python_worker.Mistake(
                f"{job.source}:1: error: Triton asks for {name}={getattr(made, name)!r}, which no launcher gives"
            )
    if getattr(made, "profile_scratch_size", 0):
        raise python_worker.Mistake(f"{job.source}:1: error: the kernel wants memory for profiles")
    found = {
        "entry": made.name,
        "arguments": " ".join(f"{name}={_text(arguments[name])}" for name in function.arg_names if name in arguments),
        "shared": str(made.shared),
        "threads": str(made.num_warps * made.warp_size),
    }
    if getattr(made, "global_scratch_size", 0):  # Triton 3.6 has none for AMD
        found |= {"scratch": str(made.global_scratch_size), "scratch.align": str(made.global_scratch_align)}
    return found


def _text(argument: Mapping[str, Any]) -> str:
    step = f":{argument['step']}" if argument["step"] > 1 else ""
    star = "*" if argument["form"] == "pointer" else ""
    return f"{star}{argument['type']}{step}"


def _located(error: Any, job: python_worker.Job) -> str:
    """A mistake that Triton found, with its line in the file: Triton counts from the top of each function."""
    inner = error
    while type(inner.__cause__) is type(error):
        inner = inner.__cause__
    said = str(inner.error_message or "").strip() or str(inner).strip().splitlines()[-1]
    return f"{_line(inner, job)}error: {said}\n\n{error}"


def _line(error: Any, job: python_worker.Job) -> str:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not path or not error.src or not os.path.abspath(path).startswith(os.getcwd() + os.sep):
            continue
        with open(path, encoding="utf-8") as file:
            before, found, _ = file.read().partition(error.src.rstrip("\n"))
        if found and error.node is not None:
            return f"{os.path.relpath(path)}:{before.count(chr(10)) + error.node.lineno}: "
    return f"{job.source}: "


if __name__ == "__main__":
    python_worker.serve(prepare, compiled, ("triton",))
