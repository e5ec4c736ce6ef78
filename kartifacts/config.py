"""The only reader of the environment and of the configuration file: settings as one value, each with its origin.

Order: explicit argument, environment variable, ``config.toml``, default.  Read when asked for, never at import.  An
unknown ``KARTIFACTS_*`` variable or key is refused: a misspelt switch must not be silently off.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular

MAX_CONFIG = 1 << 20  # bytes

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


def _flag(text: str) -> bool:
    folded = text.strip().lower()
    if folded in _TRUE:
        return True
    if folded in _FALSE:
        return False
    raise ValueError("expected 1 or 0 (also true/false, yes/no, on/off)")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        folded = text.strip().lower()
        if folded not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return folded

    return parse


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text if text.isascii() else "")
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not 0 < value <= 86_400:
        raise ValueError("expected more than 0 and at most 86400 seconds")
    return value


def _path(text: str) -> Path:
    if not text.strip():
        raise ValueError("expected a path")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError("'~' stands for no home directory here")
    return _absolute(expanded)


def _absolute(path: str) -> Path:
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError:
        raise ValueError("expected an absolute path, as the current directory does not exist any more") from None


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in text.split(os.pathsep) if part.strip())


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(_url(part) for part in re.split(r"[\s,]+", text) if part)
    for url in urls:
        if not re.match(r"(https?|file|s3|oci|oci\+http)://[^/]|file:///", url):
            raise ValueError(
                f"{_redacted(url)!r} is neither an absolute path nor a URL that starts with "
                "https://, http://, file://, s3:// or oci://"
            )
        if ("?" in url and not url.startswith("s3://")) or "#" in url:
            raise ValueError(f"{_redacted(url)!r} goes on after '?' or '#'; blobs are named below a mirror's URL")
        _check_address(url)
    return urls


def _url(text: str) -> str:
    """A mirror's URL, also where only the path of a directory is given."""
    path = text.removeprefix("dir:")
    if not path.startswith("/"):
        return text.rstrip("/")
    from urllib.parse import quote

    return f"file://{quote(os.path.normpath(path))}"


def _check_address(url: str) -> None:
    """Refuse what no client can ask.  The parts themselves are not shown: one of them may be a password."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        sound = parts.port != 0 and (parts.scheme == "file" or _is_host(parts.hostname or ""))
    except ValueError:
        sound = False
    if not sound or not url.isprintable():
        raise ValueError(f"{_redacted(url)!r} is not a URL: its host, port or a character is wrong")


def _is_host(name: str) -> bool:
    """Whether it can be looked up; raises ValueError at the latest."""
    if name.isascii():  # the codec takes longer to import than all else here takes
        return all(0 < len(label) < 64 for label in name.removesuffix(".").split("."))
    return len(name.encode("idna")) > 0


def _redacted(url: str) -> str:
    return re.split("[?#]", re.sub(r"//[^/]*@", "//***@", url))[0]


def _words(text: str) -> str:
    return text.strip()


def _command_line(text: str) -> str:
    """Words as a shell takes them, kept as they are written."""
    import shlex

    shlex.split(text)  # or a ValueError
    return text.strip()


@dataclass(frozen=True)
class Variable:
    """One setting: its field in `Settings`, how its text is read, and what it is for."""

    field: str
    parse: Callable[[str], Any]
    help: str

    @property
    def env(self) -> str:
        return f"KARTIFACTS_{self.field.upper()}"


VARIABLES = (
    Variable("path", _paths, "directories looked at first, separated by ':'; read-only"),
    Variable("store", _path, "local content-addressed store of verified artifacts"),
    Variable("workspace", _path, "where the JIT writes objects, kernels and logs"),
    Variable("generated", _path, "where sources that are made from templates are written"),
    Variable("disk_cache", _choice("on", "off"), "off: for diagnosis, compile anew whatever was built here before"),
    Variable(
        "mirrors",
        _urls,
        "mirrors in order, separated by spaces or commas; https://, http://, s3://, oci:// or the path of a directory",
    ),
    Variable("lock", _path, "kartifacts.lock: the releases, pinned by digest, that may be used"),
    Variable("offline", _flag, "1: open no socket; a missing artifact is an error at once"),
    Variable("jit", _choice("auto", "always", "never"), "auto, always (also offline) or never compile what is missing"),
    Variable("misses", _path, "file to which each kernel that was missing is added, for kartifacts coverage"),
    Variable("verify", _choice("on", "off"), "off: debugging aid, skips the hash of local files and warns each time"),
    Variable("download_threads", _count(1, 64), "parallel transfers of this process"),
    Variable("connect_timeout", _seconds, "seconds to wait for a mirror to answer"),
    Variable("read_timeout", _seconds, "seconds without a byte after which a transfer is given up"),
    Variable("retries", _count(0, 20), "further tries after a transient fault of one mirror"),
    Variable("jobs", _count(1, 4096), "compilers at once; default: from cores and memory"),
    Variable("archs", _words, "arch list used where a command gets none, e.g. '8.0 9.0a cpu:x86-64-v3'"),
    Variable("cxx", _words, "host C++ compiler: a name or a path"),
    Variable("cuda_compiler", _choice("auto", "nvrtc", "nvcc"), "what makes CUDA images; auto: NVRTC, else nvcc"),
    Variable("cxx_flags", _command_line, "further flags of the host compiler; kernels so made have keys of their own"),
    Variable("cuda_flags", _command_line, "further flags of the CUDA compiler; kernels so made have keys of their own"),
    Variable("cxx_launcher", _command_line, "program that starts the host compiler: ccache, sccache"),
    Variable("cuda_launcher", _command_line, "program that starts nvcc: ccache, sccache"),
    Variable(
        "debug", _flag, "1: compile with symbols and without optimisation of device code (-g -G), under other keys"
    ),
    Variable("lineinfo", _flag, "1: compile device code with line numbers for profilers, under other keys"),
    Variable("progress", _choice("auto", "on", "off"), "progress bars: auto shows them on a terminal"),
)
_BY_FIELD = {variable.field: variable for variable in VARIABLES}
# KARTIFACTS_CONFIG names the file that the rest is read from, so it cannot be a setting itself.
CONFIG_VARIABLE = "KARTIFACTS_CONFIG"


@dataclass(frozen=True)
class Settings:
    """All settings of one run.  Paths are absolute; times are seconds."""

    path: tuple[Path, ...] = ()
    store: Path = Path()
    workspace: Path = Path()
    generated: Path = Path()
    disk_cache: str = "on"
    mirrors: tuple[str, ...] = ()
    lock: Path | None = None
    offline: bool = False
    jit: str = "auto"
    misses: Path | None = None
    verify: str = "on"
    download_threads: int = 8
    connect_timeout: float = 5.0
    read_timeout: float = 30.0
    retries: int = 3
    jobs: int | None = None
    archs: str = ""
    cxx: str = ""
    cuda_compiler: str = "auto"
    cxx_flags: str = ""
    cuda_flags: str = ""
    cxx_launcher: str = ""
    cuda_launcher: str = ""
    debug: bool = False
    lineinfo: bool = False
    progress: str = "auto"
    # No setting of ours names these: whoever can set a variable must not choose whom to trust.
    home: Path | None = None  # the directory of config.toml, kartifacts.lock and root.json
    root: Path | None = None  # the root of trust that `sync` begins with, if there is one
    # Not ours, but read here since only this module reads the environment:
    cuda_home: tuple[tuple[str, str], ...] = ()  # (variable, value) in the order to try
    max_jobs: str = ""
    search_path: str = ""  # PATH
    user_home: Path | None = None  # HOME, if it is a directory
    proxies: tuple[tuple[str, str], ...] = ()  # ('http' | 'https' | 'all' | 'no', value)
    authorities: tuple[str, str] = ("", "")  # (variable, file or directory of the CAs to trust), or the system's
    netrc: Path | None = None
    container_logins: tuple[Path, ...] = ()  # where docker, podman and skopeo keep what they log in with
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)  # field → where its value came from

    @property
    def overrides(self) -> str:
        """Which settings have kernels compiled in another way than those that are published; empty if none has."""
        names = ("debug", "lineinfo", "cxx_flags", "cuda_flags")
        return ", ".join(_BY_FIELD[name].env for name in names if getattr(self, name))

    def check_online(self, what: str) -> None:
        """Raise `ConfigError` if no socket may be opened; `what` is what needs one."""
        if self.offline:
            raise ConfigError(
                f"{what} needs a socket, and KARTIFACTS_OFFLINE is set",
                hint="offline too, directories are read and written, and keys in files sign",
            )

    def origin_of(self, field: str) -> str:
        """Where the value of a setting came from."""
        return self.origins.get(field, "default")

    def shown(self) -> dict[str, tuple[str, str]]:
        """Each setting as text, credentials removed, with where it came from."""
        rows = {}
        for variable in VARIABLES:
            value = getattr(self, variable.field)
            if isinstance(value, tuple):
                text = " ".join(_redacted(str(item)) for item in value)
            else:
                text = "" if value is None else str(int(value) if isinstance(value, bool) else value)
            rows[variable.field] = (text, self.origin_of(variable.field))
        if self.jobs is None and self.max_jobs:
            rows["jobs"] = (self.max_jobs, "environment MAX_JOBS")
        return rows


def read(environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings in force now.

    Args:
        environ: variables to read instead of the process's own.
        overrides: field → value, from a command line or a caller; a str is parsed like the variable.

    Raises:
        ConfigError: naming the variable or key, its value and what is expected.
    """
    environ = os.environ if environ is None else environ
    _refuse_unknown(environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, found in (*_from_file(environ), *_from_environ(environ), *_from_overrides(overrides or {})):
        name, value = found
        values[name] = value
        origins[name] = source
    _fill_directories(values, origins, environ)
    home = _config_home(environ)
    if values["lock"] is None:
        values["lock"] = _if_there(home, "kartifacts.lock")
    return Settings(
        **values,
        home=home,
        root=_if_there(home, "root.json"),
        cuda_home=tuple((name, environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in environ),
        max_jobs=environ.get("MAX_JOBS", ""),
        search_path=environ.get("PATH", os.defpath),
        user_home=_home(environ),
        proxies=_proxies(environ),
        authorities=next(((name, environ[name]) for name in _AUTHORITIES if environ.get(name)), ("", "")),
        netrc=_netrc(environ),
        container_logins=_container_logins(environ),
        origins=origins,
    )


def current_test() -> str:
    """The test that pytest runs in this process now; empty if none."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {variable.env for variable in VARIABLES} | {CONFIG_VARIABLE}
    for name in environ:
        if name.startswith("KARTIFACTS_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"unknown variable {name}", hint=f"did you mean {near[0]}?" if near else "see kartifacts config"
            )


Found = tuple[str, tuple[str, Any]]


def _from_environ(environ: Mapping[str, str]) -> list[Found]:
    return [
        (f"environment {variable.env}", (variable.field, _parsed(variable, environ[variable.env], variable.env)))
        for variable in VARIABLES
        if environ.get(variable.env)
    ]


def _from_overrides(overrides: Mapping[str, Any]) -> list[Found]:
    found: list[Found] = []
    for name, value in overrides.items():
        if name not in _BY_FIELD:
            raise ConfigError(f"unknown setting {name!r}; known: {', '.join(sorted(_BY_FIELD))}")
        if value is not None:
            text = os.fspath(value) if isinstance(value, os.PathLike) else value
            parsed = _parsed(_BY_FIELD[name], text, name) if isinstance(text, str) else value
            found.append(("argument", (name, parsed)))
    return found


def _from_file(environ: Mapping[str, str]) -> list[Found]:
    explicit = environ.get(CONFIG_VARIABLE)
    home = _config_home(environ)
    path = Path(explicit) if explicit else home / "config.toml" if home else None
    if path is None:
        return []
    try:
        data = read_regular(path, MAX_CONFIG)
    except FileNotFoundError:
        if explicit:
            raise ConfigError(f"{CONFIG_VARIABLE} names {explicit!r}, which does not exist") from None
        return []
    except OSError as error:
        if not explicit and not _is_own(path):  # the home of another user, which a container may have left in HOME
            return []
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # TOML and UTF-8
        raise ConfigError(f"{str(path)!r} is not TOML: {error}") from error
    found: list[Found] = []
    for name, value in content.items():
        if name not in _BY_FIELD:
            near = difflib.get_close_matches(name, _BY_FIELD, n=1)
            raise ConfigError(
                f"unknown setting {name!r} in {str(path)!r}", hint=f"did you mean {near[0]}?" if near else None
            )
        shown_as = f"{name} in {str(path)!r}"
        found.append((f"file {path}", (name, _parsed(_BY_FIELD[name], _as_text(name, value, shown_as), shown_as))))
    return found


def _is_own(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except (OSError, ValueError):
        return False


def _as_text(name: str, value: object, shown_as: str) -> str:
    """A TOML value as one would write it in a variable."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if _BY_FIELD[name].parse is _command_line:
            import shlex

            return shlex.join(value)
        return (os.pathsep if name == "path" else " ").join(value)
    raise ConfigError(f"{shown_as}: expected a string, a number, true, false or a list of strings")


def _parsed(variable: Variable, text: str, shown_as: str) -> Any:
    try:
        if "\0" in text:
            raise ValueError("it holds a NUL byte")
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"{shown_as}={_redacted(text)!r}: {error}", hint=variable.help) from error


def _home(environ: Mapping[str, str]) -> Path | None:
    """The user's home, or None in a container whose user has none (or has '/', as OpenShift gives)."""
    home = environ.get("HOME", "")
    if not home:
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return (
        Path(home) if os.path.isabs(home) and os.path.isdir(home) and os.access(home, os.X_OK) and home != "/" else None
    )


def _config_home(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kartifacts"
    home = _home(environ)
    return home / ".config" / "kartifacts" if home else None


def _cache_home(environ: Mapping[str, str]) -> tuple[Path, str]:
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kartifacts", "default, under XDG_CACHE_HOME"
    home = _home(environ)
    if home is not None:
        return home / ".cache" / "kartifacts", "default"
    temporary = environ.get("TMPDIR") or "/tmp"  # noqa: S108  the store checks owner and mode before use
    try:
        return _absolute(temporary) / f"kartifacts-{os.getuid()}", "default, for want of a home directory"
    except ValueError as error:
        raise ConfigError(f"TMPDIR={temporary!r}: {error}") from error


_AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


def _proxies(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The usual variables: a lower-case name wins, and an empty one switches its proxy off."""
    found = []
    for name in ("http", "https", "all", "no"):
        # Under CGI, HTTP_PROXY is what the client of that program wrote into a header.
        loud = "" if name == "http" and "REQUEST_METHOD" in environ else environ.get(f"{name.upper()}_PROXY", "")
        value = environ.get(f"{name}_proxy", loud).strip()
        if value:
            found.append((name, value))
    return tuple(found)


def _netrc(environ: Mapping[str, str]) -> Path | None:
    home = _home(environ)
    return Path(environ["NETRC"]) if environ.get("NETRC") else home / ".netrc" if home else None


def _container_logins(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """As containers-auth.json(5) has it: one file that is named, or those of podman and of docker."""
    if environ.get("REGISTRY_AUTH_FILE"):
        return (Path(environ["REGISTRY_AUTH_FILE"]),)
    home, runtime, docker = _home(environ), environ.get("XDG_RUNTIME_DIR"), environ.get("DOCKER_CONFIG")
    found = [Path(runtime, "containers", "auth.json")] if runtime else []
    found += [home / ".config" / "containers" / "auth.json"] if home else []
    found += [Path(docker, "config.json")] if docker else [home / ".docker" / "config.json"] if home else []
    return tuple(found)


def _fill_directories(values: dict[str, Any], origins: dict[str, str], environ: Mapping[str, str]) -> None:
    cache, origin = _cache_home(environ)
    for name, default in (
        ("store", cache / "store"),
        ("workspace", cache / "workspace"),
        ("generated", cache / "generated"),
    ):
        if name not in values:
            values[name] = default
            origins[name] = origin
    values.setdefault("lock", None)


def _if_there(home: Path | None, name: str) -> Path | None:
    path = home / name if home else None
    return path if path is not None and os.path.isfile(path) else None  # Path.is_file fails in another's home


assert {f.name for f in fields(Settings)} >= set(_BY_FIELD)
