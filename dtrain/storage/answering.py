"""Whether a server of HTTP answers at all, within a few seconds."""

import socket
import ssl
from threading import Event, Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 4.0
"""Time limit for any answer, including name resolution."""


def silence(url: str) -> str:
    """Why a server does not answer within SECONDS; empty if it does, or if that is unknown. For a proxy, only whether
    it accepts connections.
    """
    server = urlsplit(url)
    proxies, host = getproxies(), server.hostname or ""
    proxy = proxies.get(server.scheme) or proxies.get("all")
    proxied = bool(proxy) and not proxy_bypass(host)
    try:
        asked = urlsplit(proxy or "") if proxied else server
        usual = {"http": 80, "https": 443}[asked.scheme]
        port = asked.port or usual
    except (KeyError, ValueError):  # another protocol or not a URL: the client reports it
        return ""
    reasons, over = list[str](), Event()

    def ask(address: tuple[str, int]) -> None:
        try:
            with socket.create_connection(address, timeout=SECONDS) as connection:
                reasons.append("" if proxied else _talk(connection, host, tls=asked.scheme == "https"))
        except OSError as error:
            reasons.append("timed out" if isinstance(error, TimeoutError) else error.strerror or str(error))
        if "" in reasons:
            over.set()

    def ask_all() -> None:
        try:
            addresses = {
                (str(entry[4][0]), port) for entry in socket.getaddrinfo(asked.hostname, port, type=socket.SOCK_STREAM)
            }
        except (OSError, UnicodeError) as error:
            addresses = set()
            reasons.append(getattr(error, "strerror", None) or str(error))
        asking = [Thread(target=ask, args=(address,), daemon=True) for address in addresses]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        over.set()

    # in a thread: resolvers have timeouts of their own, and other addresses may answer where one does not
    Thread(target=ask_all, daemon=True).start()
    over.wait(SECONDS)
    return "" if "" in reasons else (*reasons, "timed out")[0]


def _talk(connection: socket.socket, host: str, *, tls: bool) -> str:
    """Why a server accepts a connection but sends nothing. Raises OSError."""
    try:
        spoken = ssl._create_unverified_context().wrap_socket(connection, server_hostname=host) if tls else connection
        spoken.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return "" if spoken.recv(1) else "it closes the connection"
    except ssl.SSLEOFError:
        return "it closes the connection"
    except ssl.SSLError:  # it did answer; the client judges the certificate
        return ""
