"""A loaded kernel: a verified file becomes functions of this process, or of a GPU where it is an image alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kartifacts.errors import AbiMismatch, LoadError, Refusal
from kartifacts.model.arch import Arch

# What the dynamic linker says of a library that does not belong here, for a symbol, a version or another library.
_LACKING = re.compile(
    r"undefined symbol: (?P<symbol>[^\s,]+(?:, version \S+)?)|symbol (?P<versioned>\S+), version \S+ not defined"
    r"|version [`'](?P<version>[^']+)' not found|^(?P<library>[^/\s]+): cannot open shared object"
)
_IMAGES = (".cubin", ".fatbin", ".hsaco")


class Kernel:
    """One loaded kernel.  Its exported functions are attributes: ``kernel.rmsnorm(x, weight, out, eps)``.

    Those of an image without a launcher are launched: ``kernel.scale.launch(grid, block, x, n, stream=0)``.

    Attributes:
        uri: the specialisation, e.g. ``norm/rmsnorm?dtype=bfloat16``.
        arch: what the binary was built for.
        path: the file that was loaded; its name holds its digest or its key.
        origin: where it came from: ``store``, a directory, a mirror, or ``jit``.
        refusals: the places that were asked before, and why each did not give it.
    """

    def __init__(
        self,
        uri: str,
        arch: Arch,
        path: Path,
        origin: str,
        exports: tuple[str, ...],
        refusals: tuple[Refusal, ...] = (),
    ) -> None:
        self.uri = uri
        self.arch = arch
        self.path = path
        self.origin = origin
        self.exports = exports
        self.refusals = refusals
        self._module = _load_module(path, uri)

    def __getattr__(self, name: str) -> Any:
        # Reached once a name: the function is then kept in the instance, so that a call costs one dict look-up.
        exports = vars(self).get("exports", ())  # not there while it is copied
        if name not in exports:
            raise AttributeError(f"{vars(self).get('uri', 'kernel')} exports {', '.join(exports)}, not {name!r}")
        try:
            function = self._module.get_function(name)
        except AttributeError as error:
            raise LoadError(
                f"{self.path.name} of {self.uri} does not export {name!r}, as its table promised"
            ) from error
        setattr(self, name, function)
        return function

    def __call__(self, *args: Any) -> Any:
        """Call the kernel's only function."""
        if len(self.exports) != 1:
            raise LoadError(f"{self.uri} exports {', '.join(self.exports)}; name the one to call")
        return getattr(self, self.exports[0])(*args)

    def __repr__(self) -> str:
        return f"<Kernel {self.uri} for {self.arch} from {self.origin}>"


def _load_module(path: Path, uri: str) -> Any:
    if path.suffix in _IMAGES:
        from kartifacts.runtime import driver

        return driver.Image(path, uri)
    import tvm_ffi  # imports torch where torch is installed: never before a kernel is really wanted

    try:
        with _bound(path):
            return tvm_ffi.load_module(str(path))
    except Exception as error:
        if lacking := _LACKING.search(str(error)):
            [wanted] = filter(None, lacking.groups())
            raise AbiMismatch(
                f"{uri} does not load: it asks for {wanted}, which this process has not: {error}",
                wanted=wanted,
                hint="kartifacts doctor shows the libraries that this process would use",
            ) from error
        mapped = "failed to map segment" in str(error)  # what a mount without exec says
        raise LoadError(
            f"{uri} does not load: {error}",
            hint="its file system may be mounted noexec: set KARTIFACTS_STORE to another one"
            if mapped
            else "kartifacts doctor shows the libraries that this process would use",
        ) from error


@contextmanager
def _bound(path: Path) -> Iterator[None]:
    """Have every symbol of a library found now: one that is not there would end the process at its first call."""
    import _ctypes

    handle = _ctypes.dlopen(str(path), os.RTLD_NOW | os.RTLD_LOCAL)
    try:
        yield
    finally:
        _ctypes.dlclose(handle)  # it stays for as long as others have it open
