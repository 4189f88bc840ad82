"""What many runs of tests share: a worker process that stands ready, and a Prefect server.

A worker takes 18 CPU seconds to start, a server 5, and most runs ask nothing of them that their start has a
part in. Those that do (which kill a worker, or look at what a home's own server keeps) have their own.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.runs.servers.prefect_server import begin_prefect_server, client_environment
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.system import collecting
from tests.support.main_job import PROJECT, QUICKSTART, Job, environment, make_home

START_S = 170.0
"""Longest wait for the server."""


class Standing:
    """The two of them, until it is closed; each is started once it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.home = make_home(folder)
        self._server: Any = None
        self._worker: subprocess.Popen[str] | None = None

    @property
    def prefect(self) -> dict[str, str]:
        """The variables under which a run, whatever its home, uses the server."""
        if self._server is None:
            self._server = begin_prefect_server(self.home, 0, self.home / "server.log")
            self._server.wait_healthy(START_S)
        return client_environment(self._server.url, self.home)

    @property
    def database(self) -> Path:
        """What the server keeps."""
        return self.home / "prefect" / "prefect.db"

    def start(self, home: Path, overrides: Sequence[str], config: Path = QUICKSTART) -> Job:
        """Start a job that uses the two, and have the worker leave the job before."""
        job = Job(home, [*overrides, "rollout.workers=0"], config, self.prefect)
        try:
            self._serve(job)
        except BaseException:
            job.close()
            raise
        return job

    def _serve(self, job: Job) -> None:
        if self._worker is None or self._worker.poll() is not None:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", collecting.__name__, "tests.support.standing_worker"],
                cwd=PROJECT,
                env=child_environment(1, environment(self.home)),
                stdin=subprocess.PIPE,
                text=True,
            )
        job.when(lambda: any((job.home / "runs").glob("*/services/coordinator.json")))
        port = json.loads((job.run_dir / "services" / "coordinator.json").read_text())["port"]
        order = {"coordinator": f"127.0.0.1:{port}", "run": job.run_dir.name, "run_dir": str(job.run_dir)}
        assert self._worker.stdin is not None
        print(json.dumps(order), file=self._worker.stdin, flush=True)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()  # it holds nothing that is to be kept
            self._worker.wait(60.0)
        if self._server is not None:
            self._server.stop()
