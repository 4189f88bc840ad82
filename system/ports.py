"""Ports: which ones a server may be given that gets its port before it listens.

The system takes the ports of outgoing connections from a range of its own. A port of that range can
be taken by the time a server that was given it has started, so those below it are offered.
"""

import os
import secrets
import socket

from antiphon.core.errors import UnavailableError

LOOPBACK = "127.0.0.1"
ROLLOUTS_PORT = 7780
"""Where `antiphon browse` listens unless told otherwise, and where links of reports lead."""
OFFERED = range(20_000, 32_000)
"""Below Linux's usual range for outgoing connections, 32768 to 60999."""


def spare_proxies() -> None:
    """Have this process and those that it starts reach their own machine without a proxy."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    own = ("localhost", LOOPBACK, "::1", socket.gethostname())
    spared = ",".join(dict.fromkeys([*names, *own]))
    os.environ.update({"no_proxy": spared, "NO_PROXY": spared})


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return this many different ports that were free a moment ago, chosen at random.

    Raises:
        UnavailableError: when there are not this many.
    """
    found: list[int] = []
    for port in secrets.SystemRandom().sample(OFFERED, len(OFFERED)):
        if is_free(port, host):
            found.append(port)
        if len(found) == count:
            return found
    raise UnavailableError(
        f"{host} has no {count} free ports in {OFFERED.start}..{OFFERED.stop - 1}; name ports in the command"
    )


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that was free a moment ago."""
    (port,) = free_ports(1, host)
    return port


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server could listen on a port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def owner_of_connection(port: int) -> int | None:
    """Return the user id of the process that is connected from a port of loopback; None where none is."""
    with open("/proc/net/tcp", encoding="ascii") as lines:
        for words in map(str.split, lines):
            if words[1] == f"0100007F:{port:04X}" and words[3] == "01":  # established
                return int(words[7])
    return None
