"""Settings: each variable and key does what it says, a misspelt one is refused, and every message names its origin."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from kartifacts.config import VARIABLES, Settings, read
from kartifacts.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home" / ".config" / "kartifacts").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    return {"HOME": str(home)}


def write(home: Path, text: str) -> Path:
    path = home / ".config" / "kartifacts" / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


# Of every variable: its text, what is read, and texts that are refused.
CASES: dict[str, tuple[str, object, list[str]]] = {
    "path": ("/a:/b/../c:", (Path("/a"), Path("/c")), ["~nobody-of-that-name/x", "/a:\0"]),
    "store": ("/s//t/", Path("/s/t"), [" ", "~nobody-of-that-name", "/a\0b"]),
    "workspace": ("/w/.", Path("/w"), ["\t"]),
    "mirrors": (
        "https://a/x/, http://b:81\nfile:///c",
        ("https://a/x", "http://b:81", "file:///c"),
        [
            *(
                "example.org",
                "ftp://a",
                "https:///x",
                "https://",
                "s3:bucket/x",
                "gs://bucket/x",
                "https://a/b?token=1",
            ),
            *(
                "https://a/#x",
                "http://[bad/",
                "http://[::1",
                "http://a:b/",
                "http://a:99999/",
                "http://a:0/",
                "http://:80/",
            ),
            *("http://user@/x", f"http://{'a' * 64}.org/", "http://a..b/", "http://a/\x1b[2J", "http://a\u2100b/"),
        ],
    ),
    "lock": ("/l", Path("/l"), [" "]),
    "offline": ("Yes", True, ["2", "maybe", "1.0", "offline"]),
    "jit": (" Never", "never", ["1", "sometimes", "always,never"]),
    "verify": ("OFF", "off", ["0", "no"]),
    "download_threads": ("16", 16, ["0", "65", "-1", "8.0", "many", "1e1", "9" * 30]),
    "connect_timeout": ("0.5", 0.5, ["0", "-1", "nan", "inf", "5s", "1e9"]),
    "read_timeout": ("60", 60.0, ["0", ""]),
    "retries": ("0", 0, ["-1", "21", "x"]),
    "jobs": ("4", 4, ["0", "4097", "auto"]),
    "archs": (" 8.0 9.0a ", "8.0 9.0a", []),
    "cxx": ("g++-13", "g++-13", []),
    "generated": ("/g/../h", Path("/h"), [" ", "/g\0"]),
    "disk_cache": ("Off", "off", ["0", "never"]),
    "misses": ("/m/log", Path("/m/log"), [" "]),
    "cuda_compiler": ("NVRTC", "nvrtc", ["clang", "1"]),
    "cxx_flags": (" -O2 -DNAME='a b' ", "-O2 -DNAME='a b'", ["'", '-DX="a']),
    "cuda_flags": ("-lineinfo", "-lineinfo", ["-DX='"]),
    "cxx_launcher": ("ccache", "ccache", ["'"]),
    "cuda_launcher": ("sccache --x", "sccache --x", ["\\"]),
    "debug": ("on", True, ["2", "full"]),
    "lineinfo": ("1", True, ["lines"]),
    "progress": ("on", "on", ["bar"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_nul_byte_is_refused_in_every_value(name: str, home: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="NUL byte"):
        read({**environ, f"KARTIFACTS_{name.upper()}": f"{CASES[name][0]}\0"})
    with pytest.raises(ConfigError, match="NUL byte"):
        read(environ, {name: f"{CASES[name][0]}\0"})
    write(home, f'{name} = "/a\\u0000"')
    with pytest.raises(ConfigError, match="NUL byte"):
        read(environ)


def test_every_variable_has_a_case_here_and_a_help_text() -> None:
    assert set(CASES) == {variable.field for variable in VARIABLES}
    assert all(variable.help for variable in VARIABLES)


@pytest.mark.parametrize("name", CASES)
def test_a_variable_is_read_and_says_where_it_came_from(name: str, environ: dict[str, str]) -> None:
    text, value, _ = CASES[name]
    settings = read({**environ, f"KARTIFACTS_{name.upper()}": text})
    assert getattr(settings, name) == value
    assert settings.origins[name] == f"environment KARTIFACTS_{name.upper()}"
    assert settings.shown()[name][1] == f"environment KARTIFACTS_{name.upper()}"


@pytest.mark.parametrize(
    ("name", "text"), [(name, bad) for name, (_, _, refused) in CASES.items() for bad in refused if bad]
)
def test_a_wrong_value_is_refused_with_its_variable_and_what_is_expected(
    name: str, text: str, environ: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**environ, f"KARTIFACTS_{name.upper()}": text})
    assert caught.value.message.startswith(f"KARTIFACTS_{name.upper()}=")
    assert caught.value.hint == next(variable.help for variable in VARIABLES if variable.field == name)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("off", False), ("No", False)]
)
def test_switches_take_the_usual_words(text: str, value: bool, environ: dict[str, str]) -> None:
    assert read({**environ, "KARTIFACTS_OFFLINE": text}).offline is value


def test_an_empty_variable_is_one_that_is_not_set(home: Path, environ: dict[str, str]) -> None:
    write(home, "offline = true\n")
    empty = {variable.env: "" for variable in VARIABLES}
    assert read({**environ, **empty, "KARTIFACTS_CONFIG": ""}) == read(environ)
    assert read({**environ, **empty}).offline


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("KARTIFACTS_OFLINE", "KARTIFACTS_OFFLINE"),
        ("KARTIFACTS_MIRROR", "KARTIFACTS_MIRRORS"),
        ("KARTIFACTS_offline", ""),
    ],
)
def test_a_misspelt_switch_is_not_silently_off(name: str, near: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {name}") as caught:
        read({**environ, name: "1"})
    assert near in str(caught.value.hint)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_argument_beats_variable_beats_file_beats_default(home: Path, environ: dict[str, str]) -> None:
    path = write(home, "retries = 5\njit = 'never'\nconnect_timeout = 1.5\n")
    environ = {**environ, "KARTIFACTS_RETRIES": "6", "KARTIFACTS_JIT": "always"}
    settings = read(environ, {"retries": 7})
    assert (settings.retries, settings.jit, settings.connect_timeout, settings.verify) == (7, "always", 1.5, "on")
    assert settings.origins["retries"] == "argument"
    assert settings.origins["jit"] == "environment KARTIFACTS_JIT"
    assert settings.origins["connect_timeout"] == f"file {path}"
    assert settings.shown()["verify"] == ("on", "default")


def test_toml_values_mean_what_variables_mean(home: Path, environ: dict[str, str]) -> None:
    write(home, "offline = true\nmirrors = ['https://a', 'file:///b']\npath = ['/x', '/y']\njobs = 3\nstore = '/s'\n")
    settings = read(environ)
    assert settings.offline is True
    assert settings.mirrors == ("https://a", "file:///b")
    assert settings.path == (Path("/x"), Path("/y"))
    assert (settings.jobs, settings.store) == (3, Path("/s"))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "oflline = true",
            "[store]\nx = 1",
            "path = [1]",
            "mirrors = [['https://a']]",
            "store = 1979-05-27",
            "jobs = 1.5",
        ),
        *("offline = 'perhaps'", "a", "retries = 1\nretries = 2", "jit = nan", 'store = "a\\u0000b"', "mirrors = 'x'"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(text: str, home: Path, environ: dict[str, str]) -> None:
    path = write(home, text)
    with pytest.raises(ConfigError) as caught:
        read(environ)
    assert repr(str(path)) in caught.value.message


def test_a_misspelt_key_is_named_with_the_right_one(home: Path, environ: dict[str, str]) -> None:
    write(home, "download_thread = 2")
    with pytest.raises(ConfigError, match="unknown setting 'download_thread'") as caught:
        read(environ)
    assert caught.value.hint == "did you mean download_threads?"


def test_a_file_that_is_not_utf8_is_an_error_and_not_ignored(home: Path, environ: dict[str, str]) -> None:
    write(home, "").write_bytes(b"offline = true # \xff\n")
    with pytest.raises(ConfigError, match="not TOML"):
        read(environ)


def test_the_named_file_is_read_instead_and_must_be_there(tmp_path: Path, home: Path, environ: dict[str, str]) -> None:
    write(home, "retries = 1")
    other = tmp_path / "other.toml"
    with pytest.raises(ConfigError, match=r"KARTIFACTS_CONFIG names .*other.toml', which does not exist"):
        read({**environ, "KARTIFACTS_CONFIG": str(other)})
    with pytest.raises(ConfigError, match="cannot read"):
        read({**environ, "KARTIFACTS_CONFIG": str(tmp_path)})
    other.write_text("retries = 2")
    assert read({**environ, "KARTIFACTS_CONFIG": str(other)}).retries == 2


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "huge", "deep", "deep tables"])
def test_a_file_that_cannot_be_settings_is_refused_at_once(
    kind: str, named: bool, home: Path, environ: dict[str, str]
) -> None:
    path = write(home, "")
    if kind.startswith("deep"):
        path.write_text("path = " + "[" * 100_000 if kind == "deep" else "a = " + "{b=" * 100_000)
    elif kind == "huge":
        os.truncate(path, 1 << 40)
    else:
        path.unlink()
        {"pipe": os.mkfifo, "directory": os.mkdir, "device": lambda at: os.symlink("/dev/zero", at)}[kind](path)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        read({**environ, **({"KARTIFACTS_CONFIG": str(path)} if named else {})})


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_of_mine_that_i_cannot_read_is_not_silently_off(home: Path, environ: dict[str, str]) -> None:
    write(home, "offline = true").chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        read(environ)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_another_users_home_in_home_is_not_an_error(home: Path, environ: dict[str, str]) -> None:
    write(home, "retries = 1").parent.chmod(0)
    try:
        assert read(environ).retries == Settings().retries
    finally:
        (home / ".config" / "kartifacts").chmod(0o700)


def test_a_home_that_is_a_file_or_missing_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in ("file", "missing", "file/below"):
        settings = read({"HOME": str(tmp_path / bad), "TMPDIR": "/scratch"})
        assert settings.store == Path(f"/scratch/kartifacts-{os.getuid()}/store")
        assert settings.origins["store"] == "default, for want of a home directory"


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_are_parsed_like_variables_and_none_means_not_given(environ: dict[str, str]) -> None:
    settings = read(environ, {"mirrors": "https://a/", "offline": "1", "jit": None, "retries": 2})
    assert (settings.mirrors, settings.offline, settings.jit, settings.retries) == (("https://a",), True, "auto", 2)
    for wrong in ({"jit": "no"}, {"colour": "red"}):
        with pytest.raises(ConfigError, match=r"jit|colour"):
            read(environ, wrong)


def test_paths_are_absolute_whichever_way_they_came(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "x"
    assert read(environ, {"store": Path("x")}).store == here
    assert read(environ, {"store": "x"}).store == here
    assert read({**environ, "KARTIFACTS_STORE": "x"}).store == here
    assert read({"HOME": "", "TMPDIR": "x"}, {"lock": "l"}).lock == tmp_path / "l"
    assert read({"HOME": "/", "TMPDIR": "x"}).store.is_absolute()


def test_a_current_directory_that_is_gone_matters_only_to_what_is_relative(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert read({**environ, "KARTIFACTS_STORE": "/s", "TMPDIR": "x"}).store == Path("/s")
    relative: list[dict[str, str]] = [
        *({"KARTIFACTS_" + name: "x"} for name in ("STORE", "WORKSPACE", "LOCK", "PATH")),
        {"KARTIFACTS_CONFIG": "x.toml"},
        {"HOME": "/", "TMPDIR": "x"},
    ]
    for wrong in relative:
        with pytest.raises(ConfigError, match=r"current directory|does not exist"):
            read({**environ, **wrong})
    with pytest.raises(ConfigError, match="current directory"):
        read(environ, {"store": Path("x")})


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_reading_twice_gives_equal_settings_that_cannot_be_changed(environ: dict[str, str]) -> None:
    settings = read(environ)
    assert settings == read(environ)
    with pytest.raises(FrozenInstanceError):
        settings.offline = True  # type: ignore[misc]


def test_caches_lie_below_the_home_or_where_xdg_says(home: Path, environ: dict[str, str]) -> None:
    assert read(environ).store == home / ".cache" / "kartifacts" / "store"
    assert read(environ).workspace == home / ".cache" / "kartifacts" / "workspace"
    assert read({**environ, "XDG_CACHE_HOME": "/c"}).store == Path("/c/kartifacts/store")
    assert read({**environ, "XDG_CACHE_HOME": "relative"}).store == read(environ).store  # as the XDG rules ask


def test_the_lock_is_found_in_the_configuration_directory_only(
    tmp_path: Path, home: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kartifacts.lock").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert read(environ).lock is None  # a cloned project must not choose what is loaded
    lock = home / ".config" / "kartifacts" / "kartifacts.lock"
    lock.write_text("{}")
    assert read(environ).lock == lock
    assert read({**environ, "KARTIFACTS_LOCK": "/other"}).lock == Path("/other")
    assert read({**environ, "XDG_CONFIG_HOME": str(tmp_path)}).lock is None


def test_what_others_set_is_handed_on_as_it_is(environ: dict[str, str]) -> None:
    settings = read({**environ, "CUDA_PATH": "/b", "CUDA_HOME": "/a", "MAX_JOBS": "2", "PATH": "/bin"})
    assert settings.cuda_home == (("CUDA_HOME", "/a"), ("CUDA_PATH", "/b"))
    assert (settings.max_jobs, settings.search_path) == ("2", "/bin")
    assert read({**environ, "CUDA_HOME": ""}).cuda_home == (("CUDA_HOME", ""),)  # which is said where it is looked at
    assert read(environ).cuda_home == ()


@pytest.mark.parametrize("url", ["https://me:secret@a/x", "https://me:sec@ret@a/x", "https://secret@a/x"])
def test_credentials_are_used_and_never_shown(url: str, environ: dict[str, str]) -> None:
    settings = read({**environ, "KARTIFACTS_MIRRORS": url})
    assert settings.mirrors == (url,)
    assert settings.shown()["mirrors"][0] == "https://***@a/x"
    for wrong in (f"{url}?secret", f"ftp{url.removeprefix('https')}"):
        with pytest.raises(ConfigError) as caught:
            read({**environ, "KARTIFACTS_MIRRORS": wrong})
        assert "sec" not in str(caught.value)
        assert "ret@" not in str(caught.value)
