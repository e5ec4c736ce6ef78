"""Spans of time and days as people write them."""

from __future__ import annotations

import re
from datetime import date

import click

_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Seconds, written as 30d, 12h or 90s; a plain number is of days."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        matched = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([dhms]?)", str(value).strip())
        if matched is None:
            self.fail(f"{str(value)[:50]!r} is not a span of time such as 30d, 12h or 90s", param, ctx)
        return float(matched[1]) * _UNITS[matched[2] or "d"]


class Day(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A day, written as 2027-03-01."""

    name = "date"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> date:
        text = str(value).strip()
        try:
            if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
                raise ValueError("not in this form")
            return date.fromisoformat(text)
        except ValueError:
            self.fail(f"{text[:50]!r} is not a day such as 2027-03-01", param, ctx)
