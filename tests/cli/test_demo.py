"""The demo works where a user's environment points elsewhere: at proxies, mirrors and settings of their own."""

from __future__ import annotations

import pytest

from tests.conftest import Machine

DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "environ",
    [
        {"HTTP_PROXY": DEAD, "HTTPS_PROXY": DEAD, "ALL_PROXY": DEAD},
        {"offline": "1", "jit": "never", "mirrors": DEAD, "verify": "off", "archs": "9.0"},
    ],
    ids=["proxies", "settings"],
)
def test_the_demo_depends_on_nothing_that_the_user_has_set(machine: Machine, environ: dict[str, str]) -> None:
    answer = machine.run_cli("demo", "--json", **environ)
    assert answer.code == 0, answer.err
    assert answer.data["ok"]
    assert len(answer.data["steps"]) == 6
