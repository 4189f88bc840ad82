"""Lattica: a node of a peer-to-peer network that holds blocks, and nothing else of it.

Of the package `lattica` only its compiled core is imported. The Python module of that name is not: its value
store and its calls to peers unpickle bytes that any peer may have sent, which would let that peer run code
here. Blocks are plain bytes, asked for by the SHA-256 in their address; a receiver checks it against
the manifest as well.
"""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.system.ports import is_free

VERSION = "1.0.21"


def missing_reason() -> str | None:
    """Return why no node can be started here, as a sentence; None where one can."""
    try:
        import lattica_python_core  # noqa: F401
    except ImportError:
        return (
            f"the package lattica is missing; `pip install --no-deps lattica=={VERSION}` installs it without "
            "the module asyncio of 2013 that it asks for"
        )
    return None


def multiaddress(host: str, port: int) -> str:
    """Return where a peer listens, by the address of the host or by its name.

    >>> multiaddress("127.0.0.1", 7801), multiaddress("::1", 7801)
    ('/ip4/127.0.0.1/tcp/7801', '/ip6/::1/tcp/7801')

    Raises:
        UnavailableError: when the host's name is not known.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.gethostbyname(host))
        except OSError as error:
            raise UnavailableError(f"the name {host} is not known here: {error}") from None
    return f"/ip{address.version}/{address}/tcp/{port}"


class LatticaNode:
    """A peer. It serves the blocks that it holds to all that ask. Methods block; any thread may call them."""

    def __init__(self, folder: Path, host: str, port: int, bootstraps: Sequence[str] = ()) -> None:
        """Start the peer.

        Args:
            folder: keeps its blocks.
            host: address of this machine, or a name of it, to listen on.
            port: 0 picks a free one.
            bootstraps: multiaddresses of peers to begin with, ``.../p2p/<peer id>``.

        Raises:
            ConfigError: when the package is missing, or the port cannot be listened on.
            UnavailableError: when the host's name is not known.
        """
        if (reason := missing_reason()) is not None:
            raise ConfigError(reason)
        if port and not is_free(port, host):  # the core would go on without listening
            raise ConfigError(
                f"no Lattica peer can listen on {host}:{port}: another process has that port, or the host is "
                "not this machine's; set another broadcast.lattica_port"
            )
        from lattica_python_core import LatticaSDK

        folder.mkdir(parents=True, exist_ok=True)
        # Workers are told of each other by the run; no one else on the network is asked.
        settings = {
            "listen_addrs": [multiaddress(host, port)],
            "storage_path": str(folder),
            "with_mdns": False,
            "with_upnp": False,
            **({"bootstrap_nodes": list(bootstraps)} if bootstraps else {}),
        }
        try:
            self._core = LatticaSDK(settings)
        except Exception as error:  # the core raises whatever came up
            raise ConfigError(f"no Lattica peer can listen on {host}:{port}: {error}") from error
        self.peer_id = str(self._core.peer_id())

    def put(self, data: bytes) -> str:
        """Hold a block and return its address; UnavailableError when the peer cannot keep it."""
        with _unavailable("the Lattica peer cannot keep a block"):
            return str(self._core.put_block(data))

    def get(self, address: str, timeout_s: int) -> bytes:
        """Return a block from a peer that has it; from then on this peer has it too.

        Raises:
            UnavailableError: when none comes within `timeout_s` whole seconds.
        """
        with _unavailable(f"no Lattica peer gave block {address}"):
            return bytes(self._core.get_block(address, timeout_secs=timeout_s)[1])

    def remove(self, address: str) -> None:
        """Hold a block no more; one that is not held is no error. UnavailableError when that fails."""
        with _unavailable(f"the Lattica peer cannot drop block {address}"):
            self._core.remove_block(address)

    def close(self) -> None:
        """Leave the network."""
        self._core.close()


@contextmanager
def _unavailable(what: str) -> Iterator[None]:
    """Translate whatever the core raises."""
    try:
        yield
    except Exception as error:
        raise UnavailableError(f"{what}: {error}") from error
