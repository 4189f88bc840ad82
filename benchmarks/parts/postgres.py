"""PostgreSQL for a while: a real server on a scratch folder and a unix socket, no port; gone at the end.

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

START_S = 60
LIMIT_S = 120.0


@dataclass(frozen=True)
class PostgresServer:
    """A server that runs; its only user may do everything."""

    folder: Path
    """Holds the data and the socket."""
    programs: Path
    """Folder of initdb and pg_ctl."""
    owner: str | None
    """Whom the programs run as when the tests run as root, which the server refuses to be."""

    @property
    def url(self) -> str:
        """Return what coordinator.journal_url takes."""
        return f"postgresql://tester@/postgres?host={self.folder}"

    def start(self) -> None:
        """Start and wait until it answers."""
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c max_connections=40"
        self._run(
            "pg_ctl",
            "-D",
            f"{self.folder}/data",
            "-w",
            "-t",
            str(START_S),
            "-l",
            f"{self.folder}/log",
            "-o",
            options,
            "start",
        )

    def stop(self, mode: str = "fast") -> None:
        """Stop; `immediate` is what a crash is."""
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-t", str(START_S), "-m", mode, "stop")

    def create(self) -> None:
        """Make the data folder."""
        self._run(
            "initdb", "-D", f"{self.folder}/data", "-U", "tester", "-A", "trust", "--no-sync", "-E", "UTF8"
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            user=self.owner,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
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
def postgres_server(initdb: str) -> Iterator[PostgresServer]:
    """Run a server until the end of the block.

    Args:
        initdb: path of that program; the others lie beside it.
    """
    owner = None
    if os.geteuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        owner = "postgres" if "postgres" in names else "nobody"
    # A socket's path may not be long, so the tests' own folders will not do.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    server = PostgresServer(folder, Path(initdb).resolve().parent, owner)
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
