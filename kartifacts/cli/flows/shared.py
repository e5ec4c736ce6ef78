"""What several flows need: the type of a report, this machine's devices for an arch list, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kartifacts.config import Settings
from kartifacts.model.arch import Arch
from kartifacts.runtime import host

Report = dict[str, Any]


def native(text: str) -> tuple[Arch, ...]:
    """This machine's devices, looked at only if the list asks for them: a GPU that hangs must not hang a build."""
    folded = text.lower()
    if "native" in folded.replace("cpu:native", ""):
        return (*(host.build_arch(gpu) for gpu in host.gpus()), host.cpu())
    return (host.cpu(),)


def hidden(settings: Settings) -> bool | None:
    """Whether progress is not shown; None: only where standard error is no terminal."""
    return {"on": False, "off": True}.get(settings.progress)


@contextmanager
def bar(settings: Settings, title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that is told what is done and how much there is in all."""
    from tqdm import tqdm

    with tqdm(desc=title, unit=unit, unit_scale=unit == "B", disable=hidden(settings), leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
