"""Notices from signed metadata that the clock of this machine is behind, so that nothing ever seems to be expired."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta, timezone

from tuf.api.metadata import Signed

from kartifacts.model.layout import View
from kartifacts.trust.released import Library
from kartifacts.trust.signed import lifetime

log = logging.getLogger(__name__)

_DAY = timedelta(days=1)  # by which clocks and time zones may differ


def tell_if_behind(
    signed: Mapping[str, Signed], libraries: Iterable[Library], view: View, now: datetime | None = None
) -> None:
    """Warn if what was verified cannot have been signed yet by this machine's clock.

    A clock cannot be mended here, and a machine without one that runs should still get its kernels: so it is no error.
    """
    now = now or datetime.now(timezone.utc)
    ahead = next(
        (
            f"{library.name} {release.pin.version} was published on {release.published[:10]}"
            for library in libraries
            for release in library.releases
            if release.published and date.fromisoformat(release.published[:10]) > (now + _DAY).date()
        ),
        None,
    ) or next(
        (
            f"{role}.json expires at {each.expires:%Y-%m-%d}, and is never signed for more than "
            f"{lifetime(role, view).days} days"
            for role, each in signed.items()
            if each.expires - now > lifetime(role, view) + _DAY
        ),
        None,
    )
    if ahead is not None:
        log.warning(
            "the clock of this machine says %s, but %s: while it is behind, what is expired looks fresh; set it",
            f"{now:%Y-%m-%d}",
            ahead,
        )
