"""From a pin to files: which bytes are needed, from where they come, and that they are what was pinned."""

from __future__ import annotations

from kartifacts.fetch.catalog import Bundle
from kartifacts.fetch.fetcher import Fetcher
from kartifacts.fetch.progress import bar
from kartifacts.fetch.transfer import Stats

__all__ = ["Bundle", "Fetcher", "Stats", "bar"]
