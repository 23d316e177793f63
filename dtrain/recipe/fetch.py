"""Rules for the addresses in a remote recipe: it may open public addresses and the host it came from, but no files of
this machine and no hosts of its network.

dtrain plan recipe=https://host/a.yaml      # data.path=/etc/passwd in it is refused, and so is http://169.254.169.254/
"""

import ipaddress
import re
import socket
import threading
import time
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dtrain.storage import web

OPENS = re.compile(
    r"(?:^|_)(?:paths?|files?|filenames?|folders?|dirs?|directory|roots?|urls?|uri|cache|location|sources?|glob|"
    r"init(?:_names)?|fork|teacher|checkpoint|ckpt|weights_file)$"
)
MAY_OPEN = re.compile(r"(?:^|_)(?:name|template)$")
"""Keys whose values may be the path of a file that is here, or else mean something else."""
NAMES = re.compile(r"(?:^|_)(?:tokenizer|name_or_path|repo|repo_id|processor)$")
"""Keys that take either a path or the name of something on a hub."""
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
BARE_NAME = re.compile(r"[\w-]+(/[\w-]+)?")
TEXT = re.compile(r"(?:^|_)(?:prompts?|text)$")
"""Keys whose values are only read as text."""
HERE = re.compile(r"\s*(?:[/~\\]|\.{1,2}(?:[/\\]|\s*$)|[A-Za-z]:[/\\])|.*[/\\]\.\.(?:[/\\]|$)", re.DOTALL)
"""A path that is absolute, begins with `.` or `~`, or contains `..`."""
SCHEME = re.compile(r"(?:(?<=^)|(?<=[\s,;|'\"(\[]))\s*([A-Za-z][A-Za-z0-9+.-]*)(::|://|:/)")
CHAIN = re.compile(r"://[^\s\[\]]*::|::[^\s\[\]]*://")
URL = re.compile(r"https?:[/\\]+[^\s,;|'\"]+", re.IGNORECASE)
ADDRESS = re.compile(r"(\d+\.\d+\.\d+\.\d+|\[[0-9A-Fa-f:.%]+\]|localhost)(:\d+)?(/.*)?", re.IGNORECASE)
INSIDE = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "home.arpa")
"""Top-level domains of private networks."""
LOOKUP_SECONDS = 2.0


def refusal(key: str, value: str, beside: str) -> str | None:
    """Why a recipe at the URL `beside` may not set `key` to `value`; None if it may."""
    last = next((name for name in reversed(key.lower().split(".")) if not name.isdecimal()), "")
    if TEXT.search(last):
        return None
    if CHAIN.search(value):
        return "cannot open one address through another"
    for match in SCHEME.finditer(value):
        scheme, sign = match.groups()
        if sign == "::" or (sign == ":/" and scheme.lower() not in ("http", "https")):
            return f"cannot open {scheme}:"
        if scheme.lower() not in web.REACHABLE and not _is_beside(value[match.start(1) :], beside):
            return f"cannot open {scheme}://"
    for url in URL.findall(value):
        if not _is_beside(url, beside) and is_private(host := _host(url)):
            return f"cannot reach {host or 'an address without a host'}, which is of this machine or its network"
    address = ADDRESS.fullmatch(value.strip())
    if address and is_private(address[1].strip("[]")) and not _is_beside(f"http://{value.strip()}", beside):
        return f"cannot reach {value.strip()}, which is of this machine or its network"
    if HERE.match(value):
        return "cannot open a file of this machine"
    if (
        "://" not in value
        and (OPENS.search(last) or NAMES.search(last))
        and _is_file_here(value, BARE_NAME if OPENS.search(last) else HUB_NAME)
    ):
        return "cannot open a file of this machine"
    if "://" not in value and MAY_OPEN.search(last) and _is_here(value):
        return "cannot open a file of this machine"
    return None


def is_private(host: str) -> bool:
    """Whether a host is this machine or belongs to a private network. A name is judged by its domain;
    `resolves_inside` looks it up.
    """
    name = host.strip(".").lower()
    number = _number(name)
    if number is not None:
        return not web.is_public(number)
    return "." not in name or name.endswith(tuple(f".{end}" for end in INSIDE))


def resolves_inside(hosts: Iterable[str]) -> list[str]:
    """The hosts whose names resolve to a private address. A name that does not resolve within LOOKUP_SECONDS counts as
    public.
    """
    inside = list[str]()

    def look_up(host: str) -> None:
        try:
            addresses = {ipaddress.ip_address(str(each[4][0]).split("%")[0]) for each in socket.getaddrinfo(host, None)}
        except (OSError, ValueError):
            return
        if not all(map(web.is_public, addresses)):
            inside.append(host)

    threads = [threading.Thread(target=look_up, args=(host,), daemon=True) for host in sorted(set(hosts))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LOOKUP_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return sorted(inside)


def servers(value: str) -> list[str]:
    """The http(s) URLs in a value, and the value itself if it is a URL."""
    return [each for each in (value, *URL.findall(value)) if urlsplit(each.strip()).netloc]


def named_hosts(value: str, beside: str) -> list[str]:
    """The host names in the URLs of a value, without IP addresses and the host of `beside`."""
    hosts = [_host(url) for url in URL.findall(value) if not _is_beside(url, beside)]
    return [host for host in hosts if host and _number(host) is None]


def _is_file_here(value: str, name: re.Pattern[str]) -> bool:
    return bool(value.strip()) and (not name.fullmatch(value) or _is_here(value))


def _is_here(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return True


def _host(url: str) -> str:
    """The host of a URL as a client reads it; empty if there is none."""
    try:
        parts = urlsplit(re.sub(r"^(https?):[/\\]+", r"\1://", url.strip(), flags=re.IGNORECASE))
        host = unicodedata.normalize("NFKC", unquote(parts.hostname or "")).replace("\u3002", ".")
    except ValueError:
        return ""
    return "" if "\\" in parts.netloc else host


def _is_beside(url: str, beside: str) -> bool:
    """Whether `url` has the host or bucket that the recipe came from."""
    try:
        one, other = urlsplit(url.strip()), urlsplit(beside)
    except ValueError:
        return False
    same = one.scheme == other.scheme and (one.netloc == other.netloc or one.scheme == "memory")
    return same and bool(one.netloc) and "::" not in url and "@" not in one.netloc


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host stands for, in every notation of inet_aton; None for a name."""
    try:
        return ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        pass
    if not re.fullmatch(r"(?:0x[0-9a-f]*|\d+)(?:\.(?:0x[0-9a-f]*|\d+)){0,3}", host):
        return None
    try:
        return ipaddress.ip_address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None
