"""URLs of mirrors, redirects and proxies: taken apart once, or refused with a reason."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urljoin, urlsplit

from kartifacts.config import Settings
from kartifacts.errors import SourceError

PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
_SAFE = "/%:@!$&'()*+,;=~"


@dataclass(frozen=True)
class Address:
    """An http or https URL."""

    scheme: str
    host: str  # in lower case and ASCII; an IPv6 address without its brackets
    port: int
    target: str  # path and query, as they go into a request
    login: tuple[str, str] | None = None  # user and password

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Without the login."""
        return f"{self.scheme}://{self.authority}{self.target}"


def shown(url: str) -> str:
    """`url` for messages: no credentials, and no query, which may be a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return repr(url.rpartition("@")[2].partition("?")[0][:200])
    host = parts.netloc.rpartition("@")[2]
    scheme = f"{parts.scheme}:" if parts.scheme else ""
    slashes = "//" if url[len(scheme) :].startswith("//") else ""  # also where no host follows
    return f"{scheme}{slashes}{host}{parts.path}{'?…' * bool(parts.query)}"[:500]


def parse(url: str) -> Address:
    """Take a URL apart.

    Raises:
        ValueError: it is none that can be asked; the reason does not repeat the URL.
    """
    if re.search(r"[\x00-\x20\x7f]", url):
        raise ValueError("it has a space or a control character in it")
    parts = urlsplit(url)
    if parts.scheme not in PORTS:
        raise ValueError("it does not begin with http:// or https://")
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    if not 1 <= port <= 65535:
        raise ValueError(f"there is no port {port}")
    target = quote(parts.path, safe=_SAFE) or "/"
    if parts.query:
        target += "?" + quote(parts.query, safe=_SAFE + "?")
    login = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return Address(parts.scheme, _host(parts.hostname or ""), port, target, login)


def joined(address: Address, location: str) -> Address:
    """Where a redirect leads; raises ValueError as `parse` does."""
    return parse(urljoin(address.url, quote(location.strip(), safe=_SAFE + "?#[]")))


def redirected(address: Address, location: str) -> Address:
    """Where a redirect leads.

    Raises:
        SourceError: nowhere that may be asked.
    """
    try:
        target = joined(address, location)
    except ValueError as error:
        raise SourceError(
            f"{shown(address.url)} redirects to {shown(location)!r}, which is refused: {error}", permanent=True
        ) from error
    if address.scheme == "https" != target.scheme:
        raise SourceError(
            f"{shown(address.url)} redirects to {shown(target.url)!r}, which is refused: it is not encrypted",
            permanent=True,
        )
    return target


def proxy_for(address: Address, settings: Settings) -> Address | None:
    """The proxy by which an address is reached, if there is one.

    Raises:
        SourceError: the proxy that the environment names cannot be used.
    """
    proxies = dict(settings.proxies)
    text = proxies.get(address.scheme) or proxies.get("all")
    if not text or _is_exempt(address, proxies.get("no", "")):
        return None
    try:
        proxy = parse(text if "://" in text else f"http://{text}")
    except ValueError as error:
        raise SourceError(
            f"{shown(address.url)} is to be reached by the proxy {shown(text)!r}, which cannot be used: {error}",
            permanent=True,
            hint="see HTTPS_PROXY, HTTP_PROXY and NO_PROXY",
        ) from error
    # No proxy elsewhere reaches this machine's own loopback, so a proxy for everything is not meant for it.
    return None if _is_loopback(address.host) and not _is_loopback(proxy.host) else proxy


def _host(name: str) -> str:
    if ":" in name:
        return str(ipaddress.IPv6Address(name.partition("%")[0]))
    try:
        ascii_name = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError("its host is not a name") from None
    if not _HOST.fullmatch(ascii_name):
        raise ValueError("its host is not a name" if name else "it names no host")
    return ascii_name


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_exempt(address: Address, names: str) -> bool:
    """Whether NO_PROXY lists a host: by name, as part of a domain, with its port, as an IP address or a network."""
    for name in re.split(r"[\s,]+", names.lower()):
        if name == "*":
            return True
        if name and _matches(address, name):
            return True
    return False


def _matches(address: Address, name: str) -> bool:
    try:
        return ipaddress.ip_address(address.host) in ipaddress.ip_network(name.strip("[]"), strict=False)
    except ValueError:
        pass
    host, colon, port = name.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        if int(port) != address.port:
            return False
        name = host
    domain = name.strip("[]").removeprefix("*").lstrip(".")
    return bool(domain) and (address.host == domain or address.host.endswith("." + domain))
