"""Runs jobs on a few threads and collects what failed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from kartifacts.errors import KartifactsError, StoreError


def run_all(jobs: Sequence[Callable[[], None]], threads: int) -> list[KartifactsError]:
    """Run the jobs on at most `threads` threads; gives the errors of those that failed.

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

    # Daemons: after Ctrl-C nobody waits for a mirror that is slow to answer, and there is nothing to clean up.
    for _ in range(min(threads, len(jobs))):
        threading.Thread(target=work, name="kartifacts-fetch", daemon=True).start()
    errors: list[KartifactsError] = []
    try:
        for _ in jobs:
            failure = finished.get()
            if isinstance(failure, KartifactsError) and not isinstance(failure, StoreError):
                errors.append(failure)
            elif failure is not None:
                raise failure
    finally:
        stop.set()
    return errors
