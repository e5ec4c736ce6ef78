"""A progress bar in bytes on standard error, where there is somebody to look at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kartifacts.config import Settings

_WORTH_A_BAR = 1 << 20


@contextmanager
def bar(settings: Settings, total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show `what` growing to `total` bytes; gives the function to call with each number of bytes done."""
    auto = total >= _WORTH_A_BAR and sys.stderr is not None and sys.stderr.isatty()
    if settings.progress == "off" or (settings.progress == "auto" and not auto):
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, leave=False) as shown:
        yield shown.update
