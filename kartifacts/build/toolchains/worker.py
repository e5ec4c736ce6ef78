"""Does jobs one after the other in a process of its own, for as long as somebody waits for the answers.

    python -I -S WORKER.py ARGUMENT...    one job: prints what the compiler says, and exits with its status
    python -I -S WORKER.py                a job for each line of standard input, an answer for each:

        {"arguments": ["..."], "cwd": "/library"}
        {"status": 0, "text": "what the compiler said", "seconds": 0.03, "cpu": 0.025, "memory": 41943040}

Who starts one makes it the leader of a session: when nobody can read the answers any more, since whoever asked was
killed, the worker ends with all that it has started, what has a session of its own included.  By itself this file is
the worker whose jobs are command lines; other workers lie beside it and import it.  Nothing but the standard library is
there, and little of that, as a worker is started for a single kernel too.
"""

from __future__ import annotations

import _thread
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

_GRACE = 2.0  # seconds that a compiler has to remove its temporary files
_MOST_TEXT = 4 << 20  # bytes of what a compiler says that are passed on
_spent = 0  # bytes that the hungriest program of this job took


class Failed(Exception):
    """A job failed: what the compiler says, and its exit status, 128 and a signal's number if that ended it."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


def serve(run: Callable[[list[str]], str]) -> None:
    """Do the job in the arguments of this process, or one for each line of standard input until it ends.

    Args:
        run: does a job and gives what the compiler printed; raises `Failed`.
    """
    if len(sys.argv) > 1:
        status, text = _done(run, sys.argv[1:])
        sys.stdout.buffer.write(_bytes(text if text.endswith("\n") or not text else f"{text}\n"))
        sys.stdout.flush()
        sys.exit(status)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a compiler prints by itself must not end up among the answers
    _thread.start_new_thread(_end_with_reader, (answers,))
    for line in jobs:
        answer = json.dumps(_answer(run, json.loads(line))).encode() + b"\n"
        while answer:
            answer = answer[os.write(answers, answer) :]


def call(arguments: list[str]) -> str:
    """Run a program with its standard error in its output, which is given back; measures what it needed.

    Raises:
        Failed: it does not start, or exits with another status than 0.
    """
    signal.signal(signal.SIGTERM, _stay)
    output = os.memfd_create("output")
    try:
        actions = [(os.POSIX_SPAWN_DUP2, output, number) for number in (1, 2)]
        usual = (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)
        try:
            process = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=actions, setsigdef=usual)
        except (OSError, ValueError) as error:
            raise Failed(f"{arguments[0]} does not start: {error}", 127) from None
        return waited_for(process, output)
    finally:
        os.close(output)


def waited_for(process: int, output: int) -> str:
    """What a process that belongs to this job has written to the file `output`, once it has ended; measures it.

    Raises:
        Failed: it ended with another status than 0.
    """
    global _spent
    _, ended, usage = os.wait4(process, 0)
    _spent = max(_spent, usage.ru_maxrss << 10)
    text = _text(output)
    if ended:
        code = os.waitstatus_to_exitcode(ended)
        raise Failed(text, code if code > 0 else 128 - code)
    return text


def _stay(number: int, frame: object) -> None:
    """A compiler is told to stop by the same signal; this process waits until it has."""


def _text(output: int) -> str:
    size = os.fstat(output).st_size
    content = os.pread(output, _MOST_TEXT, 0)
    if size > len(content):
        content += b"\n[...]\n" + os.pread(output, _MOST_TEXT // 4, max(size - _MOST_TEXT // 4, len(content)))
    return content.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _done(run: Callable[[list[str]], str], arguments: list[str]) -> tuple[int, str]:
    try:
        return 0, run(arguments)
    except Failed as error:
        return error.status, error.text
    except Exception:  # noqa: BLE001  whatever a compiler's own library does, the next job may be sound
        import traceback

        return 1, traceback.format_exc()


def _answer(run: Callable[[list[str]], str], job: dict[str, object]) -> dict[str, object]:
    global _spent
    _spent = 0
    _forget_peak()
    since, before = time.monotonic(), _cpu()
    try:
        os.chdir(str(job["cwd"]))
    except OSError as error:
        status, text = 1, f"error: {error}"
    else:
        arguments = job["arguments"]
        assert isinstance(arguments, list)
        status, text = _done(run, arguments)
    seconds, cpu = round(time.monotonic() - since, 6), round(_cpu() - before, 6)
    return {"status": status, "text": text, "seconds": seconds, "cpu": cpu, "memory": max(_spent, _peak())}


def _cpu() -> float:
    """Seconds that this process and all it has waited for have computed."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def _forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:  # then the peak is that of all jobs so far
        pass


def _peak() -> int:
    """The most bytes that this process took; what getrusage says holds the peak of whoever started it, too."""
    try:
        with open("/proc/self/status", "rb") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:")), 0)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _end_with_reader(answers: int) -> None:
    """Wait until nobody can read the answers any more, then end this process and what it has started."""
    poll = select.poll()
    poll.register(answers, 0)  # an end of the other side is told without being asked for
    poll.poll()
    if os.getpgrp() != os.getpid():  # others are in this group who were not started from here
        os.kill(os.getpid(), signal.SIGKILL)
    others = _elsewhere()
    _tell(others, signal.SIGTERM)
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE)
    _tell([*others, *_elsewhere()], signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


def _elsewhere() -> list[int]:
    """Handles of all that was started from here and is in another group, as wrappers that call setsid put theirs.

    One whose parent has ended before is nobody's that can be told.
    """
    children: dict[int, list[tuple[int, int]]] = {}  # process → its children, with their groups
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    _, parent, group = file.read().rpartition(b")")[2].split()[:3]
            except OSError:  # it has ended meanwhile
                continue
            children.setdefault(int(parent), []).append((int(name), int(group)))
    found, waiting = [], [os.getpid()]
    while waiting:
        for process, its_group in children.get(waiting.pop(), ()):
            waiting.append(process)
            if its_group != os.getpgrp():
                try:
                    found.append(os.pidfd_open(process))  # its number may be another's when it is told to end
                except OSError:
                    continue
    return found


def _tell(handles: list[int], number: int) -> None:
    for handle in handles:
        try:
            signal.pidfd_send_signal(handle, number)
        except OSError:  # it has ended
            continue


if __name__ == "__main__":
    serve(call)
