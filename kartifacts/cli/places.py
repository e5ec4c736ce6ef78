"""Reads the name of a repository directory on a command line, in each of the spellings that buckets have too, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kartifacts.errors import ConfigError
from kartifacts.files.directories import directory_in
from kartifacts.remote.addresses import shown


class Repository(click.Path):
    """A directory: PATH, dir:PATH or file://PATH."""

    name = "directory"

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        path = directory_in(text)
        if path is None and "://" in text:
            self.fail(
                f"{shown(text)!r} is no directory of this machine; `kartifacts mirror pull` makes a copy that is one",
                param,
                ctx,
            )
        return super().convert(str(path or text), param, ctx)


def only_one(_: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Callback of an option with `multiple=True` that is taken once: of two, the first would be dropped silently."""
    if len(values) > 1:
        given = ", ".join(shown(str(value)) for value in values)
        raise ConfigError(f"{parameter.opts[0]} is taken once, and was given {len(values)} times: {given}")
    return values[0] if values else None
