"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

import click


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A number of bytes, also as 100MB or 1.5GiB."""

    name = "size"
    _UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}  # noqa: RUF012

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        matched = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kmg]i?|)b?", str(value).strip(), re.IGNORECASE)
        if matched is None:
            self.fail(f"{str(value)[:50]!r} is not a size such as 100MB, 1.5GiB or 2000000", param, ctx)
        return int(float(matched[1]) * self._UNITS[matched[2].lower()])
