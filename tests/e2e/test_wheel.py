"""Data wheels end to end: made, checked, served by nginx, installed by pip, and used where they lie."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import kartifacts
from kartifacts.errors import VerificationError
from kartifacts.model.manifest import Pin
from kartifacts.publish.wheel import Kernel, plan_wheels, write_wheel
from kartifacts.publish.wheel_audit import audit
from kartifacts.testing import Mirror
from tests.conftest import Answer, Content, Machine, MakeRelease, Released
from tests.e2e.test_places import NOBODY, read_only, state_of
from tests.processes import free_ports
from tests.sources.test_nginx import SCRIPT

PACKAGE = Path(kartifacts.__file__).parent
NAME = "kartifacts-kartifacts"
LOAD = """
import kartifacts
kernel, error = error_of(kartifacts)
result = {"origin": kernel.origin, "path": str(kernel.path), "error": error}
"""
FAILS = """
import kartifacts, kartifacts.errors
try:
    kartifacts.load("norm/rmsnorm", device="cpu", dtype="float32")
    result = ["no error", ""]
except kartifacts.errors.KartifactsError as error:
    result = [type(error).__name__, str(error)]
"""


def pip(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    alone = ["--disable-pip-version-check", "--no-cache-dir", "--isolated"]
    command = [sys.executable, "-m", "pip", *alone, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def install(wheel: Path, site: Path) -> Path:
    """What pip makes of a wheel; gives the directory that its package has become."""
    pip("install", "-q", "--no-index", "--no-deps", "--target", site, wheel)
    return site / wheel.name.partition("-")[0]


def make(machine: Machine, released: Released, out: Path, *arguments: object) -> list[Path]:
    answer = machine.cli("wheel", "--from", released.path, "--out", out, "--json", *arguments)
    assert answer.code == 0, answer.err
    return [Path(row["file"]) for row in answer.data["wheels"]]


@pytest.fixture(scope="module")
def wheel(released: Released, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the whole release."""
    base = tmp_path_factory.mktemp("wheel")
    [made] = make(Machine(base / "engineer"), released, base / "out")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place on Python's path with nothing but the wheel; not to be changed."""
    site = tmp_path_factory.mktemp("site")
    install(wheel, site)
    return site


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(installed, tmp_path / "site")
    return tmp_path / "site"


# -- used in place -----------------------------------------------------------------------------------------------------


def test_an_installed_wheel_needs_no_lock_no_network_no_home_and_no_place_to_write(
    installed: Path, machine: Machine
) -> None:
    before = state_of(installed)
    prefix = read_only(machine.home, PACKAGE, installed)
    nothing: dict[str, Any] = {"HOME": None, "workspace": None, "TMPDIR": machine.home}
    nothing["XDG_CACHE_HOME"] = (
        machine.home / "cache"
    )  # without a home it is that of the password file, with what is there
    for store in (None, machine.home / "store"):
        warm = machine.watched(
            LOAD, prefix=prefix, PYTHONPATH=installed, offline=1, jit="never", store=store, **nothing
        )
        assert warm.seen == []
        assert warm.result["path"].startswith(f"{installed}/")
        assert NAME in warm.result["origin"]
        assert warm.result["error"] < 1e-6
    assert state_of(installed) == before
    assert list(machine.home.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
def test_an_environment_that_another_user_installed_is_used_in_place_too(site: Path, machine: Machine) -> None:
    """Its code runs in this process already, so that its kernels need not be copied first."""
    subprocess.run(["chown", "-R", str(NOBODY), site], check=True)
    warm = machine.watched(LOAD, prefix=read_only(machine.home), PYTHONPATH=site, offline=1, jit="never")
    assert warm.seen == []
    assert warm.result["path"].startswith(f"{site}/")


def test_explain_and_doctor_show_the_wheel(installed: Path, machine: Machine) -> None:
    said = machine.run_cli("explain", "norm/rmsnorm", "dtype=float32", "--device", "cpu", PYTHONPATH=installed)
    assert said.code == 0, said.err
    assert f"present, from {installed}/kartifacts_kartifacts ({NAME})" in said.out
    said = machine.run_cli("doctor", PYTHONPATH=installed)
    assert said.code == 0, said.out
    assert f"{NAME} pins kartifacts 1.0" in said.out


def test_every_command_about_pins_knows_the_wheel(installed: Path, machine: Machine) -> None:
    offline: dict[str, Any] = {"PYTHONPATH": installed, "offline": 1}
    rows = machine.run_cli("list", "--json", **offline).data["kernels"]
    assert rows
    assert all(row["place"].startswith(f"{installed}/") for row in rows)
    assert machine.run_cli("status", "--json", **offline).data["complete"]
    for command in ("verify", "fetch"):
        answer = machine.run_cli(command, **offline)
        assert answer.code == 0, answer.out + answer.err
    assert machine.run_cli("gc", **offline).code == 2  # a wheel says nothing of what else the store is for


def test_a_wheel_is_preferred_to_the_store_and_to_mirrors(
    installed: Path, machine: Machine, released: Released
) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"PYTHONPATH": installed, "lock": released.lock_file, "mirrors": mirror.url}
        assert machine.run_cli("fetch", lock=released.lock_file, mirrors=mirror.url).code == 0
        before = len(mirror.requests)
        assert NAME in machine.watched(LOAD, **settings).result["origin"]
        assert len(mirror.requests) == before


def test_what_a_wheel_does_not_hold_is_one_request_away(machine: Machine, released: Released, tmp_path: Path) -> None:
    [wheel] = make(machine, released, tmp_path / "out", "--ops", "activation")
    install(wheel, tmp_path / "site")
    with Mirror(released.path) as mirror:
        cold = machine.watched(LOAD, PYTHONPATH=tmp_path / "site", mirrors=mirror.url, jit="never")
        assert cold.result["origin"] == mirror.url
        assert [request.method for request in mirror.requests] == ["GET"]
    # Without a mirror it is lacking, and asking the wheel for it writes nothing.
    prefix = read_only(machine.home)
    gone = machine.watched(FAILS, prefix=prefix, PYTHONPATH=tmp_path / "site", jit="never", store=machine.home / "new")
    assert gone.result[0] == "MissingKernel"
    assert gone.seen == []


def test_a_wheel_without_the_arch_of_the_device_is_a_reason_not_an_error(
    make_release: MakeRelease, machine: Machine, tmp_path: Path
) -> None:
    other = make_release(Content("9.0a", {"norm/rmsnorm?dtype=float32": b"for another device"}))
    [wheel] = make(machine, other, tmp_path / "out")
    assert wheel.name.endswith("-any.whl")
    install(wheel, tmp_path / "site")
    kind, message = machine.watched(FAILS, PYTHONPATH=tmp_path / "site", jit="never").result
    assert kind == "MissingKernel"
    assert "bundle kartifacts 1.0 norm 9.0a" in message


def test_an_op_that_was_built_from_other_sources_is_compiled_and_the_others_are_not(
    installed: Path, make_release: MakeRelease, machine: Machine, released: Released, tmp_path: Path
) -> None:
    rows = machine.run_cli("list", "--json", PYTHONPATH=installed).data["kernels"]
    kernels = {row["uri"]: Path(row["place"]).read_bytes() for row in rows if row["arch"] == str(released.best)}
    families: dict[str, dict[str, bytes]] = {
        family: {uri: data for uri, data in kernels.items() if uri.startswith(f"{family}/")}
        for family in ("norm", "activation")
    }
    old = make_release(
        Content(str(released.best), families["norm"], op_digest="0" * 64),
        Content(str(released.best), families["activation"], family="activation", exports=("silu_and_mul",)),
        version="0.1.dev1",
    )
    [wheel] = make(machine, old, tmp_path / "out")
    assert "-0.1.dev1-" in wheel.name
    install(wheel, tmp_path / "site")
    code = """
import kartifacts
load = lambda op: kartifacts.load(op, device="cpu", dtype="float32").origin
result = [load("norm/rmsnorm"), load("activation/silu_and_mul")]
"""
    compiled, prebuilt = machine.watched(code, PYTHONPATH=tmp_path / "site").result
    assert compiled == "jit"
    assert NAME in prebuilt


def test_another_release_in_the_users_lock_counts_and_the_wheels_pin_does_not(
    installed: Path, make_release: MakeRelease, machine: Machine
) -> None:
    other = make_release(Content("cpu:x86-64", {"norm/rmsnorm?dtype=float32": b"x"}), version="2.0")
    rows = machine.run_cli("list", "--json", PYTHONPATH=installed, lock=other.lock_file, path=other.path).data
    assert {row["version"] for row in rows["kernels"]} == {"2.0"}


# -- damage ------------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def other_digest(data: bytes) -> bytes:
    """A lock whose pin has another digit."""
    at = data.index(b'"sha256":"') + 20
    return data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :]


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        *(
            (place, damage)
            for place in ("v1/**/*.so", "blobs/sha256/*")
            for damage in (flipped, lambda data: data[:-1])
        ),
        ("v1/**/*.so", lambda data: data + b"\0"),
        ("v1/**/*.so", lambda _: b""),
        ("kartifacts.lock", other_digest),
        ("kartifacts.lock", lambda data: data[:-3]),
    ],
)
@pytest.mark.parametrize("jit", ["auto", "always"])
def test_a_damaged_wheel_is_never_answered_by_compiling(
    site: Path, machine: Machine, pattern: str, damage: Callable[[bytes], bytes], jit: str
) -> None:
    for path in (site / "kartifacts_kartifacts").glob(pattern):
        data = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(damage(data))
    seen = machine.watched(FAILS, PYTHONPATH=site, jit=jit)
    assert seen.result[0] == "VerificationError"
    assert str(site) in seen.result[1]
    assert seen.of("process") == []


def test_a_mirror_has_the_right_bytes_where_a_wheel_is_damaged(
    site: Path, machine: Machine, released: Released
) -> None:
    for path in (site / "kartifacts_kartifacts/v1").rglob("*.so"):
        path.write_bytes(flipped(path.read_bytes()))
    with Mirror(released.path) as mirror:
        healed = machine.watched(LOAD, PYTHONPATH=site, mirrors=mirror.url, jit="never")
    assert healed.result["origin"] == mirror.url
    assert healed.result["error"] < 1e-6


# -- what may not become a wheel ---------------------------------------------------------------------------------------


def snapshot(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--archs", "9.0a"], 2, "9.0a"),
        (["--archs", "sm_nonsense"], 2, "nonsense"),
        (["--ops", "norm,no_such_op"], 2, "no_such_op"),
        (["--library", "other"], 2, "other"),
        (["--release-version", "9"], 2, "9"),
        (["--name", "../up"], 2, "../up"),
        (["--name", "3d"], 2, "3d"),
        (["--max-bytes", "100 apples"], 2, "apples"),
        (["--max-bytes", "100kB"], 2, "Its largest ops"),
        (["--max-bytes", "100kB", "--one-per-arch"], 2, "--ops"),
    ],
)
def test_a_bad_request_is_a_typed_error_and_writes_nothing(
    released: Released, machine: Machine, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    answer = machine.cli("wheel", "--from", released.path, "--out", tmp_path / "out", *arguments)
    assert answer.code == code, answer.err
    assert says in answer.err
    assert not (tmp_path / "out").exists()


def test_a_wheel_that_is_too_large_says_how_to_split_it(released: Released, machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    size = make(machine, released, tmp_path / "all")[0].stat().st_size
    answer = machine.cli("wheel", "--from", released.path, "--out", out, "--max-bytes", size - 1)
    assert answer.code == 2
    assert not out.exists()
    assert all(f"for {arch}" in answer.err.partition("--one-per-arch gives about")[2] for arch in released.archs)
    if len(released.archs) > 1:
        for part in make(machine, released, out, "--max-bytes", size - 1, "--one-per-arch"):
            assert part.stat().st_size < size


def broken_pack(repository: Path) -> None:
    largest = max((repository / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(flipped(largest.read_bytes()))


def missing_blob(repository: Path) -> None:
    max((repository / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size).unlink()


def no_release(repository: Path) -> None:
    shutil.rmtree(repository / "targets")


@pytest.mark.parametrize(("harm", "code"), [(broken_pack, 5), (missing_blob, 5), (no_release, 2)])
def test_a_repository_that_is_not_whole_becomes_no_wheel(
    released: Released, machine: Machine, tmp_path: Path, harm: Callable[[Path], None], code: int
) -> None:
    shutil.copytree(released.path, tmp_path / "repository")
    harm(tmp_path / "repository")
    answer = machine.cli("wheel", "--from", tmp_path / "repository", "--out", tmp_path / "out")
    assert answer.code == code, answer.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing", "other bytes", "planted link"])
def test_what_stands_where_a_wheel_shall_go_stays(
    released: Released, wheel: Path, machine: Machine, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    (tmp_path / "mine").write_text("mine")
    if kind == "file":
        out.write_text("mine")
    elif kind.startswith("link"):
        out.symlink_to(tmp_path / ("mine" if kind == "link to a file" else "nothing"))
    else:
        out.mkdir()
        target = out / wheel.name
        target.write_text("mine") if kind == "other bytes" else target.symlink_to(tmp_path / "nothing")
    before = snapshot(tmp_path)
    answer = machine.cli("wheel", "--from", released.path, "--out", out)
    assert answer.code in (2, 9, 10), answer.err
    assert not answer.err.startswith("error: unexpected")
    assert snapshot(tmp_path) == before


def test_a_version_that_pip_does_not_know_is_refused(
    make_release: MakeRelease, machine: Machine, tmp_path: Path
) -> None:
    nightly = make_release(Content("9.0a", {"norm/rmsnorm?dtype=float32": b"x"}), version="nightly-7")
    answer = machine.cli("wheel", "--from", nightly.path, "--out", tmp_path / "out")
    assert answer.code == 2
    assert "nightly-7" in answer.err
    assert not (tmp_path / "out").exists()


def test_a_wheel_is_made_of_what_the_lock_pins_too(
    released: Released, wheel: Path, machine: Machine, tmp_path: Path
) -> None:
    with Mirror(released.path) as mirror:
        answer = machine.cli("wheel", "--out", tmp_path, lock=released.lock_file, mirrors=mirror.url)
    assert answer.code == 0, answer.err
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    assert machine.cli("wheel", "--out", tmp_path / "new").code == 2  # nothing is pinned


# -- the platform tag --------------------------------------------------------------------------------------------------


def test_auditwheel_agrees_with_the_tag(wheel: Path, released: Released, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    said = audit(wheel)
    assert said is not None
    assert "manylinux" in said
    if shutil.which("patchelf") is None:
        pytest.skip("the patchelf program is not installed, without which auditwheel does not start a repair")
    # What `repair` would be asked to do: nothing, since all that lies outside the tag is what comes with tvm_ffi.
    platform = wheel.stem.rpartition("-")[2]
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtvm_ffi.so", "--plat", platform]
    command += ["--only-plat", "--disable-isa-ext-check", "-w", str(tmp_path), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [repaired] = tmp_path.glob("*.whl")
    assert repaired.stem.endswith(platform)
    with zipfile.ZipFile(repaired) as after, zipfile.ZipFile(wheel) as before:
        kernels = {name for name in before.namelist() if name.endswith(".so")}
        assert kernels == {name for name in after.namelist() if ".so" in name}
        assert all(after.read(name) == before.read(name) for name in kernels)


@pytest.mark.parametrize(("lie", "says"), [("newer symbols", "manylinux_2_2[4-9]"), ("another library", "libother")])
def test_a_tag_that_promises_too_much_is_found_out(tmp_path: Path, lie: str, says: str) -> None:
    """A kernel table that keeps silent about what its kernel needs."""
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    source, other, built = tmp_path / "a.c", tmp_path / "other.c", tmp_path / "a.so"
    other.write_text("int g(void) { return 1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libother.so", other], check=True)
    if lie == "another library":
        source.write_text("int g(void);\nint f(void) { return g(); }\n")
    else:  # glibc has it since 2.25
        source.write_text("int getentropy(void*, unsigned long);\nint f(void* p) { return getentropy(p, 1); }\n")
    libraries = [f"-L{tmp_path}", "-Wl,--as-needed", "-lother"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source, *libraries], check=True)
    kernel = Kernel("norm/rmsnorm", "cpu:x86-64", built, hash_of(built), built.stat().st_size, ".so", {})
    [planned] = plan_wheels(Pin(library="lying", version="1", sha256="0" * 64, size=1), {}, [kernel])
    made = write_wheel(planned, tmp_path)
    with pytest.raises(VerificationError, match=says):
        audit(made.path)


# -- nginx and pip -----------------------------------------------------------------------------------------------------


@pytest.fixture
def served(released: Released, machine: Machine, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory of wheels with its index, as nginx serves it."""
    for program in ("nginx", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"the {program} program is not installed")
    tree, state, port = tmp_path / "wheels", tmp_path / "nginx", free_ports(4)
    make(machine, released, tree, "--index", "--one-per-arch")
    subprocess.run([SCRIPT, "start", state, tree, str(port)], check=True)
    yield tree, f"http://127.0.0.1:{port}"
    subprocess.run([SCRIPT, "stop", state], check=True)


def hash_of(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.nginx
def test_pip_installs_from_nginx_and_the_kernel_loads(
    served: tuple[Path, str], machine: Machine, released: Released, tmp_path: Path
) -> None:
    tree, url = served
    slug = released.best.slug
    [wheel] = tree.glob(f"kartifacts_kartifacts_{slug.replace('-', '_')}-*.whl")
    name = f"{NAME}-{slug}"
    needs = tmp_path / "requirements.txt"
    needs.write_text(f"{name}==1.0 --hash=sha256:{hash_of(wheel)}\n")
    site = tmp_path / "site"
    pip("install", "--index-url", f"{url}/simple/", "--require-hashes", "-r", needs, "--target", site)
    warm = machine.watched(LOAD, PYTHONPATH=site, offline=1, jit="never", HOME=None)
    assert (warm.seen, warm.result["error"] < 1e-6) == ([], True)
    assert name in warm.result["origin"]
    needs.write_text(f"{name}==1.0 --hash=sha256:{'0' * 64}\n")
    refused = pip(
        "install", "--index-url", f"{url}/simple/", "--require-hashes", "-r", needs, "--target", site, check=False
    )
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr


@pytest.mark.nginx
def test_a_resolver_needs_the_metadata_only(served: tuple[Path, str], released: Released, tmp_path: Path) -> None:
    found = version("pip")
    if Version(found) < Version("23.2"):
        pytest.skip(f"needs pip 23.2, the first that asks for core-metadata (PEP 714); this is {found}")
    name = f"{NAME}-{released.best.slug}"
    answer = pip("install", "--dry-run", "--ignore-installed", "--index-url", f"{served[1]}/simple/", name)
    assert f"Would install {name}-1.0" in answer.stdout
    asked = (tmp_path / "nginx/access.log").read_text()
    assert ".whl.metadata " in asked


@pytest.mark.nginx
def test_pip_refuses_a_wheel_that_was_changed_after_it_was_indexed(
    served: tuple[Path, str], released: Released, tmp_path: Path
) -> None:
    tree, url = served
    [wheel] = tree.glob(f"kartifacts_kartifacts_{released.best.slug.replace('-', '_')}-*.whl")
    wheel.write_bytes(flipped(wheel.read_bytes()))
    refused = pip(
        "install",
        "--index-url",
        f"{url}/simple/",
        "--target",
        tmp_path / "site",
        f"{NAME}-{released.best.slug}",
        check=False,
    )
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not list(tmp_path.glob("site/kartifacts*"))


@pytest.mark.nginx
@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/vnd.pypi.simple.v1+json, text/html; q=0.01", "application/vnd.pypi.simple.v1+json"),
        ("text/html", "text/html"),
    ],
)
@pytest.mark.parametrize("page", ["", f"{NAME}-SLUG/"])
def test_nginx_gives_each_client_the_page_it_understands(
    served: tuple[Path, str], released: Released, accept: str, kind: str, page: str
) -> None:
    url = f"{served[1]}/simple/{page.replace('SLUG', released.best.slug)}"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept})) as answer:
        assert answer.headers.get_content_type() == kind
        assert answer.headers["Vary"] == "Accept"
        assert released.best.slug in answer.read().decode()


def test_index_is_a_command_of_its_own(wheel: Path, machine: Machine, tmp_path: Path) -> None:
    shutil.copy(wheel, tmp_path)
    answers: list[Answer] = [machine.cli("index", tmp_path, "--json") for _ in range(2)]
    assert [answer.code for answer in answers] == [0, 0]
    assert answers[0].data == answers[1].data
    assert [row["sha256"] for row in answers[0].data["files"]] == [hash_of(wheel)]
    assert machine.cli("index", tmp_path / "nothing").code == 2
