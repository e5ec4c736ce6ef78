"""What is kept of a build is nobody else's to change, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build.compile import compile_specs
from kartifacts.config import Settings
from kartifacts.model.spec import Spec


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_nothing_that_is_kept_can_be_written_by_others_under_an_open_umask(
    open_umask: object, make_settings: Callable[..., Settings], make_spec: Callable[..., Spec]
) -> None:
    settings = make_settings()
    compile_specs([make_spec()], settings)
    files = [path for path in Path(settings.workspace).rglob("*") if path.is_file()]
    assert any(path.suffix == ".o" for path in files)
    assert [path for path in files if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) and path.suffix != ""] == []


def test_an_object_that_others_may_write_is_made_again(
    make_settings: Callable[..., Settings], make_spec: Callable[..., Spec]
) -> None:
    settings = make_settings()
    assert compile_specs([make_spec()], settings).report["compiled"] == 2
    for path in settings.workspace.rglob("*.o"):
        path.chmod(0o666)
    assert compile_specs([make_spec(size="large")], settings).report["objects_reused"] == 0
