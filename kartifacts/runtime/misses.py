"""Writes down which kernels were missing, one line each, for who decides what a release holds."""

from __future__ import annotations

import json
import logging
import os
from typing import Literal

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

Outcome = Literal["refused", "compiled", "failed"]


def note(spec: Spec, settings: Settings, outcome: Outcome, reason: str = "") -> None:
    """Add a line to the file that ``KARTIFACTS_MISSES`` names; whatever keeps it from being written is logged only.

    The line goes out in one call to the end of the file, so lines of many processes do not mix.
    """
    if settings.misses is None:
        return
    said = {
        "missing": spec.uri,
        "arch": str(spec.arch),
        "library": spec.library,
        "op_digest": spec.op_digest,
        "outcome": outcome,
        "reason": reason,
        "test": config.current_test(),
        "machine": os.uname().machine,
        "pid": os.getpid(),
    }
    line = json.dumps(said, sort_keys=True).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(settings.misses, flags, 0o666)  # several users may share it
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes were taken")
    except OSError as error:
        log.warning("KARTIFACTS_MISSES: cannot write to %s: %s", settings.misses, error.strerror or error)
