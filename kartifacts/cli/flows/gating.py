"""The gate before a release is signed: a repository directory held against its plan, where nothing was built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kartifacts.cli.flows.shared import Report


def gate(repository: Path, *, plan: Path, builds: Sequence[str] = (), version: str | None = None) -> Report:
    """Hold the releases in a repository against what a plan promises; gives what was looked at.

    Raises:
        ConfigError: the plan is wrong, or there is no such release.
        VerificationError: names all that is missing, damaged, too large, too new or made as no release is; or nobody
            says what was promised, neither the repository nor sources that are installed here.
    """
    from kartifacts.build.checks import judge
    from kartifacts.cli.flows.planned import promised
    from kartifacts.publish.gate import check_plan
    from kartifacts.publish.plan import read_plan
    from kartifacts.publish.repository import Repository
    from kartifacts.publish.verify import verify_repository

    asked = read_plan(plan).only(builds)
    report = verify_repository(repository, library=asked.library, version=version or None)
    report.check(str(repository))
    check_plan(
        asked, Repository(repository), report.pins, sources=lambda: promised(plan, builds)[1], judge=judge(asked.limits)
    )
    return {
        "repository": str(repository),
        "plan": asked.digest,
        "builds": [build.name for build in asked.builds],
        "limits": asked.limits,
        "pins": [msgspec.to_builtins(pin) for pin in report.pins],
        "kernels": report.kernels,
        "bytes": report.size,
    }
