"""Ports that a server is told before it listens: free, different, and not those of outgoing connections."""

import os
import socket
import urllib.request

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.system import ports


def test_ports_are_free_different_and_outside_of_the_systems_range() -> None:
    found = ports.free_ports(20)
    assert len(set(found)) == 20 and all(port in ports.OFFERED for port in found)
    assert all(ports.is_free(port) for port in found)


def test_a_port_that_somebody_listens_on_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ports.free_port()
    monkeypatch.setattr(ports, "OFFERED", range(taken, taken + 1))
    with socket.socket() as listening:
        listening.bind((ports.LOOPBACK, taken))
        listening.listen()
        assert not ports.is_free(taken)
        with pytest.raises(UnavailableError, match="no 1 free ports"):
            ports.free_port()
    assert ports.free_port() == taken


@pytest.mark.parametrize(
    ("given", "kept"), [({}, []), ({"no_proxy": "a.org, b"}, ["a.org", "b"]), ({"NO_PROXY": "c"}, ["c"])]
)
def test_calls_to_the_own_machine_know_no_proxy(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], kept: list[str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"http_proxy": "http://127.0.0.1:9", **given}.items():
        monkeypatch.setenv(name, value)
    ports.spare_proxies()
    ports.spare_proxies()
    assert os.environ["no_proxy"].split(",")[: len(kept)] == kept
    assert os.environ["NO_PROXY"].split(",").count("127.0.0.1") == 1
    assert urllib.request.proxy_bypass("127.0.0.1") and not urllib.request.proxy_bypass("antiphon.org")


def test_a_connection_is_its_users() -> None:
    with (
        socket.create_server((ports.LOOPBACK, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert ports.owner_of_connection(client.getsockname()[1]) == os.getuid()
    assert ports.owner_of_connection(ports.free_port()) is None
