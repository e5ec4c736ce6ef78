"""Compiles kernels with NVIDIA's CuTe DSL on machines that need have no GPU (see `python_worker`).

    --target sm_90a

What comes out is an object that exports one function, whose name --kernel says, and launches its kernels itself.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kartifacts.build.toolchains import python_worker
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import python_worker

    del sys.path[0]

TYPES = {
    "bool": "Boolean", "float8_e4m3fn": "Float8E4M3FN", "float8_e5m2": "Float8E5M2", "float16": "Float16",
    "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64",
    **{f"int{bits}": f"Int{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"Uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip


def prepare() -> None:
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    for name in ("cutlass", "cutlass.cute", "cutlass.cute.runtime", "cutlass.cutlass_dsl"):
        importlib.import_module(name)


def compiled(job: python_worker.Job, function: Any) -> bytes:
    """The object of a kernel.

    Raises:
        Mistake: the function is no host function, or has other parameters.
    """
    import cutlass
    from cutlass import cute

    os.environ["CUTE_DSL_DUMP_DIR"] = os.environ["CUTE_DSL_CACHE_DIR"] = job.place
    os.chmod(job.place, 0o700)
    names = list(inspect.signature(function).parameters)
    optional = {
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.default is not inspect.Parameter.empty
    }
    python_worker.parameters(job, names, optional)
    cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar.arch = job.target  # noqa: SLF001  what kernels ask for by themselves
    given = _Given(job.kernel["arguments"])
    values = {name: given.value(name) for name in job.kernel["arguments"]} | job.kernel["constants"]
    made = cute.compile(function, **{name: values[name] for name in names if name in values}, options=_options(job))
    output = os.path.join(job.place, "object.o")
    made.export_to_c(output, function_name=job.kernel["export"])
    with open(output, "rb") as file:
        return file.read()


def _options(job: python_worker.Job) -> str:
    options = ["--enable-tvm-ffi", f"--gpu-arch {job.target}"]
    if job.debug:
        options += ["--opt-level 0", "--enable-assertions"]
    elif "opt_level" in job.kernel["options"]:
        options.append(f"--opt-level {job.kernel['options']['opt_level']}")
    if job.debug or job.lineinfo:
        options.append("--generate-line-info")
    return " ".join(options)


class _Given:
    """Stands in for what a caller passes: the same name of a dimension is the same number."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.dimensions: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        import cutlass
        from cutlass.cute import runtime

        told = self.arguments[name]
        if told["form"] == "stream":
            return runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        element = getattr(cutlass, TYPES[told["type"]])
        if told["form"] == "number":
            return element(1)
        shape = tuple(self._dimension(each, 32) for each in told["shape"])
        align = told["step"] if told["step"] > 1 else None
        if told["strides"]:
            strides = tuple(self._dimension(each, 64) for each in told["strides"])
            return runtime.make_fake_tensor(element, shape, strides, assumed_align=align)
        order = tuple(reversed(range(len(shape))))
        return runtime.make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=align)

    def _dimension(self, told: int | list[Any], bits: int) -> Any:
        from cutlass import cute

        if isinstance(told, int):
            return told
        name, step = told
        if name not in self.dimensions:
            self.dimensions[name] = cute.sym_int(width=bits, divisibility=step)
        return self.dimensions[name]


if __name__ == "__main__":
    python_worker.serve(prepare, compiled, ("cutlass", "iket", "nvidia_cutlass_dsl"))
