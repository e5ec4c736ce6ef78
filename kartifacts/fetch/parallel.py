"""Runs jobs on a few threads and collects what failed."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kartifacts.errors import KartifactsError, StoreError

log = logging.getLogger(__name__)

_LOOK = 0.05  # seconds after which it is looked whether more threads would help
_BUSY = 0.5  # of what the cores can do: then they would only be in each other's way


def run_all(jobs: Sequence[Callable[[], None]], threads: int) -> list[KartifactsError]:
    """Run the jobs on at most `threads` threads; gives the errors of those that failed.

    It begins with a thread a core and doubles their number as long as they wait for something other than the cores: a
    near mirror gives more than two cores can unpack, a far one wants many connections.

    A store that cannot be written stops everything; other failures leave the rest of the work to be done, so that the
    next run begins where this one ended.
    """
    if len(jobs) == 1:  # on this thread, whose connections stay open for the next call
        try:
            jobs[0]()
        except KartifactsError as error:
            return [error]
        return []
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001  carried over to the caller's thread
                finished.put(error)
            else:
                finished.put(None)

    def start(count: int) -> int:
        """Start as many threads as the system allows; says how many."""
        for number in range(count):
            try:
                # Daemons: after Ctrl-C nobody waits for a mirror that is slow to answer; there is nothing to clean up.
                threading.Thread(target=work, name="kartifacts-fetch", daemon=True).start()
            except (RuntimeError, MemoryError) as error:  # a limit of processes or of memory
                log.warning("going on with fewer threads: %s", error)
                return number
        return count

    most, cores = min(threads, len(jobs)), len(os.sched_getaffinity(0))
    running = start(min(most, cores))
    if not running:
        work()
        running = most
    errors: list[KartifactsError] = []
    looked, used = time.monotonic(), time.process_time()
    left = len(jobs)
    try:
        while left:
            try:
                failure = finished.get(timeout=_LOOK if running < most else None)
            except queue.Empty:
                pass
            else:
                left -= 1
                if isinstance(failure, KartifactsError) and not isinstance(failure, StoreError):
                    errors.append(failure)
                elif failure is not None:
                    raise failure
            now = time.monotonic()
            if running < most and now - looked >= _LOOK:
                spent = time.process_time()
                if spent - used < _BUSY * cores * (now - looked):
                    more = min(running, most - running)
                    running = running + more if start(more) == more else most  # and not again
                looked, used = now, spent
    finally:
        stop.set()
    return errors
