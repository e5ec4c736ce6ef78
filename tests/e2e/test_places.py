"""Where a kernel is taken from: nearest first, nothing written that need not be, and nothing that nobody pinned."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kartifacts
from kartifacts.errors import ArtifactUnavailable, MissingKernel, StoreError, VerificationError
from kartifacts.testing import Mirror
from tests.conftest import Machine, Released

PACKAGE = Path(kartifacts.__file__).parent
OP = {"op": "norm/rmsnorm", "device": "cpu", "dtype": "float32"}
LOAD = """
import kartifacts
kernel, error = error_of(kartifacts)
result = {"origin": kernel.origin, "path": str(kernel.path), "error": error}
"""
DEAD = "http://127.0.0.1:9"
NOBODY = 54_321


@pytest.fixture
def filled(machine: Machine, released: Released) -> dict[str, Any]:
    """A machine whose store holds the release; gives the settings under which it was filled, with the mirror gone."""
    with Mirror(released.path) as mirror:
        answer = machine.cli("fetch", lock=released.lock_file, mirrors=mirror.url)
    assert answer.code == 0, answer.err
    return {"lock": released.lock_file, "mirrors": mirror.url, "jit": "never"}


def kernels_of(machine: Machine, settings: dict[str, Any]) -> list[Path]:
    """Where the op lies in the store, for each arch that would do."""
    rows = machine.cli("list", "--ops", OP["op"], "--json", **settings).data["kernels"]
    return [Path(row["place"]) for row in rows if row["uri"] == "norm/rmsnorm?dtype=float32"]


def state_of(tree: Path) -> dict[str, tuple[int, int, int]]:
    """What would be different if anybody had written there."""
    rows = {}
    for path in (tree, *tree.rglob("*")):
        found = path.lstat()
        rows[str(path)] = (found.st_ino, found.st_mtime_ns, found.st_mode)
    return rows


# -- read-only places --------------------------------------------------------------------------------------------------


def read_only(*trees: Path) -> list[str]:
    """Starts a command that cannot write to `trees`, whoever it is: mounts bind even root."""
    mounts = " && ".join(f"mount --bind -o ro '{tree}' '{tree}'" for tree in trees)
    prefix = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("needs unshare and the right to mount in a name space of its own")
    return prefix


def test_a_complete_read_only_store_and_package_do_without_home_and_without_a_write(
    filled: dict[str, Any], machine: Machine
) -> None:
    prefix = read_only(machine.home, PACKAGE)
    touched = subprocess.run([*prefix, "touch", machine.store / "x"], capture_output=True, check=False)
    assert touched.returncode != 0  # it is really read-only
    warm = machine.watched(LOAD, prefix=prefix, HOME=None, workspace=None, **filled)
    assert warm.seen == []
    assert warm.result["origin"] == "store"


def test_what_a_read_only_store_lacks_is_a_typed_error_that_names_the_way_out(
    filled: dict[str, Any], machine: Machine, released: Released
) -> None:
    for kernel in kernels_of(machine, filled):
        kernel.unlink()
    code = """
import kartifacts, kartifacts.errors
try:
    kartifacts.load("norm/rmsnorm", device="cpu", dtype="float32")
except kartifacts.errors.StoreError as error:
    result = str(error)
"""
    with Mirror(released.path) as mirror:
        seen = machine.watched(code, prefix=read_only(machine.store), **{**filled, "mirrors": mirror.url})
    assert str(machine.store) in seen.result
    assert "KARTIFACTS_STORE" in seen.result


@pytest.fixture
def public(released: Released) -> Iterator[Path]:
    """A directory that every user can read, with a copy of nothing yet."""
    place = Path(tempfile.mkdtemp(prefix="kartifacts-public-"))
    place.chmod(0o755)
    yield place
    subprocess.run(["rm", "-rf", place], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_user_without_name_home_or_write_access_loads_from_what_root_installed(
    filled: dict[str, Any], machine: Machine, public: Path
) -> None:
    shutil.copytree(machine.store, public / "store")
    shutil.copy(filled["lock"], public / "kartifacts.lock")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    command = [*prefix, *machine.watching("result = 1")]
    if subprocess.run(command, env=machine.environ({}), capture_output=True, check=False).returncode != 0:
        pytest.skip("needs setpriv, and a Python environment that other users can read")
    lock, store = public / "kartifacts.lock", public / "store"
    settings: dict[str, Any] = {"lock": lock, "store": store, "HOME": None, "workspace": None}
    warm = machine.watched(LOAD, prefix=prefix, jit="never", **settings)
    assert (warm.seen, warm.result["origin"]) == ([], "store")
    # A HOME that is another user's is no reason to fail either, be it for the store or for the explicit directory.
    private = machine.home / "private"
    private.mkdir(mode=0o700)
    warm = machine.watched(LOAD, prefix=prefix, jit="never", **{**settings, "HOME": private})
    assert (warm.seen, warm.result["origin"]) == ([], "store")
    code = """
import kartifacts, kartifacts.errors
try:
    kartifacts.load("norm/rmsnorm", device="cpu", dtype="float32")
except kartifacts.errors.KartifactsError as error:
    result = type(error).__name__
"""
    hidden: dict[str, Any] = {"HOME": private, "store": None, "workspace": None, "path": private, "CUDA_HOME": private}
    assert machine.watched(code, prefix=prefix, jit="never", **hidden).result in ("MissingKernel", "StoreError")
    settings |= {"HOME": "/", "path": public / "store", "store": None, "TMPDIR": public}
    warm = machine.watched(LOAD, prefix=prefix, jit="never", **settings)
    assert (warm.seen, warm.result["origin"]) == ([], str(public / "store"))


def test_a_container_without_root_uses_its_store_though_the_directories_above_belong_to_nobody_it_knows(
    filled: dict[str, Any], machine: Machine, public: Path
) -> None:
    """In a name space of users that maps this user only, root's directories appear as those of an unknown user."""
    shutil.copytree(machine.store, public / "store")
    shutil.copy(filled["lock"], public / "kartifacts.lock")
    prefix = ["unshare", "--map-root-user"]
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", str(NOBODY), public], check=True)
        prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *prefix]
    see = machine.watching("result = os.lstat('/').st_uid", prefix=prefix)
    done = subprocess.run(see, env=machine.environ({}), cwd=public, capture_output=True, text=True, check=False)
    if done.returncode != 0 or json.loads(done.stdout)["result"] == 0:
        pytest.skip("needs name spaces of users, and a Python environment that other users can read")
    settings: dict[str, Any] = {"lock": public / "kartifacts.lock", "HOME": public, "jit": "never"}
    command = machine.watching(LOAD, prefix=prefix)

    def load(store: Path) -> subprocess.CompletedProcess[str]:
        environ = machine.environ({**settings, "store": store})
        return subprocess.run(command, env=environ, cwd=public, capture_output=True, text=True, check=False)

    warm = load(public / "store")
    assert warm.returncode == 0, warm.stderr
    assert json.loads(warm.stdout)["result"]["origin"] == "store"
    (public / "open").mkdir()
    (public / "open").chmod(0o1777)
    shutil.copytree(public / "store", public / "open/store")
    if os.geteuid() == 0:  # whoever placed this where everybody may place things is unknown there
        subprocess.run(["chown", "-R", str(NOBODY + 1), public / "open/store"], check=True)
        refused = load(public / "open/store")
        assert refused.returncode != 0
        assert "open/store' belongs to user" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a directory that this user cannot read")
def test_a_workspace_that_cannot_be_read_does_not_keep_a_mirror_from_being_asked(
    released: Released, machine: Machine, public: Path
) -> None:
    locked = public / "locked"
    locked.mkdir(mode=0o700)
    scratch = public / "scratch"
    scratch.mkdir()
    os.chown(scratch, NOBODY, NOBODY)
    shutil.copy(released.lock_file, public / "kartifacts.lock")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with Mirror(released.path) as mirror:
        settings = {"lock": public / "kartifacts.lock", "mirrors": mirror.url, "workspace": locked / "workspace"}
        command = [*prefix, *machine.watching("result = 1")]
        if subprocess.run(command, env=machine.environ({}), capture_output=True, check=False).returncode != 0:
            pytest.skip("needs setpriv, and a Python environment that other users can read")
        cold = machine.watched(LOAD, prefix=prefix, store=scratch / "store", HOME=None, **settings)
    assert cold.result["origin"] == mirror.url
    assert cold.of("process") == []


def test_eight_warm_processes_at_once_write_nothing(filled: dict[str, Any], machine: Machine) -> None:
    before = state_of(machine.home)
    command = machine.watching(LOAD)
    environ = machine.environ(filled)
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) for _ in range(8)]
    outs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * 8
    assert [json.loads(out)["seen"] for out in outs] == [[]] * 8
    assert state_of(machine.home) == before


# -- explicit directories ----------------------------------------------------------------------------------------------


def test_an_explicit_directory_wins_over_the_store_and_is_never_written(
    filled: dict[str, Any], machine: Machine, tmp_path: Path
) -> None:
    shutil.copytree(machine.store, tmp_path / "image")
    before = state_of(tmp_path / "image")
    warm = machine.watched(LOAD, path=tmp_path / "image", **filled)
    assert (warm.seen, warm.result["origin"]) == ([], str(tmp_path / "image"))
    assert warm.result["path"].startswith(str(tmp_path / "image"))
    assert state_of(tmp_path / "image") == before


def test_what_the_explicit_directory_lacks_comes_from_the_mirror_into_the_store(
    filled: dict[str, Any], machine: Machine, released: Released, tmp_path: Path
) -> None:
    image, scratch = tmp_path / "image", tmp_path / "scratch"
    wanted = machine.registry(**filled).load(**OP).path.relative_to(machine.store)
    lacking = [image / path.relative_to(machine.store) for path in kernels_of(machine, filled)]
    machine.store.rename(image)
    for path in lacking:
        path.unlink()
    with Mirror(released.path) as mirror:
        settings = {**filled, "mirrors": mirror.url, "path": image, "store": scratch}
        assert machine.registry(**settings).load("norm/layernorm", device="cpu", dtype="float32").origin == str(image)
        assert not scratch.exists()
        kernel = machine.registry(**settings).load(**OP)
        assert (kernel.origin, kernel.path) == (mirror.url, scratch / wanted)
    assert not any(path.exists() for path in lacking)


def test_a_repository_nobody_pinned_is_not_used(released: Released, machine: Machine, tmp_path: Path) -> None:
    shutil.copytree(released.path, tmp_path / "repository")
    shutil.copy(released.lock_file, tmp_path / "repository/kartifacts.lock")  # one that it brings along is not ours
    other = tmp_path / "other.lock"
    machine.cli("lock", released.path, "--out", other)
    content = json.loads(other.read_text())
    content["releases"][0]["sha256"] = "0" * 64
    other.write_text(json.dumps(content))
    for lock, reason in ((None, "there is no kartifacts.lock"), (other, "000000000000")):
        for place in ({"path": tmp_path / "repository"}, {"mirrors": f"file://{tmp_path / 'repository'}"}):
            with pytest.raises(MissingKernel, match=reason):
                machine.registry(lock=lock, jit="never", **place).load(**OP)
    assert not [path for path in machine.store.rglob("*") if path.is_file()]


def test_changed_bytes_in_an_explicit_directory_are_never_loaded(
    filled: dict[str, Any], machine: Machine, released: Released, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    machine.store.rename(image)
    kernel = machine.registry(**filled, path=image).load(**OP).path
    data = bytearray(kernel.read_bytes())
    data[len(data) // 2] ^= 1
    kernel.unlink()  # not written in place: this process has the old file mapped, and would crash at its end
    kernel.write_bytes(data)
    with pytest.raises(VerificationError) as caught:
        machine.registry(**{**filled, "path": image, "jit": "always"}).load(**OP)
    assert str(kernel) in str(caught.value)
    with Mirror(released.path) as mirror:  # the right bytes from elsewhere are welcome
        settings = {**filled, "path": image, "mirrors": mirror.url}
        assert machine.registry(**settings).load(**OP).origin == mirror.url


# -- nearest first, whatever the network does --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mirrors",
    [DEAD, "http://192.0.2.1/never http://kernels.invalid", f"{DEAD} https://192.0.2.1"],
    ids=["refused", "black-hole", "both"],
)
def test_a_network_that_is_down_does_not_hide_what_is_here(
    filled: dict[str, Any], machine: Machine, mirrors: str
) -> None:
    warm = machine.watched(LOAD, **{**filled, "mirrors": mirrors})
    assert (warm.seen, warm.result["origin"]) == ([], "store")
    image = machine.home / "image"
    machine.store.rename(image)
    warm = machine.watched(LOAD, path=image, **{**filled, "mirrors": mirrors})
    assert (warm.seen, warm.result["origin"]) == ([], str(image))


def test_a_dead_mirror_is_passed_over_for_a_good_one(released: Released, machine: Machine) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": f"{DEAD} {mirror.url}", "jit": "never"}
        assert machine.registry(**settings).load(**OP).origin == mirror.url


def metadata_of(machine: Machine, settings: dict[str, Any]) -> list[Path]:
    return [path for path in machine.store.rglob("*") if path.is_file() and path.suffix != ".so"]


@pytest.mark.parametrize("choose", [kernels_of, metadata_of])
def test_offline_one_missing_file_is_an_error_at_once_that_names_it_and_the_command(
    filled: dict[str, Any], machine: Machine, choose: Any
) -> None:
    for path in choose(machine, filled):
        path.unlink()
    code = """
import kartifacts, kartifacts.errors
try:
    kartifacts.load("norm/rmsnorm", device="cpu", dtype="float32")
except kartifacts.errors.ArtifactUnavailable as error:
    result = [type(error).__name__, str(error), error.uri, error.arch]
"""
    for jit in ("never", "auto"):
        failed = machine.watched(code, **{**filled, "offline": 1, "jit": jit})
        assert failed.seen == []
        name, text, uri, _ = failed.result
        assert (name, uri) == ("MissingKernel", "norm/rmsnorm?dtype=float32")
        assert str(machine.store) in text
        assert "norm/rmsnorm?dtype=float32 in pack" in text or "release kartifacts 1.0" in text
        assert "mirrors: offline" in text
        assert "kartifacts fetch --ops norm/rmsnorm --archs cpu:" in text


def test_the_command_that_the_error_gives_mends_it(released: Released, machine: Machine) -> None:
    with pytest.raises(MissingKernel) as caught:
        machine.registry(lock=released.lock_file, offline=1).load(**OP)
    assert caught.value.hint is not None
    command = caught.value.hint.partition("kartifacts fetch ")[2].split()
    with Mirror(released.path) as mirror:
        assert machine.cli("fetch", *command, lock=released.lock_file, mirrors=mirror.url).code == 0
    assert machine.registry(lock=released.lock_file, offline=1, jit="never").load(**OP).origin == "store"


def test_a_store_filled_from_a_directory_is_complete_without_it(
    released: Released, machine: Machine, tmp_path: Path
) -> None:
    stick = tmp_path / "stick"
    shutil.copytree(released.path, stick)
    settings: dict[str, Any] = {"lock": released.lock_file}
    assert machine.cli("fetch", mirrors=f"file://{stick}", **settings).code == 0
    shutil.rmtree(stick)
    assert machine.registry(offline=1, jit="never", **settings).load(**OP).origin == "store"
    assert machine.cli("status", "--json", **settings).data["complete"]
    assert machine.cli("verify", **settings).code == 0


def test_settings_may_come_from_the_configuration_file_and_paths_may_be_relative(
    released: Released, machine: Machine
) -> None:
    """The lock lies where it is looked for by default, the rest is in config.toml; PATH apart, no variable is set."""
    place = machine.home / ".config/kartifacts"
    place.mkdir(parents=True)
    shutil.copy(released.lock_file, place / "kartifacts.lock")
    (place / "config.toml").write_text(f'mirrors = ["file://{released.path}/"]\njit = "never"\n')
    unset: dict[str, Any] = {"store": None, "workspace": None}
    result = machine.watched(LOAD, **unset).result
    assert result["origin"] == f"file://{released.path}"
    assert result["path"].startswith(str(machine.home / ".cache/kartifacts/store"))
    (place / "config.toml").unlink()
    (place / "kartifacts.lock").rename(machine.home / "my.lock")
    shutil.copytree(released.path, machine.home / "here")
    for settings in ({"lock": "my.lock", "path": "here"}, {"lock": "~/my.lock", "path": "~/here"}):
        moved = machine.watched(LOAD, store="other", jit="never", **settings).result
        assert moved["path"].startswith(str(machine.home / "other"))


def test_a_home_with_blanks_and_umlauts_is_a_home(released: Released, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "ein schönes $HOME 'hier'")
    with Mirror(released.path) as mirror:
        assert machine.watched(LOAD, lock=released.lock_file, mirrors=mirror.url, jit="never").result["origin"]
    built = machine.watched(LOAD)
    assert built.result["origin"] == "jit"
    assert machine.watched(LOAD).result["path"] == built.result["path"]


def test_two_stores_in_one_process_are_each_complete(released: Released, tmp_path: Path) -> None:
    machines = [Machine(tmp_path / name) for name in ("one", "two")]
    with Mirror(released.path) as mirror:
        for each in machines:
            each.registry(lock=released.lock_file, mirrors=mirror.url, jit="never").load(**OP)
    for each in machines:
        assert each.watched(LOAD, lock=released.lock_file, offline=1, jit="never").seen == []


def test_a_store_that_others_may_write_is_refused(filled: dict[str, Any], machine: Machine) -> None:
    (machine.store / "v1/sha256").chmod(0o777)
    with pytest.raises(StoreError, match="chmod"):
        machine.registry(**filled).load(**OP)


def test_a_store_path_that_is_a_file_is_a_typed_error(released: Released, machine: Machine) -> None:
    machine.store.write_text("")
    with Mirror(released.path) as mirror, pytest.raises((StoreError, ArtifactUnavailable)) as caught:
        machine.registry(lock=released.lock_file, mirrors=mirror.url, jit="never").load(**OP)
    assert str(machine.store) in str(caught.value)
