"""sshd: hosts that are reached by ssh, each an `sshd` of its own on a port of this machine."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path

from antiphon.system.ports import free_ports

START_S = 60.0


def find_sshd() -> str | None:
    """Return the path of `sshd`; None where it is not installed."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@dataclass
class SshHosts:
    """Hosts, and how they are reached."""

    hosts: list[str]
    """USER@127.0.0.1:PORT each."""
    options: list[str]
    """Arguments of `ssh` that let it in."""
    commands: list[list[str]] = field(default_factory=list)
    servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def kill(self, number: int) -> None:
        """End a host's `sshd`; what runs there goes on."""
        self.servers[number].kill()
        self.servers[number].wait()

    def serve(self, number: int) -> None:
        """Serve a host again."""
        self.servers[number] = subprocess.Popen(
            self.commands[number], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


@contextmanager
def ssh_hosts(folder: Path, count: int, refusing: int = 0) -> Iterator[SshHosts]:
    """Serve `count` hosts, and name `refusing` more where nothing listens."""
    sshd = find_sshd()
    assert sshd is not None, "openssh-server is not installed"
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where a server of root gives up its rights
    ports = free_ports(count + refusing)
    found = SshHosts(
        [f"{getuser()}@127.0.0.1:{port}" for port in ports],
        [
            *("-i", str(folder / "user"), "-o", "StrictHostKeyChecking=no", "-F", "none"),
            *("-o", f"UserKnownHostsFile={folder / 'known'}", "-o", "LogLevel=ERROR"),
        ],
    )
    try:
        for port in ports[:count]:
            words = [sshd, "-D", "-e", "-f", "/dev/null", "-p", str(port), "-h", str(folder / "host")]
            for option in (
                *("ListenAddress=127.0.0.1", "UsePAM=no", "StrictModes=no", "PidFile=none"),
                *("PasswordAuthentication=no", f"AuthorizedKeysFile={folder / 'authorized'}"),
            ):
                words += ["-o", option]
            log = (folder / f"sshd-{port}.log").open("wb")
            found.commands.append(words)
            found.servers.append(subprocess.Popen(words, stdout=log, stderr=log))
        for host in found.hosts[:count]:
            _wait_for(host, found.options)
        yield found
    finally:
        for server in found.servers:
            server.kill()
            server.wait()


def _wait_for(host: str, options: list[str]) -> None:
    address, _, port = host.partition(":")
    deadline = time.monotonic() + START_S
    while subprocess.run(["ssh", *options, "-p", port, address, "true"], capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise SystemExit(f"no sshd answers at {host}")
        time.sleep(0.1)
