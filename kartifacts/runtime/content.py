"""Looks into a published kernel before it is opened: whether its code is for this machine and the arch of its table.

Publishing checks the same.  This is for releases that others made: code for another GPU is at best refused by the
driver at the first launch, and at worst runs and gives wrong numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

from kartifacts.errors import VerificationError
from kartifacts.model.arch import Arch

_HEADER = 64  # bytes


def other_code(path: Path, arch: Arch) -> str | None:
    """What is wrong with the code in a file for `arch`, as the end of a sentence; None if nothing is, or it is unknown.

    Raises:
        StoreError: the file cannot be read.
    """
    from kartifacts.build import sections

    machine, here = sections.host_machine(_beginning(path)), os.uname().machine
    if machine not in ("", here):
        return f"holds host code for {machine}, and this machine is {here}"
    return None if arch.kind == "cpu" else _other_images(path, arch)


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(_HEADER)
    except OSError:  # which the loader says better
        return b""


def _other_images(path: Path, arch: Arch) -> str | None:
    from dataclasses import replace

    from kartifacts.build import elf

    try:
        found = elf.inspect(path)
    except VerificationError:  # which the loader says better
        return None
    wanted = (replace(arch, ptx=False), replace(arch, ptx=True))
    if not found.images or any(image.is_for(each) for image in found.images for each in wanted):
        return None
    return f"holds GPU code for {', '.join(map(str, found.archs))}, and its table says {arch}"
