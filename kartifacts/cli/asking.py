"""Commands that answer questions and change nothing: explain, explain-key, config, doctor."""

from __future__ import annotations

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.errors import ConfigError
from kartifacts.model.spec import NOT_AXES


def parse_axes(words: tuple[str, ...]) -> dict[str, str]:
    """``dtype=bfloat16`` words as a mapping, which can be given to `load` as keywords."""
    axes: dict[str, str] = {}
    for word in words:
        axis, equals, value = word.partition("=")
        if not equals or not axis or axis in axes:
            raise ConfigError(f"bad axis {word!r}: expected each axis once, as name=value")
        if axis in NOT_AXES:
            raise ConfigError(f"bad axis {word!r}: no op has an axis {axis!r}", hint="options begin with two dashes")
        axes[axis] = value
    return axes


@click.command("explain")
@click.argument("op")
@click.argument("axes", nargs=-1)
@click.option("--device", default=None, help="cpu, cuda or cuda:N; default: a GPU if there is one, else the CPU.")
@json_option
def explain_command(op: str, axes: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Say where load() would take OP from, and why not from elsewhere; e.g. explain norm/rmsnorm dtype=bfloat16."""
    from kartifacts.runtime import Registry

    rows = Registry().explain(op, device=device, **parse_axes(axes))
    data = {"op": op, "places": [{"place": row.place, "reason": row.reason} for row in rows]}
    emit(as_json, data, "\n".join(str(row) for row in rows))


@click.command("explain-key")
@click.argument("op")
@click.argument("axes", nargs=-1)
@click.option("--arch", "arch_name", required=True, help="Full arch, e.g. 9.0a or cpu:x86-64-v3.")
@json_option
def explain_key_command(op: str, axes: tuple[str, ...], arch_name: str, as_json: bool) -> None:
    """Print everything that goes into the digests of one specialisation of OP."""
    from kartifacts.cli import flows

    parts = flows.explain_key(config.read(), op, parse_axes(axes), arch_name)
    lines = [f"op digest  {parts['op_digest']}", f"key        {parts['key'] or 'unknown: ' + parts['key_unknown']}"]
    lines += [f"  {name} = {value}" for name, value in sorted(parts["parts"].items()) if name != "sources"]
    lines += [f"  source {path} {digest}" for path, digest in sorted(parts["parts"]["sources"].items())]
    emit(as_json, parts, "\n".join(lines))


@click.command("config")
@json_option
def config_command(as_json: bool) -> None:
    """Print each setting, its value and where it came from."""
    settings = config.read()
    shown = settings.shown()
    width = max(map(len, shown))
    text = "\n".join(f"{name:{width}}  {value or '-'}  ({origin})" for name, (value, origin) in shown.items())
    data = {name: {"value": value, "origin": origin} for name, (value, origin) in shown.items()}
    emit(as_json, {"settings": data}, text)


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Check this installation: store, lock, host, compilers; opens no socket and runs nothing on a GPU."""
    from kartifacts.diagnostics.doctor import examine

    findings = examine(config.read())
    text = "\n".join(f"{'ok  ' if row.ok else 'BAD '} {row.subject}: {row.text}" for row in findings)
    data = {"findings": [{"subject": row.subject, "ok": row.ok, "text": row.text} for row in findings]}
    emit(as_json, data, text)
    if not all(row.ok for row in findings):
        raise SystemExit(1)
