"""Served: `antiphon door` as a process on a home of its own, and programs of clients that speak to it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from antiphon.benchmarks.parts.door.environments import EXAMPLES
from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS, journal_events, scratch_home, tail
from antiphon.system.ports import free_ports
from antiphon.system.processes import PARENT_VARIABLE

CONFIG = EXAMPLES / "chain-sum.yaml"
READY_S = 120.0
CLIENT_S = 3000.0
"""Longest program of a client."""
STOP_S = 60.0
KEY = Path("door") / "key"
"""In the home."""
NAMES = ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-4B-Instruct-2507")
"""Listed models that the door answers to; the first one's renderer stops at text, the other's at a token."""


@dataclass(frozen=True, slots=True)
class DoorStats:
    """What a door says of itself, since it began."""

    calls: int
    unserved: Mapping[str, int]
    """By call; these were answered with 404."""
    polls: int
    futures: int
    """Those that were answered."""
    cpu_s: float

    @property
    def polls_per_future(self) -> float:
        return self.polls / max(1, self.futures)


class Door:
    """A door on a fixed port, which can be killed and goes on where it stopped."""

    def __init__(self, home: Path, overrides: Sequence[str], config: Path = CONFIG) -> None:
        """Choose a port; nothing is started."""
        self.home, self.log = home, home / "door.log"
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        names = f"door.base_models=[{', '.join(NAMES)}]"
        words = ["door", str(config), names, *overrides, "--port", str(self.port)]
        self._command = [*DEFAULT_SIGNALS, sys.executable, "-P", "-m", "antiphon.cli.app", *words]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            SystemExit: when it does not, with its last lines.
        """
        environment = {
            **os.environ,
            "ANTIPHON_HOME": str(self.home),
            PARENT_VARIABLE: str(os.getpid()),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + READY_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the door did not start ({self.process.poll()})\n{tail(self.log, 40)}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return whether it serves."""
        try:
            self._get("/antiphon/stats")
        except (OSError, FileNotFoundError):  # URLError and time-outs are OSError
            return False
        return True

    def stats(self) -> DoorStats:
        """Return what it says of itself."""
        said = self._get("/antiphon/stats")
        return DoorStats(
            calls=sum(said["calls"].values()),
            unserved=said["unserved"],
            polls=said["polls"],
            futures=said["futures"],
            cpu_s=said["cpu_s"],
        )

    def kill(self) -> None:
        """Kill it (`kill -9`)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_S)

    def stop(self) -> None:
        """Ask it to end, and end it where it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def services(self) -> dict[str, int]:
        """Return the process number of each service that is ready, by its name, over all runs."""
        found = {}
        for path in self.home.glob("runs/*/services/*.json"):
            with suppress(FileNotFoundError, json.JSONDecodeError, KeyError):
                pid = int(json.loads(path.read_text())["pid"])
                if psutil.pid_exists(pid):
                    found[path.stem] = pid
        return found

    def runs(self) -> list[Path]:
        """Return the folders of the runs that clients made, oldest first."""
        return sorted(self.home.glob("runs/*/"), key=lambda folder: folder.stat().st_ctime)

    def weights(self, run: Path | None = None) -> list[str]:
        """Return the digest of the weights after each step of a run, by default of the newest one."""
        events = journal_events((run or self.runs()[-1]) / "journal.db")
        return [body["weights_digest"] for kind, body in events if kind == "step.committed"]

    def environment(self) -> dict[str, str]:
        """Return what a client's environment has for it."""
        spared = {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
        key = (self.home / KEY).read_text().strip()
        return {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1", **spared}

    def _get(self, path: str) -> dict[str, Any]:
        key = (self.home / KEY).read_text().strip()
        request = urllib.request.Request(self.url + path, headers={"X-API-Key": key})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10.0) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def served(*overrides: str, config: Path = CONFIG) -> Iterator[Door]:
    """Serve a fresh home until the end of the block."""
    with scratch_home() as home:
        door = Door(home, overrides, config)
        door.start()
        try:
            yield door
        finally:
            door.stop()


def run_client(
    python: Path, script: Path, words: Sequence[str], door: Door, url: str = ""
) -> list[dict[str, Any]]:
    """Run a client's program to its end and return what it printed, of lines of JSON.

    Args:
        python: its interpreter.
        script: the program, a file.
        words: its arguments.
        door: that it speaks to.
        url: of what stands between, if anything.

    Raises:
        SystemExit: when it failed or took too long, or the door went for good; with the last words of both.
    """
    environment = {**os.environ, **door.environment(), "PYTHONPATH": ""}
    if url:
        environment["TINKER_BASE_URL"] = url
    output, errors = (door.home / f"{script.stem}.{name}" for name in ("out", "err"))
    with output.open("wb") as out, errors.open("wb") as err:
        client = subprocess.Popen(
            [str(python), str(script), *words], cwd=door.home, env=environment, stdout=out, stderr=err
        )
    deadline = away_s = time.monotonic() + CLIENT_S
    while client.poll() is None and time.monotonic() < min(deadline, away_s):
        time.sleep(0.1)
        if door.process is not None and door.process.poll() is None:
            away_s = time.monotonic() + READY_S  # a client waits for a door that went, for ever if need be
    status = client.poll()
    if status is None:
        client.kill()
        client.wait(STOP_S)
    if status != 0:
        said = f"{tail(output)}\n{tail(errors, 40)}\nthe door:\n{tail(door.log, 30)}"
        raise SystemExit(f"{script.name} ended with {status}\n{said}")
    found = []
    for line in output.read_text().splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
    return found


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread during the block, at whose end its event is set and its error raised."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(work, over)
        try:
            yield
        finally:
            over.set()
        doing.result()
