"""What who waits for a build sees of it, and how a signal ends it: with nothing half done left behind."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kartifacts.cli.flows.shared import hidden
from kartifacts.config import Settings

if TYPE_CHECKING:
    from kartifacts.build.compile import Progress

_OFTEN = 0.1  # seconds between two looks of the line
_SELDOM = 30.0  # seconds between two lines where they stay, as in the log of a CI
_LINE = "{desc}: {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


@contextmanager
def build_line(settings: Settings, kernels: int) -> Iterator[Callable[[Progress], None]]:
    """Say on standard error how many run at once and why, then what is waited for and what it takes.

    On a terminal that is one line which changes; elsewhere a line now and then.
    """
    from tqdm import tqdm

    title = f"building {kernels} kernels"
    with tqdm(desc=title, disable=hidden(settings), leave=False, bar_format=_LINE, dynamic_ncols=True) as bar:
        lines = bar.disable and settings.progress == "auto"
        started = shown = 0.0

        def show(now: Progress) -> None:
            nonlocal started, shown
            if bar.disable and not lines:
                return
            at = time.monotonic()
            if not started:
                started = at
                shown = at if lines else 0.0
                tqdm.write(f"{title}: {now.total} steps, jobs={now.jobs.n} ({now.jobs.reason})", file=sys.stderr)
            if lines and at >= shown + _SELDOM:
                shown = at
                tqdm.write(f"{title}: {now.done}/{now.total}, {now.elapsed:.0f} s, {described(now)}", file=sys.stderr)
            elif not lines and (now.done == now.total or at >= shown + _OFTEN):
                shown = at
                bar.total, bar.n = now.total, now.done
                bar.set_postfix_str(described(now), refresh=False)
                bar.refresh()

        yield show


def described(now: Progress) -> str:
    """``about 01:10 left, 190 MB at most, norm/rmsnorm?dtype=float16 for 9.0a``"""
    left, memory = round(now.left), now.memory / 1e6
    what = f"{now.op} for {now.arch}" if now.arch else now.op
    return f"about {left // 60:02}:{left % 60:02} left, {memory:.0f} MB at most, {what}"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let who asks this process to end, as a CI that cancels a job, end it as Ctrl-C does: after it has cleaned up."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # others have no say in signals
        yield
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, end)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
