"""PostgreSQL for a while: a real server on a scratch folder, a unix socket and loopback; gone at the end.

The server refuses to run as root, so its programs run as another user of the machine then.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from antiphon.system.ports import free_port

START_S = 60
LIMIT_S = 120.0


@dataclass(frozen=True)
class PostgresServer:
    """A server that runs; its only user may do everything."""

    folder: Path
    """Holds the data and the socket."""
    programs: Path
    """Folder of initdb and pg_ctl."""
    port: int
    """On loopback, and part of the socket's name."""
    owner: str | None
    """Whom the programs run as when the tests run as root, which the server refuses to be."""
    network: str = ""
    """Addresses besides loopback from which it may be reached."""

    @property
    def url(self) -> str:
        """Return what coordinator.journal_url takes."""
        return f"postgresql://tester@/postgres?host={self.folder}&port={self.port}"

    @property
    def tcp_url(self) -> str:
        """Return the same over loopback, as other machines reach a server."""
        return f"postgresql://tester@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start and wait until it answers."""
        listen = "*" if self.network else "127.0.0.1"
        options = f"-p {self.port} -c listen_addresses={listen} -c max_connections=40"
        options += f" -c unix_socket_directories={self.folder}"
        self._run(
            "pg_ctl", "-o", options, *f"-D {self.folder}/data -l {self.folder}/log".split(), "-w", "start"
        )

    def stop(self, mode: str = "fast") -> None:
        """Stop; `immediate` is what a crash is."""
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-m", mode, "stop")

    def create(self) -> None:
        """Make the data folder."""
        self._run("initdb", *f"-D {self.folder}/data -U tester -A trust --no-sync -E UTF8".split())
        if self.network:
            with (self.folder / "data" / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {self.network} trust\n")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            user=self.owner,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "PGCTLTIMEOUT": str(START_S)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{program}: {done.stderr.decode()}"


def find_initdb() -> str | None:
    """Return the path of PostgreSQL's `initdb`, which Debian keeps outside the search path, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return shutil.which("initdb") or (str(found[-1]) if found else None)


@contextmanager
def postgres_server(initdb: str, network: str = "") -> Iterator[PostgresServer]:
    """Run a server until the end of the block.

    Args:
        initdb: path of that program; the others lie beside it.
        network: addresses from which it may be reached as well, such as 10.231.7.0/30.
    """
    owner = None
    if os.geteuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        owner = "postgres" if "postgres" in names else "nobody"
    # A socket's path may not be long, so the tests' own folders will not do.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    server = PostgresServer(folder, Path(initdb).resolve().parent, free_port(), owner, network)
    try:
        if owner is not None:
            shutil.chown(folder, owner)
        folder.chmod(0o755)
        server.create()
        server.start()
        try:
            yield server
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
