"""The kernel author's flow: what the digests of one specialisation are made of."""

from __future__ import annotations

from kartifacts.cli.flows.shared import Report, native
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, KartifactsError
from kartifacts.model.arch import parse_archs


def explain_key(settings: Settings, op: str, axes: dict[str, str], arch: str) -> Report:
    """Every ingredient of both digests; the key is unknown where there is no compiler."""
    from kartifacts.build import library, toolchains

    archs = parse_archs(arch, native=native(arch))
    if len(archs) != 1:
        raise ConfigError(f"{arch!r} names {len(archs)} archs; expected one")
    spec = library.discover().find(op).spec(op, axes, archs[0])
    found: Report = {"uri": spec.uri, "op_digest": spec.op_digest, "key": None, "key_unknown": ""}
    try:
        fingerprint = toolchains.find(spec.device.toolchain, settings).made_with(spec)
    except KartifactsError as error:
        return {**found, "key_unknown": error.message, "parts": {**spec.identity(), "arch": str(spec.arch)}}
    return {**found, "key": spec.key(fingerprint), "parts": spec.key_parts(fingerprint)}
