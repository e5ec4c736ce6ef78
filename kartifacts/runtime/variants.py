"""What else than the usual may be compiled for a GPU: a toolkit that is older than `12.0f` may still know `12.0a`.

The usual one is by FlashInfer's rule (`model.arch.build_arch`).  Toolkits learn the suffixes of an arch one after the
other, and a driver that is new enough for the GPU does not bring a new compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from kartifacts.build import toolchains
from kartifacts.build.library import Libraries
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, NoCompiler
from kartifacts.model.arch import Arch
from kartifacts.model.spec import Spec
from kartifacts.runtime import lifecycle

log = logging.getLogger(__name__)


def within_reach(spec: Spec, device: Arch, libraries: Libraries, settings: Settings) -> Spec:
    """What to have for a device of this machine: `spec`, or the same with another suffix if only that can be had.

    Where nothing may be compiled, that is what was built here before; else, what the toolkit can build for.
    """
    if not spec.arch.suffix:
        return spec
    refused = lifecycle.refused(settings) is not None
    if not refused and _can_build(spec, settings):
        return spec
    for other in _others(spec, device, libraries):
        if next(lifecycle.usable(other, settings, []), None) if refused else _can_build(other, settings):
            log.info("%s is used for %s, as there can be none for %s", spec.uri, other.arch, spec.arch)
            return other
    return spec


def _others(spec: Spec, device: Arch, libraries: Libraries) -> Iterator[Spec]:
    """The specs with another suffix that the op supports, those with the most instructions first."""
    op = spec.uri.partition("?")[0]
    library = libraries.library_of(op)
    if library is None:
        return
    for suffix in ("a", "f", ""):
        arch = replace(spec.arch, suffix=suffix)
        if arch != spec.arch and arch.runs_on(device).ok:
            with suppress(ConfigError):  # the op needs more than that
                yield library.spec(op, dict(spec.axes), arch)


def _can_build(spec: Spec, settings: Settings) -> bool:
    """Also where there is no compiler: that is for who builds to say."""
    try:
        toolchains.find(spec.device.toolchain, settings).check(spec)
    except NoCompiler:
        return True
    except ConfigError:
        return False
    return True
