"""Ports that are known before the server that listens there has started."""

import socket

LOOPBACK = "127.0.0.1"


def hold_port(host: str = "") -> socket.socket:
    """A free port of every interface that nobody else is given while the socket lives.

    It does not listen, so a server that sets SO_REUSEADDR (uvicorn, torch's store) binds it too.
    ``host`` says the family: IPv6 for an address of it, else IPv4.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def host_and_port(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
