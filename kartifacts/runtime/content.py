"""Looks into a published GPU kernel before it is opened: whether its images are for the arch that its table names.

Publishing checks the same.  This is for releases that others made: code for another arch is at best refused by the
driver at the first launch, and at worst runs and gives wrong numbers.
"""

from __future__ import annotations

from pathlib import Path

from kartifacts.errors import VerificationError
from kartifacts.model.arch import Arch


def other_code(path: Path, arch: Arch) -> str | None:
    """For what a file holds code instead of `arch`, as the end of a sentence; None if that is right, or unknown.

    Raises:
        StoreError: the file cannot be read.
    """
    if arch.kind == "cpu":
        return None
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
