"""Spans of time as people write them."""

from __future__ import annotations

import re

import click

_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Seconds, written as 30d, 12h or 90s; a plain number is of days."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        matched = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([dhms]?)", str(value).strip())
        if matched is None:
            self.fail(f"{str(value)[:50]!r} is not a span of time such as 30d, 12h or 90s", param, ctx)
        return float(matched[1]) * _UNITS[matched[2] or "d"]
