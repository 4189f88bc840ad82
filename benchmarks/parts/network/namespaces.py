"""Namespaces: hosts of one machine with shaped links, gone at the end whatever happens.

A fast network is a bridge, with a veth pair to each host and a token bucket (tbf) for what the host sends. A
far one joins TUN devices by a router of our own (`router`), which delays and loses packets, since the kernel
may lack netem. What a killed benchmark left is removed when the next one begins.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

PREFIX = "antiphon-bench-"
CONGESTION = ("cubic", "reno")
"""The first that a namespace may choose is set: a machine's own default may be one that takes no notice of
lost packets, and users have cubic. On short and slow links that is as fast as reno (RFC 9438, 4.3)."""
_QUEUE_MS = 100
_BURST_BYTES = 128 << 10
"""More than the 64 KiB that the kernel hands over at once, which are cut into packets otherwise: a network
card does that, and joins them again, without waking a process for each."""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace, or an address of this machine's loopback."""

    address: str
    namespace: str = ""
    device: str = "link0"

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)

    def sent_bytes(self) -> int:
        """Return the bytes that left over its link so far: headers, acknowledgements, repetitions."""
        if not self.namespace:
            return 0
        counter = f"/sys/class/net/{self.device}/statistics/tx_bytes"
        done = subprocess.run(self.command("cat", counter), capture_output=True, text=True, check=True)
        return int(done.stdout)


def missing() -> str | None:
    """Return why no such network can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found; install iproute2"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        _ip(f"netns add {name}")
        _ip(f"link add antiphon-try netns {name} type bridge")
        _shape(name, "lo", 1e6)
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@contextmanager
def network_of(
    uplinks: Sequence[float], delay_s: float = 0.0, loss: float = 0.0
) -> Iterator[tuple[list[Host], str]]:
    """Make hosts that reach each other, with a router that forwards where they are far from each other.

    Args:
        uplinks: of each host, bytes per second.
        delay_s: one way between any two hosts; 0 joins them by a bridge.
        loss: share of packets that are lost, where there is a delay.

    Yields:
        The hosts, and the congestion control of every one.
    """
    remove_leftovers()
    own = f"{PREFIX}{os.getpid()}"
    switch, congestion = f"{own}-switch", ""
    hosts = [
        Host(f"10.77.{number // 200}.{number % 200 + 1}", f"{own}-{number}") for number in range(len(uplinks))
    ]
    try:
        if not delay_s:
            _ip(f"netns add {switch}")
            _ip(f"-n {switch} link add bridge0 type bridge")
            _ip(f"-n {switch} link set bridge0 up")
        for number, (host, uplink) in enumerate(zip(hosts, uplinks, strict=True)):
            congestion = _add(host, uplink, "" if delay_s else switch, f"port{number}")
        with _routed(hosts, delay_s, loss) if delay_s else nullcontext():
            yield hosts, congestion
    finally:
        for name in (switch, *(host.namespace for host in hosts)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _add(host: Host, uplink: float, switch: str, port: str) -> str:
    """Make a host, on a switch or, without one, with a TUN device; return its congestion control."""
    space = host.namespace
    _ip(f"netns add {space}")
    _ip(f"-n {space} link set lo up")
    for congestion in CONGESTION:
        setting = f"net.ipv4.tcp_congestion_control={congestion}"
        if not subprocess.run(host.command("sysctl", "-qw", setting), capture_output=True).returncode:
            break
    if switch:
        _ip(f"-n {switch} link add {port} type veth peer name {host.device} netns {space}")
        _ip(f"-n {switch} link set {port} master bridge0 up")
    else:
        _ip(f"-n {space} tuntap add dev {host.device} mode tun")
    _ip(f"-n {space} addr add {host.address}/16 dev {host.device}")
    _ip(f"-n {space} link set {host.device} up")
    _shape(space, host.device, uplink)
    return congestion


@contextmanager
def _routed(hosts: Sequence[Host], delay_s: float, loss: float) -> Iterator[None]:
    """Forward between far hosts."""
    words = [f"{host.namespace}={host.address}" for host in hosts]
    command = [sys.executable, "-m", "antiphon.benchmarks.parts.network.router"]
    command += [str(delay_s), str(loss), "1", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as router:
        try:
            assert router.stdout is not None
            if not router.stdout.readline():  # it says so, or ends
                raise SystemExit("the router ended; what it says stands above")
            yield
        finally:
            router.kill()


def remove_leftovers() -> None:
    """Remove the namespaces of benchmarks that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name = line.split()[0] if line.strip() else ""
        if name.startswith(PREFIX):
            pid = name.removeprefix(PREFIX).partition("-")[0]
            if not Path(f"/proc/{pid}").exists():
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _shape(namespace: str, device: str, bytes_per_s: float) -> None:
    limits = f"rate {round(8 * bytes_per_s)}bit burst {_BURST_BYTES} latency {_QUEUE_MS}ms"
    _run(f"tc -n {namespace} qdisc add dev {device} root tbf {limits}")


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(command: str) -> None:
    subprocess.run(command.split(), capture_output=True, text=True, check=True)
